"""``RunConfig``: one run, as data. Frozen; nothing changes it after parsing."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crius.config.data import DataConfig, TokenizerConfig, ValidationConfig
from crius.config.model import ModelConfig
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
