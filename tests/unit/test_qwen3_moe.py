"""Models with experts that come in and go out: each expert is a tensor there, and a row of one tensor here."""

import json
import re
import shutil
import tracemalloc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from pretrained_samples import EXPERTS, SIZES, save
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from crius.checkpoint.load import load_tensors
from crius.cli import main
from crius.errors import ConfigError
from crius.interop.safetensors_file import SafetensorsFile
from crius.interop.weights import open_weights
from crius.models.huggingface import HuggingFace, config_of, read_model_settings, rows_of
from crius.models.registry import SPECS, families
from crius.tools.convert import exporting
from crius.tools.convert.dcp_out import export_dcp
from crius.tools.convert.exporting import export_model, open_source
from crius.tools.convert.importing import import_model

pytest.importorskip("transformers")

EXPERT = "model.layers.0.mlp.experts.{}.gate_proj.weight"
SHAPE = "[48, 64]"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two layers of six experts, in one file."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    save("qwen3_moe", folder, num_hidden_layers=2)
    for name in ("model.safetensors.index.json", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    whole = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(whole, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def alone(monkeypatch):
    """transformers is not installed."""
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)


def change_config(folder, **changes):
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


SETTINGS = {
    "weights as they are": ({"norm_topk_prob": False}, "norm_topk_prob false is not supported, only true is"),
    "transformers' default": ({"norm_topk_prob": ...}, "it has no norm_topk_prob; only norm_topk_prob true is"),
    "every other layer": ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported, only 1 is"),
    "a dense layer": ({"mlp_only_layers": [1]}, "mlp_only_layers [1] is not supported, only [] is"),
    "two numbers": (
        {"num_experts": 6, "num_local_experts": 5},
        "num_experts 6 and num_local_experts 5 are two names of one size",
    ),
    "no number": ({"num_local_experts": "6"}, 'num_local_experts is "6", not a whole number above 0'),
    "windows": ({"use_sliding_window": True}, "use_sliding_window true is not supported"),
    "an fp8 model": ({"quantization_config": {"quant_method": "fp8"}}, 'quantised by "fp8" are not read'),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_changes_the_computation_is_refused_by_name(name, folder, tmp_path, capsys):
    changes, said = SETTINGS[name]
    change_config(folder, **changes)
    assert main(["import", str(folder), str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_what_changes_no_logits_is_left_alone(folder):
    change_config(folder, router_aux_loss_coef=0.5, output_router_logits=True, num_experts=6)
    assert open_weights(str(folder)).model["num_experts"] == 6


def put(key, tensor):
    return lambda tensors: tensors.__setitem__(key, tensor)


TENSORS = {
    "missing": (lambda tensors: tensors.pop(EXPERT.format(3)), f"1 that the model has and the source lacks: {EXPERT}"),
    "too many": (put(EXPERT.format(6), torch.ones(48, 64)), f"1 that the source has and the model lacks: {EXPERT}"),
    "of another shape": (
        put(EXPERT.format(3), torch.ones(64, 48)),
        f"1 of another shape: {EXPERT}: [64, 48] in the source, {SHAPE} in the model",
    ),
    "fused": (
        lambda tensors: [
            *(tensors.pop(EXPERT.format(number)) for number in range(6)),
            put("model.layers.0.mlp.experts.gate_up_proj", torch.ones(6, 96, 64))(tensors),
        ],
        "1 that the source has and the model lacks: model.layers.0.mlp.experts.gate_up_proj",
    ),
    "of several dtypes": (
        put(EXPERT.format(3), torch.ones(48, 64).bfloat16()),
        f"{EXPERT} has dtype BF16, model.layers.0.mlp.experts.5.gate_proj.weight has dtype F32",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_experts_that_do_not_fit_are_named(name, folder, tmp_path, capsys):
    change, said = TENSORS[name]
    change_tensors(folder, change)
    assert main(["import", str(folder), str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    number = 6 if name == "too many" else 3
    assert said.format(number) in error and error.count("Error: ") == 1 and not (tmp_path / "run").exists()


def test_more_experts_than_tensors_get_no_names(folder, tmp_path, capsys):
    change_config(folder, num_local_experts=1 << 50)
    assert main(["import", str(folder), str(tmp_path / "run")]) == 1
    assert re.search(r"has 57 tensors for 2 layers of 1,125,899,906,842,624 experts", capsys.readouterr().err)


def test_windows_of_a_mixtral_are_refused(tmp_path, capsys):
    config = SIZES | EXPERTS["mixtral"] | {"model_type": "mixtral", "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["config", "show", "--model.from_hf", str(tmp_path)]) == 2
    assert "sliding_window 4096 is not supported, only null is" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_config_json_says_each_size_again(name, tmp_path):
    spec = SPECS[name]
    for flavor in spec.flavors:
        config = spec.describe(flavor).config
        (tmp_path / "config.json").write_text(json.dumps(config_of(spec.hf, vars(config) | {"rope_scaling": "none"})))
        assert main(["config", "show", "--model.from_hf", str(tmp_path)]) == 0
        assert spec.describe("custom", **read(tmp_path)).config == config


def read(folder):
    settings = read_model_settings(str(folder), families())[1]
    return {field: value for field, value in settings.items() if field not in ("name", "flavor")}


def test_rows_are_named_by_their_number():
    family = HuggingFace(model_type="", architecture="", names={"layers.*.w": "model.*.experts.#.up.weight"})
    assert rows_of(family.translated("layers.7.w"), (2, 3, 4)) == {
        "model.7.experts.0.up.weight": (3, 4),
        "model.7.experts.1.up.weight": (3, 4),
    }
    assert rows_of("norm.weight", (5,)) == {"norm.weight": (5,)}


def test_in_and_out_less_than_twice_the_largest_tensor_is_in_memory(tmp_path, alone):
    """Also where the experts of a layer together are the largest one."""
    save("qwen3_moe", tmp_path / "model", num_hidden_layers=1, num_experts=16, moe_intermediate_size=2048)
    largest = 16 * 2048 * 64 * 4

    def export(target, dtype=""):
        export_model(replace(open_source(str(tmp_path / "run"), -1), has_tokenizer=False), str(target), dtype)

    for step in (
        lambda: import_model(str(tmp_path / "model"), str(tmp_path / "run")),
        lambda: export(tmp_path / "back"),
        lambda: export(tmp_path / "half", "bfloat16"),
    ):
        tracemalloc.start()
        try:
            step()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert largest < peak < 1.8 * largest


@pytest.fixture
def second_of_two():
    """The mesh of two ranks, of which this process is the second."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("dim", "share"), [(0, 1 / 2), (1, 1 / 2), (2, 1.0)])
def test_a_rank_reads_of_the_experts_what_it_holds(dim, share, saved, second_of_two, monkeypatch):
    """The experts of an expert-parallel rank, and of each expert the rows of an FSDP rank."""
    sizes, read = [], SafetensorsFile.read

    def counting(*of):
        data = read(*of)
        sizes.append(data.nbytes)
        return data

    monkeypatch.setattr(SafetensorsFile, "read", counting)
    tensors = {name: tensor for name, tensor in open_weights(str(saved)).tensors.items() if ".experts." in name}
    wholes = {
        name: torch.frombuffer(tensor.read(), dtype=torch.float32).view(tensor.shape)
        for name, tensor in tensors.items()
    }
    targets = {
        name: DTensor.from_local(torch.zeros_like(whole.chunk(2, dim)[1]), second_of_two, [Shard(dim)])
        for name, whole in wholes.items()
    }
    sizes.clear()
    load_tensors(tensors, targets)
    for name, target in targets.items():
        assert torch.equal(target.to_local(), wholes[name].chunk(2, dim)[1])
    assert sum(sizes) == share * sum(tensor.num_bytes for tensor in tensors.values())


def test_dcp_has_the_experts_of_torchtitan_and_comes_back(saved, tmp_path):
    done = export_dcp(open_source(str(saved), -1), str(tmp_path / "titan"))
    weights = open_weights(str(saved)).tensors
    assert done.tensors == len(weights)
    assert main(["checkpoint", "convert", str(tmp_path / "titan"), str(tmp_path / "back")]) == 0
    folder = tmp_path / "back" / "step-00000000"
    back = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    assert back.keys() == {f"model.{name}" for name in weights}
    for name, tensor in weights.items():
        assert back[f"model.{name}"].shape == tensor.shape
        assert back[f"model.{name}"].numpy().tobytes() == bytes(tensor.read())


def test_a_dense_model_takes_no_sizes_of_experts():
    with pytest.raises(ConfigError, match="llama3 has no num_experts, top_k: its layers have no experts") as found:
        SPECS["llama3"].describe("debug", num_experts=4, top_k=2, dim=64)
    assert found.value.where == "model.num_experts"


def test_adapters_are_trained_beside_frozen_experts_and_merged(saved, tmp_path, alone):
    flags = [
        "--checkpoint.init_from",
        str(saved),
        "--lora.rank",
        "4",
        "--steps",
        "1",
        "--seq_len",
        "32",
        "--batch",
        "4",
    ]
    flags += ["--validation.interval", "0", "--checkpoint.enable", "--job.run_dir", str(tmp_path / "run")]
    assert main(["train", *flags]) == 0
    done = export_model(open_source(str(tmp_path / "run"), -1), str(tmp_path / "merged"))
    before, after = load_file(saved / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert done.tensors == len(after) and before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert {key.split(".")[-2] for key in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}
