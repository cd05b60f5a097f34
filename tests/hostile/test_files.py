"""Files of strangers: whatever is in them, a command ends soon, with its result or with one error."""

import os
import random
import shutil

import pytest

from hostile.damage import DAMAGES, SECRET, flaws, state, tried
from hostile.kinds import KINDS

SEED = os.environ.get("HOSTILE_SEED", "1")


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """The folder of a kind with its sample, made once, and a secret outside of it."""
    made = {}

    def sample(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            (made[name] / "outside").mkdir()
            (made[name] / "outside/secret").write_text(SECRET)
            if name not in ("run", "checkpoint", "manifest"):
                (made[name] / KINDS[name].folder).mkdir()
            KINDS[name].make(made[name])
        return made[name]

    return sample


def rows():
    """For each kind 3 of make test, 17 of make test-full, and those of make test-all."""
    for name in KINDS:
        for number in range(300):
            mark = [pytest.mark.quick] if number < 3 else [pytest.mark.slow] if number >= 20 else []
            yield pytest.param(name, number, marks=mark, id=f"{name}-{number}")


@pytest.mark.parametrize(("name", "number"), [*rows()])
def test_a_damaged_file_is_read_or_refused(samples, tmp_path, name, number):
    draw = random.Random(f"{SEED} {name} {number}")
    place = tmp_path / "place"
    sample = samples(name)
    shutil.copytree(sample, place)
    kind = KINDS[name]
    files = sorted(path for path in (place / kind.folder).rglob(kind.pattern) if path.is_file())
    if name == "run":  # weights are of the kind checkpoint
        files = [path for path in files if path.suffix != ".safetensors"]
    file = draw.choice(files)
    damage = draw.choice((*DAMAGES, *kind.damages))
    before = file.read_bytes()
    damage(file, draw)
    command = draw.choice(kind.commands)
    outcome = tried(command.split(), place)
    assert not flaws(outcome, place, state(sample / "outside")), (damage.__name__, str(file), command, outcome)
    is_same = file.is_file() and file.stat().st_size == len(before) and file.read_bytes() == before
    if command == "checkpoint verify checkpoints" and not is_same:
        assert outcome.code, (damage.__name__, str(file), "the damage was not found", outcome)
