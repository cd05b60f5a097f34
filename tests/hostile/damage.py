"""Ways to make a file into one that does harm, drawn by a seed; and a command that is tried on it."""

import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from crius.__main__ import main

SECRET = "k3y-of-somebody"
SECONDS = 20
GIB = 1 << 30
STRANGE = (
    *("", "-1", "1e400", "1" + "0" * 400, "NaN", "null", "true", '"x"', "[]", "{}", "[" * 100_000, '{"a":' * 5000),
    *(
        '"\\u001b]0;x\\u0007"',
        '"\u202e\u0000"',
        '"; touch fired; $(touch fired) `touch fired`"',
        '"../../../etc/passwd"',
    ),
)


def cut(file, draw):
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content) + 1)])


def flip(file, draw):
    content = bytearray(file.read_bytes())
    for _ in range(min(len(content), draw.choice((1, 10, 100)))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def value(file, draw):
    """One value of JSON or TOML becomes a strange one."""
    content = file.read_text(errors="replace")
    places = list(re.finditer(r'(?<=[:=] )("[^"\n]*"|[^\s,{}\[\]]+)', content))
    if places:
        place = draw.choice(places)
        content = content[: place.start()] + draw.choice(STRANGE) + content[place.end() :]
    file.write_text(content, errors="replace")


def keys(file, draw):
    """Records with many or strange fields, or the same one twice."""
    many = {f"{draw.random()}": 1 for _ in range(draw.choice((10, 3000)))}
    lines = [json.dumps({"step": step, "loss": 1.0} | many) for step in range(3)]
    lines.append('{"step": 5, "step": 6, "loss": 1, "__class__": "os.system", "goodput": 1e999}')
    file.write_text("\n".join(lines) + "\n")


def long(file, draw):
    """Many lines, or one that is long."""
    file.write_text(draw.choice(('{"step": 1, "loss": 2}\n' * 200_000, '{"loss": "' + "x" * 30_000_000 + '"}\n')))


def link(file, draw):
    file.unlink()
    outside = next(path / "outside" for path in file.parents if (path / "outside").exists())
    file.symlink_to(draw.choice((outside / "secret", outside, outside / "nothing", "/dev/zero", file.name)))


def fifo(file, draw):
    file.unlink()
    os.mkfifo(file)


def sparse(file, draw):
    os.truncate(file, draw.choice((10**8, 10**10, 10**12)))


def folder(file, draw):
    file.unlink()
    file.mkdir()


def number(file, draw):
    """An integer somewhere in a binary file becomes a power of ten."""
    content = bytearray(file.read_bytes())
    size = draw.choice((4, 8))
    if len(content) >= size:
        place = draw.randrange(min(len(content) - size + 1, 1 << 12))
        content[place : place + size] = (10 ** draw.randrange(20) % (1 << 8 * size)).to_bytes(size, "little")
    file.write_bytes(content)


STEPS = (
    {"type": "Prepend", "prepend": "a" * 1000},
    {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 8000},
    {"type": "Replace", "pattern": {"Regex": "(.*)*$"}, "content": "x"},
    {"type": "NFKD"},
)


def steps(file, draw):
    """Steps of normalisation of a tokenizer.json."""
    try:
        spec = json.loads(file.read_bytes())
        spec["normalizer"] = {
            "type": "Sequence",
            "normalizers": [draw.choice(STEPS) for _ in range(draw.choice((1, 7, 50)))],
        }
        file.write_text(json.dumps(spec))
    except (ValueError, TypeError):
        value(file, draw)


TEMPLATES = {
    "an endless loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "attributes of Python": "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__['sys'].exit() }}",
    "a module": "{{ cycler.__init__.__globals__.os.system('touch executed') }}",
    "huge text": "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "huge memory": "{{ 'x' * 99999999999 }}",
    "a huge number": "{{ 99999999 ** 99999999 }}",
    "a huge range": "{% for i in range(999999999) %}{% endfor %}",
    "another file": "{% include '/etc/passwd' %}",
    "a change of what is given": "{{ messages.append(1) }}",
    "its own refusal": "{{ raise_exception('no system messages here') }}",
    "no template": "{% if %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


def script(file, draw):
    """A statement of a template, at any place of it."""
    content = file.read_text(errors="replace")
    place = draw.randrange(len(content) + 1)
    file.write_text(content[:place] + draw.choice([*TEMPLATES.values()]) + content[place:])


DAMAGES = (cut, flip, value, value, value, keys, long, link, fifo, sparse, folder)


class Outcome(NamedTuple):
    """What a command did: exit code, what it printed, CPU seconds, and bytes above those of this process."""

    code: int | str
    told: str
    seconds: float
    grown: int


def tried(argv, cwd) -> Outcome:
    """``crius ARGV`` in a fork of this process, which has imported everything."""
    with tempfile.TemporaryFile() as told:
        pid = os.fork()
        if pid == 0:
            _run(argv, cwd, told.fileno())
        code, usage = _ended(pid)
        told.seek(0)
        text = told.read(1 << 20).decode(errors="replace")
    warm = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Outcome(code, text, usage.ru_utime + usage.ru_stime, (usage.ru_maxrss - warm) * 1024)


def _run(argv, cwd, told):
    code = 99
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (2 * SECONDS, 2 * SECONDS))
        os.dup2(told, 1)
        os.dup2(told, 2)
        sys.stdout = sys.stderr = os.fdopen(told, "w", errors="backslashreplace")
        os.chdir(cwd)
        sys.argv = ["crius", *argv]
        code = main(argv)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(pid):
    deadline = time.monotonic() + 6 * SECONDS
    while time.monotonic() < deadline:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), usage
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    return "hangs", os.wait4(pid, 0)[2]


def flaws(outcome: Outcome, place: Path, before: dict) -> list[str]:
    """What is wrong with an outcome.

    Args:
        place: the folder that the command ran in; ``place/outside`` has a secret.
        before: ``state(place / "outside")`` before it.
    """
    found = []
    if outcome.code not in (0, 1, 2):
        found.append(f"exit code {outcome.code}")
    errors = re.findall(r"^(?!\[\d+\] ).*Error: ", outcome.told, re.MULTILINE)  # not those of one list
    if "Traceback" in outcome.told or len(errors) > 3:
        found.append("no error of Crius")
    if outcome.code and not re.search("Error: |DAMAGED| refused", outcome.told):
        found.append("no error")
    if outcome.seconds > SECONDS:
        found.append(f"{outcome.seconds:.0f} CPU seconds")
    if outcome.grown > GIB:
        found.append(f"{outcome.grown / GIB:.1f} GiB")
    if state(place / "outside") != before:
        found.append("wrote outside")
    if [path for path in place.rglob("fired")]:
        found.append("executed")
    inside = [
        path for path in place.rglob("*") if path.is_file() and not path.is_symlink() and "outside" not in path.parts
    ]
    told = [outcome.told, *(path.read_text(errors="replace") for path in inside if path.stat().st_size < 1 << 22)]
    if any(SECRET in text for text in told):
        found.append("followed a link")
    return found


def state(folder: Path) -> dict:
    return {path.name: path.read_text() for path in folder.iterdir()}
