"""Same seed, same tokens: a layout changes where the sums happen, not what is summed."""

import pytest
from harness import SMALL, layout_flags, steps_of, train

# float32: weights start equal bit for bit, the step-1 loss is a float64 sum of equal token losses, and afterwards only
# the order of float32 gradient sums differs, which AdamW at lr 3e-4 keeps far below these bounds (measured: 1e-8)
STEPS = 20
LOSS = {1: 1e-7, STEPS: 1e-5}
GRAD_NORM = {1: 1e-6, STEPS: 1e-4}

TWO_LAYERS = [*SMALL, "--model.num_layers", "2"]
TWO_LAYERS += ["--training.steps", str(STEPS), "--validation.interval", str(STEPS)]
OTHER_RUN = {"--training.global_batch_size", "--model.num_kv_heads", "--model.num_layers"}

RUNS = [
    ("fsdp4", []),
    ("hsdp2x2", []),
    ("ddp2", []),
    ("accum4", ["--training.gradient_sync", "immediate"]),
    ("accum4", ["--training.gradient_sync", "deferred"]),
    ("fsdp2_accum4", ["--training.gradient_sync", "immediate"]),
    ("fsdp2_accum4", ["--training.gradient_sync", "deferred"]),
    ("ddp2_accum2", ["--training.gradient_sync", "auto"]),
    ("hsdp2x2_accum4", ["--training.gradient_sync", "immediate"]),
    ("hsdp2x2_accum4", ["--training.gradient_sync", "deferred"]),
    ("fsdp2_accum2", ["--parallelism.reshard_after_forward_mode", "never"]),
    ("fsdp2_accum2", ["--parallelism.reshard_after_forward_mode", "always"]),
    ("fsdp4", ["--parallelism.reshard_after_forward_mode", "2"]),
    ("fsdp2", ["--training.enable_cpu_offload"]),
    ("fsdp3", ["--training.global_batch_size", "48"]),
    ("fsdp2_tp2", []),
    ("tp4", ["--model.num_kv_heads", "2"]),
    ("pp2+interleave_zero_bubble", ["--model.num_layers", "4"]),  # two stages a rank
    ("fsdp2_cp2", []),
    ("pp2_tp2_accum2", []),
]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Records of the one-process run of the same model and global batch, made once for each."""
    made: dict[tuple[str, ...], list[dict]] = {}

    def get(*flags: str) -> list[dict]:
        if flags not in made:
            made[flags] = train([*TWO_LAYERS, *layout_flags("1"), *flags], tmp_path_factory.mktemp("one"))
        return made[flags]

    return get


@pytest.mark.parametrize(("layout", "flags"), RUNS, ids=[f"{layout} {' '.join(flags[1:2])}" for layout, flags in RUNS])
def test_every_layout_matches_one_device(layout, flags, one_device, tmp_path):
    want = one_device(*flags) if OTHER_RUN.intersection(flags) else one_device()
    batch = 48 if layout == "fsdp3" else 16
    got = train([*TWO_LAYERS, *layout_flags(layout, batch), *flags], tmp_path)
    for step in (1, STEPS):
        a, b = (next(record for record in steps_of(records) if record["step"] == step) for records in (got, want))
        assert a["loss"] == pytest.approx(b["loss"], rel=LOSS[step], abs=0)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=GRAD_NORM[step], abs=0)
    assert got[-1]["val_loss"] == pytest.approx(want[-1]["val_loss"], rel=LOSS[STEPS], abs=0)
    assert got[-1]["val_bits_per_byte"] == pytest.approx(want[-1]["val_bits_per_byte"], rel=LOSS[STEPS], abs=0)
    assert got[-1]["val_samples"] == want[-1]["val_samples"] == 20
