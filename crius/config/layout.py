"""``Layout``: degrees, their arithmetic and spelling, such as ``hsdp2x2_tp2``, and the flag ``--layout``."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from crius.config.arguments import Arguments
from crius.config.names import did_you_mean
from crius.config.parallelism import ParallelismConfig, Schedule
from crius.config.pipeline import microbatch_unit
from crius.config.resolve import batch_sizes
from crius.config.run import RunConfig, replace_fields
from crius.errors import ConfigError, CriusError, LayoutError

FLAG = "--layout"

DEGREES = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
}
"""The dotted field of each axis, outermost first."""

OPTIONS: dict[str, dict[str, Any]] = {
    **{schedule: {"parallelism.pipeline_parallel_schedule": schedule} for schedule in get_args(Schedule)},
    "full": {"activation_checkpoint.mode": "full"},
    "selective": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_option": "op"},
    "memory_budget": {"activation_checkpoint.mode": "memory_budget"},
    "compile": {"compile.enable": True},
    "async_tp": {"parallelism.enable_async_tensor_parallel": True},
    "ulysses": {"parallelism.context_parallel_method": "ulysses"},
    "document": {"model.attention_mask": "document"},
    "never": {"parallelism.reshard_after_forward_mode": "never"},
    "always": {"parallelism.reshard_after_forward_mode": "always"},
    **{mode: {"training.gradient_sync": mode} for mode in ("immediate", "deferred", "auto")},
    "offload": {"training.enable_cpu_offload": True},
    "float8": {"quantize.dense.float8.enable": True},
    "float8_rowwise": {"quantize.dense.float8.enable": True, "quantize.dense.float8.recipe": "rowwise"},
    "float8_all_gather": {
        "quantize.dense.float8.enable_fsdp_float8_all_gather": True,
        "quantize.dense.float8.precompute_scale": True,
    },
    "mxfp8": {"quantize.dense.mxfp8.enable": True},
    "lora": {"lora.rank": 4},
    **{base: {"lora.rank": 4, "lora.base": base} for base in ("int8", "nf4")},
}
"""Settings of each option behind a ``+``."""

NUMBERED: dict[str, tuple[dict[str, Any], str]] = {
    "selective": ({"activation_checkpoint.mode": "selective"}, "activation_checkpoint.selective_option"),
    "reshard": ({}, "parallelism.reshard_after_forward_mode"),
}
"""Options that end in a number: the settings that they fix, and the field that gets the number."""

OTHER_LOSS = ("document", "float8", "float8_rowwise", "mxfp8", "lora", "int8", "nf4")
"""Options that change the results of the computation, not only its place and time."""

# each term and the degrees that its numbers set, in canonical order
_TERMS: dict[str, tuple[str, ...]] = {
    "pp": ("pp",),
    "ddp": ("dp_replicate",),
    "fsdp": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
    "cp": ("cp",),
    "tp": ("tp",),
    "ep": ("ep",),
    "accum": ("accum",),
}
_EXAMPLES = "1, fsdp8, hsdp2x4, pp2_fsdp2_tp2, cp2_accum4 or pp4+zbv_zero_bubble"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the mesh axes, outermost first, with microbatches and options. Every number is at least 1.

    Attributes:
        ep: degree of expert parallelism, which lies within the other axes and adds no ranks.
        accum: microbatches per step; under a pipeline, in multiples of the fewest that keep its schedule busy.
        options: names as in ``OPTIONS`` and ``NUMBERED``, in the order given.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    accum: int = 1
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: ParallelismConfig, num_ranks: int) -> "Layout":
        """The degrees of ``config`` on ``num_ranks`` ranks.

        Raises:
            LayoutError: the degrees do not multiply to ``num_ranks``.
        """
        degrees = {axis: getattr(config, name.partition(".")[2]) for axis, name in DEGREES.items()}
        layout = cls(**degrees | {"dp_shard": config.shard_degree(num_ranks)})
        if layout.num_ranks != num_ranks:
            raise LayoutError(
                f"the degrees multiply to {layout.num_ranks} ranks, but there are {num_ranks}: {layout.axes}.",
                fix=f"start {layout.num_ranks} ranks",
            )
        return layout

    @property
    def degrees(self) -> dict[str, int]:
        """Axis name to degree, outermost first; the degree of expert parallelism is the last."""
        return {axis: getattr(self, axis) for axis in DEGREES}

    @property
    def num_ranks(self) -> int:
        """Processes that the layout needs."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def fsdp(self) -> int:
        """Ranks that FSDP splits weights over, including the ranks that share a sequence."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks that FSDP splits the experts of one rank over: all ranks with the layer, except replicas."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def batch(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def axes(self) -> str:
        """The degrees of the axes that multiply, such as ``pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 1``."""
        return " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items() if axis != "ep")

    def settings(self) -> dict[str, Any]:
        """Dotted fields that the degrees and options set, with their values."""
        found: dict[str, Any] = {DEGREES[axis]: degree for axis, degree in self.degrees.items()}
        for option in self.options:
            found |= option_changes(option, str(self))
        return found

    def __str__(self) -> str:
        """Spelling of the layout, such as ``pp2_hsdp2x2_tp2``; ``1`` for one device."""
        data = "hsdp" if min(self.dp_replicate, self.dp_shard) > 1 else "ddp" if self.dp_replicate > 1 else "fsdp"
        terms = []
        for term, names in _TERMS.items():
            values = [getattr(self, name) for name in names]
            if max(values) > 1 and (term == data or not term.endswith("dp")):
                terms.append(term + "x".join(map(str, values)))
        return "+".join(("_".join(terms) or "1", *self.options))


def parse_layout(text: str) -> Layout:
    """The layout that ``text`` spells.

    Terms are joined by ``_``: ``1`` (one device), ``ddpN``, ``fsdpN``, ``hsdpRxS`` (R replicas of S shards), ``tpN``,
    ``cpN``, ``ppN``, ``epN``, ``accumN``. Options follow, each behind a ``+``.

    Raises:
        ConfigError: a term or an option is unknown, or is given twice; the message names it.
    """
    terms, *options = text.strip().split("+")
    degrees: dict[str, int] = {}
    for term in terms.split("_"):
        found = re.fullmatch(r"([a-z]+)(\d+)(?:x(\d+))?", term)
        names = _TERMS.get(found[1], ()) if found else ()
        values = [int(number) for number in found.groups()[1:] if number] if found else []
        if term != "1" and (not names or len(names) != len(values) or min(values) < 1):
            raise _unknown("term", term, text, _nearest_term(term))
        twice = next((name for name in names if name in degrees), None)
        if twice:
            raise ConfigError(
                f"{term} of the layout {text} sets {twice} a second time.",
                why="each degree has one term",
                fix="keep one",
            )
        degrees.update(zip(names, values, strict=True))
    seen: dict[str, str] = {}
    for option in options:
        for field in option_changes(option, text):
            if field in seen:
                raise ConfigError(
                    f"{seen[field]} and {option} of the layout {text} both set {field}.", fix=f"leave out {option}"
                )
            seen[field] = option
    return Layout(**degrees, options=tuple(options))


def option_changes(option: str, layout: str = "") -> dict[str, Any]:
    """Dotted fields that ``option`` sets, with their values.

    Args:
        option: without its ``+``.
        layout: the layout that has the option, for the error.

    Raises:
        ConfigError: there is no such option.
    """
    found = re.fullmatch(r"([a-z]+)(\d+)", option)
    if option in OPTIONS:
        return OPTIONS[option]
    if found and found[1] in NUMBERED:
        fixed, field = NUMBERED[found[1]]
        return {**fixed, field: int(found[2])}
    raise _unknown("option", option, layout, did_you_mean(option, [*OPTIONS, *(f"{name}2" for name in NUMBERED)]))


def apply_layout(config: RunConfig, layout: Layout) -> RunConfig:
    """``config`` on ``layout``: degrees and number of microbatches are the layout's, all other settings stay.

    The global batch stays too, and is split into that many microbatches. If it is -1, it becomes the batch that
    ``config.resolve.batch_sizes`` finds for so many microbatches.

    Raises:
        LayoutError: the global batch does not split like this, or the schedule file cannot be read.
    """
    placed = replace_fields(config, layout.settings())
    pieces = batch_unit(config, layout)
    total = config.training.global_batch_size
    if total == -1:
        total = batch_sizes(dataclasses.replace(config.training, local_batch_size=-1), pieces).total
    if total % pieces:
        above = -(-total // pieces) * pieces
        raise LayoutError(
            f"global_batch_size {total} is not a multiple of {layout.batch} data-parallel ranks x "
            f"{pieces // layout.batch} microbatches of {layout}.",
            why="every microbatch of every rank has as many sequences",
            fix=f"--training.global_batch_size {above}, or another accumN",
        )
    local = -1 if config.training.reproducible else total // pieces  # of a virtual shard
    sizes = {"training.global_batch_size": total, "training.local_batch_size": local}
    return replace_fields(placed, sizes)


def batch_unit(config: RunConfig, layout: Layout) -> int:
    """Unit of the global batch, which must be a multiple of it: data-parallel ranks times microbatches of ``layout``.

    Raises:
        LayoutError: the schedule file of ``config`` cannot be read.
    """
    unit = microbatch_unit(replace_fields(config, layout.settings()).parallelism)
    return layout.batch * layout.accum * unit


def _nearest_term(term: str) -> str:
    letters = re.sub(r"[^a-z]", "", term.lower())
    return did_you_mean(letters, _TERMS) if letters not in _TERMS else ""


def _unknown(kind: str, written: str, text: str, hint: str) -> ConfigError:
    names = ", ".join([*OPTIONS, *(f"{name}N" for name in NUMBERED)])
    number = "; hsdp takes two numbers, as in hsdp2x4, the others one, all above 0" if written[:2].isalpha() else ""
    return ConfigError(
        f"{written or 'an empty ' + kind} is not a layout {kind}{hint or '.'}",
        where=f"the layout {text!r}" if text else "",
        why="a layout is degrees joined by _ and options behind +" if kind == "term" else "",
        fix=f"write for example {_EXAMPLES}{number}" if kind == "term" else f"options are {names}",
    )


def spread_layout(arguments: Arguments) -> Iterator[CriusError]:
    """Give the degrees and options of the layout on the command line to their arguments, before any file is read."""
    text = arguments["layout"].text
    if not text:
        return
    try:
        layout = parse_layout(text)
    except ConfigError as error:
        yield error
        return
    yield from _give_layout(arguments, layout.settings(), text)


def spread_microbatches(arguments: Arguments) -> Iterator[CriusError]:
    """Give the batch sizes that ``accumN`` of a layout stands for to their arguments, after all files are read."""
    text = arguments["layout"].text
    if "accum" not in text:
        return
    batch = arguments["training.global_batch_size"]
    try:
        given = {"training.global_batch_size": batch.value()} if batch.source else {}
        placed = apply_layout(replace_fields(RunConfig(), given), parse_layout(text))
    except ConfigError as error:
        yield error
        return
    except ValueError:
        return  # reported elsewhere
    batch.leave_open()
    sizes = ("global_batch_size", "local_batch_size")
    yield from _give_layout(arguments, {f"training.{name}": getattr(placed.training, name) for name in sizes}, text)


def _give_layout(arguments: Arguments, changes: Mapping[str, Any], text: str) -> Iterator[CriusError]:
    for name, value in changes.items():
        if arguments[name].source == "command line":
            yield ConfigError(
                f"--{name} and {FLAG} {text} both set {name}.", where="command line", fix=f"leave out --{name}"
            )
            continue
        arguments[name].give([str(value)], "command line")
