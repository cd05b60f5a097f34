"""The recipes for real models: each is planned for GPUs that hold it, and dry-run."""

import pytest
from harness import GPUS, crius

from crius.config.load import recipe_names

# the shapes are those of the model, the step is short
FEW = ["--model.num_layers", "2", "--training.seq_len", "2048", "--training.global_batch_size"]


def test_every_recipe_of_a_real_model_is_here():
    assert {name for name in recipe_names() if "debug" not in name} - {"verify", "precision"} == GPUS.keys()


@pytest.mark.parametrize("name", GPUS)
def test_a_recipe_is_planned_for_gpus_that_hold_it(name):
    done = crius("plan", "--recipe", name, "--gpus", str(GPUS[name]), "--gpu", "h100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"crius train --recipe {name}" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", GPUS)
def test_a_recipe_is_dry_run(name):
    ranks = str(GPUS[name])
    done = crius("train", "--recipe", name, "--nproc", ranks, "--dry_run", *FEW, ranks)
    assert done.returncode == 0, done.stderr
    assert "compile" in done.stdout


@pytest.mark.slow  # minutes; the others take longer and differ in nothing that this one leaves out
def test_a_recipe_is_dry_run_as_it_stands():
    done = crius("train", "--recipe", "qwen3_0.6b", "--nproc", "8", "--dry_run", timeout=900)
    assert done.returncode == 0, done.stderr
