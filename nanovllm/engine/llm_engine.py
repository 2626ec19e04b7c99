"""LLMEngine: connects the parts and runs the steps. Text outside, one Batch at a time inside.

Owns the Processor, the Requests, the Scheduler, the ModelRunner and the Workers; no state outlives `close`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, SupportsIndex, TypeVar

from nanovllm.batch import Batch, StepKind, TokenEvents
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.engine.generation_config import overridden, read_generation_config, recommended_params
from nanovllm.engine.requests import Requests
from nanovllm.engine.residency import Residency
from nanovllm.engine.startup import (
    cache_options,
    find_model,
    find_tokenizer,
    resolve_max_model_len,
    start_ranks,
    stop_ranks,
    usable_length,
    warn_of_options,
)
from nanovllm.engine.stats import Counters, EngineStats, StepStats
from nanovllm.errors import BadRow, attempt, raise_first
from nanovllm.inputs import PromptLike
from nanovllm.lifecycle import Lifecycle
from nanovllm.models.loader import check_weights, load_model_config
from nanovllm.outputs import RequestOutput
from nanovllm.plan.scheduler import Scheduler
from nanovllm.runner.staging import StepHandle
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.processor import Processor, refused_output
from nanovllm.text.prompts import parse_prompt, parse_sampling_params
from nanovllm.text.reader import PromptBatch
from nanovllm.text.request import Request
from nanovllm.workers.interrupts import held_interrupts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Engine = TypeVar("Engine", bound="LLMEngine")


class LaunchedStep(NamedTuple):
    """A step that was launched and not read yet."""

    batch: Batch
    num_cached_tokens: int
    num_preemptions: int
    handle: StepHandle | None  # None: its tokens are not drawn yet


class LLMEngine:
    """One model, on one device or split over several. `LLM` adds the calls that most users need.

    on_step: called with the `StepStats` of every finished step, in the caller's thread; an exception ends the
    caller's call. None: no callback.
    """

    on_step: Callable[[StepStats], object] | None = None
    _warns = True  # of options that do something else than one expects
    _on_progress: Callable[[], None] = staticmethod(lambda: None)  # of `start_ranks`; not of the engine

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Load `model`, a folder or a hub id (required); `options` are the fields of `Config`.

        Raises TypeError or ValueError for a wrong option, ModelLoadError for a checkpoint that cannot be
        loaded, and KVCacheMemoryError if the device is too full, in this order. Cheap checks come first.
        """
        self.config = Config.from_kwargs(model, **options)
        path = find_model(self.config)
        option, changes = self.config.generation_config, self.config.override_generation_config or {}
        generation = read_generation_config(option, path)
        self.model_config = load_model_config(path, generation, self.config.hf_overrides)
        self._generation = overridden(generation, option, changes)
        self.model_config.check_tensor_parallel_size(self.config.tensor_parallel_size)
        max_model_len = resolve_max_model_len(self.config.max_model_len, self.model_config)
        tokenizer, own = find_tokenizer(self.config, path), self.model_config
        self._processor = Processor(tokenizer, own.vocab_size, own.eos_token_ids, self.config.max_logprobs)
        self._requests = Requests(self._processor, self.config.seed)
        if self.config.load_format == "auto":
            check_weights(self.model_config, path)
        free = self._start(path, max_model_len)
        self._processor.max_model_len = longest = self._scheduler.max_model_len
        self.model_config = replace(self.model_config, max_model_len=longest)
        if self._warns:
            warn_of_options(self.config, max_model_len, longest)
        self._in_flight: LaunchedStep | None = None
        self._awaited: deque[RequestOutput] | None = None  # receives outputs of `abort`, for a call or stream
        self._counters = Counters()
        self._last_end = 0.0  # perf_counter at the end of the last step, or when the first request came
        self._lifecycle = Lifecycle(self, self._processor.templates.close, free)

    def _start(self, path: Path, max_model_len: int) -> Callable[[], None]:
        """Load the model in `path` and create the scheduler; return the function that frees both."""
        if (size := self.config.data_parallel_size) > 1:
            name = type(self).__name__
            raise ValueError(f"data_parallel_size={size} needs LLM itself, not {name}")
        device = Device(self.config.device)
        usable = usable_length(self.config, self.model_config, device, max_model_len)
        self._workers, self._runner, self._num_blocks = start_ranks(
            self.config, self.model_config, path, device, usable, self._on_progress
        )
        self._residency = Residency(self._workers, self._runner)
        ahead = self.config.async_scheduling
        self._run_ahead, self._scheduler = device.is_cuda if ahead is None else ahead, self._make_scheduler()
        return partial(stop_ranks, self._workers, self._runner)

    def _make_scheduler(self) -> Scheduler:
        runner = self._runner
        sizes = self._num_blocks, runner.block_size, runner.max_model_len, self.model_config.longest
        return Scheduler(self.config, *sizes, cache_options(self.config, runner.device))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The transformers tokenizer of the engine; None with `skip_tokenizer_init=True`."""
        return self._processor.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._processor.tokenizer = tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults for `sampling_params`, from the model's generation_config.json, see `Config`.

        ValueError or TypeError if a value there is wrong.
        """
        return recommended_params(self._generation)

    def _params(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams | BadRow]:
        chosen = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return parse_sampling_params(chosen, num_prompts)

    def stats(self) -> EngineStats:
        """Return totals since the engine's start; printing them gives a summary of a few lines.

        Any thread may call this at any time: within `on_step`, while a stream is open, and after `close`.
        """
        plan = self._scheduler
        now = len(self._requests), len(plan.running), len(plan.waiting), plan.block_manager.usage
        return self._counters.snapshot(*now)

    # -- one request at a time ---------------------------------------------------------------------------

    def add_request(self, prompt: PromptLike, sampling_params: SamplingParams | None = None) -> str:
        """Queue one prompt and return its request id. ValueError or TypeError if it can never run."""
        params = self._params(sampling_params, 1)
        with self._calling():
            self._add(PromptBatch(0, [parse_prompt(prompt, "the prompt")], params, ["the prompt"]))
            return str(self._requests.next_id - 1)

    def step(self) -> list[RequestOutput]:
        """Advance all requests and return the outputs of those that finished.

        A step is launched while the previous one still runs, so an empty list does not mean the end: call
        `is_finished`. If a step fails, all unfinished requests are dropped and the engine is empty.
        """
        with self._calling(), self._emptied_on_error():
            return self._step()[0]

    def is_finished(self) -> bool:
        """Whether no request is waiting or running."""
        self._lifecycle.check_open()
        return not self._requests

    def abort(self, request_id: str | int) -> RequestOutput | None:
        """End a request and return its output so far; None if it is unknown or finished.

        Any thread may call this; it waits until the next step of another thread's call. A running `generate`
        and an open stream return the output too. Request ids of a call count up in the order of its prompts.
        """
        return self._lifecycle.visit(lambda: self._abort_between_steps(request_id))

    def _abort_between_steps(self, request_id: str | int) -> RequestOutput | None:
        with self._current_device():
            aborted, parts = self._abort(request_id)
        if self._awaited is not None:
            self._awaited += parts
        return aborted

    def _abort(self, request_id: str | int) -> tuple[RequestOutput | None, list[RequestOutput]]:
        """End a request; return its output, and what a stream yields of it."""
        seq_ids = self._requests.unfinished_sequences(request_id)
        for seq_id in seq_ids:
            self._scheduler.abort(seq_id)
        aborted = self._requests.finish(seq_ids, perf_counter())
        parts = self._requests.parts(TokenEvents([], [], {}), seq_ids, aborted)
        return next(iter(aborted), None), parts

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the device memory and end the workers. A second call does nothing.

        `with`, `exit`, garbage collection of the engine and the end of the process do the same. A running
        call of another thread first ends with EngineClosedError. In a forked process, which does not own the
        engine, this does nothing.
        """
        self._lifecycle.close()

    exit = shutdown = close  # nano-vLLM's and vLLM's names

    def __enter__(self: Engine) -> Engine:
        self._lifecycle.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "an engine cannot be copied or pickled, because it owns device memory and processes; pass the "
            "engine itself, or make another LLM where it is needed"
        )

    # -- inside ------------------------------------------------------------------------------------------

    @contextmanager
    def _calling(self, stream: object = None, asleep: bool = False, beside: bool = False) -> Iterator[None]:
        """Admit one caller at a time, of any thread, and make this engine's device the current one.

        stream, beside: as in `Lifecycle.calling`. asleep: whether the engine may sleep; RuntimeError if it
        sleeps and may not.
        """
        with self._lifecycle.calling(stream, beside), self._current_device():
            if not asleep:
                self._residency.check_awake()
            yield

    def _current_device(self) -> AbstractContextManager[object]:
        return self._runner.device.current()

    def _check_idle(self, call: str) -> None:
        if self._requests:
            raise RuntimeError(
                f"{len(self._requests)} request(s) of add_request are unfinished; "
                f"call step() until is_finished(), or abort() them, before {call}"
            )

    @contextmanager
    def _emptied_on_error(self) -> Iterator[None]:
        """After an exception in the block, drop all requests, whatever their state."""
        try:
            yield
        except BaseException:
            self._requests.clear()
            self._start_afresh()
            raise

    def _start_afresh(self) -> None:
        """Create an empty scheduler. If the workers are gone, close the engine."""
        self._in_flight = None
        self._scheduler = self._make_scheduler()
        if self._workers.watch.ended.is_set():
            self.close()

    def _abort_all(self) -> None:
        """Drop all requests; the engine has not failed."""
        for seq_id in self._requests.unfinished:
            self._scheduler.abort(seq_id)
        self._requests.clear()

    def _add(self, batch: PromptBatch, on_error: str = "raise") -> list[RequestOutput]:
        """Check and queue prompts; return the outputs of prompts that cannot run."""
        requests, refused = self._check(batch, on_error)
        self._queue(requests)
        return refused

    def _check(
        self,
        batch: PromptBatch,
        on_error: str,
        change: Callable[[Request], Request] = lambda request: request,
    ) -> tuple[list[Request], list[RequestOutput]]:
        """Check and tokenise all prompts; return requests, and the outputs of prompts that cannot run.

        Queues nothing. Each prompt gets a request id, in order. change: applied to each request first.
        """
        first_id, first_index, prompts, params, where = self._requests.next_id, *batch
        made = self._processor.make_requests(prompts, params, where, first_id, first_index, on_error)
        requests = [change(each) if isinstance(each, Request) else each for each in made]
        fitting = [attempt(self._fitting, *row) for row in zip(requests, where, strict=True)]
        if on_error == "raise":
            raise_first(fitting)
        self._requests.next_id = first_id + len(prompts)
        return [row for row in fitting if isinstance(row, Request)], [
            refused_output(first_id + row, first_index + row, requests[row], prompts[row], error)
            for row, error in enumerate(fitting)
            if not isinstance(error, Request)
        ]

    def _fitting(self, request: Request | BadRow, where: str) -> Request | BadRow:
        """Return the request, or the error that it already has; ValueError if it can never run."""
        if isinstance(request, Request):
            ranks, replicas = self.config.tensor_parallel_size, self.config.data_parallel_size
            if max(ranks, replicas) > 1 and request.params.logits_processors:
                raise ValueError(
                    f"{where}: logits_processors are functions of this process and need "
                    f"tensor_parallel_size=1 and data_parallel_size=1, not {ranks} and {replicas}; use "
                    "logit_bias, allowed_token_ids or structured_outputs"
                )
            try:
                length = len(request.prompt_token_ids)
                more = 1 if request.params.max_tokens != 0 else request.num_needed - length
                self._scheduler.check_fits(length, more)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        return request

    def _queue(self, requests: list[Request]) -> None:
        now = perf_counter()
        if not self._requests:
            self._last_end = now
        for request in requests:
            self._counters.queued(len(request.prompt_token_ids))
            sequences = self._requests.make_sequences(request)
            self._requests.add(request, sequences, now)
            for seq in sequences:
                self._scheduler.add(seq)

    def _step(self) -> tuple[list[RequestOutput], StepStats | None]:
        """Launch the next step, then read the previous one; without `async_scheduling`, read the same one.

        Returns the outputs of finished requests and the stats of the step that was read, or None. Ctrl-C is
        delayed until both are done, so that all ranks make the same calls.
        """
        with held_interrupts():
            self._lifecycle.check_open()
            launched = self._launch()
            step = self._in_flight if self._run_ahead else self._draw(launched)
            if step is not None:
                assert step.handle is not None
                with self._workers.kill_on_error("a step"):
                    output = step.handle.result()
                now = perf_counter()
                seconds, self._last_end = now - self._last_end, now
                events = self._scheduler.postprocess(step.batch, output)
            if self._run_ahead:
                self._in_flight = self._draw(launched)
        if step is None:
            return [], None
        if step.batch.kind is StepKind.PREFILL:
            self._requests.first_tokens(events, now)
        stopped = self._requests.find_stop_strings(events)
        for seq_id, reason in stopped.items():
            self._scheduler.abort(seq_id, reason)
        outputs = self._requests.finish(events.finish_reasons | stopped, now)
        stats = StepStats(
            batch=step.batch,
            seconds=seconds,
            num_drawn_tokens=len(events.token_ids),
            num_cached_tokens=step.num_cached_tokens,
            num_finished=len(outputs),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_cache_usage=self._scheduler.block_manager.usage,
            num_preemptions=step.num_preemptions,
        )
        self._counters.record(stats, now)
        if self.on_step is not None:
            self.on_step(stats)
        return self._requests.parts(events, events.finish_reasons | stopped, outputs), stats

    def _draw(self, step: LaunchedStep | None) -> LaunchedStep | None:
        """Let a launched step draw its tokens, if it has not; all previous tokens are known now."""
        if step is None or step.handle is not None:
            return step
        masks = self._scheduler.masks(step.batch, self._runner.mask_buffer)
        return step._replace(handle=self._workers.run(self._runner.draw, "draw", masks))

    def _launch(self) -> LaunchedStep | None:
        """Plan a step and launch it on every rank; None if nothing can be planned."""
        blocks = self._scheduler.block_manager
        cached, preempted = blocks.num_cached_tokens, self._scheduler.num_preemptions
        batch = self._scheduler.schedule()
        if batch is None:
            assert self._in_flight or self._scheduler.is_finished(), "stuck: no step runs, and none can"
            return None
        self._counters.planned(blocks.usage)
        if batch.kind is StepKind.PREFILL:
            self._requests.scheduled(batch, perf_counter())
        handle = self._workers.run(self._runner.launch, "launch", batch)
        cached, preempted = blocks.num_cached_tokens - cached, self._scheduler.num_preemptions - preempted
        return LaunchedStep(batch, cached, preempted, handle)
