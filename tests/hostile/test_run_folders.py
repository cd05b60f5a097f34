"""Run folders of strangers: whatever is in them, a command ends soon, with its result or with one error."""

import os
import random
import shutil

import pytest
from harness import crius

from hostile.damage import DAMAGES, SECRET, flaws, state, tried

SEED = os.environ.get("HOSTILE_SEED", "1")
COMMANDS = (
    "report run",
    "report run other",
    "runs .",
    "runs . --json",
    "plan --compare run",
    "data audit run",
    "data show run",
    "generate run --prompt a --max_new_tokens 1",
    "checkpoint ls run",
    "checkpoint verify run",
    "config show --config run/run.toml",
    "config diff run/run.toml other/run.toml",
    "train --job.run_dir run --config run/run.toml --training.steps 3 --training.device cpu",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two small runs with all their files, and a secret outside of them."""
    place = tmp_path_factory.mktemp("hostile")
    (place / "outside").mkdir()
    (place / "outside/secret").write_text(SECRET)
    words = "train --model.num_layers 1 --model.dim 32 --training.steps 2 --training.seq_len 32 --validation.interval 1"
    words += " --training.device cpu --metrics.log_interval 1 --job.run_dir run"
    done = crius(*words.split(), cwd=place)
    assert done.returncode == 0, done.stderr
    shutil.copytree(place / "run", place / "other")
    return place


def rows():
    """3 of make test, 17 of make test-full, and those of make test-all."""
    for number in range(300):
        mark = [pytest.mark.quick] if number < 3 else [pytest.mark.slow] if number >= 20 else []
        yield pytest.param(number, marks=mark)


@pytest.mark.parametrize("number", rows())
def test_a_damaged_run_folder_is_read_or_refused(runs, tmp_path, number):
    draw = random.Random(f"{SEED} run {number}")
    place = tmp_path / "place"
    shutil.copytree(runs, place)
    files = sorted(path for path in (place / "run").rglob("*") if path.is_file() and path.suffix != ".safetensors")
    file = draw.choice(files)
    damage = draw.choice(DAMAGES)
    damage(file, draw)
    command = draw.choice(COMMANDS)
    outcome = tried(command.split(), place)
    assert not flaws(outcome, place, state(runs / "outside")), (damage.__name__, str(file), command, outcome)
