"""Full-precision loss curves as text. A changed curve needs its reason in the file, and in the commit."""

import hashlib

import pytest
from harness import GOLDEN, SMALL, TEXT, layout_flags, steps_of, train

TEXT_SHA256 = "76b1bfcff40ead1585c280a7f14147c2761c7b9e6d6fb8598e7aae6e99509e26"


def read_curve(name: str) -> list[float]:
    lines = (GOLDEN / name).read_text().splitlines()
    assert lines[0].startswith("# reason: ")
    return [float(line.split()[1]) for line in lines if not line.startswith("#")]


def test_the_committed_text_is_unchanged():
    assert hashlib.sha256(TEXT.read_bytes()).hexdigest() == TEXT_SHA256


@pytest.mark.parametrize("layout", ["1", "fsdp2"])
def test_the_debug_model_follows_its_golden_curve(layout, tmp_path):
    """Any layout follows it. 1e-6: other CPUs round kernels and the normal sampler differently in the last bits."""
    flags = [*SMALL, "--model.num_layers", "8", *layout_flags(layout)]
    got = [record["loss"] for record in steps_of(train(flags, tmp_path))]
    want = read_curve("llama3_debug_tempest.txt")
    assert got == pytest.approx(want, rel=1e-6, abs=0), "\n".join(f"{n} {loss!r}" for n, loss in enumerate(got, 1))
