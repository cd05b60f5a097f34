"""``training.mixed_precision_param auto``: decided once, and then a setting like any other."""

import tomllib

import pytest
import torch
from harness import SMALL, Alone, parse, train

from crius import host
from crius.config import resolve as dtype_rule
from crius.config.resolve import auto_dtype, with_dtype
from crius.errors import ConfigError
from crius.host import Machine
from crius.train.inputs import describe_model, resolve, saved_settings
from crius.train.setup import decide

PARAM = "--training.mixed_precision_param"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "amx_bf16"),
        ("fpu avx2 avx512f avx512_bf16", "avx512_bf16"),
        ("fpu avx2 avx512f avx512_bf16x", ""),
        ("", ""),
    ],
)
def test_the_cpu_tells_what_multiplies_bfloat16(flags, expected, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: amx_bf16\nflags\t\t: {flags}\nbugs\t\t: avx512_bf16\n")
    monkeypatch.setattr(host, "_CPUINFO", path)
    assert host.bfloat16_instructions() == expected


def test_a_cpu_that_tells_nothing_has_no_such_instructions(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "missing")
    assert host.bfloat16_instructions() == ""


@pytest.mark.parametrize(
    ("on_gpu", "instructions", "expected"),
    [(True, "", "bfloat16"), (False, "avx512_bf16", "bfloat16"), (False, "", "float32")],
)
def test_auto_is_bfloat16_where_the_device_multiplies_it(on_gpu, instructions, expected, monkeypatch):
    monkeypatch.setattr(dtype_rule, "bfloat16_instructions", lambda: instructions)
    dtype, why = auto_dtype(on_gpu=on_gpu)
    assert dtype == expected and (instructions or "G" if on_gpu else "CPU") in why
    config = parse([*SMALL, PARAM, "auto"])
    assert with_dtype(config, on_gpu=on_gpu).training.mixed_precision_param == expected


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_what_is_asked_for_by_name_stays(asked):
    config = parse([*SMALL, PARAM, asked])
    assert with_dtype(config, on_gpu=True) == with_dtype(config, on_gpu=False) == config


def test_a_run_says_what_it_took_and_goes_on_with_it_on_another_machine(tmp_path, monkeypatch):
    """The checkpoint is of a machine where auto is float32; here it would be bfloat16."""
    monkeypatch.setattr(dtype_rule, "bfloat16_instructions", lambda: "")
    flags = [*SMALL, "--training.steps", "2", "--model.num_layers", "1", "--validation.interval", "0"]
    train([*flags, "--checkpoint.interval", "2", PARAM, "auto"], tmp_path)
    written = tomllib.loads((tmp_path / "run.toml").read_text())
    assert written["training"]["mixed_precision_param"] == "float32"
    asked = parse([*flags, "--training.steps", "4", "--checkpoint.interval", "2", PARAM, "auto"])

    def decided(config, run_dir):
        resolved = resolve(config, Machine(device="cuda"), saved=saved_settings(config, run_dir))
        return resolved.config.training.mixed_precision_param, resolved.reasons.get(PARAM[2:])

    assert decided(asked, tmp_path) == ("float32", "as in the checkpoint")
    assert decided(with_dtype(asked, on_gpu=True), tmp_path) == ("bfloat16", None)  # asked for by name
    assert decided(asked, tmp_path / "new") == ("bfloat16", "a GPU")


def test_ranks_that_decide_on_different_dtypes_are_refused(monkeypatch):
    config = parse([*SMALL, PARAM, "bfloat16"])
    monkeypatch.setattr(Alone, "gather_json", lambda ranks, value: [value, "float32", value])
    with pytest.raises(ConfigError) as caught:
        decide(config, describe_model(config), Machine(device="cpu"), Alone(0, 1, torch.device("cpu")), None)
    assert "bfloat16 on 2, first rank 0, float32 on 1, first rank 1" in str(caught.value)
    assert f"{PARAM} bfloat16" in caught.value.fix
