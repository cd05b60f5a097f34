"""Which checkpoints are there, and which go: two good ones always stay."""

import os
import random

import pytest
from checkpoint_samples import local, save, seed_of, write

from crius.checkpoint.folder import CheckpointFolder, expendable
from crius.checkpoint.names import step_name

DAMAGED = 0.1


def test_two_good_checkpoints_stay_in_ten_thousand_random_histories():
    """Saves at random steps, damage at random, settings that change between restarts."""
    choice = random.Random(0)
    for _ in range(10_000):
        good, step = [], 0
        keep_last, keep_every = choice.randint(-1, 5), choice.choice([0, 0, 3, 10, -4])
        for _ in range(choice.randint(1, 15)):
            step += choice.randint(1, 7)
            good = [kept for kept in good if choice.random() > DAMAGED] + [step]
            protect = choice.sample(good, choice.randint(0, len(good)))
            gone = expendable(choice.sample(good, len(good)), keep_last, keep_every, protect)
            kept = [step for step in good if step not in gone]
            assert len(kept) >= min(2, len(good))
            assert kept[-min(max(keep_last, 2), len(good)) :] == good[-max(keep_last, 2) :]
            assert set(protect) <= set(kept)
            assert not [step for step in gone if keep_every > 0 and step % keep_every == 0]
            good = kept
            if choice.random() < 0.2:
                keep_last, keep_every = choice.randint(-1, 5), choice.choice([0, 3, 10])


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "protect", "gone"),
    [
        (3, 0, (), [10, 20, 30]),
        (2, 0, (), [10, 20, 30, 40]),
        (0, 0, (), [10, 20, 30, 40]),
        (2, 20, (), [10, 30]),
        (2, 0, (10, 99), [20, 30, 40]),
        (6, 0, (), []),
    ],
)
def test_what_is_not_to_be_kept_goes(keep_last, keep_every, protect, gone):
    assert expendable([30, 10, 20, 60, 50, 40], keep_last, keep_every, protect) == gone


def test_damaged_checkpoints_do_not_count_and_do_not_go(tmp_path):
    folder = CheckpointFolder(local(tmp_path, 10, 20, 30, 40, 50))
    (tmp_path / step_name(50) / "rank-00001.safetensors").unlink()
    manifest = tmp_path / step_name(40) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-3])
    with (tmp_path / step_name(10) / "rank-00000.safetensors").open("ab") as file:
        file.write(b"1")
    assert {step for step in folder.steps() if folder.problem(step)} == {10, 40, 50}
    assert folder.prune(2, 0) == []
    save(folder.disk, 60)
    assert folder.prune(2, 0) == [20]
    assert folder.steps() == [10, 30, 40, 50, 60]


def test_a_checkpoint_without_a_manifest_is_none(tmp_path):
    folder = CheckpointFolder(local(tmp_path, 10, 20))
    (tmp_path / step_name(20) / "manifest.json").unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "old-step-00000007-x").mkdir()
    (tmp_path / step_name(30)).write_text("a file")
    assert folder.steps() == [10]
    assert folder.leftovers() == [step_name(20)]


def test_only_dead_saves_are_collected(tmp_path):
    folder = CheckpointFolder(local(tmp_path, 10))
    write(folder.disk, 20, "dead")
    write(folder.disk, 20, "mine")
    kept = folder.disk.set_aside(10)
    (tmp_path / "notes").mkdir()
    assert folder.collect("mine") == ["step-00000020.tmp-dead"]
    assert sorted(os.listdir(tmp_path)) == ["notes", kept, "step-00000020.tmp-mine"]
    assert (folder.steps(), folder.asides()) == ([], [kept])


def test_what_a_save_was_about_to_replace_is_put_back(tmp_path):
    folder = CheckpointFolder(local(tmp_path, 10))
    (tmp_path / step_name(10)).rename(tmp_path / "step-00000010.replaced-ab")
    assert folder.leftovers() == ["step-00000010.replaced-ab"]
    assert folder.collect("two") == ["step-00000010.replaced-ab"]
    assert seed_of(folder.disk, 10) == 0


def test_what_was_replaced_stays_while_the_new_one_is_damaged(tmp_path):
    folder = CheckpointFolder(local(tmp_path, 10))
    save(folder.disk, 10, "two", seed=1)
    (tmp_path / step_name(10) / "state.json").unlink()
    assert folder.collect("three") == []
    assert len(os.listdir(tmp_path)) == 2
    (tmp_path / step_name(10) / "state.json").write_text('{"train": {"tokens": 5120}, "seed": 1}')
    assert folder.problem(10) == ""
    assert len(folder.collect("three")) == 1
    assert seed_of(folder.disk, 10) == 1
