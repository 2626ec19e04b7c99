"""What calls return, under the name of vLLM's module. Defines nothing."""

from __future__ import annotations

from nanovllm.answers import CompletionOutput as CompletionOutput
from nanovllm.answers import Logprob as Logprob
from nanovllm.answers import PromptLogprobs as PromptLogprobs
from nanovllm.answers import RequestMetrics as RequestMetrics
from nanovllm.answers import RequestOutput as RequestOutput
from nanovllm.answers import SampleLogprobs as SampleLogprobs
from nanovllm.extras.outputs import BeamSearchOutput as BeamSearchOutput
from nanovllm.extras.outputs import BeamSearchSequence as BeamSearchSequence
from nanovllm.extras.outputs import EmbeddingOutput as EmbeddingOutput
from nanovllm.extras.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
from nanovllm.extras.outputs import PoolingRequestOutput as PoolingRequestOutput
from nanovllm.extras.outputs import ScoreOutput as ScoreOutput
from nanovllm.pooling_heads.outputs import ClassificationOutput as ClassificationOutput
from nanovllm.pooling_heads.outputs import ClassificationRequestOutput as ClassificationRequestOutput
from nanovllm.pooling_heads.outputs import PoolingOutput as PoolingOutput
from nanovllm.pooling_heads.outputs import ScoringOutput as ScoringOutput
from nanovllm.pooling_heads.outputs import ScoringRequestOutput as ScoringRequestOutput
