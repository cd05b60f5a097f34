"""What a run on GPUs does where it is told nothing: it compiles where that works, and its allocator's segments grow."""

import functools
import json
import os
import sys
from typing import ClassVar

import pytest
import torch
from harness import SMALL, Alone, parse, skip_what_torch_lacks

from crius.cli import bench
from crius.cli.settings import run_of
from crius.config.facts import Facts
from crius.config.layout import parse_layout
from crius.config.rules_layout import async_tensor_parallel_needs, compile_flags_have_effect
from crius.errors import ConfigError
from crius.host import Machine, missing_for_compile
from crius.launch import environment
from crius.launch.local import run_workers
from crius.models.registry import SPECS
from crius.tools.plan.fit import fit
from crius.tools.plan.workload import from_config
from crius.tools.verify import matrix
from crius.train import setup
from crius.train.inputs import COMPILE, resolve
from crius.train.job import set_up_torch

GPU, CPU = Machine(device="cuda"), Machine(device="cpu")
NO_TRITON = Machine(device="cuda", cannot_compile="the package triton is not installed")
ZERO_BUBBLE = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule"]
ZERO_BUBBLE += ["zbv_zero_bubble", "--model.num_layers", "4"]


def facts_of(flags, machine):
    known = {"num_ranks": 2, "asked_ranks": 0, "asked_by": "", "num_gpus": 0, "num_cores": 2, "local_ranks": 2}
    return Facts(**vars(resolve(parse(flags), machine)), **known, origin=lambda name: "command line", specs=SPECS)


@pytest.mark.parametrize(
    ("flags", "machine", "want", "why"),
    [
        ([], GPU, True, "faster on a GPU"),
        ([], CPU, False, "a CPU gains little"),
        ([], NO_TRITON, False, "triton is not installed"),
        (["--compile.backend", "aot_eager"], NO_TRITON, True, "faster on a GPU"),
        (ZERO_BUBBLE, GPU, False, "splits the backward"),
        (["--debug.detect_anomaly"], GPU, False, "names lines"),
        (["--compile.enable"], CPU, True, None),
        (["--compile.enable"], NO_TRITON, True, None),
        (["--compile.no_enable"], GPU, False, None),
        (["--compile.enable=false"], GPU, False, None),
    ],
)
def test_a_run_compiles_on_a_gpu_where_that_works_and_else_as_it_is_told(flags, machine, want, why):
    resolved = resolve(parse(flags), machine)
    assert resolved.config.compile.enable is want
    assert (COMPILE in resolved.reasons) == (why is not None) and (why or "") in resolved.reasons.get(COMPILE, "")
    ranks = resolved.config.parallelism.total_ranks(1)
    assert from_config(resolved.config, resolved.model, ranks).compile == want, "the planner reads the same"


@pytest.mark.parametrize(
    ("gpus", "is_dry", "lacks", "want"),
    [
        (0, False, "", "False"),
        (0, True, "", "True auto: compile on: faster on a GPU"),
        (8, False, "", "True auto: compile on: faster on a GPU"),
        (8, False, "no Triton", "False auto: compile off: no Triton"),
        (8, True, "no Triton", "True auto: compile on: faster on a GPU"),
    ],
)
def test_a_verb_looks_at_the_machine_or_at_the_one_that_it_stands_for(gpus, is_dry, lacks, want, monkeypatch, capsys):
    monkeypatch.setattr(environment, "visible_gpus", lambda environ: gpus)
    monkeypatch.setattr(sys.modules["crius.cli.app"], "missing_for_compile", lambda environ: lacks)
    facts = bench.facts_of(parse([]), 0, None, is_dry=is_dry)
    assert f"{facts.config.compile.enable} {capsys.readouterr().err}".strip() == want
    here = bench.facts_of(parse([]), 0, None).config
    assert here.compile.enable == (gpus > 0 and not lacks), "what is timed is run here"


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_file_says_whether_a_run_compiles(value, tmp_path):
    (tmp_path / "run.toml").write_text(f"[compile]\nenable = {value}\n")
    asked = run_of("--config", str(tmp_path / "run.toml"))
    for machine in (GPU, CPU):
        assert resolve(asked, machine).config.compile.enable is (value == "true")


@pytest.mark.parametrize(
    ("flags", "rule", "what"),
    [
        (["--compile.loss"], compile_flags_have_effect, "compile.loss needs compile.enable"),
        (["--compile.max_recompiles", "3"], compile_flags_have_effect, "has no effect without compile.enable"),
        (
            ["--parallelism.tensor_parallel_degree", "2", "--parallelism.enable_async_tensor_parallel"],
            async_tensor_parallel_needs,
            "needs torch.compile",
        ),
    ],
)
def test_what_needs_the_compiler_goes_without_its_flag_on_a_gpu_and_is_refused_on_a_cpu(flags, rule, what):
    assert [*rule(facts_of(flags, GPU))] == []
    assert any(isinstance(error, ConfigError) and what in error.what for error in rule(facts_of(flags, CPU)))


@pytest.mark.parametrize(("row", "want"), [("fsdp2", False), ("fsdp2+compile", True), ("pp2+zbv_zero_bubble", False)])
def test_verify_compiles_the_rows_that_say_so_wherever_it_runs(row, want):
    skip_what_torch_lacks(row)
    facts = facts_of([], GPU)
    one = matrix.case(facts, facts.config, parse_layout(row))
    assert one.config and one.config.compile.enable is want, one.problems


@pytest.mark.parametrize(
    ("triton", "programs", "headers", "environ", "want"),
    [
        (True, ["gcc"], True, {}, ""),
        (True, ["clang"], True, {}, ""),
        (True, ["icc"], True, {"CC": "icc"}, ""),
        (True, ["gcc"], True, {"CC": "icc"}, "there is no icc"),
        (True, [], True, {}, "there is no gcc or clang"),
        (True, ["gcc"], False, {}, "Python.h"),
        (False, ["gcc"], True, {}, "the package triton is not installed"),
        (True, ["gcc"], True, {"TORCHDYNAMO_DISABLE": "1"}, "TORCHDYNAMO_DISABLE is set"),
    ],
)
def test_what_the_compiler_lacks_on_a_host_is_said(triton, programs, headers, environ, want, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton and name == "triton" else None)
    for name in [*programs, "Python.h"][: None if headers else -1]:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    found = missing_for_compile({"PATH": str(tmp_path), **environ})
    assert found == want or (want and want in found)


def note_first_look(path, flags, placement):
    """Set up a process with ``flags``; to ``path`` how the allocator is set when CUDA is first asked for anything."""

    def is_available():
        if not path.exists():
            path.write_text(json.dumps({name: value for name, value in os.environ.items() if "ALLOC_CONF" in name}))
        return False

    torch.cuda.is_available = is_available
    set_up_torch(resolve(parse(flags), CPU).config, placement)
    is_available()


@pytest.mark.parametrize(
    ("flags", "environ", "want"),
    [
        ([], {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ([], {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}),
        ([], {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        (["--training.device", "cpu"], {}, {}),
        (["--parallelism.enable_async_tensor_parallel"], {}, {}),
    ],
    ids=["alone", "set", "set_by_the_older_name", "cpu", "async_tp"],
)
def test_segments_grow_from_the_first_look_at_cuda_on_unless_the_user_set_it(
    flags, environ, want, tmp_path, monkeypatch
):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert run_workers(functools.partial(note_first_look, tmp_path / "seen.json", flags), 1, tmp_path) == 0
    assert json.loads((tmp_path / "seen.json").read_text()) == want


class Second(Alone):
    """A rank that hears ``words`` from the others, where it says something of their kind."""

    words: ClassVar[dict[type, list]] = {}

    def gather_json(self, value):
        return self.words.get(type(value), [value])


OPEN = [*SMALL, "--model.num_layers", "2", "--training.global_batch_size", "16"]


def test_ranks_take_the_recomputation_and_the_microbatch_that_the_first_one_found(monkeypatch):
    """GPUs of other names have other times: without that they could find different ones, and hang."""
    resolved = resolve(parse(OPEN), GPU)
    assert resolved.config.activation_checkpoint.mode == "auto"
    first = {"activation_checkpoint.mode": "full", "training.local_batch_size": 2}
    monkeypatch.setattr(Second, "words", {tuple: [[first, "as the first says"]]})
    monkeypatch.setattr(setup, "_memory", lambda ranks: 80 * 2**30)
    ranks = Second(1, 2, torch.device("cuda"))
    decided = setup.decide(resolved.config, resolved.model, GPU, ranks, fit)
    assert (decided.activation_checkpoint.mode, decided.training.local_batch_size) == ("full", 2)


def test_a_host_that_cannot_compile_is_refused_among_those_that_do(monkeypatch):
    resolved = resolve(parse(OPEN), GPU)
    monkeypatch.setattr(Second, "words", {str: ["true", "false"]})
    monkeypatch.setattr(setup, "_check_alike", functools.partial(only_compile, setup._check_alike))
    with pytest.raises(ConfigError, match="compile.enable differs between ranks: false on 1, first rank 1") as caught:
        setup.decide(resolved.config, resolved.model, GPU, Second(0, 2, torch.device("cuda")), fit)
    assert "--compile.enable true" in caught.value.fix


def only_compile(check, config, name, ranks):
    if name == COMPILE:
        check(config, name, ranks)
