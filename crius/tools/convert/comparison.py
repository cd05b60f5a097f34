"""Exports compared with transformers and PEFT: ``crius.tools.convert.logits``, and what its results mean. No torch."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from crius.errors import CheckpointError
from crius.host import python_path
from crius.models.registry import IMPORTED
from crius.untrusted import parse_json

TOLERANCE = 1e-5
"""Largest difference of logits in float32, relative to the largest one. Other orders of the same sums give as much;
another model gives more."""

ROUNDINGS = 3
LIMIT = 1e-3
"""Factor for sensitive models, in which rounding alone exceeds the limit. Their float32 logits are compared with their
own float64 logits, and may be this many times as far from those of transformers, but no further than the limit."""

_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}

Job = Mapping[str, Any]
Compare = Callable[[Job], str]
"""Compares an export, and returns the result in words; see ``compared``."""


@contextlib.contextmanager
def comparing() -> Iterator[Compare]:
    """Compare exports in one process, which imports transformers once. The first comparison starts it."""
    with contextlib.ExitStack() as stack:
        started = functools.cache(lambda: stack.enter_context(_process()))

        def compare(job: Job) -> str:
            return _in_words(job, started()({**job, "tolerance": TOLERANCE}))

        yield compare


def compared(job: Job) -> str:
    """Compare an export in a process of its own.

    Args:
        job: arguments of ``crius.tools.convert.logits.compare`` but ``tolerance``.

    Raises:
        CheckpointError: transformers or PEFT does not load the export, or has other logits or ids.
    """
    with comparing() as compare:
        return compare(job)


@contextlib.contextmanager
def _process() -> Iterator[Callable[[Job], Mapping[str, Any]]]:
    """A process that compares. The facts of a job that fails are the last line of its error."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "crius.tools.convert.logits", *IMPORTED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **_QUIET, "PYTHONPATH": python_path()},
        )
        jobs = process.stdin
        results = process.stdout
        assert jobs and results

        def run(job: Job) -> Mapping[str, Any]:
            with contextlib.suppress(BrokenPipeError):
                jobs.write(json.dumps(job) + "\n")
                jobs.flush()
            if line := results.readline():
                found: Mapping[str, Any] = parse_json(line)
                return found
            errors.seek(0)
            return {"error": (errors.read().strip().splitlines() or [f"exit code {process.wait()}"])[-1]}

        try:
            yield run
        finally:
            process.kill()
            process.communicate()


def _in_words(job: Job, found: Mapping[str, Any]) -> str:
    if "error" in found:
        raise _unproven(f"{'peft' if 'base' in job else 'transformers'} does not load it", found["error"])
    if "difference" not in found:
        return f"not compared: {found['version']} has no such architecture"
    if found["texts"]:
        fix = f"--no_tokenizer, and {job['tokenizer']} beside it with a tokenizer_config.json that says "
        fix += '"tokenizer_class": "PreTrainedTokenizerFast"'
        raise _unproven(f"AutoTokenizer makes other ids of {found['texts'][0]!r}", "its class differs", fix)
    scale = found["largest"] or 1.0
    share = found["difference"] / scale
    rounding = found["rounding"] / scale
    told = f"max difference {share:.1e} x max |logit| {found['largest']:.3g} from {found['version']}"
    limit = max(TOLERANCE, min(ROUNDINGS * rounding, LIMIT))
    if not share <= limit:
        raise _unproven(told, f"another order of sums gives at most {limit:.1e}")
    at_most = f"at most {limit:.1e}"
    if limit > TOLERANCE:
        at_most += f", since rounding alone moves this model by {rounding:.1e}"
    return f"{told}, float32, {found['tokens']} tokens, {at_most}"


def _unproven(what: str, why: str, fix: str = "report it with what crius doctor prints") -> CheckpointError:
    return CheckpointError(f"the export differs from the model: {what}; it was removed.", why=why, fix=fix)
