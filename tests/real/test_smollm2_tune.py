"""``crius tune`` of SmolLM2-135M-Instruct on 200 conversations: what the first evening gives."""

import json
import re
import resource
import shutil
import subprocess
import sys

import pytest
from harness import crius_process, read_metrics, steps_of
from smollm2 import write_chats

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3000)]

RUNS = ("alone", "smol-own")
PLACES = ("north", "south", "east", "west", "upper", "lower", "inner", "outer")


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Its folder, what was printed, the steps of its lines, and the CPU seconds that it took."""
    folder = tmp_path_factory.mktemp("evening")
    pairs = [
        (
            f"Where is shelf {number} of the archive?",
            f"Shelf {number} stands in the {PLACES[number % 8]} hall, row {number // 8 + 1}. Ask for its key.",
        )
        for number in range(200)
    ]
    write_chats(folder, pairs, "own.jsonl")
    before = cpu_seconds()
    done = crius_process("tune", "smol", "own.jsonl", cwd=folder, timeout=2400)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, cpu_seconds() - before


def test_held_out_answers_are_learned_in_12_minutes_and_shown_before_and_after(tuned):
    folder, text, seconds = tuned
    assert json.loads((folder / "runs/smol-own/summary.json").read_text())["steps"] >= 50
    mean, error = map(float, re.search(r"\((-[\d.]+) \+- ([\d.]+), paired\)", text).groups())
    assert mean < -2 * error
    assert [text.count(f"\n{word:<8}  ") for word in ("question", "before", "after", "data")] == [3, 3, 3, 3]
    assert seconds < 720, seconds


def test_it_takes_little_more_than_its_training_alone(tuned):
    folder, text, seconds = tuned
    words = re.search(r"crius (train --recipe .*)$", text, re.MULTILINE)[1].split()
    before = cpu_seconds()
    done = crius_process(*words, "--job.run_dir", "runs/alone", cwd=folder, timeout=2400)
    assert done.returncode == 0, done.stderr
    assert seconds <= 1.15 * (cpu_seconds() - before) + 120

    alone, its_own = ([row["loss"] for row in steps_of(read_metrics(folder / "runs" / run))] for run in RUNS)
    assert len(alone) >= 10  # lines, of five steps each
    assert alone == its_own


def test_what_is_left_opens_elsewhere_in_transformers_and_by_the_printed_line_in_peft(tuned, tmp_path):
    pytest.importorskip("transformers")
    folder, text, _ = tuned
    shutil.copytree(folder / "runs/smol-own", tmp_path / "moved")
    load = "from transformers import AutoModelForCausalLM as A; A.from_pretrained('merged')"
    commands = [load]
    if opened := re.search(r'python -c "(from peft .*)"', text):
        pytest.importorskip("peft")
        commands.append(opened[1])
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-c", command], cwd=tmp_path / "moved", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
