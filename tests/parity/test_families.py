"""Families of transformers: tiny random models that it wrote compute the same here, and go back as they came."""

import functools
import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from harness import crius
from mutations import OF_FAMILIES
from safetensors import safe_open

from crius.errors import ConfigError
from crius.interop.weights import open_weights, settled
from crius.launch.local import run_workers
from crius.models import registry
from crius.models.decode import generate
from crius.models.huggingface import config_of, judged, settings_in, with_changes
from crius.models.layers import rotary_frequencies
from crius.models.rope import Rope, rope_scaling_of
from crius.models.words import parse_words, usual_words
from crius.tools.convert.exporting import model_config, open_source, parts_of

transformers = pytest.importorskip("transformers")

VOCABULARY = 331
TOKENS = 40
TINY = {
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 8,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
NEAR = {"rope_type": "default", "rope_theta": 5e5}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ODD = {"mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False, "beta_fast": 20, "beta_slow": 2}
WITHOUT_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
SOFTCAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
CASES = {
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}),
    "llama_yarn_by_scale": ("Llama", {"rope_parameters": YARN | ODD}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3_biases": ("Qwen3", {"attention_bias": True}),
    "seed_oss": ("SeedOss", WITHOUT_DROPOUT),
    "seed_oss_out": ("SeedOss", WITHOUT_DROPOUT | {"attention_bias": False, "attention_out_bias": True}),
    "smollm3": ("SmolLM3", {}),
    "granite": ("Granite", MULTIPLIERS | {"mlp_bias": True}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.8}),
    "phi3_window": ("Phi3", {"sliding_window": 9}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 7, "rope_parameters": {"full_attention": YARN, "sliding_attention": NEAR}},
    ),
    "gemma2": ("Gemma2", {"sliding_window": 7, "query_pre_attn_scalar": 12, **SOFTCAPS}),
    "gemma2_without": ("Gemma2", {"sliding_window": 7} | dict.fromkeys(SOFTCAPS)),
    "gemma3": ("Gemma3Text", {"sliding_window": 7, "query_pre_attn_scalar": 12, "num_hidden_layers": 12}),
    "gemma3_linear": (
        "Gemma3Text",
        {
            "sliding_window": 5,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention"] * 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ),
    "ernie4_5": ("Ernie4_5", {"use_bias": True}),
    "cwm": ("Cwm", {"sliding_window": 7, "rope_parameters": LLAMA3}),
}
NAMES = list(CASES)
# families that Crius lacks, as words alone: what their users write
OUTSIDE = {
    "cwm": """
from dataclasses import dataclass
from crius.models.config import DecoderConfig, LayerKind
from crius.models.huggingface import NAMES, HuggingFace, Kinds
from crius.models.spec import ModelSpec

NEAR = LayerKind(window=8192)

@dataclass(frozen=True, kw_only=True)
class CwmConfig(DecoderConfig):
    vocab_size: int = 128_256
    head_dim: int = 128
    rope_theta: float = 1_000_000.0
    pattern: tuple[LayerKind, ...] = (LayerKind(), NEAR, NEAR, NEAR)

HF = HuggingFace(
    model_type="cwm",
    architecture="CwmForCausalLM",
    names=NAMES,
    config=CwmConfig,
    kinds=Kinds(windows="listed", window=8192),
    defaults={"head_dim": 128, "num_kv_heads": 8, "norm_eps": 1e-5, "rope_theta": 1_000_000.0},
)
FLAVORS = {"32b": CwmConfig(dim=6144, num_layers=64, num_heads=48, num_kv_heads=8, ffn_dim=21_504)}
SPEC = ModelSpec(name="cwm", flavors=FLAVORS, hf=HF)
""",
    "ernie4_5": """
from dataclasses import dataclass
from crius.models.config import DecoderConfig
from crius.models.huggingface import NAMES, HuggingFace, Size
from crius.models.spec import ModelSpec

@dataclass(frozen=True, kw_only=True)
class ErnieConfig(DecoderConfig):
    vocab_size: int = 103_424
    head_dim: int = 128
    tied_embeddings: bool = True
    rotary_pairs: bool = True

HF = HuggingFace(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    names=NAMES,
    config=ErnieConfig,
    sizes=tuple(Size("use_bias", word, bool, True) for word in ("qkv_bias", "o_bias", "mlp_bias")),
    defaults={"head_dim": 128, "num_kv_heads": 2, "norm_eps": 1e-5, "rope_theta": 500_000.0, "tied_embeddings": True},
)
FLAVORS = {"0.3b": ErnieConfig(dim=1024, num_layers=18, num_heads=16, num_kv_heads=2, ffn_dim=3072)}
SPEC = ModelSpec(name="ernie4_5", flavors=FLAVORS, hf=HF)
""",
}


def theirs(name, **more):
    """The model of transformers, with random weights; biases and norms are off their start."""
    kind, changes = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**TINY | changes | more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    for key, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 0.3)
        if key.endswith("norm.weight") and "Gemma" not in kind:
            parameter.data.add_(1)
    return model


@functools.cache
def folder_of(name, root):
    folder = root / name
    theirs(name).save_pretrained(folder)
    return str(folder)


def ours(folder):
    """Crius's model of a folder."""
    weights = open_weights(folder)
    model = registry.build(weights.facts)
    tensors = {
        name: torch.frombuffer(bytearray(source.read()), dtype=torch.float32).view(source.shape)
        for name, source in weights.tensors.items()
    }
    if weights.facts.tied_embeddings:
        tensors["output.weight"] = tensors["tok_embeddings.weight"]
    model.load_state_dict(tensors)
    return model


def tokens():
    return torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def far(got, want):
    """The largest difference, relative to the largest number."""
    return ((got.double() - want.double()).abs().max() / want.abs().max()).item()


def divergence(logits, exact):
    """Kullback-Leibler divergence of the next token's distribution from the exact one in nats, the mean over tokens."""
    log_p = exact.double().log_softmax(-1)
    return (log_p.exp() * (log_p - logits.double().log_softmax(-1))).sum(-1).mean().item()


def write_differences(name, folder, path, placement):
    """What the tests below hold to their bounds, as JSON."""
    torch.set_num_threads(1)
    model = ours(folder)
    other = theirs(name)
    ids = tokens()
    logits = model(ids)
    want = other(ids).logits
    gradients = {}
    for out in (logits, want):
        torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    family = registry.families()[open_weights(folder).model["name"]]
    by_name = dict(other.named_parameters())
    joined = {}
    for key, parameter in model.named_parameters():
        joined.setdefault(family.translated(key), []).append(parameter.grad)
    for key, parts in joined.items():
        gradients[key] = far(torch.cat(parts), by_name[key].grad)
    with torch.no_grad():
        exact = theirs(name, attn_implementation="eager").double()(ids).logits
        eager = theirs(name, attn_implementation="eager")(ids).logits
        halves = [
            divergence(model.to(torch.bfloat16)(ids), exact),
            divergence(other.to(torch.bfloat16)(ids).logits, exact),
        ]
    errors = [far(one, exact) for one in (logits, want, eager)]
    path.write_text(json.dumps([far(logits, want), errors, gradients, halves]))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(autouse=True, scope="module")
def outside(root):
    """The folder of the modules of families that are no part of Crius; this process knows the families."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        for name, text in OUTSIDE.items():
            (root / f"{name}.py").write_text(text)
            patch.setitem(registry.SPECS, name, importlib.import_module(name).SPEC)
        yield root


@pytest.fixture(scope="module")
def differences(root):
    @functools.cache
    def of(name):
        path = root / f"{name}.json"
        work = functools.partial(write_differences, name, folder_of(name, root), path)
        assert run_workers(work, 1, root) == 0  # a process of its own: see test_huggingface.py
        return json.loads(path.read_text())

    return of


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name, differences):
    """40 tokens: longer than the window, and than the context that YaRN stretches."""
    apart, (error, *of_theirs), _, _ = differences(name)
    assert apart <= 3e-6
    assert error <= max(1.5 * max(of_theirs), 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_transformers(name, differences):
    assert max(differences(name)[2].values()) <= 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_in_bfloat16_the_next_token_is_as_sure_as_in_transformers(name, differences):
    own, of_theirs = differences(name)[3]
    assert own <= 1.5 * of_theirs


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(name, root):
    """Prompts of different lengths, together: the shorter one is padded on the left."""
    model = ours(folder_of(name, root))
    prompts = [row[:length] for row, length in zip(tokens().tolist(), (5, 16), strict=True)]
    steps = generate(model, prompts, lambda logits: logits.argmax(-1), max_new_tokens=24)
    padded = torch.tensor([[0] * (16 - len(prompt)) + prompt for prompt in prompts])
    want = theirs(name).generate(
        padded, attention_mask=padded.ne(0), do_sample=False, max_new_tokens=24, eos_token_id=None
    )
    assert torch.stack([step.ids_B for step in steps], 1).tolist() == want[:, 16:].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_an_export_has_the_tensors_and_settings_that_transformers_wrote(name, root):
    folder = folder_of(name, root)
    source = open_source(folder, -1)
    family, names = registry.foreign_names(source.weights.model["name"], source.weights.facts.state_names)
    written = {part.key: bytes(part.data()) for part in parts_of(source, names, "")}
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        assert written == {key: file.get_tensor(key).numpy().tobytes() for key in file.keys()}
    said = json.loads((root / name / "config.json").read_text())
    told = model_config(source.weights, family, {}, "float32")
    assert {key: value for key, value in said.items() if told.get(key, ...) != value} == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_a_source_is_told_so_that_transformers_builds_it(name, root):
    """From our settings alone, read by transformers' own class, then by us."""
    model = open_weights(folder_of(name, root)).model
    family = registry.families()[model["name"]]
    told = config_of(family, model)
    kind, _ = CASES[name]
    same = getattr(transformers, f"{kind}Config")(**told, max_position_embeddings=256)
    again = settings_in(same.to_dict(), family, model["name"])
    assert {key: again[key] for key in again if key != "words"} == {key: model[key] for key in again if key != "words"}
    assert words_of(again, family) == words_of(model, family)


def test_a_family_of_words_is_25_lines_that_a_user_names(outside):
    """Outside of the repository; the tests above hold it to transformers as they do every family."""
    for text in OUTSIDE.values():
        assert len([line for line in text.splitlines() if line]) <= 25
    folder = folder_of("cwm", outside)
    unknown = crius("import", folder, "run", cwd=outside)
    assert unknown.returncode == 2 and "its other keys are known" in unknown.stderr
    done = crius("import", folder, "run", "--explain", "--import", "cwm", cwd=outside)
    assert done.returncode == 0, done.stderr
    assert "layer_types" in done.stdout and "model       cwm: dim 60" in done.stdout


@pytest.mark.parametrize(("mutate", "name"), OF_FAMILIES, ids=[mutate.__name__ for mutate, _ in OF_FAMILIES])
def test_a_planted_fault_gives_other_logits(mutate, name, root, monkeypatch):
    want = theirs(name)(tokens()).logits
    mutate(monkeypatch)
    assert far(ours(folder_of(name, root))(tokens()), want) > 1e-4


ROPES = [
    ({"rope_type": "linear", "factor": 4.0}, 1e4),
    (LLAMA3, 1e4),
    (LLAMA3 | {"low_freq_factor": 2.0, "original_max_position_embeddings": 8192}, 5e5),
    (YARN | {"original_max_position_embeddings": 512}, 1e4),
    (YARN | {"original_max_position_embeddings": 512} | ODD, 1e4),
    (YARN | {"original_max_position_embeddings": 4096}, 4.0),  # beyond the last frequency
    (YARN | {"original_max_position_embeddings": 4}, 1e4),  # before the first
    (YARN | {"attention_factor": 0.7}, 1e4),
    (YARN | {"factor": 1.0}, 1e4),
]


@pytest.mark.parametrize(("section", "theta"), ROPES)
def test_frequencies_have_the_bits_of_transformers(section, theta):
    kind = section["rope_type"]
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=section | {"rope_theta": theta})
    want, magnitude = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    scaling = rope_scaling_of(section)
    found, wide = (
        rotary_frequencies(Rope(theta=theta, dim=64, scaling=scaling, is_float32=is_float32), torch.device("cpu"))
        for is_float32 in (True, False)
    )
    assert torch.equal(found, want) and getattr(scaling, "magnitude", 1.0) == magnitude
    torch.testing.assert_close(wide.float(), want, rtol=1e-6, atol=0)


NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("name", sorted(registry.families()))
def test_a_key_that_is_left_out_has_the_value_that_transformers_gives_it(name):
    family = registry.families()[name]
    whole = transformers.AutoConfig.for_model(family.model_type).to_dict() | {"norm_topk_prob": True}
    found = []
    needed = {key: whole[key] for key in (*NEEDED, "norm_topk_prob")}
    for content in (whole, needed, needed | {"rms_norm_eps": None}):
        settings, wrong = judged(content, family, name, with_weights=False)
        assert (wrong, settings.pop("name")) == ([], name)
        found.append(registry.SPECS[name].describe(**settings).config)
    assert found[0] == found[1] == found[2]
    null = judged(needed | {"num_key_value_heads": None}, family, name, with_weights=False)[0]
    assert null["num_kv_heads"] == whole["num_attention_heads"]


def words_of(model, family):
    """All words of a model, but the multiplier that Gemma derives from its width."""
    usual = usual_words(family.config)
    said = usual | parse_words(model.get("words") or "{}")
    return {word: value for word, value in said.items() if value and usual[word] != 0.0 or word == "pattern"}


# by their publishers: flavors, and the parameters of their safetensors
PUBLISHED = {
    ("mistral", "7b"): 7_248_023_552,
    ("mistral", "12b"): 12_247_782_400,
    ("mistral", "24b"): 23_572_403_200,
    ("qwen2", "0.5b"): 494_032_768,
    ("qwen2", "1.5b"): 1_543_714_304,
    ("qwen2", "3b"): 3_085_938_688,
    ("qwen2", "7b"): 7_615_616_512,
    ("seed_oss", "36b"): 36_151_104_512,
    ("smollm3", "3b"): 3_075_098_624,
    ("phi3", "14b"): 14_659_507_200,
    ("phi3", "mini-4k"): 3_821_079_552,
    ("olmo2", "1b"): 1_484_916_736,
    ("olmo2", "13b"): 13_716_198_400,
    ("gemma2", "2b"): 2_614_341_888,
    ("gemma2", "9b"): 9_241_705_984,
    ("gemma3", "270m"): 268_098_176,
    ("gemma3", "1b"): 999_885_952,
}
FLAVORS = [(name, flavor) for name, spec in registry.SPECS.items() for flavor in spec.flavors if spec.hf]


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_a_flavor_is_the_model_that_transformers_builds_from_its_config(name, flavor):
    """On the meta device: as many parameters. What publishers say is the same number."""
    facts = registry.SPECS[name].describe(flavor)
    told = config_of(registry.families()[name], settled({"name": name, "flavor": flavor}))
    kind = transformers.AutoConfig.for_model(**told, pad_token_id=None)
    with torch.device("meta"):
        model = getattr(transformers, told["architectures"][0])(kind)
    assert facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.num_parameters == PUBLISHED.get((name, flavor), facts.num_parameters)


@pytest.mark.parametrize(
    ("name", "words", "lost"),
    [
        ("mistral", '{"pattern": [{"window": 64}, {}]}', "pattern"),
        ("llama3", '{"qkv_bias": true}', "qkv_bias"),
        ("llama3", '{"attention_scale": 0.5}', "attention_scale"),
        ("qwen2", '{"qkv_bias": false}', "qkv_bias"),
        ("gemma3", '{"embedding_multiplier": 1.0}', "embedding_multiplier"),
        ("olmo3", '{"pattern": [{"window": 64}, {"window": 128}]}', "pattern"),
    ],
)
def test_what_a_class_of_transformers_cannot_say_is_not_exported(name, words, lost):
    facts = registry.SPECS[name].describe("debug", words=words)
    weights = SimpleNamespace(model=settled({"name": name, "flavor": "debug", "words": words}), facts=facts, said={})
    with pytest.raises(ConfigError, match=f"has no {lost}"):
        model_config(weights, registry.families()[name], {}, "float32")


def test_a_changed_base_of_positions_keeps_the_dims_that_rotate():
    family = registry.families()["phi3"]
    model = settled({"name": "phi3", "flavor": "debug", "words": '{"rotary_share": 0.5}'})
    said = config_of(family, model)
    share = said.pop("partial_rotary_factor")
    said |= {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": share}}
    before = config_of(family, settled(settings_in(said, family, "phi3")))
    now = config_of(family, model | {"rope_theta": 5e5})
    again = settings_in(with_changes(said, before, now), family, "phi3")
    assert (again["rope_theta"], parse_words(again["words"])["rotary_share"]) == (5e5, 0.5)
