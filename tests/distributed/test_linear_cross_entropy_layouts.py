"""Under every layout the chunked loss gives what one process gives with all logits at once."""

import pytest
from harness import SMALL, layout_flags, steps_of, train

# 257 rows of the vocabulary split unevenly, and 50 tokens do not divide a microbatch
FLAGS = [*SMALL, "--model.num_layers", "2", "--model.vocab_size", "257", "--training.steps", "4"]
FLAGS += ["--metrics.log_interval", "1", "--validation.interval", "4", "--kernels.loss_chunk_tokens", "50"]


@pytest.fixture(scope="module")
def want(tmp_path_factory):
    off = [*FLAGS, "--kernels.linear_cross_entropy", "off", "--kernels.loss_chunk_tokens", "-1"]
    return train(off, tmp_path_factory.mktemp("off"))


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["1", "tp2", "fsdp2_accum2", "pp2"])
def test_the_chunked_loss_is_that_of_all_logits_under(layout, want, tmp_path):
    got = train([*FLAGS, "--kernels.linear_cross_entropy", "chunked", *layout_flags(layout)], tmp_path)
    for name in ("loss", "grad_norm"):
        # float32: only the order of sums differs, which four updates carry on
        assert [step[name] for step in steps_of(got)] == pytest.approx(
            [step[name] for step in steps_of(want)], rel=1e-6
        )
    assert got[-1]["val_loss"] == pytest.approx(want[-1]["val_loss"], rel=1e-6)
