"""The recipes for real models: each is planned for GPUs that hold it, and dry-run."""

import dataclasses
import os
import re

import pytest
from harness import GPUS, crius

from crius.cli.settings import run_of
from crius.config.facts import Facts
from crius.config.load import recipe_names
from crius.config.rules_layout import LAYOUT_RULES
from crius.config.run import replace_fields
from crius.host import Machine
from crius.models.registry import SPECS
from crius.tools.plan.fit import fit
from crius.tools.plan.hardware import KNOWN
from crius.tools.plan.memory import memory
from crius.tools.plan.workload import from_config
from crius.train.inputs import resolve

# the shapes are those of the model, the step is short
FEW = ["--model.num_layers", "2", "--training.seq_len", "2048", "--training.global_batch_size"]


def test_every_recipe_of_a_real_model_is_here():
    assert {name for name in recipe_names() if "debug" not in name} - {"verify", "precision", "tune"} == GPUS.keys()


@pytest.mark.long
@pytest.mark.parametrize("name", GPUS)
def test_a_recipe_is_planned_for_gpus_that_hold_it(name):
    done = crius("plan", "--recipe", name, "--gpus", str(GPUS[name]), "--gpu", "h100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"crius train --recipe {name}" in done.stdout


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("name", GPUS)
def test_a_recipe_leaves_a_tenth_of_the_card_free_on_its_gpus_and_on_more(name, times):
    """As it stands: more GPUs have the same global batch, and ask for no change."""
    machine, card = Machine(device="cuda", ranks=times * GPUS[name]), KNOWN["h100-80g"].memory_bytes
    resolved = resolve(run_of("--recipe", name), machine)
    changes, _ = fit(resolved.config, resolved.model, machine, 0.9 * card)
    run = replace_fields(resolved.config, changes)
    assert memory(from_config(run, resolved.model, machine.ranks)).total < 0.9 * card
    facts = Facts(
        **vars(dataclasses.replace(resolved, config=run)),
        **{"num_ranks": machine.ranks, "asked_ranks": machine.ranks, "asked_by": "", "num_gpus": 8, "num_cores": 64},
        **{"origin": lambda field: "recipe", "specs": SPECS, "local_ranks": 8},
    )
    assert [str(error) for rule in LAYOUT_RULES for error in rule(facts)] == []


def share_of_the_card(*flags):
    """Percent of the peak of a rank, as ``crius train --dry_run`` says it."""
    done = crius("train", *flags, "--dry_run", timeout=900)
    assert done.returncode == 0, done.stderr
    return int(re.search(r"(\d+)% of the 80 GiB of one h100-80g at the peak", done.stdout)[1])


@pytest.mark.slow  # a minute each; J4 of the journeys has the one of 8B on 8 GPUs
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "llama3_405b"])
def test_the_dry_run_of_a_recipe_is_below_90_percent_of_the_card(name, times):
    assert share_of_the_card("--recipe", name, "--nproc", str(times * GPUS[name])) < 90


@pytest.mark.slow
@pytest.mark.parametrize(("flavor", "ranks"), [("8b", 8), ("70b", 64)])
def test_the_dry_run_of_the_defaults_fits_into_the_card(flavor, ranks):
    """It counts eager blocks, which keep more than the compiled ones that the run was planned with."""
    sizes = ["--model.flavor", flavor, "--training.seq_len", "8192", "--training.global_batch_size", str(8 * ranks)]
    assert share_of_the_card("--config", os.devnull, *sizes, "--nproc", str(ranks)) < 100


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
