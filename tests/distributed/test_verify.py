"""``crius verify`` passes what is right, and finds each way in which trainers get a sum wrong."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from harness import TEXT, crius, parse
from mutations import divide_by_local_tokens, draw_other_bits_on_one_rank, drop_a_layer

from crius import cli
from crius.cli.app import facts_of
from crius.data.loader import Batch
from crius.parallel import tensor
from crius.tools.verify import parameters
from crius.tools.verify.compare import compile as verify_compile
from crius.tools.verify.compare import parity, tolerances
from crius.tools.verify.init import init as verify_init
from crius.tools.verify.options import OnLayouts, Trained
from crius.tools.verify.worker import uneven_documents, uneven_labels
from crius.train import job
from crius.train.step import count_valid

TINY = [
    *("--recipe", "verify", "--model.num_layers", "2", "--training.seq_len", "16", "--training.global_batch_size", "8"),
    *("--data.source", "text", "--data.path", str(TEXT)),
]


def verify(verb, folder, capsys, layouts, flags=(), **options):
    """Exit code, and rows by layout."""
    capsys.readouterr()
    facts = facts_of(parse([*TINY, *flags]), 0, None)
    kind = OnLayouts if verb is verify_init else Trained
    code = verb(facts, folder, kind(layouts=layouts, timeout=60, **options), as_json=True)
    return code, {row["layout"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_parity_finds_a_wrong_sum(monkeypatch, tmp_path, capsys):
    """``tests/parity`` plants each of ``MUTATIONS``."""
    divide_by_local_tokens(monkeypatch)
    code, rows = verify(parity, tmp_path, capsys, "fsdp2", steps=2)
    assert rows["1"]["status"] == "reference"
    assert rows["fsdp2"]["status"] == "FAIL"
    assert rows["fsdp2"]["values"], rows["fsdp2"]["note"]  # it ran to its end and was measured
    assert code == 1


@pytest.mark.long
def test_parity_compares_with_one_device_and_a_mask_with_a_mask(tmp_path, capsys):
    layouts = "cp2+document,pp2+1f1b,1+full"
    code, rows = verify(parity, tmp_path, capsys, layouts)
    assert {row["status"] for row in rows.values()} == {"ok", "reference"}, rows
    assert {name for name, row in rows.items() if row["status"] == "reference"} == {"1", "1+document"}
    assert code == 0


@pytest.mark.long
def test_parity_compares_low_precision_with_low_precision(tmp_path, capsys):
    layouts = "fsdp2+float8,fsdp2+float8_rowwise"
    code, rows = verify(parity, tmp_path, capsys, layouts, ("--quantize.dense.pad_inner_dim",))
    references = [name for name, row in rows.items() if row["status"] == "reference"]
    assert references == ["1+float8", "1+float8 nudged", "1+float8_rowwise", "1+float8_rowwise nudged"]
    assert 0 < rows["1+float8 nudged"]["values"]["loss"] < 1e-3
    assert {row["status"] for row in rows.values()} == {"ok", "reference"}, rows
    assert code == 0


def test_tolerances_are_those_of_the_coarsest_rounding():
    rowwise = ["--quantize.dense.float8.enable", "--quantize.dense.float8.recipe", "rowwise"]
    bfloat16 = ["--training.mixed_precision_param", "bfloat16"]
    bounds = [tolerances(parse([*TINY, *flags])) for flags in ([], rowwise, bfloat16, [*rowwise, *bfloat16])]
    assert [bound["grad_norm"].bound for bound in bounds] == [1e-5, 1e-4, 1e-2, 1e-2]


@pytest.mark.long
def test_a_setting_that_one_device_cannot_have_holds_for_the_others(tmp_path, capsys):
    code, rows = verify(parity, tmp_path, capsys, "fsdp4", ("--parallelism.reshard_after_forward_mode", "2"))
    assert [row["status"] for row in rows.values()] == ["reference", "ok"], rows
    assert "groups of 2 ranks" in (tmp_path / "fsdp4" / "logs" / "rank-0.log").read_text()
    assert code == 0


def test_parity_leaves_no_parameters_behind(tmp_path, capsys):
    assert verify(parity, tmp_path, capsys, "ddp2")[0] == 0
    assert not list(tmp_path.rglob("*.pt"))


def test_a_refused_layout_is_a_row_and_an_error_only_where_it_was_asked_for(tmp_path, capsys, monkeypatch):
    code, rows = verify(parity, tmp_path, capsys, "tp3,fsdp2")
    assert (rows["tp3"]["status"], rows["fsdp2"]["status"]) == ("refused", "ok")
    assert "legal: 1, 2, 4, 8" in rows["tp3"]["note"]
    assert code == 2
    monkeypatch.setattr("crius.tools.verify.matrix.PARITY", ("tp3", "accum2", "fsdp8"))
    code, rows = verify(parity, tmp_path, capsys, "", nproc=4)
    assert list(rows) == ["1", "tp3", "accum2"]
    assert code == 0


def test_a_crash_is_a_row_with_its_log_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tensor, "apply_tensor_parallel", None)
    monkeypatch.setattr("crius.parallel.apply.apply_tensor_parallel", None)
    code, rows = verify(parity, tmp_path, capsys, "tp2,fsdp2")
    assert (rows["tp2"]["status"], rows["fsdp2"]["status"]) == ("FAIL", "ok")
    assert "NoneType" in rows["tp2"]["note"]
    assert "Traceback" in (tmp_path / "tp2" / "logs" / "rank-0.log").read_text()
    assert code == 1


def test_a_hang_is_a_row(tmp_path, capsys, monkeypatch):
    original = job._place

    def place(*args):
        while dist.get_world_size() > 1:
            time.sleep(0.1)
        return original(*args)

    monkeypatch.setattr(job, "_place", place)
    facts = facts_of(parse(TINY), 0, None)
    assert parity(facts, tmp_path, Trained(layouts="fsdp2", timeout=6), as_json=True) == 1
    row = json.loads(capsys.readouterr().out)["rows"][-1]
    assert "nothing after 6 s" in row["note"]
    assert "in place" in (tmp_path / "fsdp2" / "logs" / "rank-0.log").read_text()  # where it hung


def test_the_table_names_tolerances_with_their_reasons(tmp_path, capfd):
    code = parity(facts_of(parse(TINY), 0, None), tmp_path, Trained(layouts="fsdp2", timeout=60))
    lines = capfd.readouterr().out.splitlines()
    assert code == 0
    assert lines[0].split() == ["layout", "ranks", "loss", "grad_norm", "parameters", "update", "seconds"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "fsdp2"]  # and nothing of what the workers say
    assert lines[3] == ""
    for column in ("loss", "grad_norm", "parameters", "update"):
        assert any(line.startswith(f"  {column}") and "at most 1e-" in line and ": " in line for line in lines[4:])


def test_init_prints_one_hash(tmp_path, capsys):
    code, rows = verify(verify_init, tmp_path, capsys, "1,fsdp3,tp2,pp2", ("--training.global_batch_size", "-1"))
    assert len({row["values"]["hash"] for row in rows.values()}) == 1
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert code == 0


def test_the_hash_does_not_depend_on_how_many_numbers_are_read_at_a_time(monkeypatch, tmp_path, capsys):
    _, rows = verify(verify_init, tmp_path, capsys, "1")
    monkeypatch.setattr(parameters, "BLOCK_NUMEL", 1000)
    _, small = verify(verify_init, tmp_path, capsys, "1,fsdp2_tp2")
    assert {row["values"]["hash"] for row in small.values()} == {rows["1"]["values"]["hash"]}


@pytest.mark.parametrize(("layout", "says"), [("fsdp2", "1 of 21 parameters differ"), ("ddp2", "between ranks")])
def test_init_finds_one_wrong_number_on_one_rank(layout, says, monkeypatch, tmp_path, capsys):
    draw_other_bits_on_one_rank(monkeypatch)
    code, rows = verify(verify_init, tmp_path, capsys, f"1,{layout}")
    assert rows[layout]["status"] == "FAIL"
    assert says in rows[layout]["note"]
    assert "layers.1.attention.wq.weight" in rows[layout]["note"]
    assert code == 1


def test_init_finds_a_dropped_layer(monkeypatch, tmp_path, capsys):
    drop_a_layer(monkeypatch)
    code, rows = verify(verify_init, tmp_path, capsys, "1,pp2", ("--model.num_layers", "4"))
    assert rows["pp2"]["status"] == "FAIL"
    assert code == 1


AOT = ("--compile.backend", "aot_eager")


def test_compile_passes_what_computes_the_same(tmp_path, capsys):
    code, rows = verify(verify_compile, tmp_path, capsys, "1", AOT)
    assert [row["status"] for row in rows.values()] == ["reference", "ok"], rows
    assert list(rows) == ["1", "1+compile"]
    assert code == 0


def test_compile_finds_another_result(monkeypatch, tmp_path, capsys):
    original = torch.compile

    def compile_wrongly(forward, **options):
        return original(lambda *args: forward(*args) * 1.001, **options)

    monkeypatch.setattr(torch, "compile", compile_wrongly)
    code, rows = verify(verify_compile, tmp_path, capsys, "1", AOT)
    assert (rows["1+compile"]["status"], code) == ("FAIL", 1)
    assert rows["1+compile"]["values"]


def test_compile_finds_a_model_that_runs_eager(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    code, rows = verify(verify_compile, tmp_path, capsys, "1", AOT)
    assert (rows["1+compile"]["status"], code) == ("FAIL", 1)
    assert "without effect: compile" in rows["1+compile"]["note"]


def rows_of(samples, size=16, length=32):
    tokens = torch.zeros(len(samples), length, dtype=torch.int64)
    return uneven_labels(Batch(tokens, tokens, tokens, tuple(samples)), size)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_whole_rank_has_no_label_in_the_second_step(ranks):
    counts = [count_valid(rows_of(range(16 + rank, 32, ranks)).labels_BT) for rank in range(ranks)]
    assert sorted(bool(count) for count in counts) == [False] * (ranks // 2) + [True] * (ranks // 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_whole_microbatch_has_no_label_in_the_first_step(ranks):
    batch = rows_of(range(0, 16, ranks))
    counts = [int(count_valid(part.labels_BT)) for part in batch.microbatches(4 // ranks)]
    assert counts[1] == 0
    assert len({*counts}) >= 3


def test_documents_start_elsewhere_in_each_row():
    tokens = torch.zeros(5, 16, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens, tuple(range(5)))
    positions = uneven_documents(batch).positions_BT
    starts = [tuple((row == 0).nonzero().flatten().tolist()) for row in positions]
    assert len(set(starts)) == 5
    assert all(2 <= len(found) <= 3 and found[0] == 0 for found in starts)
    assert uneven_documents(batch).ends_BM is None
    ends = uneven_documents(batch.with_ends(16)).ends_BM  # not those of the batch, of which each token is a document
    assert [(0, *sorted({*row.tolist()} - {16})) for row in ends] == starts


OTHER_NORMS = """
from torch import nn
from crius.models.config import DecoderConfig
from crius.models.decoder import Block
from crius.models.layers import RMSNorm
from crius.models.spec import ModelSpec


class Larger(RMSNorm):
    def forward(self, x):
        return 1.5 * super().forward(x)


class OtherNorms(Block):
    def __init__(self, config, index):
        super().__init__(config, index)
        self.attention_norm = Larger(config.dim, config.norm_eps)
        self.ffn_norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=False)


SIZES = DecoderConfig(dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=384, vocab_size=512)
SPEC = ModelSpec(
    name="other_norms",
    flavors={"small": SIZES},
    block=OtherNorms,
)
"""


@pytest.mark.long
def test_tensor_parallelism_keeps_what_a_norm_of_ones_own_computes(tmp_path):
    (tmp_path / "other_norms.py").write_text(OTHER_NORMS)
    model = ["--import", "other_norms", "--model.name", "other_norms", "--training.seq_len", "64"]
    done = crius("verify", "parity", *model, "--layouts", "tp2", "--job.run_dir", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 ok, 0 failed, 0 refused" in done.stdout


def test_what_is_wrong_with_the_options_of_a_verb_is_said_together(capsys):
    assert cli.main(["verify", "chaos", "--kills", "0", "--steps", "-1", "--layouts", "fsdp2,2", "--seed", "x"]) == 2
    error = capsys.readouterr().err
    assert "4 problems" in error
    for said in (
        "--kills 0 is not positive",
        "--steps -1 is not positive",
        "2 is not a layout term",
        "--seed x is not",
    ):
        assert said in error
