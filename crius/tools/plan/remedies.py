"""Changes for a run that does not fit: each flag, with its memory and its price in time. Torch-free."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from crius.config.facts import Rule
from crius.config.layout import DEGREES, Layout
from crius.config.pipeline import microbatch_unit
from crius.config.resolve import BatchSizes, batch_sizes
from crius.config.rules import RULES
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import flatten
from crius.models.description import ModelDescription
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.legal import violations
from crius.tools.plan.memory import memory
from crius.tools.plan.search import Candidate, judge
from crius.tools.plan.workload import MOMENT_BYTES, Device, Workload, from_config
from crius.units import GIB

ROUNDING = "rounds other numbers"
ROUNDING_PRICE = 0.05
"""Price of another rounding of numbers, as a share of a step: an unchanged loss curve is worth that much."""

RANKS_PRICE = 0.5
"""Price of twice the ranks, because they must be paid for."""

LEAST_GAIN = 0.005
"""Share of the memory, without the memory of an empty process, below which a change is not a remedy."""

LEAST_SAVED = GIB / 10
"""Bytes below which a change is not a remedy: plans are less exact, and no run fails for so little."""

MOST_HOST_BYTES = 256 * GIB
"""Bytes of a host's memory per GPU above which offloading is not recommended: hosts of 8 GPUs have 1 to 2 TiB (NVIDIA
DGX A100 and H100, AWS p4d and p5)."""

OFFLOAD = "training.enable_cpu_offload"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of settings that makes a run smaller.

    Attributes:
        changes: dotted fields and their values.
        num_ranks: ranks that the run then has.
        nbytes: planned bytes of the fullest rank.
        saved: planned bytes that the change saves.
        slower: planned share of a step that it costs: 0.07 is 7 % more time. Below 0: the step is faster.
        note: further effects; may be empty.
        fits: whether the plan is within the target.
        host_bytes: bytes of the host's memory that each rank needs for offloaded tensors.
    """

    changes: Mapping[str, Any]
    num_ranks: int
    nbytes: float
    saved: float
    slower: float
    note: str
    fits: bool
    host_bytes: float = 0.0

    @property
    def suffices(self) -> bool:
        """Whether it fits on GPUs whose host has the usual amount of memory."""
        return self.fits and self.host_bytes <= MOST_HOST_BYTES

    @property
    def flags(self) -> str:
        """The change as flags, ready to paste."""
        return " ".join(
            f"--{name}" if value is True else f"--{name}={value}" if value is False else f"--{name} {value}"
            for name, value in self.changes.items()
        )

    @property
    def effect(self) -> str:
        """``41.20 GiB planned (19.87 less), a step takes 12% longer``."""
        saved = f"{self.nbytes / GIB:.2f} GiB planned ({self.saved / GIB:.2f} less)"
        speed = f"a step takes {self.slower:.0%} longer" if self.slower >= 0.005 else "no slower"
        speed = f"a step takes {-self.slower:.0%} less" if self.slower <= -0.005 else speed
        return ", ".join(filter(None, [saved, speed, self.note]))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "flags": self.flags, "changes": dict(self.changes)}


@dataclass(frozen=True)
class _Change:
    fields: Mapping[str, Any]
    note: str = ""
    price: float = 0.0
    ranks: int = 1


def remedies(
    config: RunConfig,
    facts: ModelDescription,
    num_ranks: int,
    hardware: Hardware,
    target: float,
    *,
    on_gpu: bool = True,
    most: int = 3,
    rules: Sequence[Rule] = RULES,
    fixed: Collection[str] = (),
) -> list[Remedy]:
    """The cheapest changes of ``config`` after which its plan has at most ``target`` bytes.

    Single changes come first, then pairs, and if no pair suffices three at once. Single changes that do not suffice
    fill up the list, the smallest plan first. All obey the rules of a run. The global batch stays, and so does the loss
    curve.

    Args:
        config: the run, with all decisions of the machine.
        facts: description of its model.
        num_ranks: ranks of the run.
        hardware: hardware that the time of a step is planned for.
        target: bytes of the fullest rank.
        on_gpu: whether the run is on GPUs; moving memory to the host helps only there.
        most: most remedies to return.
        rules: rules that a changed run must obey.
        fixed: dotted fields that no remedy changes.

    Returns:
        At most ``most`` remedies, the cheapest that suffices first; none saves less than ``LEAST_SAVED``.
    """
    runs = _Runs(config, facts, num_ranks, hardware, target, "cuda" if on_gpu else "cpu", rules)
    changes = [one for one in _changes(config, num_ranks, on_gpu) if not one.fields.keys() & set(fixed)]
    single = runs.best((change,) for change in changes)
    found = [one for one in single if one.suffices][:most]
    for count in (2, 3):
        if len(found) < most and (count == 2 or not found):
            several = (some for some in itertools.combinations(changes, count) if not _clash(some))
            pairs = [one for one in runs.best(several) if one.suffices and not _covers(one, found)]
            found += pairs[: most - len(found)]
    return found + [one for one in single if not one.suffices][: most - len(found)]


def remedies_of_shape(
    workload: Workload, hardware: Hardware, target: float, *, on_gpu: bool, fixed: Collection[str] = ()
) -> list[Remedy]:
    """Remedies for a model that Crius does not train yet: changes of the storage of its weights and optimizer state.

    Args:
        workload: workload that is too large.
        hardware: hardware of every rank.
        target: bytes of the fullest rank.
        on_gpu: whether the ranks are GPUs.
        fixed: dotted fields that no remedy changes.

    Returns:
        Remedies that suffice first, then the others, each group from the smallest plan on.
    """
    options: list[tuple[_Change, dict[str, Any]]] = []
    if on_gpu and not workload.cpu_offload:
        options.append((_Change({OFFLOAD: True}), {"cpu_offload": True}))
    for dtype in ("bfloat16", "8bit"):
        if MOMENT_BYTES[dtype] < workload.moment_bytes:
            options.append((_Change({"optimizer.state_dtype": dtype}, ROUNDING), {"moment_bytes": MOMENT_BYTES[dtype]}))
    if workload.weight_bytes == 4:
        options.append((_Change({"training.dtype": "bfloat16"}, ROUNDING), {"weight_bytes": 2}))
    options = [(change, values) for change, values in options if not change.fields.keys() & set(fixed)]
    before = judge(workload, hardware)
    found: list[Remedy] = []
    for count in (1, 2):
        for some in itertools.combinations(options, count):
            changes = [change for change, _ in some]
            if _clash(changes):
                continue
            smaller = replace(workload, **{field: value for _, values in some for field, value in values.items()})
            remedy = _remedy(changes, _fields(changes), smaller, before, hardware, target)
            enough = [one for one in found if one.suffices]
            if remedy.saved >= LEAST_SAVED and (count == 1 or remedy.fits) and not _covers(remedy, enough):
                found.append(remedy)
    return sorted(found, key=lambda one: (not one.suffices, not one.fits, one.nbytes))


def _on_host(workload: Workload, hardware: Hardware) -> tuple[float, str]:
    """Bytes of the host's memory that each rank needs, and in words the need of its host for all of its GPUs."""
    if not workload.cpu_offload:
        return 0.0, ""
    parts = memory(replace(workload, cpu_offload=False), hardware).parts
    nbytes = sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
    gpus = min(workload.layout.num_ranks, hardware.gpus_per_node)
    host = "the host" if gpus == 1 else f"a host of {gpus} GPUs"
    unusual = ", more than most hosts have" if nbytes > MOST_HOST_BYTES else ""
    return nbytes, f"needs {gpus * nbytes / GIB:,.0f} GiB of memory on {host}{unusual}"


def _fields(changes: Sequence[_Change]) -> dict[str, Any]:
    return {name: value for change in changes for name, value in change.fields.items()}


def _remedy(
    changes: Sequence[_Change],
    fields: Mapping[str, Any],
    workload: Workload,
    before: Candidate,
    hardware: Hardware,
    target: float,
) -> Remedy:
    """Effect of ``changes``, which set ``fields``, on the run ``before``: ``workload``."""
    after = judge(workload, hardware)
    (host_bytes, host_note) = _on_host(workload, hardware)
    return Remedy(
        changes=fields,
        num_ranks=workload.layout.num_ranks,
        nbytes=after.memory.total,
        saved=before.memory.total - after.memory.total,
        slower=after.time.total / before.time.total - 1,
        note="; ".join(dict.fromkeys(filter(None, [*(change.note for change in changes), host_note]))),
        fits=after.memory.total <= target,
        host_bytes=host_bytes,
    )


@dataclass(frozen=True)
class _Runs:
    """Plans changed runs, see ``remedies``."""

    config: RunConfig
    facts: ModelDescription
    num_ranks: int
    hardware: Hardware
    target: float
    device: Device
    rules: Sequence[Rule]

    @cached_property
    def _before(self) -> Candidate:
        return judge(from_config(self.config, self.facts, self.num_ranks, device=self.device), self.hardware)

    @cached_property
    def _now(self) -> dict[str, Any]:
        return flatten(self.config)

    def best(self, pool: Iterable[Sequence[_Change]]) -> list[Remedy]:
        """Changes of ``pool`` that help: sufficient ones first, and among these the cheapest."""
        priced = [one for one in map(self._priced, pool) if one is not None]
        # below half a percent of a step, prefer the change that saves more
        priced.sort(
            key=lambda one: (
                not one[1].suffices,
                not one[1].fits,
                round(one[0], 2) if one[1].fits else 0.0,
                one[1].nbytes,
            )
        )
        return [remedy for _, remedy in priced]

    def _priced(self, changes: Sequence[_Change]) -> tuple[float, Remedy] | None:
        """The price and the effect of ``changes``; None if they are not legal or save nothing."""
        fields = {name: value for name, value in _fields(changes).items() if self._now[name] != value}
        ranks = self.num_ranks * max(change.ranks for change in changes)
        changed = replace_fields(self.config, fields)
        if violations(changed, self.facts, ranks, self.rules):
            return None
        workload = from_config(changed, self.facts, ranks, device=self.device)
        remedy = _remedy(changes, fields, workload, self._before, self.hardware, self.target)
        planned = self._before.memory
        if remedy.saved < max(LEAST_SAVED, LEAST_GAIN * (planned.total - planned.parts["overhead"])):
            return None
        return (1 + remedy.slower) * ranks / self.num_ranks - 1 + sum(change.price for change in changes), remedy


def _clash(changes: Sequence[_Change]) -> bool:
    """Whether two of ``changes`` set one field differently."""
    pairs = itertools.combinations(changes, 2)
    return any(one.fields.get(name, value) != value for one, other in pairs for name, value in other.fields.items())


def _covers(several: Remedy, found: Sequence[Remedy]) -> bool:
    """Whether a part of ``several`` suffices."""
    return any(several.changes.items() >= one.changes.items() for one in found)


def _changes(config: RunConfig, num_ranks: int, on_gpu: bool) -> Iterator[_Change]:
    """Single steps towards less memory, legal or not."""
    layout = Layout.of(config.parallelism, num_ranks)
    sizes = batch_sizes(config.training, layout.batch, microbatch_unit(config.parallelism))
    yield from _of_activations(config, sizes)
    yield from _of_states(config, on_gpu)
    yield from _of_layout(config, layout, sizes)
    if on_gpu:  # more ranks on a CPU share the same memory
        changes = {DEGREES["dp_shard"]: 2 * layout.dp_shard, "training.global_batch_size": sizes.total}
        yield _Change(changes, f"needs {2 * layout.num_ranks} ranks", RANKS_PRICE, 2)


def _of_activations(config: RunConfig, sizes: BatchSizes) -> Iterator[_Change]:
    mode = config.activation_checkpoint.mode or "none"
    later = {"none": ("selective", "full"), "memory_budget": ("full",), "selective": ("full",)}
    for other in later.get(mode, ()):
        option = {"activation_checkpoint.selective_option": "op"} if other == "selective" else {}
        yield _Change({"activation_checkpoint.mode": other, **option})
    for local in {sizes.local // 2, 1} - {0, sizes.local}:
        yield _Change({"training.local_batch_size": local, "training.global_batch_size": sizes.total})
    if config.kernels.linear_cross_entropy == "off":
        yield _Change({"kernels.linear_cross_entropy": "chunked"})
    if not config.compile.enable:
        yield _Change({"compile.enable": True})


def _of_states(config: RunConfig, on_gpu: bool) -> Iterator[_Change]:
    training = config.training
    optimizer = config.optimizer
    parallelism = config.parallelism
    if parallelism.reshard_after_forward_mode == "never":
        yield _Change({"parallelism.reshard_after_forward_mode": "always"})
    if training.gradient_sync == "deferred":
        yield _Change({"training.gradient_sync": "immediate"})
    for dtype in {"float32": ("bfloat16", "8bit"), "bfloat16": ("8bit",)}.get(optimizer.state_dtype, ()):
        yield _Change({"optimizer.state_dtype": dtype}, ROUNDING, ROUNDING_PRICE)
    if training.dtype == "float32" and training.mixed_precision_param == "bfloat16":
        yield _Change({"training.dtype": "bfloat16"}, ROUNDING, 2 * ROUNDING_PRICE)
    if on_gpu and not training.enable_cpu_offload:
        yield _Change({OFFLOAD: True})


def _of_layout(config: RunConfig, layout: Layout, sizes: BatchSizes) -> Iterator[_Change]:
    shard = DEGREES["dp_shard"]
    if layout.dp_replicate > 1:
        yield _Change({DEGREES["dp_replicate"]: 1, shard: layout.batch})
    if layout.dp_shard % 2 == 0:
        batch = {"training.global_batch_size": sizes.total, "training.local_batch_size": sizes.local}
        for axis, degree in (("tp", layout.tp), ("cp", layout.cp)):
            yield _Change({DEGREES[axis]: 2 * degree, shard: layout.dp_shard // 2, **batch})
