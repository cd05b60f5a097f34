"""How a run is kept, watched and reported: sections of ``RunConfig``."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Where a run writes."""

    name: str = ""
    """Name of the run. Empty: the recipe, or the model where that is another, and the time."""

    run_dir: str = ""
    """Folder of the run. Empty: runs/<name>. A metrics.jsonl that is already there is kept under another name."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What the launcher does about failures and signals. Under torchrun or Slurm it is they who start processes."""

    max_restarts: int = 3
    """Restarts of all workers from the newest checkpoint after one of them failed. None without checkpoints, nor after
    an error that would come again, such as a wrong setting."""

    max_failures_at_step: int = 2
    """Give up after so many failures in a row without a new step between them."""

    grace_seconds: float = 60.0
    """Time to save and end after SIGTERM, SIGUSR1 or Ctrl-C; then the workers are killed. A second signal kills them
    at once."""


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """How long a rank may stay in one phase of a step before the run is stopped, with a report of all ranks."""

    enable: bool = True
    """Watch the ranks."""

    limit_seconds: float = 0.0
    """Longest time in a phase, but for start and load. 0: in the phases of a step 3 times the 99th percentile of the
    steps so far, at least 10 s, on GPUs 100 s; in the others, and until 10 steps are done, startup_seconds."""

    startup_seconds: float = 600.0
    """Longest time in start and load, and without limit_seconds in the first steps with their compilation, a save, a
    validation."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming a run. A run whose folder has checkpoints goes on from the newest good one."""

    enable: bool | None = None
    """Unset: save the last step, and the step at which the run is asked to stop, and resume. on: also start again after
    failures, as an interval does. no_enable: save nothing and do not resume."""

    interval: int = 0
    """Steps between checkpoints. 0: none."""

    interval_minutes: float = 0.0
    """Minutes between checkpoints, beside or instead of the steps. 0: none."""

    folder: str = "checkpoints"
    """Folder of the checkpoints inside the run folder, an absolute path, or an fsspec URL such as s3://bucket/run."""

    load_step: int = -1
    """Step to resume from. -1: the newest good one. Later ones of the same folder are set aside, not overwritten."""

    load_path: str = ""
    """Folder of checkpoints to start from where this run has none of its own yet, such as another run's."""

    init_from: str = ""
    """Weights to start from where this run has no checkpoint yet: a run, a checkpoint or a folder of Hugging Face. The
    weights alone are taken: step, moments, schedule and data start anew. Sizes of the model and the tokenizer are
    those of the source unless they are given."""

    mode: Literal["async", "sync"] = "async"
    """async: the run goes on as soon as the state is copied to host memory, a thread writes it. sync: it waits."""

    keep_last: int = 3
    """Newest checkpoints to keep, at least 2."""

    keep_every: int = 0
    """Keep checkpoints whose step is a multiple of this for ever. 0: none."""

    verify_on_save: bool = True
    """Read each file again after it is written and compare its hash, before the checkpoint counts."""

    verify_on_load: bool = True
    """Read and hash every byte before anything is loaded."""

    max_failures: int = 3
    """Saves in a row that may fail before the run stops. Until then it goes on with a warning."""

    allow_changes: tuple[str, ...] = ()
    """Settings that may differ from the checkpoint's although a resume would refuse that, such as data.path."""

    @property
    def is_enabled(self) -> bool:
        """Whether the run saves and resumes."""
        return self.enable is not False

    @property
    def is_supervised(self) -> bool:
        """Whether the run starts again after failures: where that was asked for, or where it saves on the way."""
        return self.is_enabled and (bool(self.enable) or self.interval > 0 or self.interval_minutes > 0)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What a run reports; metrics.jsonl is always written."""

    log_interval: int = 10
    """Steps between reports. The first and the last step always report."""

    enable_tensorboard: bool = False
    """Write TensorBoard event files with torchtitan's tag names (needs ``pip install crius[tensorboard]``)."""

    enable_wandb: bool = False
    """Send metrics and settings to Weights & Biases too (needs ``pip install crius[wandb]``, and ``wandb login`` or
    WANDB_MODE=offline). Restarts and resumes are one run there. The project is WANDB_PROJECT, or crius."""

    sinks: tuple[str, ...] = ()
    """Sinks of installed packages that take every record too (repeat the flag for more): docs/plugins.md."""

    peak_tflops: float = 0.0
    """Dense bf16 peak of one device in TFLOP/s, for MFU. 0: the published peak of known
    devices; others print n/a."""

    enable_progress_bar: bool = True
    """Show a live line with step, loss, tokens/s and remaining time on a terminal. Pipes and files always get plain
    lines."""

    enable_report: bool = True
    """Write report.html at the end of the run: curves, time, incidents and settings in one file."""


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """What is recorded of some steps, the window, into traces/step-N/ in the run folder; N is its first step."""

    enable: bool = False
    """Write a Chrome trace of each rank, by torch.profiler."""

    start_step: int = 5
    """First step of the window, counted from the start or the resume of the run."""

    num_steps: int = 2
    """Steps in the window."""

    interval: int = 0
    """Steps from the start of a window to the start of the next one. 0: one window."""

    record_shapes: bool = False
    """The trace has the shapes of the inputs of each operation. Larger and slower."""

    with_stack: bool = False
    """The trace has the Python stack of each operation. Much larger and slower."""

    memory_snapshot: bool = False
    """Record what CUDA's allocator does, and write that at the end of the window and when memory is used up (into
    incidents/): the last 100,000 events, with their Python stacks, for pytorch.org/memory_viz. Needs CUDA."""

    nvtx: bool = False
    """Mark the phases of all steps (data, forward, backward, optimizer, ...) as NVTX ranges, for Nsight Systems. Needs
    CUDA."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Reproducibility, and the search for errors."""

    seed: int = 42
    """Seed of the weights and of the order of the data."""

    deterministic: bool | None = None
    """Use deterministic kernels only; slower on a GPU. Unset: on where training.reproducible or
    sdc.recompute_interval compares bits on a GPU, else off."""

    detect_anomaly: bool = False
    """End the run at the first NaN of the backward pass, and name the line of the forward pass that it belongs to. Each
    operation notes its stack and each gradient is read: a step takes twice as long and more, and on a GPU the host
    waits for each operation. Not with compile.enable, whose blocks are one operation each."""


@dataclass(frozen=True, kw_only=True)
class SdcConfig:
    """Checks that repeat work and compare bits. Off by default: they cost time, which the log says."""

    recompute_interval: int = 0
    """Every so many steps each rank computes its first microbatch twice and compares loss and gradients. 0: never."""

    replica_interval: int = 0
    """Every so many steps the replicas of a weight compare its hash. 0: never."""


@dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """Policies for steps that would harm the weights. Each such step writes ``incidents/step-N.json``."""

    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient that is not finite. stop: end the run before the update, exit code 1. skip: leave out the
    update, go on with the next batch. rollback: go back to the weights of the last snapshot, go on with the next batch.
    On a GPU skip and rollback wait for the device in each step; stop does not."""

    spike: Literal["stop", "skip", "warn", "off"] = "warn"
    """A loss or gradient norm far above those of the steps before. stop and skip as above, before the update, and with
    the same wait on a GPU; warn: say so and make the update, without a wait; off: do not look."""

    spike_zscore: float = 6.0
    """A spike is so many standard deviations above the running mean. The deviation is taken for at least 2 % of the
    mean loss and 20 % of the mean gradient norm."""

    window: int = 100
    """Steps that the standard deviation is taken over, at least 10; the running mean is over the last fifth of them, at
    least 5. So many steps are only observed in the beginning. Spikes stay out of both."""

    max_consecutive: int = 5
    """Stop at so many steps in a row to be skipped, or so many returns to the same snapshot. Under spike warn, so many
    spikes in a row are a new level instead, and the window starts anew."""

    snapshot_interval: int = 50
    """Updates between snapshots of this rank's weights and optimizer state in host memory, for rollback."""
