"""Names and values of settings in other trainers, and verbs of other programs: torchtitan, Megatron, DeepSpeed, Hugging
Face (with PEFT and TRL), axolotl, nanoGPT. Imports little, because a wrong verb is answered first."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from crius.errors import ConfigError

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

# Names of other trainers by the setting that has their meaning, with a value if the name alone says it: only suggested,
# never applied, as the values may differ. A name without a section stands for any section.
# tests/unit/test_foreign_words.py says where each name comes from.
_MOVED = {
    "activation_checkpoint.mode": "recompute_granularity",
    "activation_checkpoint.mode full": (
        "activation_checkpointing gradient_checkpointing recompute_activations use_gradient_checkpointing"
    ),
    "activation_checkpoint.selective_option": "selective_ac_option",
    "checkpoint.enable": "enable_checkpoint",
    "checkpoint.init_from": "base_model base_model_name_or_path init_from model_name_or_path pretrained_checkpoint",
    "checkpoint.interval": "save_interval save_steps",
    "checkpoint.interval 500": "save_strategy",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.load_path": "load resume_from_checkpoint",
    "comm.timeout_seconds": "init_timeout_seconds train_timeout_seconds ddp_timeout",
    "compile.enable": "torch_compile training.compile",
    "data.name": "dataset_config",
    "data.packing": "sample_packing neat_packing",
    "data.path": (
        "data_files dataset dataset_dir dataset_name dataset_path datasets datasets.path input train_data_path "
        "train_file"
    ),
    "data.shuffle": "shuffle_dataset",
    "data.source": "training.dataset",
    "data.source stdlib": "mock_data",
    "data.split": "dataset_train_split split",
    "data.text_field": "dataset_text_field text_column",
    "data.too_long": "excess_length_strategy",
    "data.too_long truncate": "truncation_mode",
    "debug.deterministic": "deterministic_warn_only deterministic_mode full_determinism",
    "debug.seed": "data_seed random_state",
    "job.name": "run_name wandb_name",
    "job.run_dir": "out_dir output output_dir resume save",
    "kernels.attention": "attn_implementation flash_attn",
    "kernels.attention flash": "flash_attention use_flash_attn",
    "kernels.attention flex": "flex_attention",
    "kernels.linear_cross_entropy chunked": "chunked_cross_entropy use_liger_kernel",
    "lora.alpha": "lora_alpha",
    "lora.base": "quantization quantization_config",
    "lora.base int8": "load_in_8bit",
    "lora.base nf4": "load_in_4bit qlora quantization_bit",
    "lora.rank": "lora_r lora_rank r",
    "lora.rank 16": "adapter use_peft finetuning_type",
    "lora.rslora": "peft_use_rslora use_rslora",
    "lora.targets": "lora_target lora_target_modules target_modules",
    "lr_scheduler.decay_type": "lr_decay_style lr_scheduler_type",
    "lr_scheduler.min_lr_factor": "lr_min",
    "lr_scheduler.warmup_steps": "lr_warmup_iters num_warmup_steps warmup_iters warmup_steps",
    "metrics.enable_progress_bar false": "disable_tqdm",
    "metrics.enable_tensorboard true": "tensorboard_dir use_tensorboard logging_dir",
    "metrics.enable_wandb true": "report_to use_wandb wandb",
    "metrics.log_interval": "logging_steps steps_per_print",
    "metrics.log_interval 10": "logging_strategy",
    "model.attention_mask": "attn_mask_type",
    "model.dim": "hidden_dim hidden_size n_embd n_embed",
    "model.expert_ffn_dim": "moe_ffn_hidden_size moe_inter_dim moe_intermediate_size",
    "model.ffn_dim": "ffn_hidden_size intermediate_size",
    "model.flavor": "flavour model_size size",
    "model.head_dim": "head_dim kv_channels",
    "model.norm_eps": "layernorm_epsilon norm_epsilon rms_norm_eps",
    "model.num_experts": "n_routed_experts num_experts num_local_experts",
    "model.num_heads": "n_head n_heads num_attention_heads",
    "model.num_kv_heads": "n_kv_heads num_key_value_heads num_query_groups",
    "model.num_layers": "layers n_layer n_layers num_hidden_layers",
    "model.rope_theta": "rope_theta rotary_base",
    "model.tied_embeddings": "tie_word_embeddings",
    "model.tied_embeddings false": "untie_embeddings_and_output_weights",
    "model.top_k": "moe_router_topk moe_top_k num_experts_per_tok top_k",
    "model.vocab_size": "vocabulary_size",
    "moe.aux_loss": "moe_router_load_balancing_type",
    "moe.aux_loss_coefficient": "aux_loss_alpha aux_loss_coef aux_loss_coeff moe_aux_loss_coeff router_aux_loss_coef",
    "moe.bias_update_rate": "load_balance_coeff moe_router_bias_update_rate",
    "moe.z_loss_coefficient": "moe_z_loss_coeff router_z_loss_coef z_loss z_loss_coeff",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_eps adam_epsilon",
    "optimizer.implementation fused": "optimizer.fused",
    "optimizer.lr": "learning_rate",
    "optimizer.name adamw": "optim",
    "parallelism.context_parallel_degree": "context_parallel_size cp sequence_parallel_degree",
    "parallelism.context_parallel_method": "context_parallel_rotate_method",
    "parallelism.data_parallel_replicate_degree": "dp_replicate_size",
    "parallelism.data_parallel_shard_degree": "data_parallel_size dp dp_shard_size training.data_parallel_degree",
    "parallelism.data_parallel_shard_degree -1": (
        "deepspeed deepspeed_config fsdp use_distributed_optimizer zero_optimization zero_optimization.stage zero_stage"
    ),
    "parallelism.expert_parallel_degree": "ep expert_model_parallel_size expert_parallel_size",
    "parallelism.pipeline_parallel_degree": (
        "experimental.pipeline_parallel_degree pipeline_model_parallel_size pipeline_parallel_size pp"
    ),
    "parallelism.pipeline_parallel_module_names_per_stage": (
        "module_fqns_per_model_part pipeline_parallel_split_points"
    ),
    "parallelism.pipeline_parallel_stages_per_rank": (
        "pipeline_parallel_layers_per_stage num_layers_per_virtual_pipeline_stage"
    ),
    "parallelism.reshard_after_forward_mode": "reshard_after_forward",
    "parallelism.tensor_parallel_degree": "tensor_model_parallel_size tensor_parallel_size tp",
    "profiler.enable true": "profile",
    "profiler.num_steps": "profiler_steps profiler_active",
    "quantize.dense.exclude": "float8.filter_fqns mx.filter_fqns",
    "quantize.dense.float8.emulate": "float8.emulate",
    "quantize.dense.float8.enable": "float8.enable float8.enable_float8_linear",
    "quantize.dense.float8.enable true": "model.converters fp8_format",
    "quantize.dense.float8.enable_fsdp_float8_all_gather": "float8.enable_fsdp_float8_all_gather",
    "quantize.dense.float8.precompute_scale": "float8.precompute_float8_dynamic_scale_for_fsdp",
    "quantize.dense.float8.recipe": "float8.recipe_name",
    "quantize.dense.mxfp8.enable": "mx.enable",
    "quantize.dense.mxfp8.enable true": "mx.recipe_name",
    "tokenizer.path": "tokenizer_path tokenizer_config tokenizer_model tokenizer_name tokenizer_name_or_path",
    "training.device cpu": "no_cuda use_cpu",
    "training.enable_cpu_offload true": (
        "cpu_offload offload_optimizer offload_params optimizer_cpu_offload offload_optimizer_device "
        "offload_param_device"
    ),
    "training.epochs": "epochs max_epochs num_epochs num_train_epochs",
    "training.gc_interval": "gc_steps manual_gc_interval gc_freq",
    "training.global_batch_size": "train_batch_size",
    "training.local_batch_size": (
        "batch_size micro_batch_size pipeline_parallel_microbatch_size "
        "per_device_train_batch_size train_micro_batch_size_per_gpu"
    ),
    "training.max_norm": "clip_grad grad_clip gradient_clipping max_grad_norm",
    "training.mixed_precision_param": "dtype mixed_precision precision torch_dtype",
    "training.mixed_precision_param bfloat16": "bf16",
    "training.seq_len": (
        "block_size context_length max_length max_seq_len max_seq_length model_max_length seq_length sequence_len "
        "cutoff_len sequence_length"
    ),
    "training.steps": "max_iters max_steps max_train_steps num_training_steps train_iters",
    "validation.fraction": "val_set_size",
    "validation.interval": "eval_interval eval_steps",
    "validation.interval 500": "eval_strategy validation.enable validation.enabled evaluation_strategy",
    "validation.num_samples": "eval_iters validation.steps",
    "validation.path": (
        "dataset_test_split test_datasets valid_data_path validation.dataset validation.dataset_path validation_file"
    ),
}
MOVED = {name: setting for setting, names in _MOVED.items() for name in names.split()}

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
    **dict.fromkeys(("checkpoint.export_dtype", "checkpoint.last_save_in_hf", "save_safetensors"), _EXPORT),
    **dict.fromkeys(("finetune", "no_load_optim", "no_load_rng"), _INITIAL),
    **dict.fromkeys(("checkpoint.last_save_model_only", "checkpoint.model_weights_only"), _EXPORT),
    "comm.trace_buf_size": "the watchdog reports where each rank hangs",
    "compile.components": "the blocks are compiled; compile.loss adds the loss",
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory"), "one thread reads ahead, by data.prefetch batches"
    ),
    "fault_tolerance.*": "launch.max_restarts restarts all ranks from the newest checkpoint; none continues alone",
    "fp16": "float16 needs a loss scale, which Crius lacks; bfloat16 needs none",
    "gradient_accumulation_steps": _ACCUMULATION,
    "import": "a configuration runs no code: --import MODULE on the command line, or CRIUS_IMPORT, names a module",
    **dict.fromkeys(("job.custom_config_module", "experimental.*"), _MODULES),
    "job.description": "job.name names a run",
    "job.print_args": "crius config show prints all settings",
    "lr_decay_iters": "the decay ends with the last step; lr_scheduler.decay_ratio is its share of all steps",
    "min_lr": "lr_scheduler.min_lr_factor is a share of the peak: min_lr / learning_rate",
    "memory_estimation.enabled": "crius train --dry_run shows the memory of a rank",
    "metrics.disable_color_printing": "nothing is printed in colours",
    "metrics.save_for_all_ranks": "rank 0 writes the metrics, which are sums over all ranks",
    **dict.fromkeys(("lora.use_dora", "lora.dora", "use_dora"), "DoRA is not built; LoRA and rsLoRA are (lora.rslora)"),
    "lora_dropout": "adapters have no dropout: its numbers would depend on the layout",
    **dict.fromkeys(("dpo.beta", "training.dpo", "dpo.enable"), "DPO is not built"),
    **dict.fromkeys(("decoder_sparse_step", "norm_topk_prob", "route_norm", "score_func", "norm_type"), _MODEL),
    **dict.fromkeys(("dropout", "attention_dropout", "resid_pdrop"), "the models have no dropout"),
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
    "push_to_hub": "crius export --push_to OWNER/NAME uploads",
    "quantize.grouped_mm.*": "experts are computed in training.mixed_precision_param: float8 and MXFP8 are for linears",
    "tf32": "float32 is computed in full; training.mixed_precision_param bfloat16 is the fast way",
    "training.gc_debug": "training.gc_interval sets how often garbage is collected",
    **dict.fromkeys(("validation.local_batch_size", "validation.seq_len", "per_device_eval_batch_size"), _VALIDATION),
    "warmup_ratio": "lr_scheduler.warmup_steps is a number of steps",
}

_LACKING = {
    "a model is trained to predict the next token; DPO, rewards and RL are not built": (
        "dpo dpo_beta reward_model rl stage"
    ),
    "adapters are of linear layers, without biases": "bias lora_bias lora_modules_to_save modules_to_save",
    "adapters start as in the LoRA paper": "init_lora_weights loftq_config peft_init_lora_weights",
    "checkpoints are not compared; checkpoint.keep_every keeps more of them": (
        "early_stopping_patience greater_is_better load_best_model_at_end metric_for_best_model"
    ),
    "chat data trains on what the assistant says: data.format chat, and data.train_on last for its last turn": (
        "assistant_only_loss completion_only_loss datasets.type roles_to_train train_on_inputs mask_history "
        "response_template"
    ),
    "crius data prepare --num_workers N tokenises with N processes": (
        "dataset_num_proc dataset_processes preprocessing_num_workers"
    ),
    "crius evaluate measures a model, crius generate asks it": "do_eval do_predict do_train",
    "each setting has a flag of its own: crius train --help all": (
        "accelerator_config dataset_kwargs fsdp_config gradient_checkpointing_kwargs lr_scheduler_kwargs "
        "model_init_kwargs optim_args torch_compile_backend torch_compile_mode"
    ),
    "all rows are read; training.epochs or training.steps set the length": "max_samples",
    "all weights are trained without lora.rank": "full_finetuning",
    "OWNER/NAME@REVISION names a revision": "hub_revision model_revision revision",
    "a run continues if its job.run_dir has checkpoints; another job.run_dir begins anew": (
        "ignore_data_skip overwrite_output_dir"
    ),
    "CUDA_VISIBLE_DEVICES chooses GPUs": "include",
    "every model is a causal language model": "lora_task_type task_type",
    "kernels.* choose among the implementations": "transformer_impl use_mcore_models use_unsloth",
    "report.html in the run folder draws the losses": "plot_loss",
    "activation_checkpoint.mode full recomputes all blocks": "recompute_method recompute_num_layers",
    "an answer is drawn by temperature, top_k and top_p": "do_sample num_beams num_return_sequences repetition_penalty",
    "the name of a task has its number of examples, as piqa:mc_5shot": "num_fewshot",
    "no code of a model is run": "trust_remote_code",
    "no noise is added, and the loss is plain cross-entropy": "label_smoothing_factor loss_type neftune_noise_alpha",
    "nf4 has scales of its own; the computation is in training.mixed_precision_param": (
        "bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant "
        "use_bnb_nested_quant"
    ),
    "crius export --push_to OWNER/NAME uploads to a new private repository, with the login of hf": (
        "hub_model_id hub_private_repo hub_strategy hub_token"
    ),
    "parallelism.data_parallel_replicate_degree N keeps N whole copies of the model": "ddp ddp_backend",
    "on a GPU training.local_batch_size is lowered until it fits": "auto_find_batch_size",
    "sequences are filled with whole conversations, and columns that nothing uses are not read": (
        "eval_packing group_by_length packing_strategy pad_to_multiple_of pad_to_sequence_len padding_free "
        "remove_unused_columns"
    ),
    "tensor parallelism splits the sequence too": "sequence_parallel",
    "the tokenizer's own chat template is used": "chat_template chat_template_path template",
    "tokenizer.path names a tokenizer.json": "merge_file tokenizer_type vocab_file",
    "torchrun or Slurm start processes on several nodes, and each crius train joins them": (
        "hostfile local_rank machine_rank main_process_port master_addr master_port nnodes node_rank num_machines "
        "num_nodes"
    ),
    "wandb login and the variables of wandb, such as WANDB_PROJECT, choose the place": "wandb_entity wandb_project",
    "weights are sharded and gradients reduced by FSDP2, without buckets": (
        "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters overlap_grad_reduce"
    ),
    NOTHING["lora.use_dora"]: "peft_use_dora",
    _MODEL: "disable_bias_linear group_query_attention normalization position_embedding_type swiglu",
}
NOTHING |= {name: reason for reason, names in _LACKING.items() for name in names.split()}

_OPTIONS = {
    "chat": "apply_chat_template",
    "config": "c cfg config_file config_path job.config_file",
    "max_new_tokens": "max_gen_len max_length max_tokens n n_predict num_tokens num_predict",
    "gpu": "gpu_type",
    "batch_tokens": "batch_size",
    "out": "output_path",
    "push_to": "push_to_hub",
    "nproc": "devices gpus gpus_per_node n_gpus nproc_per_node num_gpus num_processes",
    "prompt": "input p query question text start",
    "dtype": "outtype",
    "source": "ckpt_dir model model_args model_path pretrained",
    "tasks": "task",
    "temperature": "temp",
    "vocab": "vocab_size",
}
OPTIONS_BY_NAME = {name: option for option, names in _OPTIONS.items() for name in names.split()}
"""Other names of options that are not settings, for the verbs that have such an option."""

MAIN = {
    "activation_checkpoint": "activation_checkpoint.mode",
    "compile": "compile.enable",
    "data": "data.path",
    "lora": "lora.rank",
    "lr_scheduler": "lr_scheduler.decay_type",
    "model": "model.name",
    "optimizer": "optimizer.name",
    "profiler": "profiler.enable",
    "quantize": "quantize.dense.float8.enable",
    "tokenizer": "tokenizer.path",
    "validation": "validation.interval",
}
"""The setting that a section stands for if it is given a value."""

_CONTINUES = "a run continues by itself if its job.run_dir has checkpoints"
_RESUMED = dict.fromkeys(("auto", "last", "latest", "none", "true"), _CONTINUES)
_VALUES = {
    "adapter": {"lora.base nf4": "qlora"},
    "finetuning_type": {"without lora.rank all weights are trained": "full"},
    "quantization_bit": {"lora.base int8": "8"},
    "model": {
        "the model is the first word: crius evaluate SOURCE --tasks TASK": "hf huggingface local-completions vllm"
    },
    "activation_checkpoint.mode": {
        "activation_checkpoint.mode full": "true",
        "activation_checkpoint.mode none": "false",
    },
    "checkpoint.interval": {"checkpoint.interval 0": "false no none"},
    "kernels.attention": {
        "kernels.attention auto": "disabled false sdpa",
        "kernels.attention efficient": "xformers",
        "kernels.attention flash": "fa2 flash_attention flash_attention_2",
        "kernels.attention flash3": "fa3 flash_attention_3",
        "kernels.attention flex": "flex_attention",
        "kernels.attention math": "eager",
    },
    "lora.base": {
        "lora.base int8": "8bit",
        "lora.base keep": "false none",
        "lora.base nf4": "4bit fp4 int4",
    },
    "lora.targets": {
        "lora.targets attention.wq": "q_proj",
        "lora.targets attention.wk": "k_proj",
        "lora.targets attention.wv": "v_proj",
        "lora.targets attention.wo": "o_proj",
        "lora.targets feed_forward.w1": "gate_proj",
        "lora.targets feed_forward.w2": "down_proj",
        "lora.targets feed_forward.w3": "up_proj",
        "without lora.targets all linear layers of the blocks get an adapter": "all all-linear all_linear true",
    },
    "lr_scheduler.decay_type": {
        "lr_scheduler.decay_ratio 0": "constant constant_with_warmup",
        "lr_scheduler.decay_ratio 0.2": "warmup_stable_decay wsd",
        "lr_scheduler.decay_type cosine": "cosine_with_min_lr cosine_with_restarts cosine_warmup_with_min_lr",
        "lr_scheduler.decay_type linear": "linear_with_warmup",
        "linear, cosine and sqrt are built, and lr_scheduler.decay_ratio 0 is constant": (
            "exponential inverse_sqrt polynomial reduce_lr_on_plateau"
        ),
    },
    "metrics.enable_wandb": {
        "metrics.enable_tensorboard true": "tensorboard",
        "metrics.enable_wandb false": "none",
        "wandb and TensorBoard are built, and metrics.sinks takes others": "comet_ml mlflow swanlab trackio",
    },
    "optimizer.name": {
        "optimizer.name adamw": (
            "adam adamw_apex_fused adamw_hf adamw_torch adamw_torch_fused fusedadam paged_adamw paged_adamw_32bit"
        ),
        "optimizer.state_dtype 8bit": (
            "adam8bit adamw8bit adamw_8bit adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit pagedadamw8bit"
        ),
        "adamw and muon are built": "adafactor adagrad ademamix galore_adamw lamb lion lion_8bit rmsprop sgd sophia",
    },
    "parallelism.reshard_after_forward_mode": {
        "parallelism.reshard_after_forward_mode always": "true",
        "parallelism.reshard_after_forward_mode never": "false",
    },
    "training.mixed_precision_param": {
        "training.mixed_precision_param bfloat16": "bf16 bfloat16 torch.bfloat16 true",
        "training.mixed_precision_param float32": "false fp32 no torch.float32",
        "quantize.dense.float8.enable true": "float8 fp8",
        NOTHING["fp16"]: "float16 fp16 half torch.float16",
    },
    "validation.interval": {"validation.interval 0": "false no none"},
}
VALUES = {
    name: {value: answer for answer, values in answers.items() for value in values.split()}
    for name, answers in _VALUES.items()
} | {"resume": _RESUMED | {"": _CONTINUES}, "resume_from_checkpoint": _RESUMED}
"""Values of other trainers, by setting or by their name of it: a setting of Crius with its value, or the reason why
there is none, which begins with a word that has no dot."""

_VERBS = {
    "checkpoint ls": "checkpoints,checkpoint list,checkpoint show",
    "checkpoint prune": "delete,prune,remove,rm,checkpoint clean,checkpoint delete,checkpoint remove,checkpoint rm",
    "config show": "config get,config list,config print,settings,show-config",
    "data doctor": "data analyze,data check,data stats,data validate,data verify",
    "data prepare": "data preprocess,data tokenise,data tokenize,prepare,preprocess,tokenise,tokenize",
    "data show": "data head,data inspect,data preview,data view",
    "data tokenizer": "data train-tokenizer,tokenizer,train-tokenizer",
    "doctor": "login,check,diagnose,env,info",
    "evaluate": "benchmark,eval,evaluation,lm-eval,score,test",
    "export": "quantise,quantize,convert,merge,merge-lora,push,save,upload",
    "chat": "talk",
    "compare": "diff",
    "chat --web": "gradio,llama-server,serve,ui,webui",
    "generate": "complete,llama-cli,infer,inference,predict,prompt,run-model,sample",
    "import": "download,fetch,pull",
    "models": "list,ls,model",
    "plan": "estimate,estimate-memory,memory",
    "report": "dashboard,log,logs,plot,tensorboard",
    "runs": "history,jobs,ps,status",
    "sweep": "grid,hpo,search",
    "train": "accelerate,accelerate launch,deepspeed,fit,launch,pretrain,python,run,start,torchrun",
    "train --job.run_dir": "continue,restart,resume",
    "train --recipe smollm2_lora": "lora,qlora",
    "tune": "fine-tune,finetune,instruct,sft",
    "verify parity": "verify all,verify layouts",
}
_WORDS = {words: verb for verb, others in _VERBS.items() for words in others.split(",")} | {
    "recipes": "config show --recipe llama3_debug",
    "recipe": "config show --recipe llama3_debug",
}
_PROGRAMS = ("axolotl", "litgpt", "llamafactory-cli", "ollama", "trl", "vllm")
_KNOWN = {words.split()[0] for words in _VERBS}
_RECIPES = ", ".join(sorted(file.stem for file in (Path(__file__).parent.parent / "recipes").glob("*.toml")))
_WHY = {
    "login": "hf auth login is the login of the hub",
    "push": "crius export RUN TARGET --push_to OWNER/NAME uploads",
    "quantize": "llama.cpp and vLLM quantise a folder that crius export writes",
    **dict.fromkeys(("list", "ls"), "crius models, crius runs and crius checkpoint ls RUN list what there is"),
    **dict.fromkeys(("recipe", "recipes"), f"a recipe is a flag of train: {_RECIPES}"),
    **dict.fromkeys(("continue", "restart", "resume"), "the command of a run continues it if it names the same folder"),
    **dict.fromkeys(
        ("dpo", "grpo", "kto", "orpo", "ppo", "reward", "rl", "rlhf", "rloo"), "DPO, rewards and RL are not built"
    ),
}


def check_verb(arguments: Sequence[str]) -> None:
    """Answer a verb of another program, or a command line without a verb.

    Raises:
        ConfigError: the first words are not a verb of Crius; the fix is the command that was meant.
    """
    if arguments and arguments[0] in _PROGRAMS:
        check_verb(arguments[1:])
        raise no_verb(arguments[0], arguments[1:])
    for count in (2, 1):
        words = " ".join(arguments[:count]).lower().replace("_", "-")
        rest = [word for word in arguments[count:] if not word.endswith(".py")]
        if words == "run" and rest and not rest[0].startswith("-"):  # of ollama
            raise no_verb(words, ["chat", *rest])
        if words in _WORDS:
            raise no_verb(words, [*_WORDS[words].split(), *rest], _WHY.get(words, ""))
        if words in _WHY:
            raise no_verb(words, ["tune", *rest], _WHY[words])
    name, equals, _ = arguments[0].partition("=") if arguments else ("", "", "")
    if (equals or name.startswith("--")) and name not in ("--help", "--import", "--version"):
        *_, verb = ["train", *(word for word in arguments if word in _KNOWN)]
        raise no_verb(arguments[0], [verb, *(word for word in arguments if word != verb)])
    for part in words.removesuffix(".py").split("-"):
        verb = _WORDS.get(part, "tune" if part in _WHY else "")
        verb = part if part in _KNOWN else verb
        if verb and part != words and not words.startswith("-"):  # finetune_lora, train.py
            raise no_verb(words, [*verb.split(), *rest], _WHY.get(part, ""))


def no_verb(words: str, command: Sequence[str], why: str = "") -> ConfigError:
    """Error about ``words`` where a verb should be; ``command`` was meant."""
    fix = shlex.join(["crius", *command])
    return ConfigError(f"{words} is not a verb of crius.", where="command line", why=why, fix=fix)
