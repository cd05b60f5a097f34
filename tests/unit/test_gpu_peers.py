"""The comparisons of ``benchmarks.gpu``: equal mathematics, ratios and goals, traces, plans. No GPU needed."""

import importlib.util
import json
import os
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from harness import parse

from benchmarks.contestant import Turns
from benchmarks.gpu import bench, contestants, hf, host, peers, ranks, runs, single, titan, trace, verbs
from benchmarks.gpu.record import Record
from benchmarks.gpu.round import Done, Round
from benchmarks.parts import batches
from benchmarks.turns import Outcome
from crius.cli.app import facts_of
from crius.config import rules
from crius.models import registry
from crius.train.inputs import describe_model, open_run_corpus

MODULES = dict.fromkeys((*host.NEEDED, *host.OPTIONAL), "1.0")


def round_of(folder, device="cuda", **environment):
    record = Record(
        "bench", folder / "out", {"command": "bench", "device": "NVIDIA H100", "modules": MODULES} | environment
    )
    return Round(record, sys.executable, device, folder / "work", dict(os.environ), time.monotonic() + 100, 2)


def rows_in(folder):
    _, *rows = map(json.loads, (folder / "out" / "bench.jsonl").read_text().splitlines())
    return {row["check"]: row["ok"] for row in rows}


def outcome_of(name, seconds, loss=8.0, peak=20.0, **facts):
    """A contestant with a turn of one step for each of ``seconds``."""
    known = {"tokens_per_step": 1000, "flops_per_token": 1e9, "peak_tflops": 100.0, "losses": [(1, loss)], **facts}
    turns = [{"steps": 1, "wall_seconds": second, "peak_gib": peak, "losses": []} for second in seconds]
    return Outcome(name, known, turns)


def group_of(*outcomes, case=peers.TINY):
    return peers.Group(case, {outcome.name: outcome for outcome in outcomes})


SIZES = ["--model.num_layers", "2", "--model.dim", "64", "--model.vocab_size", "320", "--training.seq_len", "48"]
SCALING = json.dumps(
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)


@pytest.mark.parametrize(
    "more",
    [[], ["--model.tied_embeddings", "--model.rope_scaling", SCALING]],
    ids=["plain", "tied, scaled"],
)
def test_hugging_face_as_a_peer_starts_with_the_loss_of_crius(more):
    pytest.importorskip("transformers")
    config = parse([*SIZES, *more, "--training.mixed_precision_param", "float32"])
    device = torch.device("cpu")
    batch = next(batches(config, 1))
    model = registry.build(describe_model(config))
    contestants.copy_weights(contestants.start_weights(config, device), dict(model.named_parameters()))
    logits = model(batch.tokens_BT)
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten())
    output = hf.build(config, device)(
        input_ids=batch.tokens_BT, labels=batch.labels_BT, shift_labels=batch.labels_BT, use_cache=False
    )
    torch.testing.assert_close(output.loss, want, rtol=1e-5, atol=0)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchtitan", "triton")), reason="needs torchtitan, triton"
)
def test_torchtitan_itself_starts_with_the_loss_of_crius(tmp_path):
    """Its Trainer, without and with its FSDP: two processes and that of Crius, one step each."""
    this = round_of(tmp_path, "cpu")
    bench.equal(this)
    assert rows_in(tmp_path) == {"first loss of titan-fsdp": True, "first loss of titan-amp": True}


def test_torchtitan_gets_the_sizes_of_the_model():
    pytest.importorskip("torchtitan", exc_type=ImportError)
    for flavor in ("debug", "1b", "8b", "70b", "405b"):
        facts = describe_model(parse(["--model.flavor", flavor])).config
        args = titan.model_args(facts, 128)
        assert int(args.ffn_dim_multiplier * int(2 * 4 * facts.dim / 3)) == facts.ffn_dim


def test_neighbours_are_rotated_as_the_halves_of_a_head_were():
    weight = torch.arange(8.0)[:, None]
    moved = titan.in_neighbours({"layers.0.attention.wq.weight": weight, "norm.weight": weight}, head_dim=4)
    assert moved["layers.0.attention.wq.weight"].flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert moved["norm.weight"] is weight


def test_a_target_without_a_weight_is_an_error():
    weights = {"a": torch.ones(2)}
    targets = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(RuntimeError, match="no weights for b"):
        contestants.copy_weights(weights, dict(targets))
    assert targets["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("number", "low", "high", "coverage"),
    [(1, 1, 1, 0.0), (5, 1, 5, 0.9375), (6, 1, 6, 0.96875), (8, 1, 8, 0.9922), (9, 2, 8, 0.9609), (12, 3, 10, 0.9614)],
)
def test_the_interval_of_a_median_is_that_of_order_statistics(number, low, high, coverage):
    found = peers.interval([float(n) for n in reversed(range(1, number + 1))])
    assert found == (low, high, pytest.approx(coverage, abs=1e-4))


@pytest.mark.parametrize(
    ("theirs", "ok", "reached"),
    [(1.03, True, True), (1.01, True, False), (0.99, False, False), (1.3, False, True)],  # the last is a mistake first
)
def test_a_ratio_is_held_to_its_goal_and_to_what_the_same_kernels_allow(theirs, ok, reached, tmp_path):
    this = round_of(tmp_path)
    peers.report(this, group_of(outcome_of("crius", [1.0] * 8), outcome_of("titan-fsdp", [theirs] * 8)))
    [row] = [row for row in this.record.rows if row["check"] == "crius over titan-fsdp"]
    assert (row["ok"], row["figures"]["reached"]) == (ok, reached)
    assert row["figures"]["ratio"] == row["figures"]["low"] == pytest.approx(theirs)


def test_goals_name_entries_that_exist():
    for goal in peers.GOALS:
        assert {goal.entry, goal.base} <= set(peers.ENTRIES)


@pytest.mark.parametrize(("loss", "ok"), [(8.0, True), (8.03, True), (8.05, False), (float("nan"), False)])
def test_another_first_loss_is_a_failure(loss, ok, tmp_path):
    this = round_of(tmp_path)
    group = group_of(outcome_of("crius", [1.0]), outcome_of("titan", [1.0], loss=loss))
    peers.judge_first_losses(this, group, peers.EQUAL_TIMED)
    assert rows_in(tmp_path) == {"first loss of titan": ok}


@pytest.mark.parametrize(("printed", "ok"), [(1010.0, True), (1030.0, False), (970.0, False), (None, False)])
def test_torchtitans_own_rate_has_to_agree_with_the_clock(printed, ok, tmp_path):
    outcome = outcome_of("titan", [1.0] * 4)
    for turn in outcome.turns if printed else ():
        turn["printed_tokens_per_second"] = printed
    peers.judge_printed_rate(round_of(tmp_path), outcome)
    assert list(rows_in(tmp_path).values()) == [ok]


def test_torchtitans_rate_counts_only_if_its_steps_are_of_one_turn():
    class Channel:
        words = {}

        def see_peak(self):
            pass

    turns = Turns(Channel(), 1, {})
    log = titan.Log(Channel(), turns, 3)
    numbers = {"loss_metrics/global_avg_loss": 1.0}
    turns.began = 4  # a turn ended with step 4
    log.log(numbers | {"throughput(tps)": 1.0}, 6)  # of steps 4 to 6
    assert Channel.words == {}
    log.log(numbers | {"throughput(tps)": 2.0}, 9)
    assert Channel.words == {"printed_tokens_per_second": 2.0}
    assert turns.losses == [(6, 1.0), (9, 1.0)]


@pytest.mark.parametrize(("tflops", "ok"), [(30.0, False), (50.0, True), (70.0, False)])
def test_the_mfu_of_4_layers_is_a_claim_with_both_ends(tflops, ok, tmp_path):
    outcome = outcome_of("crius", [1.0], flops_per_token=tflops * 1e9)
    peers.rate_row(round_of(tmp_path), peers.SHAPED_8B, outcome)
    assert list(rows_in(tmp_path).values()) == [ok]


@pytest.mark.parametrize(("device", "ok"), [("cuda", False), ("cpu", None)])
def test_a_peer_that_is_not_there_is_said(device, ok, tmp_path):
    modules = MODULES | {"torchtitan.train": "ModuleNotFoundError: No module named 'torchtitan'"}
    this = round_of(tmp_path, device, modules=modules)
    assert peers.present(this, ("crius", "titan"), peers.ENTRIES) == ["crius"]
    assert rows_in(tmp_path) == {"titan": ok}


@pytest.mark.parametrize(("crius", "ok"), [(44.0, True), (46.0, False)])
def test_the_whole_vocabulary_has_to_take_less_memory(crius, ok, tmp_path, monkeypatch):
    peaks = {"crius": crius, "titan-fsdp": 50.0}

    def take(this, case, names, seconds, **options):
        return group_of(*(outcome_of(name, [1.0], peak=peaks[name]) for name in names), case=case)

    monkeypatch.setattr(peers, "take", take)
    bench.vocabulary(round_of(tmp_path))
    assert rows_in(tmp_path)["peak of crius over titan-fsdp"] == ok


def check_on_a_gpu(flags):
    """The rules of a run on a machine with a GPU."""
    config = parse(list(flags))
    rules.check(replace(facts_of(config, 1, None), num_gpus=1))  # at once: rules know the flags of the last parse
    return config


@pytest.mark.long
def test_every_run_and_every_contestant_is_a_config(tmp_path):
    this = round_of(tmp_path)
    small = runs.small_flags(this)
    cases = (peers.SHAPED_8B, peers.WHOLE_VOCABULARY, peers.TINY)
    tables = (single.WHOLE, single.SMALL_MODEL, single.LONG, single.RECIPE, single.LORA, single.ADAMW)
    singles = [one.flags for table in (*tables, single.SEEDS, single.EXPERTS) for one in table.values()]
    asked = [
        *([*small, *run.flags] for run in runs.RUNS),
        *([*small, *flags] for flags in runs.REFERENCES.values()),
        *([*case.flags(this), *entry.flags] for case in cases for entry in peers.ENTRIES.values()),
        *([*verbs.SWEPT.flags(this), *flags] for flags in verbs.CHANGES.values()),
        *([*flags, *runs.text_flags(this), "--validation.interval", "0"] for flags in singles),
    ]
    for flags in asked:
        config = check_on_a_gpu([*flags, "--training.device", "auto"])
        assert open_run_corpus(config, 1).train.num_samples >= config.training.global_batch_size  # there is text enough
    assert len(runs.RUNS) == 33 and len({run.name for run in runs.RUNS}) == 33


def test_equal_mathematics_is_compared_without_compiling_and_where_it_fits(tmp_path, monkeypatch):
    """torchtitan has an option of its own for it, and keeps all scores of attention in float32."""
    started = []
    monkeypatch.setattr(peers, "take_turns", lambda contestants, **_: started.extend(contestants) or [])
    bench.equal(round_of(tmp_path))
    assert len(started) == 4
    for contestant in started:
        words = list(contestant.argv)
        assert "--eager" in words[: words.index("--")] if "--" in words else "--compile.no_enable" in words
        assert words[len(words) - 1 - words[::-1].index("--training.seq_len") + 1] == "2048"


def test_the_8b_shape_has_the_linears_of_8b_and_its_share_of_the_output_layer(tmp_path):
    config = parse(peers.SHAPED_8B.flags(round_of(tmp_path, "cpu")))
    small, whole = (describe_model(each) for each in (config, parse(["--model.flavor", "8b"])))
    shapes = [set(facts.linears.values()) - {facts.linears["output"]} for facts in (small, whole)]
    assert shapes[0] == shapes[1]
    shares = [facts.vocab_size * facts.dim / facts.matmul_parameters for facts in (small, whole)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-3)
    open_run_corpus(config, 1)  # there is text enough for sequences of 8192 tokens


def trained(losses, rate=50_000.0):
    records = [
        {"step": n, "loss": loss, "tokens_per_second": rate, "mfu": 0.5, "memory_gib": 40.0, "step_seconds": 0.1}
        for n, loss in enumerate(losses, start=1)
    ]
    return runs.Trained(Done(0, "", 1.0), records)


@pytest.mark.parametrize(
    ("losses", "rate", "ok"),
    [([3.0] * 4 + [2.0] * 4, 50_000, True), ([3.0] * 4 + [2.0] * 4, 30_000, False), ([3.0] * 8, 50_000, False)],
)
def test_a_single_run_has_to_learn_and_to_reach_its_goal(losses, rate, ok, tmp_path, monkeypatch):
    this = round_of(tmp_path)
    monkeypatch.setattr(runs, "train", lambda *_, **__: trained(losses, rate))
    monkeypatch.setattr(single, "plan_of", lambda *_: {})
    single.run_single(this, "a", single.Single((), 8, least=39_000, learns=True))
    assert rows_in(tmp_path) == {"a": ok}


def test_the_plan_stands_beside_a_single_run(tmp_path):
    found = single.plan_of(round_of(tmp_path), single.WHOLE["whole"])
    assert 40 < found["planned_gib"] < 60 and 4000 < found["planned_tokens_per_second"] < 9000
    unknown = round_of(tmp_path)
    unknown.record.environment["device"] = "a card"
    assert single.plan_of(unknown, single.WHOLE["whole"]) == {}


@pytest.mark.parametrize(
    ("answers", "backend"),
    [
        ({"nccl, 2 ranks": True, "gloo, 2 ranks": True}, "nccl"),
        ({"nccl, 2 ranks": False, "gloo, 2 ranks": True}, "gloo"),
        ({}, "nccl"),
    ],
)
def test_layouts_use_the_backend_whose_pings_were_right(answers, backend, tmp_path, monkeypatch):
    this = round_of(tmp_path)
    this.step = "ping"
    for name, ok in answers.items():
        this.row(name, ok)
    monkeypatch.setattr(ranks, "library", lambda _: tmp_path / "libnccl.so.2")
    assert ranks.works(this) == backend


def test_one_rank_has_the_flags_without_the_layout():
    flags = ("--model.name", "a", "--parallelism.data_parallel_shard_degree", "2", "--compile.enable")
    assert ranks._alone(flags) == ["--model.name", "a", "--compile.enable"]


def event(name, begin, end, cat="kernel", tid=7, correlation=None):
    args = {"correlation": correlation} if correlation else {}
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin, "pid": 0, "tid": tid, "args": args}


TRACE = [
    event("ProfilerStep#12", 100, 200, "user_annotation", 1),
    event("ProfilerStep#13", 200, 300, "user_annotation", 1),
    event("cudaLaunchKernel", 50, 55, "cuda_runtime", 1, 1),
    event("cudaLaunchKernel", 110, 115, "cuda_runtime", 1, 2),
    event("cudaLaunchKernel", 250, 255, "cuda_runtime", 1, 3),
    event("old", 100, 400, correlation=1),
    event("gemm", 500, 560, correlation=2),
    event("norm", 580, 600, correlation=3),
    event("cudaDeviceSynchronize", 310, 900, "cuda_runtime", 1),  # the profiler's own, after the steps
]


def test_a_step_is_what_it_launched_whenever_that_ran():
    window = trace.steps_of(TRACE)
    work = trace.launched_in(TRACE, window)
    assert [found["name"] for found in work] == ["gemm", "norm"]
    assert trace.covered(work) == 80
    assert trace.table(work, 100, len(window))[0] == {
        "what": "gemm", "calls_a_step": 0.5, "milliseconds_a_step": 0.03, "percent": 60.0
    }  # fmt: skip


@pytest.mark.parametrize(("begin", "count"), [(99, 0), (150, 1), (299, 1), (300, 0)])
def test_waits_count_inside_the_steps_only(begin, count):
    events = [*TRACE, event("cudaStreamSynchronize", begin, begin + 5, "cuda_runtime", 1)]
    assert len(trace.waits_of(events, trace.steps_of(events))) == count


@pytest.mark.parametrize(
    ("waits", "ok"),
    [
        ({}, True),
        ({"cudaEventSynchronize": 2}, True),
        ({"cudaEventSynchronize": 3}, False),
        ({"cudaEventSynchronize": 1, "cudaStreamSynchronize": 1}, False),
        ({"cudaDeviceSynchronize": 1}, False),
    ],
)
def test_a_step_may_wait_once_for_the_step_before(waits, ok, tmp_path):
    events = [event(name, 150, 151, "cuda_runtime", 1) for name in Counter(waits).elements()]
    trace.judge_waits(round_of(tmp_path), [*TRACE, *events], trace.steps_of(TRACE))
    assert list(rows_in(tmp_path).values()) == [ok]


def test_a_wait_is_told_with_the_frame_that_it_runs_in():
    frames = [event("train.py(3): step", 100, 190, "python_function", 1), event("aten::copy_", 110, 130, "cpu_op", 1)]
    wait = event("cudaStreamSynchronize", 115, 120, "cuda_runtime", 1)
    assert trace.around([*TRACE, *frames, wait], wait) == "aten::copy_"
    assert trace.around(TRACE, event("cudaStreamSynchronize", 10, 20, "cuda_runtime", 1)) == "no operator"


def test_own_time_is_without_what_is_inside():
    nested = [event("outer", 0, 100), event("inner", 10, 40), event("inmost", 20, 25), event("next", 100, 110)]
    assert {found["name"]: own for found, own in trace.own_times(nested)} == {
        "outer": 70, "inner": 25, "inmost": 5, "next": 10
    }  # fmt: skip
