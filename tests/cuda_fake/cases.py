"""The runs whose steps are looked at: flags as a user types them, and the attention kernels that they take."""

import shlex
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        flags: of ``crius train``, beside a small model in bfloat16.
        attention: how often each kernel runs forward in a step of this rank; None where another may come to be better.
        ops: how often other operators run.
        splits: how often the host asks how many rows go where; each time it waits for what it sent last.
        may_wait: the host may have to know the loss before the update; else it looks at it one step later.
        is_slow: it repeats, joined in another way, what others show.
        needs_torch: oldest torch that can do it, and why; empty where every torch can.
    """

    flags: str
    attention: dict[str, int] | None = field(default_factory=lambda: {"cudnn": 2})
    ops: dict[str, int] = field(default_factory=dict)
    splits: int = 0
    may_wait: bool = False
    is_slow: bool = False
    needs_torch: tuple[str, str] = ("", "")

    @property
    def argv(self) -> list[str]:
        """The flags one by one."""
        return shlex.split(self.flags.replace("--p.", "--parallelism."))


FSDP = "--p.data_parallel_shard_degree 8"
ACCUMULATE = "--training.local_batch_size 1 --training.global_batch_size 16"
HSDP = f"--p.data_parallel_replicate_degree 2 --p.data_parallel_shard_degree 4 {ACCUMULATE}"
FLOAT8 = f"{FSDP} --quantize.dense.float8.enable --quantize.dense.auto_filter off"
PIPELINE = "--p.pipeline_parallel_degree 2 --p.data_parallel_shard_degree 2 --training.local_batch_size 1"
CONTEXT = "--p.context_parallel_degree 2 --p.data_parallel_shard_degree 2"
SELECTIVE = "--activation_checkpoint.mode selective --activation_checkpoint.selective_option"
DOCUMENT = "--model.attention_mask document"
WINDOWS = """--model.words '{"pattern": [{"window": 32}, {"positions": false}]}'"""
FLOAT32 = "--training.mixed_precision_param float32"
EXPERTS = "--model.name qwen3_moe"
GROUPED = {"_grouped_mm": 3 * 6}
"""Forward and two gradients of three stacked weights in each of two blocks."""
MATMULS = 3 * 14  # forward and two gradients of seven linear layers in each of two blocks

CASES = {
    "one_rank": Case(""),
    "fsdp8": Case(FSDP),
    "ddp8": Case("--p.data_parallel_replicate_degree 8 --p.data_parallel_shard_degree 1"),
    "hsdp2x4_accumulating": Case(HSDP, {"cudnn": 4}),
    "accumulation_deferred": Case(f"{FSDP} {ACCUMULATE} --training.gradient_sync deferred", {"cudnn": 4}),
    "accumulation_immediate": Case(f"{HSDP} --training.gradient_sync immediate", {"cudnn": 4}),
    "reshard_never": Case(f"{FSDP} {ACCUMULATE} --p.reshard_after_forward_mode never", {"cudnn": 4}),
    "reshard_to_4": Case(f"{FSDP} --p.reshard_after_forward_mode 4"),
    "tp4_fsdp2": Case("--p.tensor_parallel_degree 4 --p.data_parallel_shard_degree 2"),
    "tp8_with_4_key_value_heads": Case("--p.tensor_parallel_degree 8 --p.data_parallel_shard_degree 1", is_slow=True),
    "cp2_all_gather": Case(CONTEXT, None),
    "cp2_ulysses": Case(f"{CONTEXT} --p.context_parallel_method ulysses"),
    "cp2_tp2_fsdp2": Case(f"{CONTEXT} --p.tensor_parallel_degree 2", None, is_slow=True),
    "pipeline_1f1b": Case(PIPELINE, {"cudnn": 4}),
    "pipeline_interleaved": Case(
        f"{PIPELINE} --p.pipeline_parallel_schedule interleaved_1f1b --model.num_layers 4", {"cudnn": 8}
    ),
    "pipeline_zero_bubble": Case(
        f"{PIPELINE} --p.pipeline_parallel_schedule interleave_zero_bubble --model.num_layers 4",
        {"cudnn": 8},
        is_slow=True,
    ),
    "recompute_full": Case(f"{FSDP} --activation_checkpoint.mode full", {"cudnn": 4}),
    "recompute_operators": Case(f"{FSDP} {SELECTIVE} op"),
    "recompute_every_second_layer": Case(f"{FSDP} {SELECTIVE} 2", {"cudnn": 3}),
    "document_mask": Case(f"{FSDP} {DOCUMENT}", {"varlen": 2}),
    "document_mask_accumulating": Case(f"{HSDP} {DOCUMENT}", {"varlen": 4}),
    "document_mask_pipeline": Case(f"{PIPELINE} {DOCUMENT}", {"varlen": 4}),
    "document_mask_tp4": Case(
        f"--p.tensor_parallel_degree 4 --p.data_parallel_shard_degree 2 {DOCUMENT}", {"varlen": 2}, is_slow=True
    ),
    "document_mask_recompute_full": Case(
        f"{FSDP} {DOCUMENT} --activation_checkpoint.mode full", {"varlen": 4}, is_slow=True
    ),
    "document_mask_recompute_operators": Case(f"{FSDP} {DOCUMENT} {SELECTIVE} op", {"varlen": 2}),
    "windows": Case(f"{FSDP} {WINDOWS}", {"varlen": 1, "flash": 1}),
    "windows_document_mask": Case(f"{FSDP} {DOCUMENT} {WINDOWS}", {"varlen": 2}, is_slow=True),
    "windows_pipeline": Case(f"{PIPELINE} {WINDOWS}", {"varlen": 4}, is_slow=True),
    "document_mask_float32": Case(f"{FSDP} {DOCUMENT} {FLOAT32}", {"efficient": 2}, is_slow=True),
    "cp2_document_mask": Case(f"{CONTEXT} {DOCUMENT}", {"efficient": 4}, is_slow=True),
    "float32": Case(f"{FSDP} {FLOAT32}", {"efficient": 2}),
    "experts": Case(EXPERTS, ops=GROUPED),
    "experts_fsdp8": Case(f"{EXPERTS} {FSDP}", ops=GROUPED, is_slow=True),
    "experts_ep4_fsdp2": Case(f"{EXPERTS} {FSDP} --p.expert_parallel_degree 4", ops=GROUPED, splits=2),
    "experts_ep4_recompute_full": Case(
        f"{EXPERTS} {FSDP} --p.expert_parallel_degree 4 --activation_checkpoint.mode full",
        {"cudnn": 4},
        {"_grouped_mm": 24},
        splits=4,
        is_slow=True,
    ),
    "experts_tp2_ep4": Case(
        f"{EXPERTS} --p.tensor_parallel_degree 2 --p.data_parallel_shard_degree 4 --p.expert_parallel_degree 4",
        ops=GROUPED,
        splits=2,
        is_slow=True,
    ),
    "bfloat16_weights": Case(f"{FSDP} --training.dtype bfloat16"),
    "muon": Case(f"{FSDP} --optimizer.name muon"),
    "muon_tp2": Case(
        "--p.data_parallel_shard_degree 4 --p.tensor_parallel_degree 2 --optimizer.name muon", is_slow=True
    ),
    "bfloat16_states": Case(f"{FSDP} --optimizer.state_dtype bfloat16"),
    "8bit_states": Case(f"{FSDP} --optimizer.state_dtype 8bit"),
    "float8_tensorwise": Case(FLOAT8, ops={"_scaled_mm": MATMULS}),
    "float8_rowwise": Case(f"{FLOAT8} --quantize.dense.float8.recipe rowwise", ops={"_scaled_mm": MATMULS}),
    "float8_gathered": Case(
        f"{FLOAT8} --quantize.dense.float8.enable_fsdp_float8_all_gather --quantize.dense.float8.precompute_scale",
        ops={"_scaled_mm": MATMULS},
    ),
    "float8_tp2": Case(
        FLOAT8.replace("degree 8", "degree 4") + " --p.tensor_parallel_degree 2",
        ops={"_scaled_mm": MATMULS},
        is_slow=True,
    ),
    "loss_not_chunked": Case(f"{FSDP} --kernels.linear_cross_entropy off"),
    "tp4_loss_not_chunked": Case(
        "--p.tensor_parallel_degree 4 --p.data_parallel_shard_degree 2 --kernels.linear_cross_entropy off", is_slow=True
    ),
    "tied_embeddings": Case(f"{FSDP} --model.tied_embeddings"),
    "flash_attention": Case(f"{FSDP} --kernels.attention flash", {"flash": 2}, is_slow=True),
    "skip_what_is_not_finite": Case(f"{FSDP} --stability.nonfinite skip", may_wait=True),
    "reproducible": Case(f"{FSDP} --training.reproducible", {"flash": 2}),
    "reproducible_hsdp": Case(f"{HSDP} --training.reproducible", {"flash": 2}, is_slow=True),
    "lora": Case(f"{FSDP} --lora.rank 4"),
    "lora_nf4": Case(
        f"{FSDP} --lora.rank 4 --lora.base nf4",
        needs_torch=("2.12", "older FSDP splits floating-point weights only, and a rule refuses the run"),
    ),
    "lora_tp2": Case("--p.data_parallel_shard_degree 4 --p.tensor_parallel_degree 2 --lora.rank 4", is_slow=True),
    "qwen3": Case(f"--model.name qwen3 --model.flavor debug {FSDP}"),
    "qwen3_tp2": Case(
        "--model.name qwen3 --model.flavor debug --p.data_parallel_shard_degree 4 --p.tensor_parallel_degree 2",
        is_slow=True,
    ),
}
