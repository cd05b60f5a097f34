"""LoRA in one process: what is refused, what an adapted layer computes, and what its checkpoint is to others."""

import importlib.metadata
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import crius, parse
from pretrained_samples import save
from rule_cases import PIPELINE, TENSOR
from test_rules import facts_of

from crius.checkpoint.load import load_tensors
from crius.config import rules, rules_lora
from crius.config.lora import LoraConfig, saved_lora, scale_of
from crius.errors import CheckpointError, ConfigError
from crius.interop.adapters import read_adapters
from crius.interop.safetensors_file import read_safetensors
from crius.interop.weights import open_weights
from crius.models.adapted import Adapted
from crius.models.description import Buffer
from crius.models.layers import Linear
from crius.models.registry import build
from crius.parallel.lora import apply_lora
from crius.quantize.frozen import Int8Linear, Nf4Linear, fill

RANK, TARGETS, BASE = "--lora.rank", "--lora.targets", "--lora.base"
ON = [RANK, "4"]


def test_a_run_with_adapters_that_works_breaks_no_rule():
    for flags in (
        [*ON, PIPELINE, "2"],
        [*ON, BASE, "int8"],
        [*ON, TARGETS, "attention.*", TENSOR, "2", "--lora.rslora"],
    ):
        rules.check(facts_of(flags))


@pytest.mark.parametrize(("version", "count"), [("2.11.0+cu130", 1), ("2.12.1", 0)])
def test_a_base_of_whole_numbers_is_split_by_a_torch_that_can(version, count, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [SimpleNamespace(version=version)])
    flags = [*ON, BASE, "int8", "--parallelism.data_parallel_shard_degree", "2"]
    errors = list(rules_lora.split_base_needs_torch(facts_of(flags)))
    assert len(errors) == count
    assert all("needs torch 2.12 or newer; torch 2.11.0+cu130 is" in error.what for error in errors)
    assert not list(rules_lora.split_base_needs_torch(facts_of([*ON, BASE, "int8"])))


def test_a_model_whose_layers_have_state_is_refused():
    facts = facts_of(ON)
    [(count, layer)] = facts.model.layers
    stateful = replace(facts.model, layers=((count, replace(layer, buffers=(Buffer("shift", (2,)),))),))
    [error] = rules_lora.the_model_has_no_state(replace(facts, model=stateful))
    assert "such as layers.0.shift" in error.what and "--lora.rank 0" in error.fix
    assert not list(rules_lora.the_model_has_no_state(replace(facts_of([]), model=stateful)))


def test_an_embedding_and_an_output_layer_are_refused_by_name():
    [error] = rules_lora.targets_fit_layers(facts_of([*ON, TARGETS, "output"]))
    assert "not the embedding, the output layer, norms or experts" in error.why


@pytest.mark.parametrize(
    "settings",
    [
        *({"lora.rank": value} for value in ("4", True, 1.5, [4])),
        *({"lora.rank": 4, "lora.alpha": value} for value in ("x", float("inf"), None)),
        *({"lora.rank": 4, "lora.targets": value} for value in ("wq", [1], None)),
        {"lora.rank": 4, "lora.rslora": 1},
    ],
)
def test_settings_of_a_checkpoint_that_no_run_has_are_refused(settings):
    with pytest.raises(ValueError, match=r"lora\."):
        saved_lora(settings)


def test_rslora_scales_by_the_root_of_the_rank():
    assert (scale_of(16, 32.0, rslora=False), scale_of(16, 32.0, rslora=True)) == (2.0, 8.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "hf"
    save("llama", folder)
    return folder


def adapted(base, lora):
    """Our model of ``base`` with adapters, all numbers of which are drawn."""
    weights = open_weights(str(base))
    names = tuple(name for name in weights.facts.linears if name != "output" and "layers.3" not in name)
    facts = replace(weights.facts, adapted=Adapted(lora.rank, names))
    model = build(weights.facts).float()
    load_tensors(weights.tensors, dict(model.named_parameters()))
    apply_lora(model, facts, lora, torch.float32)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(generator=generator).mul_(0.05)
    return model, names


def test_outputs_and_gradients_are_those_of_peft(base):
    """In float32, up to the order of sums; the frozen weights have no gradient."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    lora = LoraConfig(rank=4, alpha=6.0, rslora=True)
    model, names = adapted(base, lora)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    words = {"attention": "self_attn", "feed_forward": "mlp", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj"}
    words |= {"wo": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    modules = {name: ".".join(["model", *(words.get(part, part) for part in name.split("."))]) for name in names}
    config = peft.LoraConfig(r=4, lora_alpha=6.0, use_rslora=True, target_modules=list(modules.values()))
    theirs = peft.get_peft_model(theirs, config)
    there = dict(theirs.named_parameters())
    pairs = {
        f"{name}.{part}": there[f"base_model.model.{module}.{part}.default.weight"]
        for name, module in modules.items()
        for part in ("lora_A", "lora_B")
    }
    own = dict(model.named_parameters())
    for name, parameter in pairs.items():
        parameter.data.copy_(own[name].data)
    tokens = (torch.arange(2 * 17) * 7919 % 384).view(2, 17)
    loss = model(tokens[:, :-1], labels_BT=tokens[:, 1:])
    loss.backward()
    logits = theirs(tokens[:, :-1]).logits
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    for name, parameter in pairs.items():
        torch.testing.assert_close(
            own[name].grad, parameter.grad, rtol=1e-4, atol=1e-5 * parameter.grad.abs().max().item()
        )
    assert {name for name, parameter in own.items() if parameter.grad is not None} == pairs.keys()


@pytest.mark.parametrize("kind", [Int8Linear, Nf4Linear])
@pytest.mark.usefixtures("imported_torchao")
def test_a_layer_in_fewer_bits_multiplies_with_what_torchao_made_of_its_weight(kind):
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    layer = kind(Linear(128, 256, bias=False))
    fill("w", layer, weight)
    before = [part.clone() for part in layer.kept()]
    made = (
        to_nf4(weight).get_original_weight()
        if kind is Nf4Linear
        else Int8QuantizedTrainingLinearWeight.from_float(weight).dequantize()
    )
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2), requires_grad=True)
    y = layer(x)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(y, x @ made.t(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, torch.ones_like(y) @ made, rtol=1e-5, atol=1e-5)
    assert (made - weight).abs().max() < {Int8Linear: 5e-4, Nf4Linear: 2e-2}[kind]
    assert all(torch.equal(part, old) for part, old in zip(layer.kept(), before, strict=True))
    assert (
        sum(part.numel() * part.element_size() for part in layer.kept())
        < {Int8Linear: 1.04, Nf4Linear: 0.53}[kind] * weight.numel()
    )


@pytest.mark.parametrize("kind", [Int8Linear, Nf4Linear])
def test_one_number_of_a_weight_that_is_not_finite_is_refused(kind):
    weight = torch.ones(256, 128)
    weight[3, 5] = float("nan")
    with pytest.raises(CheckpointError, match="w.weight cannot be rounded"):
        fill("w", kind(Linear(128, 256, bias=False)), weight)


TUNE = [
    *("--training.steps", "2", "--training.seq_len", "32", "--training.global_batch_size", "4", "--lora.rank", "2"),
    *("--validation.interval", "0", "--training.mixed_precision_param", "float32", "--training.device", "cpu"),
]


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("tuned") / "run"
    done = crius("train", *TUNE, "--checkpoint.init_from", str(base), "--job.run_dir", str(run_dir))
    assert done.returncode == 0, done.stderr
    assert "lora: 28 linears, rank 2, 10,496 of " in done.stdout
    return run_dir


def test_weights_that_would_be_drawn_are_refused_unless_nothing_is_saved(tmp_path):
    done = crius("train", *TUNE, "--job.run_dir", str(tmp_path / "run"))
    assert done.returncode == 2 and "LoRA has no weights to adapt" in done.stderr
    assert parse([*TUNE, "--checkpoint.no_enable"]).lora.rank == 2


@pytest.mark.long
def test_a_run_of_lora_is_a_model_wherever_one_is_taken(tuned, base, tmp_path):
    """Its weights are W + s B A, rounded once; it answers, is checked, and other runs start from it."""
    weights, plain = open_weights(str(tuned)), open_weights(str(base))
    name = "layers.1.attention.wq"
    held = {
        key: torch.frombuffer(bytearray(source[key].read()), dtype=torch.float32).view(source[key].shape)
        for source in (weights.adapters.tensors, {f"{name}.weight": plain.tensors[f"{name}.weight"]})
        for key in source
        if key.startswith(name)
    }
    want = held[f"{name}.weight"].double() + 8.0 * held[f"{name}.lora_B"].double() @ held[f"{name}.lora_A"].double()
    got = np.frombuffer(weights.tensors[f"{name}.weight"].read(), dtype=np.float32).reshape(want.shape)
    assert np.array_equal(got, want.float().numpy())
    assert open_weights(str(base)).tensors["norm.weight"].read() == weights.tensors["norm.weight"].read()
    assert crius("checkpoint", "verify", str(tuned)).returncode == 0
    answer = crius("generate", str(tuned), "--prompt", "a", "--max_new_tokens", "2", "--device", "cpu")
    assert answer.returncode == 0, answer.stderr
    given = ["--checkpoint.init_from", tuned.name, "--job.run_dir", str(tmp_path / "more")]
    more = crius("train", *TUNE, *given, cwd=tuned.parent)  # from a relative path, which is read elsewhere below
    assert more.returncode == 0, more.stderr
    assert open_weights(str(tmp_path / "more")).adapters.base["path"] == f"{tuned}/checkpoints/step-00000002"


@pytest.mark.long
def test_an_export_is_of_peft_unless_another_is_asked_for(tuned, tmp_path):
    done = crius("export", str(tuned), str(tmp_path / "peft"), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["tensors"] == 4 * 7 * 2 and "from peft" in told["logits"]
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"][-3:]) == (2, 16.0, "/hf")
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert "library_name: peft" in (tmp_path / "peft" / "README.md").read_text()
    merged = crius("export", str(tuned), str(tmp_path / "hf"), "--format", "hf", "--dtype", "bfloat16")
    assert merged.returncode == 0 and "as LlamaForCausalLM" in merged.stdout, merged.stderr


@pytest.mark.long
def test_adapters_are_rounded_after_their_logits_are_compared(tuned, tmp_path):
    rounded = crius("export", str(tuned), str(tmp_path / "rounded"), "--dtype", "bfloat16", "--json")
    assert rounded.returncode == 0, rounded.stderr
    told = json.loads(rounded.stdout)
    assert told["tensors"] == 4 * 7 * 2 and told["logits"].endswith("before the adapters were rounded to bfloat16")
    dtypes = {tensor.dtype for tensor in read_safetensors(tmp_path / "rounded").tensors.values()}
    assert dtypes == {"BF16"}


@pytest.mark.long
def test_a_base_that_is_gone_or_another_one_is_refused_with_its_place(tuned, base, tmp_path):
    shutil.copytree(tuned, tmp_path / "run")
    shutil.move(base, tmp_path / "elsewhere")
    try:
        with pytest.raises(ConfigError, match="the base of .* is not at .*hf") as gone:
            open_weights(str(tmp_path / "run"))
        assert "put it back there" in gone.value.fix
        done = crius("train", *TUNE, "--job.run_dir", str(tmp_path / "run"), "--checkpoint.init_from", str(base))
        assert done.returncode == 2 and "--checkpoint.init_from with its new path" in done.stderr
        given = ["--job.run_dir", str(tmp_path / "run"), "--checkpoint.init_from", str(tmp_path / "elsewhere")]
        done = crius("train", *TUNE, *given, "--training.steps", "3")
        assert done.returncode == 0, done.stderr
        save("llama", base, rms_norm_eps=1e-6)
        with pytest.raises(ConfigError, match="is not the base that the adapters of"):
            open_weights(str(tuned))
    finally:
        shutil.rmtree(base, ignore_errors=True)
        shutil.move(tmp_path / "elsewhere", base)


@pytest.mark.full
@pytest.mark.parametrize("key", ["layers.0.attention.wq.lora_A", "layers.3.feed_forward.w2.lora_B"])
def test_adapters_that_are_not_those_of_the_settings_are_refused(key, tuned):
    """One is missing, another is of another shape, or the checkpoint does not say what its base was."""
    weights = open_weights(str(tuned))
    adapters, facts = weights.adapters, weights.facts
    good = dict(adapters.tensors)
    for wrong, base in (
        ({name: tensor for name, tensor in good.items() if name != key}, adapters.base),
        (good | {key: replace(good[key], shape=good[key].shape[::-1])}, adapters.base),
        (good | {"layers.0.attention.wq.weight": good[key]}, adapters.base),
        (good, {"path": "x"}),
    ):
        with pytest.raises(CheckpointError, match="do not match the adapters in its settings"):
            read_adapters(adapters.lora, wrong, facts, base, "here")


def test_a_vocabulary_that_nothing_would_train_is_refused(base, tmp_path):
    given = ["--checkpoint.init_from", str(base), "--model.vocab_size", "448", "--job.run_dir", str(tmp_path / "run")]
    done = crius("train", *TUNE, *given)
    assert done.returncode == 2 and "model.vocab_size 448, there 384" in done.stderr


def test_a_model_without_adapters_is_no_export_for_peft(base, tmp_path):
    done = crius("export", str(base), str(tmp_path / "out"), "--format", "peft")
    assert done.returncode == 2 and "has no adapters" in done.stderr
