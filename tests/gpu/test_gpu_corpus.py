"""The corpus of the runs here shows what a document mask does. Needs no GPU."""

import pytest
from gpu_runs import document_run, train_all


@pytest.mark.long
def test_the_losses_of_the_document_mask_are_not_those_of_the_causal_mask(tmp_path):
    """On a corpus of one document they are equal to 1e-8, and a GPU's kernel could hide nothing and pass its tests."""
    few = ["--training.device", "cpu", "--training.steps", "5", "--model.num_layers", "1"]
    few += ["--optimizer.lr", "3e-3", "--training.global_batch_size", "8"]
    document = [*document_run(tmp_path), *few]
    runs = train_all(tmp_path, {"document": document, "causal": [*document, "--model.attention_mask", "causal"]})
    assert runs["document"].losses[-1] != pytest.approx(runs["causal"].losses[-1], rel=1e-4, abs=0)
