"""Generation: answers lists of prompts, each by steps of the executor.

Checks everything before anything runs, numbers requests, and leaves the engine empty. Reads no conversation
and no table. `LLMEngine` makes what it works with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nanovllm.answers import RequestOutput
from nanovllm.checks import BadRow, Default, attempt, check_on_error, raise_first
from nanovllm.config import Config
from nanovllm.doors import HINT, ORDERS, find
from nanovllm.engine.executor import Executor
from nanovllm.engine.startup import recommended_params
from nanovllm.engine.stats import History, Progress, StepStats, progress_of
from nanovllm.inputs import PromptLike, calls_of_llm, refuse_others
from nanovllm.lifecycle import Lifecycle, no_full_collections
from nanovllm.models.config import ModelConfig
from nanovllm.params import SamplingParams
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Prompt, Request, given_prompts, parse_prompts, parse_sampling_params


def asleep_error(sleeping: Collection[str], why: str = "") -> RuntimeError:
    """The error of a call that needs what sleeps."""
    names = " and ".join(sorted(sleeping, reverse=True))
    return RuntimeError(f"this engine sleeps ({names}); call wake_up() first{why}")


@calls_of_llm
class Generation:
    """An engine that answers many prompts in one call."""

    on_step: Callable[[StepStats], object] | None = None
    config: Config
    model_config: ModelConfig
    _defaults: dict[str, Any]  # sampling parameters that the model recommends
    _processor: Processor
    _executor: Executor
    _lifecycle: Lifecycle
    _history: History
    _next_id = 0  # of the next request
    _awaited: deque[RequestOutput] | None = None  # receives outputs of `abort`, for a call or stream
    _feed: Any = None  # the requests of the running call that the executor does not have yet

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
        `get_default_sampling_params()`. use_tqdm: whether to show progress, or a tqdm-like class for it.
        on_error: with "return", a prompt that cannot run, or with wrong parameters in the list or a logits
        processor that raises, gives an output whose `error` says why; all other prompts are answered.
        others: vLLM's further arguments, with neutral values.

        Everything is checked before anything runs: ValueError or TypeError names the index and the value. Of
        a long list, texts that cannot be refused are tokenised while others run.
        After an exception or Ctrl-C the engine is empty and usable. RuntimeError if it has requests already.
        """
        self._lifecycle.check_open()
        if others:
            refuse_others(Generation.generate, others)
        with no_full_collections():
            rows = parse_prompts(given_prompts(prompts, prompt_token_ids))
            return self._generate(rows, sampling_params, use_tqdm, on_error)

    def _generate(
        self,
        prompts: Sequence[Prompt | BadRow],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        on_error: str,
        change: Callable[[Request], Request] = lambda request: request,
    ) -> list[RequestOutput]:
        """As `generate`. change: applied to each request first."""
        check_on_error(on_error)
        progress = progress_of(len(prompts), use_tqdm)
        params = self._params(sampling_params, len(prompts))
        if on_error == "raise":
            raise_first([*(prompts if isinstance(prompts, list) else ()), *params])
        with self._calling(), no_full_collections():
            self._check_idle("generate()")
            feed = len(prompts) > 2 and find(ORDERS["list"])(self, prompts, params, on_error, change)
            requests, outputs = feed.first if feed else self._check(prompts, params, (), on_error, change)
            with self._emptied_on_error(), progress:
                self._add(requests)
                progress.refused(len(outputs))
                outputs += self._finish_all(progress, feed)
        outputs.sort(key=lambda output: output.index)
        if any(isinstance(getattr(each, "max_tokens", 0), Default) for each in params):
            find(HINT)(self._executor.room.max_model_len, params, outputs)
        return outputs

    # -- inside ------------------------------------------------------------------------------------------

    @contextmanager
    def _calling(self, stream: object = None, asleep: bool = False, beside: bool = False) -> Iterator[None]:
        """Admit one caller at a time, of any thread. stream, beside: as in `Lifecycle.calling`. asleep:
        whether the engine may sleep; else RuntimeError if it does."""
        with self._lifecycle.calling(stream, beside):
            if not asleep:
                self._check_awake()
            yield

    def _check_awake(self) -> None:
        """Raise RuntimeError if the engine sleeps."""
        if sleeping := self._executor.asleep:
            raise asleep_error(sleeping)

    def _check_idle(self, call: str) -> None:
        if unfinished := self._executor.num_requests:
            raise RuntimeError(
                f"{unfinished} request(s) of add_request are unfinished; "
                f"call step() until is_finished(), or abort() them, before {call}"
            )

    @contextmanager
    def _emptied_on_error(self) -> Iterator[None]:
        """After an exception in the block, drop all requests, and close an engine that can run no more."""
        try:
            yield
        except BaseException:
            if not self._executor.clear(failed=True):
                self._lifecycle.close()
            raise

    def _params(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams | BadRow]:
        chosen = recommended_params(self._defaults) if sampling_params is None else sampling_params
        return parse_sampling_params(chosen, num_prompts)

    def _check(
        self,
        prompts: Sequence[Prompt | BadRow],
        params: Sequence[SamplingParams | BadRow],
        rows: Sequence[int] = (),
        on_error: str = "raise",
        change: Callable[[Request], Request] = lambda request: request,
    ) -> tuple[list[Request], list[RequestOutput]]:
        """Check and tokenise all prompts; return requests, and the outputs of prompts that cannot run.

        Queues nothing. rows: of the prompts among all of the call; else they are all. Each prompt gets a
        request id, from the next one on, as rows count. change: applied to each request first.
        """
        rows = rows or range(len(prompts))
        first_id = self._next_id - next(iter(rows), 0)
        made = self._processor.make_requests(prompts, params, first_id, rows, on_error)
        requests = [change(each) if isinstance(each, Request) else each for each in made]
        fitting = [attempt(self._fitting, each, of) for each, of in zip(requests, prompts, strict=True)]
        if on_error == "raise":
            raise_first(fitting)
        self._next_id += len(prompts)
        return [row for row in fitting if isinstance(row, Request)], [
            self._processor.extras.refused(first_id + row, row, request, prompt, error)
            for row, request, prompt, error in zip(rows, requests, prompts, fitting, strict=True)
            if not isinstance(error, Request)
        ]

    def _fitting(self, request: Request | BadRow, prompt: Prompt | BadRow) -> Request | BadRow:
        """Return the request, or the error that it already has; ValueError if it can never run."""
        if isinstance(request, Request) and isinstance(prompt, Prompt):
            try:
                self._check_can_run(request)
                length = len(request.prompt_token_ids)
                more = 1 if request.params.max_tokens != 0 else request.num_needed - length
                self._executor.room.check_fits(length, more)
            except ValueError as error:
                raise ValueError(f"{prompt.where}: {error}") from None
        return request

    def _check_can_run(self, request: Request) -> None:
        """Raise ValueError if this engine cannot run the request, whatever its length."""
        ranks, replicas = self.config.tensor_parallel_size, self.config.data_parallel_size
        if max(ranks, replicas) > 1 and request.params.logits_processors:
            raise ValueError(
                "logits_processors are functions of this process and need tensor_parallel_size=1 and "
                f"data_parallel_size=1, not {ranks} and {replicas}; use logit_bias, allowed_token_ids or "
                "structured_outputs"
            )
        if request.pooling is None and not self.model_config.has_head:
            why = self.model_config.head or "there is no lm_head.weight, and no tie_word_embeddings"
            raise ValueError(
                f"this model has no LM head ({why}): it draws and scores no tokens; embed() makes embeddings"
            )

    def _add(self, requests: list[Request], deltas: bool = False) -> None:
        self._history.num_requests += len(requests)
        self._history.num_prompt_tokens += sum([len(request.prompt_token_ids) for request in requests])
        self._executor.add(requests, deltas)

    def _finish_all(self, progress: Progress, feed: Any = None) -> list[RequestOutput]:
        """Make steps until nothing is left, also of `feed`. Return all outputs, those of `abort` too."""
        outputs: list[RequestOutput] = []
        self._feed, self._awaited = feed, (aborted := deque[RequestOutput]())
        try:
            while (feed and feed.left) or self._executor.num_requests:
                self._lifecycle.check_open()
                outputs += feed.fill(outputs, progress) if feed else []
                outputs += self._noted(self._executor.step(), progress)
                self._lifecycle.admit()
        finally:
            self._awaited = self._feed = None
        return [*outputs, *aborted]

    def _noted(
        self, stepped: tuple[list[RequestOutput], StepStats | None], progress: Progress | None = None
    ) -> list[RequestOutput]:
        """Note what a step did, show it, and tell `on_step`. Return its outputs."""
        outputs, stats = stepped
        if outputs:
            self._history.answered(outputs)
        if stats is not None:
            share = self._executor.share(stats)
            self._history.step_ended(share)
            if progress is not None:
                progress.update(share)
            if self.on_step is not None:
                self.on_step(stats)
        return outputs
