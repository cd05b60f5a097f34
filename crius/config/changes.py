"""What differs between the settings of a checkpoint and those of the run that goes on from it, and what that means."""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from crius.config.param_groups import fits
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.errors import ConfigError

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
    ("data.*", "warn"),  # the fingerprint of the data says whether it is another
    ("validation.*", "warn"),
    ("debug.*", "warn"),
    ("compile.*", "warn"),
    ("*", "free"),  # layout, reports and all that no curve depends on
)
"""What a changed setting means; the first pattern that fits. ``refuse``: the curve would not be that of the run any
more. ``warn``: the curve changes, as it may be meant to. ``free``: it stays, up to the order of sums."""


SHAPES = (
    *("model.name", "model.flavor", "model.vocab_size", "model.dim", "model.num_layers", "model.num_heads"),
    *("model.num_kv_heads", "model.head_dim", "model.ffn_dim", "model.tied_embeddings"),
    *("model.num_experts", "model.expert_ffn_dim"),
    *("lora.rank", "lora.targets"),
)
"""Of weights: a checkpoint of others cannot be read, whoever allows it."""


FIRST_BOUNDARIES: dict[str, Any] = {"data.add_bos": False, "data.add_eos": True}
"""The rule of checkpoints that lack these settings. With the document mask it was another one: positions restarted
behind the end of a document, which saw the next document's first token as its label."""


TAKEN_OVER = ("data.add_bos", "debug.deterministic")
"""Settings that a resume takes from the checkpoint where they are not set, as ``train.inputs.resolve`` does."""


@dataclass(frozen=True)
class Change:
    """A setting that differs.

    Attributes:
        name: dotted field.
        old: value in the checkpoint; None where it is not set there, or not known.
        new: value now; None where it is not set, or not known to this version.
        kind: what it means.
    """

    name: str
    old: Any
    new: Any
    kind: Kind

    def __str__(self) -> str:
        return f"{_plain(self.name)}: {_shown(self.old)} -> {_shown(self.new)} ({self.kind})"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The differences of two flat configs, in the order of the new one, settings that only one knows included.

    A setting of today that an older checkpoint lacks had there what is its default today, or ``FIRST_BOUNDARIES``. One
    of ``TAKEN_OVER`` that the new one leaves open, as None, is no difference.
    """
    defaults, plain_old, plain_new = (json.loads(json.dumps(dict(one))) for one in (flatten(RunConfig()), old, new))
    missing = {name: defaults[name] for name in plain_new if name in defaults and name not in FIRST_BOUNDARIES}
    if plain_old.get("model.attention_mask") != "document":
        missing |= FIRST_BOUNDARIES
    plain_old = missing | plain_old
    names = [*plain_new, *(name for name in plain_old if name not in plain_new)]
    if all(isinstance(epochs := one.get("training.epochs"), int) and epochs > 0 for one in (plain_old, plain_new)):
        names = [name for name in names if name != "training.steps"]  # it is what the epochs come to
    return [
        Change(name, plain_old.get(name), plain_new.get(name), kind_of(name))
        for name in names
        if plain_old.get(name) != plain_new.get(name)
        and (name not in TAKEN_OVER or plain_new.get(name, "") is not None)
    ]


def kind_of(name: str) -> Kind:
    """What a change of a setting means."""
    return next(kind for pattern, kind in KINDS if fits(pattern, name))


def check_changes(found: Iterable[Change], allowed: Iterable[str], where: str) -> None:
    """Refuse the changes that a resume must not make.

    Args:
        found: from ``changes``.
        allowed: patterns of settings that may change all the same.
        where: the checkpoint.

    Raises:
        ConfigError: names all of them, old and new.
    """
    patterns = tuple(allowed)
    refused = [
        change for change in found if change.kind == "refuse" and not any(fits(p, change.name) for p in patterns)
    ]
    if not refused:
        return
    # another fingerprint of the data, which a refused setting of data brings, is allowed under the name data
    sections = ("data" if change.name.startswith("data.") else change.name for change in refused)
    allow = f", or {shlex.join(flag('checkpoint.allow_changes', list(dict.fromkeys([*patterns, *sections]))))}"
    back = shlex.join(part for change in refused if change.old is not None for part in flag(change.name, change.old))
    raise ConfigError(
        f"the run cannot go on from its checkpoint with {'another setting' if len(refused) == 1 else 'other settings'}:"
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
    """``text``, which may be a stranger's, without line breaks and what else acts on a terminal."""
    return text if text.isprintable() else ascii(text)


def flag(name: str, value: Any) -> list[str]:
    """What sets ``name``, a dotted field, to ``value`` on the command line."""
    if isinstance(value, bool):
        section, _, field = name.rpartition(".")
        return [f"--{section}.{field if value else f'no_{field}'}"]
    if isinstance(value, list | tuple):
        return [part for one in value for part in (f"--{name}", str(one))] or [f"--{name}="]
    return [f"--{name}", str(value)]
