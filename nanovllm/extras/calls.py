"""ExtraCalls: scores, embeddings and beam search, each made of plain requests. Computes nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanovllm.answers import Logprob
from nanovllm.checks import raise_first
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.extras.beams import BeamSearchParams
from nanovllm.extras.continuations import Pair, encode_continuations, parse_continuations, parse_pairs
from nanovllm.extras.embedding import EmbeddingDefaults
from nanovllm.extras.outputs import BeamSearchOutput, EmbeddingRequestOutput, ScoreOutput
from nanovllm.extras.scoring import beam_search, embedding_output, parse_pooling_params, score_output
from nanovllm.inputs import PromptLike, calls_of_llm, refuse_others, show
from nanovllm.params import SamplingParams
from nanovllm.pooling_params import PoolingParams
from nanovllm.text.prompts import Prompt, parse_prompts


@calls_of_llm
class ExtraCalls(LLMEngine):
    """An engine that scores, embeds and searches."""

    def score(
        self,
        prompt: PromptLike,
        continuations: PromptLike | Iterable[PromptLike],
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[ScoreOutput]:
        """Return the log-probability of each continuation of a prompt, in the order given.

        prompt, continuations: strings, or lists of token ids; `score_pairs` takes many prompts. Nothing is
        generated, only continuations need logits, and shared prefixes are computed once. A prompt and its
        continuation together may have `max_model_len` + 1 tokens. ValueError or TypeError names the prompt or
        the continuation, and the value.
        """
        self._check_returns_logprobs("score()")
        return self._score(parse_continuations(prompt, continuations), use_tqdm)

    def score_pairs(
        self, pairs: Iterable[tuple[PromptLike, PromptLike]], use_tqdm: bool | Callable[..., Any] = True
    ) -> list[ScoreOutput]:
        """As `score`, for pairs (prompt, continuation)."""
        self._check_returns_logprobs("score()")
        return self._score(parse_pairs(pairs), use_tqdm)

    def _score(self, parsed: Sequence[Pair], use_tqdm: bool | Callable[..., Any]) -> list[ScoreOutput]:
        """Score each (prompt, continuation, name of both in errors)."""
        continued = encode_continuations(self.tokenizer, parsed, self._processor.check_length)
        outputs = self._generate(
            [
                Prompt(None, each.token_ids, where=where)
                for each, (_, _, where) in zip(continued, parsed, strict=True)
            ],
            SamplingParams(max_tokens=0, prompt_logprobs=1, detokenize=False),
            use_tqdm,
            "raise",
            lambda request: replace(request, first_scored=continued[request.index].first),
        )
        for output in outputs:
            if output["finish_reason"] == "abort":
                raise RuntimeError(f"{parsed[output.index][2]} was aborted")
        return [score_output(output, each.first) for output, each in zip(outputs, continued, strict=True)]

    def embed(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        on_error: str = "raise",
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return each prompt's hidden state after the final norm in `.outputs.embedding`, in the order given.

        prompts, use_tqdm, on_error, others: as for `generate`.
        pooling: "last" takes the last token's hidden state, "mean" the mean over all tokens. "mean" computes
        all tokens, even those in the prefix cache. normalize: scale the embedding to Euclidean length 1. None
        means what sentence-transformers' files in the model's folder state; without them "last" and True.
        ValueError if they ask for what is not supported, unless `pooling` is given.
        pooling_params: vLLM's, one for all prompts or a list with one for each; what they set replaces
        `normalize`.
        """
        self._lifecycle.check_open()
        refuse_others(ExtraCalls.embed, others)
        stated = self._embedding or EmbeddingDefaults()
        if pooling is None and stated.problem:
            raise ValueError(f"{stated.problem}; pass pooling='last' or 'mean' for hidden states as they are")
        pooling = stated.pooling if pooling is None else pooling
        if pooling not in ("last", "mean"):
            raise ValueError(f"pooling must be 'last' or 'mean', not {pooling!r}")
        normalize = stated.normalize if normalize is None else normalize
        rows = parse_prompts(prompts)
        ends = parse_pooling_params(pooling_params, len(rows), normalize, self.model_config.hidden_size)
        outputs = self._generate(
            rows,
            SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False),
            use_tqdm,
            on_error,
            lambda request: replace(request, first_scored=None, pooling=pooling),
        )
        return [embedding_output(output, pooling == "mean", *ends[output.index]) for output in outputs]

    def beam_search(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: BeamSearchParams,
        use_tqdm: bool | Callable[..., Any] = False,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest continuations of each prompt; see `extras.scoring.beam_search`.

        use_tqdm: show the progress of every round. others: as for `generate`. ValueError if
        2 * `beam_width` is above `max_logprobs`; RuntimeError if the model's logits are not finite.
        """
        self._check_returns_logprobs("beam_search()")
        refuse_others(ExtraCalls.beam_search, others)
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, one for all prompts, not {show(params)}")
        if 2 * params.beam_width > self.config.max_logprobs >= 0:
            raise ValueError(
                f"beam_width={params.beam_width} needs {2 * params.beam_width} logprobs, and max_logprobs="
                f"{self.config.max_logprobs}; make the LLM with a larger max_logprobs (-1: no limit)"
            )
        rows = parse_prompts(prompts)
        raise_first(rows)
        ids = self._processor.encode([row for row in rows if isinstance(row, Prompt)])
        likeliest = SamplingParams(
            temperature=0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=True
        )

        def next_tokens(beams: Sequence[list[int]]) -> list[Mapping[int, Logprob]]:
            outputs = self.generate(beams, likeliest, use_tqdm)
            raise_first([RuntimeError(output.error) for output in outputs if output.error])
            return [(output.outputs[0].logprobs or [{}])[0] for output in outputs]

        ends, longest = self._processor.eos_token_ids, self._executor.room.max_model_len
        return beam_search(ids, params, next_tokens, ends, self._processor.extras.decode, longest)

    def _check_returns_logprobs(self, call: str) -> None:
        """ValueError if `logprobs_mode` returns logits, whose sums mean nothing."""
        self._lifecycle.check_open()
        mode = self.config.logprobs_mode
        if not mode.endswith("logprobs"):
            raise ValueError(
                f"{call} adds up logprobs, and logprobs_mode={mode!r} returns logits; make the LLM with "
                "logprobs_mode='raw_logprobs'"
            )
