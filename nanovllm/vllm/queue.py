"""QueueCalls: one request at a time, in steps that the caller makes, as in nano-vLLM and vLLM."""

from __future__ import annotations

from nanovllm.answers import RequestOutput
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.inputs import PromptLike, calls_of_llm
from nanovllm.params import SamplingParams
from nanovllm.text.prompts import parse_prompt


@calls_of_llm
class QueueCalls(LLMEngine):
    """An engine that advances when it is told to."""

    def add_request(self, prompt: PromptLike, sampling_params: SamplingParams | None = None) -> str:
        """Queue one prompt and return its request id. ValueError or TypeError if it can never run."""
        params = self._params(sampling_params, 1)
        with self._calling():
            self._add(self._check([parse_prompt(prompt, "the prompt")], params)[0])
            return str(self._next_id - 1)

    def step(self) -> list[RequestOutput]:
        """Advance all requests and return the outputs of those that finished.

        A step is launched while the previous one still runs, so an empty list does not mean the end: call
        `is_finished`. If a step fails, all unfinished requests are dropped and the engine is empty.
        """
        with self._calling(), self._emptied_on_error():
            return self._noted(self._executor.step())

    def is_finished(self) -> bool:
        """Whether no request is waiting or running."""
        self._lifecycle.check_open()
        return not self._executor.num_requests

    def abort(self, request_id: str | int) -> RequestOutput | None:
        """End a request and return its output so far; None if it is unknown or finished.

        Any thread may call this; it waits until the next step of another thread's call. A running `generate`
        and an open stream return the output too. Request ids of a call count up in the order of its prompts.
        """
        return self._lifecycle.visit(lambda: self._abort_between_steps(request_id))

    def _abort_between_steps(self, request_id: str | int) -> RequestOutput | None:
        refused = self._feed.bring(request_id) if self._feed else []
        aborted, parts = self._executor.abort(request_id)
        parts = [*refused, *parts]
        self._history.answered(parts)
        if self._awaited is not None:
            self._awaited += parts
        return refused[0] if refused else aborted
