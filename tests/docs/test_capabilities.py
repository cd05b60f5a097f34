"""The table of what works: each cell is a test that passed, is still there, or a rule."""

import ast
import functools
import re
from types import SimpleNamespace

import capabilities
import pytest
from harness import ROOT

from crius.models.registry import SPECS

pytestmark = pytest.mark.quick


@functools.cache
def functions(file):
    """Names of the tests in a file; empty if there is none."""
    place = ROOT / file
    tree = ast.parse(place.read_text() if place.exists() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_recorded_still_exists(request):
    """By its function in its file; by its parameters too, where this session collected the whole file."""
    plugin = request.config.pluginmanager.get_plugin("passed")
    whole = set() if any("::" in word for word in request.config.args) else plugin.collected
    files = {test.split("::")[0] for test in whole}
    gone = []
    for test in capabilities.recorded()["passed"]:
        file, _, name = test.partition("::")
        if name.split("[")[0] not in functions(file) or (file in files and test not in whole):
            gone.append(test)
    assert gone == [], "make test-all writes tests/capabilities.toml"


def test_each_recorded_test_proves_a_capability_of_a_family():
    found = capabilities.recorded()
    assert re.fullmatch("[0-9a-f]{12}", found["commit"])
    assert [test for test in found["passed"] if not list(capabilities.proven_by(test))] == []


@pytest.mark.parametrize("pattern", [one for patterns in capabilities.PROOFS.values() for one in patterns])
def test_each_pattern_is_of_a_test(pattern):
    file, _, name = f"tests/{pattern}".partition("::")
    assert name.split("\\[")[0] in functions(file)


@pytest.mark.parametrize(
    ("test", "want"),
    [
        (
            "parity/test_layouts.py::test_every_layout_computes_what_one_device_computes[gemma3 fsdp2]",
            ["layouts gemma3"],
        ),
        ("parity/test_layouts.py::test_every_layout_computes_what_one_device_computes[sigmoid_moe tp2]", []),
        (
            "parity/test_layouts.py::test_every_layout_computes_what_one_device_computes[qwen3 1+compile]",
            ["compile qwen3"],
        ),
        ("parity/test_families.py::test_greedy_tokens_are_those_of_transformers[phi3_window]", ["generate phi3"]),
        ("parity/test_families.py::test_logits_are_those_of_transformers[llama_yarn]", ["import llama3"]),
        ("parity/test_families.py::test_logits_are_those_of_transformers[cwm]", []),
        ("unit/test_export.py::test_what_transformers_saved_comes_back[qwen3_moe-changes6]", ["export qwen3_moe"]),
        ("unit/test_export.py::test_casts_are_those_of_torch[F64-F32]", []),
    ],
)
def test_a_test_proves_what_its_id_says(test, want):
    found = [f"{capability} {family}" for capability, family in capabilities.proven_by(f"tests/{test}")]
    assert found == want


def test_only_what_passed_or_is_refused_has_a_word_in_the_table(monkeypatch):
    proof = "tests/parity/test_families.py::test_logits_are_those_of_transformers[gemma3]"
    monkeypatch.setattr(capabilities, "recorded", lambda: {"commit": "0" * 12, "passed": [proof]})
    monkeypatch.setattr(capabilities, "refusal", lambda settings, family: "no" if family == "phi3" else "")
    monkeypatch.setattr(capabilities, "read_from_gguf", lambda: {*SPECS} - {"phi3"})
    rows = [line.strip("| ").split("|") for line in capabilities.page().splitlines() if line.startswith("| `")]
    cells = {row[0].strip("` "): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    words = {family: [] for family in SPECS} | {
        "gemma3": ["proven (1)"],
        "phi3": [*["refused: no"] * len(capabilities.ASKED), "refused: its architecture is not imported"],
    }
    assert cells == words


def test_a_rule_that_refuses_is_quoted():
    both = {"lora.rank": 4, "quantize.dense.float8.enable": True, "checkpoint.enable": False}
    assert "does not go with" in capabilities.refusal(both, "gemma3")
    assert capabilities.refusal({}, "gemma3") == ""


def test_a_session_adds_what_passed_at_its_commit(tmp_path, monkeypatch):
    first, second = (
        f"tests/parity/test_families.py::test_logits_are_those_of_transformers[{name}]" for name in ("olmo2", "olmo3")
    )
    for commit, test, outcome in (
        ("a" * 12, first, True),
        ("b" * 12, first, True),
        ("b" * 12, second, True),
        ("b" * 12, second, False),
    ):
        plugin = capabilities.Passed(tmp_path / "passed.json", commit)
        for when in ("setup", "call", "teardown"):
            is_failed = when == "teardown" and not outcome
            plugin.pytest_runtest_logreport(
                SimpleNamespace(nodeid=test, when=when, passed=not is_failed, failed=is_failed)
            )
        plugin.pytest_sessionfinish()
    monkeypatch.setattr(capabilities, "FILE", tmp_path / "capabilities.toml")
    capabilities.write(**capabilities.read(tmp_path / "passed.json"))
    assert capabilities.recorded() == {"commit": "b" * 12, "passed": [first]}


def test_every_session_of_test_all_notes_what_passed_and_the_last_line_writes_it():
    text = (ROOT / "Makefile").read_text()
    recipe = text.split("\ntest-all:")[1].split("\n\n")[0].splitlines()[1:]
    assert recipe[-1].strip() == "$(BIN)/python tests/capabilities.py $(PASSED)"
    assert all("$(REST)" in line for line in recipe[:-1])
    assert all("--passed $(PASSED)" in re.search(f"^{name} = .*", text, re.MULTILINE)[0] for name in ("PYTEST", "REST"))
