"""Which cells of the tests are left to `-m full`, so that a first run of all tests takes minutes.

Of a matrix of several parameters a run has cells that together show each value once (`_cover`). `STAY` names
tests that take seconds a cell, and the ids of the cells that stay; of a test without ids nothing stays. The
engine, ranks and kernels keep a cell for each path. Of hypothesis' examples a run draws a fifth, each time
others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

SHARE_OF_EXAMPLES = 5
SETTINGS = "_hypothesis_internal_use_settings"  # where hypothesis keeps those of a test
STAY: dict[str, dict[str, list[str]]] = {  # by file below tests/ and name
    "cpu/engine/test_deltas.py": {
        "test_joined_deltas_equal_the_whole_output": ["byte_level-in_step", "metaspace-ahead", "llama-tight"],
    },
    "cpu/engine/test_drafts.py": {
        "test_steps_ahead_and_steps_that_wait": ["stop tokens", "penalties"],
    },
    "cpu/engine/test_drafts_texts.py": {
        "test_ranks_and_replicas": ["sizes0"],
    },
    "cpu/engine/test_max_model_len.py": {
        "test_replicas_say_it_once": [],
        "test_the_size_of_the_cache_changes_no_answer": ["longrope", "short longrope", "windows"],
    },
    "cpu/engine/test_memory.py": {
        "test_a_start_on_a_full_device_is_tried_again": ["2"],
    },
    "cpu/engine/test_prefix_parting.py": {
        "test_replicas_compute_each_branch_at_most_once_each": [],
    },
    "cpu/engine/test_profile.py": {
        "test_every_rank_writes_a_trace": ["1"],
    },
    "cpu/engine/test_soak.py": {
        "test_a_million_prompts_are_read_in_bounded_memory": [],
        "test_soak": ["in_step"],
    },
    "cpu/engine/test_update_weights.py": {
        "test_every_family": ["qwen2_moe-1", "mistral-1", "qwen3-1", "qwen2-2"],
    },
    "cpu/engine/test_vllm_processors.py": {
        "test_replicas_have_both": [],
    },
    "cpu/engine/test_vllm_scripts.py": {
        "test_script": [
            "batch file",
            "queue of conversations",
            "chat: continue and tools",
            "data parallel",
            "tensor parallel",
            "engine step by step",
            "structured outputs",
            "structured outputs: structural tag",
            "seeds",
            "engine args",
        ],
    },
    "cpu/jobs/test_jobs_choices.py": {
        "test_the_first_prompts_are_counted_with_their_template": ["more0"],
    },
    "cpu/jobs/test_jobs_faults.py": {
        "test_100_000_rows_with_bad_ones_in_flat_memory": [],
        "test_a_job_goes_on_when_a_replica_is_killed": [],
        "test_a_job_killed_at_ten_random_moments_ends_with_the_same_bytes": ["several inputs, filled in"],
        "test_kill_ctrl_c_and_sigterm": [],
    },
    "cpu/jobs/test_jobs_inputs.py": {
        "test_shards_together_are_one_job": ["sampled0"],
    },
    "cpu/jobs/test_jobs_report.py": {
        "test_the_report_of_a_resumed_job_has_the_totals_of_an_unbroken_one": ["plain"],
    },
    "cpu/kernels/test_cpu_ahead.py": {
        "test_a_start_finds_the_kernels_of_its_model_and_no_others": ["None"],
    },
    "cpu/kernels/test_cpu_checking.py": {
        "test_an_engine_passes_with_checks_and_gives_the_same_answers": [],
    },
    "cpu/kernels/test_cpu_integers.py": {
        "test_a_file_is_used_as_it_is_stored": [
            "Q4_0-qwen3",
            "Q5_1-llama",
            "Q8_0-llama",
            "Q4_K-llama",
            "Q6_K-qwen3",
        ],
        "test_experts_of_a_file_are_used_as_they_are_stored": ["Q4_1", "Q8_0"],
        "test_log_probabilities_are_near_those_of_float32": ["None-bfloat16-0.15"],
        "test_two_ranks_hold_parts_of_experts": ["int4"],
    },
    "cpu/kernels/test_cpu_kernels_int_matmul.py": {
        "test_code_for_other_cpus_has_the_dot_product": ["Q8_0-avx512_bf16-sapphirerapids"],
    },
    "cpu/kernels/test_cpu_kernels_matmul.py": {
        "test_gated_products_have_the_bits_of_two_kernels": [
            "dtype0-weight_dtype0",
            "dtype1-weight_dtype1",
            "dtype2-weight_dtype2",
            "dtype3-weight_dtype3",
        ],
    },
    "cpu/kernels/test_cpu_team.py": {
        "test_a_forked_child_computes": ["idle"],
        "test_a_process_ends_while_its_threads_look_for_work": [],
    },
    "cpu/kernels/test_cpu_threads.py": {
        "test_log_probabilities_depend_neither_on_threads_nor_on_other_prompts": ["None"],
    },
    "cpu/kernels/test_kernels.py": {
        "test_decode_around_block_boundaries": [
            "2q1kv-d64-p16-float32",
            "7q1kv-d80-p48-float16-float8_e4m3fn",
        ],
        "test_decode_around_chunk_boundaries": ["[512, 513, 1]"],
        "test_decode_batches": ["3", "17"],
        "test_extremes_with_filters": [
            "(20, 0.95, 0.0)",
            "(0, 1.0, 0.05)",
            "(5, 0.5, 0.02)",
            "(0, 1e-30, 0.0)",
            "(2147483647, 1.0, 0.0)",
            "(0, 1.0, 0.0)",
        ],
        "test_filters": ["300-torch.bfloat16"],
        "test_filters_keep_all_that_they_should": ["3-4000", "2100-400"],
        "test_prefill_by_tensor_descriptors": ["4-96", "2-64"],
    },
    "cpu/kernels/test_recorded_steps.py": {
        "test_recorded_tokens_are_eager_ones": ["options0", "options2"],
    },
    "cpu/kernels/test_roundings.py": {
        "test_a_family_is_as_near_to_float32_as_transformers": ["gemma3"],
    },
    "cpu/kernels/test_sampling_parameters.py": {
        "test_beside_all_others": ["ahead", "few_slots", "tight_in_step", "uncached"],
    },
    "cpu/kernels/test_windows.py": {
        "test_decode": ["13-None-True", "70-2.0-False"],
        "test_decode_and_prefill_of_other_heads": [
            "2q1kv-d256-p16-float16",
            "8q1kv-d24-p32-bfloat16",
            "7q1kv-d80-p48-float16-float8_e4m3fn",
        ],
        "test_prefill": ["13-None-True", "70-2.0-False"],
        "test_prefill_by_other_tiles": [
            "Tiles(rows=32, columns=32, warps=4, stages=1, described=True, registers=None)"
        ],
        "test_shared_prefixes_with_sinks_and_softcaps": ["16"],
    },
    "cpu/models/test_embedding_models.py": {
        "test_texts_that_sentence_transformers_cuts_off": ["sentence_bert_config.json-max_seq_length"],
    },
    "cpu/models/test_fp8.py": {
        "test_two_ranks_answer_like_one": ["qwen3-channel", "qwen3-fly", "qwen3_moe-block"],
    },
    "cpu/models/test_fp8_experts.py": {
        "test_kernels_of_experts": ["3-128", "20-None"],
    },
    "cpu/models/test_freed_windows.py": {
        "test_a_thousand_tokens_in_a_few_blocks": ["gemma3"],
        "test_an_fp8_cache": ["gemma3", "gemma4-small", "phi3", "gpt_oss", "mistral-window"],
        "test_the_memory_that_one_sequence_keeps": ["gpt-oss-20b-2000-60"],
    },
    "cpu/models/test_gemma4.py": {
        "test_prefill_in_two_halves": ["gemma4-small"],
        "test_the_engine_with_triton_kernels": ["gemma4"],
    },
    "cpu/models/test_gguf_tokenizer.py": {
        "test_sentencepiece": ["mistral_instruct_tokenizer_240323.model.v3"],
    },
    "cpu/models/test_gpt_oss.py": {
        "test_ranks_load_the_same": ["1"],
        "test_the_state_dict_of_transformers_updates": ["1"],
    },
    "cpu/models/test_hybrid_bits.py": {
        "test_answers_have_the_same_bits": [],
    },
    "cpu/models/test_int4_experts.py": {
        "test_kernels": ["1-sizes0-groups0-dtype0", "5-sizes4-groups4-dtype4", "40-sizes6-groups6-dtype6"],
    },
    "cpu/models/test_long_texts.py": {
        "test_no_text_has_fewer_tokens": ["mistral_v1", "mistral_v3"],
    },
    "cpu/models/test_moe.py": {
        "test_the_state_dict_of_transformers_updates": ["qwen3_moe-1", "qwen2_moe-1", "mixtral-1"],
    },
    "cpu/models/test_whole_experts.py": {
        "test_families": ["qwen2_moe-4", "gpt_oss-4", "glm4_moe-2", "gemma4-experts-2", "qwen3_next-2"],
        "test_formats": ["fp8 block-2", "awq-4", "modelopt-2", "int8-4", "gguf Q8_0-2"],
        "test_formats_on_the_fly": ["int8"],
        "test_sizes_that_no_rank_can_split": ["floats", "awq"],
    },
    "cpu/models/test_whole_experts_load.py": {
        "test_a_rank_reads_its_own_experts_alone": ["awq"],
    },
    "cpu/models/test_writers.py": {
        "test_fp8_files_are_read_again": ["laguna", "gemma4-small", "qwen2_moe", "minimax_m2"],
    },
    "cpu/parallel/test_data_parallel.py": {
        "test_every_replica_leaves_a_trace": [],
    },
    "cpu/parallel/test_data_parallel_failures.py": {
        "test_a_process_may_end_without_close": ["forked"],
        "test_a_replica_that_reads_nothing_is_killed": [],
        "test_replicas_of_several_ranks_end_with_a_caller_that_is_killed": [],
    },
    "cpu/parallel/test_data_parallel_weights.py": {
        "test_new_weights_of_replicas_that_sleep": [],
    },
    "cpu/parallel/test_lifecycle.py": {
        "test_a_forked_process_leaves_the_engine_alone": ["1"],
        "test_a_process_may_end_without_close": [
            "an_exception_between_steps-2",
            "forked-1",
            "in_a_cycle-1",
            "within_a_stream-1",
        ],
        "test_threads_take_turns_in_generate": ["1"],
    },
    "cpu/parallel/test_sockets.py": {
        "test_a_caller_that_is_killed_while_its_ranks_meet_leaves_no_folder": [],
    },
    "cpu/parallel/test_stopped.py": {
        "test_a_rank_that_is_stopped_in_any_later_phase": [],
        "test_a_rank_that_is_stopped_while_it_loads": ["StopsBeforeJoining"],
        "test_a_replica_that_is_stopped_in_any_phase": [],
    },
    "cpu/parallel/test_tensor_parallel.py": {
        "test_a_large_step_is_computed_in_halves": ["2"],
        "test_a_worker_that_raises_at_any_call_of_the_start": ["warmup_model"],
        "test_engines_at_once_and_in_turn": [],
        "test_every_schedule_gives_transformers_tokens": ["ample", "chunked_tight", "no_prefix_cache"],
        "test_fault": ["raise_in_step", "kill_in_collective", "kill_rank_0"],
        "test_scripts_need_no_main_guard_and_no_close": ["script"],
    },
    "cpu/report/test_demo_model.py": {
        "test_accuracy_on_problems_never_trained_on": [],
        "test_log_probabilities_show_what_a_quantised_cache_costs": [],
    },
    "cpu/report/test_needs.py": {
        "test_every_gpu_test_of_flash_attn_is_skipped_where_it_is_missing": [],
    },
    "cpu/report/test_notebook.py": {
        "test_notebook": ["1"],
    },
    "cpu/text/test_structured_engine.py": {
        "test_a_mixed_batch_is_its_rows_alone": ["ahead", "tight", "two_ranks"],
        "test_a_thousand_schemas": [],
    },
    "plan/test_freed_blocks.py": {
        "test_more_sequences_fit": ["3-2", "None-3"],
    },
    "test_packaging.py": {
        "test_mypy_finds_the_types_of_a_clone": [],
    },
}


def _values(item: pytest.Item) -> frozenset[tuple[str, int]]:
    """The values of the decorators and fixtures that make this cell, by their identity."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return frozenset()
    left, values = set(callspec.params), set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [each.strip() for each in names.split(",")] if isinstance(names, str) else names
        values |= {(str(names), hash(tuple(id(callspec.params[name]) for name in names)))}
        left -= set(names)
    return frozenset(values | {(name, id(callspec.params[name])) for name in left})


def _cover(cells: list[pytest.Item]) -> set[pytest.Item]:
    """Cells that together have every value; each is the first of those with the most new values."""
    values = {cell: _values(cell) for cell in cells}
    if len(values[cells[0]]) < 2:
        return set(cells)
    seen: set[tuple[str, int]] = set()
    chosen: set[pytest.Item] = set()
    while best := max(cells, key=lambda cell: len(values[cell] - seen)):
        if not values[best] - seen:
            return chosen
        chosen.add(best)
        seen |= values[best]
    raise AssertionError


def left_to_full(items: Iterable[pytest.Item], whole: bool) -> list[pytest.Item]:
    """Those of the collected `items` that only `-m full` runs.

    whole: all tests of each file are among them; then an id that no cell has is a UsageError.
    """
    tests: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(item.iter_markers("full")):
            file = item.nodeid.split("::")[0].removeprefix("tests/")
            tests[file, getattr(item, "originalname", item.name)].append(item)
    left = []
    for (file, name), cells in tests.items():
        stay = STAY.get(file, {}).get(name)
        if stay is None:
            kept = _cover(cells)
            left += [cell for cell in cells if cell not in kept]
            continue
        ids = {cell: cell.name.removeprefix(name).removeprefix("[").removesuffix("]") for cell in cells}
        if whole and (unknown := set(stay) - set(ids.values())):
            raise pytest.UsageError(f"tests/full_cells.py: {file}::{name} has no cell {sorted(unknown)}")
        left += [cell for cell in cells if ids[cell] not in stay]
    return left


def draw_fewer_examples(items: Iterable[pytest.Item]) -> None:
    """Let the collected tests draw a part of the examples that their settings name; `-m full` draws all."""
    for function in {getattr(item, "function", None) for item in items}:
        settings = getattr(function, SETTINGS, None)
        if settings is not None:
            count = -(-settings.max_examples // SHARE_OF_EXAMPLES)
            setattr(function, SETTINGS, type(settings)(settings, max_examples=count))
