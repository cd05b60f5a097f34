"""``RunConfig``: one run, as data, and its ``[model]``. Frozen; nothing changes it after parsing."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from crius.config.data import DataConfig, TokenizerConfig, ValidationConfig
from crius.config.lora import LoraConfig
from crius.config.moe import MoEConfig
from crius.config.operation import (
    CheckpointConfig,
    DebugConfig,
    JobConfig,
    LaunchConfig,
    MetricsConfig,
    ProfilerConfig,
    SdcConfig,
    StabilityConfig,
    WatchdogConfig,
)
from crius.config.parallelism import CommConfig, ParallelismConfig
from crius.config.training import (
    ActivationCheckpointConfig,
    CompileConfig,
    KernelsConfig,
    LRSchedulerConfig,
    OptimizerConfig,
    QuantizeConfig,
    TrainingConfig,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained."""

    name: str = "llama3"
    """Architecture, a folder of ``crius/models``."""

    flavor: str = "debug"
    """Size: one of the flavors of the architecture, for llama3 debug, 1b, 8b, 70b or 405b, for qwen3 debug, 0.6b,
    1.7b, 4b, 8b, 14b or 32b, for qwen3_moe debug, 30b-a3b or 235b-a22b, for mixtral debug, 8x7b or 8x22b. custom:
    none; what is not given is what the architecture has as a default."""

    from_hf: str = ""
    """A config.json of Hugging Face on this machine, or its folder: architecture and sizes are taken from it, but for
    those that stronger sources give. The weights are not. The run's own settings hold what was taken."""

    vocab_size: int = -1
    """Rows of the embedding and of the output layer. -1: the flavor's, but never fewer than the tokenizer has ids,
    rounded up to a multiple of 64."""

    dim: int = -1
    """Width of the residual stream. -1: the flavor's."""

    num_layers: int = -1
    """Number of decoder layers. -1: the flavor's. Fewer layers make a small model of the same shape."""

    num_heads: int = -1
    """Query heads of each layer. -1: the flavor's."""

    num_kv_heads: int = -1
    """Key/value heads of each layer, which must divide the query heads. -1: in the flavor's ratio to the query heads
    where it divides them, else as many."""

    head_dim: int = -1
    """Width of a head, an even number. -1: dim / num_heads where the flavor's is that, else the flavor's."""

    ffn_dim: int = -1
    """Hidden width of the feed-forward, of layers without experts. -1: in the flavor's ratio to dim, rounded up to a
    multiple of 64."""

    num_experts: int = -1
    """Routed experts of each layer, of a model that has experts. -1: the flavor's."""

    top_k: int = -1
    """Routed experts that a token visits, at most num_experts. -1: the flavor's."""

    expert_ffn_dim: int = -1
    """Hidden width of one routed expert. -1: in the flavor's ratio to dim, rounded up to a multiple of 64."""

    rope_theta: float = -1.0
    """Base of the rotary frequencies. -1: the flavor's."""

    rope_scaling: str = ""
    """How the rotary frequencies are stretched for longer contexts: JSON as rope_scaling of Hugging Face's config.json
    has it, of rope_type llama3, or none. Empty: the flavor's."""

    norm_eps: float = -1.0
    """What norms add to the mean square. -1: the flavor's."""

    tied_embeddings: bool | None = None
    """The output layer shares the embedding's weight. Unset: as the flavor has it."""

    attention_mask: Literal["causal", "document"] = "causal"
    """What a token attends to. causal: all earlier tokens of its sequence. document: the earlier tokens of its
    own document, with positions that restart at each document (block-causal, as in the Llama 3 paper).
    document needs an explicit mask, which is slower, except on a GPU in 16 bits without context parallelism."""

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes that are given in place of the flavor's, by field."""
        others = ("name", "flavor", "from_hf", "attention_mask")
        return {name: value for name, value in vars(self).items() if name not in others and value not in (-1, None, "")}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All sections of a run, each a frozen dataclass of its own file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    sdc: SdcConfig = field(default_factory=SdcConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    job: JobConfig = field(default_factory=JobConfig)


def replace_fields(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """``config`` with the dotted fields of ``changes`` replaced."""
    return _replaced(config, {tuple(name.split(".")): value for name, value in changes.items()})


def _replaced(node: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
    inner: dict[str, dict[tuple[str, ...], Any]] = {}
    values = {}
    for (first, *rest), value in changes.items():
        if rest:
            inner.setdefault(first, {})[tuple(rest)] = value
        else:
            values[first] = value
    values |= {name: _replaced(getattr(node, name), below) for name, below in inner.items()}
    return dataclasses.replace(node, **values)
