"""EngineArgs and its flags: every argument of vLLM 0.33 works, is without effect, or is refused by name."""

from __future__ import annotations

import argparse
import copy
import logging
import pickle
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from nanovllm import (
    AttentionConfig,
    CompilationConfig,
    EngineArgs,
    FlexibleArgumentParser,
    KernelConfig,
    ProfilerConfig,
    SamplingParams,
    StructuredOutputsConfig,
)
from nanovllm.config import Config
from nanovllm.vllm.arguments import ENGINE, SAMPLING
from nanovllm.vllm.engine_args import RENAMED

ENGINE_NAMES = """
    additional_config aggregate_engine_logging all2all_backend allow_deprecated_quantization
    allowed_local_media_path allowed_media_domains async_scheduling attention_backend attention_config
    aux_output_config block_size code_revision collect_detailed_traces compilation_config config_format
    convert cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params
    cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets data_parallel_address
    data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port data_parallel_size
    data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold dbo_prefill_token_threshold
    dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate decode_context_parallel_size
    default_mm_loras device_ids diffusion_config disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
    disable_nccl_for_dp_synchronization disable_sliding_window distributed_executor_backend
    distributed_timeout_seconds download_dir dp_sync_interval dtype ec_manager_config ec_transfer_config
    elastic_ep_max_dp_size enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator
    enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
    enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing
    enable_logging_iteration_details enable_lora enable_mamba_cache_stochastic_rounding
    enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
    enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend enable_prefix_caching
    enable_prompt_embeds enable_return_routed_experts enable_shm_tensor_arena enable_sleep_mode
    enable_tower_connector_lora enable_trace_replay enforce_eager engram_config eplb_config
    expert_placement_strategy fail_on_environ_validation fault_tolerance_config fully_sharded_loras
    gdn_prefill_backend generation_config gpu_memory_utilization hf_config_path hf_overrides hf_token
    ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_mode
    jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype
    kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample
    kv_events_config kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill kv_transfer_config
    language_model_only limit_mm_per_prompt linear_backend load_format log_config_file log_level
    logging_config logits_processors logprobs_mode long_prefill_token_threshold
    long_prefill_token_threshold_adaptive lora_dtype lora_target_modules mamba_backend mamba_block_size
    mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype
    mamba_ssu_algorithm master_addr master_port max_cpu_loras max_cudagraph_capture_size max_logprobs
    max_lora_cls_labels max_lora_rank max_loras max_model_len max_num_active_seqs max_num_batched_tokens
    max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs
    max_parallel_loading_workers media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
    mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm
    mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
    mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model model_class_overrides model_impl
    model_loader_extra_config model_weights moe_backend monokernel nnodes node_rank num_gpu_blocks_override
    numa_bind numa_bind_cpus numa_bind_nodes offload_backend offload_group_size offload_num_in_group
    offload_params offload_prefetch_step optimization_level otlp_traces_endpoint override_generation_config
    per_request_spec_decode_metrics performance_mode pipeline_parallel_size pooler_config
    prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo prefix_match_unit profiler_config pt_load_map_location quantization
    quantization_config ray_workers_use_nsight reasoning_config reasoning_parser reasoning_parser_plugin
    renderer_num_workers replayssm_buffer_len return_sampling_mask revision runner safetensors_load_strategy
    safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_cls
    scheduler_reserve_full_isl scheduling_policy seed served_model_name show_hidden_metrics_for_version
    shutdown_timeout skip_mm_profiling skip_tokenizer_init sleep_mode_backend sleep_mode_offload_cudagraph
    sleep_preserve_parameter_names sparse_indexer_topk_backend spec_method spec_model spec_tokens
    specialize_active_lora speculative_config stream_interval structured_outputs_config swa_bounded_replay
    tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision tokens_only trust_remote_code
    ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load video_pruning_method video_pruning_rate
    watchdog_config watermark watermark_config weight_transfer_config worker_cls worker_extension_cls
    chat_template
"""  # of vLLM 0.33's EngineArgs and LLM
SAMPLING_NAMES = """
    allowed_token_ids bad_words detokenize extra_args flat_logprobs frequency_penalty ignore_eos
    include_stop_str_in_output logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens n
    output_kind output_text_buffer_length presence_penalty prompt_logprob_start prompt_logprob_token_ids
    prompt_logprobs repetition_detection repetition_penalty routed_experts_prompt_start seed skip_clone
    skip_reading_prefix_cache skip_special_tokens spaces_between_special_tokens stop stop_token_ids
    stream_interval structured_outputs temperature thinking_token_budget top_k top_p trace_decode_token_ids
    watermarking
"""
OPTIONS = (Path(__file__).parent.parent.parent / "docs/options.md").read_text()
OWN = {each.name for each in fields(Config)}


def parsed(*flags: str, **defaults: Any) -> dict[str, Any]:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="model", **defaults)
    return vars(parser.parse_args(flags))


def test_every_argument_of_vllm_is_of_one_kind() -> None:
    assert set(ENGINE_NAMES.split()) <= OWN | RENAMED.keys() | ENGINE.keys()
    assert set(SAMPLING_NAMES.split()) <= SamplingParams.__dataclass_fields__.keys() | SAMPLING.keys()


@pytest.mark.parametrize("of", ["LLM", "SamplingParams"])
def test_the_page_names_every_argument_with_its_kind(of: str) -> None:
    """Those that are refused are in the section after it, see test_docs.py."""
    text = OPTIONS.split("\n## vLLM's arguments, in three kinds\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (.+) \|$", text, re.M)
    named = {kind: set(re.findall(r"`(\w+)`", cell)) for owner, kind, cell in rows if owner == of}
    table, own = (
        (ENGINE, OWN | RENAMED.keys())
        if of == "LLM"
        else (SAMPLING, set(SamplingParams.__dataclass_fields__))
    )
    assert named["no effect"] == {name for name, absent in table.items() if absent.neutral is None}
    names = {*ENGINE_NAMES.split()} if of == "LLM" else {*SAMPLING_NAMES.split()}
    assert named["works"] == own & names | {name for name in table if table[name].used is not None}


def test_defaults_are_those_of_llm() -> None:
    assert Config.from_kwargs(**asdict(EngineArgs("model"))) == Config("model")
    assert Config.from_kwargs(**parsed()) == Config("model")
    args = EngineArgs(model="model", max_model_len=64, tensor_parallel_size=2, block_size=16, swap_space=4)
    assert Config.from_kwargs(**vars(args)) == Config(
        "model", max_model_len=64, tensor_parallel_size=2, kvcache_block_size=16
    )
    assert pickle.loads(pickle.dumps(args)) == args == copy.deepcopy(args) != EngineArgs("model")


def test_arguments_that_ask_for_more_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"^EngineArgs\(\): pipeline_parallel_size=2 is not supported; use tensor"
    ):
        EngineArgs(model="model", pipeline_parallel_size=2)
    with pytest.raises(
        TypeError, match=r"EngineArgs\(\) got an unknown argument 'max_modellen'; did you mean 'max_"
    ):
        EngineArgs(model="model", max_modellen=5)
    args = EngineArgs(model="model")
    args.enable_lora = True
    with pytest.raises(ValueError, match=r"^LLM\(\): enable_lora=True is not supported; merge the adapter"):
        Config.from_kwargs(**vars(args))
    with pytest.raises(ValueError, match=r"speculative_config: method must be .* not 'mtp'"):
        Config.from_kwargs(**parsed("--speculative-config", '{"method": "mtp"}'))


def test_settings_for_tuning_have_no_effect_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    tuned = {"compilation_config": {"mode": 3}, "attention_config": {"backend": "FLASHINFER"}}
    with caplog.at_level(logging.WARNING):
        assert Config.from_kwargs("model", **tuned, kernel_config={}, profiler_config=None) == Config("model")
    assert caplog.messages == [
        "compilation_config={'mode': 3} has no effect here; CUDA graphs are on, and enforce_eager=True turns "
        "them off",
        "attention_config={'backend': 'FLASHINFER'} has no effect here; attention_backend chooses the "
        "backend",
    ]


def test_flags() -> None:
    flags = [
        "--max_model_len",
        "64",
        "-tp=2",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--dtype",
        "half",
    ]
    flags += ["--swap-space", "4", "--disable-log-stats", "--enable-chunked-prefill", "-O2", "--seed=7"]
    flags += [
        "--hf-overrides.rope_theta",
        "5",
        "--hf_overrides.rope_scaling.factor=2.5",
        "--revision",
        "0123",
    ]
    assert Config.from_kwargs(**parsed(*flags)) == Config(
        "model",
        max_model_len=64,
        tensor_parallel_size=2,
        enforce_eager=True,
        enable_prefix_caching=False,
        dtype="float16",
        seed=7,
        hf_overrides={"rope_theta": 5, "rope_scaling": {"factor": 2.5}},
        revision="0123",
    )
    assert parsed("--async-scheduling")["async_scheduling"] is True
    assert parsed("--no-async-scheduling")["async_scheduling"] is False
    assert parsed("--optimization-level", "0")["optimization_level"] == 0
    assert parsed("-O", "3")["optimization_level"] == 3
    assert parsed("-cc.mode=3", "-cc.backend", "x")["compilation_config"] == {"mode": 3, "backend": "x"}
    added = parsed("--hf-overrides.names+", "a,b", "--hf-overrides.names+=-c", "--hf-overrides.n+=3")
    assert added["hf_overrides"] == {"names": ["a", "b", "-c"], "n": [3]}
    assert parsed("--disable-prefix-caching")["enable_prefix_caching"] is False
    assert parsed("--disable_prefix_caching", "--enable-prefix-caching")["enable_prefix_caching"] is True
    own = FlexibleArgumentParser()
    own.add_argument("--disable-logs", action=argparse.BooleanOptionalAction, default=True)
    assert own.parse_args(["--enable-logs"]).disable_logs is False
    assert parsed("--device-memory-utilization", "0.4")["gpu_memory_utilization"] == 0.4
    assert parsed("--hf-token")["hf_token"] is True and parsed("--hf-token", "None")["hf_token"] == "None"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("10k", 10_000), ("3K", 3072), ("10.2k", 10_200), ("1m", 10**6), ("2M", 2**21), ("1G", 2**30)),
        *(("4096", 4096), ("AUTO", "auto"), ("None", None), ("1a", "1a")),
    ],
)
def test_sizes_may_have_units(text: str, size: object) -> None:
    for flag in ("--max-model-len", "--max-num-batched-tokens", "--kv-cache-memory-bytes"):
        assert parsed(flag, text)[flag[2:].replace("-", "_")] == size


@pytest.mark.parametrize("text", ["1.5K", "0.0001k"])
def test_a_part_of_a_token_is_no_size(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--max-model-len", text)
    assert f"argument --max-model-len: '{text}' is no whole number" in capsys.readouterr().err


def test_a_script_adds_its_own_flags() -> None:
    parser = FlexibleArgumentParser(description="batch")
    EngineArgs.add_cli_args(parser)
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int)
    parser.add_argument("--num_prompts", type=int, deprecated=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("-t", type=float)
    assert parser.parse_args(["-t.5"]).t == 0.5
    args = parser.parse_args(["--model", "5", "--num_prompts", "3", "--max_tokens=9", "--", "--max_tokens"])
    assert (args.num_prompts, args.max_tokens, args.words) == (3, 9, ["--max_tokens"])
    assert EngineArgs.from_cli_args(args) == EngineArgs(model="5")
    assert "--tensor-parallel-size" in parser.format_help() and "mamba-block" not in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-such-flag"])


def test_flags_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(
        "max_model_len: 10k\nenforce-eager: true\nenable_prefix_caching: false\nno_such_switch: false\n"
        "hf-overrides:\n  rope_theta: 5\nseed: 7\n"
    )
    found = parsed("--seed", "9", "--config", str(path), "--max-num-seqs", "3")
    assert Config.from_kwargs(**found) == Config(
        "model",
        max_model_len=10_000,
        enforce_eager=True,
        enable_prefix_caching=False,
        hf_overrides={"rope_theta": 5},
        seed=9,  # the command line's, although it stands before --config
        max_num_seqs=3,
    )
    assert "config" not in found and parsed(f"--config={path}")["seed"] == 7
    parser = FlexibleArgumentParser()
    run = parser.add_subparsers(dest="command").add_parser("run")
    run.add_argument("--seed", type=int)
    run.add_argument("--words", nargs="*")
    path.write_text("seed: 7\nwords: [a, b]\n")
    args = parser.parse_args(["run", "--config", str(path)])
    assert (args.command, args.seed, args.words) == ("run", 7, ["a", "b"])


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("engine.json", "{}", ValueError, r"engine\.json must be a file that ends in \.yaml or \.yml"),
        ("engine.yml", "- 5", ValueError, r"must hold lines of the form 'flag: value'"),
        ("engine.yml", "seed: [", ValueError, r"engine\.yml is no YAML"),
        ("engine.yml", None, FileNotFoundError, r"engine\.yml"),
    ],
)
def test_a_file_of_flags_that_cannot_be_read(
    name: str, text: str | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        parsed("--config", str(tmp_path / name))


@pytest.mark.parametrize("flags", [["--config"], ["--config", "a.yaml", "--config=b.yaml"]])
def test_one_file_of_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*flags)
    assert "--config" in capsys.readouterr().err.splitlines()[-1]


def test_settings_as_objects(caplog: pytest.LogCaptureFixture) -> None:
    tuned = {
        "compilation_config": CompilationConfig(mode=3),
        "attention_config": AttentionConfig(backend="X"),
    }
    tuned |= {"kernel_config": KernelConfig(), "profiler_config": ProfilerConfig(torch_profiler_dir="traces")}
    with caplog.at_level(logging.WARNING):
        args = EngineArgs(
            model="model", structured_outputs_config=StructuredOutputsConfig(backend="auto"), **tuned
        )
        assert Config.from_kwargs(**vars(args)) == Config("model")
    assert "compilation_config={'mode': 3} has no effect here; CUDA graphs are on" in caplog.messages[0]
    assert args.compilation_config.mode == 3 and args.profiler_config.torch_profiler_dir == "traces"
    with pytest.raises(AttributeError, match="KernelConfig has no 'mode', because it was not passed"):
        _ = args.kernel_config.mode
    with pytest.raises(
        ValueError, match=r"structured_outputs_config=.* is not supported; it may have backend, "
    ):
        EngineArgs(model="model", structured_outputs_config=StructuredOutputsConfig(enable_in_reasoning=True))
    assert copy.deepcopy(args) == args == pickle.loads(pickle.dumps(args))


def test_the_parser_is_in_vllms_module() -> None:
    import nanovllm.utils

    assert nanovllm.utils.FlexibleArgumentParser is FlexibleArgumentParser
    with pytest.raises(
        ImportError, match=r"'nanovllm\.utils' has no attribute 'LoRARequest'; that name is from"
    ):
        from nanovllm.utils import LoRARequest  # noqa: F401
