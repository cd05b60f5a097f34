"""Tensors of other programs' checkpoints and their names in Crius: torchtitan's names, plain names, and renames."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from crius.checkpoint.pieces import TensorSource
from crius.config.param_groups import fits, nearest
from crius.errors import ConfigError
from crius.interop.foreign import Foreign

MODEL_ROOTS = ("app.model.", "model.")
OPTIMIZER_ROOTS = ("app.optimizer.", "app.optim.", "optimizer.", "optim.")
SKIPPED = "--skip"
"""Reason for leaving out a key that the caller named."""

STATES = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")
"""Optimizer state in a Crius checkpoint, per parameter."""

# first parts of the names of values besides weights and moments, and why an import leaves them out
_LEFT = {
    "lr_scheduler": "the schedule comes from the config, and follows the step",
    "dataloader": "the place in the data: Crius reads its own corpus, from the start",
    "train_state": "counters; only the step is imported",
    "rng_state": "random streams come from the seed",
    **dict.fromkeys(("step", "global_step", "epoch"), "a counter; only the step is imported"),
}
_STEP_KEYS = ("train_state.step", "app.train_state.step", "step", "global_step")


@dataclass(frozen=True)
class KeyRow:
    """Fate of a key.

    Attributes:
        source: key in the other checkpoint.
        target: key in a Crius checkpoint; empty if it has none.
        reason: why it has none.
        is_known: whether it may be left out; else it is an error.
    """

    source: str
    target: str = ""
    reason: str = ""
    is_known: bool = True


@dataclass(frozen=True)
class Rename:
    """A parameter's name in another program; ``*`` is one part of a name, or a piece of one part.

    Attributes:
        old: pattern of a whole key, or of the parameter's name in a key.
        new: parameter's name in Crius; each ``*`` is the text that the same ``*`` of ``old`` stands for.
    """

    old: str
    new: str

    @classmethod
    def parse(cls, text: str) -> "Rename":
        """The rename in ``text``, written ``OLD=NEW``.

        Raises:
            ConfigError: ``text`` has another form.
        """
        old, equals, new = text.partition("=")
        if not (old and equals and new) or "=" in new or old.count("*") != new.count("*"):
            raise ConfigError(
                f"--rename {text} must be OLD=NEW with as many * in NEW as in OLD.",
                where="command line",
                fix="e.g. --rename 'layers.*.mlp.up_proj.weight=layers.*.feed_forward.w3.weight'",
            )
        return cls(old, new)

    def apply(self, name: str) -> str:
        """The new name; empty if ``name`` does not match."""
        pattern = re.escape(self.old).replace(r"\*", r"([^.]*)")
        match = re.fullmatch(pattern, name)
        if not match:
            return ""
        filled = iter(match.groups())
        return "".join(next(filled) if part == "*" else part for part in re.split(r"(\*)", self.new))


TITAN = (
    Rename("layers.*.moe.router.gate.weight", "layers.*.feed_forward.router.weight"),
    Rename("layers.*.moe.experts.*", "layers.*.feed_forward.experts.*"),
    Rename("layers.*.moe.shared_experts.*.weight", "layers.*.feed_forward.shared.*.weight"),
    Rename("layers.*.moe.expert_bias", "layers.*.feed_forward.router.bias"),
)
"""torchtitan's names that differ from Crius's; its experts have the same shapes, ``(E, F, D)`` and for w2 ``(E, D,
F)``."""

_COUNTER = ".moe.tokens_per_expert"  # torchtitan's, saved by some of its versions


def in_titan(name: str) -> str:
    """torchtitan's name of a Crius parameter."""
    return next(filter(None, (Rename(rename.new, rename.old).apply(name) for rename in TITAN)), name)


def _of_titan(name: str) -> str:
    return next(filter(None, (rename.apply(name) for rename in TITAN)), name)


def assign(foreign: Foreign, renames: Sequence[Rename], skips: Sequence[str]) -> list[KeyRow]:
    """Fate of every key, in the order of the keys.

    Args:
        foreign: the other checkpoint.
        renames: names of parameters.
        skips: patterns of keys to leave out, see ``crius.config.param_groups.fits``.

    Raises:
        ConfigError: a rename or a pattern matches no key, or two keys get the same name.
    """
    keys = sorted([*foreign.tensors, *foreign.values, *foreign.unreadable])
    has_root = any(key.startswith(MODEL_ROOTS) for key in keys)
    unused = {*(f"--rename {rename.old}={rename.new}" for rename in renames), *(f"--skip {skip}" for skip in skips)}

    def renamed(name: str) -> str:
        for rename in renames:
            if new := rename.apply(name):
                unused.discard(f"--rename {rename.old}={rename.new}")
                return new
        return ""

    rows = []
    for key in keys:
        if meant := {f"--skip {skip}" for skip in skips if fits(skip, key) or fnmatchcase(key, skip)}:
            unused -= meant
            rows.append(KeyRow(key, reason=SKIPPED))
        elif key in foreign.unreadable:
            rows.append(KeyRow(key, reason=foreign.unreadable[key], is_known=False))
        else:
            rows.append(_row(key, key in foreign.tensors, has_root, renamed))
    if unused:
        shown = sorted(unused)[0]
        near = nearest(re.split(r"[ =]", shown)[1], keys)
        fix = f"its first key is {keys[0]}" if keys else "its first key is (none)"
        if near:
            fix = f"one of its keys fits {near}"
        raise ConfigError(f"{shown} matches no key of the checkpoint.", where="command line", fix=fix)
    return _without_orphans(_distinct(rows), foreign)


def _row(key: str, is_tensor: bool, has_root: bool, renamed: Callable[[str], str]) -> KeyRow:
    if is_tensor and (name := renamed(key)):
        return KeyRow(key, f"model.{name}")
    if root := next((root for root in OPTIMIZER_ROOTS if key.startswith(root)), ""):
        return _optimizer_row(key, key.removeprefix(root), is_tensor, renamed)
    first = key.removeprefix("app.").split(".")[0]
    if first in _LEFT:
        return KeyRow(key, reason=_LEFT[first])
    if not is_tensor:
        return KeyRow(key, reason="not a tensor, and not a known value", is_known=False)
    root = next((root for root in MODEL_ROOTS if key.startswith(root)), "")
    if has_root and not root:
        return KeyRow(key, reason=f"not in {' or '.join(MODEL_ROOTS)}", is_known=False)
    name = key.removeprefix(root)
    if name.endswith(_COUNTER):
        return KeyRow(key, reason="a counter of a step")
    return KeyRow(key, f"model.{renamed(name) or _of_titan(name)}")


def _optimizer_row(key: str, rest: str, is_tensor: bool, renamed: Callable[[str], str]) -> KeyRow:
    if rest.startswith("param_groups."):
        return KeyRow(key, reason="settings of the optimizer come from the config")
    name, _, state = rest.removeprefix("state.").rpartition(".")
    if not rest.startswith("state.") or not name or state not in STATES:
        return KeyRow(key, reason="not a state of Crius's optimizers", is_known=False)
    if not is_tensor:
        return KeyRow(key, reason="a state that is not a tensor", is_known=False)
    return KeyRow(key, f"optim.{renamed(name) or _of_titan(name)}.{state}")


def _distinct(rows: list[KeyRow]) -> list[KeyRow]:
    sources: dict[str, str] = {}
    for row in rows:
        if row.target and sources.setdefault(row.target, row.source) != row.source:
            raise ConfigError(
                f"{sources[row.target]} and {row.source} both become {row.target}.",
                where="command line",
                fix=f"--skip {row.source}",
            )
    return rows


def _without_orphans(rows: list[KeyRow], foreign: Foreign) -> list[KeyRow]:
    """Rows in which states without a parameter, or of another shape than it, are marked."""
    shapes = {
        row.target.removeprefix("model."): _shape(foreign, row) for row in rows if row.target.startswith("model.")
    }
    checked = []
    for row in rows:
        name, _, state = row.target.removeprefix("optim.").rpartition(".")
        if not row.target.startswith("optim."):
            checked.append(row)
        elif name not in shapes:
            checked.append(KeyRow(row.source, reason=f"there is no parameter {name}", is_known=False))
        elif _shape(foreign, row) != (() if state == "step" else shapes[name]):
            checked.append(KeyRow(row.source, reason=f"it differs in shape from {name}", is_known=False))
        else:
            checked.append(row)
    return checked


def _shape(foreign: Foreign, row: KeyRow) -> tuple[int, ...]:
    return foreign.tensors[row.source].shape


def step_of(foreign: Foreign) -> int | None:
    """The step in a checkpoint; None if it has none.

    Raises:
        CheckpointError: the value is not a step.
    """
    for key in _STEP_KEYS:
        tensor = foreign.tensors.get(key)
        if tensor is not None and tensor.shape in ((), (1,)) and tensor.dtype in ("I64", "I32"):
            return int.from_bytes(tensor.read(), "little", signed=True)
        value = foreign.values[key]() if key in foreign.values else None
        if type(value) is int:
            return value
    return None


def folded(keys: Iterable[str]) -> dict[str, int]:
    """Keys with ``*`` for the numbers of layers, and the number of keys for each."""
    counts: dict[str, int] = {}
    for key in keys:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", key)
        counts[pattern] = counts.get(pattern, 0) + 1
    return counts


def is_rotated(tensor: TensorSource, target: str) -> bool:
    """Whether the rows of a tensor are dims that rotary embeddings turn: weights and moments of queries and keys."""
    return len(tensor.shape) == 2 and bool(re.search(r"\.attention\.w[qk]\.weight(\.|$)", target))
