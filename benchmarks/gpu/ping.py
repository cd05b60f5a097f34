"""Collectives between ranks, each with a known answer: ``torchrun ... -m benchmarks.gpu.ping nccl|gloo cuda|cpu``.

One line a rank; the exit code is 1 if an answer is wrong. Pipelines send and receive, which Gloo does with host memory
only, so it is not asked on a GPU.
"""

import os
import sys

import torch
import torch.distributed as dist


def answers(where: str, sends: bool) -> dict[str, bool]:
    """Whether each collective of this rank has the right result."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    found = {}
    x = torch.full((1 << 20,), float(rank + 1), device=where)
    dist.all_reduce(x)
    found["all-reduce"] = bool((x == size * (size + 1) / 2).all())
    gathered = torch.empty(size << 10, device=where)
    dist.all_gather_into_tensor(gathered, torch.full((1 << 10,), float(rank), device=where))
    found["all-gather"] = gathered.view(size, -1)[:, 0].tolist() == [float(other) for other in range(size)]
    scattered = torch.empty(1 << 10, device=where)
    dist.reduce_scatter_tensor(scattered, torch.ones(size << 10, device=where))
    found["reduce-scatter"] = bool((scattered == size).all())
    exchanged = torch.empty(size, device=where)
    dist.all_to_all_single(exchanged, torch.full((size,), float(rank), device=where))
    found["all-to-all"] = exchanged.tolist() == [float(other) for other in range(size)]
    if sends:
        mine = torch.full((1 << 16,), float(rank), device=where)
        theirs = torch.empty(1 << 16, device=where)
        operations = [
            dist.P2POp(dist.isend, mine, (rank + 1) % size),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        found["send and receive"] = bool((theirs == (rank - 1) % size).all())
    return found


def main(backend: str, where: str) -> int:
    """Meet, ask, and print the answers."""
    is_nccl = backend == "nccl"
    if where == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        f"{where}:{backend}" if where == "cuda" else backend,
        device_id=torch.device("cuda", 0) if is_nccl else None,
    )
    found = answers(where, sends=is_nccl or where == "cpu")
    if where == "cuda":
        torch.cuda.synchronize()
    wrong = [name for name, ok in found.items() if not ok]
    print(f"rank {dist.get_rank()} of {os.environ['WORLD_SIZE']}: wrong: {', '.join(wrong) or 'none'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
