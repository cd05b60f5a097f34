"""torchtitan itself, its own ``Trainer`` of the wheel 0.2.2, as a contestant beside Crius on one device.

    python -m benchmarks.gpu.titan [--mode fsdp|amp] [--recompute] [--float8 RECIPE] -- FLAGS OF CRIUS TRAIN

``amp`` is what torchtitan does on one GPU: autocast over float32 weights, no FSDP. ``fsdp`` is what it does on several:
its ``apply_fsdp``, here over a mesh of one device. Weights, tokens and optimizer are those of the flags.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.contestant import Turns
from benchmarks.gpu import contestants
from benchmarks.parts import batches
from crius.config.run import RunConfig
from crius.models.llama3 import Llama3Config
from crius.parallel.runtime import pick_device
from crius.train.inputs import describe_model, run_batch_sizes

NAME = "peer"


def options_of(argv: list[str]) -> tuple[argparse.Namespace, RunConfig]:
    """Options of this program, and the run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.titan")
    parser.add_argument("--mode", choices=("fsdp", "amp"), default="fsdp")
    parser.add_argument("--recompute", action="store_true", help="its selective recomputation, as it ships")
    parser.add_argument("--float8", default="", help="recipe of torchao")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    return contestants.options_of(parser, argv)


def set_up_environment() -> None:
    """The variables of a launcher that started one process; its ``run_train.sh`` sets the allocator alike."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if not torch.cuda.is_available():  # its device would be cuda on a build for CUDA, whatever there is
        torch._utils._get_available_device_type = lambda: "cpu"


def in_neighbours(weights: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Weights of Crius's Llama 3, where the halves of a head are rotated together, for a rotation of neighbours."""
    moved = dict(weights)
    for name, weight in weights.items():
        if name.endswith((".wq.weight", ".wk.weight")):
            heads = weight.unflatten(0, (-1, 2, head_dim // 2))
            moved[name] = heads.transpose(1, 2).reshape(weight.shape)
    return moved


def model_args(facts: Llama3Config, seq_len: int) -> Any:
    """torchtitan's sizes of the model ``facts``."""
    from torchtitan.models.llama3 import TransformerModelArgs  # noqa: PLC0415

    made = TransformerModelArgs(
        dim=facts.dim,
        n_layers=facts.num_layers,
        n_heads=facts.num_heads,
        n_kv_heads=facts.num_kv_heads,
        vocab_size=facts.vocab_size,
        norm_eps=facts.norm_eps,
        rope_theta=facts.rope_theta,
        max_seq_len=seq_len,
        multiple_of=1,
    )
    # its feed-forward is int(multiplier * int(2/3 * 4 * dim)) wide
    base = int(2 * 4 * facts.dim / 3)
    made.ffn_dim_multiplier = (facts.ffn_dim + 0.5) / base
    rope = made.rope_scaling_args
    if facts.rope_scaling is None:
        rope.scaling_factor = 1.0
    else:
        rope.scaling_factor = facts.rope_scaling.factor
        rope.low_freq_factor = facts.rope_scaling.low_freq_factor
        rope.high_freq_factor = facts.rope_scaling.high_freq_factor
        rope.original_max_position_embeddings = facts.rope_scaling.original_context
    return made


def job_of(options: argparse.Namespace, config: RunConfig, folder: str) -> Any:
    """torchtitan's settings of the run."""
    from torchtitan.config import JobConfig  # noqa: PLC0415

    job = JobConfig()
    job.job.dump_folder = folder
    job.model.name = NAME
    job.model.flavor = NAME
    sequences = run_batch_sizes(config, 1).total
    job.training.local_batch_size = sequences
    job.training.global_batch_size = sequences
    job.training.seq_len = config.training.seq_len
    job.training.steps = 10**6
    job.training.max_norm = config.training.max_norm
    job.training.mixed_precision_param = config.training.mixed_precision_param
    for field in ("lr", "beta1", "beta2", "eps", "weight_decay"):
        setattr(job.optimizer, field, getattr(config.optimizer, field))
    job.optimizer.implementation = "fused"
    job.lr_scheduler.warmup_steps = 0
    job.lr_scheduler.decay_ratio = 0.0
    job.metrics.log_freq = config.metrics.log_interval
    job.activation_checkpoint.mode = "selective" if options.recompute else "none"
    job.activation_checkpoint.selective_ac_option = "op"  # as in its recipes of Llama 3
    job.compile.enable = not options.eager
    job.compile.components = ["model", "loss"]
    if options.float8:
        job.model.converters = ["quantize.linear.float8"]
        float8 = job.quantize.linear.float8
        float8.recipe_name = None if options.float8 == "tensorwise" else options.float8
        float8.filter_fqns = ["output"]
        float8.emulate = not torch.cuda.is_available()
    return job


class Loader:
    """Crius's batches as torchtitan's loader yields them: on the host, not pinned."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for batch in batches(self._config, 10**6, prefetch=self._config.data.prefetch):
            yield {"input": batch.tokens_BT}, batch.labels_BT

    def state_dict(self) -> dict[str, Any]:
        """Nothing is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is loaded."""


class Tokenizer:
    """What its model asks of a tokenizer."""

    eos_id = 0
    bos_id = 0


def register(options: argparse.Namespace, config: RunConfig, device: torch.device) -> None:
    """Register the model of ``config`` with torchtitan, with its own parallelization and Crius's batches."""
    from torchtitan.models.llama3.infra import parallelize as theirs  # noqa: PLC0415
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec  # noqa: PLC0415

    facts = describe_model(config).config
    assert isinstance(facts, Llama3Config)

    def parallelize(model: Any, parallel_dims: Any, job: Any) -> Any:
        model = theirs.parallelize_llama(model, parallel_dims, job)
        if options.mode == "fsdp":
            param_dtype = getattr(torch, config.training.mixed_precision_param)
            mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",))
            theirs.apply_fsdp(model, mesh, param_dtype=param_dtype, reduce_dtype=torch.float32, pp_enabled=False)
        return model

    spec = dataclasses.replace(
        get_train_spec("llama3"),
        model_args={NAME: model_args(facts, config.training.seq_len)},
        parallelize_fn=parallelize,
        build_dataloader_fn=lambda **_: Loader(config),
        build_tokenizer_fn=lambda _: Tokenizer(),
        state_dict_adapter=None,
    )
    register_train_spec(NAME, spec)


def adapt(options: argparse.Namespace, config: RunConfig, device: torch.device) -> None:
    """Lift what torchtitan assumes: autocast without its own FSDP, and a GPU whose memory it can ask for."""
    import torchtitan.components.metrics as metrics  # noqa: PLC0415
    import torchtitan.distributed.utils as utils  # noqa: PLC0415

    if options.mode == "fsdp" or config.training.mixed_precision_param == "float32":
        utils.maybe_enable_amp = lambda *_: contextlib.nullcontext()
    if device.type == "cpu":
        nothing = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        class NoMonitor:
            device_name = "H100"

            def get_peak_stats(self) -> Any:
                return nothing

            def reset_peak_stats(self) -> None:
                pass

        metrics.build_device_memory_monitor = NoMonitor


class Log:
    """Stands for torchtitan's logger: its losses, and the tokens per second that it prints itself.

    A rate counts only if all of its steps are of one turn, as it includes the wait for the turn otherwise.
    """

    def __init__(self, channel: contestants.PeakChannel, turns: Turns, interval: int) -> None:
        self._channel = channel
        self._turns = turns
        self._interval = interval

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See torchtitan's ``BaseLogger``; called before it resets the peak of memory."""
        self._channel.see_peak()
        self._turns.losses.append((step, float(metrics["loss_metrics/global_avg_loss"])))
        if step - self._interval >= self._turns.began:
            self._channel.words["printed_tokens_per_second"] = float(metrics["throughput(tps)"])

    def close(self) -> None:
        """See torchtitan's ``BaseLogger``."""


def main(argv: list[str]) -> int:
    """Take part."""
    options, config = options_of(argv)
    set_up_environment()
    import torchtitan.train as titan_train  # noqa: PLC0415

    device = pick_device(config.training.device, 0)
    channel = contestants.PeakChannel(device)
    register(options, config, device)
    adapt(options, config, device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = titan_train.Trainer(job_of(options, config, folder))
        model = trainer.model_parts[0]
        wrappers = ("_orig_mod.", "_checkpoint_wrapped_module.")
        targets = {}
        for name, parameter in model.named_parameters():
            for wrapper in wrappers:
                name = name.replace(wrapper, "")
            targets[name] = parameter
        head_dim = describe_model(config).config.head_dim
        contestants.copy_weights(in_neighbours(contestants.start_weights(config, device), head_dim), targets)
        turns = contestants.turns_of(config, device, channel, options.warmup)
        trainer.metrics_processor.logger = Log(channel, turns, config.metrics.log_interval)
        iterator = trainer.batch_generator(trainer.dataloader)
        while True:
            trainer.step += 1
            trainer.gc_handler.run(trainer.step)
            trainer.train_step(iterator)
            if not turns.after_step():
                return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
