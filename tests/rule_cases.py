"""Flags that the tests of rules share."""

SHARD = "--parallelism.data_parallel_shard_degree"
REPLICATE = "--parallelism.data_parallel_replicate_degree"
TENSOR = "--parallelism.tensor_parallel_degree"
CONTEXT = "--parallelism.context_parallel_degree"
PIPELINE = "--parallelism.pipeline_parallel_degree"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
ASYNC = "--parallelism.enable_async_tensor_parallel"
RESHARD = "--parallelism.reshard_after_forward_mode"
FLOAT8 = "--quantize.dense.float8.enable"


ROUTED = ["--model.name", "qwen3_moe", "--model.flavor", "debug", "--tokenizer.path", "byte"]
