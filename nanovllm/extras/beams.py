"""BeamSearchParams: the parameters of `LLM.beam_search`, checked. `extras/scoring.py` has the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.checks import check_bool, check_float, check_int
from nanovllm.extras.structured_outputs import StructuredOutputsParams
from nanovllm.names import KnownFields, others_of, refuse_unknown


@dataclass(frozen=True)
class BeamSearchParams(KnownFields):
    """The parameters of `LLM.beam_search`, as in vLLM.

    beam_width: the number of continuations to keep; each considers twice as many next tokens.
    max_tokens: the maximum number of tokens to generate.
    length_penalty: the sum of logprobs is divided by (generated tokens) ** length_penalty; above 0 favours
    long sequences. An end-of-sequence token counts.
    temperature: for compatibility with vLLM, no effect; logprobs come from the model's own logits.
    structured_outputs: must be None. skip_special_tokens, allowed_token_ids, watermarking: vLLM's, with
    neutral values.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: Sequence[int] | None = None
    watermarking: bool | None = None

    def __post_init__(self) -> None:
        others = {name: getattr(self, name) for name in others_of("BeamSearchParams")}
        refuse_unknown("BeamSearchParams", others, ())
        check_int("beam_width", self.beam_width, 1, "an integer of at least 1")
        check_int("max_tokens", self.max_tokens, 1, "an integer of at least 1")
        for name in ("temperature", "length_penalty"):
            check_float(name, getattr(self, name), "a finite number")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            check_bool(name, getattr(self, name))
