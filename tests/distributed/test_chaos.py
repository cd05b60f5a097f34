"""``crius verify chaos``: what it draws, what it may not do to a run, and a short one for real."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from harness import TEXT, parse

from crius.cli.app import facts_of
from crius.config.operation import CheckpointConfig
from crius.config.run import RunConfig
from crius.config.training import CompileConfig, TrainingConfig
from crius.errors import ConfigError
from crius.tools.data_audit.audit import audit
from crius.tools.faults.fault import read_faults
from crius.tools.verify import chaos as module
from crius.tools.verify.chaos import CalmPace, Killer, chaos, drawn
from crius.tools.verify.options import Chaotic
from crius.tools.verify.starts import Start
from crius.tools.verify.survival import Family

TINY = [
    *("--recipe", "verify", "--model.num_layers", "1", "--training.seq_len", "16", "--model.vocab_size", "257"),
    *("--data.source", "text", "--data.path", str(TEXT), "--validation.interval", "0"),
]
REPRODUCIBLE = ["--training.reproducible", "--training.virtual_shards", "2"]


def verify(folder, capsys, flags=(), seconds=150, **options):
    """Exit code, and what the verb found."""
    capsys.readouterr()
    code = chaos(facts_of(parse([*TINY, *flags]), 0, None), folder, Chaotic(timeout=seconds, **options), as_json=True)
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_a_run_on_1_and_2_ranks_that_is_killed_at_random_is_the_undisturbed_one(tmp_path, capsys):
    flags = [*REPRODUCIBLE, "--checkpoint.interval", "1", "--checkpoint.mode", "sync"]
    code, found = verify(tmp_path, capsys, flags, kills=4, seed=8, steps=8, world_sizes="1,2")
    assert code == 0 and found["identical"] and not found["problems"], found
    assert found["same_steps"] == 8 and found["kills"] == sum(found["kills_by_phase"].values()) == 4
    assert len(found["num_ranks"]) == 5 and set(found["num_ranks"]) == {1, 2}
    starts = [(attempt.after, attempt.ranks) for attempt in audit(tmp_path / "killed").attempts]
    assert starts[-1][0] > 0 and {ranks for after, ranks in starts} == {1, 2}, starts


@pytest.mark.long
def test_a_run_that_changes_its_layout_when_it_is_killed_has_the_losses_of_the_undisturbed_one(tmp_path, capsys):
    flags = ["--checkpoint.interval", "1", "--checkpoint.mode", "sync"]
    code, found = verify(tmp_path, capsys, flags, kills=3, seed=8, steps=6, layouts="fsdp2,tp2")
    assert code == 0 and found["identical"] and not found["problems"], found
    assert found["same_steps"] == 6 and found["kills"] == 3 and set(found["layouts"]) == {"fsdp2", "tp2"}
    assert found["tolerance"] == 1e-5 and found["apart"]["loss"] < 1e-6 and found["apart"]["parameters"] < 1e-5
    assert not found["tensors"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_reproducible_run_on_another_layout_after_each_kill_has_the_same_bits(seed, tmp_path, capsys):
    flags = ["--training.reproducible", "--training.global_batch_size", "8", "--checkpoint.interval", "2"]
    code, found = verify(tmp_path, capsys, flags, seconds=600, kills=12, seed=seed, layouts="1,ddp2,fsdp2", steps=24)
    assert code == 0 and found["identical"] and not found["problems"], found
    assert found["same_steps"] == 24 and found["kills"] == 12 and found["tolerance"] == 0
    assert set(found["layouts"]) == {"1", "ddp2", "fsdp2"}


EXPERTS = ["--model.name", "qwen3_moe", "--model.flavor", "debug", "--model.num_layers", "2"]


@pytest.mark.slow
def test_a_reproducible_run_with_experts_survives_12_kills(tmp_path, capsys):
    flags = [*EXPERTS, "--training.reproducible", "--training.global_batch_size", "8", "--checkpoint.interval", "2"]
    code, found = verify(
        tmp_path, capsys, [*flags, "--parallelism.data_parallel_shard_degree", "2"], seconds=600, kills=12, steps=24
    )
    assert code == 0 and found["identical"] and not found["problems"], found
    assert found["same_steps"] == 24 and found["kills"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("layouts", ["fsdp2_ep2,fsdp2,fsdp4_ep2,tp2_ep2", "fsdp2_ep2"])
def test_a_run_with_experts_survives_25_kills(layouts, tmp_path, capsys):
    code, found = verify(tmp_path, capsys, EXPERTS, seconds=600, kills=25, layouts=layouts)
    assert code == 0 and found["identical"] and not found["problems"], found
    assert found["same_steps"] == 40 and found["kills"] == 25 and set(found["layouts"]) == set(layouts.split(","))
    if "," in layouts:
        assert found["tolerance"] == 1e-5 and found["apart"]["loss"] < 1e-5
    else:
        assert found["tolerance"] == 0 and found["hash"] == found["hash_killed"]


def test_draws_depend_on_the_seed_alone_and_reach_every_place():
    assert drawn(25, 1) == drawn(25, 1) != drawn(25, 2)
    draws = drawn(25, 1)
    assert len(draws) == 26 and sum(draw.is_timed for draw in draws[:25]) == 12
    for is_timed, count in ((True, 12), (False, 13)):
        places = sorted(draw.place for draw in draws[:25] if draw.is_timed == is_timed)
        assert [int(place * count) for place in places] == list(range(count))


def test_where_kernels_are_compiled_one_kill_in_six_comes_while_they_are():
    plain, compiled = drawn(60, 1), drawn(60, 1, compiles=True)
    assert [replace(draw, is_cold=False) for draw in compiled] == plain
    assert sum(draw.is_cold for draw in compiled) == 10 and not compiled[-1].is_cold
    assert sum(draw.is_cold for draw in drawn(3, 1, compiles=True)) == 1


def test_a_kill_in_a_compilation_comes_at_a_moment_of_it_and_in_an_empty_cache(tmp_path):
    (tmp_path / "cache").mkdir()
    config = RunConfig(
        training=TrainingConfig(steps=20), compile=CompileConfig(enable=True, cache_dir=str(tmp_path / "cache"))
    )
    draw = replace(drawn(2, 1)[0], is_cold=True, place=0.5, rank=0.0)
    killer = Killer([draw, draw, draw], [Start(config, 1)], tmp_path)
    killer.pace = CalmPace(4.0, 0.5, compile=60.0)
    assert killer.assignment(0)[2] == "kill:step=1,phase=optimizer,rank=0,attempt=0"
    assert not (tmp_path / "cache").exists()
    assert (killer._from, killer._delay) == (math.inf, 30.0), "from when the attempt is ready for its first step"


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_compiles_is_the_undisturbed_one(tmp_path, capsys):
    flags = ["--compile.enable", "--checkpoint.interval", "1"]
    code, found = verify(tmp_path, capsys, flags, seconds=1500, kills=6, seed=1, steps=6)
    assert code == 0 and found["identical"] and not found["problems"], found
    assert (found["kills"], found["cold_starts"]) == (6, 1)


@pytest.mark.parametrize(("kills", "steps", "interval"), [(25, 40, 3), (5, 3, 1), (3, 20, 7), (40, 10, 2)])
def test_each_attempt_is_killed_before_the_run_is_at_its_end(kills, steps, interval, tmp_path):
    config = RunConfig(training=TrainingConfig(steps=steps), checkpoint=CheckpointConfig(interval=interval))
    last = []
    for seed in range(20):
        chance, folder = random.Random(seed), tmp_path / str(seed)
        killer = Killer(drawn(kills, seed), [Start(config, 2)], folder)
        killer.pace = CalmPace(2.0, 0.1)
        for number in range(kills):
            saved = [int(path.name[5:]) for path in folder.glob("checkpoints/step-*")]
            _, num_ranks, text = killer.assignment(number)
            [fault] = read_faults({"CRIUS_FAULT": text}, steps, num_ranks, number)
            assert fault.attempt == number
            if fault.step is None:
                continue
            assert max(saved, default=0) < fault.step  # else it would not come
            done = [step for step in range(interval, fault.step, interval) if chance.random() < 0.8]
            for step in done:
                (folder / f"checkpoints/step-{step:08d}").mkdir(parents=True, exist_ok=True)
                (folder / f"checkpoints/step-{step:08d}/manifest.json").touch()
            last.append(fault.step)
        assert killer.assignment(kills)[2] == ""
    assert max(last) <= steps


def test_a_moment_counts_from_the_start_or_from_the_first_step(tmp_path, monkeypatch):
    clock, timers = SimpleNamespace(now=100.0), []

    class Timer:
        daemon = False

        def __init__(self, seconds, kill, arguments):
            timers.append((seconds, *arguments))

        def start(self):
            pass

        cancel = join = start

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(module, "threading", SimpleNamespace(Timer=Timer))
    config = RunConfig(training=TrainingConfig(steps=20), checkpoint=CheckpointConfig(interval=5))
    draw = replace(drawn(2, 1)[0], is_timed=True, rank=0.99)
    early, late = replace(draw, place=0.0), replace(draw, place=math.nextafter(1.0, 0.0))
    killer = Killer([early, late, draw], [Start(config, 2)], tmp_path)
    killer.pace = CalmPace(4.0, 0.5)
    assert killer.assignment(0)[2] == "kill:step=10,phase=data,rank=1,attempt=0"
    killer.on_poll(0, {0: 11, 1: 12})
    killer.on_poll(0, {0: 11, 1: 12})
    assert timers == [(0.0, 12)]
    killer.close()
    killer.assignment(1)
    killer.on_poll(1, {0: 21, 1: 22})
    (tmp_path / "data").mkdir()
    (tmp_path / "data/samples-rank-0.jsonl").write_text("{}\n")
    clock.now += 7
    assert len(timers) == 1
    killer.on_poll(1, {0: 21, 1: 22})
    assert timers[1] == (pytest.approx(21 * 0.5), 22)


@pytest.mark.parametrize(
    ("flags", "options", "said"),
    [
        ([], {"world_sizes": "1,2"}, "needs training.reproducible"),
        (REPRODUCIBLE, {"world_sizes": "1,x"}, "is not a list of numbers"),
        (REPRODUCIBLE, {"world_sizes": "3"}, "3 data-parallel ranks do not divide the 2 virtual shards"),
        ([*REPRODUCIBLE, "--parallelism.tensor_parallel_degree", "2"], {"world_sizes": "2,3"}, "3 is not a multiple"),
        (REPRODUCIBLE, {"world_sizes": "1,2", "layouts": "fsdp2"}, "--world_sizes 1,2 excludes --layouts fsdp2"),
        ([], {"layouts": "fsdp2,fsdp2+document"}, r"fsdp2 and fsdp2\+document of --layouts have different losses"),
        ([], {"layouts": "fsdp2,tp16"}, "16"),
        ([], {"layouts": "fsdp2,2"}, "2 is not a layout term"),
    ],
)
def test_a_wrong_call_is_refused(flags, options, said, tmp_path, capsys):
    with pytest.raises(ConfigError, match=said):
        verify(tmp_path, capsys, flags, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_outlives_a_run_is_seen():
    family = Family()
    child = subprocess.Popen(["sleep", "60"])
    family.look([os.getpid()])
    try:
        assert child.pid in family.left(0.0)
    finally:
        child.kill()
        child.wait()
    assert child.pid not in family.left(0.0)
