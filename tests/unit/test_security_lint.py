"""What could execute data is not in the code: a search of its syntax trees, with a short list of exceptions."""

import ast
import re
from pathlib import Path

import pytest
from harness import ROOT

SEARCHED = ("crius/**/*.py", "benchmarks/**/*.py", "docs/**/*.py", "train.py")

# "file: what" to the reason
EXCEPTIONS = {
    "crius/config/other_trainers.py: trust_remote_code": "the name of a flag that is refused with the reason",
    "benchmarks/gpu/host.py: extractall without filter": "wheels the user names; zips have no filter, and drop ..",
}

PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "_pickle")
LOADERS = {"load", "loads", "Unpickler", "open", "Pickler", "dump", "dumps", "Shelf", "DbfilenameShelf"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp"}
EXTRACTORS = {"extractall", "extract", "unpack_archive"}
OBJECTS = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "broadcast_object"),
    *("send_object_list", "recv_object_list"),
}


def dotted(node, names):
    """The whole name of an expression such as ``np.load``, imports followed; empty for others."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def imported_names(tree):
    """What the names of a module's imports stand for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def keyword(call, name):
    """The value of a keyword argument, None where it is not given or no constant."""
    return next((getattr(given.value, "value", given.value) for given in call.keywords if given.arg == name), None)


def problem_of_call(call, names):
    """What is wrong with a call; empty where nothing is."""
    name = dotted(call.func, names)
    last = call.func.attr if isinstance(call.func, ast.Attribute) else name.rpartition(".")[2]
    module = name.rpartition(".")[0]
    if module in PICKLES and last in LOADERS:
        return name
    if name in ("torch.load", "torch.serialization.load") and keyword(call, "weights_only") is not True:
        return "torch.load without weights_only=True"
    if name in BUILTINS or name in {f"builtins.{builtin}" for builtin in BUILTINS}:
        return name
    if name in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"):
        return name
    if name in SHELLS or name.startswith(("os.spawn", "os.exec")):
        return name
    if keyword(call, "shell") not in (None, False):
        return "shell=True"
    if last in EXTRACTORS and keyword(call, "filter") is None:
        return f"{last} without filter"
    if keyword(call, "trust_remote_code") not in (None, False):
        return "trust_remote_code"
    if name in ("numpy.load", "np.load") and keyword(call, "allow_pickle") not in (None, False):
        return "numpy.load with allow_pickle"
    return last if last in OBJECTS else ""


def problems(root):
    """``file: what`` for each forbidden thing below ``root``."""
    found = set()
    for file in sorted({file for pattern in SEARCHED for file in Path(root).glob(pattern)}):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = imported_names(tree)
        path = file.relative_to(root).as_posix()
        for node in ast.walk(tree):
            what = problem_of_call(node, names) if isinstance(node, ast.Call) else ""
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                what = next((f"import {module}" for module in modules if module.split(".")[0] in PICKLES), "")
            if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
                what = "trust_remote_code"
            if what:
                found.add(f"{path}: {what}")
    return sorted(found)


@pytest.mark.full
def test_nothing_in_the_code_executes_data():
    assert [found for found in problems(ROOT) if found not in EXCEPTIONS] == []


@pytest.mark.full
def test_every_exception_is_still_needed():
    assert set(EXCEPTIONS) <= set(problems(ROOT))


def test_every_promise_of_the_policy_names_a_test_that_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text()))
    there = {
        found for file in (ROOT / "tests").rglob("*.py") for found in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) > 10 and named - there == set()


PLANTED = [
    ("import pickle\n", "import pickle"),
    ("from pickle import loads\nloads(b'')", "pickle.loads"),
    ("import dill as d\nd.load(f)", "dill.load"),
    ("import cloudpickle\ncloudpickle.loads(x)", "cloudpickle.loads"),
    ("import shelve\nshelve.open('x')", "shelve.open"),
    ("import marshal\nmarshal.loads(x)", "marshal.loads"),
    ("import torch\ntorch.load('x')", "torch.load without weights_only=True"),
    ("import torch\ntorch.load('x', weights_only=False)", "torch.load without weights_only=True"),
    ("import torch as t\nt.load('x', weights_only=flag)", "torch.load without weights_only=True"),
    ("from torch import load\nload('x')", "torch.load without weights_only=True"),
    ("eval('1')", "eval"),
    ("exec('1')", "exec"),
    ("import builtins\nbuiltins.eval('1')", "builtins.eval"),
    ("__import__('os')", "__import__"),
    ("import yaml\nyaml.load(x)", "yaml.load"),
    ("import yaml\nyaml.load(x, Loader=yaml.Loader)", "yaml.load"),
    ("import subprocess\nsubprocess.run('x', shell=True)", "shell=True"),
    ("import subprocess\nsubprocess.Popen('x', shell=flag)", "shell=True"),
    ("import os\nos.system('x')", "os.system"),
    ("from os import popen\npopen('x')", "os.popen"),
    ("import tarfile\ntarfile.open('x').extractall('y')", "extractall without filter"),
    ("import shutil\nshutil.unpack_archive('x')", "unpack_archive without filter"),
    ("import tempfile\ntempfile.mktemp()", "tempfile.mktemp"),
    ("from transformers import AutoModel\nAutoModel.from_pretrained('x', trust_remote_code=True)", "trust_remote_code"),
    ("options = {'trust_remote_code': True}", "trust_remote_code"),
    ("import torch.distributed as dist\ndist.all_gather_object(a, b)", "all_gather_object"),
    ("import torch.distributed as dist\ndist.broadcast_object_list(a)", "broadcast_object_list"),
    ("import numpy as np\nnp.load('x', allow_pickle=True)", "numpy.load with allow_pickle"),
]


@pytest.mark.parametrize(("text", "what"), PLANTED, ids=[what for _, what in PLANTED])
def test_what_executes_data_is_found(text, what, tmp_path):
    file = tmp_path / "crius" / "data" / "planted.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert f"crius/data/planted.py: {what}" in problems(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "import torch\ntorch.load('x', map_location='cpu', weights_only=True)",
        "import torch\ntorch.compile(model)",
        "import re\nre.compile('x').match('y')",
        "import json\njson.load(f)",
        "import numpy as np\nnp.load('x')",
        "import subprocess\nsubprocess.run(['x'], shell=False)",
        "import tarfile\ntarfile.open('x').extractall('y', filter='data')",
        "import pickletools\nlist(pickletools.genops(b'N.'))",
        "self.optimizer.load(state)",
    ],
)
def test_ordinary_code_is_not_found(text, tmp_path):
    file = tmp_path / "crius" / "planted.py"
    file.parent.mkdir()
    file.write_text(text)
    assert problems(tmp_path) == []
