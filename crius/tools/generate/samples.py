"""The newest texts of a run's model, kept in its folder for the report."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
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


def keep_samples(weights: Weights, answers: Sequence[tuple[str, str]], settings: Settings) -> None:
    """Add the first ``answers`` to the samples of the run that ``weights`` are from.

    A sample of the same step, prompt and settings is replaced. Weights that are not from a run folder, and a folder
    that this user may not write, keep nothing.

    Args:
        weights: weights that answered.
        answers: each prompt of a command and its answer.
        settings: settings of all answers.
    """
    if weights.saved is None or not weights.saved.disk.is_local:
        return
    run = Path(weights.saved.disk.where).parent
    if not (run / "run.toml").is_file() or not os.access(run, os.W_OK):
        return
    fixed = {"step": weights.saved.manifest.step, **{name: asdict(settings)[name] for name in _KEPT}}
    new = [{"time": time.time(), **fixed, "prompt": _cut(prompt), "text": _cut(text)} for prompt, text in answers]
    known = {_key(sample): sample for sample in (*_read(run), *new[:MOST_OF_COMMAND])}
    newest = sorted(known.values(), key=lambda sample: sample["time"])[-MOST_SAMPLES:]
    write_run_file(run / SAMPLES, "".join(json.dumps(sample) + "\n" for sample in newest), _warn)


def _warn(why: str) -> None:
    sys.stderr.write(f"warning: {why}: the report will not have this text\n")


def _read(run: Path) -> list[dict[str, Any]]:
    """The samples of a run, without damaged lines."""
    with contextlib.suppress(OSError):
        return [found for found in records_below(run, SAMPLES) if found and isinstance(found.get("time"), (int, float))]
    return []


def _key(sample: dict[str, Any]) -> str:
    return json.dumps({**sample, "time": None, "text": None}, sort_keys=True)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "..."
