"""The newest texts of a run's model, kept in its folder for the report."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crius.interop.weights import Weights
from crius.run_file import write_run_file
from crius.tools.generate.settings import Settings
from crius.untrusted import records_below

SAMPLES = "samples.jsonl"
"""Name of the file in a run folder."""

MOST_SAMPLES = 100
MOST_OF_COMMAND = 8
MOST_CHARACTERS = 4_000
"""Most lines of the file, most answers that are kept of one command, and most characters of a prompt or answer."""

_KEPT = ("chat", "temperature", "top_k", "top_p", "seed")


Text = tuple[str, str, list[int]]
"""A prompt, its answer, and the ids of the answer."""


def keep_samples(weights: Weights, answers: Sequence[Text], settings: Settings) -> None:
    """``keep`` for the run that ``weights`` are from.

    Weights that are not from a run folder, and a folder that this user may not write, keep nothing.
    """
    if weights.saved is None or not weights.saved.disk.is_local:
        return
    run = Path(weights.saved.disk.where).parent
    if (run / "run.toml").is_file() and os.access(run, os.W_OK):
        keep(run, weights.saved.manifest.step, answers, settings, _warn)


def keep(run: Path, step: int, answers: Sequence[Text], settings: Settings, warn: Callable[[str], None]) -> None:
    """Add the first ``answers`` to the samples of a run. A sample of the same step, prompt and settings is replaced.

    Args:
        run: folder of the run.
        step: steps that the weights were trained.
        answers: answers of one command, or of one step.
        settings: settings of all answers.
        warn: gets a warning if they cannot be written.
    """
    fixed = {"step": step, **{name: asdict(settings)[name] for name in _KEPT}}
    new = [
        {"time": time.time(), **fixed, "prompt": _cut(prompt), "text": _cut(text), "tokens": tokens}
        for prompt, text, tokens in answers[:MOST_OF_COMMAND]
    ]
    known = {_key(sample): sample for sample in (*_read(run), *new)}
    _write(run, sorted(known.values(), key=lambda sample: sample["time"])[-MOST_SAMPLES:], warn)


def forget(run: Path, step: int) -> None:
    """Remove the samples of a run after ``step``, from which it resumes."""
    found = _read(run)
    kept = [sample for sample in found if sample.get("step", 0) <= step]
    if len(kept) < len(found):
        _write(run, kept, _warn)


def _write(run: Path, samples: Sequence[Mapping[str, Any]], warn: Callable[[str], None]) -> None:
    write_run_file(run / SAMPLES, "".join(json.dumps(sample) + "\n" for sample in samples), warn)


def _warn(why: str) -> None:
    sys.stderr.write(f"warning: {why}: the report will not have this text\n")


def _read(run: Path) -> list[dict[str, Any]]:
    """The samples of a run, without damaged lines."""
    with contextlib.suppress(OSError):
        return [found for found in records_below(run, SAMPLES) if found and isinstance(found.get("time"), (int, float))]
    return []


def _key(sample: dict[str, Any]) -> str:
    return json.dumps({**sample, "time": None, "text": None, "tokens": None}, sort_keys=True)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "..."
