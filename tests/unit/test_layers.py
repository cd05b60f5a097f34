"""Who may import whom, where, and how large files, functions and rooms may be: the architecture's sections 2 and 3."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import forms
import pytest
import tokens
from forms import statements, tree_of

ROOT = Path(__file__).parent.parent.parent

TOOLS = (
    "plan",
    "dry_run",
    "tune",
    "verify",
    "bench",
    "faults",
    "report",
    "data_audit",
    "generate",
    "evaluate",
    "convert",
)
LAYER = {
    **{
        "config": 0,
        "models": 1,
        "kernels": 1,
        "tokens": 1,
        "in_process": 4,
        "cli": 5,
        "api": 6,
        "__main__": 6,
        "__init__": 7,
    },
    **dict.fromkeys(("cache_lock", "host", "hub", "plugins", "run_file", "shards", "signals"), -1),
    # ground of the ground: shards has what it says of parts too, tables are printable, run_file uses new_folder
    **dict.fromkeys(("named", "new_folder", "redact", "untrusted", "waiting"), -2),
    **dict.fromkeys(("units", "silence", "strict_json", "table"), -1),
    **dict.fromkeys(("parallel", "quantize", "data", "optim", "checkpoint", "metrics"), 2),
    "interop": 3,
    **dict.fromkeys(("train", "launch"), 3),
    **{f"tools/{name}": 4 for name in TOOLS},
}
# (importer, what it may import although the layers alone would not allow it); the trainer never imports tools
ARROWS = [
    *[("models", "kernels"), ("train", "launch.environment"), ("train", "launch.status")],
    ("train", "launch.stop"),
    ("tools/bench", "tools.plan"),  # calibrates it
    ("tools/verify", "tools.faults"),
    ("tools/verify", "tools.data_audit"),
    ("train", "interop"),
    ("tools/evaluate", "tools.generate"),  # opens the model
    ("tools/verify", "tools.plan.fit"),
    ("tools/verify", "tools.generate"),  # opens the model
    ("tools/report", "tools.plan"),
    ("tools/tune", "tools.convert"),
    ("tools/tune", "tools.generate"),
]
OF_LAUNCH = ("config", "host", "plugins", "redact", "run_file", "signals", "table", "untrusted")
PRIVATE = ("config.load", "config.rules", "config.toml_file")  # sections, run and resolve are for all
# (importers, what they may not import although it lies below them)
CLOSED = [
    ("interop", "data"),
    *[(name, "config") for name in ("models", "kernels")],
    *[(name, part) for name, level in LAYER.items() if level == 2 for part in PRIVATE],
]
LAZY_ROOMS = (
    *(
        f"cli/{name}.py"
        for name in (
            "app",
            "bench",
            "chat",
            "checkpoint",
            "evaluating",
            "exporting",
            "generate",
            "importing",
            "plan",
            "report",
        )
    ),
    *(f"cli/{name}.py" for name in ("settings", "train", "tune", "verify")),
    "models/registry.py",
    "plugins.py",  # the list of packages
    "models/decoder.py",  # experts, whose kernels import sympy for seconds before a first token
    "__main__.py",
    "api.py",
)
# pyproject.toml's extras, and what comes with torch but is only for some
OPTIONAL = {"datasets", "fsspec", "gguf", "huggingface_hub", "jinja2", "lm_eval", "matplotlib", "peft", "tokenizers"}
OPTIONAL |= {
    "wandb",
    "pyarrow",
    "rensa",
    "tensorboard",
    "tiktoken",
    "torchao",
    "transformers",
}
OPTIONAL |= {
    "torch.nn.attention.varlen",
    "torch.utils.tensorboard",
    "torch._inductor.lowering",
    "torch._inductor.cpp_builder",
    "zstandard",
}

MOST_LINES_OF_FILE = 600
MOST_LINES_OF_FUNCTION = 60

TORCH_FREE = (
    *("errors.py", "api.py", "cli/*.py", "config/*.py", "models/config.py", "models/description.py", "models/plan.py"),
    *(
        f"checkpoint/{name}.py"
        for name in (
            "disk",
            "files",
            "folder",
            "manifest",
            "names",
            "pieces",
            "remote_disk",
            "state",
            "tiles",
            "whereabouts",
        )
    ),
    "interop/*.py",
    "tokens/*.py",
    "tools/convert/*.py",
    "tools/data_audit/*.py",
    "tools/bench/result.py",
    "new_folder.py",
    "run_file.py",
    "plugins.py",
    "redact.py",
    "strict_json.py",
    "table.py",
    "metrics/gpus.py",
    "units.py",
    "untrusted.py",
    *(
        "models/registry.py",
        "models/spec.py",
        "models/*/__init__.py",
        "launch/*.py",
        "data/*.py",
        "data/chat/*.py",
        "train/inputs.py",
    ),
    "train/saving.py",
    "tools/plan/*.py",
    "tools/report/*.py",
)
NEEDS_TORCH = (
    "launch/doctor.py",
    "tools/convert/dcp_out.py",
    "tools/convert/logits.py",
    "data/loader.py",
    "tools/plan/out_of_memory.py",
    "tools/plan/watch.py",
)


def trees(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Path below the package, and syntax tree, of every module."""
    for file in sorted((root / "crius").rglob("*.py")):
        yield file.relative_to(root / "crius").as_posix(), tree_of(file.read_text())


def imported(node: ast.AST) -> list[str]:
    """Dotted names that a node imports; ``from a import b`` is a.b, whether b is a module or not."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names]
    return []


def is_below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def room_of(path: str) -> str:
    """The room of a path below ``crius``: a package, or one of those of tools."""
    parts = path.removesuffix(".py").split("/")
    return "/".join(parts[: 2 if parts[0] == "tools" else 1])


def may_import(importer: str, target: str) -> bool:
    """Whether a module of the room ``importer`` may import ``target``, a name below ``crius``."""
    package = room_of(target.replace(".", "/"))
    if package == importer or any(importer == a and is_below(target, b) for a, b in ARROWS):
        return True
    if any(importer == a and is_below(target, b) for a, b in CLOSED):
        return False
    if importer == "launch" and package not in OF_LAUNCH:
        return False
    return importer in LAYER and package in LAYER and LAYER[package] < LAYER[importer]


def wrong_directions(root: Path) -> list[str]:
    found = []
    for path, tree in trees(root):
        importer = room_of(path)
        for name in (name for node in statements(tree) for name in imported(node)):
            if name.startswith("."):
                found.append(f"{path}: relative import {name}")
            elif is_below(name, "crius") and not is_below(name, "crius.errors") and name != "crius":
                target = name.removeprefix("crius.")
                if target != "__version__" and not may_import(importer, target):
                    found.append(f"{path}: {name}")
    return found


def needs_optional(root: Path, name: str) -> bool:
    """Whether an imported name is an optional package, or of a module of ours that imports one at its top."""
    if any(is_below(name, package) for package in OPTIONAL):
        return True
    file = root / (name.rpartition(".")[0].replace(".", "/") + ".py")
    if not (is_below(name, "crius") and file.exists()):
        return False
    top = [name for node in tree_of(file.read_text()).body for name in imported(node)]
    return any(is_below(name, package) for name in top for package in OPTIONAL)


def lazy_imports(root: Path) -> list[str]:
    found = set()
    for path, tree in trees(root):
        lines = (root / "crius" / path).read_text().splitlines()
        functions = [node for node in statements(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for node in (node for function in functions for node in statements(function) if imported(node)):
            marked = "# noqa: PLC0415" in lines[node.lineno - 1]
            excused = marked and all(needs_optional(root, name) for name in imported(node))
            if path not in LAZY_ROOMS and not excused:
                found.add(f"{path}:{node.lineno}")
    return sorted(found)


def too_long(root: Path) -> list[str]:
    found = []
    for path, tree in trees(root):
        length = len((root / "crius" / path).read_text().splitlines())
        if length > MOST_LINES_OF_FILE:
            found.append(f"{path}: {length} lines")
        for node in statements(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.lineno + 1
                if length > MOST_LINES_OF_FUNCTION:
                    found.append(f"{path}:{node.name}: {length} lines")
    return found


def torch_users(root: Path) -> list[str]:
    """Modules of TORCH_FREE that cannot be imported in a process without torch."""
    files = {file for pattern in TORCH_FREE for file in (root / "crius").glob(pattern)}
    files -= {root / "crius" / path for path in NEEDS_TORCH}
    names = [".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in sorted(files)]
    code = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        print(name, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        cwd=root,
        text=True,
        capture_output=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    return done.stdout.splitlines()


def test_imports_go_down():
    assert wrong_directions(ROOT) == []


def test_functions_import_nothing_but_optional_packages():
    assert lazy_imports(ROOT) == []


def test_files_and_functions_are_short():
    assert too_long(ROOT) == []


def test_the_training_room_has_few_files():
    assert len(list((ROOT / "crius" / "train").glob("[!_]*.py"))) <= 16


@pytest.mark.full
def test_no_room_grows_beyond_its_limit():
    most = tokens.limits()
    assert {room: count for room, count in tokens.rooms().items() if count > most[room]} == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('"""One.\n\nTwo."""\n\nx = 1  # three\n', 3),
        ("x = (\n    1,\n\n    2,\n)\n", 8),
        ('class A:\n    """One."""\n\n    x: int\n    """Two."""\n', 6),
        ('x = """\none\n"""\n', 3),
        ('x = f"a {b} c"\n', 4),
        ("x = f\"a {b:{c + 1}} {f'{d}'}\"\n", 9),
    ],
)
def test_tokens_are_counted_without_docstrings_and_comments_on_every_python(text, number, tmp_path):
    assert tokens.rooms(plant(tmp_path, "tools/plan/a.py", text)) == {"crius/tools/plan": number}


def test_what_issues_state_is_added_to_the_limits(tmp_path):
    table = '[tokens]\n"crius/cli" = 5\n[stated.one]\n"crius/cli" = 2\n[stated.two]\n"crius/new" = 3\n'
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/size.toml").write_text(table)
    assert tokens.limits(tmp_path) == {"crius/cli": 7, "crius/new": 3}


def test_forms_that_only_save_lines_are_those_of_the_table():
    """None is added, and what was freed stays freed: the table falls with the code."""
    assert forms.counts() == forms.kept()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a, b = 1, 2", ["parallel"]),
        ("[a, b] = [f(), g()]", ["parallel"]),
        ("self.a, self.b = a, b", ["parallel"]),
        ("a, b = b, f(a)", []),  # a swap: the values read a target
        ("first, *rest = 1, 2, 3", []),
        ("a, b = f()", []),
        ("f(*(a, b), c)", ["splat"]),
        ("[*[a, b], c]", ["splat"]),
        ("f(**{'a': 1})", ["splat"]),
        ("{**{'a': 1}, **b}", ["splat"]),
        ("f(*names)", []),
        ("'s' * (n > 1)", ["condition"]),
        ("f'{a}s' * bool(n)", ["condition"]),
        ("'-' * 80", []),
        ("[a] * (n > 1)", ["condition"]),
        ("['', 's'][n > 1]", ["condition"]),
        ("n > 1 and 's' or ''", ["condition"]),
        ("name or 'none'", []),
        ("a if x else b if y else c", ["ternary"]),
        ("a if x else (b if y else c)", ["ternary"]),
        ("a if x else b", []),
        ("a = 1; b = 2", ["semicolon"]),
        ("if x: a = 1; b = 2", ["semicolon"]),
    ],
)
def test_a_form_that_only_saves_lines_is_found(text, names):
    assert [name for _, name in forms.forms_in(text)] == names


@pytest.mark.full
def test_a_run_of_one_process_loads_few_files(tmp_path):
    code = (
        "import sys\n"
        "from crius.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(*(name for name, module in sys.modules.items() if getattr(module, '__file__', None)), sep='\\n')\n"
    )
    flags = ["--training.steps", "3", "--training.seq_len", "32", "--validation.interval", "0", "--job.run_dir", "r"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, "train", *flags]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()
    most = tomllib.loads((ROOT / "tests/size.toml").read_text())["loaded"]
    loaded = {package: [name for name in names if is_below(name, package)] for package in most}
    assert {package: found for package, found in loaded.items() if len(found) > most[package]} == {}
    assert {name.split(".")[2] for name in names if name.startswith("crius.tools.")} == {"plan", "report"}


def doubled_lines(root: Path) -> list[str]:
    """Lines that stand twice in a row, as an edit gone wrong leaves them."""
    found = []
    for path, _ in trees(root):
        lines = (root / "crius" / path).read_text().splitlines()
        pairs = enumerate(zip(lines, lines[1:], strict=False), start=2)
        found += [f"{path}:{number}" for number, (a, b) in pairs if a == b and len(b.strip()) > 20]
    return found


def test_no_line_stands_twice_in_a_row():
    assert doubled_lines(ROOT) == []


def test_a_doubled_line_is_found(tmp_path):
    assert doubled_lines(plant(tmp_path, "config/a.py", "first = 'a line of some length'\n" * 2)) == ["config/a.py:2"]


def test_what_shows_before_torch_does_not_import_it():
    assert torch_users(ROOT) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("config/a.py", "import crius.train.job"),
        ("config/a.py", "from crius import models"),
        ("models/a.py", "from crius.config.run import RunConfig"),
        ("models/a.py", "from crius.parallel import fsdp"),
        ("kernels/a.py", "import crius.models.spec"),
        ("optim/a.py", "from crius.data.loader import Batch"),
        ("data/a.py", "from crius.config import load"),
        ("data/a.py", "from crius.config.load import RunSources"),
        ("parallel/a.py", "def f():\n    from crius.train import job"),
        ("train/a.py", "from crius.launch.local import run_workers"),
        ("train/a.py", "import crius.tools.dry_run"),
        ("train/a.py", "from crius.tools.plan import memory"),
        ("launch/a.py", "from crius.tools.faults import fault"),
        ("tools/plan/a.py", "from crius.tools.verify import run"),
        ("launch/a.py", "from crius.train import job"),
        ("launch/a.py", "from crius.data.corpus import Corpus"),
        ("tools/verify/a.py", "from crius.tools.plan import search"),
        ("tools/report/a.py", "from crius import cli"),
        ("data/a.py", "from . import batch"),
        ("newcomer/a.py", "from crius.config.run import RunConfig"),
    ],
)
def test_an_import_up_or_sideways_is_found(path, text, tmp_path):
    assert len(wrong_directions(plant(tmp_path, path, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("models/a.py", "from crius.kernels import rope"),
        ("data/a.py", "from crius.config.data import DataConfig\nfrom crius.config.run import RunConfig"),
        ("optim/a.py", "from crius.models.plan import ShardingPlan\nfrom crius.errors import DataError"),
        ("train/a.py", "from crius.launch.status import status\nfrom crius import __version__"),
        ("tools/dry_run/a.py", "from crius.train import job"),
        ("tools/plan/a.py", "from crius.tools.plan import memory\nfrom crius.train.inputs import describe_model"),
    ],
)
def test_an_allowed_import_is_not_found(path, text, tmp_path):
    assert wrong_directions(plant(tmp_path, path, text)) == []


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("def f():\n    import json", True),
        ("def f():\n    import json  # noqa: PLC0415", True),
        ("class A:\n    def f(self):\n        from crius.data import heavy  # noqa: PLC0415", True),
        ("def f():\n    import datasets", True),
        ("def f():\n    import datasets  # noqa: PLC0415", False),
        ("def f():\n    from crius.data.heavy import Sink  # noqa: PLC0415", False),
        ("if TYPE_CHECKING:\n    from torch import nn", False),
    ],
)
def test_an_import_inside_a_function_is_found(text, is_wrong, tmp_path):
    plant(tmp_path, "data/heavy.py", "import datasets")
    assert bool(lazy_imports(plant(tmp_path, "data/a.py", text))) == is_wrong


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("x = 1\n" * 600, False),
        ("x = 1\n" * 601, True),
        ("def f():\n" + "    x = 1\n" * 59, False),
        ("def f():\n" + "    x = 1\n" * 60, True),
    ],
)
def test_an_overlong_file_or_function_is_found(text, is_wrong, tmp_path):
    assert bool(too_long(plant(tmp_path, "a.py", text))) == is_wrong


def test_torch_in_the_config_is_found(tmp_path):
    plant(tmp_path, "config/direct.py", "from torch import nn")
    plant(tmp_path, "config/fine.py", "import json")
    plant(tmp_path, "config/indirect.py", "from crius.config import direct")
    found = torch_users(plant(tmp_path, "data/loader.py", "import torch"))
    assert [line.split()[0] for line in found] == ["crius.config.direct", "crius.config.indirect"]


def plant(root: Path, path: str, text: str) -> Path:
    """A package of the one file (and of those planted before)."""
    file = root / "crius" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n" * (not text.endswith("\n")))
    return root
