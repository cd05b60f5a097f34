"""``Workload``: everything but the hardware that decides how much memory and time a step takes. Torch-free.

It comes from a ``RunConfig``, from a row of published measurements, or from the search. ``Trainer``: how a trainer
differs in what it keeps, fuses and overlaps; those of others than Crius are in ``benchmarks/planner/trainers.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

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
from crius.config.resolve import ITEMSIZE, batch_sizes, keeps_probabilities, loss_chunks
from crius.config.run import RunConfig
from crius.models.description import ModelDescription

Pointwise = Literal["operators", "norms", "silu", "fused"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trainer:
    """Of memory first, then of time. Where a factor is None the fitted constant of that name holds.

    Attributes:
        gathers_keys: context parallelism keeps the keys and values of the whole sequence.
        keeps_gathered: tensor parallelism keeps the gathered input of a matmul, not the rank's part of the sequence.
        pointwise: what norms and gates keep, unless they are compiled.
        selects_ops: selective checkpointing keeps the results of some ops; if not, it recomputes the core of attention,
            of which fused attention keeps nothing anyway.
        is_traced: forward, loss and backward are one graph, which keeps nothing that it does not read again.
        receives_all: a pipeline allocates what it receives once for all microbatches.
        ends_stay: embedding and output layer are one unit of FSDP, gathered and with whole gradients until the end of a
            microbatch.
        gathers_logits: tensor parallelism gathers the logits of the whole vocabulary before the loss.
        balances_memory: pipeline stages are balanced by cost where memory is counted; if not, by the number of layers.
        eager_logit_bytes: of one logit, all that exists of it in the backward of an eager loss.
        split_logit_bytes: how many more where the vocabulary is split, or the logits of its parts are gathered.
        kept: factor on what layers are counted to keep, but where all is recomputed.
        balances_time: pipeline stages are balanced by cost where time is counted; if not, all ranks have as many layers
            but the last, which has what is left.
        own_kernels: attention reaches what the GPU's fastest kernel does, not only FlashAttention-2's FLOPs.
        attention: factor on what attention reaches.
        elementwise: times that a layer's activations cross the memory; None: as eager or compiled PyTorch does.
        float8: of float8's peak relative to bfloat16's efficiency, before Blackwell and on it; None: torchao's.
        fuses_casts: quantizing is one kernel without compilation too.
        casts_once: weights that stay on their rank are quantized once a step.
        waits: share of the compute that communication hidden beside it costs.
        keeps_weights: ``reshard never`` gathers once a step, not in each microbatch.
        reduces: share of the replicas' reduction that is not hidden.
        overlaps_tensor: factor on the exposed communication of tensor parallelism where it is overlapped.
        overlaps_experts: factor on the exposed all-to-alls where a pipeline rank has several stages.
        experts: factor on permutation and routing to experts.
        loops_over_experts: the host launches each expert of a rank by itself, so that it waits for its rows.
        splits_experts: tensor parallelism splits each expert where its ranks are more than those that share experts;
            if not, it splits none, and each of its ranks sends its part of a sequence to them.
        bias: logarithm of how much slower its compute is than the rest says.
    """

    gathers_keys: bool = True
    keeps_gathered: bool = True
    pointwise: Pointwise = "silu"
    selects_ops: bool = True
    is_traced: bool = False
    receives_all: bool = True
    ends_stay: bool = False
    gathers_logits: bool = False
    balances_memory: bool = True
    eager_logit_bytes: float = 12.0  # log-probabilities in float32, their gradient, its gradient
    split_logit_bytes: float = 4.0
    kept: float = 1.0
    balances_time: bool = True
    own_kernels: bool = False
    attention: float = 1.0
    elementwise: float | None = None
    float8: tuple[float, float] | None = None
    fuses_casts: bool = False
    casts_once: bool = False
    waits: float | None = None
    keeps_weights: bool = True
    reduces: float | None = None
    overlaps_tensor: float | None = None
    overlaps_experts: float = 1.0
    experts: float | None = None
    loops_over_experts: bool = True
    splits_experts: bool = False
    bias: float | None = None


CRIUS = Trainer(loops_over_experts=False)


Precision = Literal["float32", "bfloat16", "float8", "mxfp8", "nvfp4"]
Checkpointing = Literal["none", "selective", "full"]
MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""Of activation checkpointing, from the least recomputation to the most: on 8b it adds 0, 10 and 24 % to the FLOPs."""

Loss = Literal["eager", "compiled", "chunked", "fused"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step of one model under one layout.

    Attributes:
        model: what is trained.
        layout: degrees.
        seq_len: tokens of a sequence, before context parallelism splits it.
        microbatch: sequences in one forward of one data-parallel rank.
        num_microbatches: of one step: gradient accumulation, or what the pipeline is fed.
        schedule: of the pipeline, by the flag's spelling.
        stages_per_rank: virtual stages of the interleaved schedules, 1 otherwise.
        activation_checkpoint: what is recomputed. ``selective`` is by op: every other matmul.
        selective_layers: of ``selective``: every so many layers recomputed in full; None: by op.
        compile: every block is compiled.
        precision: of the matmuls of the blocks; the output layer and attention stay in bfloat16 below float32.
        float8_recipe: of torchao or TransformerEngine: ``tensorwise``, ``rowwise``, ...; empty: the trainer's.
        float8_all_gather: FSDP gathers weights in float8.
        weight_bytes: of one stored weight: 4 for float32.
        param_bytes: of one weight while it computes: 2 for bfloat16.
        reduce_bytes: of one number of a gradient that is reduced.
        moment_bytes: of one running mean of the optimizer, of which there are two.
        zero_stage: 0 replicas, 1 optimizer state sharded, 2 gradients too, 3 weights too (FSDP2).
        reshard: ``reshard_after_forward_mode``.
        gradient_sync: ``immediate`` reduces in every microbatch, ``deferred`` in the last.
        async_tp: tensor parallelism's collectives are split and overlapped with the matmuls.
        loss: how logits and cross-entropy are computed.
        loss_tokens: of ``chunked``: tokens whose logits exist at a time.
        score_tokens: of those, tokens that are scored in float32 at a time.
        optimizer: ``fused``, ``foreach`` or ``for-loop``.
        cpu_offload: weights, gradients and optimizer state lie in the host's memory between their uses.
        trainer: whose implementation: what is fused, kept and overlapped.
        pointwise: what norms and gates keep for their backward. ``operators``: all, as PyTorch differentiates them on a
            CPU; ``norms``: so of norms alone, of gates only their inputs; ``silu``: the gate before and after its
            activation too, as eager PyTorch does on a GPU; ``fused``: only their inputs. None: ``fused`` where blocks
            are compiled, else what the trainer does.
        muon: matrices of the layers keep one running mean, not two.
        sequence_parallel: between the matmuls of tensor parallelism a rank has its part of the sequence.
        stage_layers: layers of each pipeline stage in order; empty: as even in cost as they go.
        keeps_mask: attention under context parallelism keeps an explicit mask, as a CPU's kernels do.
        keeps_probabilities: attention keeps its probabilities, as a CPU's kernel for short sequences does.
        snapshot: a copy of weights and optimizer state is kept beside them, to go back to.
        lora_base: of a model with adapters: how its frozen layers are kept, as ``lora.base`` has it.
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
    trainer: Trainer = CRIUS
    pointwise: Pointwise | None = None
    muon: bool = False
    sequence_parallel: bool = True
    stage_layers: tuple[int, ...] = ()
    keeps_mask: bool = False
    keeps_probabilities: bool = False
    snapshot: bool = False
    lora_base: Literal["keep", "int8", "nf4"] = "keep"

    @property
    def is_tied(self) -> bool:
        """The output layer shares the embedding's weight; the last stage of a pipeline has a copy of its own."""
        return self.model.tied_embeddings and self.layout.pp == 1

    @property
    def expert_ranks(self) -> int:
        """Ranks, next to each other, that hold the experts of a layer once."""
        layout = self.layout
        return max(layout.ep, layout.tp) if self.trainer.splits_experts else layout.ep

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one rank: context parallelism splits them."""
        return self.microbatch * self.seq_len / self.layout.cp

    @property
    def tokens_per_rank(self) -> float:
        """Tokens of one step for each GPU: what tokens/s/GPU counts."""
        layout = self.layout
        sequences = self.microbatch * self.num_microbatches * layout.batch
        return sequences * self.seq_len / layout.num_ranks


@dataclass(frozen=True)
class Estimate:
    """Memory of one rank in bytes, or time of one step in seconds.

    Attributes:
        parts: by what they are for; they sum to the total.
        note: of memory: the moment of the peak and the rank; of time: what bounds it.
    """

    parts: Mapping[str, float]
    note: str = ""

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.parts.values())


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
    modules = facts.modules((training.seq_len + 1) / 2) if layout.pp > 1 else []
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
        pointwise=_pointwise(config, device),
        muon=config.optimizer.name == "muon",
        stage_layers=layers_of_stages(split_stages(modules, num_stages(parallelism), parallelism)) if modules else (),
        keeps_mask=device != "cuda" and layout.cp > 1,
        keeps_probabilities=_on_cpu(config, device) and keeps_probabilities(config),
        snapshot=config.stability.nonfinite == "rollback" and device != "cuda",
        lora_base=config.lora.base,
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
        "cpu" if _on_cpu(config, device) else "cuda",
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
