"""The records of a run. Sinks get them complete; nothing here reduces over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One reported optimizer step.

    Rates are averages over the steps since the last report. They leave out the time of validation and of other work
    besides training.

    Attributes:
        step: number of the step, from 1.
        loss: mean over the valid tokens of the whole global batch, in nats.
        grad_norm: global L2 norm before clipping.
        lr: learning rate of the step.
        tokens: tokens read so far, over all ranks, with padding.
        tokens_per_second: tokens per second over all ranks.
        tokens_per_second_per_rank: tokens per second of one rank.
        mfu: model FLOPs utilisation in [0, 1]; None on a device whose peak is not known.
        tflops: model TFLOP/s of one rank, without recomputation.
        step_seconds: mean time of a step, with its wait for data.
        data_seconds: mean time per step spent waiting for data.
        memory_gib: peak memory of rank 0 since the last report (GPU: allocated; CPU: resident set).
        max_active_gib: the same, with blocks that wait for another stream (CPU: resident set).
        max_reserved_gib: the same, with all memory that the allocator took from the driver (CPU: resident set).
        num_alloc_retries: times so far that the allocator of rank 0 had to free its cache and try again.
        num_ooms: times so far that even then there was no memory.
        skipped_steps: steps so far whose update was left out.
        rolled_back_steps: steps so far whose update was lost when a snapshot was restored.
        goodput: share in [0, 1] of the time since the command began that went into steps that count.
        max_loss: largest mean loss over the valid tokens of any rank; None unless TensorBoard or W&B is on.
        load_max_over_mean: tokens of the expert with the most tokens, divided by the mean of its layer, in the worst
            layer. This field and the next three are set only for models with experts, for steps whose update was
            applied.
        load_entropy: entropy of the experts' shares of the tokens of a layer, 1 if the load is even; in the worst
            layer.
        dead_experts: experts, over all layers, that no token of the step chose.
        aux_loss: balance losses, in nats; not part of ``loss``.
        sources: ``loss/NAME``, ``share/NAME`` and ``epochs/NAME`` of each source of a mixture, as ``metrics.jsonl``
            has them; a source without a token in the step has no loss.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    tokens_per_second_per_rank: float
    mfu: float | None
    tflops: float
    step_seconds: float
    data_seconds: float
    memory_gib: float
    skipped_steps: int = 0
    rolled_back_steps: int = 0
    goodput: float = 0.0
    max_loss: float | None = None
    max_active_gib: float = 0.0
    max_reserved_gib: float = 0.0
    num_alloc_retries: int = 0
    num_ooms: int = 0
    load_max_over_mean: float | None = None
    load_entropy: float | None = None
    dead_experts: float | None = None
    aux_loss: float | None = None
    sources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ValidationMetrics:
    """One validation.

    Attributes:
        step: optimizer step after which it ran.
        val_loss: mean over the valid tokens, in nats.
        val_perplexity: ``exp(val_loss)``.
        val_bits_per_byte: bits per byte of the text; comparable between tokenizers.
        val_samples: sequences that were scored.
        val_seconds: time of the validation.
        val_set: name of the validation set; empty for the only set if it has no name.
    """

    step: int
    val_loss: float
    val_perplexity: float
    val_bits_per_byte: float
    val_samples: int
    val_seconds: float
    val_set: str = ""


Record = StepMetrics | ValidationMetrics


def scalars_of(record: Record, total_gib: float | None) -> dict[str, float]:
    """The numbers of a record by torchtitan's tags, so that curves of both lie in one plot.

    Args:
        record: of a step or of a validation.
        total_gib: memory of the device; None where it is not known.
    """
    if not isinstance(record, StepMetrics):
        tag = f"validation_metrics/{record.val_set}/" if record.val_set else "validation_metrics/"
        names = ("loss", "perplexity", "bits_per_byte")
        return {f"{tag}{name}": getattr(record, f"val_{name}") for name in names}
    scalars = {
        "loss_metrics/global_avg_loss": record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "n_tokens_seen": record.tokens,
        "throughput(tps)": record.tokens_per_second_per_rank,
        "tflops": record.tflops,
        "time_metrics/end_to_end(s)": record.step_seconds,
        "time_metrics/data_loading(s)": record.data_seconds,
        "time_metrics/data_loading(%)": 100 * record.data_seconds / record.step_seconds if record.step_seconds else 0.0,
        "memory/max_active(GiB)": record.max_active_gib,
        "memory/max_reserved(GiB)": record.max_reserved_gib,
        "memory/num_alloc_retries": record.num_alloc_retries,
        "memory/num_ooms": record.num_ooms,
        "goodput": record.goodput,
    }
    if record.max_loss is not None:
        scalars["loss_metrics/global_max_loss"] = record.max_loss
    if total_gib:
        scalars["memory/max_active(%)"] = 100 * record.max_active_gib / total_gib
        scalars["memory/max_reserved(%)"] = 100 * record.max_reserved_gib / total_gib
    if record.mfu is not None:
        scalars["mfu(%)"] = 100 * record.mfu
    loads = ("load_max_over_mean", "load_entropy", "dead_experts", "aux_loss")
    scalars |= {f"experts/{name}": value for name in loads if (value := getattr(record, name)) is not None}
    scalars |= {f"mixture/{name}": value for name, value in record.sources.items()}
    lost = {"skipped_steps": record.skipped_steps, "rolled_back_steps": record.rolled_back_steps}
    return scalars | {f"stability/{name}": float(count) for name, count in lost.items() if count}


class Sink(Protocol):
    """Receives every record of a run, on rank 0."""

    def write(self, record: Record) -> None:
        """Receive one record."""

    def close(self) -> None:
        """Flush and close everything that is open."""


class PlanSink(Sink, Protocol):
    """A sink that compares the records of a run with its plan."""

    def line(self) -> str:
        """Accuracy of the plan, for the log; empty if there is nothing to report."""

    def as_dict(self) -> dict[str, Any] | None:
        """Accuracy of the plan, for ``summary.json``."""
