"""``benchmarks.train`` and the driver of turns below it: order, deaths, timeouts, and what they leave and say."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, TEXT

from benchmarks import train
from benchmarks.command import facts_from, parse, parser_of
from benchmarks.train_job import check_bare
from benchmarks.turns import Contestant, Outcome, largest_difference, median_ratio, row, table, take_turns
from crius.errors import ConfigError

TOY = """
import os, sys, time
sys.path.insert(0, {root!r})
from benchmarks.contestant import Channel, Turns
name, kind, log = sys.argv[1:]
if kind == "child":
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    open(log + ".child", "w").write(str(child.pid))
turns = Turns(Channel(), 2, {{"tokens_per_step": 10}})
print("a print that is no answer")
step = 0
while True:
    step += 1
    if step > 2:
        open(log, "a").write(name + "\\n")
    if step == 4 and kind == "dies":
        sys.exit("toy says why")
    if step == 4 and kind == "hangs":
        time.sleep(600)
    if kind == "burns":
        begin = time.process_time()
        while time.process_time() - begin < 0.05:
            pass
    if not turns.after_step(1 / step):
        break
open(log, "a").write(name + " ended\\n")
"""


def toys(tmp_path, **kinds):
    log = tmp_path / "log"
    code = TOY.format(root=str(ROOT))
    return [Contestant(name, [sys.executable, "-c", code, name, kind, str(log)]) for name, kind in kinds.items()], log


def has_ended(pid, seconds=10):
    """Whether a process is gone, or soon: a signal takes effect a moment after it is sent."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_turns_go_round_and_every_other_round_backwards(tmp_path):
    contestants, log = toys(tmp_path, a="burns", b="plain")
    burning, plain = take_turns(contestants, rounds=3, steps=2)
    assert log.read_text().splitlines()[:12] == [*"aabb", *"bbaa", *"aabb"]
    assert sorted(log.read_text().splitlines()[12:]) == ["a ended", "b ended"]
    assert [turn["steps"] for turn in burning.turns] == [2, 2, 2]
    assert burning.losses == {step: 1 / step for step in range(1, 9)}
    assert all(0.05 <= seconds < 0.5 for seconds in burning.samples("cpu_seconds").seconds)
    assert median_ratio(burning, plain, "cpu_seconds") > 5
    assert 1 < burning.peak_rss_mib < 1000
    assert largest_difference(burning.losses, plain.losses) == 0
    assert row(plain, burning)["cpu_ratio"] < 0.2 and len(table([burning, plain])) == 3
    assert row(plain, Outcome("nothing")).keys() == {"name", "failure", "facts"}


def test_one_that_dies_says_why_and_the_others_go_on(tmp_path):
    contestants, _ = toys(tmp_path, a="plain", b="dies")
    good, dead = take_turns(contestants, rounds=3, steps=1)
    assert (len(good.turns), good.failure) == (3, "")
    assert len(dead.turns) == 1
    assert "exit code 1" in dead.failure and "toy says why" in dead.failure


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    contestants, log = toys(tmp_path, a="hangs", b="child")
    begin = time.monotonic()
    hung, _ = take_turns(contestants, rounds=2, steps=2, turn_seconds=0.5)
    assert "did not answer within 0.5 s" in hung.failure
    assert time.monotonic() - begin < 20
    assert has_ended(int(log.with_suffix(".child").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_driver_leaves_no_process(tmp_path, number):
    contestants, log = toys(tmp_path, a="child")
    call = f"take_turns([Contestant('a', {contestants[0].argv!r})], rounds=9**9, steps=1)"
    driver = subprocess.Popen(
        # a process that is started in the background is deaf to SIGINT until it says otherwise
        [
            *(sys.executable, "-c"),
            "import signal; signal.signal(2, signal.default_int_handler); from benchmarks.turns import *; " + call,
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        deadline = time.monotonic() + 30
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert log.exists()
        driver.send_signal(number)
        assert driver.wait(20) != 0
    finally:
        driver.kill()
        driver.communicate()
    assert has_ended(int(log.with_suffix(".child").read_text()))


@pytest.mark.slow
def test_variants_are_the_real_job_with_losses_of_its_own_and_a_ratio(tmp_path):
    """Two ranks train as one does, and so does the bare loop; a variant has its own flags."""
    out = tmp_path / "new" / "result.json"
    flags = "--model.num_layers 1 --training.seq_len 32 --lr_scheduler.warmup_steps 0"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.train", *shlex.split(flags), "--overhead"),
            *("--data.source", "text", "--data.path", str(TEXT), "--training.mixed_precision_param", "float32"),
            *("--vs", "--parallelism.data_parallel_shard_degree 2 --training.max_norm 0"),
            *("--warmup", "1", "--rounds", "2", "--steps_per_round", "2", "--json", "--out", str(out)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads(out.read_text())
    base, split, bare = found["rows"]
    assert [one["name"] for one in (base, bare)] == ["base", "bare loop"]
    assert [one["facts"]["num_ranks"] for one in found["rows"]] == [1, 2, 1]
    changed = {"training.max_norm": [1.0, 0.0], "parallelism.data_parallel_shard_degree": [-1, 2]}
    assert found["changes"] == {"base": {}, split["name"]: changed}
    assert [step for step, _ in base["losses"]] == [1, 2, 3, 4, 5]
    assert bare["loss_difference"] < 1e-5 < split["loss_difference"] < 0.1  # nothing clips the second one
    assert split["losses"][0][1] == pytest.approx(base["losses"][0][1], rel=1e-6)
    for one in found["rows"]:
        assert len(one["wall"]["samples_ms"]) == len(one["cpu"]["samples_ms"]) == 2
        assert one["tokens_per_second"] == pytest.approx(8 * 32 / one["wall"]["milliseconds"] * 1e3)
        assert one["mfu"] is None and one["peak_rss_mib"] > 50
    # of both ranks: a build with CUDA has 500 MiB that ranks share, where one for CPUs has 200
    assert split["peak_rss_mib"] > 1.1 * base["peak_rss_mib"]
    assert (base["wall_ratio"], base["cpu_ratio"]) == (1, 1)
    assert -5 < found["overhead"]["cpu_seconds"]["median"] < 1
    assert found["machine"]["torch_version"] and found["versions"]["crius"] and "--overhead" in found["command"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--training.steps", "7"], "--rounds and --steps_per_round"),
        (["--job.name", "mine"], "leaves no folder"),
        (["--rounds", "0"], "argument --rounds: 0 is not positive"),
        (["--vs", "--model.num_layerz 2"], "--model.num_layers"),
        (["--vs", "--training.steps 3"], "--rounds and --steps_per_round"),
        (["--vs", "'"], "cannot be read: No closing quotation"),
        (["--vs", "--bare"], "--bare"),
        (["--vs", "--warmup 3"], "--warmup"),
        (["--out", "/"], "argument --out: / cannot be written"),
        (["--overhead", "--parallelism.data_parallel_shard_degree", "2"], "the bare loop does not support 2 ranks"),
    ],
)
def test_a_wrong_call_says_why(arguments, said, capsys):
    base = ["--data.source", "text", "--data.path", str(TEXT), "--training.device", "cpu"]
    with pytest.raises((ConfigError, SystemExit)) as caught:
        train.main([*base, *arguments])
    assert said in str(caught.value) + capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--optimizer.name muon", "muon"),
        ("--training.mixed_precision_param bfloat16", "bfloat16"),
        ("--activation_checkpoint.mode full", "full"),
    ],
)
def test_the_bare_loop_refuses_what_it_does_not_do(flags, said):
    facts = facts_from(["--training.device", "cpu", "--training.mixed_precision_param", "float32", *shlex.split(flags)])
    with pytest.raises(ConfigError, match=said):
        check_bare(facts)


def test_the_flags_of_a_variant_are_one_value():
    parser = parser_of(None)
    parser.add_argument("--vs", action="append")
    options, _ = parse(parser, ["--vs", "--compile.enable", "--vs", "--a 1 --b 2"])
    assert options.vs == ["--compile.enable", "--a 1 --b 2"]
