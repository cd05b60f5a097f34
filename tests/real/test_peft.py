"""Adapters that PEFT wrote: the model that Crius makes of them has PEFT's logits, on every way in, and back again."""

import json
from dataclasses import replace

import pytest
import torch
from pretrained_samples import save

from crius.checkpoint.load import load_tensors
from crius.interop.weights import open_weights
from crius.models import registry
from crius.tools.convert.exporting import open_source
from crius.tools.convert.importing import import_model
from crius.tools.convert.peft_out import export_peft

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.real

SAME = 2e-6  # of the largest logit: float32 sums in another order, of W x + s B (A x) and of (W + s B A) x
TOKENS = (torch.arange(40) * 7919 % 384).view(2, 20)
KINDS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all linears": {"target_modules": "all-linear", "r": 4, "lora_alpha": 3},
    "a regular expression": {"target_modules": r".*\.layers\.[12]\.mlp\.(up|down)_proj"},
    "some layers": {"target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [0, 3]},
    "without some": {"target_modules": ["o_proj", "up_proj"], "exclude_modules": ["layers.1.mlp.up_proj"]},
    "rsLoRA": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "r": 8, "lora_alpha": 5.5},
    "an orthogonal start": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal", "r": 4},
}


def logits_of(place):
    weights = open_weights(str(place))
    model = registry.build(weights.facts).float().eval()
    load_tensors(weights.tensors, dict(model.named_parameters()))
    return model(TOKENS)


def assert_same(ours, theirs):
    assert (ours - theirs).abs().max() <= SAME * theirs.abs().max()


def write_adapter(kind, folder, **settings):
    """Write a base and a random adapter by PEFT; returns the model with both."""
    save(kind, folder / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 2, "lora_alpha": 6} | settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = peft.get_peft_model(model, config).eval()
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            parameter.normal_(0, 0.1)
    model.save_pretrained(folder / "adapter")
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["llama", "qwen3_tied"])
def test_base_and_adapter_have_the_logits_of_peft(kind, name, tmp_path):
    model = write_adapter(kind, tmp_path, **KINDS[name])
    want = model(TOKENS).logits
    with model.disable_adapter():
        assert (want - model(TOKENS).logits).abs().max() > 1e-2 * want.abs().max()
    import_model(str(tmp_path / "adapter"), str(tmp_path / "kept"))
    import_model(str(tmp_path / "adapter"), str(tmp_path / "merged"), adapter="merge")
    for place in ("adapter", "kept", "merged"):
        assert_same(logits_of(tmp_path / place), want)


@torch.no_grad()
def test_an_adapter_goes_out_and_peft_opens_its_base_by_the_name_in_it(tmp_path):
    """The base is an imported checkpoint: PEFT gets the folder that it came from."""
    want = write_adapter("llama", tmp_path, target_modules="all-linear")(TOKENS).logits
    import_model(str(tmp_path / "base"), str(tmp_path / "imported"))
    file = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(file.read_text())
    assert content["base_model_name_or_path"] == str(tmp_path / "base")
    file.write_text(json.dumps(content | {"base_model_name_or_path": str(tmp_path / "imported")}))
    import_model(str(tmp_path / "adapter"), str(tmp_path / "kept"))
    kept = replace(open_source(str(tmp_path / "kept"), -1), has_tokenizer=False)
    done = export_peft(kept, str(tmp_path / "out"))
    assert "from peft" in done.logits
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same(again.eval()(TOKENS).logits, want)
    assert_same(logits_of(tmp_path / "out"), want)


def test_a_start_that_changes_the_base_is_refused(tmp_path):
    """PEFT reads such an adapter onto a changed base; Crius has the base as it was."""
    save("llama", tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    peft.get_peft_model(theirs, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(Exception, match="init_lora_weights 'pissa' is not supported"):
        open_weights(str(tmp_path / "adapter"))
