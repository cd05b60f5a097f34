"""The spike monitor, the policies at one process and snapshots."""

import json
import logging
import math
import random
import stat
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from harness import GOLDEN, Alone
from torch import nn

from crius.config.operation import StabilityConfig
from crius.config.training import LRSchedulerConfig
from crius.errors import NonFiniteError, SpikeError
from crius.optim.build import WarmupStableDecay
from crius.parallel.gradients import Gradients
from crius.train.guard import UpdateGuard
from crius.train.stability import Culprit, SpikeMonitor
from crius.train.state import AfterUpdate, Snapshot, TrainState, leaves, restore_streams, seed_streams, streams
from crius.train.step import StepResult

CPU = torch.device("cpu")


def curves():
    """Loss and gradient norm of each committed run by name."""
    runs = {}
    for line in (GOLDEN / "stability_curves.txt").read_text().splitlines():
        if line.startswith(">"):
            rows = runs.setdefault(line.split()[1], [])
        elif not line.startswith("#"):
            rows.append(tuple(map(float, line.split())))
    return runs


CURVES = curves()
CALM = [name for name in CURVES if name.startswith("calm")]


def alarms(rows, zscore=6.0, window=100):
    """Steps, from 1, that the monitor takes for spikes."""
    monitor, found = SpikeMonitor(zscore, window), []
    for step, row in enumerate(rows, start=1):
        if monitor.spikes(monitor.score(*row)):
            found.append(step)
        else:
            monitor.accept(*row)
    return found


@pytest.mark.parametrize("window", [10, 30, 100])
@pytest.mark.parametrize("name", CALM)
def test_calm_training_raises_no_alarm_from_its_first_step_on(name, window):
    assert alarms(CURVES[name], window=window) == []


@pytest.mark.parametrize("window", [10, 30, 100])
def test_a_real_spike_of_a_learning_rate_too_high_is_found_in_its_step(window):
    """Step 244: gradient norm 1.24 after 0.34 on average; the loss does not show it yet."""
    assert alarms(CURVES["wild-5"], window=window) == [244]


@pytest.mark.parametrize("place", [20, 40, 200, 399])
@pytest.mark.parametrize("name", CALM)
@pytest.mark.parametrize("factors", [(1000, 1000), (1, 4), (3, 1)], ids=str)
def test_a_planted_spike_is_found_in_its_step_and_no_other(name, place, factors):
    rows = list(CURVES[name])
    rows[place] = tuple(value * factor for value, factor in zip(rows[place], factors, strict=True))
    assert alarms(rows) == [place + 1]


def test_nothing_is_judged_in_the_first_fifth_of_the_window():
    rows = list(CURVES["calm-1"])
    rows[19] = (1e6, 1e6)
    assert alarms(rows[:20]) == []
    assert SpikeMonitor(6.0, 10).score(1.0, 1.0) == {}


def test_equal_values_make_no_spike_of_a_ripple_but_of_a_jump():
    """The floors: at z 6, 12 % of the mean loss and 120 % of the mean gradient norm."""
    flat = [(2.0, 0.5)] * 30
    assert alarms([*flat, (2.0 * 1.119, 0.5 * 2.19)]) == []
    assert alarms([*flat, (2.0 * 1.121, 0.5)]) == [31]
    assert alarms([*flat, (2.0, 0.5 * 2.21)]) == [31]
    assert alarms([*flat, (0.1, 0.001)]) == []  # downwards is no spike
    assert alarms([*[(2.0, 0.0)] * 30, (2.0, 1e-3)]) == [31]


def test_a_spike_stays_out_of_the_window():
    monitor = SpikeMonitor(6.0, 20)
    for row in CURVES["calm-1"][:20]:
        monitor.accept(*row)
    before = monitor.score(3.0, 1.0)
    assert monitor.spikes(monitor.score(300.0, 1.0)) == ["loss"]
    assert monitor.score(3.0, 1.0) == before
    assert len(monitor.state()["loss"]) == 20


class Averaged(nn.Linear):
    """A matrix and its bias, and a buffer that follows the matrix."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def after_update(self):
        self.mean.lerp_(self.weight.mean(0).double(), 0.5)


@dataclass
class Bench:
    """A guard over one matrix, its bias and its buffer."""

    guard: UpdateGuard
    state: TrainState
    model: nn.Module
    run_dir: object
    step: int = 0

    def take_step(self, loss=2.0, scale=1.0, **options):
        """One step of a given loss, with the gradient norm ``scale``."""
        self.step += 1
        self.state.set_lr(0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, scale / math.sqrt(12))
        gradients = Gradients(list(self.model.parameters()), 1, CPU)
        squared = gradients.squared_norms()
        result = StepResult(
            step=self.step,
            loss=torch.tensor(loss, dtype=torch.float64),
            grad_norm=squared.sum().sqrt(),
            local_losses=torch.tensor([loss], dtype=torch.float64),
            squared_norms=squared,
            sample_ids=(2 * self.step, 2 * self.step + 1),
        )
        self.guard.update(result)
        self.state.step = self.step

    def bits(self):
        """Copies of the weights, of the buffer, of the optimizer's state, and of what the schedule goes by."""
        held = [value for state in self.state.optimizer.state.values() for value in state.values()]
        tensors = (*self.model.parameters(), *self.model.buffers(), *held)
        return [tensor.detach().clone() for tensor in tensors], self.state.updates

    def incident(self, step):
        return json.loads((self.run_dir / "incidents" / f"step-{step}.json").read_text())


def make_bench(tmp_path, **policies):
    torch.manual_seed(1)
    model = Averaged()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer.takes_found_inf = False
    state = TrainState([model], optimizer, WarmupStableDecay(LRSchedulerConfig(warmup_steps=10), 100))
    parameters = list(model.named_parameters())
    world = Alone(0, 1, CPU)
    gradients = Gradients([parameter for _, parameter in parameters], 1, CPU)
    names = [name for name, _ in parameters]
    hook = AfterUpdate([model], [], world)
    guard = UpdateGuard(
        StabilityConfig(**policies), state, parameters, gradients, names, world, tmp_path, after_update=hook
    )
    return Bench(guard, state, model, tmp_path)


def test_a_guard_goes_on_with_the_losses_and_counts_of_the_run_that_it_resumes(tmp_path):
    bench = make_bench(tmp_path, nonfinite="skip")
    for loss in (1.0, 2.0, math.nan):
        bench.take_step(loss=loss)
    saved = bench.guard.state()
    assert saved["skips_in_a_row"] == 1 and saved["window"]["loss"]
    resumed = make_bench(tmp_path, nonfinite="skip").guard
    assert resumed.state() != saved
    resumed.load(saved)
    assert resumed.state() == saved


def is_same(one, other):
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def test_a_skipped_step_leaves_weights_moments_and_schedule_to_the_bit(tmp_path, caplog):
    bench = make_bench(tmp_path, nonfinite="skip")
    for _ in range(4):
        bench.take_step()
    before = bench.bits()
    with caplog.at_level(logging.WARNING, logger="crius.train"):
        bench.take_step(loss=math.nan, scale=math.nan)
    assert is_same(bench.bits(), before)
    skipped_lr = bench.state.optimizer.param_groups[0]["lr"]
    bench.take_step()
    assert bench.state.optimizer.param_groups[0]["lr"] == skipped_lr == pytest.approx(0.1 * 5 / 10)
    assert not is_same(bench.bits(), before)
    assert (bench.state.updates, bench.state.skipped_steps, bench.state.step) == (5, 1, 6)
    assert caplog.messages == [
        "step 5 skipped (non-finite): loss nan, grad_norm nan, found on rank 0, first in the gradient of bias; "
        f"1 skipped so far, see {tmp_path}/incidents/step-5.json"
    ]
    report = bench.incident(5)
    assert stat.S_IMODE((tmp_path / "incidents" / "step-5.json").stat().st_mode) == 0o600
    assert (report["kind"], report["action"], report["loss"]) == ("non-finite", "skipped", "nan")
    assert report["sample_ids"] == [10, 11]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1], "found on rank 1, first in the gradient of w"),
        ([0, 2], "found on ranks 0, 2, first in the gradient of w"),
        (list(range(8)), "found on ranks 0, 1, 2, 3, ..., first in the gradient of w"),
        ([], "found in the sum over ranks, first in the gradient of w"),
    ],
)
def test_a_culprit_names_only_ranks_that_are_known(ranks, words):
    assert str(Culprit(ranks, "w", [], [])) == words


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "incidents").touch()
    bench = make_bench(tmp_path, nonfinite="skip")
    with caplog.at_level(logging.WARNING, logger="crius.train"):
        bench.take_step(loss=math.nan)
    assert bench.state.skipped_steps == 1
    assert caplog.messages[0].startswith(f"{tmp_path}/incidents/step-1.json cannot be written")


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_so_many_lost_steps_in_a_row_stop_the_run(policy, tmp_path):
    bench = make_bench(tmp_path, nonfinite=policy, max_consecutive=3)
    for bad in (math.nan, math.nan, 1.0, math.nan, math.nan) if policy == "skip" else (1.0, math.nan, 1.0, math.nan):
        bench.take_step(scale=bad)
    before = bench.bits()
    with pytest.raises(NonFiniteError, match="3 .* --stability.max_consecutive"):
        bench.take_step(scale=math.inf)
    assert is_same(bench.bits(), before)
    assert bench.incident(bench.step)["action"] == "stopped"


def test_rollback_restores_the_last_snapshot_to_the_bit(tmp_path, caplog):
    bench = make_bench(tmp_path, nonfinite="rollback", snapshot_interval=3)
    for _ in range(6):
        bench.take_step()
    kept = bench.bits()
    bench.take_step(loss=2.1)  # step 7 begins with a snapshot of the weights after step 6
    bench.take_step(loss=2.2)
    assert not is_same(bench.bits(), kept)
    with caplog.at_level(logging.WARNING, logger="crius.train"):
        bench.take_step(loss=math.inf)
    assert is_same(bench.bits(), kept)
    assert caplog.messages[0].startswith("step 9 rolled back to the weights of step 6 (3 steps lost): loss inf")
    assert (bench.state.updates, bench.state.rolled_back_steps, bench.state.skipped_steps) == (6, 3, 0)
    assert bench.guard._monitor.state()["loss"] == [2.0] * 6 + [2.1]  # 7's loss was of the kept weights
    assert bench.incident(9)["action"] == "rolled back to the weights of step 6"
    bench.take_step()
    assert bench.state.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 7 / 10)


def test_rollback_of_the_first_step_leaves_the_optimizer_without_state(tmp_path):
    bench = make_bench(tmp_path, nonfinite="rollback")
    start = bench.bits()
    bench.take_step()
    assert not is_same(bench.bits(), start) if len(bench.bits()[0]) == len(start[0]) else True
    bench.take_step(loss=math.nan)
    assert is_same(bench.bits(), start)
    assert bench.state.updates == 0


def test_each_change_of_the_weights_is_announced(tmp_path, caplog):
    """By an update, and by a rollback: copies of a GPU's weights may be on their way."""
    caplog.set_level(logging.INFO, logger="crius.train")
    bench, before = make_bench(tmp_path, nonfinite="rollback"), []
    bench.guard.before_change = lambda: before.append(bench.bits())
    for count, loss in enumerate((2.0, 2.0, math.nan), start=1):
        weights = bench.bits()
        bench.take_step(loss=loss)
        assert len(before) == count and is_same(before[-1], weights)
    assert sum("are kept every" in line for line in caplog.messages) == 1


def test_a_snapshot_is_never_of_weights_that_gave_a_bad_step(tmp_path):
    bench = make_bench(tmp_path, nonfinite="rollback", snapshot_interval=2)
    for _ in range(2):
        bench.take_step()
    with torch.no_grad():
        bench.model.weight.mul_(7)  # stands for an update that broke the weights; a snapshot is due in the next step
    bench.take_step(loss=math.nan)
    assert bench.state.updates == 0  # back at the start, not at the broken weights
    assert bench.model.weight.abs().max() < 1


@pytest.mark.parametrize("name", ["weight", "mean"])
def test_weights_and_buffers_that_the_last_update_broke_are_not_saved(name, tmp_path):
    bench = make_bench(tmp_path)
    bench.take_step()
    bench.guard.before_save()
    with torch.no_grad():
        getattr(bench.model, name)[1] = math.nan  # stands for an update that broke it
    with pytest.raises(NonFiniteError, match=f"step 1: the weights of {name} are not finite"):
        bench.guard.before_save()


def test_weights_that_the_last_update_broke_are_rolled_back_before_a_save(tmp_path, caplog):
    bench = make_bench(tmp_path, nonfinite="rollback", snapshot_interval=2)
    for _ in range(2):
        bench.take_step()
    bench.take_step()  # begins with a snapshot of the weights after step 2
    good = bench.guard._snapshot._copied[0][""].clone()
    with torch.no_grad():
        bench.model.weight.fill_(math.inf)
    with caplog.at_level(logging.WARNING, logger="crius.train"):
        bench.guard.before_save()
    assert torch.equal(bench.model.weight.detach(), good)
    assert "step 3 rolled back to the weights of step 2 (1 step lost): the weights of weight are not" in caplog.text
    assert (bench.state.updates, bench.state.rolled_back_steps) == (2, 1)


def spiking(tmp_path, **policies):
    bench = make_bench(tmp_path, window=10, **policies)
    for _ in range(6):
        bench.take_step()
    return bench


def test_a_spike_is_warned_of_and_the_update_made(tmp_path, caplog):
    bench = spiking(tmp_path)
    with caplog.at_level(logging.WARNING, logger="crius.train"):
        bench.take_step(loss=2000.0, scale=50.0)
    assert bench.state.updates == 7 and bench.state.skipped_steps == 0
    assert caplog.messages == [
        "step 7 is a spike: loss 2000 (z 49950.0), grad_norm 50 (z 245.0); the update is made, "
        f"see {tmp_path}/incidents/step-7.json"
    ]
    report = bench.incident(7)
    assert (report["kind"], report["action"], report["lr"]) == ("spike", "warned", {"0": pytest.approx(0.07)})
    assert report["scores"][0] == {"name": "loss", "value": 2000.0, "mean": 2.0, "std": 0.04, "z": 49950.0}
    assert [row["name"] for row in report["parameters"]] == ["weight", "bias"]  # 9 of 12 numbers first
    assert report["parameters"][0]["grad_norm"] == pytest.approx(50 * math.sqrt(9 / 12), rel=1e-6)  # float32 gradients


def test_spike_stop_ends_the_run_before_the_update(tmp_path):
    bench = spiking(tmp_path, spike="stop")
    before = bench.bits()
    with pytest.raises(SpikeError, match="step 7: .*grad_norm 50 .* is a spike"):
        bench.take_step(scale=50.0)
    assert is_same(bench.bits(), before)


def test_spike_skip_leaves_steps_out_until_there_are_too_many(tmp_path):
    bench = spiking(tmp_path, spike="skip", max_consecutive=3)
    before = bench.bits()
    for _ in range(2):
        bench.take_step(scale=50.0)
    assert is_same(bench.bits(), before) and bench.state.skipped_steps == 2
    with pytest.raises(SpikeError, match="3 skipped steps in a row"):
        bench.take_step(scale=50.0)


def test_spike_off_looks_at_nothing(tmp_path, caplog):
    bench = spiking(tmp_path, spike="off")
    bench.take_step(loss=2000.0, scale=50.0)
    assert bench.state.updates == 7 and not caplog.messages and not (tmp_path / "incidents").exists()


def test_a_level_that_stays_is_no_spike_any_more(tmp_path, caplog):
    bench = spiking(tmp_path, max_consecutive=3)
    with caplog.at_level(logging.WARNING, logger="crius.train"):
        for _ in range(20):
            bench.take_step(scale=50.0)
    assert [message.split(":")[0] for message in caplog.messages] == [
        *(f"step {step} is a spike" for step in (7, 8, 9)),
        "3 spikes in a row are a new level",
    ]


def test_a_nan_does_not_enter_the_window(tmp_path):
    bench = spiking(tmp_path, nonfinite="skip")
    bench.take_step(loss=math.nan, scale=math.nan)
    assert bench.guard._monitor.state() == {"loss": [2.0] * 6, "grad_norm": pytest.approx([1.0] * 6)}
    with pytest.raises(FileNotFoundError):
        bench.incident(8)
    bench.take_step(scale=50.0)
    assert bench.incident(8)["kind"] == "spike"


def test_a_look_one_step_late_still_warns_and_stops_before_the_next_update(tmp_path, caplog):
    """The order of a GPU, where the host does not wait for a step before it sends off its update."""
    bench = spiking(tmp_path)
    bench.guard._looks_late = True
    bench.take_step(loss=2000.0)
    assert bench.state.updates == 7 and not (tmp_path / "incidents").exists()
    bench.take_step()
    assert bench.incident(7)["lr"] == {"0": pytest.approx(0.07)}  # of step 7, not of the step that looks
    before = bench.bits()
    bench.take_step(loss=math.nan, scale=math.nan)
    tensors, kept = bench.bits()[0], before[0]
    tensors[2] = kept[2]  # the buffer, which no save will see
    assert is_same((tensors, 0), (kept, 0))  # left out on the device
    with pytest.raises(NonFiniteError, match="step 9"):
        bench.take_step()


def test_set_lr_counts_updates_and_obeys_the_factor_of_a_group():
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:], "lr_factor": 0.5}])
    state = TrainState([], optimizer, WarmupStableDecay(LRSchedulerConfig(warmup_steps=4), 10), step=7, updates=1)
    assert state.set_lr(0.8) == 0.4
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.2]


@pytest.mark.parametrize("known", [{}, {"updates": 5}], ids=["older", "newer"])
def test_updates_that_no_checkpoint_tells_are_the_steps_neither_skipped_nor_taken_back(known):
    state = TrainState([], None, None)
    state.restore({"step": 9, "skipped_steps": 1, "rolled_back_steps": 3, **known})
    assert state.counters() == {"step": 9, "tokens": 0, "updates": 5, "skipped_steps": 1, "rolled_back_steps": 3}


def test_a_snapshot_restores_any_state_in_place_and_drops_what_came_later():
    base = pytest.importorskip("torchao.optim.subclass_8bit")
    weight = nn.Parameter(torch.randn(16, 16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    eight_bit = base.OptimState8bit.zeros((16, 16), signed=True, block_size=256)
    half = torch.randn(16, 16, dtype=torch.bfloat16)
    optimizer.state[weight] = {"eight_bit": eight_bit, "half": half, "count": 3}
    eight_bit.copy_(torch.randn(16, 16))
    parts = [leaves(weight)[""], half, eight_bit.codes, eight_bit.scale]
    assert type(parts[0]) is torch.Tensor and not parts[0].requires_grad
    before = [part.clone() for part in parts]
    snapshot = Snapshot([weight], optimizer)
    snapshot.take()
    assert snapshot.num_bytes() == 256 * 4 + 256 * 2 + 256 + 4 + eight_bit.qmap.numel() * 4
    for _ in range(2):  # a second snapshot of the same numbers takes the place of the first
        with torch.no_grad():
            weight.add_(1)
            half.add_(1)
        eight_bit.copy_(torch.randn(16, 16) * 5)
        optimizer.state[weight] |= {"count": 9, "new": torch.ones(1)}
        snapshot.restore()
        assert all(torch.equal(now, then) for now, then in zip(parts, before, strict=True))
        assert optimizer.state[weight] == {"eight_bit": eight_bit, "half": half, "count": 3}
        snapshot.take()


def test_random_numbers_go_on_where_their_streams_were_saved():
    def draws():
        return random.random(), random.gauss(0, 1), *np.random.randn(3), *torch.rand(2).tolist()

    seed_streams(CPU, 7, "a")
    first = draws()
    saved = streams(CPU)  # with the second of two normal numbers that Python and numpy draw at a time
    later = draws()
    restore_streams(saved, CPU)
    assert draws() == later
    seed_streams(CPU, 7, "a")
    assert draws() == first
    seed_streams(CPU, 7, "b")
    assert not {*draws()} & {*first, *later}


class Scaled:
    """A weight with a scale that is computed from it after the first update, as float8 weights have."""

    def __init__(self):
        self.inner, self.scale = torch.ones(2), None

    def __tensor_flatten__(self):
        return ["inner", *(["scale"] if self.scale is not None else [])], None


def test_a_part_that_a_weight_got_after_the_snapshot_does_not_hinder_it():
    weight = Scaled()
    snapshot = Snapshot([weight], torch.optim.SGD([torch.zeros(1)]))
    snapshot.take()
    weight.scale = torch.ones(1)
    weight.inner.add_(1)
    snapshot.restore()
    assert weight.inner.tolist() == [1.0, 1.0]
    snapshot.take()
    weight.inner.add_(1)
    weight.scale.add_(1)
    snapshot.restore()
    assert weight.inner.tolist() == [1.0, 1.0] and weight.scale.tolist() == [1.0]
