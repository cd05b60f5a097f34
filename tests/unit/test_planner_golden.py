"""Bytes and seconds of 200 plans, to six digits, and all lines of five: a slip in any term shows."""

import contextlib
import io
import json
import re
from dataclasses import replace

import pytest
from harness import GOLDEN

from crius import cli
from crius.config.layout import Layout
from crius.models.adapted import Adapted
from crius.models.registry import SPECS
from crius.tools.plan.hardware import KNOWN, shared
from crius.tools.plan.memory import memory, rank_bytes
from crius.tools.plan.shapes import NOT_TRAINABLE_YET
from crius.tools.plan.time import step_time
from crius.tools.plan.workload import Workload

PLANS = GOLDEN / "plans.txt"
REASON, *ROWS = PLANS.read_text().splitlines()
LINES = GOLDEN / "plan_lines.txt"
COMMAND = "$ crius plan "
WHY, *PRINTED = LINES.read_text().split(COMMAND)


def plan_of(row):
    """What is largest, and numbers: of the last rank, of the fullest at its peak, of a step."""
    name, _, flavor = row["model"].partition(" ")
    model = SPECS[name].describe(flavor) if flavor else NOT_TRAINABLE_YET[name]
    if mask := row.get("mask"):
        model = replace(model, config=replace(model.config, attention_mask=mask))
    if ends := tuple(row.get("adapted", ())):
        model = replace(model, adapted=Adapted(16, tuple(name for name in model.linears if name.endswith(ends))))
    work = Workload(model=model, layout=Layout(**row["degrees"]), **row["fields"])
    gpu = replace(shared(KNOWN[row["gpu"]], row.get("processes", 1)), **row.get("measured", {}))
    counted = memory(work, gpu, counting=row["counting"])
    seconds = step_time(work, gpu)
    estimates = (rank_bytes(work, work.layout.pp - 1), counted.parts, seconds.parts)
    numbers = [float(f"{value:.6g}") for parts in estimates for value in parts.values()]
    return {"note": f"{counted.note}; {seconds.note}", "numbers": numbers}


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_plan_has_its_golden_numbers(number):
    """After a deliberate change this module, run with ``tests`` on the path, writes them anew; give the reason."""
    row = json.loads(ROWS[number])
    found = plan_of(row)
    assert found["numbers"] == pytest.approx(row["numbers"], rel=1e-5)
    assert found["note"] == row["note"]


def printed(words):
    """What ``crius plan`` prints, without how long it took."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(["plan", *words.split()])
    return f"{words}\n" + re.sub(r"candidates in [\d.]+ s", "candidates in N s", out.getvalue())


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_a_plan_prints_its_golden_lines(number):
    """A deliberate change writes them anew, as above."""
    words, _ = PRINTED[number].split("\n", 1)
    assert printed(words) == PRINTED[number]


if __name__ == "__main__":
    rows = [json.loads(line) for line in ROWS]
    PLANS.write_text("\n".join([REASON, *(json.dumps(row | plan_of(row)) for row in rows)]) + "\n")
    LINES.write_text(COMMAND.join([WHY, *(printed(text.split("\n", 1)[0]) for text in PRINTED)]))
