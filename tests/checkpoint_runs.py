"""Short runs of the real job with checkpoints, and what their checkpoints say."""

from harness import SMALL, layout_flags

from crius.checkpoint.contents import contents_hash
from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import read_manifest
from crius.checkpoint.names import step_name

BATCH = 12
SHORT = [
    *("--training.seq_len", "32", "--training.global_batch_size", str(BATCH)),
    *("--data.source", "text", "--data.path", SMALL[SMALL.index("--data.path") + 1], "--validation.interval", "0"),
    *("--checkpoint.mode", "sync"),
]


def flags(layout, *more, steps=3, layers=2):
    sizes = ("--training.steps", str(steps), "--model.num_layers", str(layers))
    return [*SHORT, *layout_flags(layout, BATCH), *sizes, *more]


def contents(run_dir, step):
    disk = open_disk(str(run_dir / "checkpoints"))
    return contents_hash(disk, step_name(step), read_manifest(disk, step_name(step)))
