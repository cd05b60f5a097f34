"""Computation of a step: sections of ``RunConfig``."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long the model is trained, and on which batches."""

    steps: int = 10_000
    """Number of optimizer steps."""

    epochs: int = -1
    """Train for this many passes over the training data, instead of training.steps. Each sequence is trained on exactly
    this many times: a last batch that is not full is filled with padding without labels. Not for streams. -1: train for
    training.steps. auto: 3, or as many as give 50 steps. If a recipe or a file gives either of the two, the stronger
    source wins."""

    seq_len: int = 2048
    """Tokens in a sequence."""

    local_batch_size: int = -1
    """Sequences per rank in one microbatch. -1: global_batch_size / data-parallel ranks, at most 8; the other sequences
    of the rank go to further microbatches (gradient accumulation). On a GPU it is lowered until the microbatch fits
    into memory, by the rule of activation_checkpoint.mode auto. Lower it to save activation memory; the loss curve does
    not change."""

    global_batch_size: int = -1
    """Sequences in one optimizer step, over all ranks and microbatches. If it is larger than local_batch_size x
    data-parallel ranks, gradients are accumulated. -1: 8, so that the loss curve does not depend on the layout; if 8 is
    not a multiple of local_batch_size x data-parallel ranks, the next multiple. auto: 16, or of 8, 4, 2 and 1 the
    largest that gives 50 steps in the epochs of the run (3, if it has none), and the next multiple likewise."""

    gradient_sync: Literal["default", "immediate", "deferred", "auto"] = "default"
    """When gradients are synchronised under accumulation. immediate: reduce-scatter (and all-reduce over replicas) in
    every microbatch: least memory. deferred: only in the last microbatch: least communication, but each rank keeps
    unsharded gradients. auto: reduce-scatter in every microbatch, all-reduce over replicas once. default: auto, but
    deferred under pipeline parallelism, whose schedules support nothing else."""

    dtype: Dtype = "float32"
    """dtype in which weights are kept and updated. bfloat16 halves their memory; see optimizer.stochastic_rounding."""

    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of weights in matmuls, and of activations. The optimizer updates weights in training.dtype. auto:
    bfloat16 on a GPU and on a CPU with bfloat16 matmuls (amx_bf16 or avx512_bf16), else float32. A resumed run keeps
    the dtype of its checkpoint."""

    mixed_precision_reduce: Dtype = "float32"
    """dtype in which gradients are reduced over ranks and accumulated."""

    max_norm: float = 1.0
    """Gradients are scaled down so that their global L2 norm is at most this. 0 turns clipping off."""

    enable_cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in host memory: least device memory, slow."""

    reproducible: bool = False
    """Sum gradients in an order that does not depend on the number of data-parallel ranks: the curve is then the same
    to the last bit on 1, 2, 4, ... ranks. The batch is cut into virtual_shards, and each shard is computed by itself.
    Slower; see docs/reproducible.md."""

    virtual_shards: int = 8
    """Parts of the global batch under reproducible, each a microbatch: a power of two that the data-parallel ranks
    divide."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if torch can use a GPU, else cpu."""

    gc_interval: int = 50
    """Steps between runs of Python's garbage collector. All ranks run it at the same step, so that no rank waits for
    the collector of another. In the first step Python decides. 0: Python decides in all steps."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), or Muon for matrices and AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer, adamw or muon. adamw: all parameters by AdamW. muon: matrices of the layers by Muon
    (kellerjordan.github.io/posts/muon), all other parameters by AdamW."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """fused: one kernel for many parameters, the fastest. foreach: few launches. for-loop: one parameter at a time."""

    state_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Storage of AdamW's two moments and of Muon's single moment. bfloat16: half the memory, rounded stochastically.
    8bit: a quarter of the memory, in blocks of 256 with one scale per block (arXiv:2110.02861, needs torchao);
    parameters with fewer than 4096 numbers keep float32."""

    stochastic_rounding: bool = True
    """Round values stochastically when they are stored in bfloat16, so that small updates are not lost. Only with
    training.dtype bfloat16 or state_dtype bfloat16. The result is the same on any layout."""

    lr: float = 3e-4
    """Peak learning rate."""

    beta1: float = 0.9
    """Decay of the running mean of gradients."""

    beta2: float = 0.95
    """Decay of the running mean of squared gradients."""

    eps: float = 1e-8
    """Added to the denominator."""

    weight_decay: float = 0.1
    """Decoupled weight decay of the parameters in the decayed group."""

    decay_1d: bool = False
    """Decay one-dimensional parameters (norm weights, biases) too."""

    decay_embeddings: bool = False
    """Decay embeddings too. A tied output layer counts as an embedding."""

    param_groups: tuple[str, ...] = ()
    """Settings of single parameters: "PATTERN: key=value ...", with the keys lr_factor, weight_decay and optimizer
    (adamw or muon), such as "attention.wq: lr_factor=0.5 weight_decay=0". The first entry that fits a parameter
    applies; later entries do not."""

    muon_momentum: float = 0.95
    """Decay of Muon's running mean of gradients."""

    muon_nesterov: bool = True
    """Nesterov momentum in Muon."""

    muon_ns_steps: int = 5
    """Newton-Schulz iterations that make a matrix of Muon orthogonal."""

    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """match_rms_adamw: updates are as large as AdamW's, so that the same lr and weight_decay suit both
    (arXiv:2502.16982). original: Keller Jordan's factor, for learning rates about 0.02."""


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    """Warmup-stable-decay with torchtitan's definition, so that curves compare."""

    warmup_steps: int = 200
    """Steps of linear warmup; the first step trains at lr / warmup_steps. Clamped to the length of the run."""

    decay_ratio: float | None = None
    """Share of all steps that decay. Not given: all steps after the warmup."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: float = 0.0
    """The decay ends at lr x this factor. The curve would reach that end one step after the last, so that the last step
    still trains."""


SAVE_OPS = ("attention", "matmul", "matmul_every_other", "reduce_scatter")
"""Categories of ops that ``save_ops`` can name."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    """Recompute activations in the backward instead of keeping them. The loss stays the same to the last bit."""

    mode: Literal["none", "full", "selective", "memory_budget", "auto"] | None = None
    """Activations that the backward recomputes. none: keep all activations. full: keep only each block's input and
    run its forward again in the backward. selective: do this for some blocks or some ops (selective_option).
    memory_budget: torch.compile chooses the ops to recompute, so that memory_budget of the activations stay; needs
    compile.enable. auto: none, selective by op or full, whichever the plan says is the fastest that fits into 90 % of
    the memory of every rank; the log says why. Not given: auto on a GPU, none on a CPU."""

    selective_option: Literal["op"] | int = "op"
    """For mode selective. op: every block keeps the results of save_ops and recomputes all others. An integer n: every
    n-th block is recomputed in full, the other blocks keep everything."""

    save_ops: tuple[str, ...] = ("attention", "matmul_every_other", "reduce_scatter")
    """For selective_option op: the results to keep. attention: outputs of the attention kernel. matmul: outputs of
    every matmul. matmul_every_other: outputs of every second matmul. reduce_scatter: outputs of tensor parallelism's
    reduce-scatter, which would have to be communicated again. Names of ATen ops also work, such as aten.mm.default."""

    memory_budget: float = 0.5
    """For mode memory_budget: share of the activations that may stay, from 0 (as full) to 1 (as none)."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """torch.compile of each block."""

    enable: bool | None = None
    """Compile the blocks of the model, which share one graph. Faster on a GPU; a CPU gains little. Not given: on for a
    GPU, if it can compile."""

    loss: bool = False
    """Also compile the loss, so that no logits are copied to float32. Needs enable."""

    backend: Literal["inductor", "aot_eager", "eager", "cudagraphs"] = "inductor"
    """Backend of torch.compile. inductor generates kernels. cudagraphs replays eager kernels, on one rank only.
    aot_eager and eager only trace, to find bugs."""

    cache_dir: str = ""
    """Folder of compiled kernels, with which the next run starts faster. Empty: crius/compile in the user's cache
    folder."""

    max_recompiles: int = 4
    """Recompilations after step 3 that are tolerated. More of them end in a warning that names the guard that failed
    most often."""


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Implementations of the operators. Crius chooses them by device and case unless they are named here; the log says
    which were chosen."""

    linear: Literal["auto", "torch", "onednn"] = "auto"
    """Matmuls of float32 linear layers on a CPU. torch: as F.linear does them, with MKL on x86. onednn: oneDNN for the
    forward and for the gradient of the input. auto: onednn on AMD CPUs with AVX-512, else torch."""

    pointwise: Literal["auto", "torch", "fused"] = "auto"
    """RMSNorm, rotary positions and SwiGLU. torch: PyTorch's autograd. fused: backwards written by hand, which read and
    keep less; compiled blocks fuse them in their own way. auto: fused on a CPU, else torch."""

    attention: Literal[
        "auto", "cudnn", "flash", "flash3", "flash4", "efficient", "math", "varlen", "flex", "blocked"
    ] = "auto"
    """Backend of scaled dot-product attention. varlen and flex are for the document mask on a GPU: varlen treats each
    document as a sequence, flex works on blocks of 128 x 128 pairs. flash3 and flash4 are later versions of
    FlashAttention, from packages of their own; with the document mask they replace varlen's. blocked is for CPUs,
    float32 and sequence lengths that are multiples of 32 tokens: it keeps the probabilities, seq_len / 2 numbers for
    each token and head. auto: the fastest one, as measured, that the device, dtype and mask allow. On AMD CPUs with
    AVX-512 it is blocked, up to 512 tokens. With the document mask it is varlen, or flex for a batch with more than one
    document in 64 tokens."""

    linear_cross_entropy: Literal["auto", "off", "chunked"] = "auto"
    """chunked: compute output layer and loss together, loss_chunk_tokens at a time, so that the logits of all tokens
    never exist at once. off: first all logits, then the loss. auto: chunked, except with an output layer in low
    precision, and under the pipeline schedule gpipe, which would keep a gradient of that layer for each microbatch."""

    loss_chunk_tokens: int = -1
    """Tokens per chunk of linear_cross_entropy. -1: as many as make 1 GiB of logits on a GPU, 8 MiB on a CPU, at least
    256. Smaller chunks take less memory, but each chunk except the first reads and writes the output layer's gradient
    once more."""


Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """float8 matmuls (torchao; formats E4M3 and E5M2 of arXiv:2209.05433)."""

    enable: bool = False
    """Run dense linear layers in float8."""

    recipe: Float8Recipe = "tensorwise"
    """How values are scaled into float8. tensorwise: one scale per tensor, the fastest. rowwise: one scale per row,
    more exact. rowwise_with_gw_hp: rowwise, but the gradient of the weight in high precision, the most exact."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather sharded weights in float8: half the bytes of bfloat16. tensorwise only."""

    precompute_scale: bool = False
    """Compute the scales of all gathered weights at once after each update, with one collective instead of one per
    weight. Needs enable_fsdp_float8_all_gather."""

    emulate: bool = False
    """Round to float8 but multiply in high precision: the same numbers without the speed. Always on if the device has
    no float8 matmuls."""


@dataclass(frozen=True, kw_only=True)
class MXFP8Config:
    """MXFP8 matmuls: float8 with one power-of-two scale per 32 elements (OCP Microscaling Formats 1.0)."""

    enable: bool = False
    """Run dense linear layers in MXFP8."""

    emulate: bool = False
    """Round to MXFP8 but multiply in high precision: the same numbers without the speed. Always on if the device has no
    MXFP8 matmuls."""


@dataclass(frozen=True, kw_only=True)
class DenseQuantizeConfig:
    """Dense linear layers."""

    float8: Float8Config = field(default_factory=Float8Config)
    mxfp8: MXFP8Config = field(default_factory=MXFP8Config)

    exclude: tuple[str, ...] = ()
    """Linear layers to keep in high precision, in addition to the output layer: names such as output, attention.wk or
    layers.0; * stands for anything within one part of a name."""

    include: tuple[str, ...] = ()
    """Linear layers to convert although Crius would keep them: sensitive layers and small layers. Names as for exclude.
    It is an error if the dims of such a layer do not divide."""

    auto_filter: Literal["auto", "on", "off"] = "auto"
    """Keep layers that are too small to gain speed in high precision. auto: on if the device has such matmuls, off if
    they are emulated, because emulation never gains speed."""

    pad_inner_dim: bool = False
    """Pad layers whose dims do not divide with zeros, instead of keeping them in high precision. Costs memory and
    time."""


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Low precision by kind of layer."""

    dense: DenseQuantizeConfig = field(default_factory=DenseQuantizeConfig)


FORMATS: dict[str, dict[str, Any]] = {
    **{
        f"float8_{recipe}": {"quantize.dense.float8.enable": True, "quantize.dense.float8.recipe": recipe}
        for recipe in get_args(Float8Recipe)
    },
    "mxfp8": {"quantize.dense.mxfp8.enable": True},
}
"""Low precisions, by the name that receipts use, and the settings that turn each on."""

SET_BY_FORMAT = tuple(dict.fromkeys(name for changes in FORMATS.values() for name in changes))
"""Settings that a format decides."""
