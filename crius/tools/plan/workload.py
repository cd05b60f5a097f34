"""``Workload``: everything except the hardware that decides the memory and time of a step. Torch-free.

It comes from a ``RunConfig``, or from the search.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from crius.config.layout import Layout
from crius.config.low_precision import converts_output, is_enabled, kind, linear_choices
from crius.config.pipeline import (
    layers_of_stages,
    microbatch_unit,
    num_stages,
    settle_stages,
    split_stages,
    stages_per_rank,
)
from crius.config.resolve import ITEMSIZE, batch_sizes, caps_scores, keeps_probabilities, loss_chunks, varlen_obstacle
from crius.config.run import RunConfig, replace_fields
from crius.models.description import ModelDescription

Pointwise = Literal["operators", "norms", "silu", "fused"]
Part = TypeVar("Part")


Precision = Literal["float32", "bfloat16", "float8", "mxfp8", "nvfp4"]
Checkpointing = Literal["none", "selective", "full"]
MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""Modes of activation checkpointing, from the least recomputation to the most: on 8b they add 0, 10 and 24 % to the
FLOPs."""

Loss = Literal["eager", "compiled", "chunked", "fused"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step of one model under one layout.

    Attributes:
        model: trained model.
        layout: degrees.
        seq_len: tokens of a sequence, before context parallelism splits it.
        microbatch: sequences per microbatch of one data-parallel rank.
        num_microbatches: microbatches per step: gradient accumulation, or the input of the pipeline.
        schedule: schedule of the pipeline, as the flag spells it.
        stages_per_rank: virtual stages of the interleaved schedules, 1 otherwise.
        activation_checkpoint: mode of recomputation. ``selective`` is by op: every other matmul.
        selective_layers: for ``selective``: every this many layers one is recomputed in full; None: by op.
        compile: whether every block is compiled.
        precision: precision of the matmuls of the blocks; the output layer and attention stay in bfloat16 below
            float32.
        float8_recipe: recipe of torchao or TransformerEngine: ``tensorwise``, ``rowwise``, ...; empty: not stated.
        float8_all_gather: whether FSDP gathers weights in float8.
        weight_bytes: bytes of one stored weight: 4 for float32.
        param_bytes: bytes of one weight while it computes: 2 for bfloat16.
        reduce_bytes: bytes of one number of a gradient that is reduced.
        moment_bytes: bytes of a number in each of the optimizer's two running means.
        zero_stage: 0 replicas, 1 optimizer state sharded, 2 gradients too, 3 weights too (FSDP2).
        reshard: ``reshard_after_forward_mode``.
        gradient_sync: ``immediate`` reduces in every microbatch, ``deferred`` in the last.
        async_tp: whether tensor parallelism's collectives are split and overlapped with the matmuls.
        loss: implementation of logits and cross-entropy.
        loss_tokens: for ``chunked``: tokens whose logits exist at a time.
        score_tokens: for ``chunked``: tokens of these that are scored in float32 at a time.
        optimizer: ``fused``, ``foreach`` or ``for-loop``.
        cpu_offload: whether weights, gradients and optimizer state are in the host's memory between their uses.
        pointwise: tensors that norms and gates keep for their backward. ``operators``: all, as PyTorch differentiates
            them on a CPU; ``norms``: all of norms, but only the inputs of gates; ``silu``: also the gate before and
            after its activation, as in eager PyTorch on a GPU; ``fused``: only their inputs. None: ``fused`` if blocks
            are compiled, else ``silu``.
        muon: whether matrices of the layers keep one running mean, not two.
        splits_experts: whether tensor parallelism splits each expert if it has more ranks than the ranks that share
            experts; otherwise it splits none, and each of its ranks sends its part of a sequence to them. Crius: false.
        sequence_parallel: whether a rank has its part of the sequence between the matmuls of tensor parallelism.
        stage_layers: layers of each pipeline stage in order; empty: as even in cost as possible.
        keeps_mask: whether attention under context parallelism keeps an explicit mask, as a CPU's kernels do.
        has_mask_matrix: whether masks of documents and windows are matrices of all pairs of tokens.
        keeps_probabilities: whether attention keeps its probabilities, as a CPU's kernel for short sequences does.
        snapshot: whether a copy of weights and optimizer state is kept for rollback.
        lora_base: for a model with adapters: format of its frozen layers, as in ``lora.base``.
    """

    model: ModelDescription
    layout: Layout
    seq_len: int
    microbatch: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    activation_checkpoint: Checkpointing = "none"
    selective_layers: int | None = None
    compile: bool = False
    precision: Precision = "bfloat16"
    float8_recipe: str = ""
    float8_all_gather: bool = False
    weight_bytes: float = 4
    param_bytes: float = 2
    reduce_bytes: float = 4
    moment_bytes: float = 4
    zero_stage: int = 3
    reshard: str = "default"
    gradient_sync: Literal["immediate", "deferred"] = "immediate"
    async_tp: bool = False
    loss: Loss = "eager"
    loss_tokens: int | None = None
    score_tokens: int = 0
    optimizer: str = "fused"
    cpu_offload: bool = False
    pointwise: Pointwise | None = None
    muon: bool = False
    splits_experts: bool = False
    sequence_parallel: bool = True
    stage_layers: tuple[int, ...] = ()
    keeps_mask: bool = False
    has_mask_matrix: bool = False
    keeps_probabilities: bool = False
    snapshot: bool = False
    lora_base: Literal["keep", "int8", "nf4"] = "keep"

    @property
    def is_tied(self) -> bool:
        """Whether the output layer shares the embedding's weight; the last stage of a pipeline has its own copy."""
        return self.model.tied_embeddings and self.layout.pp == 1

    @property
    def expert_ranks(self) -> int:
        """Number of neighbouring ranks that together have the experts of a layer once."""
        layout = self.layout
        return max(layout.ep, layout.tp) if self.splits_experts else layout.ep

    @property
    def received(self) -> int:
        """Microbatches whose received tensors a pipeline rank has memory for: it allocates them once for all."""
        return self.num_microbatches

    @property
    def gathers_once(self) -> bool:
        """Whether FSDP gathers the forward's weights once per step, not in each microbatch."""
        return self.reshard == "never"

    def part(self, usual: Part) -> Part:
        """The function or class ``usual`` that computes a part of the plan. The validation on published runs replaces
        parts by those of other trainers (``benchmarks/planner/trainers.py``).
        """
        return usual

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one rank: context parallelism splits them."""
        return self.microbatch * self.seq_len / self.layout.cp

    @property
    def tokens_per_rank(self) -> float:
        """Tokens of one step per GPU, as counted by tokens/s/GPU."""
        layout = self.layout
        sequences = self.microbatch * self.num_microbatches * layout.batch
        return sequences * self.seq_len / layout.num_ranks


@dataclass(frozen=True)
class Estimate:
    """Memory of one rank in bytes, or time of one step in seconds.

    Attributes:
        parts: bytes or seconds by purpose; they sum to the total.
        note: for memory: the moment of the peak and the rank; for time: the largest part.
    """

    parts: Mapping[str, float]
    note: str = ""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self.parts.values())


MOMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1.0 + 4 / 256}
"""Bytes per number of an optimizer's running means, by ``optimizer.state_dtype``."""

Device = Literal["cuda", "cpu", "dry_run"]


def from_config(config: RunConfig, facts: ModelDescription, num_ranks: int, *, device: Device = "cuda") -> Workload:
    """The workload of ``config`` on ``num_ranks`` ranks.

    If recomputation is left to the machine or to the compiler (``auto``, ``memory_budget``), all activations stay.

    Args:
        config: the run; its rules have been checked.
        facts: description of its model.
        num_ranks: ranks of the layout.
        device: device of the run; ``dry_run``: fake tensors, which use a CPU's kernels and are not compiled.

    Raises:
        LayoutError: the degrees do not multiply to ``num_ranks``.
    """
    layout = Layout.of(config.parallelism, num_ranks)
    parallelism = settle_stages(config.parallelism, facts.num_layers)
    training = config.training
    sizes = batch_sizes(training, layout.batch, microbatch_unit(parallelism))
    mode = config.activation_checkpoint.mode
    option = config.activation_checkpoint.selective_option
    float8 = config.quantize.dense.float8
    modules = facts.modules(training.seq_len) if layout.pp > 1 else []
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
        compile=bool(config.compile.enable) and device != "dry_run",
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
        pointwise=_pointwise(config, facts, device),
        muon=config.optimizer.name == "muon",
        stage_layers=layers_of_stages(split_stages(modules, num_stages(parallelism), parallelism)) if modules else (),
        keeps_mask=device != "cuda",
        has_mask_matrix=_on_cpu(config, device) or _takes_matrices(config, facts),
        keeps_probabilities=_on_cpu(config, device) and keeps_probabilities(config, facts),
        snapshot=config.stability.nonfinite == "rollback" and device != "cuda",
        lora_base=config.lora.base,
    )


def _takes_matrices(config: RunConfig, facts: ModelDescription) -> bool:
    """Whether attention on a GPU takes masks as matrices; under context parallelism it does in any case."""
    whole = replace_fields(config, {"parallelism.context_parallel_degree": 1})
    return bool(varlen_obstacle(whole, facts)) and not caps_scores(facts)


def _param_bytes(config: RunConfig) -> int:
    """Bytes of a weight in a matmul; ``auto`` counts as bfloat16, as on a GPU."""
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
        "cpu" if _on_cpu(config, device) else "cuda",
        num_ranks=config.parallelism.tensor_parallel_degree,
        in_low_precision=in_low_precision,
    )
    if chunks.tokens is not None:
        return {"loss": "chunked", "loss_tokens": chunks.tokens, "score_tokens": chunks.block_tokens}
    is_compiled = config.compile.enable and config.compile.loss and device != "dry_run"
    return {"loss": "compiled" if is_compiled else "eager"}


def _on_cpu(config: RunConfig, device: Device) -> bool:
    """Whether the run uses a CPU's kernels."""
    return device == "cpu" or (device == "dry_run" and config.training.device == "cpu")


def _pointwise(config: RunConfig, facts: ModelDescription, device: Device) -> Pointwise:
    """Tensors that norms and gates keep. Compiled blocks keep only inputs. So do the fused kernels of a CPU, which need
    float32, as norms with 1 + weight have it, and plain tensors; norms under tensor parallelism compute with DTensors.
    """
    if config.compile.enable and device != "dry_run":
        return "fused"
    if device == "cuda":
        return "silu"
    is_wide = _param_bytes(config) == 4 or facts.config.norm_plus_one
    takes_fused = _on_cpu(config, device) and config.kernels.pointwise != "torch" and is_wide
    if not takes_fused:
        return "operators"
    return "norms" if config.parallelism.tensor_parallel_degree > 1 else "fused"
