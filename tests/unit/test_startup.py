"""What is typed most often answers at once, without torch; the doctor says what is missing."""

import importlib.util
import json
import os
import resource
import subprocess
import sys

import pytest
import torch
from harness import ROOT
from tiny_source import save_source

import crius
from crius import cli
from crius.launch import doctor
from crius.plugins import install_line

# With torch blocked an import of it would fail; without the block one in a try could go unnoticed.
_MAIN = """
import sys
from crius.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""


def run(*command, **environ):
    """Exit code, stdout and stderr of a child, and the user and system seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def torch_seconds():
    return min(run("-c", "import torch")[1] for _ in range(2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("share", "argv", "code", "said"),
    [
        (0.25, ["--help"], 0, "train"),
        (0.30, ["train", "--help"], 0, "--training.steps"),
        (0.30, ["_complete", "train", "--recipe", "sm"], 0, "smollm2_lora"),
        (0.50, ["models"], 0, "gemma3_text"),
        (0.50, ["import", "/none", "--explain"], 2, "there is no /none"),
        (0.50, ["generate", "/none", "--prompt", "a"], 2, "/none is not a folder"),
        (0.50, ["generate", "/none", "--prompt", "a", "--device", "cuda"], 1, "no GPU that torch can use"),
        (0.50, ["config", "show"], 0, "training.steps"),
        (0.50, ["config", "diff", "llama3_debug", "llama3_debug"], 0, "no difference"),
        (0.15, ["train", "--training.stepz", "3"], 2, "unknown flag --training.stepz"),
        (0.15, ["eval", "runs/a"], 2, "crius evaluate runs/a"),
        (0.30, ["train", "--training.steps", "0"], 2, "training.steps 0 must be"),
        (0.30, ["train", "--data.source", "text", "--data.path", "/none"], 2, "MissingPathError: /none does not exist"),
        (0.50, ["checkpoint", "convert", "/none", "/tmp/none"], 2, "MissingPathError: /none does not exist"),
    ],
    ids=lambda value: "_".join(value).strip("-_/") if isinstance(value, list) else "",
)
def test_it_answers_at_once_and_without_torch(share, argv, code, said, torch_seconds):
    """Within a share of what importing torch alone takes on the same machine."""
    spent = []
    for _ in range(5):  # the best of five: others use this machine too
        done, seconds = run("-c", _MAIN, *argv)
        assert done.returncode == code, done.stderr
        assert said in (done.stderr if code else done.stdout)
        spent.append(seconds)
        if seconds < share * torch_seconds:
            break
    assert min(spent) < share * torch_seconds


@pytest.mark.long
def test_what_a_model_cannot_do_is_refused_without_torch(tmp_path):
    save_source(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()  # has the chat template
    task = tmp_path / "task.jsonl"
    task.write_text('{"context": "a", "continuation": "b"}\n')
    for verb, *given in (("generate", "--prompt", "a"), ("evaluate", "--tasks", str(task))):
        done, _ = run("-c", _MAIN, verb, str(tmp_path), *given, "--chat")
        assert (done.returncode, done.stdout) == (2, "") and "has no chat template" in done.stderr
        done, _ = run("-c", _MAIN, verb, str(tmp_path), *given, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
        assert (done.returncode, done.stdout) == (1, "") and "no GPU that torch can use" in done.stderr


@pytest.mark.long
def test_train_py_takes_the_flags_of_crius_train():
    script, verb = run("train.py", "--help")[0], run("-m", "crius", "train", "--help")[0]
    assert (script.returncode, script.stdout) == (0, verb.stdout)
    script, verb = (run(*command, "--nope")[0] for command in (["train.py"], ["-m", "crius", "train"]))
    assert (script.returncode, script.stderr) == (2, verb.stderr)


def test_doctor_prints_the_versions_of_what_is_there(capsys):
    assert cli.main(["doctor"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert lines["crius"] == crius.__version__
    assert lines["python"] == sys.version.split()[0]
    assert lines["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert lines["ready:"] == "crius train"


def test_doctor_as_json_has_the_same_facts(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["facts"]["crius"] == crius.__version__
    assert set(report) == {"facts", "missing", "optional", "gpu_bytes", "command", "ready"}
    assert (report["missing"], report["ready"]) == ([], True)


@pytest.mark.parametrize("package", [row[0] for row in doctor.PACKAGES])
def test_doctor_says_the_line_that_installs_a_missing_package(package, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    _, required, _, requirement = next(row for row in doctor.PACKAGES if row[0] == package)
    install = install_line(requirement)
    assert "pip install" in install and sys.executable in install
    assert cli.main(["doctor"]) == (1 if required else 0)
    out = capsys.readouterr().out
    words = "missing" if required else "optional", package  # a path of this Python may have the name in it
    [line] = [line for line in out.splitlines() if tuple(line.split()[:2]) == words]
    assert line.endswith(f": {install}")
    assert out.rstrip().endswith("not ready: see the lines above" if required else "ready: crius train")


@pytest.mark.long
def test_an_install_line_leaves_compiling_possible():
    """Whoever looks for the module pip makes setuptools' import hook choose the standard library's distutils."""
    code = "from crius.plugins import install_line; print(install_line('a', 'b>1')); import torch.utils.cpp_extension"
    done, _ = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout and "'b>1'" in done.stdout


DRIVER = "NVRM version: NVIDIA UNIX {}  {}  Tue Mar  5 22:23:56 UTC 2024\nGCC version:  gcc version 12.2.0\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """What the doctor says of a machine with GPUs as files, and of a torch built for ``cuda`` that can use none."""

    def examined(cuda, driver="", gpus=1, kernel_module="x86_64 Kernel Module", **environ):
        (tmp_path / "dev").mkdir()
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        for number in range(gpus):
            (tmp_path / f"dev/nvidia{number}").touch()
        if driver:
            (tmp_path / "proc/driver/nvidia/version").write_text(DRIVER.format(kernel_module, driver))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch, "__version__", "2.15.0+cu132" if cuda else "2.15.0+cpu")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return doctor.examine(tmp_path)

    return examined


NEW, OLD = (
    install_line("--upgrade", "--force-reinstall", "torch>=2.11"),
    "--index-url https://download.pytorch.org/whl/",
)


@pytest.mark.parametrize(
    ("cuda", "driver", "said", "line"),
    [
        (None, "580.65.06", "a torch with CUDA (this machine has nvidia0, torch 2.15.0+cpu is a CPU build)", NEW),
        (None, "", "torch 2.15.0+cpu is a CPU build", NEW),
        (None, "550.54.15", "torch 2.15.0+cpu is a CPU build", f"{NEW} {OLD}cu126"),
        ("13.2", "550.54.15", "driver 550.54.15; torch 2.15.0+cu132 is built for CUDA 13.2, which needs 580", "cu126"),
        ("12.6", "470.82.01", "built for CUDA 12.6, which needs 525 or newer", "there is no torch for this driver"),
        ("13.2", "580.65.06", "built for CUDA 13.2 and says: ", "nvidia-smi shows whether the driver works"),
        ("13.2", "", "nvidia0, driver not loaded; torch 2.15.0+cu132", "nvidia-smi shows whether the driver works"),
    ],
)
def test_doctor_says_why_torch_cannot_use_a_gpu_and_what_to_install(cuda, driver, said, line, machine):
    report = machine(cuda, driver)
    [missing] = report.missing
    assert said in missing and missing.endswith(line)
    assert not report.ready and report.facts.get("driver", "") == driver


def test_doctor_reads_the_version_of_an_open_driver(machine):
    assert machine("13.2", "575.57.08", kernel_module="Open Kernel Module for x86_64").facts["driver"] == "575.57.08"


def test_doctor_takes_gpus_that_are_hidden_as_not_wanted(machine):
    report = machine("13.2", "550.54.15", gpus=2, CUDA_VISIBLE_DEVICES="")
    assert report.ready and not [line for line in report.optional if "torch" in line.split(" (")[0]]


def test_doctor_names_the_build_of_torch_and_says_where_it_is_larger_than_needed(machine):
    report = machine("13.2", gpus=0)
    assert report.facts["torch"] == "2.15.0+cu132, built for CUDA 13.2" and report.ready
    [line] = [line for line in report.optional if "smaller torch" in line]
    assert "built for CUDA 13.2, is 4.5 GB larger" in line and line.endswith(f"{OLD}cpu")
