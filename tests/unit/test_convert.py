"""Checkpoints of torch's DCP and of safetensors become Crius checkpoints that a run goes on from, bit for bit."""

import functools
import json
import random
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import ROOT, SMALL, steps_of, train
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from crius import cli
from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import damages, read_manifest
from crius.errors import CheckpointError, ConfigError
from crius.kernels.cpu.pointwise import rotary
from crius.launch.local import run_workers
from crius.models.layers import rotary_cos_sin, rotary_frequencies
from crius.models.rope import Rope
from crius.parallel.runtime import world
from crius.tools.convert.convert import convert
from crius.tools.convert.dcp import read_dcp

HEAD_DIM = 8
RUN = [
    *(*SMALL, "--model.num_layers", "1", "--training.steps", "3", "--training.seq_len", "16"),
    *("--training.global_batch_size", "4", "--validation.interval", "0", "--data.no_shuffle"),
]
TITAN = {
    "tok_embeddings.weight": torch.arange(12.0).reshape(4, 3),
    "layers.0.attention.wo.weight": torch.randn(3, 3, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "norm.weight": torch.ones(3, dtype=torch.float16),
}


def save_dcp(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def titan_state(weights, **more):
    """As torchtitan saves a model and AdamW."""
    states = {
        f"{name}.{moment}": torch.full(() if moment == "step" else weight.shape, 2.0)
        for name, weight in weights.items()
        for moment in ("exp_avg", "exp_avg_sq", "step")
    }
    groups = {f"{name}.lr": 1e-3 for name in weights}
    return {
        **weights,
        "optimizer": {"state": states, "param_groups": groups},
        "train_state": {"step": torch.tensor(7, dtype=torch.int32)},
        "lr_scheduler": {"last_epoch": 7},
        "dataloader": {"dp_rank_0": b"bytes"},
        **more,
    }


def tensors_of(folder):
    """All tensors of a Crius checkpoint, after every byte of it is verified."""
    disk = open_disk(str(folder.parent))
    manifest = read_manifest(disk, folder.name)
    assert damages(disk, folder.name, manifest) == []
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == manifest.tensors.keys()
    return found


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def test_a_torchtitan_checkpoint_keeps_every_bit(tmp_path):
    save_dcp(titan_state(TITAN), tmp_path / "source")
    done = convert(str(tmp_path / "source"), str(tmp_path / "to"))
    found = tensors_of(tmp_path / "to" / "step-00000007")
    assert (done.step, done.unknown, len(found)) == (7, [], 12)
    for name, weight in TITAN.items():
        assert same(found[f"model.{name}"], weight)
        assert same(found[f"optim.{name}.exp_avg"], torch.full(weight.shape, 2.0))
    left = {row.source: row.reason for row in done.rows if not row.target}
    assert "dataloader.dp_rank_0" in left and "the config" in left["optimizer.param_groups.norm.weight.lr"]
    state = json.loads((tmp_path / "to" / "step-00000007" / "state.json").read_text())
    assert state["imported"] and state["train"] == {"step": 7}


@pytest.mark.parametrize("nest", [lambda s: {"model": s}, lambda s: {"app": {"model": s}}, lambda s: s])
def test_the_model_is_found_at_the_top_or_below_model(nest, tmp_path):
    save_dcp(nest(TITAN), tmp_path / "step-12")
    done = convert(str(tmp_path / "step-12"), str(tmp_path / "to"))
    assert tensors_of(tmp_path / "to" / "step-00000012").keys() == {f"model.{name}" for name in TITAN}
    assert done.step_from == "by the name of its folder"


@pytest.mark.parametrize(
    ("key", "value"),
    [("ema.norm.weight", torch.ones(3)), ("optim.state.norm.weight.max_exp_avg_sq", torch.ones(3))],
)
def test_an_unknown_key_is_named_and_nothing_is_written(key, value, tmp_path, capsys):
    save_dcp({"model": TITAN, key: value}, tmp_path / "source")
    arguments = ["checkpoint", "convert", str(tmp_path / "source"), str(tmp_path / "to")]
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert f"--skip '{key}'" in err and "UNKNOWN" in out
    assert not (tmp_path / "to").exists()
    assert cli.main([*arguments, "--skip", key, "--step", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left"] == {key: "--skip"}
    assert len(tensors_of(tmp_path / "to" / "step-00000003")) == 3


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"optim.state.other.exp_avg": torch.ones(3)}, "there is no parameter other"),
        ({"optim.state.norm.weight.exp_avg": torch.ones(4)}, "it differs in shape from norm.weight"),
        ({"model.odd": torch.ones(3, dtype=torch.complex64)}, "a Crius checkpoint cannot have complex64"),
        ({"model.extra": 3}, "not a tensor, and not a known value"),
    ],
)
def test_a_state_that_fits_no_parameter_is_not_converted(state, reason, tmp_path):
    save_dcp({"model": TITAN, **state}, tmp_path / "source")
    [row] = convert(str(tmp_path / "source"), str(tmp_path / "to")).unknown
    assert row.reason == reason and not (tmp_path / "to").exists()


def test_renames_map_parameters_and_their_moments(tmp_path):
    weights = {"blocks.0.mlp.up": torch.ones(2, 3), "blocks.1.mlp.up": torch.zeros(2, 3), "head": torch.ones(3)}
    save_dcp(titan_state(weights), tmp_path / "source")
    renames = ["blocks.*.mlp.up=layers.*.feed_forward.w3.weight", "head=output.weight"]
    convert(str(tmp_path / "source"), str(tmp_path / "to"), renames=renames)
    found = tensors_of(tmp_path / "to" / "step-00000007")
    assert same(found["model.layers.1.feed_forward.w3.weight"], torch.zeros(2, 3))
    assert {"optim.layers.0.feed_forward.w3.weight.exp_avg", "optim.output.weight.step"} < found.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        {"renames": ["nothing=x"]},
        {"renames": ["norm.weight"]},
        {"renames": ["layers.*.w=w"]},
        {"renames": ["norm.weight=tok_embeddings.weight"]},
        {"skips": ["nothing"]},
        {"rotary_pairs": 2},
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, tmp_path):
    save_dcp(dict(TITAN), tmp_path / "source")
    with pytest.raises(ConfigError):
        convert(str(tmp_path / "source"), str(tmp_path / "to"), **arguments)
    assert not (tmp_path / "to").exists()


def test_an_import_never_replaces_a_checkpoint(tmp_path):
    save_dcp(dict(TITAN), tmp_path / "source")
    convert(str(tmp_path / "source"), str(tmp_path / "to"), step=5)
    with pytest.raises(CheckpointError, match="has a checkpoint of step 5"):
        convert(str(tmp_path / "source"), str(tmp_path / "to"), step=5)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_every_dtype_and_order_of_dims_is_read(dtype, tmp_path):
    numbers = torch.arange(24).reshape(2, 3, 4)
    parts = {
        "plain": numbers.to(dtype),
        "turned": numbers.to(dtype).permute(2, 0, 1),
        "strided": numbers.to(dtype)[:, ::2],
        "scalar": numbers[0, 0, 1].to(dtype),
        "empty": numbers[:0].to(dtype),
    }
    save_dcp(dict(parts), tmp_path / "source")
    convert(str(tmp_path / "source"), str(tmp_path / "to"), step=1)
    found = tensors_of(tmp_path / "to" / "step-00000001")
    for name, tensor in parts.items():
        assert same(found[f"model.{name}"].float(), tensor.float()), name


def save_shards(folder, placement):
    """A DCP checkpoint of two ranks, each with parts of each tensor, and DCP's sharded safetensors."""
    torch.set_num_threads(1)
    with world(placement.rank, 2, torch.device("cpu"), placement.rendezvous, 60):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        whole = torch.arange(35.0).reshape(7, 5)
        state = {
            "model.rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "model.columns": distribute_tensor(whole, mesh, [Shard(1)]),
            "model.both": distribute_tensor(whole, mesh, [Replicate()]),
        }
        dcp.save(state, checkpoint_id=folder / "dcp")
        writer = dcp.HuggingFaceStorageWriter(str(folder / "shards"), save_distributed=True)
        dcp.save(state, storage_writer=writer)


def test_parts_of_several_ranks_become_whole(tmp_path):
    assert run_workers(functools.partial(save_shards, tmp_path), 2, tmp_path) == 0
    for kind in ("dcp", "shards"):
        convert(str(tmp_path / kind), str(tmp_path / f"to_{kind}"), step=1)
        found = tensors_of(tmp_path / f"to_{kind}" / "step-00000001")
        for name in ("rows", "columns", "both"):
            assert same(found[f"model.{name}"], torch.arange(35.0).reshape(7, 5)), (kind, name)


def test_safetensors_files_and_folders_are_read(tmp_path):
    one, two = {"model.a": torch.ones(2, 3)}, {"model.b": torch.zeros(4).bfloat16()}
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(one, folder / "model-00001-of-00002.safetensors")
    save_file(two, folder / "model-00002-of-00002.safetensors")
    (folder / "unrelated.safetensors").write_bytes(b"no such file is in the index")
    index = {"weight_map": {key: f"model-0000{n}-of-00002.safetensors" for n, key in ((1, "model.a"), (2, "model.b"))}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(str(folder), str(tmp_path / "to"), step=1)
    assert tensors_of(tmp_path / "to" / "step-00000001").keys() == {"model.a", "model.b"}
    convert(str(folder / "model-00001-of-00002.safetensors"), str(tmp_path / "to"), step=2)
    assert same(tensors_of(tmp_path / "to" / "step-00000002")["model.a"], one["model.a"])


def test_every_flipped_bit_that_counts_is_found(tmp_path):
    source = save_dcp({"model": {"a": torch.arange(600.0), "b": torch.ones(50).bfloat16()}}, tmp_path / "source")
    want = {key: bytes(tensor.read()) for key, tensor in read_dcp(source).tensors.items()}
    file = source / "__0_0.distcp"
    whole = file.read_bytes()
    rng, found, harmless = random.Random(5), 0, 0
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        try:
            assert {key: bytes(tensor.read()) for key, tensor in read_dcp(source).tensors.items()} == want
            harmless += 1  # in padding that belongs to no tensor, or in a date
        except CheckpointError:
            found += 1
    assert found + harmless == 300 and found > 150


def test_an_import_does_not_import_torch_and_holds_one_tensor(tmp_path):
    tensors = {f"layers.{i}.w": torch.full((2 << 20,), float(i)) for i in range(12)}  # 8 MiB each
    save_dcp({"model": tensors}, tmp_path / "source")
    code = (
        "import resource, sys\n"
        "from crius.tools.convert.convert import convert\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "convert(sys.argv[1], sys.argv[2])\n"
        "assert 'torch' not in sys.modules\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "source"), str(tmp_path / "to")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert float(done.stdout) < 30, "MiB more than before, for 96 MiB of tensors"


def pairs(rows, head_dim):
    """Rows in the order of halves, put in the order of pairs."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def test_rotary_pairs_give_the_same_attention_scores(tmp_path):
    torch.manual_seed(0)
    x, wq, wk = torch.randn(1, 6, 4), torch.randn(2 * HEAD_DIM, 4), torch.randn(2 * HEAD_DIM, 4)
    names = {"layers.0.attention.wq.weight": wq, "layers.0.attention.wk.weight": wk}
    save_dcp(dict(names), tmp_path / "source")
    convert(str(tmp_path / "source"), str(tmp_path / "to"), step=1, rotary_pairs=HEAD_DIM)
    found = tensors_of(tmp_path / "to" / "step-00000001")
    turns = rotary_cos_sin(
        torch.arange(6)[None], rotary_frequencies(Rope(theta=10_000.0, dim=HEAD_DIM), torch.device("cpu"))
    )

    def crius_scores(q, k):
        return torch.einsum("bqnh,bknh->bnqk", rotary(q, *turns), rotary(k, *turns))

    def titan_scores(q, k):
        angles = torch.outer(torch.arange(6.0), 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        turned = [
            torch.view_as_real(torch.view_as_complex(y.reshape(1, 6, 2, -1, 2)) * turn).flatten(3) for y in (q, k)
        ]
        return torch.einsum("bqnh,bknh->bnqk", *turned)

    q, k = ((x @ weight.T).view(1, 6, 2, HEAD_DIM) for weight in (wq, wk))
    ours = [(x @ found[f"model.{name}"].T).view(1, 6, 2, HEAD_DIM) for name in names]
    torch.testing.assert_close(crius_scores(*ours), titan_scores(q, k))
    assert not torch.allclose(crius_scores(q, k), titan_scores(q, k), atol=0.1)


@pytest.mark.full
def test_a_run_goes_on_from_an_import_as_from_its_own_checkpoint(tmp_path):
    flags = [*RUN, "--checkpoint.interval", "1", "--checkpoint.mode", "sync"]
    own = steps_of(train(flags, tmp_path / "own"))
    [file] = (tmp_path / "own" / "checkpoints" / "step-00000001").glob("*.safetensors")
    tensors = load_file(file)
    weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    states = {name.removeprefix("optim."): t for name, t in tensors.items() if name.startswith("optim.")}
    rotary = [name for name in (*weights, *states) if ".attention.wq." in name or ".attention.wk." in name]
    head_dim = 16  # of the debug model
    for name in rotary:
        place = weights if name in weights else states
        place[name] = pairs(place[name], head_dim) if place[name].dim() == 2 else place[name]
    state = {**weights, "optimizer": {"state": states}, "train_state": {"step": torch.tensor(1)}}
    save_dcp(state, tmp_path / "titan")
    convert(str(tmp_path / "titan"), str(tmp_path / "imported"), rotary_pairs=head_dim)
    # another seed would start from other weights; the order of the data does not depend on it here
    again = [*RUN, "--debug.seed", "77", "--checkpoint.enable", "--checkpoint.load_path", str(tmp_path / "imported")]
    resumed = steps_of(train(again, tmp_path / "resumed"))
    assert [record["step"] for record in resumed] == [2, 3]
    assert [record["loss"] for record in resumed] == [record["loss"] for record in own[1:]]
