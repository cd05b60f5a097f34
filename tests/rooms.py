"""The tests of each room, a folder of ``crius``, which see the faults of ``tests/mutants.py``."""

ORACLE = "tests/oracle/test_oracle.py::test_a_run_is_what_a_plain_loop_computes"
CONFIG = "tests/unit/test_config.py"
LAYOUT = "tests/parity/test_layouts.py::test_every_layout_computes_what_one_device_computes"
TIED = "tests/parity/test_layouts.py::test_tied_embeddings_are_one_weight_on_every_layout"
VALIDATED = "tests/parity/test_layouts.py::test_validation_scores_what_one_device_scores"
PIPELINE = "tests/distributed/test_pipeline.py::test_a_pipeline_equals_one_process"
REPRODUCIBLE = "tests/distributed/test_reproducible.py::test_every_data_parallel_layout_has_the_bits_of_one_device"
LOOPBACK = "tests/distributed/test_loopback.py::test_nothing_listens_off_the_loopback"
SDC = "tests/distributed/test_sdc.py::test_a_gradient_that_differs_the_second_time_names_its_rank_and_unit"
FLIPPED = "tests/distributed/test_sdc.py::test_a_flipped_weight_names_the_odd_one_of_three_replicas"
FAULTS = "tests/distributed/test_checkpoint_faults.py"
SIGNALLED = (
    "tests/distributed/test_keep_the_model.py::test_a_signal_ends_it_and_the_summary_says_where"
    "[1-False-143-lost: checkpoint.enable]"
)
FAILED_SAVE = "test_a_disk_that_fails_costs_a_checkpoint_and_not_the_run"
FAILED_SAVES = "test_a_disk_that_goes_on_failing_ends_the_run_with_the_last_good_checkpoint_named"
STOPPED = "test_a_signal_saves_on_all_ranks_and_ends_with_75"
RETURNED = (
    "tests/distributed/test_checkpoints.py::test_the_same_command_goes_back_to_load_step_once",
    "tests/distributed/test_checkpoints.py::test_load_step_names_a_step_of_load_path",
)
STARTED = (
    "tests/parity/test_pretrained.py::test_a_resume_does_not_read_the_source_again",
    "tests/parity/test_pretrained.py::test_new_rows_of_the_vocabulary_are_drawn_and_the_others_kept",
)
NAN = "tests/distributed/test_training.py::test_a_nan_of_the_backward_pass_is_named_by_its_line_of_the_forward_pass"
BROKEN = "test_weights_that_the_last_update_broke_are_not_saved_as_good"
REPORTED = (
    "test_a_run_that_ends_badly_reports_its_last_healthy_step_and_no_broken_one",
    "test_the_time_of_a_step_has_what_the_host_does_while_the_device_computes",
    "test_reports_whose_numbers_come_late_say_the_same_and_are_there_when_the_run_is_saved",
    "test_a_step_that_reports_nothing_waits_for_the_device_once_and_for_the_step_before",
)
TIMED = (
    "test_a_recovery_is_told_once_with_the_step_that_the_failed_attempt_had_not_finished",
    "test_rates_and_mfu_are_over_the_steps_since_the_last_report",
    "test_mfu_is_unknown_without_a_peak",
    "test_a_phase_may_last_three_times_the_slowest_step_but_one_of_a_hundred",
)
OF_LOSS = (
    "test_the_log_says_what_was_chosen",
    "test_a_model_has_the_same_loss_and_gradients_chunked_and_off",
)
OF_INCIDENTS = (
    "test_parameters_are_summed_by_layer",
    "test_an_incident_is_json_also_where_numbers_are_not_finite",
)
OF_CHECKPOINTS = (
    "tests/unit/test_import.py::test_a_run_from_the_checkpoint_of_an_import_has_its_model",
    "tests/unit/test_foreign_weights.py::test_a_run_from_the_checkpoint_of_kept_adapters_has_their_settings",
    "tests/unit/test_data_show.py::test_steps_or_epochs_are_those_of_the_stronger_source",
    "tests/unit/test_data_show.py::test_steps_of_a_checkpoint_do_not_end_epochs_which_count_samples",
)
ONE_LAYOUT = "tests/unit/test_planner_auto.py::test_ranks_that_found_other_layouts_are_refused"
SUMMARISED = (
    "test_a_run_is_complete_after_its_last_validation_alone",
    "test_a_summary_has_the_numbers_of_its_run",
)
RESUMED = (
    "test_a_resume_leaves_no_more_checkpoints_than_are_to_be_kept",
    "test_a_schedule_that_changes_after_the_next_step_is_said_with_the_first_step_that_it_changes",
    "test_settings_that_change_the_curve_are_said_and_taken",
)
DRAWS = (
    "test_any_range_of_rows_is_that_slice_of_the_whole",
    "test_name_seed_and_block_each_give_other_numbers",
    "test_draws_are_a_clamped_standard_normal",
)
UNITS = (
    "tests/unit/test_model.py::test_plan_covers_each_parameter_once",
    "tests/unit/test_model.py::test_experts_are_cut_inside_of_each_if_there_are_fewer_than_shards",
)
NOT_GATHERED = "test_a_frozen_layer_is_not_gathered_for_a_backward_with_its_experts_in_a_unit_of_their_own"
COMPILED = (
    "tests/distributed/test_compile.py::test_all_blocks_share_one_graph",
    "tests/distributed/test_compile.py::test_too_many_recompilations_warn_once_with_tensor_and_dimension",
)

FAMILIES = "tests/parity/test_families.py"
LOGITS = f"{FAMILIES}::test_logits_are_those_of_transformers"
GRADIENTS = f"{FAMILIES}::test_gradients_are_those_of_transformers"
TOKENS = f"{FAMILIES}::test_greedy_tokens_are_those_of_transformers"
BUILT = f"{FAMILIES}::test_a_flavor_is_the_model_that_transformers_builds_from_its_config"
EXPORTED = f"{FAMILIES}::test_an_export_has_the_tensors_and_settings_that_transformers_wrote"
WRITTEN = (
    EXPORTED,
    f"{FAMILIES}::test_a_model_without_a_source_is_told_so_that_transformers_builds_it",
    f"{FAMILIES}::test_what_a_class_of_transformers_cannot_say_is_not_exported",
    f"{FAMILIES}::test_a_changed_base_of_positions_keeps_the_dims_that_rotate",
    f"{FAMILIES}::test_a_key_that_is_left_out_has_the_value_that_transformers_gives_it",
)
FREQUENCIES = f"{FAMILIES}::test_frequencies_have_the_bits_of_transformers"
UNKNOWN = "tests/unit/test_import.py::test_an_unknown_family_is_refused_with_all_keys_that_no_family_has"
FUSED = "test_async_tensor_parallelism_says_what_was_fused_in_each_direction"
WINDOWS = "test_windows_end_where_rows_end_though_a_rank_has_half_of_the_sequence"
BY_COLUMNS = "test_matrices_stored_by_columns_compute_the_same"
OF_WORDS = ("gemma3", "olmo3", "smollm3", "granite", "phi3")
"""Cases of ``FAMILIES`` that have every word between them."""
SIZES = "tests/unit/test_model.py::test_the_sizes_of_a_flavor_change_only_with_its_line"
FOLDERS = ("gemma2", "gemma3", "granite", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "seed_oss", "smollm3")

KEPT = (
    "test_a_moved_run_whose_source_is_gone_is_read",
    "test_a_moved_run_whose_source_is_gone_resumes_and_keeps_its_tokenizer_once",
    "test_another_tokenizer_at_the_same_place_is_refused_by_name",
    "test_a_damaged_tokenizer_is_named_and_written_again",
    "test_a_run_of_an_older_version_is_read_where_its_tokenizer_is",
    "test_a_run_of_another_length_exports_what_its_source_said",
    "test_the_eos_that_the_run_was_told_ends_a_text_later_too",
    "test_a_converted_tokenizer_is_kept_as_it_was_converted",
    "test_a_tokenizer_is_kept_under_its_usual_name_and_with_the_files_beside_it",
    "test_a_run_behind_a_url_is_read_with_its_tokenizer",
    "test_an_eos_of_the_source_stays_unless_it_ends_no_text_for_the_tokenizer_of_the_run",
)
KEPT_TOKENIZER = tuple(f"tests/unit/test_kept_tokenizer.py::{name}" for name in KEPT)

ONEDNN = "tests/unit/test_compiled_kernels.py::test_compiled_feed_forward_keeps_no_product_and_calls_onednn_itself"

WRONG_MODULES = "test_what_is_wrong_with_a_module_is_one_error"
SETTINGS_OF_EXPERTS = (
    "test_a_config_json_says_each_size_again",
    "test_rows_are_named_by_their_number",
)

RULES = (
    *("test_rules_pipeline", "test_rules_training", "test_rules_stability", "test_rules_kernels"),
    *("test_rules_reproducible", "test_rules_quantize", "test_rules_experts", "test_rules"),
    "test_rule_bounds",
    "test_rules_golden",
)
DEFAULTS = f"{CONFIG}::test_a_default_changes_only_with_its_line"
MASKED_TOKENS = (
    "test_the_byte_tokenizer_has_masks_too",
    "test_a_character_of_several_tokens_is_whole",
)
PRINTED = "tests/unit/test_planner_golden.py::test_a_plan_prints_its_golden_lines"
SHAPED = ("test_a_shape_of_a_file", "test_shapes_have_the_published_number_of_parameters")
ROOMS = {
    "config": {
        "rules_lora": ("test_lora", "test_rules_quantize", "test_rule_bounds", "test_rules_golden"),
        "rules": RULES,
        "facts": RULES,
        "changes": ("test_changes", "test_data_boundary", "test_hostile_state", "test_from_hf"),
        "resolve": (
            *("test_config", "test_blocked_attention", "test_dtype_auto", "test_linear_cross_entropy"),
            *("test_rules_reproducible", "test_planner_memory", "test_pipeline_stages"),
            *("test_rules_kernels", "test_rules_golden"),
        ),
        "lora": ("test_lora", DEFAULTS),
        "low_precision": ("test_low_precision", "test_quantize", "test_rules_quantize"),
        "param_groups": ("test_optim_states", "test_optim", "test_rules_training"),
        "load": ("test_config", "test_from_hf"),
        "toml_file": ("test_config", "test_from_hf", "test_help", "test_redact"),
        "names": ("test_names", "test_config", "test_rules"),
        "moe": ("test_rules_experts", "test_config", "test_typed"),
        "": (
            *("test_layout", "test_globs", "test_pipeline_stages", "test_rules", "test_config", "test_typed"),
            "test_rule_bounds",
        ),
    },
    "models": {
        "huggingface": (
            *("test_model", "test_from_hf", UNKNOWN, *WRITTEN),
            *(f"tests/unit/test_qwen3_moe.py::{name}" for name in SETTINGS_OF_EXPERTS),
        ),
        "registry": (
            *("test_model", f"tests/unit/test_import_models.py::{WRONG_MODULES}"),
            *("tests/unit/test_plugins.py::test_what_is_wrong_is_one_error", *WRITTEN[2:3]),
        ),
        "config": (
            *("test_model", "test_from_hf", "test_moe", f"{ORACLE}[sigmoid_experts]", BUILT),
            f"{LOGITS}[llama_yarn]",
        ),
        "layers": (
            *("test_model", "test_context_order", "test_import", FREQUENCIES),
            *(f"{ORACLE}[{case}]" for case in ("documents", "tied", "head_norms")),
            *(f"{test}[{case}]" for case in ("gemma3", "smollm3", "llama_linear") for test in (LOGITS, GRADIENTS)),
            *(f"{LOGITS}[{case}]" for case in ("gemma2", "llama_yarn", "llama_biases", "phi3")),
        ),
        "rope": (
            *("test_model", "test_from_hf", FREQUENCIES, *WRITTEN),
            *(f"{LOGITS}[{case}]" for case in ("gemma3_linear", "olmo3", "llama_yarn_by_scale", "phi3")),
        ),
        "words": ("test_model", "test_from_hf", *WRITTEN, f"{LOGITS}[gemma3]"),
        "keys": (UNKNOWN,),
        "decode": (
            *("test_model", "test_decode", f"{TOKENS}[gemma3]", f"{TOKENS}[mistral_window]"),
            *(f"{ORACLE}[{case}]" for case in ("documents", "experts")),
            *(f"{LOGITS}[{case}]" for case in OF_WORDS),
        ),
        "moe": ("test_moe", "test_model", "test_decode", f"{ORACLE}[experts]", f"{ORACLE}[sigmoid_experts]"),
        **{name: (SIZES, f"{LOGITS}[{name}]", BUILT, *WRITTEN) for name in FOLDERS},
        "": (
            *("test_moe", "test_model", "test_decode", BUILT, *WRITTEN),
            *(f"{ORACLE}[{case}]" for case in ("documents", "tied", "experts", "sigmoid_experts")),
        ),
    },
    "kernels": {
        "attention": (
            *("test_attention_backends", "test_document_attention", "test_blocked_attention", "test_decode"),
            *(
                f"{LOGITS}[mistral_window]",
                f"{LOGITS}[gemma2]",
                f"{LAYOUT}[gemma3 cp2+document]",
                f"{LAYOUT}[gemma3 fsdp2]",
                f"tests/unit/test_model.py::{WINDOWS}",
            ),
        ),
        "cpu/heap": ("test_tidied", "test_kernels"),
        "cpu/inductor": (*COMPILED[:1], ONEDNN),
        "cpu/linear": ("test_kernels", f"tests/unit/test_decode.py::{BY_COLUMNS}"),
        "cpu": ("test_squared_norm", "test_blocked_attention", "test_kernels"),
        "linear_cross_entropy": ("test_linear_cross_entropy",),
        "grouped_mm": ("test_grouped_mm",),
        "choice": ("test_kernels", "test_rules_kernels", "test_attention_backends"),
        "": (
            *("test_rules_kernels", "test_attention_backends", "test_document_attention", "test_blocked_attention"),
            "test_linear_cross_entropy",
        ),
    },
    "parallel": {
        "context": (
            *("test_context_order", "test_many_ranks"),
            *(f"{LAYOUT}[llama3 {layout}]" for layout in ("cp2", "cp2+ulysses", "cp2+document")),
        ),
        "pipeline": (
            *("test_pipeline_stages", f"{LAYOUT}[llama3 pp2+1f1b]", f"{LAYOUT}[llama3 pp2+interleave_1f1b]"),
            *(f"{TIED}[pp2]", f"{VALIDATED}[pp2]", f"{PIPELINE}[pp2-1f1b]"),
        ),
        "stages": ("test_pipeline_stages", f"{LAYOUT}[llama3 pp2+1f1b]", f"{PIPELINE}[pp2-csv]"),
        "activation_checkpoint": ("test_activation_checkpoint", "test_activation_auto"),
        "allocate": ("test_activation_auto",),
        "compile": ("test_compile_folder", "test_activation_checkpoint", *COMPILED),
        "kernel_cache": ("test_compile_folder",),
        "reproducible": (
            *("test_rules_reproducible", "test_exact_sums", "test_many_ranks"),
            *(f"{REPRODUCIBLE}[{layout}]" for layout in ("fsdp2", "ddp2")),
        ),
        "lora": ("test_lora", f"{LAYOUT}[llama3 fsdp2_tp2+lora]"),
        "init": (
            *("test_model", f"{LAYOUT}[llama3 fsdp2_tp2]", f"{LAYOUT}[qwen3_moe fsdp2_ep2]"),
            *(f"tests/distributed/test_init.py::{name}" for name in DRAWS),
        ),
        "gradients": (
            *("test_stability", "test_squared_norm", "test_many_ranks", f"{LAYOUT}[llama3 fsdp2]"),
            f"{LAYOUT}[llama3 hsdp2x2_accum4+deferred]",
        ),
        "tensor": (
            *("test_many_ranks", "test_async_tensor", f"{LAYOUT}[olmo3 tp2]", f"tests/unit/test_effects.py::{FUSED}"),
            *(f"{LAYOUT}[llama3 {layout}]" for layout in ("fsdp2_tp2", "tp2+float8_rowwise", "fsdp2_tp2+lora")),
        ),
        "mesh": (
            *(f"{LAYOUT}[llama3 {layout}]" for layout in ("cp2", "fsdp2_tp2", "hsdp2x2_accum4+deferred")),
            *(f"{LAYOUT}[llama3 pp2+1f1b]", f"{LAYOUT}[qwen3_moe fsdp2_ep2]"),
            f"tests/distributed/test_experts.py::{NOT_GATHERED}",
        ),
        "runtime": (
            *("test_launch_local", "test_shared_gpu", "test_effects", "test_cards", LOOPBACK),
            f"{LAYOUT}[llama3 fsdp2_tp2]",
        ),
        "interface": ("test_cards", LOOPBACK),
        "fsdp": (
            *("test_fsdp_units", *UNITS),
            *(f"{LAYOUT}[llama3 {layout}]" for layout in ("fsdp2", "hsdp2x2_accum4+deferred", "fsdp2_accum2+never")),
            *(f"{LAYOUT}[llama3 fsdp2+offload]", f"{LAYOUT}[llama3 ddp2+lora]", f"{LAYOUT}[qwen3_moe fsdp2_ep2]"),
            f"tests/distributed/test_experts.py::{NOT_GATHERED}",
        ),
        "": (
            *("test_async_tensor", "test_context_order", "test_pipeline_stages", "test_effects", "test_many_ranks"),
            *(f"{LAYOUT}[llama3 {layout}]" for layout in ("fsdp2_tp2", "tp2+float8_rowwise")),
            f"{LAYOUT}[qwen3_moe fsdp2_ep2]",
        ),
    },
    "quantize": {
        "frozen": ("test_lora", f"{LAYOUT}[llama3 fsdp3+nf4]"),
        "": (
            *("test_quantize", "test_rules_quantize", "test_low_precision", "test_many_ranks"),
            *(f"{LAYOUT}[llama3 tp2+float8_rowwise]", f"{LAYOUT}[llama3 fsdp2_tp2+float8+float8_all_gather]"),
            "tests/distributed/test_float8.py::test_float8_communicates_as_often_and_less",
        ),
    },
    "data": {
        "chat/conversations": ("test_chat_files", "test_odd_data", "test_data_samples"),
        "chat": ("test_chat_files", "test_data_samples", "test_chat_masks"),
        "loader": ("test_data_loader", "test_data_boundary"),
        "sample_log": ("test_audit", "test_data_show"),
        "prepare": ("test_data_prepare", "test_data_boundary"),
        "rows": ("test_chat_files", "test_odd_data", "test_data_documents", "test_data_boundary"),
        "infer": ("test_odd_data",),
        "documents": (
            "test_data_documents",
            "test_chat_files",
            "test_odd_data",
            "test_data_corpus",
            "test_data_prepare",
            "test_plugins",
        ),
        "show": ("test_data_show", "test_data_samples"),
        "samples": ("test_data_samples", "test_data_boundary"),
        "": (
            *("test_data_corpus", "test_data_documents", "test_data_stream", "test_data_checked", "test_data_tokens"),
            *("test_data_tokenizer", "test_data_boundary", "test_data_prepare"),
        ),
    },
    "tokens": {
        "render": ("test_chat_files", "test_data_samples", "test_chat_masks"),
        "template": ("test_chat_files", "test_data_samples", "test_chat_masks"),
        "": (
            *("test_data_tokenizer", "test_tokenizer_files"),
            *(f"tests/unit/test_chat_masks.py::{name}" for name in MASKED_TOKENS),
        ),
    },
    "optim": {
        "": (
            *("test_optim", "test_optim_states", "test_many_ranks"),
            *(f"{ORACLE}[{case}]" for case in ("groups", "tied_decayed", "muon", "muon_original", "8bit")),
        ),
    },
    "checkpoint": {
        "kept": KEPT_TOKENIZER,
        "manifest": ("test_checkpoint_format", "test_checkpoint_folder", "test_hostile_files", "test_checkpoint_cli"),
        "pieces": ("test_checkpoint_pieces", "test_checkpoint_format", "test_checkpoint_saver"),
        "contents": ("test_checkpoint_pieces",),
        "plain": ("test_checkpoint_pieces", "test_import", "test_export"),
        "load": ("test_checkpoint_pieces", "test_checkpoint_saver", "test_newest", "test_hostile_state"),
        "": (
            *("test_checkpoint_folder", "test_checkpoint_disk", "test_checkpoint_saver", "test_checkpoint_cli"),
            *("test_checkpoint_url", "test_newest", "test_hostile_state", "test_checkpoint_format"),
        ),
    },
    "interop": {
        "adapters": ("test_foreign_weights",),
        "peft": ("test_foreign_weights",),
        "numbers": ("test_foreign_weights",),
        "kept": (
            *KEPT_TOKENIZER,
            "tests/unit/test_import.py::test_what_a_run_was_told_goes_with_its_tokenizer_into_runs_and_imports",
        ),
        "hub": ("test_hub",),
        "casting": ("test_export",),
        "context": ("test_export",),
        "unpickle": ("test_hostile", "test_convert"),
        "safetensors": ("test_foreign_weights", "test_hostile_files", "test_hostile", "test_import"),
        "weights": (
            *("test_foreign_weights", "test_newest", "test_import", *KEPT_TOKENIZER[-1:], f"{LOGITS}[phi3]"),
            *(f"{EXPORTED}[{case}]" for case in ("phi3", "gemma3")),
        ),
        "foreign": (
            *("test_foreign_weights", "test_convert", "test_import_gguf", "test_hostile", "test_hostile_files"),
        ),
        "": ("test_foreign_weights", "test_convert", "test_import"),
    },
    "train": {
        "stability": (
            *("test_stability", "test_rules_stability", "test_many_ranks"),
            *(f"tests/unit/test_faults.py::{name}" for name in OF_INCIDENTS),
        ),
        "sdc": ("test_many_ranks", *(f"{SDC}[{layout}]" for layout in ("ddp2", "1")), FLIPPED),
        "saving": ("test_saving", "test_newest", f"{FAULTS}::{FAILED_SAVE}[async-erofs]"),
        "checkpoints": (
            *("test_saving", "test_newest", f"{FAULTS}::{FAILED_SAVE}[async-erofs]"),
            *(f"{FAULTS}::{name}" for name in (*RESUMED, FAILED_SAVES)),
            *RETURNED,
        ),
        "job": (
            *(f"{FAULTS}::{name}" for name in (f"{FAILED_SAVE}[async-erofs]", BROKEN, STOPPED)),
            *(f"{ORACLE}[{case}]" for case in ("last_partial_batch", "validation")),
            *("tests/unit/test_hot_loop.py::test_threads_are_set_only_where_torch_has_another_number", ONE_LAYOUT),
        ),
        "inputs": (
            *("test_data_boundary", "test_gpu_defaults", "test_saving"),
            *(f"{ORACLE}[last_partial_batch]", f"{FAULTS}::{RESUMED[2]}", *KEPT_TOKENIZER[1:3], *OF_CHECKPOINTS),
        ),
        "setup": (
            *("test_dtype_auto", "test_blocked_attention", "test_document_attention", "test_run_file", "test_cards"),
            f"{ORACLE}[causal]",
        ),
        "loop": (
            *("test_saving", "test_tidied", f"{FAULTS}::{FAILED_SAVE}[async-erofs]", f"{FAULTS}::{STOPPED}"),
            *(*(f"{ORACLE}[{case}]" for case in ("last_partial_batch", "validation")), SIGNALLED),
        ),
        "reports": (
            *(f"tests/unit/test_hot_loop.py::{name}" for name in REPORTED),
            *(f"tests/unit/test_metrics.py::{name}" for name in TIMED),
            *(f"tests/unit/test_saving.py::{name}" for name in SUMMARISED),
            f"{ORACLE}[validation]",
        ),
        "guard": (
            *("test_stability", f"tests/unit/test_hot_loop.py::{REPORTED[0]}", f"{FAULTS}::{BROKEN}"),
            "tests/distributed/test_nonfinite.py::test_nan_in_the_last_step_is_found_although_no_step_follows",
        ),
        "effects": ("test_effects", "test_cards"),
        "pretrained": ("test_foreign_weights", *STARTED),
        "tools": ("test_cards", "test_planner_runs"),
        "state": ("test_stability", "test_many_ranks", f"{LAYOUT}[qwen3_moe fsdp2_ep2]"),
        "build": (
            *(f"tests/unit/test_linear_cross_entropy.py::{name}" for name in OF_LOSS),
            *("test_effects", "test_loads", "test_squared_norm", f"{VALIDATED}[pp2]", f"{ORACLE}[experts]"),
            *(f"{LAYOUT}[{case}]" for case in ("llama3 tp2+float8_rowwise", "llama3 fsdp2_tp2", "qwen3_moe fsdp2_ep2")),
        ),
        "step": (
            *("test_microbatches", "test_many_ranks", f"{VALIDATED}[pp2]", f"{NAN}[one_device]", f"{SDC}[1]"),
            "tests/unit/test_metrics.py::test_the_largest_loss_is_the_mean_of_one_rank_over_its_own_tokens",
            *(f"{ORACLE}[{case}]" for case in ("last_partial_batch", "validation", "accumulation")),
        ),
        "": (
            *("test_squared_norm", "test_loads", "test_stability", "test_many_ranks"),
            *(f"{ORACLE}[{case}]" for case in ("causal", "last_partial_batch", "validation", "accumulation")),
            *(f"{FAULTS}::{FAILED_SAVE}[async-erofs]", f"{LAYOUT}[qwen3_moe fsdp2_ep2]"),
        ),
    },
    "tools/plan": {
        "search": (PRINTED, "test_planner_auto", "test_planner_search"),
        "variants": (PRINTED, "test_planner_auto", "test_planner_search"),
        "legal": (PRINTED, "test_planner_auto", "test_planner_search"),
        "render": (PRINTED, "test_planner_output"),
        "remedies": (PRINTED, "test_planner_output", "test_planner_runs"),
        "validate": ("test_planner_validate",),
        "fit": ("test_activation_auto",),
        "explain": (PRINTED, "test_planner_search"),
        "compare": (PRINTED, "test_planner_runs"),
        "plan": (PRINTED, "test_planner_auto", "test_planner_cli"),
        "watch": ("test_planner_runs",),
        "shapes": (
            *("test_planner_golden", "test_planner_time"),
            *(f"tests/unit/test_planner_search.py::{name}" for name in SHAPED),
        ),
        "out_of_memory": ("test_planner_runs",),
        "": (
            *("test_planner_golden", "test_planner_memory", "test_planner_time", "test_planner_auto"),
            "test_planner_cli",
        ),
    },
    "tools/evaluate": {"": ("test_evaluate", "test_lm_eval_tasks")},
}
"""Tests that a developer of a room runs: files of ``tests/unit``, or words of pytest, by what the paths of the room's
files begin with. They take about 25 CPU seconds at most, on a quiet machine. Of a file, tests with one of the marks
``LEFT_OUT`` do not run, nor those of ``LONG``; of a test that is named here, all rows do.
"""
LEFT_OUT = ("full", "matrix", "slow", "real")
LONG = {
    "test_10000_mutated_manifests_and_headers_raise_nothing_but_checkpoint_errors",
    "test_512_gpus_take_seconds_and_no_torch",
    "test_800_mutated_dcp_checkpoints_raise_nothing_but_checkpoint_errors",
    "test_a_base_that_is_gone_or_another_one_is_refused_with_its_place",
    "test_a_faster_layout_that_is_not_taken_is_explained_in_the_12_lines",
    "test_a_run_of_lora_is_a_model_wherever_one_is_taken",
    "test_a_size_that_is_left_open_by_a_flag_is_the_files",
    "test_a_template_that_fails_names_the_row_and_what_it_said[a long sum]",
    "test_a_template_that_fails_names_the_row_and_what_it_said[time]",
    "test_a_wrong_flag_is_one_message_that_names_it",
    "test_adapters_are_rounded_after_their_logits_are_compared",
    "test_adapters_that_are_not_those_of_the_settings_are_refused",
    "test_an_export_is_of_peft_unless_another_is_asked_for",
    "test_an_impossible_case_names_the_fewest_gpus",
    "test_config_diff_names_the_settings_that_differ",
    "test_everything_found_fits_and_uses_all_gpus[8b on a node]",
    "test_float8_makes_linears_faster_and_leaves_experts_as_they_are",
    "test_lora_is_not_named_where_it_does_not_fit_or_go",
    "test_memory_budget_keeps_the_share_it_is_given",
    "test_models_with_experts_are_planned_by_name_and_flavor_or_in_one_word",
    "test_names_that_lead_outside_open_nothing_there",
    "test_no_bit_changes_when_compiled_and_blocks_share_a_graph[every_second_block-2]",
    "test_no_secret_is_in_a_refusal",
    "test_of_a_model_that_is_not_trainable_no_command_is_printed",
    "test_offloading_is_proposed_where_a_host_may_hold_it_and_nobody_refused",
    "test_spawned_workers_behave_like_forked_ones",
    "test_state_is_exact_activations_within_5_and_the_peak_within_8_percent_of_the_dry_run",
    "test_the_command_that_trains_on_a_prepared_folder_is_whole",
    "test_the_loss_of_32k_tokens_takes_less_than_a_twentieth_of_the_memory",
    "test_the_torchtitan_name_of_a_setting_works_as_a_flag_and_in_toml",
    "test_the_train_command_that_is_printed_trains",
    "test_the_train_command_that_is_printed_works_as_printed",
    "test_weights_can_be_drawn_where_auto_has_no_batch_to_be_decided_for",
    "test_without_transformers_it_says_that_logits_are_not_compared",
}
"""Tests of many CPU seconds, of which shorter ones of the same rooms make the claims too."""
