"""Files of a stranger's folder: what is opened, how much of it is read, and what of it reaches a printed command."""

import ast
import json
import os
from pathlib import Path

import pytest
from report_runs import write_run

import crius
from crius.__main__ import main
from crius.cli.app import run_dir
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import imports_of
from crius.tools.report.history import read_run
from crius.tools.report.runs import run_row
from crius.untrusted import SMALL, names_below, object_below, open_below, open_named, read_below, records_below

SECRET = "k3y-of-somebody"
PACKAGE = Path(crius.__file__).parent


@pytest.fixture
def place(tmp_path):
    """A folder with a file, and others that are none, beside a secret."""
    (tmp_path / "secret").write_text(SECRET)
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "below/file").write_text('{"a": 1}')
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "dangling").symlink_to(tmp_path / "nothing")
    (folder / "linked").symlink_to(folder / "below")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "fifo")
    os.truncate(os.open(folder / "sparse", os.O_CREAT | os.O_WRONLY), 10**12)
    return folder


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("link", "a link; cp -rL copies its target"),
        ("dangling", "a link"),
        ("zero", "a link"),
        ("linked/file", "a link"),
        ("fifo", "not a regular file"),
        ("below", "not a regular file"),
        ("nothing", "No such file"),
        ("nothing/file", "No such file"),
        ("sparse", "1,000,000,000,000 bytes, of which"),
    ],
)
def test_only_regular_files_below_a_folder_are_read(place, name, why):
    with pytest.raises(OSError, match=why) as refused:
        read_below(place, name)
    assert refused.value.filename == f"{place}/{name}"
    assert object_below(place, name) is None


def test_a_file_is_read_and_a_folder_that_the_user_named_may_be_a_link(place, tmp_path):
    (tmp_path / "mine").symlink_to(place)
    assert read_below(tmp_path / "mine", "below/file") == b'{"a": 1}'
    assert object_below(place, "below/file") == {"a": 1}
    assert names_below(place, "below") == ["file"] and names_below(place, "nothing") == []
    with pytest.raises(OSError, match="a link"):
        names_below(place, "linked")
    for name in ("../secret", "below/../../secret", "..", "."):
        with pytest.raises(AssertionError):
            open_below(place, name)


@pytest.mark.parametrize("opened", [open_named, lambda path: open_below(path.parent, path.name)])
def test_a_long_file_of_holes_is_refused_and_one_with_data_is_read(tmp_path, opened):
    file = tmp_path / "file"
    file.write_bytes(b"x" * (1 << 22))
    os.truncate(file, 1 << 31)
    with opened(file) as found:
        assert found.read(2) == b"xx"
    os.truncate(file, 1 << 40)
    with pytest.raises(OSError, match="are not holes") as refused:
        opened(file)
    assert refused.value.filename == str(file)


def test_a_line_has_a_most_length_and_the_next_one_is_read(tmp_path):
    lines = ['{"a": 1}', '{"a": "' + "x" * (2 * SMALL) + '"}', "[1]", '{"a": 2}', '{"a": ']
    (tmp_path / "lines").write_text("\n".join(lines))
    assert list(records_below(tmp_path, "lines")) == [{"a": 1}, None, None, {"a": 2}, {}]
    assert list(records_below(tmp_path, "nothing")) == []
    with pytest.raises(OSError, match="at most 10 are"):
        list(records_below(tmp_path, "lines", 10))


def test_an_incident_that_is_a_link_is_no_part_of_a_report(tmp_path, capsys):
    run = write_run(tmp_path / "run", files={"incidents/step-1.txt": "seen", "incidents/step-2.json": {"a": 1}})
    (tmp_path / "secret").write_text(SECRET)
    (run / "incidents/step-3.txt").symlink_to(tmp_path / "secret")
    left_out = "This file cannot be read: it is a link; cp -rL copies its target."
    assert read_run(run).incidents == {"step-1.txt": "seen", "step-2.json": {"a": 1}, "step-3.txt": left_out}
    assert main(["report", str(run)]) == 0
    assert SECRET not in (run / "report.html").read_text()


def test_a_report_is_not_written_where_a_link_of_its_folder_leads(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / "report.html").symlink_to(tmp_path / "elsewhere")
    assert main(["report", str(run)]) == 2
    assert "report.html is a link" in capsys.readouterr().err and not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["run.toml", "metrics.jsonl", "starts.jsonl"])
def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path, capsys, name):
    run = write_run(tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)
    assert str(run_row(run).state) == "unreadable (it is not a regular file)"
    assert main(["report", str(run)]) == 1
    assert f"{name} cannot be read: it is not a regular file" in capsys.readouterr().err


def test_columns_of_a_report_have_a_most_number(tmp_path):
    run = write_run(tmp_path / "run")
    lines = [
        json.dumps({"step": step, "loss": 1.0, **dict.fromkeys(map(str, range(step * 500, step * 500 + 500)))})
        for step in range(1, 25)
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert len(read_run(run).steps) == 1000


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        ("# --import mine\n# --import my.own_2\n[model]\n", "--import mine --import my.own_2"),
        ("# --import evil; curl x | sh\n", ""),
        ("# --import $(touch x)\n", ""),
        ("# --import mine --import\u00e4\n", ""),
        ("# --import ../mine\n", ""),
        ("[model]\n# --import late\n", ""),
    ],
)
def test_only_names_of_modules_reach_a_printed_command(lines, want, tmp_path):
    (tmp_path / "run.toml").write_text(lines)
    assert imports_of(str(tmp_path / "run.toml")) == want


@pytest.mark.parametrize("name", ["logs/rank-0.log", "metrics.jsonl", "incidents", "wandb_id.txt", "checkpoints"])
def test_a_run_does_not_write_where_a_link_of_its_folder_leads(name, tmp_path, monkeypatch, capsys):
    """Even ``checkpoints``, if somebody else made that link."""
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "outside")
    monkeypatch.setattr("os.getuid", lambda: -1)
    assert main(["train", "--training.steps", "1", "--job.run_dir", str(tmp_path / "run")]) == 1
    assert f"cannot be written: {name} in it: neither a file nor a folder" in capsys.readouterr().err
    assert not [*(tmp_path / "outside").iterdir()]


def test_own_links_of_a_run_folder_to_its_large_parts_are_said(tmp_path, capsys):
    (tmp_path / "run/data").mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "run/data/link").symlink_to(tmp_path / "disk")
    (tmp_path / "run/wandb").mkdir()
    (tmp_path / "run/wandb/latest-run").symlink_to("nothing")  # as wandb itself does
    run_dir(replace_fields(RunConfig(), {"job.run_dir": str(tmp_path / "run")}), None)
    assert capsys.readouterr().err == f"{tmp_path}/run/checkpoints is a link to {tmp_path}/disk\n"


@pytest.mark.parametrize(
    "words",
    [
        "generate base --prompt a --prompt_file FILE",
        "evaluate base --tasks FILE",
        "plan validate FILE",
        "plan --gpu FILE",
        "config show --config FILE",
        "train --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule_csv FILE",
    ],
)
@pytest.mark.parametrize("kind", ["missing", "fifo", "zero", "folder"])
def test_a_file_that_the_user_named_is_read_or_refused_at_once(words, kind, tmp_path, capsys):
    file = {"zero": "/dev/zero"}.get(kind, str(tmp_path / f"{kind}.txt"))
    if kind == "fifo":
        os.mkfifo(file)
    if kind == "folder":
        os.mkdir(file)
    assert main(words.replace("FILE", file).split()) == 2
    told = capsys.readouterr().err
    assert file in told and told.count("Error: ") == 1


PARSERS = {"tokenizers", "pyarrow", "gguf", "sentencepiece", "tiktoken", "zstandard"}
ELSEWHERE = {
    "untrusted.py": "the reader",
    "strict_json.py": "JSON with unique keys and finite numbers, of bytes that were read",
    "checkpoint/remote_disk.py": "fsspec's files",
    "tokens/render.py": "a process of its own without Crius, with limits",
    "tokens/trial.py": "a process of its own without Crius, with limits",
    "data/prepare.py": "writes a folder that it made",
    "data/rows.py": "rows, gzip, zstandard and parquet: pieces of bounded length",
    "data/tokens.py": "maps tokens whose size was compared with meta.json",
    "tokens/tokenizer.py": "a tokenizer.json that was tried",
    "tokens/conversion.py": "a process of its own",
    "tools/convert/gguf_file.py": "a reader with limits",
    "tools/convert/torch_file.py": "a zip of bounded length",
    "tools/data_audit/bpe.py": "trains a tokenizer",
    "tools/tune/chatml.py": "a tokenizer.json that was tried",
    "tools/verify/parameters.py": "what a process of it wrote",
}
"""Files that open or parse, and why."""
OWN_OPEN = ("os.open", "webbrowser.open", "disk.open", "self._disk.open", "self.open")
"""What opens no file, or a file of a checkpoint by the disk's own rules."""


def readings(tree):
    """Calls that open or parse a file, and imports of packages that do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in PARSERS)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PARSERS:
            yield node.module
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        method = name.rpartition(".")[2]
        of_a_module = name in ("json.load", "json.loads", "tomllib.load", "tomllib.loads", "np.load", "torch.load")
        is_open = method == "open" and name not in (
            "os.open",
            "webbrowser.open",
            "disk.open",
            "self._disk.open",
            "self.open",
        )
        if of_a_module or is_open or method in ("read_text", "read_bytes", "memmap", "fromfile"):
            yield name


def test_only_few_files_open_or_parse_others():
    found = {
        str(path.relative_to(PACKAGE)): calls
        for path in PACKAGE.rglob("*.py")
        if (calls := [*readings(ast.parse(path.read_text()))])
    }
    assert {name: calls for name, calls in found.items() if name not in ELSEWHERE} == {}
    assert found.keys() == ELSEWHERE.keys() and len(found) <= 15
