"""The parameters of requests under the names of vLLM's module. Defines none."""

from __future__ import annotations

from nanovllm.checks import MAX_N as MAX_N
from nanovllm.checks import SEED_LIMIT as SEED_LIMIT
from nanovllm.checks import Default as Default
from nanovllm.extras.beams import BeamSearchParams as BeamSearchParams
from nanovllm.extras.repetitions import RepetitionDetectionParams as RepetitionDetectionParams
from nanovllm.extras.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
from nanovllm.params import SamplingParams as SamplingParams
from nanovllm.vllm.arguments import missing_in
from nanovllm.vllm.names import RequestOutputKind as RequestOutputKind

__getattr__ = missing_in(__name__)
