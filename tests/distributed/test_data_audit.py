"""The audit of a real run that goes on with other numbers of ranks."""

import pytest
from harness import SMALL, layout_flags, train

from crius import cli

FLAGS = [*SMALL, "--training.global_batch_size", "12", "--model.num_layers", "1", "--validation.interval", "0"]
FLAGS += ["--checkpoint.enable"]


@pytest.mark.long
def test_a_run_on_4_then_2_then_3_ranks_has_each_sample_once(tmp_path, capsys):
    for layout, steps in (("fsdp4", 3), ("fsdp2", 6), ("fsdp3", 9)):
        train([*FLAGS, *layout_flags(layout, batch=12), "--training.steps", str(steps)], tmp_path)
    capsys.readouterr()
    assert cli.main(["data", "audit", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split() for line in said[1:4]] == [
        ["0", "4", "1", "to", "3", "0"],
        ["1", "2", "4", "to", "6", "0"],
        ["2", "3", "7", "to", "9", "0"],
    ]
    assert "samples  108 (0 to 107)" in said and said[-1] == "0 repeated, 0 skipped"
