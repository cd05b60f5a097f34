"""The scripts of ``crius completion`` in the shells themselves: what TAB gives."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import harness
import pytest
from harness import ROOT

from crius import cli

SCRIPTS = {"bash": "crius.bash", "zsh": "_crius", "fish": "crius.fish"}


@pytest.fixture(scope="module", params=SCRIPTS)
def shell(request):
    if not shutil.which(request.param):
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture(scope="module")
def home(shell, tmp_path_factory):
    """A folder with the script of the shell, and ``bin/crius`` that runs this checkout."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "bin").mkdir()
    command = folder / "bin" / "crius"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m crius "$@"\n')
    command.chmod(0o755)
    done = harness.crius("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    (folder / SCRIPTS[shell]).write_text(done.stdout)
    (folder / "my_books").touch()
    return folder


SETUP = {
    "zsh": "PS1= ; unsetopt zle_bracketed_paste; fpath=(~ $fpath); autoload -Uz compinit; compinit -u -D; "
    "LISTMAX=0; setopt no_beep; ",
    "bash": "PS1= ; bind 'set enable-bracketed-paste off'; bind 'set bell-style none'; source ~/crius.bash; ",
}
"""Lines that a user has in the start file of the shell, and quiet terminals."""
INTERACTIVE = {"zsh": ["zsh", "-f", "-i"], "bash": ["bash", "--norc", "--noprofile", "-i"]}


def completed(shell, line, want, home):
    """What the shell offers for the last word of ``line`` in the folder ``home``, at least until it offers ``want``."""
    environ = {**os.environ, "HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "TERM": "vt100"}
    if shell != "fish":
        return on_terminal(shell, line, want, environ)
    command = ["fish", "--no-config", "-c", f"cd; source ~/crius.fish; complete -C '{line}'"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return [offer.split("\t")[0] for offer in done.stdout.splitlines()]


def on_terminal(shell, line, want, environ):
    """These shells complete in a line editor only: the key TAB on a terminal, here one that this process holds."""
    child, terminal = pty.fork()
    if not child:
        os.execvpe(shell, INTERACTIVE[shell], environ)
    os.write(terminal, f"cd; {SETUP[shell]}echo rea''dy\n".encode())
    try:
        until(terminal, r"ready\r\n")
        os.write(terminal, f"{line}\t".encode())
        text = until(terminal, re.escape(want))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(terminal)
    return re.findall(r"[\w.-]+", text.replace("\r", "\n"))


def until(terminal, pattern):
    """What the terminal prints until it matches, or for 30 s."""
    text, end = "", time.monotonic() + 30
    while not re.search(pattern, text) and select.select([terminal], [], [], max(0, end - time.monotonic()))[0]:
        text += os.read(terminal, 65536).decode(errors="replace")
    return text


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("crius train --parallelism.ten", "--parallelism.tensor_parallel_degree"),
        ("crius verify parity --layouts fsdp2 --checkpoint.keep_l", "--checkpoint.keep_last"),
        ("crius config dif", "diff"),
        ("crius train --model.attention_mask doc", "document"),
        ("crius train --recipe smollm2_l", "smollm2_lora"),
        ("crius plan --gpu h100-p", "h100-pcie"),
        ("crius generate my_b", "my_books"),
        ("crius train --data.path my_b", "my_books"),
    ],
)
@pytest.mark.long
def test_tab_completes_verbs_dotted_flags_choices_recipes_and_files(shell, line, want, home):
    assert want in completed(shell, line, want, home)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("veri", ["verify"]),
        ("train --parallelism.tensor_p", ["--parallelism.tensor_parallel_degree"]),
        ("verify parity --layouts fsdp2 --checkpoint.keep_l", ["--checkpoint.keep_last"]),
        ("train --data-path x --model.attention_mask d", ["document"]),
        ("train --compile.enable --compile.back", ["--compile.backend"]),
        ("tune base chats.jsonl --optimizer.lr", ["--optimizer.lr"]),
        ("generate run --temp", ["--temperature"]),
        ("export a b --format p", ["peft"]),
        ("completion z", ["zsh"]),
        ("plan com", ["compare"]),
        ("com", ["compare", "completion"]),
        ("train --job.name x", []),
        ("bench dat", []),
        ("nothing --x", []),
    ],
)
def test_what_may_stand_in_place_of_the_last_word(line, offered, capsys):
    assert cli.main(["_complete", *line.split(" ")]) == 0
    assert [text.partition("\t")[0] for text in capsys.readouterr().out.splitlines()] == offered


@pytest.mark.full
def test_a_shell_that_has_no_script_is_named(capsys):
    done = harness.crius("completion", "tcsh")
    assert done.returncode == 2 and "bash" in done.stderr and "tcsh" in done.stderr
