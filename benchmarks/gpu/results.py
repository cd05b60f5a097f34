"""The pages of what ran on a GPU, from the committed results: ``python -m benchmarks.gpu.results [--write]``.

``docs/gpu_results.md`` is made whole; ``docs/tested.md`` has the summary between two marks. Of a check that ran several
times the newest row counts.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.host import ROOT
from benchmarks.gpu.record import WORDS

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "gpu_results.md"
SUMMARY_PAGE = ROOT / "docs" / "tested.md"
BEGIN = "<!-- made by benchmarks/gpu/results.py -->\n"
END = "<!-- end of what it made -->\n"
NOTHING = "**Nothing of Crius has run on a GPU so far.**"
NEVER = "Several GPUs over NVLink, and several hosts, have never run."
COLUMNS = ("step", "check", "right", "figure", "ratio", "of the ceiling", "card", "date", "commit")
FIGURES = {
    "tokens_per_second": "{:,.0f} tokens/s",
    "tflop_per_s": "{:,.0f} TFLOP/s",
    "mfu": "MFU {:.1%}",
    "peak_gib": "{:.1f} GiB",
    "gap": "gap {:.1e}",
}
"""Figures of a row that the page shows, by name."""
CEILING = ("system: ceiling matmul bfloat16", "tflop_per_s")
"""Check and figure of the matmul rate that the card showed itself."""


@dataclass(frozen=True)
class Result:
    """A row, and the call that it is of."""

    row: dict[str, Any]
    environment: dict[str, Any]

    @property
    def key(self) -> tuple[str, str]:
        """What was looked at."""
        return self.row["step"], self.row["check"]

    @property
    def card(self) -> str:
        """The GPU."""
        return str(self.environment["device"])


def read(folder: Path = RESULTS) -> list[Result]:
    """The newest row of each check on a GPU, in the order in which the steps ran first."""
    calls = []
    for path in folder.glob("*/*.jsonl"):
        environment, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if environment.get("dry") is False:
            calls.append((environment["date"], path.name, environment, rows))
    newest: dict[tuple[str, str], Result] = {}
    for _, _, environment, rows in sorted(calls, key=lambda call: call[:2]):
        for row in rows:
            result = Result(row, environment)
            newest[result.key] = result
    return list(newest.values())


def page(results: Sequence[Result]) -> str:
    """``docs/gpu_results.md``."""
    lines = ["# What ran on a GPU", "", summary(results)]
    ceilings = {result.card: result.row["figures"].get(CEILING[1]) for result in results if result.key[1] == CEILING[0]}
    if results:
        lines += ["", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line(cells(result, ceilings.get(result.card))) for result in results]
        lines += [
            "",
            "Ratios are medians of rounds in one call, with their interval; a goal that was missed is marked.",
        ]
    lines += ["", "`python -m benchmarks.gpu.results --write` makes this page from `benchmarks/results`."]
    return "\n".join(lines) + "\n"


def cells(result: Result, ceiling: float | None) -> list[str]:
    """The cells of a row; ``ceiling`` is the measured TFLOP/s of bfloat16 matmuls of the card."""
    row = result.row
    figures = row["figures"]
    shown = [text.format(figures[name]) for name, text in FIGURES.items() if figures.get(name) is not None]
    ratio = ""
    if figures.get("ratio") is not None:
        missed = "" if figures["reached"] else f", goal {figures['goal']:.2f} missed"
        ratio = f"{figures['ratio']:.3f} [{figures['low']:.3f}, {figures['high']:.3f}]{missed}"
    share = ""
    if ceiling and figures.get("tflops"):
        share = f"{figures['tflops'] / ceiling:.1%}"
    figure = ", ".join(shown) or row["detail"].replace("|", "\\|").replace("\n", " ")[:80]
    environment = result.environment
    where = [result.card, environment["date"].partition(" ")[0], environment["commit"][:12]]
    return [row["step"], row["check"], WORDS[row["ok"]], figure, ratio, share, *where]


def summary(results: Sequence[Result]) -> str:
    """What ran, in two lines, and what never did."""
    if not results:
        return f"{NOTHING} {NEVER}"
    right = sum(result.row["ok"] is True for result in results)
    wrong = sum(result.row["ok"] is False for result in results)
    cards = ", ".join(sorted({result.card for result in results}))
    dates = sorted(result.environment["date"].partition(" ")[0] for result in results)
    said = f"On one {cards} ({dates[0]} to {dates[-1]}): {right} checks are right, {wrong} are not."
    ratios = [result.row for result in results if result.key[1] == "crius over titan-fsdp"]
    if ratios:
        figures = ratios[0]["figures"]
        said += (
            f" Beside torchtitan 0.2.2 with FSDP, Crius trains 4 layers of 8B {figures['ratio']:.3f} times as fast "
            f"[{figures['low']:.3f}, {figures['high']:.3f}]; one GPU, so no communication is compared."
        )
    return f"{said} {NEVER}"


def replaced(text: str, new: str) -> str:
    """``text`` with ``new`` between the two marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + new + END + rest.split(END)[1]


def _line(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or write both."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.results")
    parser.add_argument(
        "--write", action="store_true", help="write docs/gpu_results.md, and the summary of docs/tested.md"
    )
    options = parser.parse_args(argv)
    results = read()
    if options.write:
        PAGE.write_text(page(results), encoding="utf-8")
        text = SUMMARY_PAGE.read_text(encoding="utf-8")
        SUMMARY_PAGE.write_text(replaced(text, summary(results) + "\n"), encoding="utf-8")
    else:
        sys.stdout.write(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
