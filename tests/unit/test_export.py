"""``crius export``: what transformers loads, read back and compared; nothing half-written, whatever goes wrong."""

import contextlib
import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import crius
from hypothesis import given
from hypothesis import strategies as st
from pretrained_samples import save, save_tokenizer
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from crius import cli
from crius.checkpoint.plain import DTYPES
from crius.errors import CheckpointError, ConfigError, DataError
from crius.interop.casting import cast
from crius.interop.context import handed_on, longest_context
from crius.interop.weights import open_weights
from crius.models.huggingface import read_model_settings
from crius.models.registry import SPECS, families
from crius.models.rope import Llama3Scaling, rope_scaling_text
from crius.tokens.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from crius.tools.convert import comparison, exporting, logits
from crius.tools.convert.dcp_out import export_dcp
from crius.tools.convert.exporting import export_model, open_source
from crius.tools.convert.tokenizer_out import byte_tokenizer

OF_HF = {"max_position_embeddings": 16384, "bos_token_id": None, "eos_token_id": [256, 7]}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5},
    "original_max_position_embeddings": 8192,
}
TEXTS = ["Hi", "", " \n\t ", "naïve café — 東京 🙂🇫🇷 e\u0301\u200b\x00\x7f", "a  b   c\r\n", "x" * 300]


def tensors_of(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(left, right):
    """Dtypes, shapes and bits."""
    assert left.keys() == right.keys()
    return all(
        left[key].dtype == right[key].dtype
        and left[key].shape == right[key].shape
        and torch.equal(left[key].view(torch.uint8), right[key].view(torch.uint8))
        for key in left
    )


def saved_by_transformers(folder, kind, **changes):
    """A tiny random model as transformers saves it, and a tokenizer with it."""
    save(kind, folder, **OF_HF | changes)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of two saved steps."""
    place = tmp_path_factory.mktemp("run")
    flags = [
        "--training.steps",
        "2",
        "--training.seq_len",
        "32",
        "--model.num_layers",
        "2",
        "--checkpoint.interval",
        "1",
    ]
    done = crius("train", *flags, "--validation.interval", "0", "--job.run_dir", "mine", cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "mine"


@pytest.fixture
def alone(monkeypatch):
    """transformers is not installed."""
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)


@pytest.fixture
def compared_here(monkeypatch):
    """Logits are compared in this process, which has imported transformers. The last test of modules starts one."""

    @contextlib.contextmanager
    def here():
        yield lambda job: logits.compare(**job | {"folder": Path(job["folder"])})

    monkeypatch.setattr(comparison, "_process", here)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama_tied", {"dtype": torch.bfloat16}),
        ("llama", {"rope_parameters": LLAMA3, "rms_norm_eps": 3e-5}),
        ("llama", {"head_dim": 16, "num_key_value_heads": 4, "dtype": torch.float16}),
        ("qwen3", {}),
        ("qwen3_tied", {"dtype": torch.bfloat16, "rope_parameters": {"rope_theta": 12345.0}}),
        ("qwen3_moe", {}),
        ("mixtral", {"dtype": torch.bfloat16}),
    ],
)
def test_what_transformers_saved_comes_back(tmp_path, alone, kind, changes):
    source = saved_by_transformers(tmp_path / "hf", kind, **changes)
    assert cli.main(["import", str(source), str(tmp_path / "mine")]) == 0
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "back")]) == 0
    assert same(tensors_of(tmp_path / "back"), tensors_of(source))
    assert AutoConfig.from_pretrained(tmp_path / "back").dtype == changes.get("dtype", torch.float32)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((source / name).read_text())


@pytest.mark.full
def test_a_run_becomes_what_transformers_loads_with_the_same_logits(run_dir, tmp_path, capsys, compared_here):
    assert cli.main(["export", str(run_dir), str(tmp_path / "hf")]) == 0
    said = capsys.readouterr().out
    assert "21 of 21 tensors equal" in said and "x max |logit|" in said
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").num_parameters() == 524_928
    tokenizer, own = AutoTokenizer.from_pretrained(tmp_path / "hf"), ByteTokenizer()
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == own.encode(text).tolist() and tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == own.eos_id == 256
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == 256
    card = (tmp_path / "hf" / "README.md").read_text()
    assert open_weights(str(run_dir)).digest in card and "| step | 2 |" in card and "| tokens | 512 |" in card
    assert "training.seq_len = 32" in card and "optimizer.beta1" not in card and "data.path" not in card


@pytest.mark.full
def test_other_logits_are_refused_and_nothing_stays(run_dir, tmp_path, monkeypatch, capsys, compared_here):
    right = exporting.config_of
    monkeypatch.setattr(exporting, "config_of", lambda *of: {**right(*of), "rms_norm_eps": 4e-3})
    assert cli.main(["export", str(run_dir), str(tmp_path / "hf")]) == 1
    said = capsys.readouterr().err
    assert "differs from the model: max difference" in said and "gives at most 1.0e-05" in said
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_class_that_makes_other_ids_is_refused(tmp_path, compared_here):
    source = saved_by_transformers(tmp_path / "hf", "llama")
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    with pytest.raises(CheckpointError, match=r"AutoTokenizer makes other ids of 'Gr(.|\n)*TokenizerFast"):
        export_model(open_source(str(source), -1), str(tmp_path / "out"))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert "tokens, at most" in export_model(open_source(str(source), -1), str(tmp_path / "out")).logits


@pytest.mark.full
def test_a_bit_that_is_read_back_otherwise_is_found(run_dir, tmp_path, alone, monkeypatch):
    def flipped(folder, parts, write=exporting.write_parts):
        done = write(folder, parts)
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x55")
        return done

    monkeypatch.setattr(exporting, "write_parts", flipped)
    with pytest.raises(CheckpointError, match=r"1 of 21 tensors of .* the first is lm_head.weight"):
        export_model(open_source(str(run_dir), -1), str(tmp_path / "hf"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_without_transformers_it_says_that_logits_are_not_compared(run_dir, tmp_path, alone, capsys):
    assert cli.main(["export", str(run_dir), str(tmp_path / "hf"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["logits"].startswith("not compared: transformers is not installed (")
    assert told["tensors"] == told["tensors_equal"] == 21 and list(told["files"]) == ["model.safetensors"]


def test_a_dtype_is_rounded_as_torch_rounds(run_dir, tmp_path, alone):
    for dtype in ("float32", "bfloat16", "float16"):
        export_model(open_source(str(run_dir), -1), str(tmp_path / dtype), dtype)
    full = tensors_of(tmp_path / "float32")
    for dtype in (torch.bfloat16, torch.float16):
        folder = tmp_path / str(dtype).removeprefix("torch.")
        assert same(tensors_of(folder), {key: tensor.to(dtype) for key, tensor in full.items()})
        assert AutoConfig.from_pretrained(folder).dtype == dtype


@pytest.mark.parametrize("target", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("source", ["F64", "F32", "F16", "BF16"])
def test_casts_are_those_of_torch(source, target):
    exact = [0.0, -0.0, 1.0, -1.5, 2.0**-24, 2.0**-126, 2.0**-133, 61440.0, np.inf, -np.inf, np.nan]
    halves = [1 + k * 2.0**-9 for k in range(8)] + [1 + 2.0**-8 + 2.0**-20, 1 - 2.0**-10]
    drawn = torch.randn(5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    numbers = torch.cat([torch.tensor(exact + halves, dtype=torch.float64), drawn]).to(DTYPES[source])
    done = cast(numbers.view(torch.uint8).numpy().data, source, target)
    wanted = numbers.to(DTYPES[target])
    found = torch.frombuffer(bytearray(done), dtype=DTYPES[target])
    assert torch.equal(found.isnan(), wanted.isnan())
    keep = ~wanted.isnan()
    assert torch.equal(found[keep].view(torch.uint8), wanted[keep].view(torch.uint8))


@pytest.mark.parametrize(("number", "target"), [(7e4, "F16"), (3.4e38, "BF16"), (-7e4, "F16")])
def test_a_number_that_a_dtype_cannot_hold_is_refused(number, target, tmp_path, alone):
    with pytest.raises(OverflowError):
        cast(np.array([1.0, number, np.inf], np.float32).view(np.uint8).data, "F32", target)


def test_large_models_come_in_files_with_an_index(run_dir, tmp_path, alone, monkeypatch):
    export_model(open_source(str(run_dir), -1), str(tmp_path / "one"))
    monkeypatch.setattr(exporting, "SHARD_BYTES", 600_000)
    export_model(open_source(str(run_dir), -1), str(tmp_path / "many"))
    files = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 524_928 and sorted(set(index["weight_map"].values())) == files
    assert same(tensors_of(tmp_path / "many"), tensors_of(tmp_path / "one"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "many").state_dict()
    assert same(dict(loaded), tensors_of(tmp_path / "one"))


def test_a_step_is_one_of_the_run(run_dir, tmp_path, alone):
    for step in (1, 2):
        export_model(open_source(str(run_dir), step), str(tmp_path / str(step)))
    assert not same(tensors_of(tmp_path / "1"), tensors_of(tmp_path / "2"))
    export_model(open_source(str(run_dir / "checkpoints" / "step-00000001"), -1), str(tmp_path / "named"))
    assert same(tensors_of(tmp_path / "1"), tensors_of(tmp_path / "named"))
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7 in(.|\n)*its steps are: 1, 2"):
        open_source(str(run_dir), 7)


@pytest.mark.parametrize("name", ["not-there", ".", "config.json"])
def test_what_is_no_run_is_refused(run_dir, tmp_path, name, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    assert cli.main(["export", str(tmp_path / "empty" / name), str(tmp_path / "hf")]) == 2
    assert "ConfigError" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_a_folder_that_is_there_stays(run_dir, tmp_path, alone, capsys):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").write_text("mine")
    for flags in ([], ["--format", "dcp"]):
        assert cli.main(["export", str(run_dir), str(tmp_path / "hf"), *flags]) == 2
        assert "already exists" in capsys.readouterr().err
    assert [file.name for file in tmp_path.rglob("*.*")] == ["mine.txt"]
    (tmp_path / "hf" / "mine.txt").unlink()
    assert cli.main(["export", str(run_dir), str(tmp_path / "hf")]) == 0


def test_a_model_without_names_of_hugging_face_says_which_are_missing(run_dir, tmp_path, monkeypatch):
    spec = SPECS["llama3"]
    monkeypatch.setitem(SPECS, "llama3", replace(spec, hf=None))
    with pytest.raises(ConfigError, match=r"for tok_embeddings.weight, layers.*(.|\n)*its ModelSpec has no hf"):
        export_model(open_source(str(run_dir), -1), str(tmp_path / "hf"))
    names = {ours: theirs for ours, theirs in spec.hf.names.items() if "w3" not in ours}
    monkeypatch.setitem(SPECS, "llama3", replace(spec, hf=replace(spec.hf, names=names)))
    with pytest.raises(ConfigError, match=r"has no Hugging Face names for layers\.\*\.feed_forward\.w3\.weight\."):
        export_model(open_source(str(run_dir), -1), str(tmp_path / "hf"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@given(st.text())
def test_the_byte_tokenizer_as_a_file_has_the_ids_of_bytes(text):
    tokenizer = Tokenizer.from_str(json.dumps(byte_tokenizer()))
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text


def test_a_tokenizer_that_the_run_had_goes_along(run_dir, tmp_path, alone):
    """Also one without tokenizer_config.json, whatever its file is called, and code that it names does not."""
    (tmp_path / "tok").mkdir()
    tokenizer = Tokenizer.from_str(json.dumps(byte_tokenizer()))
    tokenizer.save(str(tmp_path / "tok" / "my.json"))
    source = open_source(str(run_dir), -1)

    def with_tokenizer(path):
        return replace(source, weights=replace(source.weights, tokenizer=str(path)))

    export_model(with_tokenizer(tmp_path / "tok" / "my.json"), str(tmp_path / "a"))
    assert AutoTokenizer.from_pretrained(tmp_path / "a")("é").input_ids == [195, 169]
    assert HuggingFaceTokenizer(str(tmp_path / "a")).eos_id == 256
    named = {"eos_token": "<|endoftext|>", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "tok" / "chat_template.jinja").write_text("{{ messages }}")
    export_model(with_tokenizer(tmp_path / "tok" / "my.json"), str(tmp_path / "b"))
    written = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    assert "auto_map" not in written
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast", "AutoTokenizer would guess by the model"
    assert AutoTokenizer.from_pretrained(tmp_path / "b").chat_template == "{{ messages }}"
    shutil.rmtree(tmp_path / "tok")
    with pytest.raises(DataError, match=f"the tokenizer {tmp_path}/tok/my.json of step 2 of .* is not there"):
        export_model(with_tokenizer(tmp_path / "tok" / "my.json"), str(tmp_path / "c"))


@pytest.mark.parametrize(("kind", "pairs"), [("llama_tied", 32), ("qwen3_tied", 0)])
def test_dcp_is_what_torch_loads_and_what_convert_reads_back(tmp_path, alone, kind, pairs):
    source = saved_by_transformers(tmp_path / "hf", kind)
    done = export_dcp(open_source(str(source), -1), str(tmp_path / "titan"))
    weights = open_weights(str(source))
    assert done.tensors == len(weights.tensors) + 1  # torchtitan has the tied one twice
    state = {
        key: torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in dcp.FileSystemReader(tmp_path / "titan").read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    assert torch.equal(state["output.weight"], state["tok_embeddings.weight"])
    flags = ["--rotary_pairs", str(pairs), "--skip", "output"]
    assert cli.main(["checkpoint", "convert", str(tmp_path / "titan"), str(tmp_path / "back"), *flags]) == 0
    back = tensors_of(tmp_path / "back" / "step-00000000")
    for name, tensor in weights.tensors.items():
        assert back[f"model.{name}"].numpy().tobytes() == bytes(tensor.read())
        turned = pairs and name.endswith(("wq.weight", "wk.weight"))
        assert torch.equal(state[name], back[f"model.{name}"]) != bool(turned)


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_memory_is_less_than_twice_the_largest_tensor(tmp_path, alone, dtype):
    source, rows = tmp_path / "hf", 250_000
    save("llama", source, num_hidden_layers=1, hidden_size=32, vocab_size=rows)
    tracemalloc.start()
    try:
        export_model(replace(open_source(str(source), -1), has_tokenizer=False), str(tmp_path / "out"), dtype)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows * 32 * 4 < peak < 2 * rows * 32 * 4


def test_a_stretched_context_is_long_enough_for_transformers(run_dir, tmp_path, alone):
    source = open_source(str(run_dir), -1)
    model = dict(source.weights.model) | {"rope_scaling": rope_scaling_text(Llama3Scaling(factor=4.0))}
    export_model(replace(source, weights=replace(source.weights, model=model)), str(tmp_path / "hf"))
    assert AutoConfig.from_pretrained(tmp_path / "hf").max_position_embeddings == 32768


def test_a_card_cannot_be_written_by_the_settings_of_a_stranger(run_dir, tmp_path, alone):
    source = open_source(str(run_dir), -1)
    evil = {"data.name": "x\n```\n# <script>", "data.text_field": "hf_" + "a1" * 15}
    facts = {"weights from": "a | b\n\n# Title"}
    export_model(replace(source, settings={**source.settings, **evil}, facts=facts), str(tmp_path / "hf"))
    card = (tmp_path / "hf" / "README.md").read_text()
    assert card.count("```") == 4 and card.count("\n# ") == 1 and "a1a1" not in card and "| a / b" in card


@pytest.mark.long
def test_modules_in_the_current_folder_are_not_run(run_dir, tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.chdir(tmp_path)
    assert "tokens, at most" in export_model(open_source(str(run_dir), -1), str(tmp_path / "out")).logits
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "changes", [{"rope_theta": 7e5}, {"norm_eps": 0.01, "vocab_size": 448}, {"rope_scaling": "none"}]
)
def test_a_setting_that_training_changed_is_exported_as_it_is_now(changes, tmp_path):
    """All else is what the source said, in its words: rope_theta is in rope_parameters there."""
    weights = open_weights(str(saved_by_transformers(tmp_path / "hf", "llama", rope_parameters=LLAMA3)))
    said = weights.said["config.json"]
    model = {**weights.model, **changes}
    config = exporting.model_config(replace(weights, model=model), SPECS["llama3"].hf, {}, "float32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_model_settings(str(tmp_path), families())[1]
    assert {key: found[key] for key in changes} == changes
    assert found["rope_theta"] == model["rope_theta"] and found["head_dim"] == model["head_dim"]
    words = {"rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "vocab_size", "dtype", "torch_dtype"}
    assert {key: one for key, one in config.items() if key not in words} == {
        key: one for key, one in said.items() if key not in words
    }


def weights_with(settings, source, tokenizer, scaling=None):
    saved = SimpleNamespace(manifest=SimpleNamespace(config=settings))
    facts = SimpleNamespace(config=SimpleNamespace(rope_scaling=scaling))
    return SimpleNamespace(saved=saved, said=source, tokenizer=tokenizer, facts=facts)


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ({"config.json": {"max_position_embeddings": 40, "a": 1}}, {"max_position_embeddings": 64, "a": 1}),
        ({"config.json": {"a": 1}}, {"a": 1}),  # a source that names none
        ({}, {"max_position_embeddings": 64}),  # a model of one's own
    ],
)
def test_the_context_of_a_run_is_handed_on_to_runs_that_start_from_it(said, want):
    assert handed_on(weights_with({"training.seq_len": 64}, said, "byte")).said["config.json"] == want
    assert handed_on(weights_with({}, said, "byte")).said == said, "an import was not trained"


@pytest.mark.parametrize(
    ("settings", "said", "named", "want"),
    [
        ({"training.seq_len": 64}, 0, 0, 64),
        ({"training.seq_len": 64}, 0, 4096, 64),  # a tokenizer may be for longer texts than a model was trained with
        ({"training.seq_len": 64, "checkpoint.init_from": "smol"}, 0, 4096, 4096),
        ({"training.seq_len": 8192, "checkpoint.init_from": "smol"}, 0, 4096, 8192),
        ({"training.seq_len": 64, "checkpoint.init_from": "smol"}, 2048, 4096, 2048),
        ({"training.seq_len": 8192, "checkpoint.init_from": "smol"}, 2048, 4096, 8192),
        ({}, 0, 4096, 4096),
        ({}, 0, 0, 2048),
    ],
)
def test_the_longest_context_is_the_one_trained_with_or_that_of_the_source(tmp_path, settings, said, named, want):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": named}))
    source = {"config.json": {"max_position_embeddings": said}} if said else {}
    assert longest_context(weights_with(settings, source, str(tmp_path))) == want


@pytest.mark.parametrize(("trained", "want"), [(1023, 8192), (1024, 8192), (1025, 1025), (0, 2048)])
def test_stretched_frequencies_have_the_context_that_they_were_stretched_to(trained, want):
    scaling = SimpleNamespace(factor=8.0, original_context=1024)
    assert longest_context(weights_with({"training.seq_len": trained}, {}, "byte", scaling)) == want


@pytest.mark.parametrize(
    ("named", "want"),
    [(None, 2048), (1, 1), (True, 2048), (-1, 2048), ((1 << 40) - 1, (1 << 40) - 1), (1 << 40, 2048), (64.0, 2048)],
)
def test_a_tokenizer_names_a_context_by_a_number_that_texts_can_have(named, want, tmp_path):
    (tmp_path / "tokenizer.json").touch()
    if named is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": named}))
    assert longest_context(weights_with({}, {}, str(tmp_path))) == want


def test_a_tokenizer_config_of_more_than_256_mib_is_not_read(tmp_path):
    with (tmp_path / "tokenizer_config.json").open("wb") as file:
        file.truncate((1 << 28) + 1)
    with pytest.raises(CheckpointError, match="it has 268,435,457 bytes, but at most 268,435,456 are allowed"):
        longest_context(weights_with({}, {}, str(tmp_path)))
