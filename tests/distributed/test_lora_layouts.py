"""LoRA on real workers: one curve on every layout, adapters that PEFT loads, a base that has to be the one it was."""

import json
import shutil

import pytest
import torch
from checkpoint_runs import contents, flags
from harness import read_metrics, run, steps_of, train
from pretrained_samples import save

from crius.checkpoint.names import step_name
from crius.tools.convert import exporting, peft_out
from crius.tools.convert.exporting import export_model, open_source
from crius.tools.convert.peft_out import export_peft

# 6 heads: tensor parallelism of 2 and of 3 divides them
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 16,
}
LORA = ("--lora.rank", "4", "--training.mixed_precision_param", "float32", "--optimizer.lr", "5e-3")
EVEN = ("--lr_scheduler.warmup_steps", "0", "--lr_scheduler.decay_ratio", "0")
STEPS = 4
LAYOUTS = ("1", "fsdp2", "tp3", "pp2", "hsdp2x2", "cp2", "ddp2")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "base"
    save("llama", folder, **SIZES)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """One whose attention is whole blocks of nf4, and whose feed-forward is not."""
    folder = tmp_path_factory.mktemp("lora") / "wide"
    save("llama", folder, **SIZES | {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8})
    return folder


def settings(layout, base, *own, steps=STEPS):
    """Of a run; 48 tokens, since 3 tensor-parallel ranks split a sequence."""
    given = flags(layout, steps=steps, layers=4)
    given[given.index("--training.seq_len") + 1] = "48"
    return [*given, "--checkpoint.init_from", str(base), "--checkpoint.interval", "2", *LORA, *EVEN, *own]


def tune(layout, base, run_dir, *own, steps=STEPS):
    return train(settings(layout, base, *own, steps=steps), run_dir)


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    """Runs by layout, each made once."""
    place, made = tmp_path_factory.mktemp("runs"), {}

    def of(layout):
        if layout not in made:
            made[layout] = steps_of(tune(layout, base, place / layout))
        return place / layout, made[layout]

    return of


@pytest.fixture(scope="module")
def tokens():
    return (torch.arange(48) * 7919 % 384)[None]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_of_any_layout_load_in_peft_and_are_the_model_that_was_trained(
    layout, runs, base, tokens, tmp_path, monkeypatch
):
    """One curve up to the order of sums; what PEFT computes with them is what their merged weights compute."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    monkeypatch.setattr(peft_out, "find_spec", lambda name: None)  # compared here instead
    (run_dir, curve), (_, want) = runs(layout), runs("1")
    assert [step["loss"] for step in curve] == pytest.approx([step["loss"] for step in want], rel=2e-6)
    assert len({round(step["loss"], 4) for step in curve}) == STEPS
    source = open_source(str(run_dir), -1)
    export_peft(source, str(tmp_path / "peft"))
    export_model(source, str(tmp_path / "merged"))
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        plain = load(base, dtype=torch.float32).eval()(tokens).logits
        adapted = peft.PeftModel.from_pretrained(load(base, dtype=torch.float32), tmp_path / "peft").eval()
        theirs = adapted(tokens).logits
        merged = load(tmp_path / "merged", dtype=torch.float32).eval()(tokens).logits
    assert (theirs - merged).abs().max() <= 2e-6 * merged.abs().max()
    assert (theirs - plain).abs().max() > 1e-2 * plain.abs().max()


def test_a_checkpoint_has_the_adapters_alone(runs, base):
    run_dir, _ = runs("fsdp2")
    held = {
        key
        for file in run_dir.glob("checkpoints/step-*/manifest.json")
        for key in json.loads(file.read_text())["tensors"]
    }
    weights = {key for key in held if key.startswith("model.")}
    assert len(weights) == 4 * 7 * 2 and all(key.endswith((".lora_A", ".lora_B")) for key in weights)
    assert {key.split(".")[-2] for key in held if key.startswith("optim.")} == {"lora_A", "lora_B"}


@pytest.mark.long
@pytest.mark.parametrize("own", [(), ("--lora.base", "nf4", "--lora.rslora")], ids=["keep", "nf4"])
def test_a_run_that_is_killed_goes_on_to_the_last_bit(own, wide, tmp_path, monkeypatch):
    whole = tune("fsdp2", wide, tmp_path / "whole", *own)
    monkeypatch.setenv("CRIUS_FAULT", "kill:step=4")
    assert run(settings("fsdp2", wide, *own), tmp_path / "killed", is_supervised=True) == 0
    monkeypatch.delenv("CRIUS_FAULT")
    assert steps_of(read_metrics(tmp_path / "killed"))[-1]["loss"] == steps_of(whole)[-1]["loss"]
    assert contents(tmp_path / "killed", STEPS) == contents(tmp_path / "whole", STEPS)


def test_a_resume_refuses_another_base_and_takes_a_copy_of_the_same(runs, base, tmp_path, capfd):
    shutil.copytree(runs("1")[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / step_name(4))
    for name in ("other", "copy"):
        shutil.copytree(base, tmp_path / name)
    shard = min((tmp_path / "other").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))  # a bit of one weight
    assert run(settings("1", tmp_path / "other", "--checkpoint.restart"), tmp_path / "run") != 0
    assert "is not the base that the adapters were trained on" in capfd.readouterr().err
    tune("1", tmp_path / "copy", tmp_path / "run")
    assert contents(tmp_path / "run", STEPS) == contents(runs("1")[0], STEPS)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "band"), [("int8", 1e-3), ("nf4", 2e-2)])
def test_a_base_in_fewer_bits_trains_close_to_the_whole_one_and_the_same_on_shards(kind, band, wide, tmp_path, capfd):
    """Bands are those of the roundings, measured 2e-4 and 4e-3."""
    whole, one, split = (
        [step["loss"] for step in steps_of(tune(layout, wide, tmp_path / f"{layout}{len(own)}", *own))]
        for layout, own in (("1", ()), ("1", ("--lora.base", kind)), ("fsdp2", ("--lora.base", kind)))
    )
    assert one == pytest.approx(whole, rel=band) and one != whole
    assert split == pytest.approx(one, rel=2e-6)
    said = capfd.readouterr().out
    assert f"lora: base {kind}: {28 if kind == 'int8' else 16} of 28 linears of the blocks" in said
    assert ("layers.*.feed_forward.w1 (192 x 128 mod 16384 = 8192)" in said) == (kind == "nf4")
