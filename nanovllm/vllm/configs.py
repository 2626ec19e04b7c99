"""Settings under the names of vLLM's classes: those that scripts pass to `LLM`, and `VllmConfig`, which they
read of an engine, as in `llm.llm_engine.vllm_config.cache_config.block_size`. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.names import nearest


class _Settings(dict[str, Any]):
    """A dictionary of settings, also read as attributes: `CompilationConfig(mode=3)` is `{"mode": 3}`."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)

    def __getattr__(self, name: str) -> Any:
        """A setting. AttributeError for one that was not passed: vLLM's defaults are not known here."""
        if name not in self:
            message = f"{type(self).__name__} has no {name!r}, because it was not passed"
            raise AttributeError(message, name=name, obj=self)
        return self[name]


class CompilationConfig(_Settings):
    """For `LLM(compilation_config=...)`, which has no effect, as a warning says."""


class AttentionConfig(_Settings):
    """For `LLM(attention_config=...)`, which has no effect, as a warning says."""


class KernelConfig(_Settings):
    """For `LLM(kernel_config=...)`, which has no effect, as a warning says."""


class ProfilerConfig(_Settings):
    """For `LLM(profiler_config=...)`, of which `torch_profiler_dir` is the folder of `start_profile`."""


class StructuredOutputsConfig(_Settings):
    """For `LLM(structured_outputs_config=...)`: a `backend` has no effect."""


def profile_folder(profiler_config: object) -> str | None:
    """The folder of `start_profile` that an option names: a dictionary or another object."""
    if isinstance(profiler_config, Mapping):
        return profiler_config.get("torch_profiler_dir")
    return getattr(profiler_config, "torch_profiler_dir", None)


class _Part:
    """Some settings under vLLM's names. AttributeError of another name lists those that there are."""

    def __init__(self, of: str, **values: Any) -> None:
        self._of = of
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        known = [each for each in vars(self) if not each.startswith("_")]
        raise AttributeError(f"vllm_config.{self._of} has no {name!r}; {nearest(name, known)}")


@dataclass(frozen=True)
class VllmConfig:
    """The settings of a running engine. None: a part of vLLM that this engine does not have."""

    model_config: Any
    cache_config: Any
    scheduler_config: Any
    parallel_config: Any
    device_config: Any
    speculative_config: None = None
    lora_config: None = None
    kv_transfer_config: None = None


def view_of(config: Any, model_config: Any, room: Any, vocab_size: int) -> VllmConfig:
    """The settings of an engine. room: the executor's. vocab_size: the tokens that may be drawn."""
    ranks, replicas = config.tensor_parallel_size, config.data_parallel_size
    labels = () if model_config.head is None else model_config.head.labels
    return VllmConfig(
        model_config=_Part(
            "model_config",
            model=str(config.model),
            tokenizer=config.tokenizer,
            dtype=model_config.dtype,
            seed=config.seed,
            max_model_len=room.max_model_len,
            max_logprobs=config.max_logprobs,
            logprobs_mode=config.logprobs_mode,
            enforce_eager=config.enforce_eager,
            quantization=config.quantization,
            get_vocab_size=lambda: vocab_size,
            hf_config=_Part(
                "model_config.hf_config",
                architectures=[model_config.architecture],
                id2label=dict(enumerate(labels)),
                num_labels=len(labels),
            ),
        ),
        cache_config=_Part(
            "cache_config",
            block_size=room.block_size,
            num_gpu_blocks=room.num_blocks,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_prefix_caching=config.enable_prefix_caching,
            cache_dtype=config.kv_cache_dtype,
        ),
        scheduler_config=_Part(
            "scheduler_config",
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=room.max_model_len,
            async_scheduling=config.async_scheduling,
            enable_chunked_prefill=True,
        ),
        parallel_config=_Part(
            "parallel_config",
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            data_parallel_size=replicas,
            world_size=ranks,
        ),
        device_config=_Part("device_config", device=config.device),
    )
