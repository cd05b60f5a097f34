"""The table of benchmarks/results/blocks.md: what a block of the 8B model does on a GPU, beside torchtitan's own.

    python -m benchmarks.gpu.blocks                    # prints it; --write puts it into that page

No GPU runs, and none is needed: see docs/gpu.md. Needs g++, triton and torchtitan 0.2.2 (``pip install --no-deps triton
torchtitan==0.2.2 torchdata tyro typeguard``).
Each row is a process of ``tests/cuda_fake/block.py``, 10 to 60 seconds long.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "benchmarks" / "results" / "blocks.md"
FIELDS = ["kernels forward", "kernels backward", "kept, MiB", "reads", "copies"]
COLUMNS = ["block", "of", *FIELDS]
BEGIN, END = "<!-- table: benchmarks/gpu/blocks.py -->\n", "<!-- end of table -->\n"
COMPILED = ("--compile.enable",)
TITAN = "torchtitan"


@dataclass(frozen=True)
class Row:
    """A block.

    Attributes:
        name: what it does.
        flags: of Crius; None: it is torchtitan's block.
        options: recompute and float8, of torchtitan.
    """

    name: str
    flags: tuple[str, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def whose(self) -> str:
        """Of the second column."""
        return TITAN if self.flags is None else "Crius"

    @property
    def request(self) -> str:
        """For ``cuda_fake.block``."""
        asked: dict[str, Any] = {"compiles": self.name != "eager", "is_titan": self.flags is None}
        asked["flags"] = list(self.flags or ())
        asked["options"] = self.options
        return json.dumps(asked)


# all seven linears, as there; by default Crius keeps the small ones of keys and values in bfloat16, and their input too
FLOAT8 = ("--quantize.dense.float8.enable", "--quantize.dense.auto_filter", "off")
ROWS = (
    Row("eager", ()),
    Row("eager", None),
    Row("compiled", COMPILED),
    Row("compiled", None),
    Row("compiled, selective recomputing", (*COMPILED, "--activation_checkpoint.mode", "selective")),
    Row("compiled, selective recomputing", None, {"recompute": True}),
    Row("compiled, float8 tensorwise", (*COMPILED, *FLOAT8)),
    Row("compiled, float8 tensorwise", None, {"float8": "tensorwise"}),
    Row("compiled, one of 8 tensor-parallel ranks", (*COMPILED, "--parallelism.tensor_parallel_degree", "8")),
    Row("compiled, document mask", (*COMPILED, "--model.attention_mask", "document")),
)


def measured(row: Row) -> dict[str, Any]:
    """What ``cuda_fake.block`` says of a row.

    Raises:
        RuntimeError: the block did not run.
    """
    folders = map(str, (ROOT, ROOT / "tests"))
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    # the shim has to be loaded before torch is imported, which is why this process does neither
    code = (
        "import sys; from cuda_fake import block, library; block.main(str(library.shim_library()), sys.argv[1])",
        row.request,
    )
    command = [sys.executable, "-c", *code]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{row.name} of {row.whose} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cells(row: Row, found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    parts = [
        " + ".join(str(found[way].get(kind, 0)) for kind in ("matmul", "attention", "other"))
        for way in ("forward", "backward")
    ]
    kept = f"{found['kept'] / (1 << 20):,.0f}"
    return [row.name, row.whose, *parts, kept, str(found["reads"]), str(found["copies"])]


def table(lines: list[list[str]]) -> str:
    """Markdown."""
    return "".join("| " + " | ".join(line) + " |\n" for line in [COLUMNS, ["---"] * len(COLUMNS), *lines])


def replaced(page: str, text: str) -> str:
    """``page`` with ``text`` between the two marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END)[1]


NEEDED = ("triton", "torchtitan")


def versions_here() -> str:
    """What the numbers depend on."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", *NEEDED))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into its page")
    options = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"blocks: {', '.join(missing)} is missing: see the top of this file", file=sys.stderr)
        return 2
    lines = []
    for row in ROWS:
        lines.append(cells(row, measured(row)))
        print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    versions = versions_here()
    text = f"\n{table(lines)}\nWith {versions}.\n\n"
    if options.write:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
