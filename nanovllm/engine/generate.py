"""Generation: lists of prompts and streams of them, each answered by steps of the engine.

Checks all before anything runs, and leaves the engine empty. Reads no conversation and no table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.progress import LengthHint, Progress
from nanovllm.errors import BadRow, EngineClosedError, raise_first
from nanovllm.inputs import PromptLike, calls_of_llm, check_on_error, given_prompts, refuse_others
from nanovllm.lifecycle import no_full_collections
from nanovllm.outputs import RequestOutput
from nanovllm.params import SamplingParams
from nanovllm.text.prompts import Prompt, PromptBatch, PromptReader, Request, parse_prompts


@calls_of_llm
class Generation(LLMEngine):
    """An engine that answers many prompts in one call."""

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
        refuse_others(Generation.generate, others)
        with no_full_collections():
            rows, where = parse_prompts(given_prompts(prompts, prompt_token_ids))
            return self._generate(rows, where, sampling_params, use_tqdm, on_error)

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
