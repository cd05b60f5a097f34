"""Which checkpoints are there, and which go: two good ones always stay."""

import os
import random

import pytest
from checkpoint_samples import local, save, seed_of, write

from crius.checkpoint.folder import CheckpointFolder, _outside, _Span, expendable
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
            gone = expendable(choice.sample(good, len(good)), keep_last, keep_every)
            kept = [step for step in good if step not in gone]
            assert len(kept) >= min(2, len(good))
            assert kept[-min(max(keep_last, 2), len(good)) :] == good[-max(keep_last, 2) :]
            assert not [step for step in gone if keep_every > 0 and step % keep_every == 0]
            good = kept
            if choice.random() < 0.2:
                keep_last, keep_every = choice.randint(-1, 5), choice.choice([0, 3, 10])


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "gone"),
    [
        (3, 0, [10, 20, 30]),
        (2, 0, [10, 20, 30, 40]),
        (0, 0, [10, 20, 30, 40]),
        (2, 20, [10, 30]),
        (2, 1, []),
        (6, 0, []),
    ],
)
def test_what_is_not_to_be_kept_goes(keep_last, keep_every, gone):
    assert expendable([30, 10, 20, 60, 50, 40], keep_last, keep_every) == gone


@pytest.mark.parametrize(
    ("spans", "word"),
    [
        ([(8, 16), (16, 24)], "header"),
        ([(8, 16), (20, 24)], "gaps"),
        ([(8, 16), (16, 20)], "gaps"),
        ([], ""),
    ],
)
def test_damage_outside_of_tensors_is_in_a_gap_if_there_is_one(spans, word):
    assert _outside([_Span(*span, "w", "digest") for span in spans], 24) == word


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


def test_on_a_local_disk_all_that_has_the_name_of_a_checkpoint_counts_and_what_is_not_whole_stays(tmp_path):
    folder = CheckpointFolder(local(tmp_path, 10, 20, 50, 60, 70))
    (tmp_path / step_name(20) / "manifest.json").unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "old-step-00000007-x").mkdir()
    (tmp_path / step_name(30)).write_text("a file")
    (tmp_path / step_name(40)).symlink_to(tmp_path / step_name(50))
    assert folder.steps() == [10, 20, 30, 40, 50, 60, 70]
    assert folder.good() == [10, 50, 60, 70]
    assert folder.leftovers() == folder.collect("next") == []
    assert folder.prune(2, 0) == [10, 50]
    assert folder.steps() == [20, 30, 40, 60, 70]


def test_where_the_manifest_is_the_commit_a_folder_without_one_is_no_checkpoint(tmp_path):
    folder = CheckpointFolder(local(tmp_path, 10, 20, scheme="file://"))
    (tmp_path / step_name(20) / "manifest.json").unlink()
    assert (folder.steps(), folder.leftovers()) == ([10], [step_name(20)])


def test_only_dead_saves_are_collected(tmp_path):
    folder = CheckpointFolder(local(tmp_path, 10))
    write(folder.disk, 20, "dead")
    write(folder.disk, 20, "mine")
    kept = folder.disk.set_aside(step_name(10))
    (tmp_path / "notes").mkdir()
    assert folder.collect("mine") == ["removed step-00000020.tmp-dead, left over from a save that did not finish"]
    assert sorted(os.listdir(tmp_path)) == ["notes", kept, "step-00000020.tmp-mine"]
    assert (folder.steps(), folder.asides()) == ([], [kept])


def test_what_a_save_was_about_to_replace_is_put_back(tmp_path):
    folder = CheckpointFolder(local(tmp_path, 10))
    (tmp_path / step_name(10)).rename(tmp_path / "step-00000010.replaced-ab")
    assert folder.leftovers() == ["step-00000010.replaced-ab"]
    assert folder.collect("two") == [
        "put step-00000010.replaced-ab back, which a save that did not finish was replacing"
    ]
    assert seed_of(folder.disk, 10) == 0


@pytest.mark.parametrize("lost", ["state.json", "manifest.json"])
@pytest.mark.parametrize(
    ("damaged", "seed", "aside"), [((), 1, 0), (("new",), 0, 1), (("old",), 1, 1), (("old", "new"), None, 1)]
)
def test_of_two_checkpoints_of_a_step_a_whole_one_stays_and_none_that_is_not_is_removed(
    damaged, lost, seed, aside, tmp_path
):
    folder = CheckpointFolder(local(tmp_path, 10))
    save(folder.disk, 10, "two", seed=1)
    places = {"new": tmp_path / step_name(10), "old": next(tmp_path.glob("*.replaced-*"))}
    for name in damaged:
        (places[name] / lost).unlink()
    assert len(folder.collect("three")) == 1 + (damaged == ("new",))
    assert folder.steps() == [10]
    assert seed is None or seed_of(folder.disk, 10) == seed
    assert bool(folder.problem(10)) == (seed is None)
    assert (len(folder.asides()), len(os.listdir(tmp_path))) == (aside, 1 + aside)
