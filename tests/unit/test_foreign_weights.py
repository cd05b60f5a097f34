"""Weights of other programs, chosen and read as transformers and PEFT do; what cannot be right is refused by name."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import parse
from pretrained_samples import save_tokenizer
from safetensors.numpy import load_file, save_file

from crius.checkpoint.load import load_tensors
from crius.cli import main
from crius.errors import CheckpointError, ConfigError, CriusError
from crius.interop import numbers, peft
from crius.interop.foreign import Foreign, check_tiles
from crius.interop.safetensors_file import ADAPTER_FILE, INDEX, WHOLE
from crius.interop.weights import open_weights
from crius.kernels import choice
from crius.models import registry
from crius.tools.convert.exporting import open_source
from crius.tools.convert.importing import import_model
from crius.tools.convert.peft_out import adapter_config, base_of
from crius.train.inputs import check_resume, open_initial

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
}
LAYER = {
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
}
SHAPES = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8)}
SHAPES |= {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()}
NORM = "model.norm.weight"


def tensors_of(seed=0, dtype=np.float32):
    numbers_of = np.random.default_rng(seed)
    return {name: numbers_of.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def write_model(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / WHOLE)
    return folder


def write_shards(folder, tensors, absent=False):
    """Write an index and its two files, or only the index."""
    names = {name: FIRST if "layers.0" in name else SECOND for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    for file in () if absent else (FIRST, SECOND):
        save_file({name: tensors[name] for name in names if names[name] == file}, folder / file)


def norm_of(place):
    return np.frombuffer(open_weights(str(place)).tensors["norm.weight"].read(), np.float32)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model", tensors_of())


def shards_alone(folder):
    write_shards(folder, tensors_of())
    (folder / WHOLE).unlink()


def shards_without_index(folder):
    shards_alone(folder)
    (folder / INDEX).unlink()


def index_of_the_file_itself(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(SHAPES, WHOLE)}))


def others(folder):
    for name in ("optimizer.safetensors", ADAPTER_FILE):
        save_file({"m": np.zeros(2, np.float32)}, folder / name)
    (folder / "consolidated.safetensors").write_bytes(b"not even a header")


FILES = {
    "model.safetensors": (lambda folder: None, ""),
    "an index of absent files": (lambda folder: write_shards(folder, tensors_of(1), absent=True), f"{INDEX}, which"),
    "an index of the same weights": (lambda folder: write_shards(folder, tensors_of()), "which has the same weights"),
    "an index of model.safetensors": (index_of_the_file_itself, ""),
    "an index alone": (shards_alone, ""),
    "numbered files without an index": (shards_without_index, ""),
    "files of other things": (others, f"left out: {ADAPTER_FILE}, consolidated.safetensors, optimizer"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_files_that_transformers_reads_are_read_and_the_others_named_in_one_line(name, model, lines):
    change, words = FILES[name]
    change(model)
    assert norm_of(model).tobytes() == tensors_of()[NORM].tobytes()
    norm_of(model)
    found = [line for line in lines() if "left out" in line]
    assert len(found) == bool(words)
    assert words in "".join(found)


def test_a_stale_index_beside_a_newer_file_is_refused_with_both_names(model, tmp_path, capsys):
    write_shards(model, tensors_of() | {NORM: np.zeros(8, np.float32)})
    assert main(["import", str(model), str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert f"{WHOLE} and {INDEX}, whose weights differ, such as {NORM}" in error
    assert f"rm {model}/{INDEX}, which keeps {WHOLE}" in error and not (tmp_path / "run").exists()
    (model / INDEX).unlink()
    assert norm_of(model).tobytes() == tensors_of()[NORM].tobytes()


def test_files_that_are_no_model_are_not_read_as_one(model):
    (model / WHOLE).rename(model / "consolidated.safetensors")
    with pytest.raises(ConfigError, match="has no model.safetensors, index or"):
        open_weights(str(model))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_a_prefix_of_all_names_is_left_out_and_said(prefix, tmp_path, lines):
    given = tensors_of()
    folder = write_model(tmp_path / "model", {f"{prefix}{name}": tensor for name, tensor in given.items()})
    assert norm_of(folder).tobytes() == given[NORM].tobytes()
    assert [line for line in lines() if f"begin with {prefix}" in line]


def test_a_prefix_of_some_names_is_refused(tmp_path):
    given = {name if name == NORM else f"module.{name}": tensor for name, tensor in tensors_of().items()}
    with pytest.raises(CheckpointError, match="do not match"):
        open_weights(str(write_model(tmp_path / "model", given)))


def test_names_that_torch_compile_gave_to_some_modules_are_refused_with_the_remedy(tmp_path):
    given = {name.replace("layers.1.", "layers.1._orig_mod."): tensor for name, tensor in tensors_of().items()}
    with pytest.raises(CheckpointError) as caught:
        open_weights(str(write_model(tmp_path / "model", given)))
    assert "leave _orig_mod." in caught.value.fix
    with pytest.raises(CheckpointError) as caught:
        open_weights(str(write_model(tmp_path / "other", {f"v.{name}": one for name, one in tensors_of().items()})))
    assert "_orig_mod." not in caught.value.fix


def test_experts_in_one_tensor_are_refused_with_the_remedy(tmp_path):
    given = tensors_of() | {name: np.ones(2, np.float32) for name in ("model.layers.0.mlp.experts.down_proj", "other")}
    with pytest.raises(CheckpointError, match="2 that the source has") as caught:
        open_weights(str(write_model(tmp_path / "model", given)))
    assert "load it with transformers and save it again" in caught.value.fix


@pytest.mark.parametrize("tied", [True, False])
def test_names_of_the_base_model_are_taken_with_its_prefix(tied, tmp_path):
    """``LlamaModel.save_pretrained`` writes them; without a tied embedding it has no output layer."""
    given = {name.removeprefix("model."): tensor for name, tensor in tensors_of().items() if name != "lm_head.weight"}
    folder = write_model(tmp_path / "model", given, architectures=["LlamaModel"], tie_word_embeddings=tied)
    if tied:
        assert norm_of(folder).tobytes() == given["norm.weight"].tobytes()
        return
    with pytest.raises(CheckpointError) as found:
        open_weights(str(folder))
    assert "lacks: lm_head.weight" in found.value.why
    save_file(given | {"lm_head.weight": tensors_of()["lm_head.weight"]}, folder / WHOLE)
    assert norm_of(folder).tobytes() == given["norm.weight"].tobytes()


def test_a_config_with_a_byte_order_mark_is_read(model):
    (model / "config.json").write_bytes(b"\xef\xbb\xbf" + (model / "config.json").read_bytes())
    assert open_weights(str(model)).model["dim"] == 8


BITS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 0xFFF8_0000_0000_0001, 0x7FEF_FFFF_FFFF_FFFF),
    "F32": ("<u4", 0x7F80_0000, 0xFFC0_0001, 0xFF7F_FFFF),
    "F16": ("<u2", 0x7C00, 0xFE01, 0xFBFF),
    "BF16": ("<u2", 0xFF80, 0x7FC1, 0x7F7F),
    "F8_E5M2": ("u1", 0x7C, 0xFF, 0xFB),
    "F8_E4M3": ("u1", 0x7F, 0xFF, 0xFE),
}


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("index", [0, 70_000])
def test_infinity_and_nan_are_found_by_their_bits_and_the_largest_numbers_are_not(dtype, index, monkeypatch):
    monkeypatch.setattr(numbers, "BLOCK_BYTES", 1 << 14)
    kind, *bad, largest = BITS[dtype]
    data = np.zeros(70_001, kind)
    data[3] = largest
    assert numbers.is_finite(data.view(np.uint8).data, dtype)
    for bits in bad:
        data[index] = bits
        assert not numbers.is_finite(data.view(np.uint8).data, dtype)
    assert numbers.is_finite(memoryview(b""), dtype)


BAD = "layers.1.attention.wk.weight"
VERBS = {
    "import": ["import", "SOURCE", "TARGET"],
    "export": ["export", "SOURCE", "TARGET"],
    "generate": ["generate", "SOURCE", "--prompt", "a", "--max_new_tokens", "1", "--device", "cpu"],
    "evaluate": ["evaluate", "SOURCE", "--tasks", "TEXT", "--device", "cpu"],
}


@pytest.fixture
def poisoned(tmp_path):
    """A model of the byte tokenizer's size, with one infinite number."""
    shapes = {name: (264, 8) if shape[0] == 16 else shape for name, shape in SHAPES.items()}
    tensors = {name: np.full(shape, 0.01, np.float32) for name, shape in shapes.items()}
    tensors["model.layers.1.self_attn.k_proj.weight"][1, 2] = np.inf
    folder = write_model(tmp_path / "model", tensors, vocab_size=264)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("verb", VERBS)
def test_a_parameter_that_is_not_finite_is_refused_by_name_wherever_weights_are_read(verb, poisoned, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a text of some words\n" * 20)
    places = {"SOURCE": str(poisoned), "TARGET": str(tmp_path / "out"), "TEXT": str(tmp_path / "text.txt")}
    with choice.applied(choice.current()):
        assert main([places.get(word, word) for word in VERBS[verb]]) == 1
    error = capsys.readouterr().err
    assert f"{BAD} of {poisoned} has numbers that are not finite" in error and "Traceback" not in error
    assert f"crius import {poisoned} DIR --allow_nonfinite" in error


def test_a_run_does_not_start_from_a_parameter_that_is_not_finite(poisoned):
    weights = open_initial(parse(["--checkpoint.init_from", str(poisoned)]))
    with pytest.raises(CheckpointError, match=f"{BAD} of {poisoned} has numbers that are not finite"):
        load_tensors(weights.tensors, {BAD: torch.empty(4, 8)})


def test_numbers_that_are_not_finite_are_allowed_by_a_flag_and_wherever_its_run_folder_is_read(
    poisoned, tmp_path, capsys
):
    assert main(["import", str(poisoned), str(tmp_path / "run"), "--allow_nonfinite"]) == 0
    [piece] = open_weights(str(poisoned)).tensors[BAD].pieces
    with pytest.raises(CheckpointError, match="not finite"):
        piece.read_rows(0, 2)
    rows = np.frombuffer(piece.read_rows(2, 4), np.float32)
    whole = np.frombuffer(open_weights(str(tmp_path / "run")).tensors[BAD].read(), np.float32)
    assert np.isinf(whole[10]) and whole[16:].tobytes() == rows.tobytes()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    assert "not compared: the model may have numbers that are not finite" in capsys.readouterr().out
    with choice.applied(choice.current()):
        assert main(["generate", str(tmp_path / "run"), "--prompt", "a", "--json"]) == 1
    out, error = capsys.readouterr()
    assert out == "" and "is nan" in error


def test_an_import_of_numbers_that_may_be_not_finite_says_so_in_its_turn(poisoned, tmp_path):
    import_model(str(poisoned), str(tmp_path / "first"), allow_nonfinite=True)
    import_model(str(tmp_path / "first"), str(tmp_path / "second"))
    assert np.isinf(np.frombuffer(open_weights(str(tmp_path / "second")).tensors[BAD].read(), np.float32)).any()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.bool_])
def test_parameters_of_integers_are_refused_and_all_are_named(dtype, tmp_path, capsys):
    tensors = tensors_of()
    tensors |= {name: tensor.astype(dtype) for name, tensor in tensors.items() if "mlp" in name}
    source = write_model(tmp_path / "model", tensors)
    assert main(["import", str(source), str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    names = ", ".join(f"layers.{layer}.feed_forward.{name}.weight" for layer in range(2) for name in ("w1", "w2", "w3"))
    assert f"has parameters that are not floating-point: {names}." in error
    assert not (tmp_path / "run").exists()


def test_buffers_and_checkpoints_of_crius_in_few_bits_are_left_alone(poisoned, tmp_path, monkeypatch):
    tensors = open_weights(str(poisoned), allow_nonfinite=True).tensors
    assert numbers.finite(tensors, [], "here")[BAD].read() == tensors[BAD].read()
    few = write_model(tmp_path / "few", {name: tensor.astype(np.int8) for name, tensor in tensors_of().items()})
    with monkeypatch.context() as patched:
        patched.setattr("crius.interop.weights.check_dtypes", lambda *_: None)
        import_model(str(few), str(tmp_path / "run"))
    assert open_weights(str(tmp_path / "run")).tensors["norm.weight"].read().nbytes == 8


RANK = 2


def factors_of(modules=("q_proj", "v_proj"), seed=7, rank=RANK):
    """Tensors of an adapter, by PEFT's names."""
    draw = np.random.default_rng(seed)
    found = {}
    for name, shape in SHAPES.items():
        if len(shape) == 2 and name.split(".")[-2] in modules:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{module}.lora_A.weight"] = draw.standard_normal((rank, shape[1])).astype(np.float32)
            found[f"{module}.lora_B.weight"] = draw.standard_normal((shape[0], rank)).astype(np.float32)
    return found


def write_adapter(folder, base, factors=None, **settings):
    folder.mkdir(exist_ok=True)
    content = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 6}
    content |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": str(base)} | settings
    (folder / "adapter_config.json").write_text(json.dumps(content))
    save_file(factors_of() if factors is None else factors, folder / ADAPTER_FILE)
    return folder


@pytest.fixture
def adapter(model, tmp_path):
    return write_adapter(tmp_path / "adapter", model, use_rslora=True)


def sums_of(base, adapter, scale):
    """The weights of ``base`` with an adapter, by Hugging Face's names, as the formula of LoRA says."""
    tensors = load_file(base / WHOLE)
    factors = load_file(adapter / ADAPTER_FILE)
    for key, a in factors.items():
        if key.endswith(".lora_A.weight"):
            name = f"{key.removeprefix('base_model.model.').removesuffix('.lora_A.weight')}.weight"
            b = factors[key.replace("lora_A", "lora_B")]
            product = b.astype(np.float64) @ a.astype(np.float64)
            tensors[name] = (tensors[name] + scale * product).astype(np.float32)
    return tensors


def assert_are(place, want):
    found = open_weights(str(place)).tensors
    for name, tensor in found.items():
        check_tiles([(piece.offset, piece.shape) for piece in tensor.pieces], tensor.shape, name)
    for ours, theirs in (
        ("attention.wq", "self_attn.q_proj"),
        ("attention.wv", "self_attn.v_proj"),
        ("attention.wk", "self_attn.k_proj"),
    ):
        for layer in range(2):
            read = np.frombuffer(found[f"layers.{layer}.{ours}.weight"].read(), np.float32)
            expected = want[f"model.layers.{layer}.{theirs}.weight"].reshape(-1)
            np.testing.assert_allclose(read, expected, rtol=1e-6, atol=1e-7)


def test_an_adapter_of_peft_is_its_base_with_the_adapter_wherever_a_model_is_taken(adapter, model, tmp_path):
    """Opened as it is, kept in a run folder, and merged into one."""
    want = sums_of(model, adapter, 6 / np.sqrt(RANK))
    assert_are(adapter, want)
    import_model(str(adapter), str(tmp_path / "kept"))
    import_model(str(adapter), str(tmp_path / "merged"), adapter="merge")
    for place in ("kept", "merged"):
        assert_are(tmp_path / place, want)
    kept = open_weights(str(tmp_path / "kept")).adapters
    assert (kept.lora.rank, kept.lora.alpha, kept.lora.rslora) == (RANK, 6, True)
    assert kept.lora.targets == ("attention.wq", "attention.wv")
    assert (
        kept.tensors["layers.1.attention.wv.lora_B"].read()
        == open_weights(str(adapter)).adapters.tensors["layers.1.attention.wv.lora_B"].read()
    )
    assert open_weights(str(tmp_path / "merged")).adapters is None


def test_the_tokenizer_of_an_adapter_is_its_own_or_that_of_its_base(adapter, model):
    save_tokenizer(model)
    assert open_weights(str(adapter)).tokenizer == open_weights(str(model)).tokenizer != ""
    save_tokenizer(adapter)
    assert open_weights(str(adapter)).tokenizer == str(adapter)


def test_an_adapter_on_a_model_without_hugging_face_names_is_refused(model, tmp_path, monkeypatch):
    import_model(str(model), str(tmp_path / "run"))
    folder = write_adapter(tmp_path / "adapter", tmp_path / "run")
    monkeypatch.setattr(registry, "families", dict)
    with pytest.raises(ConfigError, match=r"llama3 has no Hugging Face names for layers\.\*\.attention\.wq\.weight"):
        open_weights(str(folder))


def test_a_run_starts_from_an_adapter_of_peft(adapter, model):
    run = parse(["--checkpoint.init_from", str(adapter)])
    weights = open_initial(run)
    assert (weights.kind, run.model.dim) == ("PEFT", 8)
    assert weights.digest != open_weights(str(model)).digest


def test_a_run_from_the_checkpoint_of_kept_adapters_has_their_settings(adapter, tmp_path):
    import_model(str(adapter), str(tmp_path / "kept"))
    flags = ["--checkpoint.load_path", str(tmp_path / "kept/checkpoints")]
    told = ["--config", str(tmp_path / "kept/run.toml"), *flags]
    check_resume(parse(told), tmp_path / "new")
    with pytest.raises(ConfigError, match=r"lora.alpha: 6 -> 99.0"):
        check_resume(parse([*told, "--lora.alpha", "99"]), tmp_path / "new")
    check_resume(parse([*told, "--lora.alpha", "99", "--checkpoint.allow_changes", "lora.alpha"]), tmp_path / "new")


def test_a_merged_adapter_is_rounded_to_the_dtype_of_its_base(tmp_path):
    base = write_model(tmp_path / "base", tensors_of(dtype=np.float16))
    import_model(str(write_adapter(tmp_path / "adapter", base)), str(tmp_path / "run"), adapter="merge")
    assert {tensor.dtype for tensor in open_weights(str(tmp_path / "run")).tensors.values()} == {"F16"}


SETTINGS = {
    "dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "rank_pattern": {"rank_pattern": {"q_proj": 4}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 4}},
    "a rank of some": {"rank_pattern": {"q_proj": RANK, "k_proj": RANK + 1}},
    "init_lora_weights": {"init_lora_weights": "pissa_niter_4"},
    "layer_replication": {"layer_replication": [[0, 2]]},
    "task_type": {"task_type": "SEQ_CLS"},
    "peft_type": {"peft_type": "IA3"},
    "a setting of a later version": {"use_new": True},
    "r": {"r": 0},
    "a bool for r": {"r": True},
    "lora_alpha": {"lora_alpha": -1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_peft_that_crius_lacks_is_refused_by_name(name):
    [(key, value)] = SETTINGS[name].items()
    content = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6} | SETTINGS[name]
    assert list(peft.differences(content)) == [f"{key} {value!r} is not supported"]


def test_settings_that_change_nothing_are_taken():
    content = {"peft_type": "LORA", "r": 1, "lora_alpha": 0.5, "rank_pattern": {"q_proj": 1}, "alpha_pattern": {}}
    content |= {"bias": "none", "lora_dropout": 0.1, "init_lora_weights": "gaussian", "loftq_config": {}}
    assert list(peft.differences(content | {"modules_to_save": None, "peft_version": "0.21.2"})) == []
    for one in ({"use_rslora": True}, {"use_rslora": False}, {"init_lora_weights": True}, {"init_lora_weights": False}):
        assert list(peft.differences(content | one)) == []
    default = {"peft_type": "LORA", "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 8}}
    assert list(peft.differences(default)) == []
    assert len(list(peft.differences({"rank_pattern": {"q_proj": 9}}))) == 2, "no type, and not the default rank"


@pytest.mark.parametrize(
    ("content", "is_listed"),
    [
        ({}, True),
        ({"layers_to_transform": [], "exclude_modules": None}, True),
        ({"layers_to_transform": [0]}, False),
        ({"exclude_modules": ["wk"]}, False),
        ({"target_modules": ".*wq"}, False),
        ({"target_modules": ["q"]}, False),
    ],
)
def test_a_module_is_listed_if_its_name_is_in_all_layers(content, is_listed):
    assert peft._is_listed("layers.1.attention.wq", {"target_modules": ["wk", "wq"], **content}) == is_listed


def test_all_that_is_not_supported_is_named_together(model, tmp_path, capsys):
    """Settings, tensors, and the base that is not there."""
    factors = factors_of(("q_proj", "lm_head"))
    folder = write_adapter(tmp_path / "adapter", model, factors, use_dora=True, bias="all")
    assert main(["import", str(folder), str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    for words in (
        "use_dora True",
        "bias 'all'",
        "base_model.model.lm_head.lora_A.weight",
        "layers.0.attention.wv.lora_A",
    ):
        assert words in error
    write_adapter(folder, "nobody/has-this", use_dora=True)
    assert main(["import", str(folder), str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "use_dora True" in error and "hf download nobody/has-this" in error
    assert not (tmp_path / "run").exists()


def test_a_rank_that_the_tensors_contradict_is_refused(model, tmp_path):
    with pytest.raises(CriusError, match="do not match the adapters"):
        open_weights(str(write_adapter(tmp_path / "adapter", model, r=4)))


def test_a_base_of_the_hub_is_read_from_its_cache_and_named_by_the_hub_in_an_export(model, tmp_path, monkeypatch):
    root = tmp_path / "models--someone--small"
    commit = "0123456789" * 4
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    (root / "snapshots").mkdir()
    model.rename(root / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", None)  # nobody is asked
    adapter = write_adapter(tmp_path / "adapter", "someone/small")
    import_model(str(root / "snapshots" / commit), str(tmp_path / "imported"))
    for name in ("someone/small", tmp_path / "imported"):
        base = base_of(open_weights(str(write_adapter(adapter, name))).adapters)
        assert (base.name, base.revision, base.folder) == ("someone/small", commit, str(root / "snapshots" / commit))


def test_an_export_names_a_base_that_peft_can_open_and_crius_reads_it_back(adapter, model, tmp_path):
    """The folder that an import came from, if it still has the same weights; else the checkpoint."""
    import_model(str(model), str(tmp_path / "imported"))
    weights = open_weights(str(write_adapter(adapter, tmp_path / "imported")))
    base = base_of(weights.adapters)
    assert (base.name, base.folder) == (str(model), str(model))
    written = adapter_config(weights.adapters, weights, ["model.layers.0.self_attn.q_proj"], base)
    assert not list(peft.differences(written)) and written["base_model_name_or_path"] == str(model)
    write_model(model, tensors_of(1))
    base = base_of(weights.adapters)
    assert (base.name, base.folder) == (str(tmp_path / "imported"), "")


def test_an_adapter_on_an_adapter_is_not_exported_for_peft(adapter, tmp_path):
    """PEFT would open the inner one as a model, and leave it out."""
    adapters = open_weights(str(adapter)).adapters
    outer = replace(adapters, base={**adapters.base, "path": str(adapter)})
    with pytest.raises(ConfigError, match="is an adapter itself") as error:
        base_of(outer)
    assert error.value.fix.startswith("--format hf")


@pytest.mark.parametrize("kind", ["adapter", "kept"])
def test_adapters_of_adapters_have_a_largest_depth(kind, adapter, tmp_path, monkeypatch):
    import_model(str(adapter), str(tmp_path / "kept"))
    monkeypatch.setattr("crius.interop.weights._MOST_BASES", 1)
    assert open_weights(str(tmp_path / kind)).adapters
    monkeypatch.setattr("crius.interop.weights._MOST_BASES", 0)
    with pytest.raises(CheckpointError, match="more than 0 levels deep"):
        open_weights(str(tmp_path / kind))


def test_an_adapter_with_a_tensor_of_an_unknown_dtype_is_refused(adapter):
    file = adapter / ADAPTER_FILE
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    key = next(key for key in header if key.endswith("lora_B.weight"))
    header[key]["dtype"] = "F4_NEW"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + file.read_bytes()[8 + length :])
    with pytest.raises(CheckpointError, match="a Crius checkpoint cannot hold F4_NEW"):
        open_weights(str(adapter))


@pytest.mark.parametrize("way", ["", "merge", "keep", "leave_out"])
def test_a_model_beside_an_adapter_needs_a_word(way, adapter, model, tmp_path, capsys, lines):
    """As in transformers, the adapter's base is then the model beside it."""
    write_adapter(model, "nobody/has-this")
    alone = open_weights(str(model), adapter="leave_out")
    code = main(["import", str(model), str(tmp_path / "run"), *(["--adapter", way] if way else [])])
    error = capsys.readouterr().err
    if not way:
        assert code == 2 and f"crius import {model} DIR --adapter leave_out (or merge, or keep)" in error
        with pytest.raises(ConfigError, match="both a model and an adapter"):
            open_source(str(model), -1)
        return
    assert code == 0, error
    found = open_weights(str(tmp_path / "run"))
    assert (found.adapters is not None) == (way == "keep")
    if way == "leave_out":
        assert (
            found.tensors["layers.0.attention.wq.weight"].read() == alone.tensors["layers.0.attention.wq.weight"].read()
        )
    else:
        assert_are(tmp_path / "run", sums_of(model, model, 3))


@pytest.mark.parametrize(("kind", "way"), [("model", "keep"), ("model", "merge"), ("adapter", "leave_out")])
def test_a_word_about_an_adapter_that_does_not_fit_is_refused(kind, way, adapter, model, tmp_path, capsys):
    source = {"model": model, "adapter": adapter}[kind]
    assert main(["import", str(source), str(tmp_path / "run"), "--adapter", way]) == 2
    assert f"from   --adapter {way}" in capsys.readouterr().err


def test_an_adapter_is_explained_with_the_keys_of_its_base(adapter, capsys):
    assert main(["import", str(adapter), "--explain", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["files"] == {"adapter_config.json": "settings of the adapter", ADAPTER_FILE: "the adapter"}
    assert "dim 8" in facts["keys"].values() and facts["model"]["dim"] == 8
    assert main(["import", str(adapter), "--explain", "--adapter", "leave_out"]) == 2
    assert "from   --adapter leave_out" in capsys.readouterr().err


def test_of_tensors_that_cannot_be_used_the_first_is_named():
    found = Foreign("GGUF", {}, {}, {"b": "its type", "a": "its dims"})
    with pytest.raises(CheckpointError, match="a of m.gguf and 1 more cannot be used") as refused:
        found.all_tensors("m.gguf")
    assert refused.value.why == "its dims"
