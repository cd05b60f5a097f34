"""The plan of a run: calibrated hardware, the comparison, slow steps and out of memory."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import SMALL, parse

from crius.config.toml_file import flatten
from crius.errors import ConfigError, LayoutError, OutOfMemoryError
from crius.host import Machine, cpu_with_cores
from crius.launch.status import status
from crius.metrics.device import peak_tflops
from crius.metrics.ledger import TimeLedger
from crius.metrics.record import StepMetrics
from crius.tools.plan import auto
from crius.tools.plan.compare import (
    LEAST_STEPS,
    WARM_STEPS,
    Measured,
    PlanComparison,
    Reports,
    compare_run,
    measured_of,
    plan_run,
    summed,
    validated_range,
)
from crius.tools.plan.hardware import KNOWN, hardware, known_gpu, of_machine, shared, user_file, write_hardware
from crius.tools.plan.legal import violations
from crius.tools.plan.memory import memory
from crius.tools.plan.out_of_memory import explain
from crius.tools.plan.remedies import remedies
from crius.tools.plan.watch import SLOW, WINDOW_STEPS, Load, PlanWatch, blame, hardware_of
from crius.tools.plan.workload import from_config
from crius.train.inputs import describe_model
from crius.train.tools import explained, is_out_of_memory

GIB = 1 << 30
PAGE = Path(__file__).parents[2] / "docs" / "planner_runs.md"
CPU = replace(
    KNOWN["cpu"],
    **{"name": "here", "measured": "today", "device": cpu_with_cores(), "threads": 2, "matmul_efficiency": 1.0},
    **{"attention_efficiency": 0.4, "memory_efficiency": 0.9, "op_seconds": 2e-5, "resident_bytes": 0.3 * GIB},
)
HERE = Machine(device="cpu", name=cpu_with_cores(), ranks=1, local_ranks=1, threads=2)
GPUS = Machine(device="cuda", name="NVIDIA H100 80GB HBM3", ranks=8, local_ranks=8, threads=1)
LONG = ["--training.seq_len", "4096"]  # the debug model with activations that count
BIG = [
    *("--model.flavor", "8b", "--training.seq_len", "8192", "--training.mixed_precision_param", "bfloat16"),
    *("--training.local_batch_size", "2", "--training.global_batch_size", "64"),
]


def planned(flags=SMALL, machine=HERE, hardware=CPU):
    config = parse(flags)
    return plan_run(config, describe_model(config), machine, hardware)


# ---- hardware of the machine


def test_a_calibrated_file_reads_back_and_is_found_by_the_name_of_its_device(user_cache):
    assert of_machine(cpu_with_cores()) is None
    write_hardware(CPU, user_file())
    assert hardware(str(user_file())) == CPU == of_machine(cpu_with_cores())
    assert of_machine("another CPU, 3 cores") is None
    assert user_file().is_relative_to(user_cache)


def test_a_file_that_cannot_be_written_is_an_error_with_a_fix(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot be written") as caught:
        write_hardware(CPU, tmp_path / "file" / "hardware.toml")
    assert "--out" in caught.value.fix


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("op_seconds = 1e300", "op_seconds = 1e+300 is not between 0 and 1"),
        ("bfloat16_flops = 1e-300", "bfloat16_flops = 1e-300 is not between"),
        ("memory_bytes = 80", "memory_bytes = 80 is not between 1e+06 and 1e+15: the unit is bytes"),
        ("nic_bandwidth = 50", "nic_bandwidth = 50 is not between"),
        ("memory_efficiency = 1e-300", "memory_efficiency = 1e-300 is not between"),
        (f"gpus_per_node = 1{'0' * 400}", "is not between 1 and 1e+06"),
        ("link_bandwidth = inf", "link_bandwidth = inf is not a number"),
        ('name = ""', "name is empty"),
        ('like = "h10"', "like = 'h10' is not known, did you mean h100?"),
    ],
)
def test_a_hardware_file_with_an_impossible_value_is_refused(tmp_path, line, said):
    like = "" if line.startswith("like") else 'like = "H100"\n'
    (tmp_path / "mine.toml").write_text(f"{like}{line}\n")
    with pytest.raises(ConfigError) as error:
        hardware(str(tmp_path / "mine.toml"))
    assert said in str(error.value)


def test_all_known_hardware_is_within_the_bounds_of_a_file(tmp_path):
    for one in KNOWN.values():
        write_hardware(one, tmp_path / "one.toml")
        assert hardware(str(tmp_path / "one.toml")) == one


def test_a_damaged_file_ends_no_run(user_cache, caplog):
    write_hardware(CPU, user_file())
    user_file().write_text(user_file().read_text() + "wrong = 1\n")
    logging.getLogger("crius").propagate = True
    assert hardware_of(HERE) is None
    assert "no field 'wrong'" in caplog.text


DEVICES = [
    ("NVIDIA A100-SXM4-40GB", "a100-40g"),
    ("NVIDIA A100-SXM4-80GB", "a100-80g"),
    ("NVIDIA H100 80GB HBM3", "h100-80g"),
    ("NVIDIA H100", "h100-96g"),
    ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA H100 NVL", "h100-nvl"),
    ("NVIDIA A800-SXM4-80GB", "a800"),
    ("NVIDIA A800 80GB PCIe", None),
    ("NVIDIA H800", "h800"),
    ("NVIDIA H800 PCIe", None),
    ("NVIDIA H20", "h20"),
    ("NVIDIA GH200 480GB", "gh200"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA H200 NVL", None),
    ("NVIDIA B200", "b200"),
    ("NVIDIA B300 SXM6 AC", "b300"),
    ("NVIDIA GB200", "gb200"),
    ("NVIDIA GB300", "gb300"),
    ("NVIDIA A10G", "a10g"),
    ("NVIDIA A10", None),
    ("AMD Instinct MI300X", "mi300x"),
    ("NVIDIA L4", "l4"),
    ("NVIDIA L40S", None),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ("NVIDIA GeForce RTX 4090 D", None),
    ("Tesla T4", None),
]


@pytest.mark.parametrize(("device", "name"), DEVICES)
def test_gpus_are_known_by_the_name_of_their_driver(device, name):
    found = known_gpu(device)
    assert (found and found.name) == name


def test_whatever_the_planner_knows_has_a_peak_and_the_same_one_in_a_run(monkeypatch):
    names = {name: device for device, name in DEVICES if name}
    assert {*names} == {*KNOWN} - {"cpu"}
    for name, device in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, device=device: device)
        assert peak_tflops(torch.device("cuda", 0)) == KNOWN[name].bfloat16_flops / 1e12


def test_ranks_of_a_host_share_its_cpu_and_have_a_gpu_each():
    one = shared(CPU, 4)
    assert one.float32_flops == CPU.float32_flops / 4
    assert one.memory_bytes == CPU.memory_bytes / 4
    assert one.op_seconds == CPU.op_seconds * 2  # four ranks on the two cores
    assert shared(KNOWN["h100-80g"], 8) == KNOWN["h100-80g"]


def test_the_gpu_is_named_by_its_driver_without_torch(tmp_path):
    assert auto.gpu_name(tmp_path) == ""
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t NVIDIA H100 80GB HBM3\nIRQ: 7\n")
    assert auto.gpu_name(tmp_path) == "NVIDIA H100 80GB HBM3"


# ---- the comparison


def record(step, rate=1000.0, gib=0.5, seconds=1.0, data=0.0):
    return StepMetrics(
        **{"step": step, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens": 1, "mfu": None, "tflops": 0.0},
        **{"tokens_per_second": rate, "tokens_per_second_per_rank": rate, "step_seconds": seconds},
        **{"data_seconds": data, "memory_gib": gib},
    )


def test_the_first_steps_do_not_count_nor_do_those_after_a_restart():
    reports = Reports()
    rows = [(1, 1.0), *((step, 10.0) for step in range(2, WARM_STEPS + 1))]
    rows += [(step, 100.0) for step in range(WARM_STEPS + 1, WARM_STEPS + 8)]
    for step, rate in rows:
        reports.add(vars(record(step, rate)))
    assert reports.measured().tokens_per_second == 100.0
    assert reports.measured().steps == 7
    assert reports.add(vars(record(WARM_STEPS, 1.0))) == 0  # it went on from a checkpoint
    assert reports.measured().steps == 7


def test_a_report_counts_as_many_times_as_it_has_steps():
    rows = [vars(record(step, rate)) for step, rate in ((5, 1.0), (10, 20.0), (30, 10.0))]
    found = measured_of([*rows, {"step": 30, "val_loss": 1.0}])
    assert (found.steps, found.tokens_per_second, found.memory_bytes) == (20, 10.0, 0.5 * GIB)
    assert measured_of(rows[:1]).tokens_per_second is None
    assert LEAST_STEPS <= 5


def test_a_comparison_says_both_and_the_error():
    plan = planned()
    rate = plan.tokens_per_second
    measured = Measured(steps=9, tokens_per_second=rate / 1.25, memory_bytes=plan.memory.total * 2)
    compared = PlanComparison(plan=plan, measured=measured)
    assert compared.as_dict()["tokens_per_second_error"] == pytest.approx(0.25)
    assert compared.as_dict()["memory_error"] == pytest.approx(-0.5)
    assert "(+25%)" in compared.line()
    assert "(-50%)" in compared.line()
    assert compared.lines()[1:] == [
        f"planned memory: {summed(plan.memory.parts, GIB)} GiB ({plan.memory.note})",
        f"planned step: {1e3 * plan.time.total:,.1f} ms = {summed(plan.time.parts, 1e-3, 1)}",
    ]
    unknown = PlanComparison(plan=planned(hardware=None), measured=measured)
    assert unknown.speed_error is None
    assert unknown.memory_error is None
    assert "crius bench calibrate" in unknown.line()


def test_parts_of_a_sum_are_named_from_the_largest_down_and_not_below_a_hundredth():
    assert summed({"some": 1.0, "most": 98.5, "least": 0.5}, 2.0) == "most 49.25 + some 0.50"
    assert summed({"none": 0.0}, 1.0) == ""


def test_a_cpu_that_computes_in_bfloat16_has_no_planned_speed():
    """Calibration runs in float32; converting numbers in every operation costs what no part of the plan knows."""
    config = parse([*SMALL, "--training.mixed_precision_param", "bfloat16"])
    plan = plan_run(
        config, describe_model(config), Machine(device="cpu", name="", ranks=1, local_ranks=1, threads=1), CPU
    )
    assert plan.time is None and plan.memory.total > 0
    measured = Measured(steps=9, tokens_per_second=100.0, memory_bytes=plan.memory.total)
    assert "the speed of bfloat16 on a CPU is not planned" in PlanComparison(plan=plan, measured=measured).line()
    assert any("bfloat16 on a CPU" in reason for reason in validated_range(plan.workload, CPU))


def test_a_plan_that_names_no_microbatch_is_compared_by_the_settings(tmp_path, user_cache):
    config, plan = parse(SMALL), planned()
    told = plan.as_dict()
    del told["microbatch"]  # as of a version that did not choose it
    (tmp_path / "plan.json").write_text(json.dumps(told))
    (tmp_path / "metrics.jsonl").touch()
    found = compare_run(tmp_path, config, describe_model(config), CPU)
    assert found.plan.workload.microbatch == plan.workload.microbatch


def test_a_run_folder_is_compared_with_its_plan_and_any_other_is_refused(tmp_path, user_cache):
    config, plan = parse([*SMALL, "--activation_checkpoint.mode", "auto"]), planned()
    decided = {"activation_checkpoint": "full", "microbatch": 1}
    (tmp_path / "plan.json").write_text(json.dumps(plan.as_dict() | decided))
    rows = [json.dumps(vars(record(step))) for step in range(1, 20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    found = compare_run(tmp_path, config, describe_model(config), CPU)
    assert {name: getattr(found.plan.workload, name) for name in decided} == decided
    assert found.measured.tokens_per_second == 1000.0
    assert compare_run(tmp_path, config, describe_model(config)).plan.time is None  # nobody measured this machine
    for text, said in (
        ("\n".join(rows) + '\n{"step": 20, "lo', "1,000 tokens/s/rank measured"),
        ("", "no steps reported yet"),
        ("\n".join(rows[:8]) + "\n", "3 steps after the first 5, at least 5 are needed"),
    ):
        (tmp_path / "metrics.jsonl").write_text(text)
        assert said in compare_run(tmp_path, config, describe_model(config), CPU).line()
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "lo\n' + rows[0])
    with pytest.raises(ConfigError, match="cannot be compared"):
        compare_run(tmp_path, config, describe_model(config), CPU)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be compared"):
        compare_run(tmp_path, config, describe_model(config), CPU)


# ---- slow steps


def watch(tmp_path, seconds, *, data=0.0, plan=None):
    plan = plan or planned()
    watcher = PlanWatch(plan, TimeLedger(0.0), tmp_path)
    for step in range(1, WARM_STEPS + 2 * WINDOW_STEPS + 2):
        watcher.write(record(step, seconds=seconds * plan.time.total, data=data * plan.time.total))
    return watcher


def test_steps_much_slower_than_planned_are_told_once_with_what_is_to_blame(tmp_path, caplog):
    logging.getLogger("crius").propagate = True
    watch(tmp_path, 0.95 * SLOW)
    assert not caplog.records
    watch(tmp_path, 2.0, data=0.8)
    assert len(caplog.records) == 1
    assert "2.0 times" in caplog.text
    assert f"waiting for data {800 * planned().time.total:,.1f} ms" in caplog.text
    assert json.loads((tmp_path / "plan.json").read_text())["hardware"] == "here"


def spent(plan, **values):
    time = 2 * plan.time.total * 10
    return Load(**{"steps": 10, "step_seconds": time, "wall_seconds": time, "cpu_seconds": 2 * time, **values})


def reasons(plan, load_average=1.0, num_cores=2, **values):
    return blame(plan, spent(plan, **values), load_average, num_cores).partition(" steps: ")[2]


def test_blame_goes_to_what_was_measured_and_else_to_the_links_or_the_device():
    plan = planned()
    half = plan.time.total * 5
    milliseconds = 1e3 * plan.time.total
    assert reasons(plan, compile_seconds=half).startswith(f"compiling again {milliseconds / 2:,.1f} ms (")
    assert reasons(plan, data_seconds=half) == f"waiting for data {milliseconds / 2:,.1f} ms (--data.prefetch)"
    assert "a checkpoint was written during the steps" in reasons(plan, save_seconds=half)
    assert "slower than at its calibration" in reasons(plan, save_seconds=half / 6, data_seconds=half / 6)
    assert "slower than at its calibration" in reasons(plan)
    on_gpus = planned([*BIG, "--training.local_batch_size", "1"], GPUS, KNOWN["h100-80g"])
    share = sum(seconds for name, seconds in on_gpus.time.parts.items() if "comm" in name) / on_gpus.time.total
    assert f"look at the links (fsdp is {share:.0%} of the plan)" in reasons(on_gpus, 99.0)
    assert "3 times the GPU's memory was full and its allocator restarted" in reasons(on_gpus, retries=3)


@pytest.mark.parametrize(
    ("threads", "load", "num_cores", "busy", "seconds", "want"),
    [  # CPU seconds of a step, which takes 2 seconds and was planned to take 1, and seconds that are blamed
        (2, 2.3, 2, 1.0, 1.5, "sharing the CPU {:,.1f} ms (load 2.3 on 2 cores; this run uses 2)"),
        (2, 9.0, 2, 5.0, 0.1, "sharing the CPU {:,.1f} ms (load 9.0 on 2 cores; this run uses 2)"),
        (2, 4.3, 4, 1.0, 0.0, "neither data, compiling nor other programs took it"),
        (4, 4.3, 2, 1.0, 1.0, "sharing the cores among its ranks {:,.1f} ms (4 threads on 2 cores)"),
        (4, 4.3, 4, 1.0, 0.0, "neither data, compiling nor other programs took it"),
    ],
)
def test_blame_goes_to_the_cores_if_others_use_them_or_they_are_too_few(threads, load, num_cores, busy, seconds, want):
    plan = planned(machine=replace(HERE, threads=threads))
    time = plan.time.total
    found = reasons(plan, load, num_cores, cpu_seconds=busy * time * 10)
    assert found.startswith(want.format(1e3 * seconds * time))


# ---- out of memory


@pytest.mark.parametrize(("flags", "ranks", "gib"), [(BIG, 8, 72.0), (BIG, 8, 30.0), (LONG, 1, 0.7)])
def test_remedies_are_three_legal_flags_that_fit_and_keep_the_batch(flags, ranks, gib):
    config, on_gpu = parse(flags), ranks > 1
    facts, device = describe_model(config), KNOWN["h100-80g"] if on_gpu else CPU
    found = remedies(config, facts, ranks, device, gib * GIB, on_gpu=on_gpu)
    assert len(found) == 3
    before = memory(from_config(config, facts, ranks, device="cuda" if on_gpu else "cpu"), device).total
    assert found[0].fits
    for one in found:
        changed = parse([*flags, *one.flags.split()])
        assert {name: flatten(changed)[name] for name in one.changes} == dict(one.changes)
        assert not violations(changed, describe_model(changed), one.num_ranks)
        assert one.nbytes == pytest.approx(before - one.saved)
        assert one.fits == (one.nbytes <= gib * GIB)
        assert changed.training.global_batch_size in (config.training.global_batch_size, 8)


def test_an_out_of_memory_error_is_told_from_others():
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60, dtype=torch.uint8)
    yes = [
        *(real.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")),
        RuntimeError("NCCL error: ... Cuda failure 2 'out of memory'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ]
    no = [RuntimeError("shape mismatch"), ValueError("out of memory"), OSError(28, "No space left on device")]
    assert all(map(is_out_of_memory, yes))
    assert not any(map(is_out_of_memory, no))


def test_the_cause_of_a_wrapped_error_is_explained_and_others_pass(tmp_path):
    config = parse(LONG)

    def fail(error):
        with explained(tmp_path, 3, explain) as story:
            story.begin(torch.device("cpu"), HERE, config, describe_model(config))
            try:
                raise error
            except (torch.OutOfMemoryError, ValueError, LayoutError) as inner:
                raise RuntimeError("stage 1 failed") from inner

    with pytest.raises(OutOfMemoryError, match=r"rank 3 .* 2.50 GiB more") as caught:
        fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"))
    assert caught.value.exit_code == 1
    assert "activations" in caught.value.why
    report = json.loads((tmp_path / "incidents" / "out-of-memory-rank-3.json").read_text())
    assert [one["flags"] in caught.value.fix for one in report["remedies"]] == [True] * 3
    assert sum(one["bytes"] for one in report["plan"]) == pytest.approx(report["planned_bytes"])
    with pytest.raises(RuntimeError, match="stage 1 failed"):
        fail(ValueError("something else"))
    with pytest.raises(LayoutError), explained(tmp_path, 0, explain):
        raise LayoutError("the layout")


def test_a_run_that_is_small_is_not_told_to_save_next_to_nothing(tmp_path):
    """The debug model: 0.05 GiB beside what a process takes anyway."""
    config = parse(SMALL)
    with pytest.raises(OutOfMemoryError) as caught, explained(tmp_path, 0, explain) as story:
        story.begin(torch.device("cpu"), HERE, config, describe_model(config))
        raise MemoryError
    assert "no setting saves 0.1 GiB of the 0." in caught.value.fix
    assert "--" not in caught.value.fix.partition("all of it")[0]


def test_the_documented_error_of_8b_on_8_gpus_is_the_real_one(tmp_path, monkeypatch, user_cache):
    documented = PAGE.read_text(encoding="utf-8").split("```text\nOutOfMemoryError")[1].split("```")[0]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=79.11 * GIB))
    monkeypatch.setattr(status, "step", 1)
    monkeypatch.setattr(status, "phase", "backward")
    words = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB"
    config = parse(BIG)
    with pytest.raises(OutOfMemoryError) as caught, explained(tmp_path, 5, explain) as story:
        story.begin(torch.device("cpu"), GPUS, config, describe_model(config))
        raise torch.OutOfMemoryError(words)
    real = f"OutOfMemoryError: {caught.value}".replace(str(tmp_path), "runs/full")
    assert len(documented.splitlines()) == 11
    assert [line for line in documented.splitlines() if line.removesuffix(" + ...") not in real] == []
