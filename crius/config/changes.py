"""Differences between the settings of a checkpoint and those of the run that resumes from it, and their effect."""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from crius.config.data import table_text
from crius.config.param_groups import fits
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.errors import ConfigError
from crius.untrusted import parse_json

Kind = Literal["refuse", "warn", "free"]

KINDS: tuple[tuple[str, Kind], ...] = (
    ("model.from_hf", "free"),  # where sizes came from
    ("model.*", "refuse"),  # other weights
    ("tokenizer.*", "refuse"),  # other ids for the same text
    ("training.seq_len", "refuse"),  # a sample id stands for another sequence
    ("training.dtype", "refuse"),
    ("optimizer.name", "refuse"),  # other state
    ("debug.seed", "refuse"),  # another order of the data
    ("training.local_batch_size", "free"),
    ("training.device", "free"),
    ("training.gc_interval", "free"),
    ("training.enable_cpu_offload", "free"),
    ("training.gradient_sync", "free"),
    ("training.*", "warn"),
    ("optimizer.*", "warn"),
    ("lr_scheduler.*", "warn"),
    ("quantize.*", "warn"),
    ("lora.*", "refuse"),  # other weights, or another model around them
    ("moe.*", "warn"),
    ("stability.*", "warn"),
    ("data.prefetch", "free"),
    ("data.add_bos", "refuse"),  # other inputs for the same text
    ("data.add_eos", "refuse"),  # other labels
    ("data.mix", "refuse"),  # other shares
    ("data.stage", "refuse"),
    ("data.alpha", "refuse"),
    ("data.*", "warn"),  # the fingerprint of the data says whether it is another
    ("validation.*", "warn"),
    ("debug.*", "warn"),
    ("compile.*", "warn"),
    ("*", "free"),  # layout, reports and all that no curve depends on
)
"""Effect of a changed setting; the first pattern that fits counts. ``refuse``: it would not be the same curve any more.
``warn``: the curve changes, which may be intended. ``free``: the curve stays, up to the order of sums."""


SHAPES = (
    *("model.name", "model.flavor", "model.vocab_size", "model.dim", "model.num_layers", "model.num_heads"),
    *("model.num_kv_heads", "model.head_dim", "model.ffn_dim", "model.tied_embeddings"),
    *("model.num_experts", "model.expert_ffn_dim"),
    *("lora.rank", "lora.targets"),
)
"""Settings that decide which weights a model has. A checkpoint of other weights cannot be read, so no flag allows
it."""


FIRST_BOUNDARIES: dict[str, Any] = {"data.add_bos": False, "data.add_eos": True}
"""Values of these settings in checkpoints that lack them. With the document mask such a checkpoint had another rule:
positions restarted after the end of a document, and that end saw the next document's first token as its label."""


TAKEN_OVER = ("data.add_bos", "debug.deterministic")
"""Settings that a resume takes from the checkpoint if they are not set, as ``train.inputs.resolve`` does."""


@dataclass(frozen=True)
class Change:
    """A setting that differs between a checkpoint and the run that resumes from it.

    Attributes:
        name: dotted field.
        old: value in the checkpoint; None if it is not set or not known there.
        new: value now; None if it is not set, or not known to this version.
        kind: effect of the change.
    """

    name: str
    old: Any
    new: Any
    kind: Kind

    def __str__(self) -> str:
        return f"{_plain(self.name)}: {_shown(self.old)} -> {_shown(self.new)} ({self.kind})"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The differences between two flat configs, in the order of the new one, with settings that only one of them has.

    If an older checkpoint lacks a setting, its value there counts as ``FIRST_BOUNDARIES``, or else as today's default.
    A setting of ``TAKEN_OVER`` that is None in the new config is not a difference.
    """
    defaults, plain_old, plain_new = (parse_json(json.dumps(dict(one))) for one in (flatten(RunConfig()), old, new))
    missing = {name: defaults[name] for name in plain_new if name in defaults and name not in FIRST_BOUNDARIES}
    if plain_old.get("model.attention_mask") != "document":
        missing |= FIRST_BOUNDARIES
    plain_old = missing | plain_old
    names = [*plain_new, *(name for name in plain_old if name not in plain_new)]
    if all(isinstance(epochs := one.get("training.epochs"), int) and epochs > 0 for one in (plain_old, plain_new)):
        names = [name for name in names if name != "training.steps"]  # follows from the epochs
    return [
        Change(name, plain_old.get(name), plain_new.get(name), kind_of(name))
        for name in names
        if plain_old.get(name) != plain_new.get(name)
        and (name not in TAKEN_OVER or plain_new.get(name, "") is not None)
    ]


def kind_of(name: str) -> Kind:
    """Effect of a change of the setting ``name``."""
    return next(kind for pattern, kind in KINDS if fits(pattern, name))


def check_changes(found: Iterable[Change], allowed: Iterable[str], where: str) -> None:
    """Refuse the changes that a resume must not make.

    Args:
        found: from ``changes``.
        allowed: patterns of settings that may change.
        where: the checkpoint.

    Raises:
        ConfigError: lists all refused changes, with old and new value.
    """
    patterns = tuple(allowed)
    refused = [
        change for change in found if change.kind == "refuse" and not any(fits(p, change.name) for p in patterns)
    ]
    if not refused:
        return
    # a refused setting of data also changes the fingerprint of the data, which is allowed under the name data
    sections = ("data" if change.name.startswith("data.") else change.name for change in refused)
    allow = f", or {shlex.join(flag('checkpoint.allow_changes', list(dict.fromkeys([*patterns, *sections]))))}"
    back = shlex.join(part for change in refused if change.old is not None for part in flag(change.name, change.old))
    raise ConfigError(
        f"the run cannot resume from its checkpoint with {'this change' if len(refused) == 1 else 'these changes'}:"
        + "".join(f"\n  {_plain(change.name)}: {_shown(change.old)} -> {_shown(change.new)}" for change in refused),
        where=where,
        why="it would not be the same run any more",
        fix=f"{back + ', or ' if back else ''}--job.run_dir NEW for a new run"
        + ("" if any(change.name in SHAPES for change in refused) else allow),
    )


def _shown(value: Any) -> str:
    if value is None:
        return "(not set)"
    return _plain(" ".join(map(str, value)) if isinstance(value, list) else str(value)) or "(empty)"


def _plain(text: str) -> str:
    """``text``, which may be a stranger's, without line breaks and other characters that act on a terminal."""
    return text if text.isprintable() else ascii(text)


def _text(value: Any) -> str:
    return table_text(value) if isinstance(value, Mapping) else str(value)


def flag(name: str, value: Any) -> list[str]:
    """Flags that set ``name``, a dotted field, to ``value`` on the command line."""
    if isinstance(value, bool):
        section, dot, field = name.rpartition(".")
        return [f"--{section}{dot}{field if value else f'no_{field}'}"]
    if isinstance(value, list | tuple):
        return [part for one in value for part in (f"--{name}", _text(one))] or [f"--{name}="]
    return [f"--{name}", str(value)]
