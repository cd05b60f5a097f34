"""Where a step of a model with experts spends its time, from a trace of ``crius train --profiler.enable`` on a CPU.

    python benchmarks/experts_parts.py RUN/traces/step-6/rank-0.json

The time of each operator without those that it calls goes to the first row below whose pattern fits it or one that it
is called from, the outermost first; forward and backward together.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crius.table import aligned

PARTS = {
    "FSDP: gathers, scatters": r"FSDP::|_allgather_base_|_reduce_scatter_base_|RegisterPostBackward",
    "all-to-all": r"all_?to_?all",
    "experts: products": r"_Grouped|grouped_mm",
    "dispatch: sort, permute, counts": r"_Permute|aten::(arg)?sort|aten::scatter|repeat_interleave|aten::cumsum",
    "router: scores, choice": r"aten::(topk|_?softmax|gather|logsumexp|sigmoid)|(Gather|Softmax)Backward",
    "attention": r"_Blocked|attend|_Rotary",
    "other linear layers, loss": r"_Linear|mkldnn_linear|LinearCrossEntropy",
    "optimizer": r"Optimizer\.step",
    "small collectives": r"gloo:|c10d::|_c10d_functional|wait_tensor",
}
REST = "norms, residuals, all else"


def self_times(events: list[dict[str, Any]]) -> Iterator[tuple[list[str], float]]:
    """Of each event of one thread the names down to it, and its microseconds without those of its children."""
    stack: list[list[Any]] = []  # end, name, time left

    def leave(until: float) -> Iterator[tuple[list[str], float]]:
        while stack and stack[-1][0] <= until:
            _, _, left = stack[-1]
            yield [name for _, name, _ in stack], left
            stack.pop()

    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        yield from leave(event["ts"])
        if stack:
            stack[-1][2] -= event["dur"]
        stack.append([event["ts"] + event["dur"], event["name"], event["dur"]])
    yield from leave(float("inf"))


def part_of(names: list[str]) -> str:
    """The row that a chain of names belongs to."""
    return next((part for name in names for part, pattern in PARTS.items() if re.search(pattern, name)), REST)


def main(path: str) -> None:
    """Print the shares of one rank's steps."""
    events = [e for e in json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"] if e.get("ph") == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    found: Counter[str] = Counter()
    for thread in {event["tid"] for event in events if event.get("cat") == "cpu_op"}:
        own = [e for e in events if e["tid"] == thread and e.get("cat") in ("cpu_op", "user_annotation")]
        own = [event for event in own if not event["name"].startswith(("ProfilerStep", "PyTorch Profiler", "gloo:"))]
        for names, microseconds in self_times(own):
            found[part_of(names)] += microseconds
    whole = sum(event["dur"] for event in steps)
    found["Python between operators"] = whole - found.total()
    rows = [(part, f"{time / len(steps) / 1e3:.1f}", f"{time / whole:.1%}") for part, time in found.most_common()]
    print("\n".join(aligned([("", "ms a step", "share"), *rows], left=(0,))))


if __name__ == "__main__":
    main(sys.argv[1])
