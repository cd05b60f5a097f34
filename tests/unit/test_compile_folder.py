"""Where compiled kernels are kept, and how many threads make them."""

import fcntl
import logging
import os
import shutil
import signal
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch._inductor import codecache, cpp_builder
from torch._inductor.cpu_vec_isa import VecISA
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import crius.parallel.compile as compile_module
from crius.config.training import CompileConfig
from crius.errors import EnvironmentError
from crius.host import COMPILE_SWITCHES
from crius.parallel import kernel_cache
from crius.parallel.compile import CompileReport, prepare_compile

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
    environ.setattr(compile_module, "usable_cores", lambda: cores)
    prepare_compile(CompileConfig(enable=True), tmp_path, local_ranks=ranks)
    assert inductor_config.compile_threads == int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) == threads


@pytest.mark.parametrize(("given", "limit"), [(8, compile_module.RECOMPILE_LIMIT), (999, 999)])
def test_torch_may_recompile_as_often_as_crius_or_the_user_says(given, limit, environ, tmp_path):
    dynamo_config.recompile_limit = given
    prepare_compile(CompileConfig(enable=True), tmp_path)
    assert dynamo_config.recompile_limit == limit


def test_time_in_which_two_compilations_run_counts_once():
    report = CompileReport(CompileConfig(enable=True))
    report._spans = [(5_000_000, 6_000_000), (1_000_000, 4_000_000), (2_000_000, 3_000_000), (3_500_000, 4_500_000)]
    assert report.seconds == 4.5


def test_graphs_are_counted_since_the_start_and_again_compiled_ones_after_three_steps(environ, caplog):
    environ.setattr(logging.getLogger("crius"), "propagate", True)
    events = [SimpleNamespace()]
    environ.setattr(compile_module.dynamo, "get_compilation_metrics", lambda: [*events])
    kept = []
    environ.setattr(compile_module.dynamo, "set_compilation_metrics_limit", kept.append)
    report = CompileReport(CompileConfig(enable=True, backend="eager", max_recompiles=1))
    report.start()
    assert kept[0] > 64

    def compiled(reason="", name="run", is_whole=True, begin=1_000_000):
        place = {"co_name": name, "co_filename": "/a/b/c.py", "co_firstlineno": 7}
        spent = {"start_time_us": begin, "end_time_us": begin + 1_000_000}
        events.append(SimpleNamespace(**place, **spent, has_guarded_code=is_whole, recompile_reason=reason))

    compiled()
    compiled("0/0: grad_mode", begin=2_000_000)
    compiled(name=None, begin=4_000_000)
    compiled(is_whole=False)
    assert report.lines() == ["compile: 2 graphs, 3.0 s, no cache (backend eager)"]
    for step in range(3, 8):
        compiled(f"1/2: tensor 'x' size mismatch at index 1. expected 9, actual {step}\nmore")
        report.step(step)
    assert (report.graphs, report.recompiles) == (7, 4)
    assert report.lines()[1].startswith("compile: run (b/c.py:7) has 6 graphs, lastly for tensor 'x' size mismatch")
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "2 recompilations after step 3" in warning
    assert "2 of them by one guard: size of dim 1 of x (was 9, 4, 5)" in warning


@pytest.mark.parametrize("name", COMPILE_SWITCHES)
def test_each_switch_of_torch_is_named_as_the_reason(name, environ):
    environ.setenv(name, "1")
    assert name in CompileReport(CompileConfig(enable=True)).reason


def test_a_folder_of_kernels_that_cannot_be_written_is_named(environ, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentError, match="file/kernels cannot be written") as caught:
        prepare_compile(CompileConfig(enable=True, cache_dir=str(tmp_path / "file" / "kernels")))
    assert caught.value.where == "--compile.cache_dir"


def test_the_own_folder_of_kernels_is_closed_to_other_users(environ, tmp_path):
    """What lies in it is unpickled and executed. A folder that the user names stays as it is."""
    (tmp_path / "open").mkdir(mode=0o755)
    config = CompileConfig(enable=True, backend="aot_eager")
    folder = prepare_compile(config, tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    environ.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder.chmod(0o755)
    assert prepare_compile(config, tmp_path).stat().st_mode & 0o777 == 0o700
    environ.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder.chmod(0o770)
    with pytest.raises(EnvironmentError, match="other users may write into") as caught:
        prepare_compile(config, tmp_path)
    assert f"rm -r {folder}" in caught.value.fix
    prepare_compile(replace(config, cache_dir=str(tmp_path / "open")), tmp_path)
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755


def test_files_that_a_killed_compilation_left_are_removed_before_a_run(tmp_path):
    whole = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q10xHH2x", 64, 64, 1) + bytes(64)
    kept = {"aa/a.main.so": whole, "aa/a.py": b"pass", "locks/b.lock": b""}
    kept |= {"new.so.1-1.crius-partial": b"", "aa/.1.2.tmp": b""}  # another run may be writing these
    damaged = {
        "aa/b.main.so": b"",
        "aa/c.main.so": whole[:-1],
        "aa/d.o": whole[:20],
        "aa/e.cpp": b"",
        "f.so": b"x" * 99,
    }
    for name, content in (kept | damaged).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for name in ("old.so.1-1.crius-partial", "aa/.3.4.tmp"):
        (tmp_path / name).write_bytes(b"part")
        os.utime(tmp_path / name, (0, 0))
    kernel_cache._remove_damage(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(kept)


def test_an_incomplete_file_that_another_process_is_writing_stays(tmp_path):
    (tmp_path / "locks").mkdir()
    (tmp_path / "b.main.so").touch()
    with (tmp_path / "locks" / "b.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kernel_cache._remove_damage(tmp_path)
        assert (tmp_path / "b.main.so").exists()
    kernel_cache._remove_damage(tmp_path)
    assert not (tmp_path / "b.main.so").exists()


def test_a_kernel_gets_its_name_when_it_is_whole(environ, tmp_path):
    """A compiler that is killed, or fails, leaves nothing under the name that the next run looks for."""

    class Builder:
        def __init__(self):
            self._output = f"-o {tmp_path}/k.main.so"

        def get_target_file_path(self):
            return f"{tmp_path}/k.main.so"

    def killed(builder):
        Path(builder._output.split()[1]).write_bytes(b"half")
        raise KeyboardInterrupt

    def done(builder):
        Path(builder._output.split()[1]).write_bytes(b"whole")

    with pytest.raises(KeyboardInterrupt):
        kernel_cache._renamed_when_done(killed)(Builder())
    assert [path.suffix for path in tmp_path.iterdir()] == [kernel_cache.PARTIAL]
    kernel_cache._renamed_when_done(done)(Builder())
    assert (tmp_path / "k.main.so").read_bytes() == b"whole"


@pytest.fixture
def inductor(environ):
    """``environ``; inductor is as torch has it, and is put back."""
    for owner, name in [
        (codecache, "_HEADER_DIR"),
        (codecache, "_HEADER_LOCK_DIR"),
        (cpp_builder, "run_compile_cmd"),
        (cpp_builder.CppBuilder, "build"),
        (VecISA, kernel_cache.PROBE),
    ]:
        value = getattr(owner, name)
        environ.setattr(owner, name, getattr(value, "__wrapped__", value))
    return environ


SIGNALLED_COMPILER = """#!{python} -SE
import os, signal, sys, time
if "-o" in sys.argv:
    for number in signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2:
        os.kill(os.getpid(), number)
    os.kill(os.getppid(), signal.SIGUSR1)
    open(sys.argv[0] + ".sent", "w").close()
    time.sleep(0.2)
os.execv("{compiler}", ["{compiler}", *sys.argv[1:]])
"""


def test_a_signal_to_the_whole_group_ends_no_compiler_and_is_heard_at_once(inductor, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(SIGNALLED_COMPILER.format(python=sys.executable, compiler=shutil.which("g++")))
    compiler.chmod(0o755)
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(time.monotonic()))
    prepare_compile(CompileConfig(enable=True), tmp_path)
    source = tmp_path / "k.cpp"
    source.write_text("int f() { return 1; }")
    try:
        options = cpp_builder.CppOptions(compiler=str(compiler))
        cpp_builder.CppBuilder("k", str(source), options, str(tmp_path)).build()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert Path(f"{compiler}.sent").exists()
    assert (tmp_path / "k.so").exists()
    assert heard[0] < time.monotonic() - 0.1
    assert hasattr(getattr(VecISA, kernel_cache.PROBE), "__wrapped__")


def test_inductor_compiles_through_the_folder_that_stays_whole(inductor, tmp_path):
    """The private names of torch that this hangs on are there: a kernel is written in part, then renamed."""
    commands = []
    run = cpp_builder.run_compile_cmd
    inductor.setattr(cpp_builder, "run_compile_cmd", lambda line, cwd: (commands.append(line), run(line, cwd)))
    prepare_compile(CompileConfig(enable=True), tmp_path)
    assert str(tmp_path) in codecache._HEADER_DIR
    source = tmp_path / "k.cpp"
    source.write_text("int f() { return 1; }")
    options = cpp_builder.CppOptions()
    builder = cpp_builder.CppBuilder("k", str(source), options, str(tmp_path))
    builder.build()
    [command] = commands
    assert f"-o {tmp_path}/k.so.{os.getpid()}-" in command
    assert not kernel_cache.is_damaged(tmp_path / "k.so")
    os.truncate(tmp_path / "k.so", (tmp_path / "k.so").stat().st_size - 1)
    assert kernel_cache.is_damaged(tmp_path / "k.so")
