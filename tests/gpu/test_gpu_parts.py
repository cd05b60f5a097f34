"""Parts that behave differently on a GPU, each in a process of its own."""

import sys
from pathlib import Path

import gpu_runs
import pytest
import torch
import torch.distributed as dist
from harness import SMALL, parse
from torch import nn

from crius.config.operation import StabilityConfig
from crius.config.training import LRSchedulerConfig
from crius.data.loader import Batch, BatchLoader
from crius.errors import NonFiniteError
from crius.kernels.attention import Mask, document_mask, masked_attention
from crius.optim.adamw import AdamW
from crius.optim.build import WarmupStableDecay
from crius.parallel.gradients import Gradients
from crius.parallel.runtime import pick_device, world
from crius.train.guard import UpdateGuard
from crius.train.inputs import open_run_corpus
from crius.train.state import TrainState
from crius.train.step import StepResult

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def one_process_is_a_world(folder: Path) -> None:
    device = pick_device(gpu_runs.DEVICE, 0)
    with world(0, 1, device, "", 60) as ranks:
        values = torch.arange(4.0, device=device)
        assert ranks.sum(values.clone()).tolist() == values.tolist()
        assert ranks.gather(values).shape == (1, 4)
        # host tensors too: offloaded gradients are reduced there
        assert ranks.sum(torch.ones(3)).tolist() == [1, 1, 1]
        for kind in {device.type, "cpu"}:
            assert dist.group.WORLD._get_backend(torch.device(kind)).name() == BACKENDS[kind]
    assert not dist.is_initialized()


def batches_come_in_pinned_memory(folder: Path) -> None:
    corpus = open_run_corpus(parse(SMALL), 1)

    def loader(pin_memory: bool) -> BatchLoader:
        return BatchLoader(corpus.train, global_batch_size=16, rank=0, num_ranks=1, prefetch=2, pin_memory=pin_memory)

    pinned, plain = loader(True), loader(False)
    for _ in range(4):  # more than are prefetched, so that buffers are used again
        got, want = next(pinned), next(plain)
        assert got.tokens_BT.is_pinned() and got.labels_BT.is_pinned() and got.positions_BT.is_pinned()
        placed = got.to(gpu_runs.DEVICE)
        torch.cuda.synchronize()
        assert torch.equal(placed.tokens_BT.cpu(), want.tokens_BT)
        assert torch.equal(placed.labels_BT.cpu(), want.labels_BT)
    pinned.close(), plain.close()


def a_bad_update_is_skipped_by_the_device(folder: Path) -> None:
    device = pick_device(gpu_runs.DEVICE, 0)
    with world(0, 1, device, "", 60) as ranks:
        model = nn.Linear(8, 8, bias=False, device=device)
        optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
        optimizer.takes_found_inf = True
        state = TrainState([model], optimizer, WarmupStableDecay(LRSchedulerConfig(), 3))
        gradients = Gradients([model.weight], 1, device)
        guard = UpdateGuard(StabilityConfig(), state, [("weight", model.weight)], gradients, ["weight"], ranks, folder)

        def result(step: int, value: float) -> StepResult:
            model.weight.grad = torch.full_like(model.weight, value)
            total = torch.full((), value, dtype=torch.float64, device=device)  # torch.tensor would wait for a copy
            return StepResult(
                step=step,
                loss=total,
                grad_norm=total,
                local_losses=total[None],
                squared_norms=total[None],
                sample_ids=(step,),
            )

        guard.update(result(1, 1.0))
        guard.check()
        good = model.weight.detach().clone()
        bad = result(2, torch.nan)
        torch.cuda.set_sync_debug_mode("error")  # the host must not wait to learn whether the step was finite
        guard.update(bad)
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(model.weight, good)
        held = optimizer.state[model.weight]
        assert held["step"].item() == 1 and torch.isfinite(held["exp_avg"]).all()
        with pytest.raises(NonFiniteError, match="step 2"):
            guard.update(result(3, 1.0))  # the host looks before the next update
        assert torch.equal(model.weight, good)
        assert (folder / "incidents" / "step-2.json").exists()


def documents_are_attended_by_their_ends(folder: Path) -> None:
    """Outputs and gradients in bfloat16 beside those of a mask of all pairs in float32."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ((512,), (1, 70, 129, 312))])
    batch = Batch(positions, positions, positions, (0, 1)).with_ends(512).to(gpu_runs.DEVICE)
    assert batch.ends_BM is not None
    shapes = [(2, heads, 512, 64) for heads in (8, 2, 2, 8)]
    exact = [torch.randn(shape, device=gpu_runs.DEVICE).bfloat16().float() for shape in shapes]

    def found(dtype: torch.dtype, mask: Mask) -> list[torch.Tensor]:
        *inputs, upstream = (x.to(dtype) for x in exact)
        inputs = [x.requires_grad_() for x in inputs]
        output = masked_attention(*inputs, mask)
        return [x.float() for x in (output, *torch.autograd.grad(output, inputs, upstream))]

    want = found(torch.float32, document_mask(batch.positions_BT))
    got = found(torch.bfloat16, document_mask(batch.positions_BT, batch.ends_BM))
    for mine, other in zip(got, want, strict=True):
        assert (mine - other).norm() < 0.02 * other.norm()  # bfloat16 has 8 bits: 0.004


PROGRAMS = {
    program.__name__: program
    for program in (
        one_process_is_a_world,
        batches_come_in_pinned_memory,
        a_bad_update_is_skipped_by_the_device,
        documents_are_attended_by_their_ends,
    )
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_gpu(name, tmp_path):
    gpu_runs.run_program(__file__, name, str(tmp_path))


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]))
