"""Models outside of the repository: named by a command line or its environment, and never by a configuration."""

from dataclasses import replace

import pytest
from harness import crius

from crius.errors import ConfigError
from crius.models.registry import SPECS, build

MODULE = """
from dataclasses import replace
from crius.models.registry import SPECS
LLAMA3 = SPECS["llama3"]
SPEC = replace(LLAMA3, name="{name}", flavors={{"tiny": replace(LLAMA3.flavors["debug"], num_layers=2)}})
"""
WRONG = {
    "none": "flavors={}",
    "other": "flavors={'small': {'dim': 8}}",
    "reserved": "flavors={'custom': LLAMA3.flavors['debug']}",
    "unplanned": "plan=None",
    "planless": "plan=lambda config: None",
    "raising": "plan=lambda config: 1 / 0",
    "blockless": "block='nowhere'",
    "bare": "block='torch.nn:Identity'",
}
SHORT = ["--training.seq_len", "16", "--steps", "1", "--validation.interval", "0"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ours.py").write_text(MODULE.format(name="ours"))
    (tmp_path / "taken.py").write_text(MODULE.format(name="llama3"))
    for name, change in WRONG.items():
        (tmp_path / f"{name}.py").write_text(f"{MODULE.format(name=name)}SPEC = replace(SPEC, {change})\n")
    (tmp_path / "empty.py").write_text("SPEC = 3\n")
    (tmp_path / "broken.py").write_text("import os\n1 / 0\n")
    return tmp_path


@pytest.mark.long
def test_a_named_module_is_trained_recorded_and_named_again(folder):
    done = crius("train", "--import", "ours", "--model.name", "ours", *SHORT, "--job.run_dir", "r", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "model: ours/tiny" in done.stdout + done.stderr
    settings = (folder / "r" / "run.toml").read_text()
    assert settings.startswith("# --import ours\n")
    again = crius(
        "train", "--config", "r/run.toml", "--steps", "2", "--job.run_dir", "r", cwd=folder, CRIUS_IMPORT="ours"
    )
    assert again.returncode == 0, again.stderr
    unknown = crius("train", "--config", "r/run.toml", cwd=folder)
    assert unknown.returncode == 2 and "no model is called ours" in unknown.stderr
    assert "Python code of a module; if you trust it, add --import ours" in unknown.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--import", "nowhere"], "module nowhere cannot be imported: ModuleNotFoundError"),
        (["--import", "broken"], "broken.py, line 2"),
        (["--import=empty"], "module empty has no model: SPEC is int"),
        (["--import", "taken"], "module taken calls its model llama3, which is the name of a Crius model"),
        (["--import", "none"], "module none: flavors is empty."),
        (["--import", "other"], "flavor small is of type dict"),
        (["--import", "reserved"], "the flavor name custom is reserved"),
        (["--import", "unplanned"], "plan is NoneType"),
        (["--import", "planless"], "its plan is NoneType"),
        (["--import", "raising"], "cannot be read: ZeroDivisionError"),
        (["--import", "blockless"], "block nowhere is not module:Class"),
        (["--import", "ours", "--import"], "--import names no module"),
        (["--import", "--steps"], "--import names no module"),
    ],
)
def test_what_is_wrong_with_a_module_is_one_error(folder, flags, said):
    done = crius("config", "show", *flags, cwd=folder)
    assert done.returncode == 2
    assert said in done.stderr and "  fix    " in done.stderr


@pytest.mark.long
def test_a_dry_run_holds_a_block_against_its_description(folder):
    done = crius("train", "--import", "bare", "--model.name", "bare", *SHORT, "--dry_run", cwd=folder)
    assert done.returncode == 1 and "bare/tiny does not match its description" in done.stderr, done.stderr


def test_a_block_that_cannot_be_built_is_one_error():
    described = SPECS["llama3"].describe("debug")
    with pytest.raises(ConfigError, match="the block of llama3/debug cannot be built: AttributeError"):
        build(replace(described, block="math:NoSuch"))


def test_commands_that_are_printed_name_the_module(folder):
    small = ["--import", "ours", "--model.name", "ours"]
    plan = crius("plan", *small, "--flavor", "tiny", "--gpus", "2", "--gpu", "cpu", cwd=folder)
    assert "crius train --import ours" in plan.stdout
    assert "ready: crius train --model.name ours --import ours" in crius("doctor", *small, cwd=folder).stdout


def test_the_list_of_models_has_a_named_module(folder):
    done = crius("models", "--import", "ours", cwd=folder)
    assert "\nours: llama LlamaForCausalLM\n  flavors  tiny 1\n" in done.stdout, done.stderr


def test_a_configuration_cannot_name_a_module(folder):
    (folder / "a.toml").write_text("import = 'ours'\n")
    done = crius("train", "--config", "a.toml", cwd=folder)
    assert done.returncode == 2
    assert "a configuration runs no code" in done.stderr
    assert not (folder / "runs").exists()
