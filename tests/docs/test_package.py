"""What ``pip install crius`` brings: built, installed without ``-e`` and used elsewhere, without the network."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest
from harness import ROOT
from test_documents import NOT_SOURCE

from crius import __version__
from crius.plugins import REQUIREMENTS

pytestmark = pytest.mark.slow


def run(*words, **options):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    source, out = tmp_path_factory.mktemp("source") / "crius", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
    recipe = (ROOT / "Makefile").read_text().split("\ndist:")[1].splitlines()[1]
    run(*recipe.replace("$(BIN)/python", sys.executable).replace(" dist ", f" {out} ").split(), cwd=source)
    return out / f"crius-{__version__}.tar.gz", out / f"crius-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The bin folder of a new environment, which finds torch and the rest where this Python does."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")  # older than torch asks for
    site = sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)})
    with open(f"{site}/torch.pth", "w") as file:  # a folder of a .pth file has no .pth files of its own: not our source
        file.write(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.fixture(scope="module")
def installed(built, environment):
    """The bin folder of an environment with the wheel."""
    run(environment / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", built[1])
    return environment


def crius(installed, folder, *words):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return run(installed / "crius", *words, cwd=folder, env=environ | {"OMP_NUM_THREADS": "1"})


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = (path for path in (ROOT / "crius").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {path.relative_to(ROOT).as_posix() for path in package}
    assert {"crius/py.typed", "crius/recipes/llama3_debug.toml"} <= names


def test_the_sdist_has_what_documents_the_package_and_no_tests(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "setup.py", "docs/README.md", "docs/reference/settings.md"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs/_build"))]


def test_the_page_on_an_index_has_absolute_links_and_what_readers_look_for(built):
    with zipfile.ZipFile(built[1]) as wheel:
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        page = email.message_from_bytes(wheel.read(metadata))
    text = page.get_payload(decode=True).decode()
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 10 and all(re.match(r"https://|#", target) for target in targets), targets
    assert any(target.endswith("/raw/main/docs/loss_curve.png") for target in targets)
    assert page["Description-Content-Type"] == "text/markdown" and page["License-Expression"] == "BSD-3-Clause"
    urls = dict(line.split(", ", 1) for line in page.get_all("Project-URL"))
    assert {"Source", "Documentation", "Changelog"} <= set(urls) and page["Keywords"]
    assert "Operating System :: POSIX :: Linux" in page.get_all("Classifier")
    asked = {re.split(r"[ ;<>=[]", line)[0].lower() for line in page.get_all("Requires-Dist")}
    assert {re.split(r"[<>=]", line)[0].lower() for line in REQUIREMENTS.values()} - asked == {"mistral-common"}


def test_the_installed_package_plans_and_trains_from_another_folder(installed, tmp_path):
    place = run(installed / "python", "-c", "import crius; print(crius.__file__)", cwd=tmp_path, env={})
    assert place.startswith(str(installed.parent))
    assert __version__ in crius(installed, tmp_path, "--version")
    planned = crius(installed, tmp_path, "plan", "--model", "llama3", "--flavor", "8b", "--gpus", "8", "--gpu", "h100")
    assert "--parallelism.data_parallel_shard_degree" in planned
    small = ("--model.num_layers", "1", "--training.seq_len", "64", "--validation.interval", "0", "--nproc", "1")
    text = crius(installed, tmp_path, "train", "--training.steps", "2", *small)
    assert re.search(r"^step 2/2  loss \d", text, re.MULTILINE)
    assert (tmp_path / re.search(r"^saved: step 2 in (\S+)$", text, re.MULTILINE)[1] / "manifest.json").is_file()


def test_the_lines_of_the_dockerfile_make_a_crius_that_runs(built, environment, tmp_path):
    """``RUN`` and ``ENTRYPOINT`` in an empty folder with the wheel, without the network: what they ask for is there."""
    shutil.copy(built[1], tmp_path)
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    asked = dict(line.removeprefix("ARG ").split("=", 1) for line in lines if line.startswith("ARG "))
    environ = {"PATH": f"{environment}:/usr/bin:/bin", "PIP_NO_INDEX": "1", "HOME": str(tmp_path), **asked}
    for line in lines:
        if line.startswith("RUN "):
            run("sh", "-c", line.removeprefix("RUN "), cwd=tmp_path, env=environ)
    (entry,) = (json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT "))
    assert not list(tmp_path.glob("*.whl"))
    assert run(*entry, "--version", cwd=tmp_path, env=environ).strip() == __version__
