"""How a run is saved, watched and reported: sections of ``RunConfig``."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Where the run writes its files."""

    name: str = ""
    """Name of the run. Empty: the recipe (or the model, if the recipe's was replaced) and the time."""

    run_dir: str = ""
    """Folder of the run. Empty: runs/<name>. A metrics.jsonl that is already in the folder is kept under another
    name."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Behaviour of the launcher after failures and signals. Under torchrun or Slurm these start the processes
    instead."""

    max_restarts: int = 3
    """Restarts of all workers from the newest checkpoint after one of them failed. There is no restart without
    checkpoints, nor after an error that would come again, such as a wrong setting."""

    max_failures_at_step: int = 2
    """Give up after this many failures in a row without a new step between them."""

    grace_seconds: float = 60.0
    """Seconds to save and end after SIGTERM, SIGUSR1 or Ctrl-C; then the workers are killed. A second signal kills them
    at once."""


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """How long a rank may stay in one phase of a step before the run is stopped, with a report of all ranks."""

    enable: bool = True
    """Watch the ranks."""

    limit_seconds: float = 0.0
    """Longest time in a phase of a step, in seconds. 0: 3 times the 99th percentile of the steps so far, at least 10 s,
    on GPUs at least 100 s. startup_seconds is the limit instead in start and load, and at 0 also in the phases outside
    a step and in the first 10 steps."""

    startup_seconds: float = 600.0
    """Longest time in start and load, in seconds. At limit_seconds 0 it also limits a save, a validation and the first
    steps, which compile."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming a run. A run whose folder has checkpoints continues from the newest good one."""

    enable: bool | None = None
    """Unset: save the last step and the step at which the run is asked to stop, and resume. on: also restart after
    failures, as with an interval. no_enable: save nothing and do not resume."""

    interval: int = 0
    """Steps between checkpoints. 0: no checkpoints by steps."""

    interval_minutes: float = 0.0
    """Minutes between checkpoints, together with the interval in steps or instead of it. 0: no checkpoints by time."""

    folder: str = "checkpoints"
    """Folder of the checkpoints: inside the run folder, or an absolute path, or an fsspec URL such as
    s3://bucket/run."""

    load_step: int = -1
    """Step to resume from. -1: the newest good checkpoint. Later checkpoints of the same folder are set aside, not
    overwritten."""

    restart: bool = False
    """Take the checkpoints that are there although the run has saved a newer one: continue from the newest, or begin
    again if there is none. Without it a run whose newest checkpoint is missing is refused."""

    load_path: str = ""
    """Folder of checkpoints to start from if this run has no checkpoint yet, such as another run's."""

    init_from: str = ""
    """Weights to start from, if this run has no checkpoint yet: a run, a checkpoint, a Hugging Face folder, its name on
    the hub, or a PEFT adapter. Only the weights are loaded: step, moments, schedule and data start from the beginning.
    Sizes of the model and the tokenizer come from the source too, unless they are given."""

    mode: Literal["async", "sync"] = "async"
    """async: the run continues as soon as the state is copied to host memory, and a thread writes it. sync: the run
    waits until the state is written."""

    keep_last: int = 3
    """Newest checkpoints to keep, at least 2."""

    keep_every: int = 0
    """Keep all checkpoints whose step is a multiple of this number. 0: none."""

    verify_on_save: bool = True
    """Read each file again after it is written and compare its hash. Only then is the checkpoint complete."""

    verify_on_load: bool = True
    """Read and hash every byte before the state is loaded."""

    rehearse: bool = False
    """Restore each new checkpoint in a process beside the run on rank 0's host, on its CPU: compare all hashes, and
    compute the loss of one validation batch again."""

    max_failures: int = 3
    """Saves in a row that fail before the run stops. Until then the run continues with a warning."""

    allow_changes: tuple[str, ...] = ()
    """Settings that may differ from the checkpoint's, such as data.path, although a resume refuses the difference."""

    @property
    def is_enabled(self) -> bool:
        """Whether the run saves and resumes."""
        return self.enable is not False

    @property
    def is_supervised(self) -> bool:
        """Whether the run restarts after failures: it was asked for, or the run saves checkpoints on the way."""
        return self.is_enabled and (bool(self.enable) or self.interval > 0 or self.interval_minutes > 0)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Reports of the run. metrics.jsonl is always written."""

    log_interval: int = 10
    """Steps between reports. The first and the last step are always reported."""

    enable_tensorboard: bool = False
    """Write TensorBoard event files with torchtitan's tag names (needs ``pip install crius[tensorboard]``)."""

    enable_wandb: bool = False
    """Send metrics and settings to Weights & Biases too (needs ``pip install crius[wandb]``, and ``wandb login`` or
    WANDB_MODE=offline). Restarts and resumes are one run there. The project is WANDB_PROJECT, or crius."""

    sinks: tuple[str, ...] = ()
    """Sinks of installed packages that also receive every record (repeat the flag for more): docs/plugins.md."""

    peak_tflops: float = 0.0
    """Dense bf16 peak of one device in TFLOP/s, for MFU. 0: the published peak of the device; n/a for unknown
    devices."""

    enable_progress_bar: bool = True
    """Show a live line with step, loss, tokens/s and remaining time on a terminal. Pipes and files always get plain
    lines."""

    enable_report: bool = True
    """Write report.html each minute and at the end of the run: curves, time, incidents and settings in one file."""


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """Texts of the model while it trains."""

    every: int = 0
    """Steps between texts: three prompts from held-out data are continued, with a fixed seed, and after the last step
    too. They go to the log, samples.jsonl and the report. Not under pipeline or context parallelism. 0: no texts."""


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """Recording of some steps (the window) into traces/step-N/ in the run folder. N is the first step of the window."""

    enable: bool = False
    """Write a Chrome trace of each rank with torch.profiler."""

    start_step: int = 5
    """First step of the window, counted from the start or the resume of the run."""

    num_steps: int = 2
    """Steps in the window."""

    interval: int = 0
    """Steps from the start of a window to the start of the next one. 0: one window."""

    record_shapes: bool = False
    """Record the shapes of the inputs of each operation in the trace. Larger and slower."""

    with_stack: bool = False
    """Record the Python stack of each operation in the trace. Much larger and slower."""

    memory_snapshot: bool = False
    """Record what CUDA's allocator does. The last 100,000 events, with their Python stacks, are written at the end of
    the window and when memory runs out (into incidents/). View them with pytorch.org/memory_viz. Needs CUDA."""

    nvtx: bool = False
    """Mark the phases of all steps (data, forward, backward, optimizer, ...) as NVTX ranges, for Nsight Systems. Needs
    CUDA."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Reproducibility and debugging."""

    seed: int = 42
    """Seed of the weights and of the order of the data."""

    deterministic: bool | None = None
    """Use only deterministic kernels, which are slower on a GPU. Unset: on if training.reproducible or
    sdc.recompute_interval compares bits on a GPU, else off."""

    detect_anomaly: bool = False
    """End the run at the first NaN of the backward pass, and name the line of the forward pass that it belongs to. Each
    operation records its stack, and each gradient is read. A step takes at least twice as long, and on a GPU the host
    waits for each operation. Not with compile.enable, because a compiled block is one operation."""


@dataclass(frozen=True, kw_only=True)
class SdcConfig:
    """Checks that repeat work and compare bits. They are off by default because they take time; the log says how
    much."""

    recompute_interval: int = 0
    """Steps between checks in which each rank computes its first microbatch twice and compares loss and gradients. 0:
    never."""

    replica_interval: int = 0
    """Steps between checks in which the replicas of each weight compare its hash. 0: never."""


@dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """Policies for steps that would harm the weights. Each such step writes ``incidents/step-N.json``."""

    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """Policy for a loss or gradient that is not finite. stop: end the run before the update, exit code 1. skip: leave
    out the update and continue with the next batch. rollback: return to the weights of the last snapshot and continue
    with the next batch. On a GPU skip and rollback wait for the device in each step; stop does not."""

    spike: Literal["stop", "skip", "warn", "off"] = "warn"
    """Policy for a loss or gradient norm far above the steps before. stop, skip: as for nonfinite, before the update,
    and with the same wait on a GPU. warn: log a warning and make the update, without a wait. off: do not look for
    spikes."""

    spike_zscore: float = 6.0
    """Standard deviations above the running mean from which on a value is a spike. The deviation counts as at least 2 %
    of the mean loss and 20 % of the mean gradient norm."""

    window: int = 100
    """Steps that the standard deviation is taken over, at least 10. The running mean is taken over the last fifth of
    them, at least 5 steps. That many first steps are only observed. Spikes enter neither."""

    max_consecutive: int = 5
    """Stop after this many skipped steps in a row, or after this many returns to the same snapshot. Under spike warn,
    this many spikes in a row count as a new level instead: the window starts again from there."""

    snapshot_interval: int = 50
    """Updates between snapshots for rollback. Each rank keeps its weights and its optimizer state in host memory."""
