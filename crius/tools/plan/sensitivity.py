"""What one change of a plan would cost or gain. Torch-free."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crius.config.layout import DEGREES, Layout
from crius.config.run import replace_fields
from crius.tools.plan.legal import Case
from crius.tools.plan.rank import best
from crius.tools.plan.search import Candidate, judge, search
from crius.tools.plan.variants import MODES
from crius.tools.plan.workload import Workload
from crius.units import GIB


@dataclass(frozen=True)
class Neighbour:
    """One change.

    Attributes:
        text: what changes.
        candidate: what it leads to, which may be too large; None: no such layout is legal.
    """

    text: str
    candidate: Candidate | None

    def effect(self, winner: Candidate) -> str:
        """Tokens/s, seconds and GiB against the plan."""
        if self.candidate is None:
            return "not legal: it does not divide the model, the sequence or the batch"
        speed = self.candidate.tokens_per_second / winner.tokens_per_second - 1
        step = self.candidate.time.total / winner.time.total - 1
        gib = (self.candidate.memory.total - winner.memory.total) / GIB
        fits = "" if self.candidate.fits else ", does not fit"
        return f"tokens/s {speed:+.1%}, step {step:+.1%}, {gib:+.1f} GiB{fits}"


def neighbours(case: Case, winner: Candidate) -> list[Neighbour]:
    """Each axis one step up and down, each option switched, longer sequences, more GPUs; all else as in the plan,
    but for recomputation and microbatches, which are chosen anew where the layout changes.
    """
    return [*_of_degrees(case, winner), *_of_options(case, winner.workload), *_of_sizes(case, winner)]


def _of_degrees(case: Case, winner: Candidate) -> Iterator[Neighbour]:
    layout = winner.workload.layout
    for axis, name in (("tp", "TP"), ("pp", "PP"), ("cp", "CP"), ("dp_replicate", "replicas"), ("ep", "EP")):
        degree = getattr(layout, axis)
        if DEGREES[axis] in case.pinned or (axis == "ep" and not case.shape.num_experts):
            continue
        for other in (degree // 2, degree * 2) if degree > 1 else (2,):
            degrees = {**layout.degrees, axis: other}
            inner = degrees["tp"] * degrees["cp"] * degrees["pp"] * degrees["dp_replicate"]
            text = f"{name} {other} in place of {degree}"
            if case.num_gpus % inner:
                continue
            yield Neighbour(text, _on(case, {**degrees, "dp_shard": case.num_gpus // inner}))


def _on(case: Case, degrees: Mapping[str, int], num_gpus: int = 0) -> Candidate | None:
    """The best candidate on a mesh, or the smallest where none fits."""
    fields = {DEGREES[axis]: degree for axis, degree in degrees.items()}
    narrow = replace(
        case,
        config=replace_fields(case.config, fields),
        pinned=case.pinned | set(fields),
        num_gpus=num_gpus or case.num_gpus,
    )
    found = search(narrow)
    return best(found.fitting, case.hardware) or next(iter(found.too_large.values()), None)


def _of_options(case: Case, one: Workload) -> Iterator[Neighbour]:
    def changed(text: str, **fields: Any) -> Neighbour:
        return Neighbour(text, judge(replace(one, **fields), case.hardware))

    for mode in MODES:
        if mode != one.activation_checkpoint and one.activation_checkpoint in MODES:
            yield changed(f"activation checkpointing {mode}", activation_checkpoint=mode)
    if one.num_microbatches % 2 == 0 and (one.layout.pp == 1 or one.num_microbatches // 2 >= one.layout.pp):
        yield changed(
            f"microbatches of {2 * one.microbatch}",
            microbatch=2 * one.microbatch,
            num_microbatches=one.num_microbatches // 2,
        )
    if one.microbatch % 2 == 0:
        yield changed(
            f"microbatches of {one.microbatch // 2}",
            microbatch=one.microbatch // 2,
            num_microbatches=2 * one.num_microbatches,
        )
    if one.layout.fsdp > 1 and one.layout.pp == 1:
        other = "default" if one.reshard == "never" else "never"
        yield changed(f"reshard {other}", reshard=other)
    if one.async_tp:
        yield changed("without async TP", async_tp=False)
    if one.compile and one.precision == "bfloat16":
        yield changed("without compile", compile=False, async_tp=False)
        if case.hardware.float8_flops:
            gathers = one.layout.fsdp > 1
            yield changed("float8", precision="float8", float8_recipe="tensorwise", float8_all_gather=gathers)
    elif one.compile and one.precision == "float8":
        yield changed("bfloat16 in place of float8", precision="bfloat16", float8_recipe="", float8_all_gather=False)


def _of_sizes(case: Case, winner: Candidate) -> Iterator[Neighbour]:
    one, layout = winner.workload, winner.workload.layout
    yield Neighbour("sequences twice as long", judge(replace(one, seq_len=2 * one.seq_len), case.hardware))
    axis = "dp_shard" if layout.dp_shard > 1 or layout.dp_replicate == 1 else "dp_replicate"
    more: Layout = replace(layout, **{axis: 2 * getattr(layout, axis)})
    is_given = case.config.training.global_batch_size != -1
    batch = {"training.global_batch_size": case.global_batch_size * (1 if is_given else 2)}
    other = replace(case, config=replace_fields(case.config, batch), pinned=case.pinned | set(batch))
    yield Neighbour(
        f"{more.num_ranks} GPUs and {'the same batch' if is_given else 'twice the batch'}",
        _on(other, more.degrees, num_gpus=more.num_ranks),
    )
