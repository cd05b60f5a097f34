"""The saver and the load in one process: what is staged, what is counted, what survives a kill at any moment."""

import contextlib
import functools
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from kills import every_kill

from crius.checkpoint import save as save_module
from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder
from crius.checkpoint.load import check_tensors, find, load_tensors
from crius.checkpoint.manifest import Manifest
from crius.checkpoint.save import PieceOnDisk, Saver
from crius.checkpoint.tensors import StagedPlanner
from crius.config.operation import CheckpointConfig
from crius.errors import CheckpointError
from crius.train.saving import NEWEST, check_newest, remember


def alone(value):
    return [value]


def saver_in(folder, beat=lambda: None, **config):
    place = PieceOnDisk(0, 1, 1, dist.HashStore(), alone, "attempt")
    there = CheckpointFolder(open_disk(str(folder)))
    committed = functools.partial(remember, Path(str(folder).removeprefix("file://")), there)
    return Saver(there, CheckpointConfig(**config), place, beat, committed=committed)


def head(step):
    return Manifest(
        step=step, run_id="r", versions={}, config={}, layout="1", num_ranks=1, dataset="d", files={}, tensors={}
    )


def tensors_of(step):
    return {"model.w": torch.full((64, 3), float(step)), "optim.w.step": torch.tensor(float(step))}


BYTES = 64 * 3 * 4 + 4
"""Bytes of these tensors."""


def save(saver, step, **more):
    saver.save(step, tensors_of(step), {"train": {"step": step}}, head(step), **more)


def found_in(folder, load_step=-1):
    return find(CheckpointFolder(open_disk(str(folder))), load_step, rank=0, size=1, gather=alone, verify=True)


def loaded(folder, load_step=-1):
    """The step that was found, after its tensors were compared with what was saved."""
    found = found_in(folder, load_step)
    targets = {name: torch.full_like(tensor, -1) for name, tensor in tensors_of(0).items()}
    load_tensors(found.sources(targets), targets)
    step = found.manifest.step
    assert found.state == {"train": {"step": step}}
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors_of(step).items())
    return step


@pytest.mark.long
def test_a_save_killed_at_any_moment_leaves_a_checkpoint_to_go_on_from(tmp_path):
    def prepare(folder):
        saver = saver_in(folder, mode="sync", keep_last=2)
        save(saver, 1)
        save(saver, 2)

    def work(folder):
        save(saver_in(folder, mode="sync", keep_last=2), 3)  # and removes step 1

    seen = set()
    for folder in every_kill(tmp_path, prepare, work):
        there = CheckpointFolder(open_disk(str(folder)))
        there.collect("next")
        assert check_newest(folder, there, -1, accepts=False) == ""
        step = loaded(folder)
        seen.add((json.loads((folder / NEWEST).read_text())["step"], step))
    assert seen == {(2, 2), (2, 3), (3, 3)}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_training_changes_after_a_save_is_not_in_it(mode, tmp_path):
    release = threading.Event()
    saver = saver_in(tmp_path, beat=release.wait if mode == "async" else lambda: None, mode=mode)
    tensors = tensors_of(5)
    saver.save(5, tensors, {"train": {"step": 5}}, head(5))
    for tensor in tensors.values():
        tensor.zero_()
    release.set()
    saver.wait()
    assert loaded(tmp_path) == 5


def test_an_async_save_does_not_hold_up_training(tmp_path):
    release = threading.Event()
    saver = saver_in(tmp_path, beat=lambda: release.wait(20) or None)
    save(saver, 1)
    saver.poll()
    assert found_in(tmp_path) is None
    release.set()
    saver.wait()
    assert loaded(tmp_path) == 1


@pytest.mark.parametrize(("mode", "total", "waited", "blocked"), [("sync", 6, 6, 6), ("async", 14, 6, 9)])
def test_the_time_of_a_save_and_what_training_waited_for_it_are_counted(mode, total, waited, blocked, tmp_path, caplog):
    """The three exchanges of a plan take 6 s, training computes for 5 s, then it waits for 3 s."""
    now, release, sleep = [100.0], threading.Event(), save_module.time.sleep

    def take(seconds, value=None):
        now[0] += seconds
        return [value]

    def rest(seconds):
        take(0 if release.is_set() else 3)
        release.set()
        sleep(seconds)

    saver = saver_in(tmp_path, mode=mode, beat=lambda: release.wait(20 if mode == "async" else 0) and None)
    assert saver.blocked_seconds == 0
    release.set()
    save(saver, 0, wait=True)
    release.clear()
    saver._place = replace(saver._place, gather=lambda value: take(2, value))
    saver._planner._planned = None
    before = saver.blocked_seconds
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO", "crius.checkpoint"):
        patch.setattr(save_module.log.parent, "propagate", True)
        patch.setattr(save_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=rest))
        save(saver, 1)
        take(5)
        saver.wait()
    assert saver.blocked_seconds - before == pytest.approx(blocked)
    assert f" {total}.00 s in all, training waited {waited}.00 s ({mode})" in caplog.text


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_failed_save_is_counted_and_the_next_one_is_good(mode, tmp_path):
    broken = [True]

    def beat():
        if broken[0]:
            raise OSError(28, "No space left on device")

    saver = saver_in(tmp_path, beat=beat, mode=mode)
    for failures in (1, 2):
        save(saver, failures, wait=True)
        assert (saver.failures, found_in(tmp_path)) == (failures, None)
        assert "No space left" in saver.last_error
    assert list(tmp_path.iterdir()) == []
    broken[0] = False
    save(saver, 3, wait=True)
    assert (saver.failures, loaded(tmp_path)) == (0, 3)


@pytest.mark.parametrize("free", [BYTES - 1, BYTES])
def test_a_disk_without_room_is_known_before_anything_is_written(free, tmp_path, monkeypatch):
    saver = saver_in(tmp_path, mode="sync")
    monkeypatch.setattr(type(saver._folder.disk), "free_bytes", lambda self: free)
    save(saver, 1)
    assert ("MiB free" in saver.last_error, list(tmp_path.iterdir()) == []) == ((free < BYTES,) * 2)


def test_copies_that_do_not_fit_into_memory_are_not_made(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(save_module, "free_host_bytes", lambda: 10)
    monkeypatch.setattr(save_module.log.parent, "propagate", True)
    saver = saver_in(tmp_path)
    save(saver, 1)
    assert loaded(tmp_path) == 1  # without waiting
    assert "saving in sync" in caplog.text


@pytest.mark.parametrize(("on_gpu", "needed"), [(False, 2 * BYTES), (True, 2 * (1024 + 4))])
@pytest.mark.parametrize("is_enough", [False, True])
def test_page_locked_copies_take_the_next_power_of_two(on_gpu, needed, is_enough, tmp_path, monkeypatch):
    """Weights of 768 and a count of 4 bytes on each of two ranks; on a GPU torch's allocator takes 1,024 and 4."""

    class Weight(torch.Tensor):
        is_cuda = on_gpu

    monkeypatch.setattr(save_module, "free_host_bytes", lambda: needed + is_enough)
    saver = saver_in(tmp_path, mode="async")
    saver._place = replace(saver._place, ranks_here=2)
    tensors = {name: tensor.as_subclass(Weight) for name, tensor in tensors_of(1).items()}
    saver._planner.agree(tensors, 0, alone)
    assert saver._has_memory() == is_enough


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU. Copies of it are made when something waits for them."""

    is_cuda = True
    copies: list = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and kwargs:
            assert kwargs == {"non_blocking": True}
            cls.copies.append(args)
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def arrive(cls):
        while cls.copies:
            copy, source = cls.copies.pop()
            copy.copy_(torch.Tensor(source))


class FakeStream:
    """Notes who waits for it: another stream, or a thread of the host. It is its own event."""

    device = 0

    def __init__(self, name, waits):
        self.name, self.waits = name, waits

    def wait_stream(self, stream):
        self.waits.append(f"{self.name} for {stream.name}")

    def wait_event(self, event):
        self.wait_stream(event)
        OnGpu.arrive()

    def record_event(self):
        return self

    def synchronize(self):
        self.waits.append(f"{threading.current_thread().name} for {self.name}")
        OnGpu.arrive()


@pytest.mark.parametrize("changes", [False, True])
def test_copies_of_a_gpu_are_awaited_by_what_changes_and_by_what_writes_the_tensors(changes, tmp_path, monkeypatch):
    """Training itself waits for nothing."""
    waits, release, empty = [], threading.Event(), torch.empty
    main, side = FakeStream("main", waits), FakeStream("side", waits)
    mocks = {"current_stream": lambda: main, "Stream": lambda: side}
    for name, mock in (mocks | dict.fromkeys(("stream", "device"), contextlib.nullcontext)).items():
        monkeypatch.setattr(torch.cuda, name, mock)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    saver = saver_in(tmp_path, beat=lambda: release.wait(20) or None, mode="async")
    tensors = tensors_of(5)  # the count is on the host
    tensors["model.w"] = tensors["model.w"].as_subclass(OnGpu)
    saver.save(5, tensors, {"train": {"step": 5}}, head(5))
    assert waits == ["side for main"]
    if changes:
        for _ in range(2):
            saver.before_change()
        assert waits == ["side for main", "main for side"]
        for tensor in tensors.values():
            tensor.zero_()
    release.set()
    saver.wait()
    assert set(waits[1 + changes :]) == {"crius-checkpoint for side"}
    assert loaded(tmp_path) == 5


@pytest.mark.parametrize("url", ["{tmp}", "file://{tmp}"])
@pytest.mark.parametrize("file", ["rank-00000", "state", "manifest"])
def test_a_disk_that_flips_a_bit_of_any_file_has_not_saved(file, url, tmp_path):
    saver = saver_in(url.format(tmp=tmp_path), mode="sync")
    save(saver, 1)
    disk = saver._folder.disk
    real = disk.create

    @contextlib.contextmanager
    def create(path):
        with real(path) as sink:
            yield Flipping(sink) if path.split("/")[1].startswith(file) else sink

    class Flipping:
        def __init__(self, sink):
            self.sink = sink

        def write(self, data):
            self.sink.write(bytes(data)[:-1] + bytes([bytes(data)[-1] ^ 4]) if len(data) else data)

    disk.create = create
    save(saver, 2)
    assert saver.failures == 1 and "differs from the bytes that were written" in saver.last_error
    assert (saver._folder.steps(), loaded(url.format(tmp=tmp_path))) == ([1], 1)
    disk.create = real
    save(saver, 2)
    assert (saver.failures, loaded(url.format(tmp=tmp_path))) == (0, 2)


def test_ranks_that_write_to_places_of_their_own_have_not_saved(tmp_path):
    store = dist.HashStore()

    def rank(number):
        place = PieceOnDisk(number, 2, 2, store, lambda value: [value, value], "attempt")
        folder = CheckpointFolder(open_disk(str(tmp_path / str(number))))
        saver = Saver(folder, CheckpointConfig(mode="sync"), place, lambda: None)
        save(saver, 3)
        return saver

    other = threading.Thread(target=rank, args=(1,))
    other.start()
    saver = rank(0)
    other.join()
    assert saver.failures == 1
    assert "lacks rank-00001.safetensors, which another rank has written" in saver.last_error
    assert found_in(tmp_path / "0") is None


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_waits_for_a_slow_one_beats_while_that_one_writes(slow, mode, tmp_path, monkeypatch):
    monkeypatch.setattr(save_module, "SECONDS", 0.0)
    store, heard, writes, is_stuck = dist.HashStore(), [], threading.Semaphore(0), threading.Event()

    def beat():
        writes.acquire(timeout=20)

    def wait(rank, has_moved):
        heard.append((rank, has_moved))
        if not is_stuck.is_set():
            writes.release()  # one block more for each beat of the one that waits
        if heard.count((slow, True)) == 2:
            is_stuck.set()
        if heard[-3:] == [(slow, False)] * 3:
            writes.release(100)

    def rank(number):
        place = PieceOnDisk(number, 2, 2, store, lambda value: [value, value], "attempt")
        hooks = (beat, lambda *word: None) if number == slow else (lambda: None, wait)
        folder = CheckpointFolder(open_disk(str(tmp_path)))
        saver = Saver(folder, CheckpointConfig(mode=mode), place, *hooks)
        save(saver, 1, wait=True)
        return saver

    other = threading.Thread(target=rank, args=(1,))
    other.start()
    saver = rank(0)
    other.join()
    assert is_stuck.is_set() and saver.failures == 0
    assert set(heard) == {(slow, True), (slow, False)}


def test_progress_is_told_and_asked_for_twice_a_second_at_most():
    now, told, heard = 0.0, [], []
    store = dist.HashStore()
    slow = save_module.Progress(0, store, "p", lambda: told.append(now), None, lambda: now)
    other = save_module.Progress(1, store, "p", None, lambda *word: heard.append((now, *word)), lambda: now)
    slow.is_missing(7)
    for tenths in range(20):
        now = tenths / 10
        if now < 1.2:
            slow.wrote()
        other.wait()
    assert len(told) == 12  # each write is a beat of the rank itself
    assert heard == [(0.0, 7, True), (0.5, 7, True), (1.0, 7, True), (1.5, 7, False)]
    asked = []
    for prefix in ("p", "nothing is missing yet"):
        save_module.Progress(7, store, prefix, None, lambda rank, _: asked.append(rank), lambda: now).wait()
    assert asked == [0, 0], "rank 0 has not read the part of the rank that it waits for"


def test_retention_keeps_the_newest_and_every_nth(tmp_path):
    saver = saver_in(tmp_path, mode="sync", keep_last=2, keep_every=4)
    for step in range(1, 11):
        save(saver, step)
    assert CheckpointFolder(open_disk(str(tmp_path))).steps() == [4, 8, 9, 10]
    assert loaded(tmp_path, 4) == 4


def test_the_first_of_two_steps_is_loaded_if_it_is_asked_for(tmp_path):
    saver = saver_in(tmp_path, mode="sync")
    for step in (0, 3):
        save(saver, step)
    assert (loaded(tmp_path, 0), loaded(tmp_path)) == (0, 3)


def test_a_parameter_is_filled_without_a_gradient(tmp_path):
    save(saver_in(tmp_path, mode="sync"), 3)
    weight = torch.nn.Parameter(torch.zeros(64, 3))
    found = found_in(tmp_path)
    load_tensors(found.sources(["model.w"]), {"model.w": weight})
    assert weight.requires_grad and torch.equal(weight, tensors_of(3)["model.w"])


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path):
    save(saver_in(tmp_path, mode="sync"), 3)
    for step in (0, 4):
        with pytest.raises(CheckpointError, match=f"no checkpoint of step {step}") as caught:
            found_in(tmp_path, step)
        assert caught.value.fix == "--checkpoint.load_step 3"


def lose_manifest(place):
    (place / "manifest.json").unlink()


def become_a_link(place):
    place.rename(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")


def gain_a_file(place):
    (place / "x").touch()


@pytest.mark.parametrize("lose", [lose_manifest, become_a_link, gain_a_file])
def test_a_checkpoint_without_manifest_is_fallen_back_from_and_alone_it_is_no_place_to_start_anew(
    lose, tmp_path, monkeypatch
):
    said = []
    monkeypatch.setattr("crius.checkpoint.load.log.warning", lambda text, *words: said.append(text % words))
    saver = saver_in(tmp_path, mode="sync")
    save(saver, 1)
    save(saver, 2)
    lose(tmp_path / "step-00000002")
    assert loaded(tmp_path) == 1
    words = ("IS DAMAGED", "FALLING BACK to step 1; step 2 damaged")
    assert [word in line for word, line in zip(words, said, strict=True)] == [True, True]
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="is good; damaged: step 2, 1"):
        found_in(tmp_path)


def test_missing_extra_and_reshaped_tensors_are_all_named(tmp_path):
    save(saver_in(tmp_path, mode="sync"), 1)
    manifest = found_in(tmp_path).manifest
    wanted = {"model.w": ((64, 4), "F32"), "model.new": ((1,), "F32")}
    with pytest.raises(CheckpointError) as caught:
        check_tensors(manifest, wanted, lambda name: False)
    for name in ("model.new", "optim.w.step", "model.w: [64, 3] in the checkpoint, [64, 4] in the run"):
        assert name in caught.value.why
    ours = {"model.w": ((64, 3), "BF16"), "optim.w.step": ((), "F32")}
    assert check_tensors(manifest, ours, lambda name: False) == ["model.w: F32 -> BF16"]


def test_other_tensors_from_one_save_to_the_next_are_planned_anew(tmp_path):
    saver = saver_in(tmp_path)
    saver.save(0, {"model.w": torch.ones(2)}, {"train": {"step": 0}}, head(0), wait=True)
    save(saver, 1, wait=True)
    assert loaded(tmp_path) == 1


def test_tensors_that_changed_on_another_rank_are_planned_anew():
    planner = StagedPlanner()
    theirs = []

    def gather(mine):
        return [mine, theirs != planner._planned if isinstance(mine, bool) else theirs]

    tensors = {"model.w": torch.ones(2)}
    planner.agree(tensors, 0, gather)
    other = StagedPlanner()
    other.agree({"model.v": torch.ones(3)}, 0, alone)
    theirs = other._planned
    _, metadata = planner.agree(tensors, 0, gather)
    assert set(metadata.state_dict_metadata) == {"model.v", "model.w"}


def test_what_is_written_of_a_parameter_has_no_gradient_and_a_rank_may_have_nothing_to_write():
    planner = StagedPlanner()
    plan, _ = planner.agree({"model.w": torch.nn.Parameter(torch.ones(2))}, 0, alone)
    [item] = plan.items
    assert not planner.lookup_object(item.index).requires_grad
    planner.stage()
    assert planner.has_copies and not planner.lookup_object(item.index).requires_grad
    planner.agree({}, 0, alone)
    planner.stage()
    assert not planner.has_copies
