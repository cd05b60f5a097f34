"""Small faults in the code, drawn from a seed, and whether the tests of their room see them.

``python -m tests.mutants --seed 1`` plants five in each room, one after the other, and runs the tests of ``ROOMS``:
about 25 minutes of one core. ``--rooms optim data`` and ``--count 2`` take less, ``--list`` only prints the draw.

The tests run on a copy of the checkout, so that no fault is ever in the checkout itself. What was seen is added to
``tests/mutants.toml``; a draw that was interrupted continues there. A fault that no test saw has an empty ``seen``:
write a test that sees it and plant it again (``--again``), or write into ``reason`` why it changes nothing.
"""

import argparse
import ast
import collections
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FOUND = ROOT / "tests/mutants.toml"
SECONDS = 300
"""Seconds after which the tests of a fault count as hung, on a busy machine."""
CPU_SECONDS = 100
"""CPU seconds after which a process of theirs does."""
MEMORY = 8 << 30
"""Bytes of such a process; a fault may ask for any number."""

ORACLE = "tests/oracle/test_oracle.py::test_a_run_is_what_a_plain_loop_computes"
CONFIG = "tests/unit/test_config.py"
LAYOUT = "tests/parity/test_layouts.py::test_every_layout_computes_what_one_device_computes"

WRONG_MODULES = "test_what_is_wrong_with_a_module_is_one_error"
SETTINGS_OF_EXPERTS = (
    "test_a_config_json_says_each_size_again",
    "test_rows_are_named_by_their_number",
)

RULES = (
    *("test_rules_pipeline", "test_rules_training", "test_rules_stability", "test_rules_kernels"),
    *("test_rules_reproducible", "test_rules_quantize", "test_rules_experts", "test_rules"),
    "test_rule_bounds",
)
DEFAULTS = f"{CONFIG}::test_a_default_changes_only_with_its_line"
LONG_PARSES = (
    f"--deselect={CONFIG}::test_a_wrong_flag_is_one_message_that_names_it",
    f"--deselect={CONFIG}::test_no_released_flag_disappears",
    f"--deselect={CONFIG}::test_the_torchtitan_name_of_a_setting_works_as_a_flag_and_in_toml",
)
ROOMS = {
    "config": {
        "rules_lora": ("test_lora", "test_rules_quantize"),
        "rules": RULES,
        "facts": RULES,
        "changes": ("test_changes", "test_data_boundary", "test_hostile_state", "test_from_hf"),
        "resolve": (
            *("test_config", "test_blocked_attention", "test_dtype_auto", "test_linear_cross_entropy"),
            *("test_rules_reproducible", "test_planner_memory", "test_pipeline_stages", *LONG_PARSES),
        ),
        "lora": ("test_lora", DEFAULTS),
        "low_precision": ("test_low_precision", "test_quantize", "test_rules_quantize"),
        "param_groups": ("test_optim_states", "test_optim", "test_rules_training"),
        "load": ("test_config", "test_from_hf", *LONG_PARSES),
        "toml_file": ("test_config", "test_from_hf", "test_help", "test_redact", *LONG_PARSES),
        "": (
            *("test_layout", "test_globs", "test_pipeline_stages", "test_rules", "test_config", "test_rules_experts"),
            *("test_typed", "test_rule_bounds", *LONG_PARSES),
        ),
    },
    "models": {
        "huggingface": (
            *("test_model", "test_from_hf"),
            *(f"tests/unit/test_qwen3_moe.py::{name}" for name in SETTINGS_OF_EXPERTS),
        ),
        "registry": (f"tests/unit/test_import_models.py::{WRONG_MODULES}", "test_model"),
        "config": ("test_model", "test_from_hf", "test_moe", f"{ORACLE}[sigmoid_experts]"),
        "layers": (
            *("test_model", "test_context_order", "test_import"),
            *(f"{ORACLE}[{case}]" for case in ("documents", "tied", "head_norms")),
        ),
        "": (
            *("test_moe", "test_model", "test_decode"),
            *(f"{ORACLE}[{case}]" for case in ("documents", "tied", "experts", "sigmoid_experts")),
        ),
    },
    "kernels": {
        "cpu": ("test_squared_norm", "test_blocked_attention", "test_kernels"),
        "linear_cross_entropy": ("test_linear_cross_entropy",),
        "grouped_mm": ("test_grouped_mm",),
        "choice": ("test_kernels", "test_rules_kernels", "test_attention_backends"),
        "": (
            *("test_rules_kernels", "test_attention_backends", "test_document_attention", "test_blocked_attention"),
            "test_linear_cross_entropy",
        ),
    },
    "parallel": {
        "context": ("test_context_order", "test_many_ranks", f"{LAYOUT}[llama3 cp2]"),
        "pipeline": ("test_pipeline_stages", f"{LAYOUT}[llama3 pp2+1f1b]"),
        "stages": ("test_pipeline_stages", f"{LAYOUT}[llama3 pp2+1f1b]"),
        "activation_checkpoint": ("test_activation_checkpoint", "test_activation_auto"),
        "allocate": ("test_activation_auto",),
        "compile": ("test_compile_folder", "test_activation_checkpoint"),
        "kernel_cache": ("test_compile_folder",),
        "reproducible": ("test_rules_reproducible", "test_exact_sums"),
        "lora": ("test_lora", f"{LAYOUT}[llama3 fsdp2_tp2]"),
        "init": ("test_model", f"{LAYOUT}[llama3 fsdp2_tp2]", f"{LAYOUT}[qwen3_moe fsdp2_ep2]"),
        "gradients": ("test_stability", "test_squared_norm", f"{LAYOUT}[llama3 fsdp2]"),
        "mesh": tuple(f"{LAYOUT}[llama3 {layout}]" for layout in ("cp2", "fsdp2_tp2", "hsdp2x2_accum4+deferred")),
        "runtime": (
            "test_launch_local",
            "test_shared_gpu",
            "test_effects",
            "test_cards",
            f"{LAYOUT}[llama3 fsdp2_tp2]",
        ),
        "": (
            *("test_async_tensor", "test_context_order", "test_pipeline_stages"),
            *(f"{LAYOUT}[llama3 {layout}]" for layout in ("fsdp2", "fsdp2_tp2", "hsdp2x2_accum4+deferred")),
            f"{LAYOUT}[qwen3_moe fsdp2_ep2]",
        ),
    },
    "quantize": {
        "frozen": ("test_lora",),
        "": ("test_quantize", "test_rules_quantize", "test_low_precision", "test_many_ranks"),
    },
    "data": {
        "chat": ("test_chat_files", "test_data_samples", "test_chat_masks"),
        "loader": ("test_data_loader", "test_data_boundary"),
        "sample_log": ("test_audit", "test_data_show"),
        "lock": ("test_lock", "test_data_prepare"),
        "prepare": ("test_data_prepare", "test_data_boundary"),
        "show": ("test_data_show",),
        "tokenizer": ("test_data_tokenizer", "test_tokenizer_files"),
        "": (
            *("test_data_corpus", "test_data_documents", "test_data_stream", "test_data_checked", "test_data_tokens"),
            *("test_data_tokenizer", "test_data_boundary", "test_data_samples", "test_data_prepare"),
        ),
    },
    "optim": {
        "": (
            *("test_optim", "test_optim_states", "test_many_ranks"),
            *(f"{ORACLE}[{case}]" for case in ("groups", "tied_decayed", "muon", "muon_original", "8bit")),
        ),
    },
    "checkpoint": {
        "kept": ("test_kept_tokenizer",),
        "manifest": ("test_checkpoint_format", "test_checkpoint_folder", "test_hostile_files", "test_checkpoint_cli"),
        "pieces": ("test_checkpoint_pieces", "test_checkpoint_format", "test_checkpoint_saver"),
        "contents": ("test_checkpoint_pieces",),
        "plain": ("test_checkpoint_pieces", "test_import", "test_export"),
        "load": ("test_checkpoint_pieces", "test_checkpoint_saver", "test_newest", "test_hostile_state"),
        "": (
            *("test_checkpoint_folder", "test_checkpoint_disk", "test_checkpoint_saver", "test_checkpoint_cli"),
            *("test_checkpoint_url", "test_newest", "test_hostile_state", "test_checkpoint_format"),
        ),
    },
    "interop": {
        "adapters": ("test_lora", "test_foreign_weights"),
        "peft": ("test_lora", "test_foreign_weights"),
        "kept": ("test_kept_tokenizer",),
        "casting": ("test_export",),
        "context": ("test_export",),
        "unpickle": ("test_hostile", "test_convert"),
        "safetensors": ("test_foreign_weights", "test_hostile_files", "test_hostile", "test_import"),
        "weights": ("test_foreign_weights", "test_import", "test_kept_tokenizer"),
        "": (
            *("test_foreign_weights", "test_convert", "test_import_gguf", "test_hostile", "test_hostile_files"),
            "test_import",
        ),
    },
    "train": {
        "stability": ("test_stability", "test_rules_stability", "test_many_ranks"),
        "sdc": ("test_many_ranks",),
        "saving": ("test_saving", "test_newest"),
        "checkpoints": ("test_saving", "test_newest"),
        "inputs": ("test_from_hf", "test_data_boundary", "test_foreign_weights", "test_import", "test_kept_tokenizer"),
        "setup": (
            "test_dtype_auto",
            "test_blocked_attention",
            "test_document_attention",
            "test_run_file",
            "test_cards",
        ),
        "loop": (
            *("test_saving", "test_tidied"),
            *(f"{ORACLE}[{case}]" for case in ("last_partial_batch", "validation")),
        ),
        "effects": ("test_effects", "test_cards"),
        "tools": ("test_cards", "test_planner_runs"),
        "": (
            *("test_squared_norm", "test_loads", "test_effects", "test_metrics", "test_stability", "test_saving"),
            "test_many_ranks",
            *(f"{ORACLE}[{case}]" for case in ("causal", "last_partial_batch", "validation", "accumulation")),
        ),
    },
    "tools/plan": {
        "search": ("test_planner_auto", "test_planner_search"),
        "legal": ("test_planner_auto", "test_planner_search"),
        "render": ("test_planner_output",),
        "remedies": ("test_planner_output",),
        "validate": ("test_planner_validate",),
        "fit": ("test_planner_validate",),
        "explain": ("test_explaining", "test_planner_output"),
        "plan": ("test_planner_auto", "test_planner_cli"),
        "": (
            *("test_planner_golden", "test_planner_memory", "test_planner_time", "test_planner_auto"),
            *("test_planner_runs", "test_planner_cli", "test_planner_validate"),
        ),
    },
    "tools/evaluate": {"": ("test_evaluate", "test_lm_eval_tasks")},
}
"""Tests that a developer of a room runs: files of ``tests/unit``, or words of pytest, by what the paths of the room's
files begin with. They take at most 25 CPU seconds, on a quiet machine and without those that are ``full``, ``matrix``
or ``slow``.
"""
MARKS = "not full and not matrix and not slow and not real"

SWAPS = {"sum": "mean", "mean": "sum", "max": "min", "min": "max", "amax": "amin", "any": "all", "all": "any"}
TURNED = {ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
TURNED |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OFF_BY_ONE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
LOGS = {"log", "_log", "status", "warnings"}
WORDS = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
"""What only words depend on, or what has no other form."""


class Change(NamedTuple):
    """A text that replaces another in a file. Places are bytes."""

    kind: str
    line: int
    start: int
    stop: int
    text: str


class Mutant(NamedTuple):
    """A change of a file, with the line before and after."""

    room: str
    file: str
    change: Change
    was: str
    now: str


def changes_in(text: str) -> list[Change]:
    """All changes that the generator knows for a module."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def change(kind: str, first: ast.AST, last: ast.AST, new: str) -> Change:
        start = starts[first.lineno - 1] + first.col_offset
        stop = starts[last.end_lineno - 1] + last.end_col_offset
        return Change(kind, first.lineno, start, stop, new)

    found = []
    for node in nodes(ast.parse(text)):
        found += [change(*words) for words in replacements(node, text)]
    return found


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of messages, annotations and decorators."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if (
                isinstance(child, ast.AST)
                and not isinstance(child, WORDS)
                and not is_log(child)
                and not is_strict(child)
            ):
                yield from nodes(child)


def is_log(node: ast.AST) -> bool:
    called = getattr(node, "func", None)
    return isinstance(called, ast.Attribute) and getattr(called.value, "id", "") in LOGS


def is_strict(node: ast.AST) -> bool:
    """Whether ``node`` is ``strict=True`` of a ``zip``, which asserts that lengths are equal."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def replacements(node: ast.AST, text: str) -> Iterator[tuple[str, ast.AST, ast.AST, str]]:
    """Kind, first and last node of what is replaced, and what stands there then."""
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        yield "constant", node, node, str(other_number(node.value))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left = ast.unparse(node.left)
        right = ast.unparse(node.comparators[0])
        for table in (TURNED, OFF_BY_ONE):
            if type(node.ops[0]) in table:
                yield "comparison", node, node, f"{left} {table[type(node.ops[0])]} {right}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div) and is_number(node):
        yield "term", node, node, f"({ast.unparse(node.left)})"
    if isinstance(node, ast.Call):
        yield from of_call(node)
    if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Constant) and node.returns.value is None:
        for statement in node.body:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                yield "return", statement, statement, "return"


def other_number(value: bool | int | float) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else 2 * value or 1.0


def is_number(node: ast.BinOp) -> bool:
    """Whether no side is a text."""
    texts = (ast.JoinedStr, ast.Constant)
    sides = [part for side in (node.left, node.right) for part in ast.walk(side) if isinstance(part, texts)]
    return not any(isinstance(part, ast.JoinedStr) or isinstance(part.value, str) for part in sides)


def of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST, ast.AST, str]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "detach":
        yield "detach", node, node, ast.unparse(node.func.value)
    is_method = isinstance(node.func, ast.Attribute)
    if name in SWAPS and (is_method or name not in ("sum", "mean")):
        called = ast.unparse(node.func)
        yield "swap", node.func, node.func, called.removesuffix(name) + SWAPS[name]
    for word in node.keywords:
        if word.arg == "dim" and isinstance(word.value, ast.Constant | ast.UnaryOp):
            yield "dim", word.value, word.value, "1" if ast.unparse(word.value) == "0" else "0"
    for value in node.args:
        if is_method and ast.unparse(value) == "-1":
            yield "dim", value, value, "0"


def drawn(room: str, seed: int, count: int) -> list[Mutant]:
    """``count`` mutants of a room: each kind of change is as likely as any other."""
    chance = random.Random(f"{seed} {room}")
    waiting = collections.defaultdict(list)
    for path in sorted((ROOT / "crius" / room).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for change in changes_in(text):
            waiting[change.kind].append((path, text, change))
    found: list[Mutant] = []
    while len(found) < count:
        kind = chance.choice(sorted(kind for kind in waiting if waiting[kind]))
        path, text, change = waiting[kind].pop(chance.randrange(len(waiting[kind])))
        new = planted(text, change)
        was, now = (" ".join(lines.splitlines()[change.line - 1].split()) for lines in (text, new))
        if compiles(new):
            found.append(Mutant(room, path.relative_to(ROOT).as_posix(), change, was, now))
    return found


def planted(text: str, change: Change) -> str:
    content = text.encode()
    return (content[: change.start] + change.text.encode() + content[change.stop :]).decode()


def compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


class Copy:
    """A copy of the checkout, with what is not committed, in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = 0
        listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def seen_by(self, mutant: Mutant) -> tuple[str, float]:
        """As ``failure``, with the mutant planted meanwhile."""
        path = self.folder / mutant.file
        text = path.read_text(encoding="utf-8")
        try:
            self._write(path, planted(text, mutant.change))
            return self.failure(words_for(mutant))
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        self._runs += 1
        os.utime(path, (self._runs, self._runs))  # a time of its own: compiled files are found by time and size

    def failure(self, tests: Sequence[str]) -> tuple[str, float]:
        """The first of some tests that fails, empty if none does, and the CPU seconds of the tests.

        Tests that hang are ended, which counts as a failure: ``exit code -9``, or ``-24`` if they compute.
        """
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--timeout", "60", "-m", MARKS]
        command += tests
        environ = {**os.environ, "PYTHONPATH": str(self.folder)}
        with (self.folder / "tests.log").open("w+") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=limit,
            )
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            log.seek(0)
            first = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", log.read(), re.MULTILINE)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise ValueError(f"no test of {tests} runs with -m '{MARKS}'")
        if code == 0:
            return "", seconds
        return first[1] if first else f"exit code {code}", seconds


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def words_for(mutant: Mutant) -> list[str]:
    """Words of pytest: the tests that a room names for a file."""
    path = mutant.file.removeprefix(f"crius/{mutant.room}/")
    words = next(words for start, words in ROOMS[mutant.room].items() if path.startswith(start))
    return [word if "/" in word else f"tests/unit/{word}.py" for word in words]


def known(path: Path = FOUND) -> list[dict]:
    """The entries of the list."""
    return tomllib.loads(path.read_text(encoding="utf-8"))["mutants"] if path.exists() else []


def save(entries: list[dict], path: Path = FOUND) -> None:
    lines = ["# Faults that `python -m tests.mutants --seed N` planted, and the test that saw each"]
    for entry in entries:
        lines += ["", "[[mutants]]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def identity(entry: dict) -> tuple:
    return tuple(entry[key] for key in ("seed", "file", "was", "now"))


def record(seed: int, mutant: Mutant, seen: str, reason: str = "") -> dict:
    return {
        "seed": seed,
        "room": mutant.room,
        "file": mutant.file,
        "line": mutant.change.line,
        "kind": mutant.change.kind,
        "was": mutant.was,
        "now": mutant.now,
        "seen": seen,
        "reason": reason,
    }


def plant(copy: Copy, mutants: list[Mutant], seed: int, again: bool) -> None:
    """Plant the mutants of one room that the list does not have; ``again``: and those that were not seen."""
    entries = {identity(entry): entry for entry in known()}
    waiting = []
    for mutant in mutants:
        entry = entries.get(identity(record(seed, mutant, "")))
        if entry is None or (again and not entry["seen"]):
            waiting.append(mutant)
    if not waiting:
        return
    tests = sorted({word for mutant in waiting for word in words_for(mutant)})
    failed, seconds = copy.failure(tests)
    print(f"{waiting[0].room}: {seconds:.1f} CPU seconds without a fault", flush=True)
    if failed:
        sys.exit(f"the tests of {waiting[0].room} fail without a fault: {failed}")
    for mutant in waiting:
        seen, seconds = copy.seen_by(mutant)
        key = identity(record(seed, mutant, seen))
        entries[key] = record(seed, mutant, seen, entries.get(key, {}).get("reason", ""))
        save(list(entries.values()))
        print(f"  {seconds:5.1f} s  {mutant.file}:{mutant.change.line}  {seen or 'UNSEEN'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--count", type=int, default=5, help="faults of each room")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--again", action="store_true", help="plant those that no test saw once more")
    asked = parser.parse_args()
    draws = {room: drawn(room, asked.seed, asked.count) for room in asked.rooms}
    if asked.list:
        for mutant in (mutant for found in draws.values() for mutant in found):
            print(f"{mutant.file}:{mutant.change.line} {mutant.change.kind}\n  - {mutant.was}\n  + {mutant.now}")
        return
    with tempfile.TemporaryDirectory(prefix="crius-mutants-") as folder:
        copy = Copy(Path(folder))
        for found in draws.values():
            plant(copy, found, asked.seed, asked.again)
    entries = [entry for entry in known() if entry["seed"] == asked.seed and entry["room"] in asked.rooms]
    print(f"{sum(bool(entry['seen']) for entry in entries)} of {len(entries)} seen")


if __name__ == "__main__":
    main()
