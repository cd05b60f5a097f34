"""``make test-torch``: which tests it runs, how it counts them, and that it leaves no environment."""

import os
import subprocess
import sys

import other_torch
import pytest
from harness import ROOT

FAILURES = 'failures="1" errors="1"'
JUNIT = f'<testsuites><testsuite tests="9" {FAILURES} skipped="3"/></testsuites>'
# stands for the Python of the environment: says its torch, installs in silence, and runs tests as ``{tests}`` says
FAKE = """#!/bin/bash
case "$*" in
    -c*) echo 9.9.0+cu999 ;;
    *"-m pytest"*) for word; do case $word in --junitxml=*) file=${{word#--junitxml=}} ;; esac; done; {tests} ;;
esac
"""
PASSES = f"echo '{JUNIT.replace(FAILURES, '')}' > $file"


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Makes the folder of torch 9.9.0, as an earlier ``KEEP=1`` leaves it."""

    def make(tests):
        python = tmp_path / "build/torch-9.9.0/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE.format(tests=tests))
        python.chmod(0o755)
        monkeypatch.setattr(other_torch, "ROOT", tmp_path)
        return python.parent.parent

    return make


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["other_torch.py", "9.9.0", *arguments])
    return other_torch.main()


@pytest.mark.parametrize("keeps", [True, False])
def test_it_prints_a_row_and_removes_the_environment_unless_told(keeps, environment, monkeypatch, capfd):
    folder = environment(PASSES)
    assert call(monkeypatch, *["--keep"] * keeps) == 0
    cells = capfd.readouterr().out.splitlines()[-1].split(" | ")
    assert cells[:5] == ["| 9.9.0+cu999", *["6 passed, 3 skipped"] * 4]
    assert folder.exists() == keeps


def test_a_failure_is_in_the_row_and_in_the_exit_code(environment, monkeypatch, capfd):
    environment(f"echo '{JUNIT}' > $file; exit 1")
    assert call(monkeypatch) == 1
    assert "| 4 passed, 2 failed, 3 skipped |" in capfd.readouterr().out


def test_tests_that_take_too_long_are_ended_and_said(environment, monkeypatch, capfd):
    environment("exec sleep 60")
    assert call(monkeypatch, "--seconds", "1") == 1
    assert capfd.readouterr().out.count("no result, out of time") == 4


def test_the_fake_gpu_runs_generated_code_too():
    assert other_torch.parts()["cuda_fake"] == ["tests/cuda_fake", "-m", "slow or not slow"]


def test_unit_tests_are_those_that_import_torch():
    unit = other_torch.parts()["unit"]
    names = {path.rpartition("/")[2] for path in unit}
    assert {"test_async_tensor.py", "test_compile_folder.py", "test_startup.py"} <= names
    assert not {"test_layers.py", "test_rules_pipeline.py", "test_other_torch.py"} & names


def test_make_takes_the_version_and_says_which_torch_it_installed():
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # make started us too
    options = {"cwd": ROOT, "env": environ, "capture_output": True, "text": True}
    shown = subprocess.run(["make", "-n", "test-torch", "VERSION=9.9.0", "KEEP=1"], **options)
    assert shown.stdout.split()[1:] == ["tests/other_torch.py", "9.9.0", "--keep"]
    setup = subprocess.run(["make", "-nB", "setup"], **options)
    assert "crius doctor | grep -E '^(torch |" in setup.stdout
