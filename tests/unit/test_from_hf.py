"""``--model.from_hf``: architecture and sizes from a config.json of Hugging Face, or one clear error."""

import json
import os
import re
from types import SimpleNamespace

import pytest
from harness import parse

from crius import cli
from crius.cli.app import SOURCES, _base_name, facts_of
from crius.config import rules
from crius.config.changes import kind_of
from crius.config.rules import plain_name
from crius.config.toml_file import to_toml
from crius.errors import ConfigError
from crius.host import Machine
from crius.models.huggingface import read_model_settings
from crius.models.registry import families
from crius.models.rope import Llama3Scaling
from crius.train import inputs
from crius.train.inputs import describe_model, describe_rows

LLAMA3_SCALING = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
SMALL = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 48},
    **{"intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3},
    **{"vocab_size": 640, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
}
SHORT = ["--training.seq_len", "16", "--steps", "1", "--validation.interval", "0"]


def write(folder, **changes):
    settings = {key: value for key, value in (SMALL | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(settings))
    return ["--model.from_hf", str(folder)]


def refused(capsys, flags):
    assert cli.main(["train", *flags, *SHORT]) == 2
    return capsys.readouterr().err


def test_a_file_says_architecture_and_sizes(tmp_path):
    model = describe_model(parse(write(tmp_path, rope_scaling=LLAMA3_SCALING)))
    config = model.config
    assert model.name == "llama3/custom"
    assert (config.dim, config.ffn_dim, config.num_layers, config.num_heads, config.num_kv_heads) == (48, 192, 2, 6, 3)
    assert (config.head_dim, config.vocab_size, config.norm_eps, config.rope_theta) == (8, 640, 1e-5, 5e5)
    assert config.tied_embeddings and config.rope_scaling == Llama3Scaling(factor=8.0)


@pytest.mark.parametrize(
    ("kind", "kv", "head_dim"), [(("llama", "LlamaForCausalLM"), 6, 8), (("qwen3", "Qwen3ForCausalLM"), 32, 128)]
)
def test_what_a_file_leaves_out_is_as_transformers_has_it(tmp_path, kind, kv, head_dim):
    left_out = dict.fromkeys(("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"), ...)
    flags = write(tmp_path, model_type=kind[0], architectures=[kind[1]], **left_out)
    config = describe_model(parse(flags)).config
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.norm_eps) == (kv, head_dim, 1e4, 1e-6)
    assert not config.tied_embeddings and config.rope_scaling is None


def test_a_flag_wins_over_the_file_and_the_file_over_a_recipe(tmp_path):
    flags = ["--recipe", "qwen3_8b", *write(tmp_path), "--model.num_layers", "3"]
    config = parse(flags)
    assert (config.model.name, config.model.num_layers, config.model.dim) == ("llama3", 3, 48)
    assert SOURCES.origin("model.num_layers") == "command line"
    assert SOURCES.origin("model.dim") == f"{tmp_path}/config.json (model.from_hf)"


def test_what_a_run_wrote_says_the_sizes_itself(tmp_path):
    config = parse([*write(tmp_path), "--model.num_layers", "3"])
    (tmp_path / "config.json").unlink()
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert parse(["--config", str(tmp_path / "run.toml"), "--checkpoint.no_enable"]).model == config.model


def test_a_file_names_it_too(tmp_path):
    write(tmp_path)
    (tmp_path / "a.toml").write_text(f"[model]\nfrom_hf = '{tmp_path}/config.json'\nffn_dim = 96\n")
    config = parse(["--config", str(tmp_path / "a.toml"), "--checkpoint.no_enable"])
    assert (config.model.dim, config.model.ffn_dim) == (48, 96)
    (tmp_path / "b.toml").write_text(f"[model]\nfrom_hf = '{tmp_path}'\nflavor = 'custom'\ndim = 64\nnum_layers = 2\n")
    config = parse(["--config", str(tmp_path / "b.toml"), "--checkpoint.no_enable"])
    assert (config.model.dim, config.model.ffn_dim, config.model.tied_embeddings) == (64, 192, True)


def test_rows_are_those_of_the_file_but_never_fewer_than_ids(tmp_path):
    few = write(tmp_path, vocab_size=200)
    grown = facts_of(parse(few), 0, None).config
    assert grown.model.vocab_size == 320
    assert describe_rows(grown, 320, 257).endswith("(the token ids, rounded up to a multiple of 64)")
    asked = facts_of(parse([*few, "--model.vocab_size", "256"]), 0, None).config
    assert asked.model.vocab_size == 256
    kept = facts_of(parse(write(tmp_path)), 0, None).config
    assert kept.model.vocab_size == 640
    assert f"as in model.vocab_size 640, with the sizes of {tmp_path}" in describe_rows(kept, 640, 257)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
OLMO3 = {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "rope_scaling": ...}
GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_scaling": ...,
}
SMOLLM3 = {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "gemma"},
            'has model_type "gemma", not the model_type of gemma2, gemma3, granite, llama3, mistral, mixtral',
        ),
        ({"model_type": "gemma3"}, "use a config.json of gemma2, gemma3_text, granite, llama, mistral, mixtral, olmo2"),
        ({"model_type": ...}, "has model_type null"),
        ({"architectures": ["LlamaForSequenceClassification"]}, 'only ["LlamaForCausalLM"] is supported'),
        ({"attention_bias": 1}, "attention_bias is 1, not true or false"),
        (MISTRAL | {"attention_bias": True}, "attention_bias true is not supported, only false is"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported, only "silu" is'),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"use_sliding_window": True}, "use_sliding_window true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, '"sliding_attention"] is not supported'),
        ({"layer_types": ["full_attention"]}, 'layer_types ["full_attention"] is not supported'),
        ({"layer_types": 5}, "layer_types 5 is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by kind of layer"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 'rope_type "dynamic" is not supported'),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_type linear needs a factor of at least 1"),
        (
            {"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_type yarn needs factor",
        ),
        ({"rope_scaling": YARN | {"truncate": 1}}, "rope_type yarn needs truncate, true or false, not 1"),
        ({"rope_scaling": YARN | {"beta_slow": 32}}, "at least 1, and beta_slow below beta_fast"),
        (MISTRAL | {"sliding_window": "4"}, 'sliding_window is "4", not a whole number above 0'),
        (
            OLMO3 | {"layer_types": ["full_attention"]},
            "is not one of full_attention and sliding_attention for each layer",
        ),
        (
            OLMO3 | {"sliding_window": None, "num_hidden_layers": 4},
            "layer_types has sliding_attention, but there is no sliding_window",
        ),
        (OLMO3 | {"rope_parameters": {"full_attention": {}, "near": {}}}, "differ by kind of layer"),
        (OLMO3 | {"rope_parameters": YARN}, "do not say to which kind of layer they belong"),
        (
            GEMMA3 | {"rope_parameters": {"full_attention": {}, "sliding_attention": 1}},
            "differ by kind of layer, which is not supported",
        ),
        (
            OLMO3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            'rope_type "linear" of sliding_attention is not supported',
        ),
        (SMOLLM3 | {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0, not a whole number above 0"),
        (GEMMA3 | {"rope_local_base_freq": "x"}, 'rope_theta "x" of sliding_attention is not a number above 0'),
        (GEMMA3 | {"sliding_window_pattern": "6"}, 'sliding_window_pattern is "6", not a whole number above 0'),
        (GEMMA3 | {"layer_types": ["full_attention", {}]}, "is not one of full_attention and sliding_attention"),
        (SMOLLM3 | {"no_rope_layers": [[], 1]}, "is not 0 or 1 for each layer"),
        (SMOLLM3 | {"no_rope_layers": [2, 1]}, "no_rope_layers [2, 1] is not 0 or 1 for each layer"),
        ({"rope_scaling": LLAMA3_SCALING | {"factor": 10**400}}, "needs factor, a positive number, not 1000"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type llama3 needs low_freq_factor"),
        ({"rope_scaling": "llama3"}, 'rope_scaling "llama3" is not an object'),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"hidden_size": ...}, "it has no hidden_size"),
        ({"hidden_size": "48"}, 'hidden_size is "48", not a whole number above 0'),
        ({"hidden_size": 50}, "model.dim 50 is not a multiple of the 6 query heads"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"vocab_size": True}, "vocab_size is true"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not true or false"),
        ({"num_key_value_heads": 4}, "num_kv_heads 4 does not divide the 6 query heads of llama3/custom"),
        ({"hidden_size": 2**40}, "is above 1,048,576"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path, capsys, changes, said):
    assert said in refused(capsys, write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"num_key_value_heads": None}, "num_kv_heads", 6),
        ({"intermediate_size": 2**63 - 1}, "ffn_dim", 2**63 - 1),
        ({"intermediate_size": 2**63}, "", "intermediate_size is 9223372036854775808, not a whole number"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "num_layers", 1),
        ({"rope_scaling": LLAMA3_SCALING | {"factor": 1}}, "num_layers", 2),
        ({"rope_scaling": LLAMA3_SCALING | {"factor": 0.99}}, "", "needs a factor of at least 1"),
        ({"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 4.0}}, "", "low_freq_factor below high_freq_factor"),
    ],
)
def test_a_value_at_the_edge_of_what_is_built_is_taken_or_named(tmp_path, changes, field, value):
    path = write(tmp_path, **changes)[1]
    if field:
        assert read_model_settings(path, families())[1][field] == value
        return
    with pytest.raises(ConfigError) as caught:
        read_model_settings(path, families())
    assert value in caught.value.what


def test_all_that_does_not_fit_is_said_together(tmp_path, capsys):
    said = refused(capsys, write(tmp_path, hidden_act="relu", hidden_size=..., rope_scaling={"rope_type": "yarn"}))
    assert all(part in said for part in ('hidden_act "relu"', "it has no hidden_size", "rope_type yarn needs"))
    assert "--model.from_hf" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1]", "it is not an object"),
        (b'{"model_type": "llama", "model_type": "qwen3"}', "is there twice"),
        (b'{"hidden_size": NaN}', "NaN is not a JSON number"),
        (b"\xff\xfe", "is not a valid config.json"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (2 << 20), "at most 1,048,576 are allowed"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, capsys, content, said):
    (tmp_path / "config.json").write_bytes(content)
    assert said in refused(capsys, ["--model.from_hf", str(tmp_path)])


@pytest.mark.parametrize("too_many", [0, 1])
def test_a_file_of_a_mebibyte_is_read_and_a_longer_one_is_not(tmp_path, capsys, too_many):
    flags = write(tmp_path)
    content = (tmp_path / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(content.ljust((1 << 20) + too_many))
    if too_many:
        assert "at most 1,048,576 are allowed" in refused(capsys, flags)
    else:
        assert parse(flags).model.dim == 48


def test_what_is_no_regular_file_is_not_opened(tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    for path in (str(tmp_path / "fifo"), "~nobody-of-this-name/x", "x" * 5000):
        assert "cannot be read: " in refused(capsys, ["--model.from_hf", path])


def test_the_folder_of_a_run_is_a_short_name_below_runs(tmp_path):
    """Also where the path in a file that a run wrote leads elsewhere."""
    config = parse([*write(tmp_path, rope_scaling=LLAMA3_SCALING), "--model.num_layers", "3"])
    assert _base_name(config) == f"llama3_{tmp_path.name}_num_layers_3"[:60]
    (tmp_path / "run.toml").write_text(to_toml(config).replace(str(tmp_path), "x/../../../escaped"))
    assert _base_name(parse(["--config", str(tmp_path / "run.toml"), "--checkpoint.no_enable"])) == "llama3_escaped"
    (tmp_path / "run.toml").write_text(to_toml(config).replace(str(tmp_path), ".."))
    assert _base_name(parse(["--config", str(tmp_path / "run.toml"), "--checkpoint.no_enable"])) == "llama3_custom"
    assert plain_name(f"{'a/' * 90}b") == ("a-" * 30)


def test_another_flavor_or_name_over_a_file_that_a_run_wrote_is_refused(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(to_toml(parse(write(tmp_path))))
    for other in (["--model.flavor", "1b"], ["--model.name", "qwen3"]):
        assert "model.from_hf" in refused(capsys, ["--config", str(tmp_path / "run.toml"), *other])


@pytest.mark.parametrize(
    ("flag", "value"), [("vocab_size", "-1"), ("rope_theta", "-1.00"), ("ffn_dim", "-1"), ("rope_scaling", "")]
)
def test_a_size_that_is_left_open_by_a_flag_is_the_files(tmp_path, flag, value):
    """Also where a run wrote the sizes."""
    flags = write(tmp_path, rope_scaling=LLAMA3_SCALING)
    (tmp_path / "run.toml").write_text(to_toml(parse(flags)))
    for source in (flags, ["--config", str(tmp_path / "run.toml"), "--checkpoint.no_enable"]):
        assert describe_model(parse([*source, f"--model.{flag}={value}"])) == describe_model(parse(flags))


@pytest.mark.parametrize("tied", [True, False])
def test_a_switch_wins_over_the_file(tmp_path, tied):
    flags = [*write(tmp_path, tie_word_embeddings=not tied), f"--model.{'' if tied else 'no_'}tied_embeddings"]
    assert describe_model(parse(flags)).config.tied_embeddings is tied


def test_names_beside_it_are_taken_ignoring_case_and_hyphens(tmp_path):
    (tmp_path / "run.toml").write_text(to_toml(parse(write(tmp_path))))
    for name in ("llama-3", "LLAMA3"):
        assert parse([*write(tmp_path), "--model.name", name]).model.name == "llama3"
    (tmp_path / "config.json").unlink()
    same = ["--model.name", "Llama-3", "--model.flavor", "CUSTOM"]
    assert parse(["--config", str(tmp_path / "run.toml"), "--checkpoint.no_enable", *same]).model.dim == 48


def test_a_written_minus_one_leaves_the_rows_to_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "build_tokenizer", lambda config: SimpleNamespace(vocab_size=900, adds_bos=False))
    (tmp_path / "run.toml").write_text("[model]\nvocab_size = -1\n")
    config = parse(["--config", str(tmp_path / "run.toml"), "--checkpoint.no_enable"])
    assert SOURCES.rows_are_given()
    assert inputs.resolve(config, Machine(device="cpu"), rows_are_given=True).config.model.vocab_size == 960


def test_the_path_of_the_file_is_no_reason_against_going_on():
    assert kind_of("model.from_hf") == "free" and kind_of("model.dim") == "refuse"


def test_another_model_beside_it_is_refused(tmp_path, capsys):
    assert "conflicts with model.from_hf" in refused(capsys, [*write(tmp_path), "--model.flavor", "8b"])
    assert "not the model_type of qwen3" in refused(capsys, [*write(tmp_path), "--model.name", "qwen3"])


@pytest.mark.long
def test_verbs_beside_train_take_it(tmp_path, capsys):
    flags = write(tmp_path)
    assert cli.main(["plan", *flags, "--gpus", "2", "--gpu", "cpu", "--seq_len", "64"]) == 0
    assert f"crius train --model.from_hf {tmp_path}" in capsys.readouterr().out
    assert cli.main(["train", *flags, *SHORT, "--training.seq_len", "18", "--layout", "tp3", "--dry_run"]) == 0
    assert "llama3/custom" in capsys.readouterr().out
    assert cli.main(["doctor", *flags]) == 0
    assert re.search(r"this run +llama3/custom on 1 rank", capsys.readouterr().out)
    large = ["--model.num_layers", "4000", "--model.dim", "9600", "--model.vocab_size", "640"]
    assert cli.main(["doctor", *flags, *large]) == 1
    fix = "--model.dim 9600 --model.num_layers 4000 shows which GPUs have it"
    assert f"crius plan --model.from_hf {tmp_path} --model.vocab_size 640 {fix}" in capsys.readouterr().out
    assert cli.main(["doctor", *flags, "--steps", "0"]) == 1
    said = capsys.readouterr().out
    assert "platform" in said and "for this run: training.steps 0 must be at least 1" in said


CUSTOM = ["--model.flavor", "custom"]
SIZES = [part for name in ("dim", "num_layers", "num_heads", "num_kv_heads") for part in (f"--model.{name}", "4")]


def test_a_custom_flavor_is_made_of_the_sizes_given():
    config = describe_model(parse([*CUSTOM, *SIZES, "--model.ffn_dim", "64", "--model.vocab_size", "320"])).config
    assert (config.dim, config.ffn_dim, config.head_dim, config.rope_theta) == (4, 64, 1, 5e5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([*CUSTOM, *SIZES], "flavor custom has no sizes of its own, and ffn_dim is not given"),
        (["--model.rope_scaling", "yes"], "model.rope_scaling yes is not valid"),
        (["--model.rope_scaling", '{"rope_type": "dynamic"}'], 'rope_type "dynamic" is not supported'),
        (["--model.words", "yes"], "model.words yes is not valid"),
        (["--model.words", '{"qkv_bias": 1}'], "qkv_bias 1 is neither true nor false"),
        (["--model.words", '{"norms": "around"}'], 'norms "around" is none of pre, post, both'),
        (["--model.words", '{"pattern": [{"window": 0.5}]}'], "window 0.5 is no whole number"),
        (["--model.words", '{"pattern": [{"width": 5}]}'], "a kind of layers has only window, rope_theta, stretched"),
        (["--model.words", '{"rotary_share": 2}'], "rotary_share 2 is above 1"),
        (
            ["--model.name", "mixtral", "--model.flavor", "debug", "--model.words", '{"mlp_bias": true}'],
            "layers with experts have neither mlp_bias nor activation",
        ),
        (["--model.words", '{"dim": 5}'], 'there is no word "dim"; the words are pattern, rotary_share'),
        (
            ["--model.rope_scaling", '{"frequencies": "float16"}'],
            'frequencies "float16" is not supported, only float32',
        ),
        (["--model.rope_scaling", json.dumps(LLAMA3_SCALING | {"factor": 0.5})], "a factor of at least 1"),
    ],
)
def test_what_cannot_be_taken_names_its_flag(flags, said):
    with pytest.raises(ConfigError) as caught:
        rules.check(facts_of(parse(flags), 0, None))
    assert said in str(caught.value) and "command line" in str(caught.value)


def test_rope_scaling_is_given_and_taken_away():
    given = describe_model(parse(["--model.rope_scaling", json.dumps(LLAMA3_SCALING)])).config.rope_scaling
    assert given == describe_model(parse(["--model.flavor", "8b"])).config.rope_scaling == Llama3Scaling(factor=8.0)
    assert describe_model(parse(["--model.flavor", "8b", "--model.rope_scaling", "none"])).config.rope_scaling is None
