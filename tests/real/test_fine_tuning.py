"""SmolLM2-135M-Instruct fine-tuned by its two recipes, all weights and LoRA: the mask, the loss, what comes out."""

import json
import re

import pytest
import torch
from harness import crius
from smollm2 import write_chats

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 4
COLOURS = ("amber", "blue", "cyan", "green", "ivory", "lime", "olive", "pink")
SHORT = ["--data.path", "chats.jsonl", "--training.seq_len", "128", "--training.global_batch_size", "4"]
SHORT += ["--training.steps", str(STEPS), "--lr_scheduler.warmup_steps", "0", "--metrics.log_interval", "1"]
SHORT += ["--training.mixed_precision_param", "float32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the imported model ``smol`` and a few conversations."""
    folder = tmp_path_factory.mktemp("tuned")
    colours = [COLOURS[number % len(COLOURS)] for number in range(48)]
    pairs = [(f"What is the colour of box {n}?", f"Box {n} is {colour}.") for n, colour in enumerate(colours)]
    write_chats(folder, pairs, "chats.jsonl")
    return folder


@pytest.fixture(scope="module", params=["smollm2_sft", "smollm2_lora"])
def tuned(request, place):
    """Name of the recipe, folder of its run, and what was printed."""
    run = place / request.param
    done = crius(
        "train", "--recipe", request.param, "--checkpoint.init_from", "smol", *SHORT, "--job.run_dir", run,
        cwd=place, timeout=600,
    )  # fmt: skip
    return request.param, run, done.stdout + done.stderr


def test_two_masks_are_shown_and_the_loss_falls(tuned):
    _, run, text = tuned
    assert len(re.findall(r"conversation \d+, ⟦trained on⟧:", text)) == 2
    assert len(re.findall(r"assistant\n⟦Box \d+ is \w+\.<\|im_end\|>\n⟧", text)) >= 2
    assert "<|im_start|>user\nWhat is the colour" in text and "held out" in text
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row.get("kind", "step") == "step" and "loss" in row and "step" in row]
    assert losses[STEPS - 1] < 0.8 * losses[0], losses


def test_what_comes_out_is_the_model_that_was_trained(tuned, tmp_path):
    recipe, run, _ = tuned
    told = json.loads(crius("export", run, tmp_path / "out", "--json", timeout=300).stdout)
    assert told["tensors"] == (272 if recipe == "smollm2_sft" else 30 * 7 * 2)
    compared = "max difference" if recipe == "smollm2_sft" else "PEFT cannot open the base"  # compared below
    assert compared in told["logits"]


@torch.no_grad()
def test_adapters_load_in_peft(place, tuned, tmp_path):
    """Over the base as transformers has it PEFT computes what the merged export computes."""
    recipe, run, _ = tuned
    if recipe != "smollm2_lora":
        pytest.skip("all weights are trained")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    crius("export", place / "smol", tmp_path / "base", "--dtype", "float32", timeout=300)
    crius("export", run, tmp_path / "adapters", timeout=300)
    crius("export", run, tmp_path / "merged", "--format", "hf", "--dtype", "float32", timeout=300)
    load = transformers.AutoModelForCausalLM.from_pretrained
    base, merged = (load(tmp_path / name, dtype=torch.float32).eval() for name in ("base", "merged"))
    tokens = torch.arange(7, 71)[None]
    before, want = base(tokens).logits, merged(tokens).logits
    got = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()(tokens).logits
    largest = want.abs().max()
    assert (got - want).abs().max() <= 1e-5 * largest  # merged weights are rounded: the bound of crius export
    assert (got - before).abs().max() > 1e-3 * largest, "the adapters do something"
