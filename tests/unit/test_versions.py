"""Versions are compared by their numbers: not as text, and a pre-release counts as its release."""

import contextlib
import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from crius.kernels import attention
from crius.parallel import runtime
from crius.plugins import release
from crius.quantize.convert import OLDEST_TORCHAO


@pytest.mark.parametrize(
    ("version", "want"),
    [
        ("2.9.1", (2, 9)),
        ("2.13.0+cpu", (2, 13)),
        ("2.13.0a0+git3f2c", (2, 13)),
        ("2.15.0.dev20260911+cu132", (2, 15)),
        ("2.11.0rc2", (2, 11)),
        ("0.18", (0, 18)),
        ("", ()),
    ],
)
def test_a_version_is_its_major_and_minor_number(version, want):
    assert release(version) == want


def test_the_oldest_torchao_is_that_of_the_requirement():
    assert OLDEST_TORCHAO == (0, 18)


# (version, whether it has what came with torch 2.12, and what came with 2.13)
VERSIONS = [
    ("2.9.1", False, False),
    ("2.11.0+cu130", False, False),
    ("2.12.0a0+nv26.05", True, False),
    ("2.13.0.dev20260401", True, True),
    ("2.13.0+cpu", True, True),
]


@pytest.mark.parametrize(("version", "shares", "_"), VERSIONS)
def test_attention_by_documents_repeats_heads_before_torch_2_12_alone(version, shares, _, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    spec = importlib.util.spec_from_file_location("attention_again", attention.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again._SHARES_HEADS == ({"enable_gqa": True} if shares else {})


@pytest.mark.parametrize(("version", "_", "copies"), VERSIONS)
def test_a_process_alone_takes_gloo_before_torch_2_13(version, _, copies, monkeypatch):
    """Before torch 2.13 some collectives of the ``fake`` backend copied nothing."""
    backends = []
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: backends.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(runtime, "choose_interface", lambda environ, master: "lo")
    monkeypatch.setattr(runtime, "_default_timeout", lambda timeout: contextlib.nullcontext())
    with runtime.world(0, 1, torch.device("cpu"), "", 60):
        pass
    assert backends == ["fake" if copies else "gloo"]
