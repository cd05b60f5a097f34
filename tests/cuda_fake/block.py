"""What one block of the 8B model does on a GPU of capability 9.0 that does not exist: ``python -m cuda_fake.block``.

Crius's block is that of a real run, after its parallelism, its precision and torch.compile; the other one is that of
torchtitan itself. Both get one sequence, once forward and once backward, in bfloat16 with weights in
bfloat16, so that no weight is cast. Called by ``benchmarks/gpu/blocks.py``.
"""

import ctypes
import json
import os
import sys
import tempfile
from collections import Counter

TOKENS = 8192
FLAGS = (
    f"--model.flavor 8b --model.num_layers 1 --model.vocab_size 16032 --training.seq_len {TOKENS} "
    "--training.global_batch_size 1 --training.dtype bfloat16"
).split()
MATMULS = ("aten::mm", "aten::_scaled_mm", "aten::addmm", "aten::bmm")
# they start no kernel: memory that is only reserved, and what is asked of a tensor
IDLE = (
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::detach",
    "aten::_has_compat",
)


def main(library: str, request: str) -> None:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # before torch, which asks for hooks once
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    from cuda_fake import device

    device.stand_in(library)
    asked = json.loads(request)
    from cuda_fake import inductor, steps

    if asked["compiles"]:
        inductor.stand_in()
    steps.preload()
    found = _of_titan(asked) if asked["is_titan"] else _of_crius(asked, steps)
    print(json.dumps(found), file=answers, flush=True)


def _of_crius(asked: dict, steps) -> dict:
    """The block of the second step of a run, once more by itself."""
    assemble, found = steps.job.assemble, {}

    def assembled(*arguments):
        loop = assemble(*arguments)
        [block] = loop.state.parts[0].layers.values()
        inputs = []
        hook = block.register_forward_pre_hook(lambda module, args: inputs.append(args))

        def after_step(step: int, done: int) -> None:
            if step == steps.STEADY:
                hook.remove()
                found.update(_measured(block, inputs[-1]))

        loop.after_step.append(after_step)
        return loop

    steps.job.assemble = assembled
    with tempfile.TemporaryDirectory() as folder:
        steps.run([*FLAGS, *asked["flags"]], 0, folder)
    return found


def _of_titan(asked: dict) -> dict:
    """A block of torchtitan itself, after its own conversion, recomputation and compilation."""
    import torch
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3 import Transformer
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama
    from torchtitan.protocols.model_converter import build_model_converters

    from benchmarks.gpu.titan import model_args
    from crius.models.registry import SPECS
    from crius.parallel.runtime import fake_world
    from cuda_fake.device import CUDA, FakeMode

    facts = SPECS["llama3"].describe("8b", num_layers=1, vocab_size=16032).config
    job = JobConfig()
    job.training.seq_len = TOKENS
    job.compile.enable = asked["compiles"]
    job.activation_checkpoint.mode = "selective" if asked["options"].get("recompute") else "none"
    job.activation_checkpoint.selective_ac_option = "op"
    if asked["options"].get("float8"):
        job.model.converters = ["quantize.linear.float8"]
        job.quantize.linear.float8.filter_fqns = ["output"]
    torch.set_default_dtype(torch.bfloat16)
    with fake_world(0, 1), FakeMode():
        ranks = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
        with torch.device(CUDA):
            model = Transformer(model_args(facts, TOKENS))
            x = torch.empty(1, TOKENS, facts.dim, requires_grad=True)
        build_model_converters(job, ranks).convert(model)
        parallelize_llama(model, ranks, job)
        [block] = model.layers.values()
        inputs = (x, model.freqs_cis, None)
        block(*inputs).sum().backward()  # compiles
        return _measured(block, inputs)


def _measured(block, inputs: tuple) -> dict:
    """Kernels of both directions as matmuls, attention and others; bytes kept; what the host reads and copies."""
    import torch
    from torch import Tensor
    from torch.utils._pytree import tree_map

    from cuda_fake import inductor

    watch = _block_watch()
    inductor._Kernel.run = lambda self, *args, **options: watch.kernels.update(["other"])
    inputs = tree_map(
        lambda each: (
            each.detach().requires_grad_(each.is_floating_point() and each.ndim == 3 and each.shape[1] > 1)
            if isinstance(each, Tensor)
            else each
        ),
        inputs,
    )
    for parameter in block.parameters():
        parameter.grad = None
    with watch:
        watch.begin([*inputs, *block.parameters(), *block.buffers()])
        output = block(*inputs)
        forward, kept = dict(watch.kernels), watch.kept()
        watch.kernels.clear()
        output.backward(torch.empty_like(output))
    return {
        "forward": forward,
        "backward": dict(watch.kernels),
        "kept": kept,
        "reads": len(watch.steps[-1].reads),
        "copies": len(watch.steps[-1].copies),
    }


def _block_watch():
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._pytree import tree_iter

    from cuda_fake.watch import Watch, _is_on_gpu

    class Storages:
        """Those that were born on the GPU, by what keeps no memory of them."""

        def __init__(self) -> None:
            self.born: dict = {}

        def segment(self, name: str) -> None:
            pass

        def see(self, tensor) -> None:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            self.born.setdefault(reference.cdata, (reference, storage.nbytes()))

    class BlockWatch(Watch):
        """Counts what starts a kernel, beside what ``Watch`` notes."""

        def __init__(self) -> None:
            self.storages = Storages()
            super().__init__(self.storages, lambda *operator: None)
            self.kernels: Counter[str] = Counter()

        def begin(self, there) -> None:
            """What is born from now on is kept, but for views of what is ``there``."""
            locals_ = (getattr(each, "_local_tensor", each) for each in there if isinstance(each, torch.Tensor))
            self.there = {StorageWeakRef(each.untyped_storage()).cdata for each in locals_}
            self.storages.born.clear()
            self.kernels.clear()

        def kept(self) -> int:
            """Bytes that were born since ``begin`` and are alive."""
            born = {key: value for key, value in self.storages.born.items() if key not in self.there}
            return sum(size for reference, size in born.values() if not reference.expired())

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if result is NotImplemented:
                return result
            name = func._schema.name
            is_work = name.startswith(("aten::", "torch_attn::")) and name not in IDLE and not func.is_view
            if is_work and any(_is_on_gpu(item) for item in tree_iter(result)):
                is_attention = "attention" in name or "_varlen_attn" in name
                self.kernels["matmul" if name in MATMULS else "attention" if is_attention else "other"] += 1
            return result

    return BlockWatch()


if __name__ == "__main__":
    main(*sys.argv[1:])
