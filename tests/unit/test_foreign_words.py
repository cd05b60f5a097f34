"""What people type who know other programs: a row for each wrong word, what is printed for it, and the pasted fix.

Rows that one command line can hold share it, because all mistakes are reported together.
"""

import ast
import contextlib
import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest

import crius
from crius.__main__ import main
from crius.cli import add_verbs, app
from crius.config.other_trainers import MOVED, NOTHING, OPTIONS_BY_NAME
from crius.config.run import RunConfig
from crius.config.training import TrainingConfig
from crius.errors import ConfigError

# what is typed: what the fix writes in place of it
FLAGS = {
    # PEFT and TRL
    "--lora_r 8": "--lora.rank 8",
    "--r 16": "--lora.rank 16",
    "--lora-alpha 32": "--lora.alpha 32",
    "--lora_target_modules q_proj v_proj": "--lora.targets attention.wq --lora.targets attention.wv",
    "--target_modules gate_proj,up_proj,down_proj": (
        "--lora.targets feed_forward.w1 --lora.targets feed_forward.w3 --lora.targets feed_forward.w2"
    ),
    "--use_rslora true": "--lora.rslora true",
    "--use_peft": "--lora.rank 16",
    "--load_in_4bit": "--lora.base nf4",
    "--load_in_8bit true": "--lora.base int8",
    "--attn_implementation flash_attention_2": "--kernels.attention flash",
    "--attn_implementation sdpa": "--kernels.attention auto",
    "--attn_implementation eager": "--kernels.attention math",
    "--dataset_name trl-lib/Capybara": "--data.path trl-lib/Capybara",
    "--dataset_config en": "--data.name en",
    "--dataset_train_split train": "--data.split train",
    "--dataset_text_field body": "--data.text_field body",
    "--packing": "--data.packing",
    "--max_length 1024": "--training.seq_len 1024",
    "--eos_token </s>": "--tokenizer.eos_token '</s>'",
    "--use_liger_kernel": "--kernels.linear_cross_entropy chunked",
    "--torch_dtype bfloat16": "--training.mixed_precision_param bfloat16",
    "--dtype float32": "--training.mixed_precision_param float32",
    # transformers.TrainingArguments
    "--output_dir out": "--job.run_dir out",
    "--num_train_epochs 3": "--training.epochs 3",
    "--max_steps 100": "--training.steps 100",
    "--per_device_train_batch_size 4": "--training.local_batch_size 4",
    "--learning_rate 2e-5": "--optimizer.lr 2e-5",
    "--weight_decay 0.01": "--optimizer.weight_decay 0.01",
    "--max_grad_norm 0.3": "--training.max_norm 0.3",
    "--warmup_steps 10": "--lr_scheduler.warmup_steps 10",
    "--lr_scheduler_type cosine": "--lr_scheduler.decay_type cosine",
    "--lr_scheduler_type constant": "--lr_scheduler.decay_ratio 0",
    "--lr_scheduler_type constant_with_warmup": "--lr_scheduler.decay_ratio 0",
    "--lr_scheduler_type cosine_with_restarts": "--lr_scheduler.decay_type cosine",
    "--optim adamw_torch": "--optimizer.name adamw",
    "--optim adamw_torch_fused": "--optimizer.name adamw",
    "--optim adamw_8bit": "--optimizer.state_dtype 8bit",
    "--optim paged_adamw_8bit": "--optimizer.state_dtype 8bit",
    "--bf16": "--training.mixed_precision_param bfloat16",
    "--bf16 true": "--training.mixed_precision_param bfloat16",
    "--bf16 false": "--training.mixed_precision_param float32",
    "--gradient_checkpointing": "--activation_checkpoint.mode full",
    "--gradient_checkpointing false": "--activation_checkpoint.mode none",
    "--logging_steps 1": "--metrics.log_interval 1",
    "--save_steps 500": "--checkpoint.interval 500",
    "--save_strategy no": "--checkpoint.interval 0",
    "--eval_strategy no": "--validation.interval 0",
    "--eval_strategy steps": "--validation.interval 500",
    "--eval_steps 50": "--validation.interval 50",
    "--report_to wandb": "--metrics.enable_wandb true",
    "--report_to tensorboard": "--metrics.enable_tensorboard true",
    "--report_to none": "--metrics.enable_wandb false",
    "--disable_tqdm true": "--metrics.enable_progress_bar false",
    "--seed 7": "--debug.seed 7",
    "--use_cpu": "--training.device cpu",
    "--torch_compile true": "--compile.enable true",
    "--fsdp full_shard": "--parallelism.data_parallel_shard_degree -1",
    "--run_name first": "--job.name first",
    # DeepSpeed
    "--deepspeed ds.json": "--parallelism.data_parallel_shard_degree -1",
    "--train_micro_batch_size_per_gpu 2": "--training.local_batch_size 2",
    "--train_batch_size 32": "--training.global_batch_size 32",
    "--gradient_clipping 1.0": "--training.max_norm 1.0",
    "--num_gpus 2": "--nproc 2",
    "--zero_optimization.stage 2": "--parallelism.data_parallel_shard_degree -1",
    # axolotl
    "--adapter lora": "--lora.rank 16",
    "--adapter qlora": "--lora.base nf4",
    "--sequence_len 4096": "--training.seq_len 4096",
    "--sample_packing true": "--data.packing true",
    "--micro_batch_size 2": "--training.local_batch_size 2",
    "--num_epochs 2": "--training.epochs 2",
    "--val_set_size 0.05": "--validation.fraction 0.05",
    "--wandb_name first": "--job.name first",
    "--flash_attention": "--kernels.attention flash",
    "--excess_length_strategy drop": "--data.too_long drop",
    "--dp_shard_size 2": "--parallelism.data_parallel_shard_degree 2",
    "--tensor_parallel_size 2": "--parallelism.tensor_parallel_degree 2",
    # Megatron
    "--train-iters 100": "--training.steps 100",
    "--clip-grad 1.0": "--training.max_norm 1.0",
    "--lr-decay-style linear": "--lr_scheduler.decay_type linear",
    "--lr-warmup-iters 10": "--lr_scheduler.warmup_steps 10",
    "--num-query-groups 4": "--model.num_kv_heads 4",
    "--untie-embeddings-and-output-weights": "--model.tied_embeddings false",
    "--recompute-granularity selective": "--activation_checkpoint.mode selective",
    "--save-interval 100": "--checkpoint.interval 100",
    "--save out": "--job.run_dir out",
    "--tensor-model-parallel-size 2": "--parallelism.tensor_parallel_degree 2",
    "--context-parallel-size 2": "--parallelism.context_parallel_degree 2",
    "--mock-data": "--data.source stdlib",
    # torchtitan, nanoGPT and habits
    "--model.n_layers 4": "--model.num_layers 4",
    "--float8.enable_fsdp_float8_all_gather": "--quantize.dense.float8.enable_fsdp_float8_all_gather",
    "--n_layer 4": "--model.num_layers 4",
    "--resume runs/a": "--job.run_dir runs/a",
    "--experimental.pipeline_parallel_degree 2": "--parallelism.pipeline_parallel_degree 2",
    "--output out": "--job.run_dir out",
    "--qlora": "--lora.base nf4",
    "--tp 2": "--parallelism.tensor_parallel_degree 2",
    "--mixed_precision bf16": "--training.mixed_precision_param bfloat16",
    "--quantization_config 4bit": "--lora.base nf4",
    "--datasets chats.jsonl": "--data.path chats.jsonl",
    "--gpus 8": "--nproc 8",
    "--nproc_per_node 8": "--nproc 8",
    "-lr 1e-4": "--lr 1e-4",
    "--compile": "--compile.enable",
    "--compile true": "--compile.enable true",
    "--optimizer adamw": "--optimizer.name adamw",
    "--optimizer adamw8bit": "--optimizer.state_dtype 8bit",
    "--lr_scheduler constant": "--lr_scheduler.decay_ratio 0",
    "--model llama3": "--model.name llama3",
    "--lora 8": "--lora.rank 8",
    "--mixed_precision fp8": "--quantize.dense.float8.enable true",
    "--model.layers 2": "--model.num_layers 2",
    "--split 98,2": "--validation.fraction 0.02",
    "--logging.steps 5": "--metrics.log_interval 5",
    "--trainer.max_norm 1": "--training.max_norm 1",
    "--training.sequence_length 64": "--training.seq_len 64",
    # numbers with units
    "--training.gc_interval 1k": "--training.gc_interval 1000",
    "--training.seq_len 2K": "--training.seq_len 2048",
    "--validation.fraction 5%": "--validation.fraction 0.05",
    "--checkpoint.interval_minutes 1h": "--checkpoint.interval_minutes 60",
    "--watchdog.limit_seconds 10min": "--watchdog.limit_seconds 600",
    # words of others for settings of Crius
    "--optimizer.name adamw8bit": "--optimizer.state_dtype 8bit",
    "--optimizer.name adamw_torch_fused": "--optimizer.name adamw",
    "--lr_scheduler.decay_type constant": "--lr_scheduler.decay_ratio 0",
    "--lr_scheduler.decay_type wsd": "--lr_scheduler.decay_ratio 0.2",
    "--training.mixed_precision_param bf16": "--training.mixed_precision_param bfloat16",
    "--activation_checkpoint.mode true": "--activation_checkpoint.mode full",
    "--kernels.attention flash_attention_2": "--kernels.attention flash",
    "--lora.base 4bit": "--lora.base nf4",
}

# what is typed, and is left out: the reason
REASONS = {
    "--gradient_accumulation_steps 4": "global_batch_size / (training.local_batch_size",
    "--fp16": "bfloat16 needs none",
    "--optim adafactor": "adamw and muon are built",
    "--lr_scheduler_type polynomial": "lr_scheduler.decay_ratio 0 is constant",
    "--lora_target_modules all-linear": "all linear layers of the blocks get an adapter",
    "--lora_dropout 0.05": "adapters have no dropout",
    "--bias none": "without biases",
    "--task_type CAUSAL_LM": "a causal language model",
    "--use_dora true": "DoRA is not built",
    "--bnb_4bit_quant_type nf4": "nf4 has scales of its own",
    "--assistant_only_loss true": "data.format chat",
    "--train_on_inputs false": "data.format chat",
    "--neftune_noise_alpha 5": "no noise is added",
    "--trust_remote_code": "no code of a model is run",
    "--push_to_hub": "crius export --push_to",
    "--revision main": "OWNER/NAME@REVISION",
    "--load_best_model_at_end": "checkpoint.keep_every",
    "--do_train": "crius evaluate",
    "--dataset_num_proc 8": "--num_workers N",
    "--warmup_ratio 0.03": "a number of steps",
    "--min-lr 1e-5": "min_lr / learning_rate",
    "--sequence-parallel": "splits the sequence too",
    "--tokenizer-type Llama3Tokenizer": "a tokenizer.json",
    "--num_machines 2": "each crius train joins them",
    "--ddp": "keeps N whole copies",
    "--resume": "continues by itself",
    "--resume_from_checkpoint true": "continues by itself",
    "--report_to mlflow": "metrics.sinks takes others",
    "--wandb_project first": "WANDB_PROJECT",
}

# verb: the verb of the fix
VERBS = {
    "eval": "evaluate",
    "sample": "generate",
    "webui": "chat --web",
    "sft": "tune",
    "finetune": "tune",
    "fine_tune": "tune",
    "qlora": "train --recipe smollm2_lora",
    "pretrain": "train",
    "resume": "train --job.run_dir",
    "recipes": "config show --recipe llama3_debug",
    "list": "models",
    "download": "import",
    "merge": "export",
    "tokenize": "data prepare",
    "data preprocess": "data prepare",
    "data inspect": "data show",
    "data stats": "data doctor",
    "data train-tokenizer": "data tokenizer",
    "checkpoint list": "checkpoint ls",
    "checkpoint delete": "checkpoint prune",
    "config print": "config show",
    "memory": "plan",
    "env": "doctor",
    "logs": "report",
    "dpo": "tune",
    "serve": "chat --web",
    "login": "doctor",
    "llama-cli": "generate",
    "quantize": "export",
    "trian": "train",
    "Train": "train",
    "genrate": "generate",
    "finetune_lora": "tune",
    "hyperparameter_search": "sweep",
    "train.py": "train",
    "accelerate launch train.py": "train",
    "run": "chat",
    "axolotl train": "train",
    "trl sft": "tune",
    "delete": "checkpoint prune",
    "dpo_trainer": "tune",
    "diff": "compare",
    "--steps 5 train": "train --steps 5",
}

STRAY = {
    "training.steps=10": "--training.steps=10",
    "optimizer.lr=1e-3": "--optimizer.lr=1e-3",
    "steps=10": "--steps=10",
    "lora_r=8": "--lora_r=8",
    "chats.jsonl": "--data.source jsonl --data.path chats.jsonl",
    "book.txt": "--data.source text --data.path book.txt",
    "a.toml": "--config a.toml",
    "axolotl.yaml": "--config axolotl.yaml",
    "train_gpt2.py": "--config train_gpt2.py",
}

# a command with a word that has no flag, foreign options or swapped paths: its fix
WORDS = {
    "generate base 'Hi you'": "write --prompt 'Hi you' in place of 'Hi you'",
    "generate base -p a -n 8": "write --max_new_tokens 8 in place of -n 8",
    "evaluate base a.jsonl": "write --tasks a.jsonl in place of a.jsonl",
    "evaluate base --batch_size 8": "write --batch_tokens 8 in place of --batch_size 8",
    "evaluate base --output_path a": "write --out a in place of --output_path a",
    "plan llama3": "write --model llama3 in place of llama3",
    "plan ''": "leave it out; a flag with several values is repeated: --flag A --flag B",
    f"train {'a' * 5000}": "leave it out; a flag with several values is repeated: --flag A --flag B",
    "plan a/b": "write --checkpoint.init_from a/b in place of a/b",
    "plan --num_gpus 8": "write --gpus 8 in place of --num_gpus 8",
    "evaluate --model hf --model_args pretrained=a --tasks b": "write --source a in place of --model_args pretrained=a",
    "tune --model model --dataset a": "write --data a in place of --dataset a",
    "tune model bok": "write book in place of bok",
    "train training.steps 5": "write --training.steps 5 in place of training.steps 5",
    "train --data.shuffle off model": "write --checkpoint.init_from model in place of model",
    "tune --base_model model --dataset a": "write --model model in place of --base_model model",
    "evaluate a tasks b": "write --tasks b in place of tasks b",
    "plan 70b": "write --flavor 70b in place of 70b",
    "train model": "write --checkpoint.init_from model in place of model",
    "train book": "write --data.path book in place of book",
    "train --model model": "write --checkpoint.init_from model in place of --model model",
    "export new model": "crius export model new",
    "export run b --push_to_hub me/x": "write --push_to me/x in place of --push_to_hub me/x",
    "import new model": "crius import model new",
}

AXOLOTL = """\
base_model: a/b  # a comment
load_in_4bit: true
lora_target_modules:
  - q_proj
  - v_proj
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
optimizer: "adamw_8bit"
"""
FILES = {
    "axolotl.yaml": (
        AXOLOTL,
        "YAML",
        "--base_model=a/b --load_in_4bit=true --lora_target_modules=q_proj --lora_target_modules=v_proj "
        "--datasets.path=tatsu-lab/alpaca --datasets.type=alpaca --optimizer=adamw_8bit",
    ),
    "nested.yml": (
        "training:\n  steps: 10\noptimizer:\n  lr: 1.0e-3\n",
        "YAML",
        "--training.steps=10 --optimizer.lr=1.0e-3",
    ),
    "yaml.toml": ("training:\n  steps: 10\n", "YAML", "--training.steps=10"),
    "ds.json": (
        '{"train_batch_size": 8, "bf16": {"enabled": true}}',
        "JSON",
        "--train_batch_size=8 --bf16.enabled=true",
    ),
}

PYTHON = [
    ({"lora_r": 8}, 'unknown key lora_r.*write "lora.rank": 8 in place of "lora_r": 8'),
    ({"optim": "adamw_8bit"}, 'write "optimizer.state_dtype": "8bit" in place of "optim": "adamw_8bit"'),
    (
        {"optimizer.name": "adamw8bit"},
        'write "optimizer.state_dtype": "8bit" in place of "optimizer.name": "adamw8bit"',
    ),
    ({"training.stepz": 3}, 'write "training.steps": 3 in place of "training.stepz": 3'),
    ({"training.steps": 0}, 'training.steps .crius.run.*e.g. "training.steps": 100'),
    (RunConfig(training=TrainingConfig(steps=0)), 'training.steps .crius.run.*e.g. "training.steps": 100'),
    ({"lora.base": "nf4"}, 'lora.base has no effect without lora.rank.*fix    "lora.rank": 16'),
]

# names in a table of Crius: where they come from. An installed package is read, and all names must be its fields
INSTALLED = {
    "transformers/training_args.py": ("TrainingArguments",),
    "peft/tuners/lora/config.py": ("LoraConfig",),
    "peft/config.py": ("PeftConfig",),
    "trl/scripts/utils.py": ("ScriptArguments",),
    "trl/trainer/model_config.py": ("ModelConfig",),
    "trl/trainer/sft_config.py": ("SFTConfig",),
}
ELSEWHERE = {
    "axolotl 0.19, axolotl/utils/schemas": (
        "adapter base_model chat_template chunked_cross_entropy data_files dataset_processes datasets.path "
        "datasets.type deepspeed dp_replicate_size dp_shard_size early_stopping_patience excess_length_strategy "
        "flash_attention flex_attention gc_steps lora_modules_to_save lora_r lora_target_modules offload_params "
        "pad_to_sequence_len peft_init_lora_weights peft_use_dora peft_use_rslora profiler_steps reshard_after_forward "
        "reward_model rl roles_to_train sample_packing sequence_len sequence_parallel_degree test_datasets text_column "
        "tokenizer_config train_on_inputs use_tensorboard use_wandb val_set_size wandb_entity wandb_name wandb_project "
        "micro_batch_size num_epochs tensor_parallel_size context_parallel_size warmup_ratio dpo_beta group_by_length"
    ),
    "Megatron-LM, megatron/training/arguments.py and the dataclasses that it reads": (
        "adam_eps clip_grad context_parallel_size deterministic_mode disable_bias_linear ffn_hidden_size "
        "expert_model_parallel_size group_query_attention hidden_size kv_channels layernorm_epsilon load "
        "lr_decay_iters lr_decay_style lr_warmup_iters manual_gc_interval merge_file micro_batch_size min_lr mock_data "
        "moe_aux_loss_coeff moe_expert_capacity_factor moe_ffn_hidden_size moe_router_bias_update_rate "
        "moe_router_load_balancing_type moe_router_topk moe_z_loss_coeff norm_epsilon normalization num_experts "
        "num_attention_heads num_query_groups optimizer_cpu_offload overlap_grad_reduce pipeline_model_parallel_size "
        "position_embedding_type pretrained_checkpoint profile recompute_activations recompute_granularity rotary_base "
        "save save_interval seq_length sequence_parallel swiglu tensor_model_parallel_size tensorboard_dir "
        "tokenizer_model tokenizer_type train_data_path train_iters untie_embeddings_and_output_weights "
        "split use_distributed_optimizer use_flash_attn valid_data_path vocab_file wandb_entity wandb_project finetune "
        "fp8_format no_load_optim no_load_rng num_layers_per_virtual_pipeline_stage recompute_method "
        "recompute_num_layers transformer_impl use_mcore_models vocab_size"
    ),
    "DeepSpeed, deepspeed/runtime/constants.py, zero/config.py and launcher/runner.py": (
        "gradient_clipping hostfile master_addr master_port node_rank num_gpus num_nodes offload_optimizer "
        "steps_per_print train_batch_size train_micro_batch_size_per_gpu vocabulary_size zero_optimization "
        "deepspeed_config include"
    ),
    "launchers: torchrun and accelerate launch": (
        "gpus_per_node machine_rank main_process_port mixed_precision nnodes nproc_per_node num_machines num_processes "
        "offload_optimizer_device offload_param_device"
    ),
    "bitsandbytes, in transformers.BitsAndBytesConfig": (
        "bnb_4bit_compute_dtype bnb_4bit_use_double_quant cpu_offload quantization_config"
    ),
    "example scripts of transformers": (
        "config_file dataset max_seq_length max_train_steps model_name_or_path no_cuda num_training_steps "
        "num_warmup_steps tokenizer_name tokenizer_name_or_path torch_dtype train_file validation_file"
    ),
    "transformers before 5, and its generation": (
        "do_sample evaluation_strategy logging_dir num_beams num_return_sequences overwrite_output_dir "
        "repetition_penalty save_safetensors"
    ),
    "LLaMA-Factory": (
        "cutoff_len dataset_dir finetuning_type flash_attn lora_rank lora_target mask_history max_samples neat_packing "
        "plot_loss preprocessing_num_workers quantization_bit stage template use_unsloth"
    ),
    "TRL, DataCollatorForCompletionOnlyLM and SFTConfig": "loss_type response_template",
    "unsloth": "full_finetuning random_state use_gradient_checkpointing",
    "lm-eval, Ollama and LitGPT": "output_path gpu_type model model_args num_fewshot num_predict pretrained task",
    "llama.cpp, convert_hf_to_gguf.py": "outtype",
    "several programs, and habits": (
        "apply_chat_template aux_loss_coef aux_loss_coeff c capacity_factor cfg config_path context_length "
        "context_parallel_rotate_method cp data_parallel_size datasets ddp devices dp dpo ep epochs "
        "dataset_path expert_parallel_size flavour hidden_dim max_epochs gpus import input layers "
        "load_balance_coeff model_size sequence_length size max_gen_len max_seq_len max_tokens "
        "moe_top_k n n_embed n_gpus n_heads n_layers n_predict norm_type num_tokens p pipeline_parallel_size pp "
        "ckpt_dir model_path output precision qlora quantization query question resume revision temp text top_k tp "
        "wandb z_loss z_loss_coeff zero_stage"
    ),
    "config.json of Hugging Face": (
        "attention_dropout decoder_sparse_step head_dim intermediate_size max_length model_max_length "
        "moe_intermediate_size moe_inter_dim n_routed_experts norm_topk_prob num_experts_per_tok num_hidden_layers "
        "num_key_value_heads num_local_experts resid_pdrop rms_norm_eps rope_theta route_norm router_z_loss_coef "
        "score_func tie_word_embeddings aux_loss_alpha"
    ),
    "torchtitan": (
        "attn_mask_type deterministic_warn_only enable_checkpoint gc_freq init_timeout_seconds lr_min "
        "module_fqns_per_model_part n_kv_heads pipeline_parallel_layers_per_stage pipeline_parallel_microbatch_size "
        "pipeline_parallel_split_points profiler_active selective_ac_option tokenizer_path train_timeout_seconds"
    ),
    "nanoGPT": (
        "batch_size block_size dropout eval_interval eval_iters grad_clip init_from lr_decay_iters max_iters min_lr "
        "n_embd n_head n_layer out_dir start warmup_iters"
    ),
}


def _fields(path: str, names: tuple[str, ...]) -> set[str]:
    """Fields of dataclasses of an installed package, which is not imported."""
    package, _, inner = path.partition("/")
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(found.origin).parent / inner).read_text())
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in names]
    return {line.target.id for node in classes for line in node.body if isinstance(line, ast.AnnAssign)}


def _batches(rows, flag_of):
    """The rows in as few groups as no flag is twice in."""
    groups = []
    for row in rows:
        flags = set(flag_of(row))
        group = next(
            (group for group in groups if not flags & {flag for other in group for flag in flag_of(other)}), None
        )
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    return groups


def _told(words):
    """Exit code and error of a command line that trains nothing: config show takes the flags of train."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        code = main(["config", "show", *words])
    return code, told.getvalue()


@pytest.fixture(scope="module")
def answers():
    """The error for each row of FLAGS and REASONS."""
    found = {}
    for group in _batches([*FLAGS, *REASONS], lambda row: row.split()[:1]):
        code, told = _told(shlex.split(" ".join(group)))
        assert code == 2
        blocks = re.split(r"^(?:\[\d+\] )?ConfigError: ", told, flags=re.MULTILINE)
        for row in group:
            flag = re.escape(row.split()[0])
            name = re.escape(row.split()[0].removeprefix("--"))
            begins = re.compile(
                rf"unknown flag {flag}[,:]|{flag} is a section|{name} \S+ is not (one of|an integer|a number)"
            )
            found[row] = [block for block in blocks if begins.match(block)]
    return found


def test_each_flag_of_another_trainer_is_named_with_what_replaces_it():
    lacking = [old for old in NOTHING if old != "import"]
    code, said = _told([f"--{old}" for old in [*MOVED, *lacking]])
    assert code == 2
    moved = {old: new for old, new in MOVED.items() if old != "resume"}  # which has no value here
    assert [old for old, new in moved.items() if f"unknown flag --{old}, did you mean --{new}?" not in said] == []
    assert [old for old in lacking if f"unknown flag --{old}: Crius has no such setting." not in said] == []


@pytest.mark.parametrize("typed", FLAGS)
def test_a_name_of_another_program_is_answered_with_its_value(answers, typed):
    [answer] = answers[typed]
    fix = f"write {FLAGS[typed]} in place of {typed}"
    assert f"  fix    {fix}\n" in f"{answer}\n" or (" " not in typed and f"  fix    write {FLAGS[typed]}" in answer)


@pytest.mark.parametrize("typed", REASONS)
def test_a_name_that_has_no_counterpart_is_answered_with_the_reason(answers, typed):
    [answer] = answers[typed]
    assert REASONS[typed] in answer and "  fix    leave it out" in answer


def test_each_pasted_fix_is_taken():
    fixes = [fix if " " in fix else f"{fix}=true" if "." in fix else fix for fix in FLAGS.values()]
    fixes = [fix for fix in fixes if fix != "--data.packing=true"] + ["--data.packing"]
    flags = {fix: {word for word in shlex.split(fix) if word.startswith("--")} for fix in fixes}
    refused = [
        told
        for group in _batches(list(flags), flags.get)
        for code, told in [_told(shlex.split(" ".join(group)))]
        if code
    ]
    assert refused == []


@pytest.mark.parametrize("typed", VERBS)
def test_a_verb_of_another_program_is_answered_with_the_command(typed, capsys):
    assert main([*typed.split(), "x", "--y"]) == 2
    told = capsys.readouterr().err
    assert told.endswith(f"  fix    crius {VERBS[typed]} x --y\n")


def test_each_verb_of_a_fix_exists():
    add_verbs()
    commands = [verb.split(" --")[0].split() for verb in VERBS.values()]
    assert [list(app.find(command)[0].words) for command in commands] == commands


@pytest.mark.parametrize(("typed", "want"), [("help", "Commands:"), ("help runs", "crius runs"), ("version", "0.")])
def test_help_and_version_need_no_dashes(typed, want, capsys):
    assert main(typed.split()) == 0
    assert want in capsys.readouterr().out


def test_a_word_without_dashes_is_answered_with_its_flag(capsys):
    code, told = _told(STRAY)
    assert code == 2
    assert [word for word, fix in STRAY.items() if f"write {fix} in place of {word}\n" not in told] == []
    assert _told(shlex.split(" ".join([*STRAY.values()][:3])))[0] == 0


@pytest.mark.parametrize(("typed", "fix"), WORDS.items())
def test_a_word_of_a_verb_is_answered_with_its_flag(typed, fix, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "book"):
        (tmp_path / name).mkdir()
    for name in ("model/config.json", "run.toml"):
        (tmp_path / name).touch()
    assert main(shlex.split(typed)) == 2
    assert f"  fix    {fix}\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_format_is_answered_with_its_flags(name, tmp_path):
    text, kind, flags = FILES[name]
    file = tmp_path / name
    file.write_text(text)
    code, told = _told(["--config", str(file)])
    assert code == 2
    assert f"{file} is {kind}, and not TOML." in told
    assert f"  fix    write {flags} in place of --config {file}\n" in told


@pytest.mark.parametrize(("settings", "said"), PYTHON)
def test_an_error_of_the_python_interface_speaks_of_keys(settings, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        crius.run(settings)
    assert re.search(said, str(raised.value), re.DOTALL)
    assert "--" not in str(raised.value) and "command line" not in str(raised.value)


@pytest.mark.parametrize(
    ("written", "value"), [("1e6", "1000000"), ("2E3", "2000"), ("1.5e3", "1500"), ("1e+1", "10"), ("1.5e0", None)]
)
def test_a_count_may_have_an_exponent(written, value, capsys):
    code = main(["config", "show", "--training.steps", written, "--nproc", "1e0"])
    assert code == (0 if value else 2)
    assert value is None or re.search(rf"^training.steps +{value} ", capsys.readouterr().out, re.MULTILINE)


def test_each_name_of_another_program_is_one():
    stated = {name for names in ELSEWHERE.values() for name in names.split()}
    fields = set().union(*(_fields(path, names) for path, names in INSTALLED.items()))
    ours = {name for name in [*MOVED, *NOTHING, *OPTIONS_BY_NAME] if "." not in name}
    assert ours - fields - stated == set()
    answered = {*MOVED, *NOTHING, *OPTIONS_BY_NAME}
    assert stated - answered == set()
