"""Qwen2.5-Coder-0.5B-Instruct and Gemma 3 270M, from the files of ``make setup-weights``, beside transformers."""

import json
import math
import shutil
import unicodedata

import pytest
import torch
from harness import TEXT, layout_flags, read_metrics, run, steps_of
from real_weights import path_of

from crius.cli import main
from crius.config.data import TokenizerConfig
from crius.interop.weights import open_weights
from crius.kernels import choice
from crius.models import registry
from crius.tokens.conversion import TEXTS
from crius.tokens.tokenizer import build_tokenizer
from crius.tools.convert.importing import import_model

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(7200)]

PROMPT = "The capital of France is"
NEW = 32
LAYOUTS = ("1", "fsdp2", "tp2", "pp2")
STEPS = 20
SAME = {"qwen2": 2e-6, "gemma3": 2e-5}
"""Of a loss. Gemma on one device is 1.2e-5 from itself in step 19, once its products change by 1e-7 of their size."""
FLAGS = [
    *("--training.seq_len", "32", "--training.global_batch_size", "4", "--training.mixed_precision_param", "float32"),
    *("--training.steps", str(STEPS), "--optimizer.lr", "1e-5", "--lr_scheduler.warmup_steps", "1"),
    *("--lr_scheduler.min_lr_factor", "1", "--data.source", "text", "--data.path", str(TEXT)),
    *("--metrics.log_interval", "1", "--validation.interval", "0", "--checkpoint.no_enable"),
]


@pytest.fixture(scope="module", params=["qwen2", "gemma3"])
def place(request, tmp_path_factory):
    """The name of a model, and the run folder that it was imported to."""
    folder = tmp_path_factory.mktemp(request.param)
    import_model(str(path_of(request.param)), str(folder / "run"))
    yield request.param, str(folder / "run")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def theirs(place):
    """The model and the tokenizer of transformers."""
    transformers = pytest.importorskip("transformers")
    file = path_of(place[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def test_every_layout_has_one_curve(place, tmp_path, capsys):
    """tp2 too, in which both ranks share Gemma's one head of keys and values."""
    name, folder = place
    curves = {}
    for layout in LAYOUTS:
        flags = ["--checkpoint.init_from", folder, *FLAGS, *layout_flags(layout, 4)]
        assert run(flags, tmp_path / layout) == 0
        curves[layout] = [step["loss"] for step in steps_of(read_metrics(tmp_path / layout))]
    with capsys.disabled():
        print(f"\n{name}: {json.dumps(curves)}")
    assert len(curves["1"]) == STEPS
    for layout in LAYOUTS:
        assert curves[layout] == pytest.approx(curves["1"], rel=SAME[name], abs=0), layout


def test_tensors_and_ids_are_those_of_transformers(place, theirs):
    name, folder = place
    model, tokenizer = theirs
    weights = open_weights(folder)
    family = registry.families()[name]
    numbers = model.state_dict()
    for ours, tensor in weights.tensors.items():
        assert bytes(tensor.read()) == numbers[family.translated(ours)].numpy().tobytes(), ours
    own = build_tokenizer(TokenizerConfig(path=f"{folder}/tokenizer"))
    assert own.adds_bos == (name == "gemma3")
    for text in [*TEXTS, TEXT.read_text()[:3000], "¿Où? 東京 🙂 1234\n<bos><|im_end|></s>"]:
        ids = own.encode_marked(text).tolist()
        start = [own.bos_id] if own.adds_bos else []
        # transformers makes no normal form of a GGUF file's text; Qwen's tokenizer.json, and we, do
        given = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        assert [*start, *ids] == tokenizer(given).input_ids, text


@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(place, theirs, capsys):
    name, folder = place
    model, tokenizer = theirs
    ids = tokenizer(PROMPT, return_tensors="pt")
    want = model.generate(**ids, do_sample=False, max_new_tokens=NEW)[0, ids.input_ids.shape[1] :].tolist()
    with choice.applied(choice.current()):
        assert main(["generate", folder, "--prompt", PROMPT, "--max_new_tokens", str(NEW), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] == want
    assert len(want) == NEW
    assert name != "qwen2" or told["text"].startswith(" Paris")


@torch.inference_mode()
def test_bits_per_byte_are_those_of_transformers(place, theirs, tmp_path, capsys):
    name, folder = place
    model, tokenizer = theirs
    text = TEXT.read_text()[:2000]
    (tmp_path / "text.jsonl").write_text(json.dumps({"context": "", "continuation": text}))
    with choice.applied(choice.current()):
        assert main(["evaluate", folder, "--tasks", str(tmp_path / "text.jsonl"), "--json"]) == 0
    told = capsys.readouterr().out
    ids = tokenizer(text, add_special_tokens=False).input_ids
    start = tokenizer.bos_token_id
    log_probs = model(torch.tensor([[start, *ids[:-1]]])).logits[0].log_softmax(-1)
    want = -log_probs[range(len(ids)), ids].double().sum().item() / math.log(2) / len(text.encode())
    found = json.loads(told)["results"][0]["metrics"]["bits_per_byte"]["value"]
    with capsys.disabled():
        print(f"\n{name}: {found} bits per byte, transformers {want}")
    assert found == pytest.approx(want, abs=1e-4)
