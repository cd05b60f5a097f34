"""The kernel checks of ``benchmarks/gpu`` on a CPU: a group as a process, and that wrong kernels and errors show."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from harness import ROOT

from benchmarks.gpu import checks, kernels, system


def call(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def strict(line):
    """The line as JSON proper, without Python's NaN and Infinity."""
    return json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def check_of(group, name):
    (found,) = [check for check in kernels.CHECKS[group]() if check.name == name]
    return found


@pytest.mark.long
def test_a_group_is_a_process_in_which_all_is_right_that_a_cpu_can_tell():
    done = call("-m", "benchmarks.gpu.kernels", "experts", "cpu")
    assert done.returncode == 0, done.stderr
    lines = [strict(line) for line in done.stdout.splitlines()]
    assert [line["check"] for line in lines] == [check.name for check in kernels.experts_checks()]
    judged = [line for line in lines if line["ok"] is not None]
    assert all(line["ok"] for line in judged), done.stdout
    assert [line["detail"] for line in lines if line["ok"] is None] == [checks.NEEDS_GPU]
    names = {"y", "y_row", "dx", "dx_row", "dw", "dw_row", "limit", "row_limit"}
    assert all(set(line["figures"]) == names and 0 < line["figures"]["dw"] < 0.01 for line in judged)


def test_each_group_has_checks_with_names_of_their_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels", "--list"])
    kernels.main()
    counts = {name: int(count) for name, count in map(str.split, capsys.readouterr().out.splitlines())}
    assert tuple(counts) == checks.GROUPS == tuple(kernels.CHECKS)
    assert sum(counts.values()) >= 70
    for group in checks.GROUPS:
        names = [check.name for check in kernels.CHECKS[group]()]
        assert len(set(names)) == len(names) == counts[group]


def test_the_list_of_groups_loads_no_torch():
    done = call("-c", "import sys; from benchmarks.gpu.checks import GROUPS; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def larger(function):
    return lambda *arguments: function(*arguments) * 1.05


def without_last_row(function):
    """Attention that forgets one row of thousands: too few for the distance of the whole tensor."""

    def wrong(*arguments):
        y_BNTH = function(*arguments).clone()
        y_BNTH[-1, -1, -1] = 0
        return y_BNTH

    return wrong


def not_a_number(function):
    def wrong(*arguments):
        y_BNTH = function(*arguments).clone()
        y_BNTH[0, 0, 0, 0] = torch.nan
        return y_BNTH

    return wrong


def of_the_first_group(function):
    """Experts whose second group is multiplied with the weight of the first."""
    return lambda x, weight, ends: function(x, torch.stack([weight[0], *weight[:1], *weight[2:]]), ends)


def forgetting_ignored_labels(function):
    return lambda x, weight, labels, chunks: function(x, weight, labels.clamp_min(0), chunks)


WRONG = {
    "a scaled result": ("attention", "causal auto bfloat16 T77 H128", "causal_attention", larger),
    "one row of many": ("attention", "causal math bfloat16 T300 H64", "causal_attention", without_last_row),
    "not a number": ("attention", "document dense float32 T300 H128", "masked_attention", not_a_number),
    "another expert": ("experts", "experts bfloat16 aligned groups", "grouped_linear", of_the_first_group),
    "ignored labels": ("loss", "loss in chunks float32", "linear_cross_entropy", forgetting_ignored_labels),
    "no float8 on this device": (
        "low_precision",
        "float8 matmuls are refused before Ada",
        "missing_matmuls",
        lambda function: lambda kind, device: "",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_fails_its_check(name, monkeypatch):
    group, check, attribute, planted = WRONG[name]
    assert checks.run_check(check_of(group, check), "cpu")["ok"] is True
    monkeypatch.setattr(kernels, attribute, planted(getattr(kernels, attribute)))
    found = checks.run_check(check_of(group, check), "cpu")
    assert found["ok"] is False
    if name == "one row of many":
        assert found["figures"]["y"] < found["figures"]["limit"] < found["figures"]["y_row"]
    if name == "not a number":
        assert strict(json.dumps(found))["figures"]["y"] is None and "y nan" in found["detail"]


def test_a_layer_that_stays_in_bfloat16_is_not_in_low_precision(monkeypatch):
    pytest.importorskip("torchao")
    check = check_of("low_precision", "float8 rowwise")
    assert checks.run_check(check, "cpu")["ok"] is True
    monkeypatch.setattr("crius.quantize.backend.maker", lambda dense, emulate: lambda linear: linear)
    found = checks.run_check(check, "cpu")
    assert found["ok"] is False and found["detail"].startswith("rounded False")


class Forgetful(system.AdamW):
    """Updates whatever ``found_inf`` says."""

    def step(self, closure=None):
        self.found_inf = None
        super().step(closure)


def test_wrong_parts_around_the_kernels_fail_their_checks(monkeypatch):
    hashes = check_of("system", "hash of bits")
    skips = check_of("system", "fused AdamW skips an update")
    assert [checks.run_check(check, "cpu")["ok"] for check in (hashes, skips)] == [True, True]
    monkeypatch.setattr(system, "hash_bits", lambda values: values.sum().round())
    monkeypatch.setattr(system, "AdamW", Forgetful)
    assert [checks.run_check(check, "cpu")["ok"] for check in (hashes, skips)] == [False, False]


@pytest.fixture
def measured(monkeypatch):
    """What torch says of the memory of a GPU; works are called once and take a millisecond."""
    memory = {"reserved": 0, "peak": 0}

    def one_millisecond(work):
        work()
        return 1.0

    monkeypatch.setattr(kernels, "milliseconds", one_millisecond)
    monkeypatch.setattr(system, "milliseconds", one_millisecond)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: memory["peak"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: memory["reserved"])
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return memory


def test_the_large_loss_is_judged_by_gradient_and_peak(measured, monkeypatch):
    monkeypatch.setattr(kernels, "LARGE", (256, 32, 512))
    gradients = 4 * 512 * 32 + 2 * 256 * 32
    measured["peak"] = gradients + 256 * 512
    found = kernels.large_loss("cpu")
    assert found.ok and found.figures["share_of_logits"] == 0.25
    measured["peak"] = gradients + 4 * 256 * 512
    assert not kernels.large_loss("cpu").ok
    measured["peak"] = gradients
    plain = kernels.linear_cross_entropy
    monkeypatch.setattr(kernels, "linear_cross_entropy", lambda x, w, labels, chunks: plain(x, w, labels // 2, chunks))
    assert not kernels.large_loss("cpu").ok


def test_segments_that_do_not_grow_fail(measured, monkeypatch):
    monkeypatch.setattr(system, "MIB", 1)
    assert system.segments_grow("cpu").ok
    taken = iter((0, 640))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: next(taken))
    assert not system.segments_grow("cpu").ok


def test_a_staged_copy_that_is_late_fails(measured, monkeypatch):
    monkeypatch.setattr(system, "MIB", 64)
    assert "copy right True" in system.staging("cpu").detail
    monkeypatch.setattr(system.StagedPlanner, "stage", lambda planner: None)  # then the tensor itself is read
    assert "copy right False" in system.staging("cpu").detail


def test_measurements_have_their_units(measured, monkeypatch):
    monkeypatch.setattr(kernels, "EXPERTS_OF_30B", (8, 256, 32, 24))
    assert kernels.experts_speed("cpu").figures == {"milliseconds": 1.0, "tflop_per_s": 6 * 256 * 32 * 24 / 1e9}
    matmuls = {"milliseconds": 1.0, "tflop_per_s": 2 * 8192**3 / 1e9}  # on meta tensors: shapes and no numbers
    assert system.matmul_ceiling("meta").figures == system.float8_ceiling("meta").figures == matmuls
    assert system.copy_ceiling("meta").figures == {"milliseconds": 1.0, "gb_per_s": 2 * 4 * 2**30 / 1e6}


def test_an_error_is_a_failed_line_with_its_place_and_the_next_check_runs(monkeypatch, capsys):
    first, second = kernels.EXPERTS[:2]
    plain = kernels.grouped_linear

    def descending(x, weight, ends):
        return plain(x, weight, ends - 1 if x.dtype == torch.bfloat16 else ends)

    monkeypatch.setattr(kernels, "grouped_linear", descending)
    checks.run_group([first.check(), second.check()], "cpu")
    failed, passed = (strict(line) for line in capsys.readouterr().out.splitlines())
    assert failed["ok"] is False and failed["figures"] == {}
    assert failed["detail"].startswith("ValueError: ends of groups must ascend to the number of rows, 512")
    assert "[crius/kernels/grouped_mm.py:" in failed["detail"]
    assert passed["ok"] is True


def test_numbers_do_not_depend_on_the_checks_before():
    case = dataclasses.replace(kernels.EXPERTS[0], widths=(16, 8))
    alone = checks.run_check(case.check(), "cpu")["figures"]
    torch.randn(7)
    assert checks.run_check(case.check(), "cpu")["figures"] == alone


def test_a_check_for_a_gpu_says_so_on_a_cpu_and_runs_on_a_gpu(monkeypatch):
    check = checks.Check("fails", lambda device: 1 / 0, needs_gpu=True)
    found = checks.run_check(check, "cpu")
    assert (found["ok"], found["detail"]) == (None, checks.NEEDS_GPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = checks.run_check(check, "cuda")
    assert found["ok"] is False and "ZeroDivisionError: division by zero" in found["detail"]
