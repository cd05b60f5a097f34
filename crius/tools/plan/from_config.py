"""``Workload`` of a run's config. Torch-free."""

from typing import Any, Literal, cast

from crius.config.attention import keeps_probabilities
from crius.config.batch import batch_sizes
from crius.config.dtype import ITEMSIZE
from crius.config.layout import Layout
from crius.config.loss_chunks import loss_chunks
from crius.config.low_precision import converts_output, is_enabled, kind, linear_choices
from crius.config.pipeline import microbatch_unit, num_stages, settle_stages, split_stages, stages_per_rank
from crius.config.run import RunConfig
from crius.models.description import ModelDescription
from crius.tools.plan.stages import layers_of_stages
from crius.tools.plan.trainer import Pointwise
from crius.tools.plan.workload import Checkpointing, Workload

MOMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1.0 + 4 / 256}
"""Of one number of an optimizer's running means, by ``optimizer.state_dtype``."""

Device = Literal["cuda", "cpu", "dry_run"]


def from_config(config: RunConfig, facts: ModelDescription, num_ranks: int, *, device: Device = "cuda") -> Workload:
    """What ``config`` asks of ``num_ranks`` ranks.

    Where recomputation is left to the machine or to the compiler (``auto``, ``memory_budget``) all activations stay.

    Args:
        config: the run; its rules have been checked.
        facts: of its model.
        num_ranks: ranks of the layout.
        device: what it runs on; ``dry_run``: on fake tensors, which take a CPU's kernels and are not compiled.

    Raises:
        LayoutError: the degrees do not multiply to ``num_ranks``.
    """
    layout = Layout.of(config.parallelism, num_ranks)
    parallelism, training = settle_stages(config.parallelism, facts.num_layers), config.training
    sizes = batch_sizes(training, layout.batch, microbatch_unit(parallelism))
    mode, option = config.activation_checkpoint.mode, config.activation_checkpoint.selective_option
    float8 = config.quantize.dense.float8
    return Workload(
        model=facts,
        layout=layout,
        seq_len=training.seq_len,
        microbatch=sizes.local,
        num_microbatches=sizes.accumulation,
        schedule=parallelism.pipeline_parallel_schedule,
        stages_per_rank=stages_per_rank(parallelism) if layout.pp > 1 else 1,
        activation_checkpoint=cast(Checkpointing, mode) if mode in ("selective", "full") else "none",
        selective_layers=option if isinstance(option, int) else None,
        compile=config.compile.enable and device != "dry_run",
        precision=kind(config.quantize.dense) if is_enabled(config.quantize.dense) else _precision(config),
        float8_recipe=float8.recipe if float8.enable else "",
        float8_all_gather=float8.enable and float8.enable_fsdp_float8_all_gather,
        weight_bytes=ITEMSIZE[training.dtype],
        param_bytes=_param_bytes(config),
        reduce_bytes=ITEMSIZE[training.mixed_precision_reduce],
        moment_bytes=MOMENT_BYTES[config.optimizer.state_dtype],
        reshard=str(parallelism.reshard_after_forward_mode),
        gradient_sync="deferred" if training.gradient_sync == "deferred" or layout.pp > 1 else "immediate",
        async_tp=parallelism.enable_async_tensor_parallel,
        **_loss(config, facts, device),
        optimizer=config.optimizer.implementation,
        cpu_offload=training.enable_cpu_offload and device == "cuda",
        pointwise=_pointwise(config, device),
        muon=config.optimizer.name == "muon",
        stage_layers=_stage_layers(config, facts) if layout.pp > 1 else (),
        keeps_mask=device != "cuda" and layout.cp > 1,
        keeps_probabilities=_on_cpu(config, device) and keeps_probabilities(config),
        snapshot=config.stability.nonfinite == "rollback" and device != "cuda",
    )


def _param_bytes(config: RunConfig) -> int:
    """``auto`` is taken for bfloat16, as on a GPU."""
    return ITEMSIZE.get(config.training.mixed_precision_param, 2)


def _precision(config: RunConfig) -> Literal["float32", "bfloat16"]:
    return "float32" if _param_bytes(config) == 4 else "bfloat16"


def _loss(config: RunConfig, facts: ModelDescription, device: Device) -> dict[str, Any]:
    in_low_precision = False
    if is_enabled(config.quantize.dense):
        plan = facts.plan
        in_low_precision = converts_output(linear_choices(config, facts, plan, accelerated=True), plan)
    chunks = loss_chunks(
        config,
        facts.vocab_size,
        "cuda" if device == "cuda" else "cpu",
        num_ranks=config.parallelism.tensor_parallel_degree,
        in_low_precision=in_low_precision,
    )
    if chunks.tokens is not None:
        return {"loss": "chunked", "loss_tokens": chunks.tokens, "score_tokens": chunks.block_tokens}
    is_compiled = config.compile.enable and config.compile.loss and device != "dry_run"
    return {"loss": "compiled" if is_compiled else "eager"}


def _on_cpu(config: RunConfig, device: Device) -> bool:
    """Whether the run takes a CPU's kernels."""
    return device == "cpu" or (device == "dry_run" and config.training.device == "cpu")


def _pointwise(config: RunConfig, device: Device) -> Pointwise:
    """Compiled blocks keep only inputs, as the fused kernels of a CPU do, which are for float32; they take no DTensors,
    as which norms compute under tensor parallelism.
    """
    if config.compile.enable and device != "dry_run":
        return "fused"
    if device == "cuda":
        return "silu"
    takes_fused = _on_cpu(config, device) and config.kernels.pointwise != "torch" and _param_bytes(config) == 4
    if not takes_fused:
        return "operators"
    return "norms" if config.parallelism.tensor_parallel_degree > 1 else "fused"


def _stage_layers(config: RunConfig, facts: ModelDescription) -> tuple[int, ...]:
    """Layers of each stage, as the run splits them."""
    modules = facts.modules((config.training.seq_len + 1) / 2)
    parallelism = settle_stages(config.parallelism, facts.num_layers)
    return layers_of_stages(split_stages(modules, num_stages(parallelism), parallelism))
