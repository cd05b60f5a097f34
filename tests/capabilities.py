"""Which family can do what, as tests proved it: the page docs/reference/capabilities.md, and a pytest plugin.

``--passed FILE`` adds the tests of a session that prove something and passed to a file. ``make test-all`` runs all of
its sessions so, and then ``python tests/capabilities.py FILE`` writes ``tests/capabilities.toml``.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

from crius.cli.app import facts_of
from crius.config import rules
from crius.config.run import RunConfig, replace_fields
from crius.errors import ConfigError
from crius.models.registry import SPECS

FILE = Path(__file__).with_suffix(".toml")
KNOWN = sorted(SPECS, key=len, reverse=True)  # before a test adds a family
LAYOUTS = r"parity/test_layouts.py::test_every_layout_computes_what_one_device_computes\[(?P<kind>\w+) "
PLANS = (
    "unit/test_planner_memory.py::test_state_is_exact_activations_within_5_and_the_peak_within_8_percent_of_the_dry_run"
)
FAMILIES = r"parity/test_families.py::test_"
PROOFS = {
    "layouts": {LAYOUTS + r"(?!.*(compile|float8|mxfp8|lora|nf4|int8))": ""},
    "compile": {LAYOUTS + ".*compile": ""},
    "float8": {LAYOUTS + ".*float8": ""},
    "MXFP8": {LAYOUTS + ".*mxfp8": ""},
    "LoRA": {LAYOUTS + ".*lora": ""},
    "SFT": {
        "distributed/test_chat_runs.py::test_packed_conversations_and_a_last_batch_of_padding_give_one_curve": "llama3"
    },
    "generate": {
        FAMILIES + r"greedy_tokens_are_those_of_transformers\[(?P<kind>\w+)": "",
        r"parity/test_huggingface.py::test_greedy_tokens_equal_hugging_face\[(?P<kind>\w+)": "",
    },
    "evaluate": {
        "unit/test_evaluate.py::test_scores_are_those_of_each_text_alone": "llama3",
        r"real/test_evaluations.py::test_lm_eval_on_the_export_gives_the_same_figures\[(?P<kind>\w+)": "",
    },
    "import": {
        FAMILIES + r"logits_are_those_of_transformers\[(?P<kind>\w+)": "",
        r"parity/test_pretrained.py::test_an_import_has_the_bits_and_the_logits_of_the_source\[(?P<kind>\w+)": "",
    },
    "export": {
        FAMILIES + r"an_export_has_the_tensors_and_settings_that_transformers_wrote\[(?P<kind>\w+)": "",
        r"unit/test_export.py::test_what_transformers_saved_comes_back\[(?P<kind>\w+)": "",
    },
    "GGUF": {r"unit/test_import_gguf.py::test_tensors_come_back_as_the_model_has_them\[(?P<kind>\w+)": ""},
    "plan": {
        PLANS + r"\[(?!experts|gemma|olmo)": "llama3",
        PLANS + r"\[(?P<kind>(gemma|olmo)\d)_": "",
        PLANS + r"\[experts": "qwen3_moe",
        r"unit/test_planner_cli.py::test_models_with_experts_are_planned_by_name_and_flavor_or_in_one_word\[\w+-"
        r"(?P<kind>\w+)/": "",
    },
}
"""Capabilities, and patterns of the ids of tests that prove them below ``tests``, for a family that is named here, or
in the id as ``kind``."""

ASKED = {
    "compile": {"compile.enable": True},
    "float8": {"quantize.dense.float8.enable": True},
    "MXFP8": {"quantize.dense.mxfp8.enable": True},
    "LoRA": {"lora.rank": 4, "checkpoint.enable": False},
}
"""Settings that a capability needs, which a rule may refuse."""


def family_of(kind):
    """The family that ``kind``, a name with its variant such as ``qwen3_moe_tied``, belongs to; empty if unknown."""
    for name in (*KNOWN, "llama"):
        if f"{kind}_".startswith(f"{name}_"):
            return "llama3" if name == "llama" else name
    return ""


def proven_by(test):
    """Capabilities and families that a test proves, by its id."""
    for capability, patterns in PROOFS.items():
        for pattern, family in patterns.items():
            if match := re.match(f"tests/{pattern}", test):
                name = family or family_of(match["kind"])
                if name:
                    yield capability, name


def refusal(settings, family):
    """Why a rule refuses a run of a family with ``settings``; empty if none does."""
    model = {"model.name": family, "model.flavor": next(iter(SPECS[family].flavors)), "training.device": "cpu"}
    try:
        rules.check(facts_of(replace_fields(RunConfig(), {**model, **settings}), 1, None, is_dry=True))
    except ConfigError as error:
        return error.what
    return ""


def read_from_gguf():
    """Families whose GGUF files are imported; a Mistral's is a Llama's."""
    from crius.tools.convert.gguf_file import _MODELS

    return {"mistral", *(architecture.name for architecture in _MODELS.values())}


def recorded():
    """What ``capabilities.toml`` says: the commit, and the ids of the tests that passed there."""
    return tomllib.loads(FILE.read_text())


def page():
    """The table in Markdown."""
    found = recorded()
    proofs = {}
    for test in found["passed"]:
        for cell in proven_by(test):
            proofs.setdefault(cell, []).append(test)
    rows = [["family", *PROOFS], ["---"] * (len(PROOFS) + 1)]
    rows += [[f"`{family}`", *(_cell(capability, family, proofs) for capability in PROOFS)] for family in sorted(SPECS)]
    tests = [
        f"- {capability}: {', '.join(f'`tests/{name}`' for name in dict.fromkeys(map(_function, patterns)))}"
        for capability, patterns in PROOFS.items()
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"Tests passed at commit `{found['commit']}`.\n\n{table}\n\n" + "\n".join(tests)


def _cell(capability, family, proofs):
    if tests := proofs.get((capability, family)):
        return f"proven ({len(tests)})"
    if capability == "GGUF" and family not in read_from_gguf():
        return "refused: its architecture is not imported"
    why = refusal(ASKED[capability], family) if capability in ASKED else ""
    return f"refused: {why}" if why else ""


def _function(pattern):
    return pattern.split(r"\[")[0]


def read(file):
    """The commit of the sessions that wrote ``file``, and the tests that passed in them."""
    return json.loads(file.read_text()) if file.exists() else {"commit": "", "passed": []}


def write(passed, commit):
    """Write ``capabilities.toml``."""
    lines = "".join(f"    {json.dumps(test)},\n" for test in sorted(passed))
    FILE.write_text(f'# written by make test-all\ncommit = "{commit}"\npassed = [\n{lines}]\n')


class Passed:
    """Notes which tests passed, and which of those that prove something exist.

    Args:
        file: where the tests that passed are added; None: nowhere. Tests of another commit leave it.
        commit: the commit that is tested.
    """

    def __init__(self, file, commit):
        self.file = file
        self.commit = commit
        self.collected = set()
        self.passed = set()
        self.failed = set()

    def pytest_itemcollected(self, item):
        self.collected.add(item.nodeid)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed and any(proven_by(report.nodeid)):
            self.passed.add(report.nodeid)
        elif report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self):
        if self.file:
            before = read(self.file)
            earlier = before["passed"] if before["commit"] == self.commit else []
            passed = {*earlier, *self.passed} - self.failed
            self.file.write_text(json.dumps({"commit": self.commit, "passed": sorted(passed)}))


def pytest_addoption(parser):
    parser.addoption("--passed", help="add the tests that prove a capability and passed to this file")


def pytest_configure(config):
    import suites

    file = config.getoption("--passed")
    is_worker = hasattr(config, "workerinput")
    commit = suites.git("describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes")
    plugin = Passed(Path(file) if file and not is_worker else None, commit or "unknown")
    config.pluginmanager.register(plugin, "passed")


if __name__ == "__main__":
    write(**read(Path(sys.argv[1])))
