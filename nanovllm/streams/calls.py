"""StreamCalls: `stream`, which answers prompts of any number, and yields answers or parts of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress

from nanovllm.answers import RequestOutput
from nanovllm.checks import check_on_error
from nanovllm.device import Device
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import EngineClosedError
from nanovllm.inputs import PromptLike, calls_of_llm
from nanovllm.lifecycle import no_full_collections
from nanovllm.params import SamplingParams
from nanovllm.stats.hint import LengthHint
from nanovllm.streams.ahead import FIRST, Ahead
from nanovllm.streams.reader import PromptReader


@calls_of_llm
class StreamCalls(LLMEngine):
    """An engine that answers streams."""

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
        the caller has taken, and 3 * `max_num_seqs` on a GPU while answers have up to 64 tokens. On a CPU it
        begins with 16 and goes up, so that the first answers come soon.
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

    def _first_at_once(self, num_replicas: int) -> int | None:
        """The requests with which a stream begins; None for as many as there may be."""
        return None if Device(self.config.device).is_cuda else FIRST * num_replicas

    def _stream(self, reader: PromptReader, on_error: str, deltas: bool) -> Iterator[RequestOutput]:
        at_exit = sys.is_finalizing  # then modules have lost their names, and the engine is closed
        size = self.config.data_parallel_size
        ahead = Ahead(self.config.max_num_seqs * size, self._first_at_once(size))
        ready: deque[RequestOutput] = deque()
        hint = LengthHint(self._executor.room.max_model_len)
        with self._calling():
            self._check_idle("stream()")
            self._lifecycle.open_stream(ready)
            self._awaited = ready
        try:
            while not reader.ended or self._executor.num_requests or ready:
                first, prompts, params = reader.read(ahead.portion(self._executor.num_requests))
                with self._calling(ready), no_full_collections():
                    if prompts:
                        hint.asked(first, params)
                        rows = range(first, first + len(prompts))
                        requests, refused = self._check(prompts, params, rows, on_error)
                        self._add(requests, deltas)
                        ready += refused
                    with self._emptied_on_error():
                        ready += self._noted(self._executor.step())
                    hint.answered(ready)
                ahead.answered(ready)
                while ready:
                    yield ready.popleft()
            hint.say()
        finally:
            if not at_exit():
                with suppress(EngineClosedError), self._lifecycle.calling(ready):  # closed: nothing to abort
                    self._executor.clear()
                self._awaited = None
                self._lifecycle.end_stream()
