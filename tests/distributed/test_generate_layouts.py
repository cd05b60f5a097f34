"""Processes that share each layer generate what one process generates."""

import json

import pytest
from harness import train

from crius import cli
from crius.kernels import choice

SMALL = "--training.steps 2 --training.seq_len 32 --validation.interval 0 --checkpoint.enable".split()
SMALL += ["--model.num_layers", "2", "--model.dim", "64"]
MODELS = {
    "llama3": ["--model.num_kv_heads", "4"],
    "tied_with_uneven_rows": ["--model.tied_embeddings", "--model.vocab_size", "263"],
    "qwen3_with_one_key_value_head": "--model.name qwen3 --model.num_heads 4 --model.num_kv_heads 1".split(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_generate_what_one_generates(name, folder, capfd):
    train([*SMALL, *MODELS[name]], folder / name)
    flags = ["--prompt", "def f(", "--prompt", "import", "--max_new_tokens", "9", "--temperature", "0.5", "--json"]
    answers = []
    for ranks in (1, 2):
        capfd.readouterr()
        with choice.applied(choice.current()):
            code = cli.main(
                ["generate", str(folder / name), *flags, "--parallelism.tensor_parallel_degree", str(ranks)]
            )
        out, err = capfd.readouterr()
        assert code == 0, err
        answers.append([json.loads(line) for line in out.splitlines()])
    one, two = answers
    assert len(one) == 2 and [row["tokens"] for row in one] == [row["tokens"] for row in two]
    for alone, shared in zip(one, two, strict=True):
        assert shared["log_probs"] == pytest.approx(alone["log_probs"], abs=1e-5)


def test_a_rank_that_cannot_read_the_source_is_reported_once(tmp_path, capfd):
    code = cli.main(["generate", str(tmp_path), "--prompt", "a", "--parallelism.tensor_parallel_degree", "2"])
    _, err = capfd.readouterr()
    assert code == 2 and err.count("ConfigError") == 1 and str(tmp_path) in err
