"""LLM: the API that users call. It adds lists of prompts, streams and conversations to the engine."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.engine.progress import LengthHint, Progress
from nanovllm.engine.tables import answer_columns, open_table, read_prompts
from nanovllm.errors import BadRow, EngineClosedError, raise_first
from nanovllm.extras.scoring import beam_search, embedding_output, parse_pooling_params, score_output
from nanovllm.inputs import OtherNames, PromptLike, check_on_error, given_prompts, refuse_others
from nanovllm.lifecycle import no_full_collections
from nanovllm.outputs import BeamSearchOutput, EmbeddingRequestOutput, Logprob, RequestOutput, ScoreOutput
from nanovllm.parallel.replicas.replicas import Replicas
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import BeamSearchParams, SamplingParams
from nanovllm.text.chat import Conversation
from nanovllm.text.prompts import Prompt, PromptBatch, PromptReader, Request, parse_prompts, show
from nanovllm.text.tokenizer import Pair, encode_continuations, parse_continuations, parse_pairs
from nanovllm.vllm.arguments import BEAM_SEARCH, CHAT, EMBED, GENERATE
from nanovllm.vllm.calls import VLLMCalls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM(OtherNames, VLLMCalls):
    """A loaded model: `LLM(folder_or_hub_id, **options)`; `Config` lists the options.

    >>> with LLM(nanovllm.demo_model_path()) as llm:
    ...     llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16))[0]["text"]
    """

    _replicated = Replicas

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The transformers tokenizer of the engine. ValueError with `skip_tokenizer_init=True`."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer, because of skip_tokenizer_init=True")
        return self.tokenizer

    @property
    def llm_engine(self) -> LLM:
        """This object: vLLM scripts read `llm.llm_engine.model_config`."""
        return self

    @no_full_collections()
    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        prompt_token_ids: PromptLike | Iterable[PromptLike] | None = None,
        on_error: str = "raise",
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer every prompt, in the order given.

        prompts: a string, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`, or a list
        of these. Also generators of these, arrays and tensors (one dimension is one prompt, two dimensions
        are several), and the output of a transformers tokenizer. prompt_token_ids: vLLM's other name.
        sampling_params: one for all prompts, or a list with one for each; None takes
        `get_default_sampling_params()`.
        use_tqdm: whether to show progress of more than one prompt, or a tqdm-like class for it.
        on_error: with "return", a prompt that cannot run, or with wrong parameters in the list or a logits
        processor that raises, gives an output whose `error` says why; all other prompts are answered.
        others: vLLM's further arguments, with neutral values.

        Everything is checked before anything runs: ValueError or TypeError names the index and the value.
        After an exception, Ctrl-C included, the engine is empty and usable. RuntimeError if requests of
        `add_request` are unfinished, because their answers would be lost.
        """
        self._lifecycle.check_open()
        refuse_others(LLM.generate, others, GENERATE)
        prompts = given_prompts(prompts, prompt_token_ids)
        return self._generate(*parse_prompts(prompts), sampling_params, use_tqdm, on_error)

    def _generate(
        self,
        prompts: list[Prompt | BadRow],
        where: list[str],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        on_error: str,
        change: Callable[[Request], Request] = lambda request: request,
    ) -> list[RequestOutput]:
        """As `generate`. where: the name of each prompt in errors. change: applied to each request first."""
        check_on_error(on_error)
        progress = Progress(len(prompts), use_tqdm)
        params = self._params(sampling_params, len(prompts))
        if on_error == "raise":
            raise_first([*prompts, *params])
        with self._calling(), no_full_collections():
            self._check_idle("generate()")
            requests, outputs = self._check(PromptBatch(0, prompts, params, where), on_error, change)
            with self._emptied_on_error(), progress:
                self._add(requests)
                progress.refused(len(outputs))
                outputs += self._finish_all(progress)
        outputs.sort(key=lambda output: output.index)
        hint = LengthHint(self._executor.room.max_model_len)
        hint.asked(0, params)
        hint.answered(outputs)
        hint.say()
        return outputs

    def stream(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        on_error: str = "raise",
        *,
        deltas: bool = False,
    ) -> Iterator[RequestOutput]:
        """Yield the answer to each prompt as soon as it is finished; its `index` is the prompt's index.

        prompts, on_error: as for `generate`; an iterable of any length. Prompts are read and tokenised in
        batches between steps, while the device works, at most 2 * `max_num_seqs` ahead of the outputs that
        the caller has taken.
        sampling_params: one for all prompts, or an iterable with one for each.
        deltas: yield parts of answers. Each output then holds what is new since the previous output of the
        same prompt: `outputs` lists the completions that changed, by `index`, each with its new text and
        tokens. Until the last part `finish_reason` is None and `finished` is False. The last part also has
        values that come once, such as `metrics` and `cumulative_logprob`. The joined parts are the whole
        answer. No part ends within a character, or contains any of a stop string that is cut off. If a
        replica ends after a part was yielded, the last part has an `error`.

        An error of a prompt, an iterable or the engine ends the stream at that point. When the stream ends,
        also by `close()` of the generator, unfinished requests are aborted and the engine is usable. Leaving
        the loop ends a stream that no variable keeps. From the first `next()` on, calls of the same thread
        that run or change the model raise RuntimeError, and those of other threads wait. `abort`, `close`,
        `reset_prefix_cache`, `start_profile`, `stop_profile` and calls that only ask, such as `stats`, work.
        The first `next()` raises RuntimeError if requests of `add_request` are unfinished.
        """
        self._lifecycle.check_open()
        check_on_error(on_error)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(deltas, bool):
            raise TypeError(f"deltas must be True or False, not {deltas!r}")
        return self._stream(PromptReader(prompts, params), on_error, deltas)

    def _stream(self, reader: PromptReader, on_error: str, deltas: bool) -> Iterator[RequestOutput]:
        window = 2 * self.config.max_num_seqs * self.config.data_parallel_size
        batch = max(1, window // 8)
        ready: deque[RequestOutput] = deque()
        hint = LengthHint(self._executor.room.max_model_len)
        with self._calling():
            self._check_idle("stream()")
            self._lifecycle.open_stream(ready)
            self._awaited = ready
        try:
            while not reader.ended or self._executor.load.num_requests or ready:
                has_room = self._executor.load.num_requests + batch <= window
                read = reader.read(batch if has_room else 0)
                with self._calling(ready), no_full_collections():
                    if read.prompts:
                        hint.asked(read.first_index, read.params)
                        requests, refused = self._check(read, on_error)
                        self._add(requests, deltas)
                        ready += refused
                    with self._emptied_on_error():
                        ready += self._counted(self._executor.step()).outputs
                    hint.answered(ready)
                while ready:
                    yield ready.popleft()
            hint.say()
        finally:
            with suppress(EngineClosedError), self._lifecycle.calling(ready):  # closed: nothing to abort
                self._executor.clear()
            self._awaited = None
            self._times.drop_parts()
            self._lifecycle.end_stream()

    @no_full_collections()
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        on_error: str = "raise",
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of `{"role": ..., "content": ...}`, or a list of conversations.

        A content is a string or a list of `{"type": "text", "text": ...}`; the template gets what it takes.
        chat_template: a Jinja template, a file that holds one, or the name of one of the model's templates.
        add_generation_prompt: end the prompt with the start of an assistant message.
        continue_final_message: continue the last message; needs `add_generation_prompt=False`.
        tools: JSON schemas, or functions with types and docstrings, for the template.
        chat_template_kwargs: variables of the template, such as `{"enable_thinking": False}`.
        others: vLLM's further arguments, with neutral values.

        ValueError or TypeError names the conversation and the message, or the argument, before anything runs.
        Otherwise as `generate`.
        """
        self._lifecycle.check_open()
        check_on_error(on_error)
        refuse_others(LLM.chat, others, CHAT, ". Variables of the template go into chat_template_kwargs")
        template = chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        rendered = self._rendered(messages, on_error, *template)
        return self._generate(*rendered, sampling_params, use_tqdm, on_error)

    def map(
        self,
        table: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        prompt: str | None = None,
        messages: str | None = None,
        template: str | None = None,
        chat: bool = False,
        system: str | None = None,
        into: str = "answer",
    ) -> Any:
        """Answer every row of a table; return the same kind of table with the columns of the answers.

        table: a pandas or polars DataFrame, an Arrow table, a Hugging Face Dataset or a list of dictionaries.
        prompt: its column of texts or token ids; messages: its column of conversations; template: a text that
        names columns in braces, such as "Translate: {text}". One of the three.
        chat: make a conversation of each text; system: with this system message.
        into: the column of the answers. Beside it come the columns `{into}_finish_reason` and `{into}_error`:
        a row that cannot be answered has an error, and all others are answered. With `n` above 1, answers and
        reasons are lists.
        """
        opened = open_table(table)
        answer_columns([], into, opened.names)
        rows, are_chats = read_prompts(opened, prompt, messages, template, chat, system)
        good = [index for index, row in enumerate(rows) if not isinstance(row, Exception)]
        if isinstance(sampling_params, Sequence) and len(sampling_params) == len(rows):
            sampling_params = [sampling_params[index] for index in good]
        if good:
            answer: Callable[..., list[RequestOutput]] = self.chat if are_chats else self.generate
            prompts = [rows[index] for index in good]
            outputs = answer(prompts, sampling_params, use_tqdm, on_error="return")
            for index, output in zip(good, outputs, strict=True):
                rows[index] = output
        return opened.extended(answer_columns(rows, into, opened.names))

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
            [Prompt(None, each.token_ids) for each in continued],
            [where for _, _, where in parsed],
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
        refuse_others(LLM.embed, others, EMBED)
        stated = self._embedding
        if pooling is None and stated.problem:
            raise ValueError(f"{stated.problem}; pass pooling='last' or 'mean' for hidden states as they are")
        pooling = stated.pooling if pooling is None else pooling
        if pooling not in ("last", "mean"):
            raise ValueError(f"pooling must be 'last' or 'mean', not {pooling!r}")
        normalize = stated.normalize if normalize is None else normalize
        rows, where = parse_prompts(prompts)
        ends = parse_pooling_params(pooling_params, len(rows), normalize, self.model_config.hidden_size)
        outputs = self._generate(
            rows,
            where,
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
        """Find the likeliest continuations of each prompt; see `engine.scoring.beam_search`.

        use_tqdm: show the progress of every round. others: as for `generate`. ValueError if
        2 * `beam_width` is above `max_logprobs`; RuntimeError if the model's logits are not finite.
        """
        self._check_returns_logprobs("beam_search()")
        refuse_others(LLM.beam_search, others, BEAM_SEARCH)
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, one for all prompts, not {show(params)}")
        if 2 * params.beam_width > self.config.max_logprobs >= 0:
            raise ValueError(
                f"beam_width={params.beam_width} needs {2 * params.beam_width} logprobs, and max_logprobs="
                f"{self.config.max_logprobs}; make the LLM with a larger max_logprobs (-1: no limit)"
            )
        rows, where = parse_prompts(prompts)
        raise_first(rows)
        ids = self._processor.encode([row for row in rows if isinstance(row, Prompt)], where)
        likeliest = SamplingParams(
            temperature=0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=True
        )

        def next_tokens(beams: Sequence[list[int]]) -> list[Mapping[int, Logprob]]:
            outputs = self.generate(beams, likeliest, use_tqdm)
            raise_first([RuntimeError(output.error) for output in outputs if output.error])
            return [(output.outputs[0].logprobs or [{}])[0] for output in outputs]

        ends, longest = self._processor.eos_token_ids, self._executor.room.max_model_len
        return beam_search(ids, params, next_tokens, ends, self._processor.decode, longest)

    def _check_returns_logprobs(self, call: str) -> None:
        """ValueError if `logprobs_mode` returns logits, whose sums mean nothing."""
        self._lifecycle.check_open()
        mode = self.config.logprobs_mode
        if not mode.endswith("logprobs"):
            raise ValueError(
                f"{call} adds up logprobs, and logprobs_mode={mode!r} returns logits; make the LLM with "
                "logprobs_mode='raw_logprobs'"
            )
