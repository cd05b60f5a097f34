"""Where compiled kernels are kept, and how many threads make them."""

import os

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import crius.parallel.compile as compile_module
from crius.config.compile import CompileConfig
from crius.errors import EnvironmentError
from crius.parallel.compile import prepare_compile

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "XDG_CACHE_HOME")


@pytest.fixture
def environ(monkeypatch):
    """Without the variables that ``prepare_compile`` reads; it and what it sets in torch are put back."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back even where it was not set before
        monkeypatch.delenv(name)
    limit, threads = dynamo_config.recompile_limit, inductor_config.compile_threads
    kept = compiler_config.patch(cache_key_tag=compiler_config.cache_key_tag)
    with kept, dynamo_config.patch(recompile_limit=limit), inductor_config.patch(compile_threads=threads):
        yield monkeypatch


OWN = f"compile/torch-{torch.__version__}"


@pytest.mark.parametrize(
    ("flag", "variable", "root", "folder"),
    [
        ("", "", None, f"xdg/crius/{OWN}"),
        ("", "", "mine", f"mine/{OWN}"),
        ("", "user", "mine", "user"),
        ("asked", "user", "mine", "asked"),
        ("", default_cache_dir(), "mine", f"mine/{OWN}"),  # inductor's own, which it writes into the environment
    ],
)
def test_the_folder_of_kernels_is_the_flag_then_the_environment_then_the_cache(
    flag, variable, root, folder, environ, tmp_path
):
    environ.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if variable:
        environ.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / variable))
    config = CompileConfig(enable=True, cache_dir=str(tmp_path / flag) if flag else "")
    found = prepare_compile(config, tmp_path / root if root else None)
    assert found == tmp_path / folder
    assert found.is_dir()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(found)
    assert os.environ["TRITON_CACHE_DIR"] == str(found / "triton")


@pytest.mark.parametrize(
    ("cores", "ranks", "variable", "threads"),
    [(16, 1, "", 16), (16, 8, "", 2), (2, 8, "", 1), (128, 1, "", 32), (2, 8, "4", 4)],
)
def test_ranks_share_the_cores_that_compile(cores, ranks, variable, threads, environ, tmp_path):
    """One thread a rank where ranks exceed cores; a number from the user's environment stays."""
    if variable:
        environ.setenv("TORCHINDUCTOR_COMPILE_THREADS", variable)
        inductor_config.compile_threads = int(variable)  # as on import
    environ.setattr(compile_module, "_num_cores", lambda: cores)
    prepare_compile(CompileConfig(enable=True), tmp_path, local_ranks=ranks)
    assert inductor_config.compile_threads == int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) == threads


def test_a_folder_of_kernels_that_cannot_be_written_is_named(environ, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentError, match="file/kernels cannot be written") as caught:
        prepare_compile(CompileConfig(enable=True, cache_dir=str(tmp_path / "file" / "kernels")))
    assert caught.value.where == "--compile.cache_dir"
