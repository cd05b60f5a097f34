"""Same weights, same tokens: a model computes what Hugging Face's code computes."""

import functools
import json
from dataclasses import replace

import pytest
import torch

from crius.launch.local import run_workers
from crius.models import registry
from crius.models.decode import generate
from crius.models.huggingface import read_model_settings
from crius.models.layers import rotary_frequencies
from crius.models.llama3 import Llama3Config
from crius.models.mixtral import MixtralConfig
from crius.models.qwen3 import Qwen3Config
from crius.models.qwen3_moe import Qwen3MoEConfig
from crius.models.rope import Llama3Scaling
from crius.models.spec import described as describe

transformers = pytest.importorskip("transformers")

# head_dim 16 at theta 500,000: of the 8 frequencies Llama 3.1 keeps 4, blends 1 and divides 3 by the factor
PLAIN = Llama3Config(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=160, vocab_size=97)
SCALED = replace(PLAIN, rope_scaling=Llama3Scaling(factor=8.0))
QWEN3 = Qwen3Config(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=160, vocab_size=97)
WITH_EXPERTS = Qwen3MoEConfig(**vars(QWEN3), num_experts=8, top_k=3, expert_ffn_dim=48)
MIXTRAL = MixtralConfig(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, expert_ffn_dim=48, vocab_size=97)
KINDS = {Llama3Config: "llama3", Qwen3Config: "qwen3", Qwen3MoEConfig: "qwen3_moe", MixtralConfig: "mixtral"}
CLASSES = {"llama3": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}
CONFIGS = {
    "untied": PLAIN,
    "tied": replace(PLAIN, tied_embeddings=True),
    "scaled": SCALED,
    "scaled_tied_factor32": replace(PLAIN, tied_embeddings=True, rope_scaling=Llama3Scaling(factor=32.0)),
    "multi_head": replace(PLAIN, num_kv_heads=4),
    "wide_heads": replace(PLAIN, head_dim=24),
    "qwen3": QWEN3,
    "qwen3_tied": replace(QWEN3, tied_embeddings=True),
    "qwen3_moe": WITH_EXPERTS,
    "qwen3_moe_tied": replace(WITH_EXPERTS, tied_embeddings=True, top_k=1),
    "mixtral": MIXTRAL,
}

# Largest difference relative to the largest number: float32 sums in another order.
SAME = 2e-6
LOGITS = {"rtol": 1e-5, "atol": 1e-5}  # where positions or masks differ in kind
# Hugging Face's float32 powers are up to 3e-7 off ours in float64, at position 9400 an angle of up to 1e-3 rad
# (measured: 5e-4 of logits of magnitude 4; nothing is left of it with the frequencies of an import, as the test shows)
FREQUENCIES = {"rtol": 1e-6, "atol": 0}
FAR_LOGITS = {"rtol": 0, "atol": 2e-3}


def described(config):
    """The config as a model of its family, and that family."""
    spec = registry.SPECS[KINDS[type(config)]]
    return describe(spec.name, config, spec.plan(config), spec.block), spec


def worst(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def both(config, attention):
    """Our model and Hugging Face's with the same weights, random and of a size that lets attention be uneven."""
    model, spec = described(config)
    ours = registry.build(model)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(0.0, config.dim**-0.5, generator=random).add_(1.0 if parameter.dim() == 1 else 0.0)
    scaling = config.rope_scaling
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    experts = {}
    if model.num_experts:
        width = "moe_intermediate_size" if spec.name == "qwen3_moe" else "intermediate_size"
        experts = {"num_experts": config.num_experts, "num_experts_per_tok": config.top_k, "norm_topk_prob": True}
        experts[width] = config.expert_ffn_dim
    family = CLASSES[spec.name]
    theirs = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            **{"intermediate_size": config.ffn_dim} | experts,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=131_072,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tied_embeddings,
            attn_implementation=attention,
        )
    )
    places = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            counterpart(spec, name, places).copy_(weight)
    assert sum(place.numel() for place in places.values()) == model.num_parameters
    return ours, theirs.eval()


def counterpart(spec, name, theirs):
    """What transformers has in memory for a parameter: of experts both matrices that read the tokens are one there."""
    layer, _, part = name.removeprefix("layers.").partition(".feed_forward.")
    if part == "router.weight":
        return theirs[f"model.layers.{layer}.mlp.gate.weight"]
    if not part.startswith("experts."):
        return theirs[spec.hf.translated(name)]
    if part == "experts.w2":
        return theirs[f"model.layers.{layer}.mlp.experts.down_proj"]
    return theirs[f"model.layers.{layer}.mlp.experts.gate_up_proj"].chunk(2, dim=1)[part == "experts.w3"]


def tokens_of(config, length=48):
    return torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_equal_hugging_face(name, attention):
    config = CONFIGS[name]
    ours, theirs = both(config, attention)
    tokens = tokens_of(config)
    assert worst(ours(tokens), theirs(tokens).logits) <= SAME


@pytest.mark.parametrize("name", CONFIGS)
def test_what_hugging_face_writes_is_read_as_the_same_model(name, tmp_path):
    config = CONFIGS[name]
    _, theirs = both(config, "eager")
    theirs.config.save_pretrained(tmp_path)
    families = {family: spec.hf for family, spec in registry.SPECS.items()}
    _, settings = read_model_settings(str(tmp_path), families)
    spec = registry.SPECS[settings.pop("name")]
    assert spec.describe(settings.pop("flavor"), **settings).config == config


@pytest.mark.parametrize("name", ["untied", "scaled"])
@torch.no_grad()
def test_positions_far_out_are_rotated_as_hugging_face_does(name):
    """Tokens 200 positions apart, up to 9400: beyond the original context of 8192, where the scaling shows."""
    config = replace(CONFIGS[name], attention_mask="document")
    ours, theirs = both(config, "sdpa")
    tokens = tokens_of(config)
    positions = (torch.arange(48) * 200).expand(2, -1)
    everything = torch.ones_like(tokens)  # without a mask Hugging Face takes jumps in positions for new documents
    want = theirs(tokens, position_ids=positions, attention_mask=everything).logits
    torch.testing.assert_close(ours(tokens, positions), want, **FAR_LOGITS)
    frequencies = theirs.model.rotary_emb.inv_freq
    rope = ours.config.attention_of(0).rope
    own = rotary_frequencies(rope, tokens.device).to(torch.float32)
    torch.testing.assert_close(own, frequencies, **FREQUENCIES)
    imported, _ = both(replace(config, rope_float32=True), "sdpa")
    rounded = replace(rope, is_float32=True)
    assert torch.equal(rotary_frequencies(rounded, tokens.device), frequencies)
    torch.testing.assert_close(imported(tokens, positions), want, **LOGITS)


@torch.no_grad()
def test_rope_scaling_shows_far_out():
    """The tests above tell scaled from plain: the same weights give other logits."""
    tokens, positions = tokens_of(PLAIN), (torch.arange(48) * 200).expand(2, -1)
    plain, scaled = (both(replace(c, attention_mask="document"), "sdpa")[0](tokens, positions) for c in (PLAIN, SCALED))
    assert (plain - scaled).abs().max() > 0.5  # measured: 3.2


@torch.no_grad()
def test_document_mask_equals_hugging_face_packed_sequences():
    ours, theirs = both(replace(SCALED, attention_mask="document"), "sdpa")
    tokens = tokens_of(SCALED)
    positions = torch.cat([torch.arange(n) for n in (11, 1, 30, 6)]).expand(2, -1)
    want = theirs(tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(ours(tokens, positions), want, **LOGITS)


def write_gradient_differences(config, path, placement):
    """Largest difference between the gradients of the two models, relative to the largest gradient, by parameter."""
    torch.set_num_threads(1)
    ours, theirs = both(config, "sdpa")
    tokens = tokens_of(config)
    for logits in (ours(tokens), theirs(tokens).logits):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found, gaps = {}, []
    _, spec = described(config)
    for name, parameter in ours.named_parameters():
        gradient = counterpart(spec, name, their_gradients)
        pairs = {f"{name}.{e}": pair for e, pair in enumerate(zip(parameter.grad, gradient, strict=True))}
        for one, (own, of_theirs) in (pairs if ".experts." in name else {name: (parameter.grad, gradient)}).items():
            found[one] = worst(own, of_theirs)
            gaps.append(found[one] * of_theirs.abs().max().item())
    largest = max(gradient.abs().max().item() for gradient in their_gradients.values())
    path.write_text(json.dumps([found, max(gaps) / largest]))


@pytest.mark.parametrize("name", ["scaled", "tied", "wide_heads", "qwen3", "qwen3_tied", "qwen3_moe", "mixtral"])
def test_gradients_equal_hugging_face(name, tmp_path):
    path = tmp_path / "differences.json"
    # in a process of its own: after a backward here, autograd on a machine with a GPU refuses to run in later forks
    assert run_workers(functools.partial(write_gradient_differences, CONFIGS[name], path), 1, tmp_path) == 0
    differences, model_wide = json.loads(path.read_text())
    shapes = described(CONFIGS[name])[0].parameter_shapes
    names = [[one] if len(shape) < 3 else [f"{one}.{e}" for e in range(shape[0])] for one, shape in shapes.items()]
    assert differences.keys() == set(sum(names, []))  # each expert alone
    assert max(differences.values()) <= 2 * SAME  # of one tensor's largest (measured: 2.1e-6)
    assert model_wide <= SAME


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_hugging_face(name):
    """Prompts of different lengths, together: the shorter ones are padded on the left, by them and by us."""
    config = CONFIGS[name]
    ours, theirs = both(config, "sdpa")
    prompts = [row[:length] for row, length in zip(tokens_of(config).tolist(), (5, 12), strict=True)]
    steps = generate(ours, prompts, lambda logits: logits.argmax(-1), max_new_tokens=24)
    padded = torch.tensor([[0] * (12 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (12 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    want = theirs.generate(
        padded, attention_mask=mask, do_sample=False, max_new_tokens=24, pad_token_id=0, eos_token_id=None
    )
    assert torch.stack([step.ids_B for step in steps], 1).tolist() == want[:, 12:].tolist()
