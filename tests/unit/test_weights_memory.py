"""Import and export hold one tensor at a time, as the kernel counts memory."""

import pytest

from benchmarks import weights_memory


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "experts"), [(64_000, 0), (1024, 256)], ids=["embedding", "experts"])
def test_import_and_export_take_less_than_twice_the_largest_tensor(tmp_path, rows, experts):
    found = weights_memory.run(tmp_path, 0.6 if experts else 0.4, dim=512, rows=rows, experts=experts)
    largest = found["largest_tensor"]
    assert found["bytes"] > 5 * largest and largest > 60 << 20
    for verb in ("import", "export"):
        assert largest < found[verb]["above"] < 2 * largest + (16 << 20)  # names, headers and buffers of files
