"""Names of other libraries: vLLM's arguments that this engine does not support, and what to write instead of
names that do not exist here.

A neutral value of an argument is accepted and has no effect; any other value raises an error. When an
argument becomes supported, its name leaves these tables. Knows nothing of our own options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, NoReturn


@dataclass(frozen=True, slots=True)
class Absent:
    """An unsupported argument: its neutral values (None: any value), and what to do instead.

    The first neutral value is vLLM's default. Any value with an advice: a warning says once that it has no
    effect. per_prompt: a list with one value for each prompt is accepted.
    """

    neutral: tuple[Any, ...] | None
    advice: str
    per_prompt: bool = False
    used: Callable[[Any], bool] | None = None  # which other values `vllm/requests.py` uses

    @property
    def default(self) -> Any:
        """The value that reading the argument returns."""
        return None if self.neutral is None else self.neutral[0]

    def allows(self, value: object) -> bool:
        if self.neutral is None or (self.used is not None and self.used(value)):
            return True
        if self.per_prompt and isinstance(value, (list, tuple)):
            return all(each in self.neutral for each in value)
        if isinstance(value, Enum):
            value = value.name
        if not isinstance(value, (bool, int, float, str, list, tuple, dict, set, type(None))):
            return False
        return any(value == neutral for neutral in self.neutral)


def _each(names: str, absent: Absent) -> dict[str, Absent]:
    """The same entry for each of the names."""
    return dict.fromkeys(names.split(), absent)


_NOTHING: tuple[Any, ...] = (None, [], (), {}, "", set())
_LEAVE_OUT = "leave it out"
_ANY_MODEL = "a model does what its files allow; leave it out"
_ANY = Absent(None, "")
_NO_IMAGES = Absent(_NOTHING, "only text is supported; leave it out")
_NO_MEDIA = ({"image": 0}, {"image": 0, "video": 0}, {"image": 0, "video": 0, "audio": 0})
_NO_CACHE = "make the LLM with enable_prefix_caching=False"
_NO_LORA = Absent(_NOTHING, "merge the adapter into the weights first (peft's merge_and_unload)")
_ONE = Absent((1, None), "use tensor_parallel_size or data_parallel_size")
_OFF = Absent((False, None), _LEAVE_OUT)
_NONE = Absent(_NOTHING, _LEAVE_OUT)
_OVERRIDE = "use hf_overrides={%r: ...}"
_SCHEMA = "SamplingParams(structured_outputs=StructuredOutputsParams(json=...))"
_FLAG = """--sampling '{"structured_outputs": {"json": ...}}'"""
_DOWNLOAD = "download what you need with `hf download` and pass the folder"

# These have no visible effect, or only tune an argument that is itself refused.
_ENGINE_ANY = """
    served_model_name use_tqdm_on_load pt_load_map_location disable_log_requests disable_log_stats
    aggregate_engine_logging optimization_level stream_interval
    guided_decoding_backend guided_decoding_disable_fallback
    mm_processor_cache_gb disable_mm_preprocessor_cache disable_chunked_mm_input
    max_parallel_loading_workers enable_sleep_mode swap_space calculate_kv_scales
    max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold num_scheduler_steps
    prefix_caching_hash_algo disable_sliding_window disable_cascade_attn max_seq_len_to_capture
    multi_step_stream_outputs use_v2_block_manager enable_chunked_prefill disable_custom_all_reduce
    performance_mode max_cudagraph_capture_size enable_flashinfer_autotune use_fp64_gumbel
    max_num_scheduled_tokens scheduler_reserve_full_isl watermark disable_hybrid_kv_cache_manager
    kv_sharing_fast_prefill enable_cumem_allocator safetensors_load_strategy
    max_loras max_lora_rank max_cpu_loras lora_dtype lora_extra_vocab_size fully_sharded_loras
    max_prompt_adapters max_prompt_adapter_token lora_target_modules enable_tower_connector_lora
    specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels
    safetensors_prefetch_num_threads safetensors_prefetch_block_size allow_deprecated_quantization
    ir_op_priority moe_backend linear_backend sparse_indexer_topk_backend all2all_backend monokernel
    gdn_prefill_backend kda_prefill_backend kda_decode_backend enable_shm_tensor_arena
    master_addr master_port cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus
    dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
    data_parallel_address data_parallel_rpc_port disable_nccl_for_dp_synchronization dp_sync_interval
    enable_hc_sp enable_batch_sharded_sampling enable_ep_weight_filter expert_placement_strategy eplb_config
    elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
    prefix_cache_retention_interval prefix_match_unit long_prefill_token_threshold_adaptive
    prefill_schedule_interval offload_backend cpu_offload_params offload_num_in_group offload_prefetch_step
    offload_params kv_offloading_backend sleep_mode_backend sleep_mode_offload_cudagraph
    enable_nccl_comm_suspend swa_bounded_replay replayssm_buffer_len use_replayssm
    mamba_config mamba_cache_dtype mamba_block_size mamba_cache_mode mamba_backend
    mamba_ssu_algorithm enable_mamba_shared_prefix_checkpoint enable_mamba_cache_stochastic_rounding
    mamba_cache_philox_rounds language_model_only interleave_mm_strings media_io_kwargs
    mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
    mm_encoder_fp8_scale_save_margin mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
    mm_device_do_normalize skip_mm_profiling video_pruning_rate video_pruning_method ec_manager_config
    enable_mm_processor_stats renderer_num_workers reasoning_parser_plugin reasoning_config
    per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets
    cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details
    jit_monitor_mode jit_monitor_verbose logging_config log_level log_config_file shutdown_timeout
    watchdog_config fault_tolerance_config fail_on_environ_validation enable_trace_replay
"""
_ENGINE_NONE = """
    model_loader_extra_config pooler_config override_pooler_config worker_extension_cls scheduler_cls
    kv_transfer_config kv_events_config cuda_graph_sizes cudagraph_capture_sizes additional_config
    show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
    kv_cache_dtype_skip_layers model_class_overrides
    max_num_queued_reqs max_num_queued_tokens io_processor_plugin watermark_config diffusion_config
    aux_output_config engram_config ec_transfer_config sleep_preserve_parameter_names
"""
_DRAFTS = "speculative_model num_speculative_tokens spec_method spec_model spec_tokens"
_MACHINES = "ranks and replicas are processes of this machine"
_RANKS = "data_parallel_rank data_parallel_start_rank data_parallel_size_local"
_BALANCERS = "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb"
_GUIDED = "guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties"
_STRUCTURED = "set it in each StructuredOutputsParams"
_STRUCTURED_KEYS: dict[str, tuple[type, ...]] = {
    "backend": (str,),
    "disable_fallback": (bool,),
    "disable_any_whitespace": (bool,),
    "disable_additional_properties": (bool,),
    "reasoning_parser": (str, type(None)),
}


def _is_structured(value: Any) -> bool:
    """Whether a `structured_outputs_config` has settings that this engine knows."""
    return isinstance(value, dict) and all(
        isinstance(each, _STRUCTURED_KEYS.get(key, ())) for key, each in value.items()
    )


ENGINE: dict[str, Absent] = {
    **_each(_DRAFTS, Absent(_NOTHING, "pass speculative_config={'method': 'suffix'}")),
    # the model and its files
    "tokenizer_mode": Absent(("auto", "hf", None), "pass a tokenizer that you have made, as tokenizer"),
    "code_revision": Absent(_NOTHING, _DOWNLOAD),
    "hf_config_path": Absent(_NOTHING, "put config.json into the model's folder"),
    **{name: Absent(_NOTHING, _OVERRIDE % name) for name in ("rope_scaling", "rope_theta")},
    "config_format": Absent(("auto", "hf", None), "convert the checkpoint to the Hugging Face format"),
    "model_impl": Absent(("auto", "vllm", None), _LEAVE_OUT),
    "quantization_config": Absent(_NOTHING, "put it into config.json, or use quantization='fp8'"),
    "ignore_patterns": Absent(("original/**/*", ["original/**/*"], *_NOTHING), _DOWNLOAD),
    "chat_template": Absent(_NOTHING, "pass it to chat()"),
    # what the model is used for
    "task": Absent(("auto", "generate", "embed", "classify", "reward", "score", None), _ANY_MODEL),
    "runner": Absent(("auto", "generate", "pooling", None), _ANY_MODEL),
    "convert": Absent(("auto", "none", "embed", None), _ANY_MODEL),
    "logits_processors": Absent(
        _NOTHING,
        "pass a list of subclasses of LogitsProcessor, or of their names as 'module:Class'; functions go to "
        "SamplingParams",
        used=lambda value: (
            isinstance(value, (list, tuple)) and all(isinstance(e, (type, str)) for e in value)
        ),
    ),
    **_each("enable_reasoning ray_workers_use_nsight enable_eplb", _OFF),
    **_each("enable_elastic_ep enable_fault_tolerance return_sampling_mask", _OFF),
    "tokens_only": Absent((False, None), "use skip_tokenizer_init=True"),
    "model_weights": Absent(_NOTHING, "pass the folder as model"),
    **_each("enable_mm_embeds mm_encoder_only", Absent((False, None), _NO_IMAGES.advice)),
    **_each("enable_lora_bias enable_prompt_adapter", _OFF),
    "enable_prompt_embeds": Absent((False, None), "pass strings or token ids"),
    **_each("allowed_local_media_path allowed_media_domains", _NO_IMAGES),
    "mm_processor_kwargs": _NO_IMAGES,
    "limit_mm_per_prompt": Absent((*_NOTHING, *_NO_MEDIA), _NO_IMAGES.advice),
    "structured_outputs_config": Absent(
        _NOTHING, f"it may have {', '.join(_STRUCTURED_KEYS)}; {_STRUCTURED}", used=_is_structured
    ),
    **_each(_GUIDED, Absent((False, None), _STRUCTURED)),
    # devices and memory
    "pipeline_parallel_size": _ONE,
    **_each("decode_context_parallel_size prefill_context_parallel_size", _ONE),
    "distributed_executor_backend": Absent((None, "mp", "uni"), _MACHINES),
    "data_parallel_backend": Absent(("mp", None), _MACHINES),
    "nnodes": Absent((1, None), _MACHINES),
    "node_rank": Absent((0, None), _MACHINES),
    **_each(_RANKS, Absent((None,), _MACHINES)),
    **_each(_BALANCERS, Absent((False, None), _MACHINES)),
    "device_ids": Absent(_NOTHING, "use device='cuda:N', or set CUDA_VISIBLE_DEVICES"),
    "max_num_active_seqs": Absent((None,), "use max_num_seqs"),
    "worker_cls": Absent(("auto", None), _LEAVE_OUT),
    "scheduling_policy": Absent(("fcfs", None), "requests start in the order of their arrival"),
    "cpu_offload_gb": Absent((0, None, False), "use more devices (tensor_parallel_size) or a smaller model"),
    "offload_group_size": Absent((0, None), "use more devices (tensor_parallel_size) or a smaller model"),
    "kv_offloading_size": Absent((None, 0), "use a larger KV cache: more devices, or kv_cache_dtype='fp8'"),
    # how it runs
    "compilation_config": Absent(None, "CUDA graphs are on, and enforce_eager=True turns them off"),
    "kernel_config": Absent(None, "kernels are chosen by shape"),
    "disable_async_output_proc": Absent((False, None), "use async_scheduling=False"),
    "preemption_mode": Absent(("recompute", None), "preempted sequences are recomputed; leave it out"),
    "enable_lora": Absent((False, None), _NO_LORA.advice),
    **_each("qlora_adapter_name_or_path default_mm_loras", _NO_LORA),
    "weight_transfer_config": Absent(_NOTHING, "pass the tensors to update_weights()"),
    "profiler_config": Absent(None, "but its torch_profiler_dir is the folder of start_profile()"),
    "attention_config": Absent(None, "attention_backend chooses the backend"),
    **_each(_ENGINE_ANY, _ANY),
    **_each(_ENGINE_NONE, _NONE),
}


SAMPLING: dict[str, Absent] = {
    "best_of": Absent((None, 1), "use n, and choose among the completions"),
    "use_beam_search": _OFF,
    "length_penalty": Absent((1.0, None), _LEAVE_OUT),
    "early_stopping": _OFF,
    "prompt_logprob_token_ids": Absent(_NOTHING, "use score()"),
    "prompt_logprob_start": Absent((None, 0), "use score()"),
    "routed_experts_prompt_start": Absent((0, None), _LEAVE_OUT),
    "flat_logprobs": Absent((False, None), "read the list of dictionaries: out.outputs[0].logprobs"),
    **_each("spaces_between_special_tokens skip_clone stream_interval output_text_buffer_length", _ANY),
    "watermarking": _OFF,
    "truncate_prompt_tokens": Absent((None,), "cut the prompt's token ids yourself"),
    "guided_decoding": Absent((None,), f"write {_SCHEMA}"),
    "skip_reading_prefix_cache": Absent((None, False), _NO_CACHE),
    "output_kind": Absent((None, "CUMULATIVE", "FINAL_ONLY", 0, 2), "use LLM.stream(deltas=True)"),
}

GENERATE: dict[str, Absent] = {
    "lora_request": Absent((None,), _NO_LORA.advice, per_prompt=True),
    "tokenization_kwargs": Absent(_NOTHING, "use the tokenizer yourself, and pass token ids"),
    "mm_processor_kwargs": _NO_IMAGES,
    "priority": _ANY,  # has no effect in vLLM either, with the neutral scheduling_policy
}

EMBED: dict[str, Absent] = GENERATE | {
    "truncate_prompt_tokens": Absent((None,), "cut the prompt's token ids yourself"),
}

POOLING: dict[str, Absent] = {  # fields of PoolingParams
    "task": Absent((None, "embed"), "pass pooling_task to encode()"),
    **_each("softmax activation", Absent((None,), "use use_activation")),
    **_each("step_tag_id returned_token_ids late_interaction_params late_chunking_params", _NONE),
    "truncate_prompt_tokens": EMBED["truncate_prompt_tokens"],
    "requires_token_ids": _OFF,
    "skip_reading_prefix_cache": SAMPLING["skip_reading_prefix_cache"],
    "extra_kwargs": _NONE,
    "output_kind": Absent((None, "FINAL_ONLY", 2), "what is pooled has no parts; leave it out"),
}

BEAM_SEARCH: dict[str, Absent] = {
    "lora_request": GENERATE["lora_request"],
    **_each("concurrency_limit priority", _ANY),
}

BEAMS: dict[str, Absent] = {  # fields of BeamSearchParams
    "structured_outputs": Absent((None,), "use generate()"),
    "skip_special_tokens": Absent((True, None), "decode the token_ids of a beam yourself"),
    "allowed_token_ids": Absent(_NOTHING, "use generate(), which has them"),
    "watermarking": _OFF,
}

PROMPT: dict[str, Absent] = {  # keys of a prompt that is a dictionary
    **_each("multi_modal_data multi_modal_uuids mm_processor_kwargs", _NO_IMAGES),
    "prompt_embeds": Absent(_NOTHING, "pass a string or token ids"),
    "cache_salt": Absent(_NOTHING, f"call reset_prefix_cache(), or {_NO_CACHE}"),
}


class _Elsewhere(NamedTuple):
    """A name of another library: where it comes from, and what to write here, in Python or as a flag."""

    origin: str
    write: str
    flag: str = ""  # "": the same as in Python


_LOOP = "llm.stream(prompts, params), or a loop over add_request() and step()"
ELSEWHERE: dict[str, _Elsewhere] = {
    # arguments
    "stream": _Elsewhere(
        "OpenAI", "llm.stream(prompts, params)", "nothing: each answer is written when it is finished"
    ),
    **{
        name: _Elsewhere(origin, "SamplingParams(max_tokens=...)", "--sampling max_tokens=VALUE")
        for name, origin in (("max_new_tokens", "transformers"), ("max_completion_tokens", "OpenAI"))
    },
    "do_sample": _Elsewhere(
        "transformers",
        "SamplingParams(temperature=0) for greedy answers",
        "--sampling temperature=0 for greedy answers",
    ),
    "num_beams": _Elsewhere(
        "transformers", "llm.beam_search(prompts, BeamSearchParams(beam_width=..., max_tokens=...))"
    ),
    "num_return_sequences": _Elsewhere("transformers", "SamplingParams(n=...)", "--sampling n=VALUE"),
    "repeat_penalty": _Elsewhere(
        "llama.cpp",
        "SamplingParams(repetition_penalty=...)",
        "--sampling repetition_penalty=VALUE",
    ),
    "stop_sequences": _Elsewhere(
        "Text Generation Inference", "SamplingParams(stop=[...])", """--sampling '{"stop": ["..."]}'"""
    ),
    "response_format": _Elsewhere("OpenAI", _SCHEMA, _FLAG),
    "batch_size": _Elsewhere(
        "transformers", "LLM(model, max_num_seqs=...), if at all", "--max-num-seqs VALUE"
    ),
    "device_map": _Elsewhere(
        "transformers", "LLM(model, tensor_parallel_size=...)", "--tensor-parallel-size VALUE"
    ),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit"),
        _Elsewhere(
            "transformers",
            "LLM(model, quantization='fp8'), on a CPU 'int8' or 'int4', or load a quantised checkpoint",
            "--quantization fp8, on a CPU int8 or int4, or load a quantised checkpoint",
        ),
    ),
    "n_ctx": _Elsewhere("llama.cpp", "LLM(model, max_model_len=...)", "--max-model-len VALUE"),
    "n_gpu_layers": _Elsewhere(
        "llama.cpp", "LLM(model, device='cuda') or device='cpu' for all layers", "--device cuda or cpu"
    ),
    "guided_decoding": _Elsewhere("vLLM", _SCHEMA, _FLAG),
    **{
        f"guided_{kind}": _Elsewhere("vLLM", _SCHEMA.replace("json", kind), _FLAG.replace("json", kind))
        for kind in ("json", "regex", "choice", "grammar")
    },
    "json_schema": _Elsewhere("llama.cpp", _SCHEMA, _FLAG),
    # classes
    "GuidedDecodingParams": _Elsewhere(
        "vLLM", "StructuredOutputsParams, with the same json, regex, choice and grammar"
    ),
    "AsyncEngineArgs": _Elsewhere("vLLM", "LLM(model, ...) with the same options"),
    "AsyncLLMEngine": _Elsewhere("vLLM", _LOOP),
    "AsyncLLM": _Elsewhere("vLLM", _LOOP),
    "LoRARequest": _Elsewhere("vLLM", "the adapter into the weights, with peft's merge_and_unload()"),
    "KVTransferConfig": _Elsewhere(
        "vLLM", "LLM(model, data_parallel_size=...); a KV cache stays in its engine"
    ),
    "PoolerConfig": _Elsewhere("vLLM", "PoolingParams, or the folder's sentence-transformers files"),
    "PromptType": _Elsewhere("vLLM", "str, list[int], TextPrompt or TokensPrompt"),
    # methods and attributes
    "get_stats": _Elsewhere("vLLM", "llm.stats()"),
    "from_pretrained": _Elsewhere("transformers", "LLM(folder_or_hub_id)"),
    "__call__": _Elsewhere("transformers", "llm.generate(prompts, params)"),
    "text": _Elsewhere("CompletionOutput", "out.outputs[0].text, or out['text']"),
    # commands
    "serve": _Elsewhere("vLLM", "nanovllm run for a file of prompts; there is no server"),
    "chat": _Elsewhere(
        "vLLM", "llm.chat(messages) in Python, or nanovllm run for a file with a column of messages"
    ),
}


def elsewhere(name: str, as_flag: bool = False) -> str | None:
    """One sentence on what to write instead of a name of another library; None for any other name."""
    known = ELSEWHERE.get(name)
    if known is None:
        return None
    return f"that name is from {known.origin}; write {(as_flag and known.flag) or known.write}"


def missing_in(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module. Of another library's class it says what to write."""

    def __getattr__(name: str) -> NoReturn:
        message = f"module {module!r} has no attribute {name!r}"
        if name[0].isupper() and (write := elsewhere(name)) is not None:
            raise ImportError(f"{message}; {write}")  # an import drops an AttributeError's message
        raise AttributeError(message)

    return __getattr__


CHAT: dict[str, Absent] = GENERATE | {
    "chat_template_content_format": Absent(("auto", None), "each template gets the forms that it takes"),
}


# The arguments by the call or class that takes them.
ARGUMENTS: dict[str, dict[str, Absent]] = {
    "LLM": ENGINE,
    "EngineArgs": ENGINE,
    "SamplingParams": SAMPLING,
    "PoolingParams": POOLING,
    "BeamSearchParams": BEAMS,
    "prompt": PROMPT,
    **dict.fromkeys(("LLM.generate", "LLM.enqueue", "LLM.add_request"), GENERATE),
    **dict.fromkeys(("LLM.chat", "LLM.enqueue_chat"), CHAT),
    **dict.fromkeys(("LLM.embed", "LLM.encode", "LLM.classify", "LLM.reward", "LLM.score"), EMBED),
    "LLM.beam_search": BEAM_SEARCH,
}
