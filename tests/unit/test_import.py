"""Weights that come in: what does not fit, lies or harms is one clear error, and nothing stays."""

import json
import os
import pickle
import shutil
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import parse
from hostile_samples import link_out
from pretrained_samples import save, save_tokenizer

from crius.checkpoint.plain import load_whole
from crius.cli import main
from crius.cli.app import SOURCES
from crius.errors import ConfigError, CriusError
from crius.interop.weights import open_weights
from crius.kernels import choice
from crius.models.layers import rotary_frequencies
from crius.models.registry import build
from crius.models.rope import Rope, rope_scaling_of
from crius.tools.convert import exporting, importing
from crius.train.inputs import check_resume, describe_model, open_initial

pytest.importorskip("transformers")

MARK = '{"rope_type": "default", "frequencies": "float32"}'
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "model"
    save("llama", folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def shard(folder):
    return next(file for file in sorted(folder.iterdir()) if file.name.startswith(FIRST))


def rewrite(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def config(folder, **changes):
    rewrite(folder / "config.json", lambda content: content.update(changes))


def header(folder, change):
    """Change the header of a shard, in its length too."""
    file = shard(folder)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    changed = change(data[8 : 8 + length])
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])


def reshaped(folder):
    rewrite(folder / INDEX, lambda content: None)
    header(folder, lambda text: text.replace(b"[384,64]", b"[64,384]"))


class Payload:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def pickled(folder):
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(folder.parent / "executed")))


def linked(folder):
    file = shard(folder)
    file.rename(folder.parent / "elsewhere.safetensors")
    file.symlink_to(folder.parent / "elsewhere.safetensors")


def to_index(name):
    def change(folder):
        rewrite(folder / INDEX, lambda content: content["weight_map"].update({"model.norm.weight": name}))

    return change


def without_a_tensor(folder):
    save("llama", folder, num_hidden_layers=3)
    config(folder, num_hidden_layers=4)


HOSTILE = {
    "truncated_shard": (lambda folder: os.truncate(shard(folder), 200), 1, "safetensors"),
    "no_bytes_of_a_shard": (lambda folder: os.truncate(shard(folder), 0), 1, "header"),
    "missing_file": (lambda folder: shard(folder).unlink(), 1, FIRST),
    "index_names_a_missing_file": (to_index("model-9.safetensors"), 1, "model-9.safetensors"),
    "path_traversal": (to_index("../model.safetensors"), 1, "is not a name of a file"),
    "absolute_path": (to_index("/etc/passwd"), 1, "is not a name of a file"),
    "index_that_lies": (to_index("model-00002-of-00014.safetensors"), 1, "not"),
    "index_without_a_map": (lambda folder: (folder / INDEX).write_text('{"weight_map": 1}'), 1, "weight_map"),
    "wrong_shapes": (reshaped, 1, "[64, 384] in the source, [384, 64] in the model"),
    "huge_header": (lambda folder: shard(folder).write_bytes((1 << 40).to_bytes(8, "little") + b"{}"), 1, "header"),
    "header_of_no_json": (lambda folder: header(folder, lambda text: b"x" * len(text)), 1, "JSON"),
    "link": (linked, 1, "link"),
    "pickle": (pickled, 2, "pickle"),
    "tensors_missing": (without_a_tensor, 1, "9 that the model has and the source lacks"),
    "tensors_too_many": (lambda folder: config(folder, num_hidden_layers=3), 1, "9 that the source has"),
    "other_sizes": (lambda folder: config(folder, hidden_size=128), 1, "of another shape"),
    "more_layers_than_tensors": (lambda folder: config(folder, num_hidden_layers=1 << 60), 1, "layers"),
    "tied_and_not_equal": (lambda folder: config(folder, tie_word_embeddings=True), 1, "lm_head.weight"),
    "mistral": (lambda folder: config(folder, model_type="mistral", sliding_window=64), 2, "mistral"),
    "gemma": (lambda folder: config(folder, model_type="gemma"), 2, "llama, mistral, mixtral"),
    "gpt2": (lambda folder: config(folder, model_type="gpt2"), 2, "gpt2"),
    "other_attention": (lambda folder: config(folder, hidden_act="relu"), 2, "hidden_act"),
    "config_of_no_json": (lambda folder: (folder / "config.json").write_text("{"), 2, "config.json"),
    "config_of_a_link": (lambda folder: link_out(folder / "config.json"), 2, "config.json cannot be read: it is a"),
    "tokenizer_of_no_json": (lambda folder: (folder / "tokenizer.json").write_text("{"), 1, "tokenizer"),
    "tokenizer_of_another_model": (lambda folder: many_ids(folder), 2, "500 ids"),
    "template_of_a_link": (lambda folder: (folder / "chat_template.jinja").symlink_to("/etc/passwd"), 1, "link"),
}


def many_ids(folder):
    def add(content):
        content["model"]["vocab"] |= {f"<{number}>": number for number in range(257, 500)}

    rewrite(folder / "tokenizer.json", add)


VERBS = {
    "import": ["import", "SOURCE", "TARGET"],
    "export": ["export", "SOURCE", "TARGET"],
    "generate": ["generate", "SOURCE", "--prompt", "a", "--max_new_tokens", "1"],
    "train": ["train", "--checkpoint.init_from", "SOURCE", "--training.steps", "1", "--job.run_dir", "TARGET"],
}


# a run takes any tokenizer, whose rows may be more: it draws them
CASES = [(name, verb) for name in HOSTILE for verb in VERBS if verb != "train" or not name.startswith("tokenizer")]


@pytest.mark.parametrize(("name", "verb"), CASES)
def test_a_hostile_folder_is_one_error_and_leaves_nothing(name, verb, folder, tmp_path, capsys):
    change, code, said = HOSTILE[name]
    change(folder)
    before = sorted(tmp_path.iterdir())
    places = {"SOURCE": str(folder), "TARGET": str(tmp_path / "run")}
    with choice.applied(choice.current()):
        found = main([places.get(word, word) for word in VERBS[verb]])
    assert found == (2 if verb == "train" else code)  # there it is a setting that cannot be used
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert error.count("Error: ") == 1
    assert sorted(tmp_path.iterdir()) == before


OTHERS = {
    "starcoder2": ("Starcoder2", {}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_transformers_saves_of_another_architecture_is_refused_by_name(name, tmp_path, capsys):
    import transformers

    family, changes = OTHERS[name]
    sizes = {} if family == "GPT2" else {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4} if sizes else {}
    made = getattr(transformers, f"{family}Config")(vocab_size=384, **sizes, **changes)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path / "model")
    capsys.readouterr()
    assert main(["import", str(tmp_path / "model"), str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert (
        f'has model_type "{family.lower()}"' in error
        and "fix    use a config.json of gemma2, gemma3_text, granite, llama, mistral, mixtral" in error
    )
    assert error.count("Error: ") == 1 and not (tmp_path / "run").exists()


ROPE = {"rope_theta": 10_000.0, "factor": 4.0}
SETTINGS = {
    "linear": ({"rope_parameters": ROPE | {"rope_type": "linear", "factor": 0.5}}, "needs a factor of at least 1"),
    "dynamic": ({"rope_parameters": ROPE | {"rope_type": "dynamic"}}, 'rope_type "dynamic" is not supported'),
    "longrope": ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, 'rope_type "longrope" is not supported, only'),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported, only 1 is"),
    "window": ({"use_sliding_window": True}, "use_sliding_window true is not supported, only false is"),
    "gelu": ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported, only "silu" is'),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, 'quantised by "gptq" are not read'),
    "awq": ({"quantization_config": {"quant_method": "awq"}}, 'quantised by "awq" are not read'),
    "bitsandbytes": ({"quantization_config": {"quant_method": "bitsandbytes"}}, 'by "bitsandbytes" are not'),
    "classifier": ({"architectures": ["LlamaForTokenClassification"]}, 'only ["LlamaForCausalLM"] is supported'),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_changes_the_computation_is_refused_by_name(name, folder, tmp_path, capsys):
    changes, said = SETTINGS[name]
    config(folder, **changes)
    assert main(["import", str(folder), str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert said in error and not (tmp_path / "run").exists()


def explained(capsys, *words):
    """Exit code, what ``--explain --json`` prints, and the errors."""
    code = main(["import", *words, "--explain", "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


def test_each_file_is_explained_and_nothing_is_written(folder, tmp_path, capsys):
    for name in ("README.md", "old.safetensors", "pytorch_model.bin", "modeling_own.py"):
        (folder / name).write_text("")
    before = sorted(tmp_path.rglob("*"))
    code, facts, error = explained(capsys, str(folder))
    assert (code, facts["refusals"]) == (0, []) and "Error" not in error
    files = facts["files"]
    assert sorted(files) == sorted(file.name for file in folder.iterdir())
    assert files["config.json"] == "settings of the model" and files["tokenizer.json"] == "tokenizer"
    assert files[shard(folder).name] == "weights" and files[INDEX] == "names the files of the weights"
    left_out = {name: why for name, why in files.items() if why.startswith("left out: ")}
    assert list(left_out) == ["README.md", "modeling_own.py", "old.safetensors", "pytorch_model.bin"]
    assert "pickle" in files["pytorch_model.bin"] and "not executed" in files["modeling_own.py"]
    assert sorted(tmp_path.rglob("*")) == before


def test_each_key_that_changes_the_computation_is_explained(folder, capsys):
    config(folder, rope_parameters=STRETCHED, sideways_attention=3, unused=None)
    code, facts, _ = explained(capsys, str(folder / "config.json"))
    assert code == 0
    became = {key.split()[0]: told for key, told in facts["keys"].items()}
    assert became["hidden_size"] == "dim 64" and became["hidden_act"] == "as without it"
    assert became["rope_parameters"].startswith("rope_theta 500000.0; rope_scaling {")
    assert facts["unknown"] == {"sideways_attention": 3}
    config(folder, attention_bias=True)
    _, facts, _ = explained(capsys, str(folder / "config.json"))
    assert facts["keys"]["attention_bias true"] == "qkv_bias true; o_bias true"
    assert facts["model"]["name"] == "llama3"
    assert main(["import", str(folder / "config.json"), "--explain"]) == 0
    text = capsys.readouterr().out
    assert "keys that are not known, and not read: sideways_attention 3\n" in text
    assert max(map(len, text.splitlines())) <= 160


def test_every_reason_against_an_import_is_told_at_once(folder, tmp_path, capsys):
    config(folder, hidden_act="relu", use_sliding_window=True)
    shard(folder).unlink()
    code, facts, error = explained(capsys, str(folder), str(tmp_path / "run"))
    assert code == 2 and not (tmp_path / "run").exists()
    for told in (error, json.dumps(facts["refusals"])):
        assert "hidden_act" in told and "use_sliding_window" in told and FIRST in told
    assert facts["keys"]["use_sliding_window true"] == "use_sliding_window true is not supported, only false is"
    assert main(["import", str(folder), "--explain"]) == 2
    assert "Error: 2 problems" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tokenizer_of_another_model", "500 ids"),
        ("tensors_missing", "9 that the model has"),
        ("pickle", "is a pickle"),
        ("index_that_lies", "model-00002-of-00014.safetensors"),
    ],
)
def test_a_single_reason_has_exit_code_2_too(name, said, folder, tmp_path, capsys):
    HOSTILE[name][0](folder)
    before = sorted(tmp_path.iterdir())
    code, _, error = explained(capsys, str(folder))
    assert code == 2 and said in error and error.count("Error: ") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_an_unknown_family_is_refused_with_all_keys_that_no_family_has(folder, capsys):
    config(folder, model_type="other", architectures=["OtherForCausalLM"], q_lora_rank=64, sinks=True)
    config(folder, hidden_act="relu", layer_types=["linear_attention"] * 4, sliding_window=7, partial_rotary_factor=0.5)
    code, facts, error = explained(capsys, str(folder))
    assert code == 2 and facts["unknown"] == {"q_lora_rank": 64, "sinks": True}
    for reason in ('model_type "other"', "q_lora_rank 64 is in no family", "sinks true is in no family"):
        assert reason in error
    assert 'hidden_act "relu" is not supported' in error and "linear_attention" in error
    assert "sliding_window 7" not in error and "partial_rotary_factor" not in error


def test_an_import_is_explained_first_and_then_done(folder, tmp_path, capsys):
    code, facts, _ = explained(capsys, str(folder), str(tmp_path / "run"))
    assert code == 0 and facts["run"] == str(tmp_path / "run") and facts["files"]
    assert open_weights(str(tmp_path / "run")).model == facts["model"]


def test_what_is_no_source_and_what_has_no_target_are_errors(folder, tmp_path, capsys):
    assert main(["import", str(folder)]) == 2
    assert f"fix    crius import {folder} DIR, or --explain" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "nowhere"), "--explain"]) == 2
    assert "there is no" in capsys.readouterr().err


def test_a_folder_without_config_json_is_refused_by_name(folder, tmp_path, capsys):
    (folder / "config.json").unlink()
    assert main(["import", str(folder), str(tmp_path / "run")]) == 2
    assert "config.json" in capsys.readouterr().err


def test_what_a_config_json_leaves_out_is_what_transformers_takes_for_it(folder, tmp_path):
    """Heads are as wide as ``dim / num_heads`` there, so the folder's own are not left out."""

    def drop(content):
        for key in ("architectures", "rms_norm_eps", "rope_parameters", "attention_bias", "hidden_act", "dtype"):
            content.pop(key)

    rewrite(folder / "config.json", drop)
    importing.import_model(str(folder), str(tmp_path / "run"))
    found = open_weights(str(tmp_path / "run")).model
    assert (found["norm_eps"], found["rope_theta"], found["rope_scaling"]) == (1e-6, 10_000.0, MARK)


PLAIN = {"rope_type": "default", "rope_theta": 5e5}
STRETCHED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCHED |= {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize("rope", [PLAIN, STRETCHED], ids=["plain", "stretched"])
@torch.no_grad()
def test_far_positions_have_the_logits_of_transformers(rope, tmp_path):
    """48 tokens up to position 13,000 and up to 131,000."""
    sizes = {"num_hidden_layers": 2, "initializer_range": 0.3, "max_position_embeddings": 131_072}
    theirs = save("llama", tmp_path / "model", rope_parameters=rope, **sizes)
    importing.import_model(str(tmp_path / "model"), str(tmp_path / "run"))
    weights = open_weights(str(tmp_path / "run"))
    ours = build(weights.facts).requires_grad_(False)
    load_whole(weights.tensors, dict(ours.named_parameters()))
    tokens = torch.randint(384, (2, 48), generator=torch.Generator().manual_seed(1))
    everything = torch.ones_like(tokens)  # without a mask transformers takes jumps in positions for new documents
    for farthest in (13_000, 131_000):
        positions = (torch.arange(48) * farthest // 47).expand(2, -1)
        want = theirs(tokens, position_ids=positions, attention_mask=everything).logits
        assert (ours(tokens, positions) - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128])
@pytest.mark.parametrize("changes", [PLAIN, STRETCHED, {"factor": 3.0, "high_freq_factor": 7.0}, {"rope_theta": 1e6}])
def test_rounded_frequencies_have_the_bits_of_transformers(changes, head_dim):
    import transformers

    rope = STRETCHED | changes
    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=131_072, rope_parameters=rope)
    want = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    scaling = rope_scaling_of(rope)
    ours = Rope(theta=rope["rope_theta"], dim=head_dim, scaling=scaling, is_float32=True)
    assert torch.equal(rotary_frequencies(ours, torch.device("cpu")), want)


def test_the_mark_of_an_import_goes_with_its_weights(folder, tmp_path, monkeypatch, capsys):
    """Into the runs that start from them, and through an export. A new model of the same sizes has none."""
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    places = [str(tmp_path / name) for name in ("first", "hf", "second")]
    for verb, source, target in zip(("import", "export", "import"), (str(folder), *places), places, strict=False):
        assert main([verb, source, target]) == 0
    assert "frequencies" not in (tmp_path / "hf/config.json").read_text()
    for source in (places[0], places[2], str(folder)):
        assert open_weights(source).model["rope_scaling"] == MARK
        assert describe_model(parse(["--checkpoint.init_from", source])).config.rope_float32
    capsys.readouterr()
    assert main(["config", "show", "--checkpoint.init_from", places[0]]) == 0
    assert '"frequencies": "float32"' in capsys.readouterr().out.replace("\\", "")
    assert not describe_model(parse(["--model.from_hf", str(folder)])).config.rope_float32


def test_a_flavor_beside_weights_leaves_them_their_frequencies(original):
    assert parse(["--checkpoint.init_from", str(original), "--model.flavor", "debug"]).model.rope_scaling == MARK


@pytest.mark.parametrize("tokenizer", ["", "byte"])
def test_what_a_run_was_told_goes_with_its_tokenizer_into_runs_and_imports(tokenizer, original, tmp_path, monkeypatch):
    """The token that ends a text, and what the source of its weights said."""
    found = open_weights(str(original))
    told = replace(found, eos_token="z", tokenizer=tokenizer or found.tokenizer, folder=None)
    monkeypatch.setattr("crius.interop.weights.open_weights", lambda *_, **__: told)
    monkeypatch.setattr(importing, "open_weights", lambda *_, **__: told)
    flags = ["--checkpoint.init_from", str(original)]
    assert parse(flags).tokenizer.eos_token == "z"
    assert parse([*flags, "--tokenizer.path", "elsewhere"]).tokenizer.eos_token == ""
    importing.import_model(str(original), str(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "moved")
    again = open_weights(str(tmp_path / "moved"))
    assert (again.eos_token, again.said) == ("z", found.said)
    assert again.tokenizer == (tokenizer or str(tmp_path / "moved" / "tokenizer"))


def test_a_run_from_the_checkpoint_of_an_import_has_its_model(original, tmp_path):
    assert main(["import", str(original), str(tmp_path / "run")]) == 0
    flags = ["--config", str(tmp_path / "run/run.toml"), "--checkpoint.load_path", str(tmp_path / "run/checkpoints")]
    check_resume(parse(flags), tmp_path / "new")
    other = [*flags, "--model.rope_theta", "7e5", "--model.rope_scaling", "none"]
    with pytest.raises(
        ConfigError, match=r"(?s)model.rope_theta: .* -> 700000.0.*model.rope_scaling: .*float32.* -> none"
    ):
        check_resume(parse(other), tmp_path / "new")
    check_resume(parse([*other, "--checkpoint.allow_changes", "model.rope_*"]), tmp_path / "new")


def test_a_run_from_before_the_mark_goes_on_without_it(original):
    run = parse(["--checkpoint.init_from", str(original), "--model.rope_scaling", "none"])
    assert not describe_model(run).config.rope_float32
    open_initial(run)


def test_the_template_of_a_stranger_runs_nothing(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    evil = "{{ cycler.__init__.__globals__.os.system('touch executed') }}"
    (folder / "chat_template.jinja").write_text(evil)
    assert main(["import", str(folder), "run"]) == 0
    assert (tmp_path / "run/tokenizer/chat_template.jinja").read_text() == evil
    for source in (str(folder), "run"):
        capsys.readouterr()
        with choice.applied(choice.current()):
            assert main(["generate", source, "--chat", "--prompt", "a", "--max_new_tokens", "1"]) == 1
        error = capsys.readouterr().err
        assert error.count("DataError: the chat template cannot be rendered") == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "run"]


def test_tensors_of_several_dtypes_keep_them(folder, tmp_path):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).bfloat16()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = parameter.data.float()
    model.save_pretrained(tmp_path / "mixed")
    importing.import_model(str(tmp_path / "mixed"), str(tmp_path / "run"))
    found = open_weights(str(tmp_path / "run")).tensors
    assert (found["norm.weight"].dtype, found["output.weight"].dtype) == ("F32", "BF16")
    assert bytes(found["norm.weight"].read()) == model.model.norm.weight.detach().numpy().tobytes()


def test_what_fails_on_the_way_leaves_nothing(folder, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(importing, "write_checkpoint", fail)
    assert main(["import", str(folder), str(tmp_path / "run")]) == 1
    assert "run cannot be written" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_target_that_is_there_is_left_alone(folder, tmp_path, capsys):
    assert main(["import", str(folder), str(folder)]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "source",
    ["nobody/has-this", "nowhere.gguf", "/a/b/c"],
)
def test_a_source_that_is_not_there_is_one_error(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert main(["import", source, "run"]) == 2
    error = capsys.readouterr().err
    assert "there is no" in error and source in error and error.count("\n  fix ") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_cache_of_the_hub_is_read_and_its_links_lead_to_blobs_only(folder, tmp_path, monkeypatch):
    root = tmp_path / "models--someone--small"
    snapshot = root / "snapshots" / "0123"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0123")
    (root / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(root / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert main(["import", "someone/small", str(tmp_path / "run")]) == 0
    assert open_weights(str(tmp_path / "run")).model["dim"] == 64
    shard(snapshot).unlink()
    shard_name = sorted(root.glob("blobs/*"))[0]
    (snapshot / f"{FIRST}00014.safetensors").symlink_to(shard_name)  # elsewhere, by a whole path
    with pytest.raises(CriusError):
        open_weights(str(snapshot))


def test_an_import_keeps_less_than_twice_the_largest_tensor_in_memory(tmp_path):
    save("llama", tmp_path / "model", vocab_size=60_000)
    largest = 60_000 * 64 * 4
    tracemalloc.start()
    try:
        importing.import_model(str(tmp_path / "model"), str(tmp_path / "run"))
        assert tracemalloc.get_traced_memory()[1] < 1.7 * largest
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_kept(dtype, tmp_path):
    model = save("qwen3_tied", tmp_path / "model", dtype=dtype)
    importing.import_model(str(tmp_path / "model"), str(tmp_path / "run"))
    tensor = open_weights(str(tmp_path / "run")).tensors["norm.weight"]
    assert tensor.dtype == {"bfloat16": "BF16", "float16": "F16"}[str(dtype).removeprefix("torch.")]
    assert bytes(tensor.read()) == model.state_dict()["model.norm.weight"].view(torch.int16).numpy().tobytes()


def test_rows_of_a_tensor_are_the_rows_of_the_whole(original):
    for tensor in open_weights(str(original)).tensors.values():
        (piece,) = tensor.pieces
        whole = np.frombuffer(piece.read(), np.float32).reshape(tensor.shape)
        rows = np.frombuffer(piece.read_rows(3, 9), np.float32).reshape(6, *tensor.shape[1:])
        np.testing.assert_array_equal(rows, whole[3:9])


def test_weights_bring_their_model_and_their_tokenizer(original, tmp_path):
    run = parse(["--checkpoint.init_from", str(original)])
    sizes = describe_model(run).config
    assert (sizes.dim, sizes.num_layers, sizes.head_dim, sizes.vocab_size) == (64, 4, 32, 384)
    assert run.tokenizer.path == str(original)
    assert SOURCES.origin("model.dim") == f"{original} (checkpoint.init_from)"
    open_initial(run)


@pytest.mark.parametrize("begun", ["src/m", "FOLDER/src/m"])
@pytest.mark.parametrize("given", ["src/m", "./src/m/", "src/../src/m", "FOLDER/src/m", "~/src/m"])
def test_a_run_whose_source_is_gone_goes_on_under_each_spelling_of_its_place(begun, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    begun = begun.replace("FOLDER", str(tmp_path))
    told = f'[checkpoint]\ninit_from = "{begun}"\n[model]\ndim = 192\n[tokenizer]\npath = "byte"\n'
    (tmp_path / "run.toml").write_text(told)
    given = ["--checkpoint.init_from", given.replace("FOLDER", str(tmp_path)), "--job.run_dir"]
    assert parse([*given, "."]).model.dim == 192
    with pytest.raises(ConfigError, match=r"src/m is not a folder|no path src/m"):  # which may be a name of the hub
        parse([*given, "other"])


@pytest.mark.parametrize(
    ("init_from", "given"), [("memory://a//m", "memory://a/m"), ("", "."), ("src/m", "src/n"), (None, ".")]
)
def test_another_place_is_not_that_of_the_run(init_from, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = "" if init_from is None else f'init_from = "{init_from}"\n'
    told = f'[checkpoint]\n{told}[model]\ndim = 192\n[tokenizer]\npath = "byte"\n'
    (tmp_path / "run.toml").write_text(told)
    with pytest.raises(CriusError):
        parse(["--checkpoint.init_from", given, "--job.run_dir", "."])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model.dim", "128"], ["model.dim 128, there 64"]),
        (["--model.norm_eps", "1e-6", "--model.num_layers", "2"], ["num_layers 2, there 4", "norm_eps 1e-06, there"]),
        (["--model.flavor", "debug"], ["model.dim 128, there 64", "model.rope_theta"]),
        (["--model.name", "qwen3"], ["model.name qwen3, there llama3"]),
        (["--model.vocab_size", "320"], ["model.vocab_size 320, there 384"]),
        (["--model.tied_embeddings"], ["model.tied_embeddings True, there False"]),
    ],
)
def test_a_model_that_contradicts_the_weights_is_refused_by_its_fields(flags, said, original):
    with pytest.raises(ConfigError) as found:
        open_initial(parse(["--checkpoint.init_from", str(original), *flags]))
    assert all(part in str(found.value) for part in said)


def test_a_file_that_contradicts_the_weights_is_refused_too(original, tmp_path):
    (tmp_path / "mine.toml").write_text("[model]\nffn_dim = 192\n")
    with pytest.raises(ConfigError, match="ffn_dim 192, there 160"):
        open_initial(parse(["--config", str(tmp_path / "mine.toml"), "--checkpoint.init_from", str(original)]))


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_weights_that_are_not_there_are_one_error(place, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["train", "--checkpoint.init_from", str(tmp_path / place), "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert place in error and "--checkpoint.init_from" in error and error.count("\n  fix ") == 1
