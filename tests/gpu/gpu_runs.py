"""Runs on a GPU, each in a process of its own: CUDA does not survive a fork, and tests fork."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT, SMALL, crius, read_metrics, steps_of

from benchmarks.gpu.runs import documents

DEVICE = "cuda"
QUIET = ["--validation.interval", "0", "--metrics.log_interval", "1"]
GOLDEN_RUN = [*SMALL, "--model.num_layers", "8", *QUIET, "--compile.no_enable"]


def document_run(folder: Path) -> list[str]:
    """Flags of the golden run under the document mask, on rows of several documents.

    The golden text is one file, and so one document, for which the document mask is the causal one.
    """
    corpus = documents(folder / "documents")
    return [*GOLDEN_RUN, "--data.path", str(corpus), "--training.seq_len", "128", "--model.attention_mask", "document"]


@dataclass(frozen=True)
class Run:
    output: str
    records: list[dict]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]

    @property
    def peak_gib(self) -> float:
        """Of the last step: the first ones also allocate the optimizer's state."""
        return self.records[-1]["memory_gib"]

    @property
    def num_graphs(self) -> int:
        found = re.search(r"^compile: (\d+) graphs?\b", self.output, re.MULTILINE)
        return int(found[1]) if found else 0


def train_all(folder: Path, runs: dict[str, list[str]], timeout: float = 240) -> dict[str, Run]:
    """``crius train`` with each list of flags, at the same time; on the GPU where they say nothing else."""

    def one(name: str) -> Run:
        flags = ["--training.device", DEVICE, *runs[name], "--job.run_dir", str(folder / name), "--nproc", "1"]
        if "--training.device" in runs[name]:
            flags = flags[2:]
        done = crius("train", *flags, timeout=timeout)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        return Run(done.stdout, steps_of(read_metrics(folder / name)))

    with ThreadPoolExecutor(len(runs)) as pool:
        return dict(zip(runs, pool.map(one, runs), strict=True))


def run_program(file: str, *arguments: str, timeout: float = 120) -> None:
    """A function of a test file, which its ``__main__`` block calls."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, file, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
