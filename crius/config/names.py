"""Names of settings that people know from other trainers, short forms, and guesses for misspelt names."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cyclopts import ArgumentCollection, CoercionError, CycloptsError
from cyclopts.exceptions import MissingArgumentError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from crius.errors import ConfigError, CriusError


class WrongSettings(ConfigError):
    """Keys or values of a run are wrong.

    Attributes:
        problems: one error for each wrong key or value.
        arguments: arguments of the command line.
    """

    def __init__(self, problems: list[CriusError], arguments: ArgumentCollection) -> None:
        one = ConfigError.together(problems)
        super().__init__(one.what, where=one.where, why=one.why, fix=one.fix)
        self.problems, self.arguments = problems, arguments

    def __str__(self) -> str:
        return str(ConfigError.together(self.problems))


def explain(
    error: CycloptsError | WrongSettings, argv: Sequence[str] = (), parse: Callable[[list[str]], Any] | None = None
) -> CriusError:
    """All errors of a command line, as one error.

    Args:
        error: the error that stopped the parsing of ``argv``.
        argv: from ``normalized_argv``; empty if the error is not about the command line itself.
        parse: reads a command line; raises an error such as ``error``.
    """
    return ConfigError.together(list(_mistakes(error, argv, parse)))


def _mistakes(
    error: CycloptsError | WrongSettings, argv: Sequence[str], parse: Callable[[list[str]], Any] | None
) -> Iterator[CriusError]:
    if isinstance(error, UnusedCliTokensError):
        unused = " ".join(error.unused_tokens or ())
        fix = "repeat a flag for each of its values: --flag A --flag B"
        yield ConfigError(f"{unused} does not belong to a flag.", where="command line", fix=fix)
    elif isinstance(error, WrongSettings):
        yield from _unknown_flags(error.arguments, argv, argv)
        yield from error.problems
    elif isinstance(error, UnknownOptionError):
        yield from _unknown_flags(error.argument_collection, [error.token.keyword or error.token.value, *argv], argv)
    else:
        yield conversion(error, error.command_chain or ())
    if parse and isinstance(error, MissingArgumentError) and error.keyword and error.keyword in argv:
        rest = list(argv)  # cyclopts stops at the first error
        rest.remove(error.keyword)
        try:
            parse(rest)
        except (CycloptsError, WrongSettings) as another:
            yield from _mistakes(another, rest, parse)


def _unknown_flags(arguments: ArgumentCollection, words: Iterable[str], argv: Sequence[str]) -> Iterator[ConfigError]:
    known = {name for argument in arguments if not argument.children for name in (*argument.names, *argument.negatives)}
    short = {} if "--recipe" not in known else SHORT | PLAN_SHORT if "--gpus" in known else SHORT
    names = [*(name.removeprefix("--") for name in known), *short]
    verb = " ".join(itertools.takewhile(lambda token: token.isidentifier(), argv))
    written = (token.partition("=")[0] for token in itertools.takewhile(lambda token: token != "--", words))
    for flag in dict.fromkeys(written):
        if flag.startswith("-") and not _is_number(flag) and flag not in known:
            yield unknown("flag", flag, names, "command line", verb)


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def conversion(error: CycloptsError, commands: Iterable[str]) -> ConfigError:
    """A value of the wrong kind, as one clear sentence; a guess of cyclopts is left out if it is not a typo."""
    error.verbose = False
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    guess = re.search(r' Did you mean "(.*?)"\?', text)
    value = error.token.value if isinstance(error, CoercionError) and error.token else ""
    if isinstance(error, UnknownCommandError):
        value = (error.unused_tokens or [""])[0]
    if guess and not nearest_typo(value, [guess[1]]):
        text = text.replace(guess[0], "")
    return ConfigError(text, fix=f"see {' '.join(['crius', *commands])} --help all for the possible values")


def unknown(kind: str, written: str, known: Iterable[str], where: str, verb: str = "train") -> ConfigError:
    """Error about an unknown flag (``--a.b``) or TOML key (``a.b``), with Crius's name for it, if there is one."""
    dashes = "--" if kind == "flag" else ""
    shown = written if written.isprintable() else ascii(written)
    instead, why = meant(written.removeprefix("--").replace("-", "_"), known)
    if instead:
        hint = f"{dashes}{instead}"
        return ConfigError(f"unknown {kind} {shown}, did you mean {hint}?", where=where, fix=f"write {hint}")
    if why:
        return ConfigError(f"unknown {kind} {shown}: Crius lacks it.", where=where, why=why, fix="leave it out")
    what = f"unknown {kind} {shown}: there is no such setting."
    return ConfigError(what, where=where, fix=f"crius {verb} --help all lists every flag")


# torchtitan's names of flags that Crius spells otherwise; accepted wherever a flag or a TOML key is.
ALIASES = {
    "job.dump_folder": "job.run_dir",
    "metrics.log_freq": "metrics.log_interval",
    "parallelism.fsdp_reshard_after_forward": "parallelism.reshard_after_forward_mode",
    "profiling.enable_profiling": "profiler.enable",
    "profiling.enable_memory_snapshot": "profiler.memory_snapshot",
    "profiling.profile_freq": "profiler.interval",
    "quantize.dense.float8.exclude": "quantize.dense.exclude",
    "quantize.dense.float8.pad_inner_dim": "quantize.dense.pad_inner_dim",
    "quantize.dense.float8.recipe_name": "quantize.dense.float8.recipe",
    "quantize.dense.mxfp8.exclude": "quantize.dense.exclude",
    "quantize.dense.float8.precompute_float8_dynamic_scale_for_fsdp": "quantize.dense.float8.precompute_scale",
    "reproducible": "training.reproducible",
    "checkpoint.async_mode": "checkpoint.mode",
    "checkpoint.keep_latest_k": "checkpoint.keep_last",
    "checkpoint.initial_load_path": "checkpoint.load_path",
    "training.dataset_path": "data.path",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "validation.freq": "validation.interval",
}

# Short names of flags, for the verbs that take the settings of a run.
SHORT = {
    "lr": "optimizer.lr",
    "steps": "training.steps",
    "batch": "training.global_batch_size",
    "seq_len": "training.seq_len",
}

# More short names of flags, for crius plan.
PLAN_SHORT = {
    "model": "model.name",
    "flavor": "model.flavor",
    "seq_len": "training.seq_len",
    "global_batch_size": "training.global_batch_size",
    "local_batch_size": "training.local_batch_size",
}

# Names of torchtitan and Hugging Face for which Crius has a setting of another name: only suggested, never applied, as
# the values may differ. A name without a section stands for any section.
MOVED = {
    "activation_checkpoint.selective_ac_option": "activation_checkpoint.selective_option",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "comm.init_timeout_seconds": "comm.timeout_seconds",
    "comm.train_timeout_seconds": "comm.timeout_seconds",
    "context_parallel_rotate_method": "parallelism.context_parallel_method",
    "context_parallel_size": "parallelism.context_parallel_degree",
    "data_parallel_size": "parallelism.data_parallel_shard_degree",
    "debug.deterministic_warn_only": "debug.deterministic",
    "float8.emulate": "quantize.dense.float8.emulate",
    "float8.enable": "quantize.dense.float8.enable",
    "float8.enable_float8_linear": "quantize.dense.float8.enable",
    "float8.enable_fsdp_float8_all_gather": "quantize.dense.float8.enable_fsdp_float8_all_gather",
    "float8.filter_fqns": "quantize.dense.exclude",
    "float8.precompute_float8_dynamic_scale_for_fsdp": "quantize.dense.float8.precompute_scale",
    "float8.recipe_name": "quantize.dense.float8.recipe",
    "flavour": "model.flavor",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "model.attn_mask_type": "model.attention_mask",
    "model.converters": "quantize.dense.float8.enable",
    "model.n_kv_heads": "model.num_kv_heads",
    "model.n_layers": "model.num_layers",
    "model.tokenizer_path": "tokenizer.path",
    "mx.enable": "quantize.dense.mxfp8.enable",
    "mx.filter_fqns": "quantize.dense.exclude",
    "mx.recipe_name": "quantize.dense.mxfp8.enable",
    "optimizer.fused": "optimizer.implementation",
    "parallelism.module_fqns_per_model_part": "parallelism.pipeline_parallel_module_names_per_stage",
    "parallelism.pipeline_parallel_layers_per_stage": "parallelism.pipeline_parallel_stages_per_rank",
    "parallelism.pipeline_parallel_microbatch_size": "training.local_batch_size",
    "parallelism.pipeline_parallel_split_points": "parallelism.pipeline_parallel_module_names_per_stage",
    "pipeline_parallel_size": "parallelism.pipeline_parallel_degree",
    "profiling.profiler_active": "profiler.num_steps",
    "tensor_parallel_size": "parallelism.tensor_parallel_degree",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.dataset": "data.source",
    "training.gc_freq": "training.gc_interval",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.lr": "optimizer.lr",
    "validation.dataset": "validation.path",
    "validation.dataset_path": "validation.path",
    "validation.enable": "validation.interval",
    "validation.enabled": "validation.interval",
    "validation.steps": "validation.num_samples",
    # experts: torchtitan's, Megatron's and Hugging Face's
    **dict.fromkeys(("expert_model_parallel_size", "expert_parallel_size", "ep"), "parallelism.expert_parallel_degree"),
    **dict.fromkeys(("load_balance_coeff", "moe_router_bias_update_rate"), "moe.bias_update_rate"),
    **dict.fromkeys(
        ("moe_aux_loss_coeff", "router_aux_loss_coef", "aux_loss_coeff", "aux_loss_coef", "aux_loss_alpha"),
        "moe.aux_loss_coefficient",
    ),
    **dict.fromkeys(("moe_ffn_hidden_size", "moe_inter_dim", "moe_intermediate_size"), "model.expert_ffn_dim"),
    **dict.fromkeys(("moe_router_topk", "num_experts_per_tok", "top_k", "moe_top_k"), "model.top_k"),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), "model.num_experts"),
    "moe_router_load_balancing_type": "moe.aux_loss",
    **dict.fromkeys(("moe_z_loss_coeff", "router_z_loss_coef", "z_loss", "z_loss_coeff"), "moe.z_loss_coefficient"),
    # Hugging Face's TrainingArguments
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "bf16": "training.mixed_precision_param bfloat16",
    "ddp_timeout": "comm.timeout_seconds",
    "epochs": "training.epochs",
    "eval_strategy": "validation.interval",
    "eval_steps": "validation.interval",
    "fsdp": "parallelism.data_parallel_shard_degree",
    "full_determinism": "debug.deterministic",
    "gradient_checkpointing": "activation_checkpoint.mode full",
    "learning_rate": "optimizer.lr",
    "logging_steps": "metrics.log_interval",
    "logging_strategy": "metrics.log_interval",
    "lr_scheduler_type": "lr_scheduler.decay_type",
    "max_grad_norm": "training.max_norm",
    "max_seq_len": "training.seq_len",
    "max_seq_length": "training.seq_len",
    "max_steps": "training.steps",
    "model_max_length": "training.seq_len",
    "head_dim": "model.head_dim",
    "hidden_size": "model.dim",
    "intermediate_size": "model.ffn_dim",
    "n_heads": "model.num_heads",
    "num_attention_heads": "model.num_heads",
    "num_epochs": "training.epochs",
    "num_hidden_layers": "model.num_layers",
    "num_key_value_heads": "model.num_kv_heads",
    "num_train_epochs": "training.epochs",
    "optim": "optimizer.name",
    "output_dir": "job.run_dir",
    "report_to": "metrics.enable_wandb",
    "per_device_train_batch_size": "training.local_batch_size",
    "rms_norm_eps": "model.norm_eps",
    "rope_theta": "model.rope_theta",
    "resume_from_checkpoint": "checkpoint.load_path",
    "run_name": "job.name",
    "save_steps": "checkpoint.interval",
    "save_strategy": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_last",
    "tie_word_embeddings": "model.tied_embeddings",
    "torch_compile": "compile.enable",
    "warmup_steps": "lr_scheduler.warmup_steps",
}

_ACCUMULATION = (
    "training.global_batch_size / (training.local_batch_size x data-parallel ranks) microbatches are added up"
)
_EXPORT = "a run saves whole checkpoints in Crius's own format; crius export writes a folder of Hugging Face"
_INITIAL = "checkpoint.init_from names what weights start from: a run, a checkpoint or a folder of Hugging Face"
_MODULES = "settings are data: --import MODULE on the command line names a module with a model"
_MODEL = "the model decides it"
_LOSS = "the output layer is split under tensor parallelism, and so is the loss"
_VALIDATION = "validation takes the sequences and the microbatches of training"

# Names of torchtitan and Hugging Face without a counterpart in Crius, and the reason; ``section.*`` is a whole section.
NOTHING = {
    "activation_checkpoint.early_stop": "torch's default is taken",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": "activation_checkpoint.save_ops names ops",
    "checkpoint.create_seed_checkpoint": "weights start the same on every layout, without a checkpoint",
    "checkpoint.enable_first_step_checkpoint": "the interval decides which steps are saved",
    "checkpoint.exclude_from_loading": "a checkpoint is loaded whole",
    "checkpoint.initial_load_in_hf": _INITIAL,
    "checkpoint.initial_load_model_only": _INITIAL,
    **dict.fromkeys(("checkpoint.export_dtype", "checkpoint.last_save_in_hf"), _EXPORT),
    **dict.fromkeys(("checkpoint.last_save_model_only", "checkpoint.model_weights_only"), _EXPORT),
    "comm.trace_buf_size": "the watchdog reports where each rank hangs",
    "compile.components": "the blocks are compiled; compile.loss adds the loss",
    "dataloader_num_workers": "one thread reads ahead, by data.prefetch batches",
    "fault_tolerance.*": "launch.max_restarts restarts all ranks from the newest checkpoint; none continues alone",
    "fp16": "float16 needs a loss scale, which Crius lacks; bfloat16 needs none",
    "gradient_accumulation_steps": _ACCUMULATION,
    "import": "a configuration runs no code: --import MODULE on the command line, or CRIUS_IMPORT, names a module",
    "job.config_file": "the file is given as --config FILE",
    **dict.fromkeys(("job.custom_config_module", "experimental.*"), _MODULES),
    "job.description": "job.name names a run",
    "job.print_args": "crius config show prints all settings",
    "memory_estimation.enabled": "crius train --dry_run shows the memory of a rank",
    "metrics.disable_color_printing": "nothing is printed in colours",
    "metrics.save_for_all_ranks": "rank 0 writes the metrics, which are sums over all ranks",
    **dict.fromkeys(("lora.use_dora", "lora.dora", "use_dora"), "DoRA is not built; LoRA and rsLoRA are (lora.rslora)"),
    **dict.fromkeys(
        ("lora.dropout", "lora_dropout"), "adapters have no dropout: its numbers would depend on the layout"
    ),
    **dict.fromkeys(("dpo.beta", "training.dpo", "dpo.enable"), "DPO is not built"),
    **dict.fromkeys(("decoder_sparse_step", "norm_topk_prob", "route_norm", "score_func", "norm_type"), _MODEL),
    **dict.fromkeys(("capacity_factor", "moe_expert_capacity_factor"), "no token is dropped, and nothing is padded"),
    "metrics.save_tb_folder": "TensorBoard's files are in the run folder",
    "model.hf_assets_path": "tokenizer.path names a tokenizer, checkpoint.init_from names weights",
    "model.print_after_conversion": "the log says which layers are converted",
    "model.use_flex_attn": "model.attention_mask and kernels.attention choose among the kernels",
    "optimizer.early_step_in_backward": "gradients are clipped by their global norm, which is known after the backward",
    **dict.fromkeys(("parallelism.disable_loss_parallel", "training.enable_loss_parallel"), _LOSS),
    "parallelism.enable_compiled_autograd": "the blocks are compiled, not the backward as a whole",
    "parallelism.expert_tensor_parallel_degree": "tensor parallelism splits the layers around the experts only",
    "profiling.save_traces_folder": "traces are in the run folder",
    "push_to_hub": "nothing is uploaded",
    "quantize.grouped_mm.*": "experts are computed in training.mixed_precision_param: float8 and MXFP8 are for linears",
    "tf32": "float32 is computed in full; training.mixed_precision_param bfloat16 is the fast way",
    "training.gc_debug": "training.gc_interval sets how often garbage is collected",
    **dict.fromkeys(("validation.local_batch_size", "validation.seq_len", "per_device_eval_batch_size"), _VALIDATION),
    "warmup_ratio": "lr_scheduler.warmup_steps is a number of steps",
}


_NO_TYPOS = {"float16"}
"""Names that are near to a setting's but mean something else."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``, did you mean X?`` if ``name`` is a typo of the known name X; else empty."""
    near = nearest_typo(name, known)
    return f", did you mean {near}?" if near else ""


def nearest_typo(name: str, known: Iterable[str]) -> str:
    """The known name that differs from ``name`` by its case or by at most two typed characters; empty if there is none.

    Short last parts of a name may differ by less: those of up to seven characters by one, of up to two by none. If the
    last part is right, the sections may differ by two characters; sections of up to four characters by one. A number in
    front is a size, and another size is not a typo: ``80b`` is not ``70b``.
    """
    words = {word.lower(): word for word in known}
    written = name.lower()
    if written in words:
        return words[written]
    if written in _NO_TYPOS:
        return ""
    section, _, leaf = written.rpartition(".")
    of_leaf = 0 if len(leaf) <= 2 else 1 if len(leaf) <= 7 else 2
    of_section = 1 if len(section) <= 4 else 2
    size = _leading_number(written)
    near = []
    for lower, word in words.items():
        limit = of_section if section and lower.rpartition(".")[2] == leaf else of_leaf
        if abs(len(lower) - len(written)) <= limit and _leading_number(lower) == size:
            distance = _edits(written, lower)
            near += [(distance, word)] if distance <= limit else []
    return min(near)[1] if near else ""


def _leading_number(word: str) -> str:
    return word[: len(word) - len(word.lstrip("0123456789"))]


def _edits(a: str, b: str) -> int:
    """Number of insertions, deletions, replacements and swaps of neighbours that turn ``a`` into ``b``."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        oldest, before, row = before, row, [i]
        for j, other in enumerate(b, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                row[j] = min(row[j], oldest[j - 2] + 1)
    return row[-1]


def meant(name: str, known: Iterable[str]) -> tuple[str, str]:
    """The setting that an unknown name stands for.

    Args:
        name: dotted, with underscores.
        known: dotted names of all settings.

    Returns:
        The setting to write instead, with a value if that matters; and why there is no such setting. At least one of
            the two is empty.
    """
    name = name.removeprefix("quantize.linear.")  # torchtitan's newer name for its float8 and mx
    names, (section, _, leaf) = list(known), name.rpartition(".")
    sections = (f"{outer}.*" for outer in itertools.accumulate(section.split("."), "{}.{}".format))
    for key in (name, leaf, *sections):
        if key in MOVED:
            return MOVED[key], ""
        if key in NOTHING:
            return "", NOTHING[key]
    if near := nearest_typo(name, names):
        return near, ""
    if "." not in name:
        homes = [other for other in names if other.count(".") == 1 and other.endswith(f".{name}")]
        return (homes[0] if len(homes) == 1 else ""), ""
    return (section if section in names else ""), ""
