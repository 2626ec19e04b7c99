"""nanovllm: offline batch inference for language models. `from nanovllm import LLM, SamplingParams`.

Importing this is cheap: torch is imported when `LLM` is first used, transformers when a tokenizer is loaded.
"""

from __future__ import annotations

from nanovllm.jobs import early  # noqa: F401 (before all that takes time)

# isort: split
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import EngineClosedError, KVCacheMemoryError, ModelLoadError, NanoVLLMError, WorkerError
from nanovllm.extras.structured_outputs import StructuredOutputsParams
from nanovllm.inputs import TextPrompt, TokensPrompt
from nanovllm.metrics import Counter, Gauge, Histogram, Metric, Vector
from nanovllm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    ScoreOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from nanovllm.vllm.arguments import missing_in
from nanovllm.vllm.configs import (
    AttentionConfig,
    CompilationConfig,
    KernelConfig,
    ProfilerConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from nanovllm.vllm.engine_args import EngineArgs, FlexibleArgumentParser
from nanovllm.vllm.processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    RequestLogitsProcessor,
)

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.llm import LLM as LLMEngine

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AttentionConfig",
    "BatchUpdate",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompilationConfig",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineClosedError",
    "FlexibleArgumentParser",
    "Gauge",
    "Histogram",
    "KVCacheMemoryError",
    "KernelConfig",
    "LLMEngine",
    "LogitsProcessor",
    "Logprob",
    "Metric",
    "ModelLoadError",
    "MoveDirectionality",
    "NanoVLLMError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "ProfilerConfig",
    "RequestLogitsProcessor",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoreOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsConfig",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "VllmConfig",
    "WorkerError",
    "demo_model_path",
]


def demo_model_path() -> str:
    """The folder of the small model that comes with this package; its README.md says what it can do."""
    return str(Path(__file__).parent / "demo_model")


def __getattr__(name: str) -> Any:
    if name in ("LLM", "LLMEngine"):
        from nanovllm.llm import LLM

        return LLM
    return missing_in(__name__)(name)
