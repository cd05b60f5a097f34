"""``RunConfig``: one run as data, and its section ``[model]``. Frozen: nothing changes it after parsing."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

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
    SamplesConfig,
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
    """Size: one of the flavors of the architecture. llama3 has debug, 1b, 8b, 70b and 405b; qwen3 has debug, 0.6b,
    1.7b, 4b, 8b, 14b and 32b; qwen3_moe has debug, 30b-a3b and 235b-a22b; mixtral has debug, 8x7b and 8x22b. custom is
    not a flavor: sizes that are not given are the defaults of the architecture."""

    from_hf: str = ""
    """A Hugging Face config.json, its folder, or its name on the hub. Architecture and sizes come from it, except sizes
    that a stronger source gives. No weights are loaded. The settings of the run record all values that came from it."""

    vocab_size: int = -1
    """Rows of the embedding and of the output layer. -1: the flavor's number, or the number of the tokenizer's ids,
    rounded up to a multiple of 64, if that is larger."""

    dim: int = -1
    """Width of the residual stream. -1: the flavor's."""

    num_layers: int = -1
    """Number of decoder layers. -1: the flavor's. Fewer layers make a small model of the same shape."""

    num_heads: int = -1
    """Query heads of each layer. -1: the flavor's."""

    num_kv_heads: int = -1
    """Key/value heads of each layer; they must divide the query heads. -1: as many per query head as the flavor has, or
    one per query head if that does not divide."""

    head_dim: int = -1
    """Width of a head, an even number. -1: dim / num_heads if that holds for the flavor, else the flavor's."""

    ffn_dim: int = -1
    """Hidden width of the feed-forward in layers without experts. -1: in the flavor's ratio to dim, rounded up to a
    multiple of 64."""

    num_experts: int = -1
    """Routed experts of each layer, for models with experts. -1: the flavor's."""

    top_k: int = -1
    """Routed experts that a token visits, at most num_experts. -1: the flavor's."""

    expert_ffn_dim: int = -1
    """Hidden width of one routed expert. -1: in the flavor's ratio to dim, rounded up to a multiple of 64."""

    rope_theta: float = -1.0
    """Base of the rotary frequencies. -1: the flavor's."""

    rope_scaling: str = ""
    """How the rotary frequencies are stretched for longer contexts: the JSON of rope_scaling in a Hugging Face
    config.json with rope_type llama3, yarn, linear or default, or none. Empty: the flavor's. "frequencies": "float32"
    in it computes them as transformers does; an import writes it."""

    words: str = ""
    """What the layers compute, beyond their sizes, as JSON: biases, windows, scales, places of norms and others, all
    listed in docs/models.md. Empty: the flavor's."""

    norm_eps: float = -1.0
    """Number that norms add to the mean square. -1: the flavor's."""

    tied_embeddings: bool | None = None
    """The output layer shares the embedding's weight. Unset: as the flavor has it."""

    attention_mask: Literal["causal", "document"] = "causal"
    """Which tokens a token attends to. causal: all earlier tokens of its sequence. document: the earlier tokens of its
    own document; positions restart at each document (block-causal, as in the Llama 3 paper). document needs an explicit
    mask, which is slower, except on a GPU in 16 bits without context parallelism."""

    @property
    def impossible(self) -> list[str]:
        """Sizes that are neither positive nor -1, by field."""
        numbers = {name: value for name, value in vars(self).items() if type(value) in (int, float)}
        return [name for name, value in numbers.items() if value != -1 and not 0 < value < math.inf]

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes that replace the flavor's, by field."""
        others = ("name", "flavor", "from_hf", "attention_mask")
        return {name: value for name, value in vars(self).items() if name not in others and value not in (-1, None, "")}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All sections of a run. Each section is a frozen dataclass."""

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
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    job: JobConfig = field(default_factory=JobConfig)


Section = TypeVar("Section")


def replace_fields(config: Section, changes: Mapping[str, Any]) -> Section:
    """``config``, a run or one of its sections, with the dotted fields of ``changes`` replaced."""
    replaced: Section = _replaced(config, {tuple(name.split(".")): value for name, value in changes.items()})
    return replaced


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
