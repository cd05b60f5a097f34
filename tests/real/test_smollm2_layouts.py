"""SmolLM2-135M-Instruct trained further on English text: any layout has one curve, and exports one model."""

import itertools
import json
import shutil

import pytest
import torch
from harness import TEXT, layout_flags, read_metrics, run, steps_of
from smollm2 import gguf_file

from crius.cli import main
from crius.tools.convert.importing import import_model

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]

LAYOUTS = ("1", "fsdp2", "tp3", "pp2", "cp2")
STEPS = 20
SAME = 2e-6
"""Of a loss: float32 sums in another order, and AdamW's steps, which follow the signs of small gradients."""
FLAGS = [
    *("--training.seq_len", "48", "--training.global_batch_size", "4", "--training.mixed_precision_param", "float32"),
    *("--optimizer.lr", "1e-4", "--lr_scheduler.warmup_steps", "1", "--lr_scheduler.min_lr_factor", "1"),
    *("--data.source", "text", "--data.path", str(TEXT), "--metrics.log_interval", "1"),
    *("--validation.interval", "100", "--validation.num_samples", "8", "--validation.fraction", "0.05"),
]


def held_out(folder):
    return next(record["val_loss"] for record in read_metrics(folder) if "val_loss" in record)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder with a run and an export of each layout, and the held-out loss of the weights that they start from."""
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("smol")
    import_model(str(gguf_file()), str(place / "smol"))
    start = ["--checkpoint.init_from", str(place / "smol"), *FLAGS]
    still = ["--optimizer.lr", "0", "--training.steps", "1", "--checkpoint.no_enable"]
    assert run([*start, *still], place / "still") == 0
    for layout in LAYOUTS:
        flags = ["--training.steps", str(STEPS), "--checkpoint.enable", *layout_flags(layout, 4)]
        assert run([*start, *flags], place / layout) == 0
    yield place, held_out(place / "still"), transformers
    shutil.rmtree(place)  # 10 GB


def test_it_learns_and_every_layout_has_one_curve(trained):
    place, before, _ = trained
    curves = {layout: [step["loss"] for step in steps_of(read_metrics(place / layout))] for layout in LAYOUTS}
    after = {layout: held_out(place / layout) for layout in LAYOUTS}
    print(json.dumps({"curves": curves, "held out": {"before": before, **after}}))
    for layout in LAYOUTS:
        assert len(curves[layout]) == STEPS
        assert curves[layout] == pytest.approx(curves["1"], rel=SAME, abs=0)
        assert after[layout] == pytest.approx(after["1"], rel=SAME, abs=0) and after[layout] < before - 0.5


@torch.inference_mode()
def test_the_exports_of_all_layouts_have_the_same_logits(trained, capsys):
    place, _, transformers = trained
    logits = {}
    for layout in LAYOUTS:
        assert main(["export", str(place / layout), str(place / f"{layout}-hf"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["tensors"] == told["tensors_equal"] == 272 and "tokens, at most" in told["logits"]
        model = transformers.AutoModelForCausalLM.from_pretrained(place / f"{layout}-hf").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(place / f"{layout}-hf")
        tokens = torch.tensor(tokenizer(TEXT.read_text()[-2000:]).input_ids)[None, :256]
        logits[layout] = model(tokens).logits
    largest = logits["1"].abs().max()
    for first, second in itertools.combinations(LAYOUTS, 2):
        assert (logits[first] - logits[second]).abs().max() <= 1e-5 * largest, (first, second)
