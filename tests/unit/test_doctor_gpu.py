"""What ``crius doctor`` says of a GPU, its libraries and its kernels; torch's answers are patched."""

import json
from types import SimpleNamespace

import pytest
import torch

from crius import cli
from crius.cli import settings
from crius.kernels import choice
from crius.launch import doctor, environment
from crius.units import GIB

BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")
NEW = {"cudnn", "nccl", "attention", "matmuls", "experts"}


@pytest.fixture
def card(monkeypatch):
    """A machine with one GPU of a compute capability, and what is installed for it."""

    def show(capability, cudnn=91900, flash=False, compiler=""):
        properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * GIB)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(environment, "visible_gpus", lambda environ: 1)
        monkeypatch.setattr(doctor, "loaded_nccl", lambda: (2, 31, 2))
        monkeypatch.setattr(doctor, "_driver", lambda root: "580.65.06")
        monkeypatch.setattr(settings, "missing_for_compile", lambda environ: compiler)
        monkeypatch.setattr(choice, "_is_installed", lambda package: flash)

    return show


def facts_of(capsys, *flags):
    """Facts by name and optional lines that the verb prints."""
    assert cli.main(["doctor", *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    return report["facts"], [line for line in report["optional"] if line.startswith(("Flash", "compiled"))]


def test_a_hopper_card_is_named_with_its_libraries_and_kernels(card, capsys):
    card((9, 0))
    facts, optional = facts_of(capsys)
    assert {name: facts[name] for name in ("gpus", "driver", *sorted(NEW))} == {
        "gpus": "NVIDIA H100 80GB HBM3 80 GiB",
        "driver": "580.65.06",
        "cudnn": "9.19.0",
        "nccl": "2.31.2",
        "attention": "cudnn > flash > efficient > math (auto: sm90, cuDNN 91900)",
        "matmuls": "bfloat16, float32, float8, "
        "mxfp8 emulated (MXFP8 matmuls need compute capability 10.0, this GPU has 9.0)",
        "experts": "bfloat16 by grouped_mm, float32 by a loop",
    }
    assert optional == [
        "FlashAttention 3 (for --kernels.attention flash3): build hopper of https://github.com/Dao-AILab/flash-attention"
    ]


@pytest.mark.parametrize(
    ("capability", "known", "attention", "matmuls", "optional"),
    [
        ((8, 0), {}, "flash > efficient", ["float8 emulated", "mxfp8 emulated"], []),
        ((9, 0), {"cudnn": 91002, "flash": True}, "torch's own order", ["float8, mxfp8 emulated"], []),
        ((9, 0), {"flash": True, "compiler": "no gcc"}, "cudnn", ["float8"], ["compiled kernels: no gcc"]),
        ((10, 0), {"flash": True}, "cudnn > flash", ["float8, mxfp8"], []),
        ((12, 0), {}, "torch's own order", ["float8, mxfp8"], []),
    ],
)
def test_kernels_follow_the_card(capability, known, attention, matmuls, optional, card, capsys):
    card(capability, **known)
    facts, lines = facts_of(capsys)
    assert facts["attention"].startswith(attention)
    assert all(part in facts["matmuls"] for part in matmuls)
    assert lines == optional


def test_the_attention_is_that_of_the_run(card, capsys):
    card((9, 0))
    facts, _ = facts_of(capsys, "--model.attention_mask", "document", *BFLOAT16)
    assert facts["attention"].startswith("varlen > flex (auto: document mask; FlashAttention 2: ")
    assert facts_of(capsys, "--kernels.attention", "flash", *BFLOAT16)[0]["attention"] == "flash (as asked)"


def test_a_kernel_that_is_not_there_is_missing_for_the_run(card, capsys):
    card((9, 0))
    assert cli.main(["doctor", "--kernels.attention", "flash3"]) == 1
    out = capsys.readouterr().out
    assert "missing   for this run: kernels.attention flash3 does not run here" in out


def test_facts_are_aligned(card, capsys):
    card((9, 0))
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    columns = {line.index(word) for line in lines for word in ("9.19.0", "cudnn > ", "bfloat16, ") if word in line}
    assert len(columns) == 1


@pytest.mark.parametrize("flags", [[], ["--training.device", "cpu"]])
def test_a_run_on_a_cpu_has_no_line_about_kernels_of_gpus(flags, capsys, request):
    if flags:
        request.getfixturevalue("card")((9, 0))
    facts, optional = facts_of(capsys, *flags)
    assert not facts.keys() & {"attention", "matmuls", "experts"}
    assert bool(facts.keys() & NEW) == bool(flags) and optional == []
