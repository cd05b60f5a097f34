"""``crius import --explain``: what an import reads of a source, what it leaves out, and every reason against it."""

import contextlib
import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from crius.errors import ConfigError, CriusError
from crius.interop.kept import CONFIG, GENERATION
from crius.interop.safetensors_file import ADAPTER_CONFIG, ADAPTER_FILE, INDEX, SUFFIX, WHOLE, model_files
from crius.interop.weights import finite_parameters
from crius.models.huggingface import family_of, judged, read_config, read_model_settings
from crius.models.keys import Noted
from crius.models.registry import families
from crius.table import aligned
from crius.tokens.files import FILES, original_file
from crius.tools.convert.importing import kept_adapters, open_source, place_of, write_tokenizer
from crius.untrusted import parse_json

_LEFT_OUT = {
    SUFFIX: "none of the files of the weights",
    ".bin": "a pickle, which can run code",
    ".pt": "a pickle, which can run code",
    ".pth": "a pickle, which can run code",
    ".py": "code is not executed",
}
_SHOWN = 40
_LONG = 400
_WIDTH = 100


@dataclass(frozen=True)
class Explanation:
    """What an import makes of a source.

    Attributes:
        files: what each file is read for, or why it is left out, by name; the latter begins with ``left out``.
        keys: what each key of config.json that is read became, by name.
        unknown: further keys that may change the computation, with their values. They are not read.
        model: settings of ``[model]``; empty if the source is refused.
        refusals: every reason against an import.
    """

    files: Mapping[str, str]
    keys: Mapping[str, str]
    unknown: Mapping[str, Any]
    model: Mapping[str, Any]
    refusals: tuple[CriusError, ...]

    def check(self) -> None:
        """Raise ConfigError with all refusals, if there are any."""
        if len(self.refusals) > 1:
            raise ConfigError.together(self.refusals)
        for one in self.refusals:
            raise ConfigError(one.what, where=one.where, why=one.why, fix=one.fix)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "refusals": [error.body() for error in self.refusals]}

    def lines(self) -> list[str]:
        """For people."""
        lines = []
        for head, table in (("files", self.files), (f"keys of {CONFIG}", self.keys)):
            if table:
                lines += [head, *(f"  {row}" for row in aligned(list(table.items()), None))]
        for head, facts in (("keys that are not known, and not read", self.unknown), ("model", self.model)):
            if facts:
                told = ", ".join(f"{name} {_shown(value, _LONG)}" for name, value in facts.items() if value != "")
                lines.append(textwrap.fill(f"{head}: {told}", _WIDTH, subsequent_indent="  "))
        return lines


def explain(source: str, adapter: str) -> Explanation:
    """Read a source as an import does, without its numbers, and write nothing.

    Args:
        source: as in ``import_model``; or a config.json, which needs no weights then.
        adapter: as in ``import_model``.

    Raises:
        ConfigError: there is no such source.
        EnvironmentError: the hub does not return it.
    """
    where = place_of(source)
    place = Path(where).expanduser()
    refusals: list[CriusError] = []
    model: Mapping[str, Any] = {}
    base = place
    is_config = place.is_file() and place.suffix == ".json"
    with _gathered(refusals):
        if is_config:
            model = read_model_settings(str(place), families(), "command line")[1]
        else:
            weights, tokenizer, note = open_source(where, adapter)
            model = weights.model
            if weights.adapters:
                base = Path(weights.adapters.base["path"])
            with _gathered(refusals):
                finite_parameters(weights, source)
            with _gathered(refusals):
                kept_adapters(source, weights, adapter)
            with _gathered(refusals), TemporaryDirectory() as folder:
                write_tokenizer(Path(folder), tokenizer, model["vocab_size"], note)
    files = {place.name: "settings of the model" if is_config else "all of it"}
    if (place / CONFIG).exists() or (place / ADAPTER_CONFIG).exists():
        files = dict(_files(place, adapter))
    content = Noted({})
    keys: dict[str, str] = {}
    file = base / CONFIG if base.is_dir() else base
    if is_config or (base.is_dir() and file.exists()):
        with contextlib.suppress(ConfigError):  # it is in refusals
            content = read_config(str(file), "command line")[1]
            keys = dict(_keys(content))
    return Explanation(files, keys, content.unread, model, tuple(refusals))


@contextlib.contextmanager
def _gathered(refusals: list[CriusError]) -> Iterator[None]:
    """Add an error to ``refusals``, unless one of them says the same."""
    try:
        yield
    except CriusError as error:
        if not any(error.what in one.what for one in refusals):
            refusals.append(error)


def _files(folder: Path, adapter: str) -> Iterator[tuple[str, str]]:
    """What each file of a folder is for."""
    weights: list[str] = []
    with contextlib.suppress(CriusError):  # it is in refusals
        weights = model_files(folder)
    original = original_file(folder)
    used = dict.fromkeys(weights, "weights")
    used |= {CONFIG: "settings of the model", GENERATION: "kept, for an export"}
    used |= dict.fromkeys([*FILES, original.name if original else ""], "tokenizer")
    if adapter != "leave_out":
        used |= {ADAPTER_CONFIG: "settings of the adapter", ADAPTER_FILE: "the adapter"}
    if WHOLE not in weights:
        used[INDEX] = "names the files of the weights"
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        reason = _LEFT_OUT.get(Path(entry.name).suffix, "an import does not need it")
        if os.path.isdir(entry):
            reason = "a folder"
        elif entry.name == INDEX:
            reason = f"{WHOLE} is there"
        yield entry.name, used.get(entry.name, f"left out: {reason}")


def _keys(content: Noted) -> Iterator[tuple[str, str]]:
    """What each key became, found by reading the file without it. Marks the keys of ``content`` that are read."""
    name, family = family_of(content, families())
    settings, wrong = judged(content, family, name, with_weights=True)
    fields = _fields(settings)
    for key, value in content.items():
        if key not in content.seen or key == "model_type":
            continue
        others = {other: one for other, one in content.items() if other != key}
        without, less_wrong = judged(others, family, name, with_weights=True)
        fields_without = _fields(without)
        told = [problem for problem in wrong if problem not in less_wrong]
        if not told:
            new = [field for field in fields if field not in fields_without and field in settings]
            differing = [field for field in fields if fields_without.get(field) != fields[field]]
            told = [f"{field} {_shown(fields[field])}" for field in new or differing]
        yield f"{key} {_shown(value)}", "; ".join(told) or "as without it"


def _fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of ``[model]``, with each word by itself."""
    return {**settings, **parse_json(settings.get("words", "{}")), "words": ""}


def _shown(value: object, most: int = _SHOWN) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else f"{text[: most - 4]} ..."
