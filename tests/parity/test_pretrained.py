"""Weights of Hugging Face in, to the bit, and a run that starts from them in any layout."""

import json
import shutil

import pytest
import torch
from harness import TEXT, layout_flags, read_metrics, run, steps_of
from pretrained_samples import KINDS, save, save_tokenizer
from safetensors.torch import load_file

from crius.checkpoint.load import load_tensors
from crius.cli import main
from crius.interop.weights import open_weights
from crius.models import registry
from crius.models.huggingface import rows_of

pytest.importorskip("transformers")

SAME = 2e-6  # of the largest logit: float32 sums in another order
SHORT = [
    *("--training.seq_len", "32", "--training.global_batch_size", "8", "--validation.interval", "0"),
    *("--data.source", "text", "--data.path", str(TEXT), "--training.mixed_precision_param", "float32"),
]
LAYOUTS = {
    **dict.fromkeys(("llama", "llama_tied"), ("1", "fsdp2", "tp2", "pp2")),
    "qwen3_moe": ("1", "fsdp2_ep2", "tp2_ep2", "pp2"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of Hugging Face with a tokenizer, its model, and the run folder it was imported as, by kind."""
    root, made = tmp_path_factory.mktemp("hub"), {}
    for kind in KINDS:
        model = save(kind, root / kind)
        save_tokenizer(root / kind)
        assert main(["import", str(root / kind), str(root / f"{kind}-imported")]) == 0
        made[kind] = root / kind, model, root / f"{kind}-imported"
    return made


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_import_has_the_bits_and_the_logits_of_the_source(kind, folders):
    folder, theirs, imported = folders[kind]
    source, copied = open_weights(str(folder)), open_weights(str(imported))
    family = registry.families()[source.model["name"]]
    written = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    for name, tensor in copied.tensors.items():
        rows = [written.pop(key) for key in rows_of(family.translated(name), tensor.shape)]
        assert bytes(tensor.read()) == b"".join(row.numpy().tobytes() for row in rows), name
        assert bytes(tensor.read()) == bytes(source.tensors[name].read())
    assert not written
    assert copied.model == source.model
    assert copied.chat_template == source.chat_template == "{{ messages }}"
    ours = registry.build(registry.SPECS[copied.model["name"]].describe(**copied.sizes))
    load_tensors(copied.tensors, dict(ours.named_parameters()))
    tokens = torch.randint(384, (2, 40), generator=torch.Generator().manual_seed(1))
    want = theirs(tokens).logits
    assert (ours(tokens) - want).abs().max() <= SAME * want.abs().max()


def first_loss(flags, folder):
    assert run([*flags, *SHORT, "--training.steps", "1", "--checkpoint.enable"], folder) == 0
    return steps_of(read_metrics(folder))[0]["loss"]


@pytest.mark.long
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_starts_from_the_same_weights(source, folders, tmp_path):
    """Of a folder of Hugging Face, whose rows are read, and of a checkpoint, whose parts are hashed."""
    folder, theirs, imported = folders[source]
    places = (imported, folder, imported, folder)
    losses = {
        layout: first_loss(["--checkpoint.init_from", str(place), *layout_flags(layout, 8)], tmp_path / layout)
        for layout, place in zip(LAYOUTS[source], places, strict=True)
    }
    assert max(losses.values()) - min(losses.values()) <= SAME * losses["1"]
    drawn = first_loss(["--config", str(imported / "run.toml")], tmp_path / "drawn")
    assert abs(drawn - losses["1"]) > 1e-3
    state = json.loads((tmp_path / "pp2/checkpoints/step-00000001/state.json").read_text())
    assert state["init_from"] == {
        "origin": f"Hugging Face folder {folder}",
        "kind": "Hugging Face",
        "path": str(folder),
        "digest": open_weights(str(folder)).digest,
    }
    assert state["train"]["step"] == 1 and state["data"]["next_sample"] == 8


def test_a_resume_does_not_read_the_source_again(folders, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(folders["qwen3"][2], source)
    begin = ["--checkpoint.init_from", str(source), *SHORT, "--checkpoint.enable"]
    assert run([*begin, "--job.run_dir", str(tmp_path / "run"), "--training.steps", "1"], tmp_path / "run") == 0
    shutil.rmtree(source / "checkpoints")  # the tokenizer is needed all the same
    (source / "run.toml").unlink()
    resumed = [*begin, "--job.run_dir", str(tmp_path / "run"), "--training.steps", "2"]
    assert run(resumed, tmp_path / "run") == 0
    assert [record["step"] for record in steps_of(read_metrics(tmp_path / "run"))] == [1, 2]
    state = json.loads((tmp_path / "run/checkpoints/step-00000002/state.json").read_text())
    assert state["init_from"]["origin"] == f"step 0 of {source}/checkpoints"


def test_new_rows_of_the_vocabulary_are_drawn_and_the_others_kept(folders, tmp_path):
    folder, theirs, _ = folders["llama"]
    flags = ["--checkpoint.init_from", str(folder), "--model.vocab_size", "448", "--optimizer.lr", "0"]
    first_loss([*flags, "--optimizer.weight_decay", "0", *layout_flags("fsdp2", 8)], tmp_path / "more")
    first_loss(
        ["--model.vocab_size", "448", "--config", str(folders["llama"][2] / "run.toml"), *flags[4:]], tmp_path / "drawn"
    )
    grown, drawn = (open_weights(str(tmp_path / name)).tensors for name in ("more", "drawn"))
    for name, key in {"tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}.items():
        rows, width = theirs.state_dict()[key].numpy().tobytes(), 4 * 64
        assert bytes(grown[name].read()) == rows + bytes(drawn[name].read())[384 * width :]
