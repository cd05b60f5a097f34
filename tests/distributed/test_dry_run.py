"""The dry run: the same numbers as real processes, for any number of ranks, from a few blocks, in seconds."""

import functools
import json
import time

import pytest
import torch
from harness import TIED, parse, skip_what_torch_lacks

from crius.config.layout import Layout
from crius.data.loader import Batch
from crius.errors import ConfigError, LayoutError
from crius.launch.local import run_workers
from crius.optim.build import build_optimizer
from crius.parallel import fsdp
from crius.parallel.gradients import Gradients
from crius.parallel.mesh import build_mesh
from crius.parallel.runtime import fake_world, world
from crius.shards import local_tensor, named_parameters
from crius.tools.dry_run.extrapolate import along
from crius.tools.dry_run.measure import DryJob, measure_whole
from crius.tools.dry_run.memory import kinds_of
from crius.tools.dry_run.recorder import Recorder
from crius.tools.dry_run.run import dry_run
from crius.train.build import Job, build_parts, build_runner
from crius.train.inputs import describe_model, run_modules
from crius.train.step import train_step

SMALL = ["--training.seq_len", "32"]
DEGREES = {
    "ddp": "data_parallel_replicate_degree",
    "fsdp": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
}


def flags(*, layers=6, batch=8, local=-1, more=(), **degrees):
    """Flags of the debug model on the given degrees."""
    found = [*SMALL, "--model.num_layers", str(layers), "--training.global_batch_size", str(batch)]
    found += ["--training.local_batch_size", str(local)]
    for name, degree in {"fsdp": 1, **degrees}.items():
        found += [f"--parallelism.{DEGREES[name]}", str(degree)]
    return [*found, *more]


def _report(given, rank, extrapolate, imbalance, path, placement):
    config = parse(given)
    ranks = config.parallelism.total_ranks(1)
    report = dry_run(config, ranks, rank, time.monotonic(), extrapolate=extrapolate, imbalance=imbalance)
    path.write_text(json.dumps({**report.as_dict(), "lines": report.lines()}))


def reported(tmp_path, given, rank=0, extrapolate=True, imbalance=1.0):
    """The report of a dry run in a process of its own, as data and ``lines``."""
    path = tmp_path / f"report-{rank}-{extrapolate}-{imbalance}.json"
    assert run_workers(functools.partial(_report, given, rank, extrapolate, imbalance, path), 1, tmp_path) == 0
    return json.loads(path.read_text())


def costs(report):
    """What must not depend on how it was found."""
    return report["stages"], report["ranks"]


P = "--parallelism."
CASES = {
    "one": flags(),
    "fsdp3, shards of unequal size": flags(fsdp=3, batch=6),
    "fsdp4, never resharded": flags(fsdp=4, more=[f"{P}reshard_after_forward_mode", "never"]),
    "fsdp4, resharded to 2": flags(fsdp=4, more=[f"{P}reshard_after_forward_mode", "2"]),
    "fsdp2 with 5 microbatches": flags(fsdp=2, batch=10, local=1, layers=5),
    "8 microbatches, summed as trees": flags(batch=8, local=1, layers=5, more=["--training.reproducible"]),
    "hsdp2x2 with 5 microbatches, deferred": flags(
        ddp=2, fsdp=2, batch=20, local=1, layers=5, more=["--training.gradient_sync", "deferred"]
    ),
    "fsdp2_tp2, foreach": flags(fsdp=2, tp=2, more=["--optimizer.implementation", "foreach"]),
    "pp2_fsdp2, interleaved": flags(
        pp=2, fsdp=2, layers=18, batch=16, local=1, more=[f"{P}pipeline_parallel_schedule", "interleave_1f1b"]
    ),
    "pp2_tp2, zbv": flags(pp=2, tp=2, layers=18, local=1, more=[f"{P}pipeline_parallel_schedule", "zbv_zero_bubble"]),
}


FEW = ("one", "fsdp3, shards of unequal size", "fsdp2_tp2, foreach")  # the others repeat them on other layouts


@pytest.mark.matrix
@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in FEW else pytest.mark.slow) for case in CASES])
def test_extrapolation_equals_the_full_measurement_to_the_byte(case, tmp_path):
    """All of it: parameters, peaks and their moment, kinds of memory, FLOPs, collectives."""
    extrapolated = reported(tmp_path, CASES[case])
    full = reported(tmp_path, CASES[case], extrapolate=False)
    assert any("extrapolated" in note for note in extrapolated["notes"])
    assert not any("extrapolated" in note for note in full["notes"])
    assert costs(extrapolated) == costs(full)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"fsdp": 4}, {"fsdp": 2, "tp": 2}, {"pp": 2, "fsdp": 2, "tp": 2}])
def test_flops_equal_those_of_the_model(degrees, tmp_path):
    """Without recomputation nothing but the model's matmuls and causal attention multiplies matrices."""
    report = reported(tmp_path, flags(local=1, **degrees))
    done = sum(stage["flops"] for stage in report["stages"]) / len(report["ranks"])
    assert done == report["model_flops"]


def _let_go_before_each_phase(monkeypatch):
    """Gloo's threads hold what they communicated for a moment longer than the call that waits for them."""
    begin = Recorder.phase

    def phase(self, *args, **kwargs):
        time.sleep(0.1)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(Recorder, "phase", phase)


def _real(given, fake, path, placement):
    torch.set_num_threads(1)
    config = parse(given)
    layout = Layout.of(config.parallelism, 2)
    cpu = torch.device("cpu")
    entered = fake_world(placement.rank, 2) if fake else world(placement.rank, 2, cpu, placement.rendezvous, 60)
    with entered as ranks:
        job = DryJob(config, describe_model(config), build_mesh(layout, "cpu"), ranks, None)
        names = [module.name for module in run_modules(config, job.facts)]
        measure_whole(job, names, job.sizes.accumulation, {}, fake=fake)  # DTensor meets all operators
        values = measure_whole(job, names, job.sizes.accumulation, {}, fake=fake)
    (path / f"{placement.rank}.json").write_text(json.dumps([[list(key), value] for key, value in values.items()]))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"fsdp": 2}, {"tp": 2}])
def test_fake_ranks_measure_what_real_ones_do(degrees, tmp_path, monkeypatch):
    _let_go_before_each_phase(monkeypatch)
    given = flags(layers=2, batch=4, local=1, **degrees)
    found = {}
    for fake in (False, True):
        path = tmp_path / f"fake-{fake}"
        path.mkdir()
        assert run_workers(functools.partial(_real, given, fake, path), 2, path) == 0
        found[fake] = [{tuple(key): n for key, n in json.loads((path / f"{r}.json").read_text())} for r in range(2)]
    for real, fake in zip(found[False], found[True], strict=True):
        names = ("parameters", "flops", "collective")
        exact = [key for key in fake if key[0] in names or key[:2] == ("start", "clip") and key[-1] != "temporaries"]
        assert {key: real.get(key) for key in exact} == {key: fake[key] for key in exact}
        held = [key for key in fake if key[:2] == ("start", "backward") and key[-1] == "activations"]
        # under tensor parallelism sums of a few bytes are still under way in a real run when the backward begins
        assert [real[key] for key in held] == pytest.approx(
            [fake[key] for key in held], rel=1e-3 if "tp" in degrees else 0
        )
        # of parameters, gradients and optimizer state not a byte differs; at the peak Gloo also copies what it reduces,
        # and real results under way are freed a little later
        real_peak, fake_peak = (
            max(kinds_of(v, *key[:-1]).total() for key in v if key[0] == "peak") for v in (real, fake)
        )
        assert 0.99 * fake_peak <= real_peak <= 1.08 * fake_peak


def _pipeline(given, path, placement):
    """Three real steps of a real pipeline; writes the peak of each, in bytes."""
    torch.set_num_threads(1)
    config = parse(given)
    layout = Layout.of(config.parallelism, 2)
    with world(placement.rank, 2, torch.device("cpu"), placement.rendezvous, 60) as ranks:
        facts = describe_model(config)
        job = Job(config, facts, build_mesh(layout, "cpu"), ranks)
        built = build_parts(job)
        recorder = Recorder({})
        with recorder.running():
            for part in built.parts:
                part.to_empty(device="cpu")
            named = named_parameters(built.parts)
            for _, parameter in named:
                local_tensor(parameter).zero_()
            optimizer = build_optimizer(named, facts.plan, config.optimizer, seed=0)
            runner = build_runner(job, built)
            gradients = Gradients([parameter for _, parameter in named], 1, ranks.device)
            rows = job.sizes.local * job.sizes.accumulation
            for step in ("first", "second"):
                recorder.phase("batch")
                tensors = (torch.zeros((rows, config.training.seq_len), dtype=torch.int64) for _ in range(3))
                batch = Batch(*tensors, tuple(range(rows)))
                recorder.phase(step)
                train_step(1, batch, runner, gradients, ranks, layout, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            recorder.phase("end")
            peaks = {key[0]: peak.total() for key, peak in recorder.peaks()[1].items()}
    (path / f"{placement.rank}.json").write_text(json.dumps(peaks["second"]))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "schedule",
    [
        *("1f1b", "zbv_zero_bubble"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gpipe", "interleave_1f1b", "interleave_zero_bubble")
        ),
    ],
)
def test_the_walk_over_a_schedule_finds_the_peak_of_the_real_pipeline(schedule, tmp_path):
    """On both ranks; the second step, since the first one also learns the shapes."""
    skip_what_torch_lacks(schedule)
    more = [f"{P}pipeline_parallel_schedule", schedule, "--training.mixed_precision_param", "bfloat16"]
    given = flags(layers=4, pp=2, local=1, more=more)
    assert run_workers(functools.partial(_pipeline, given, tmp_path), 2, tmp_path) == 0
    report = reported(tmp_path, given)
    for rank, found in enumerate(report["ranks"]):
        real = json.loads((tmp_path / f"{rank}.json").read_text())
        # stages meet on a rank in orders that the walk takes for independent, and sends keep their tensors a little
        assert found["peak_bytes"] == pytest.approx(real, rel=0.05)


@pytest.mark.long
def test_the_gradient_of_a_tied_weight_goes_to_the_other_end_once_a_step(tmp_path):
    given = flags(layers=2, pp=2, local=1, more=[*TIED, "--training.mixed_precision_param", "float32"])
    sizes, report = describe_model(parse(given)), reported(tmp_path, given)
    for stage in report["stages"]:
        sent = {row["kind"]: (row["count"], row["bytes"]) for row in stage["collectives"]}
        assert sent["send"] == sent["recv"] == (8 + 1, 4 * sizes.dim * (8 * 32 + sizes.vocab_size))


@pytest.mark.long
def test_any_rank_of_512_can_be_asked_for(tmp_path):
    """Rank 511 of 512 holds the last, shorter shard; the tables show its name, kinds and collectives."""
    given = flags(layers=4, fsdp=512, batch=512)
    first, last = (reported(tmp_path, given, rank=rank) for rank in (0, 511))
    assert last["rank"] == 511
    assert last["stages"][0]["parameters"] < first["stages"][0]["parameters"]
    text = "\n".join(last["lines"])
    assert "as rank 511 of 512" in text
    assert "all-gather fsdp" in text
    assert "temporaries" in text
    assert "took" in text


@pytest.mark.slow
def test_the_405b_layout_of_512_ranks_takes_seconds_and_little_memory(tmp_path):
    given = ["--model.flavor", "405b", "--training.seq_len", "8192", f"{P}pipeline_parallel_degree", "8"]
    given += [f"{P}data_parallel_shard_degree", "8", f"{P}tensor_parallel_degree", "8"]
    given += [f"{P}pipeline_parallel_schedule", "interleave_1f1b"]
    report = reported(tmp_path, given)
    assert len(report["stages"]) == 16
    # what rank 0 of each stage holds, times the 64 ranks of a stage; norms are replicated over tp
    total = sum(stage["parameters"] for stage in report["stages"]) * 64
    assert total == pytest.approx(parameters_of_405b(), rel=1e-3)
    assert report["seconds"] < 300  # the time that the requirement allows; about 10 on two quiet cores


def parameters_of_405b():
    return describe_model(parse(["--model.flavor", "405b"])).num_parameters


EXPERTS = ["--model.name", "qwen3_moe", "--model.flavor", "debug", "--training.seq_len", "64"]


@pytest.mark.long
def test_experts_get_as_many_rows_as_was_chosen_and_all_to_all_moves_them(tmp_path):
    """Of 2 ranks that share the experts: each its half, or this one all that both have."""
    given = flags(layers=2, batch=4, fsdp=4, more=EXPERTS) + [f"{P}expert_parallel_degree", "2"]
    even, full = (reported(tmp_path, given, imbalance=imbalance) for imbalance in (1.0, 2.0))
    facts, [stage] = describe_model(parse(given)), even["stages"]
    found = {(one["kind"], one["axis"]): one for one in stage["collectives"]}
    assert {("all-to-all", "ep"), ("all-gather", "efsdp"), ("all-gather", "fsdp")} <= found.keys()
    rows = 64 * facts.top_k  # of each layer there and back, forward and backward, in float32; and the numbers of rows
    moved = 2 * (4 * rows * facts.dim * 4 + facts.num_experts * 8)
    assert found["all-to-all", "ep"] == {"kind": "all-to-all", "axis": "ep", "count": 2 * 5, "bytes": moved}
    assert stage["flops"] == pytest.approx(even["model_flops"], rel=1e-9)  # of the experts that a token visits
    more = 6 * 2 * rows * 3 * facts.dim * facts.experts[1].feed_forward.expert_width
    assert full["stages"][0]["flops"] - stage["flops"] == more
    assert full["stages"][0]["activation_bytes"] > stage["activation_bytes"]
    with pytest.raises(LayoutError, match="not between 1 and 2"):
        dry_run(parse(given), 4, 0, 0.0, imbalance=2.5)


@pytest.mark.long
def test_experts_in_a_unit_of_their_own_cost_what_they_cost_in_the_unit_of_their_layer(tmp_path, monkeypatch):
    """Collectives, FLOPs and memory; full recomputation gathers nothing again, and both units are prefetched."""
    given = flags(layers=4, batch=4, fsdp=4, more=[*EXPERTS, "--activation_checkpoint.mode", "full"])
    given += [f"{P}expert_parallel_degree", "2"]
    together = reported(tmp_path, given, extrapolate=False)
    keeps_both = fsdp.MESH_PER_PARAMETER  # FSDP keeps the gradients that it sends of one unit, so of two groups
    monkeypatch.setattr(fsdp, "MESH_PER_PARAMETER", False)
    apart = reported(tmp_path, given, extrapolate=False)
    assert apart["stages"] == together["stages"]
    of_experts = {one["kind"]: one for one in apart["stages"][0]["collectives"] if one["axis"] == "efsdp"}
    assert of_experts["all-gather"]["count"] == 2 * 4  # of each layer before its forward and before its backward
    less = of_experts["reduce-scatter"]["bytes"] // 4 if keeps_both else 0
    assert apart["ranks"][0]["peak_bytes"] == together["ranks"][0]["peak_bytes"] - less


@pytest.mark.slow
def test_qwen3_30b_a3b_on_64_ranks_takes_seconds(tmp_path):
    given = ["--model.name", "qwen3_moe", "--model.flavor", "30b-a3b", "--training.seq_len", "4096"]
    given += [
        f"{P}data_parallel_shard_degree",
        "32",
        f"{P}tensor_parallel_degree",
        "2",
        f"{P}expert_parallel_degree",
        "8",
    ]
    report = reported(tmp_path, given)
    total = report["stages"][0]["parameters"] * 64
    assert total == pytest.approx(describe_model(parse(given)).num_parameters, rel=1e-3)
    assert report["seconds"] < 120


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(LayoutError, match="no rank 4 among 4"):
        dry_run(parse(flags(fsdp=4)), 4, 4, 0.0)


def test_what_only_the_compiler_decides_is_refused():
    given = flags(more=["--activation_checkpoint.mode", "memory_budget", "--compile.enable"])
    with pytest.raises(ConfigError, match="memory_budget"):
        dry_run(parse(given), 1, 0, 0.0)


def test_along_is_the_line_through_both():
    few, more = {("a",): 10, ("b",): 5}, {("a",): 13, ("b",): 5, ("c",): 2}
    assert along(few, more, 8) == {("a",): 25, ("b",): 5, ("c",): 10}
