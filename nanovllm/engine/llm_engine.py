"""LLMEngine: one request at a time, and the life of an engine: start, sleep, new weights, end.

Checks prompts and numbers requests; its Executor runs them. No state outlives `close`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar

from nanovllm.config import Config
from nanovllm.engine.core import Core
from nanovllm.engine.executor import Executor, Stepped
from nanovllm.engine.metrics import RequestTimes
from nanovllm.engine.progress import Progress
from nanovllm.engine.requests import check_can_run, refused_output
from nanovllm.engine.startup import OpenedModel, open_model, recommended_params, warn_of_options
from nanovllm.engine.stats import Counters, EngineStats, StepStats
from nanovllm.errors import BadRow, attempt, raise_first
from nanovllm.inputs import PromptLike, calls_of_llm
from nanovllm.lifecycle import Lifecycle, held_interrupts
from nanovllm.outputs import RequestOutput
from nanovllm.params import SamplingParams
from nanovllm.residency.runner import TAGS, WEIGHTS
from nanovllm.text.prompts import PromptBatch, Request, parse_prompt, parse_sampling_params

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Engine = TypeVar("Engine", bound="LLMEngine")


@calls_of_llm
class LLMEngine:
    """One model, on one device or split over several. `LLM` adds the calls that most users need.

    on_step: called with the `StepStats` of every finished step, in the caller's thread; an exception ends the
    caller's call. None: no callback.
    """

    on_step: Callable[[StepStats], object] | None = None
    _replicated: Callable[[OpenedModel], Executor] | None = None  # makes the executor of several replicas

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Load `model`, a folder or a hub id (required); `options` are the fields of `Config`.

        Raises TypeError or ValueError for a wrong option, ModelLoadError for a checkpoint that cannot be
        loaded, and KVCacheMemoryError if the device is too full, in this order. Cheap checks come first.
        """
        self.config = Config.from_kwargs(model, **options)
        self._profile_folder = _profile_folder(options.get("profiler_config"))
        opened = open_model(self.config)
        self._defaults, self._processor = opened.defaults, opened.processor
        self._embedding = opened.embedding
        if (size := self.config.data_parallel_size) == 1:
            self._executor: Executor = Core(opened)
        elif self._replicated is None:
            raise ValueError(f"data_parallel_size={size} needs LLM itself, not {type(self).__name__}")
        else:
            self._executor = self._replicated(opened)
        self._processor.max_model_len = longest = self._executor.room.max_model_len
        self.model_config = replace(opened.model_config, max_model_len=longest)
        warn_of_options(self.config, opened.max_model_len, longest)
        self._next_id = 0  # of the next request
        self._awaited: deque[RequestOutput] | None = None  # receives outputs of `abort`, for a call or stream
        self._counters, self._times = Counters(), RequestTimes()
        self._lifecycle = Lifecycle(self, self._processor.close, self._executor.close)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The transformers tokenizer of the engine; None with `skip_tokenizer_init=True`.

        It may be replaced; with replicas, only while no request is unfinished.
        """
        return self._processor.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if self.config.data_parallel_size == 1:
            self._executor.set_tokenizer(tokenizer)
            return
        with self._calling(asleep=True):
            self._check_idle("setting the tokenizer")
            self._executor.set_tokenizer(tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults for `sampling_params`, from the model's generation_config.json, see `Config`.

        ValueError or TypeError if a value there is wrong.
        """
        return recommended_params(self._defaults)

    def stats(self) -> EngineStats:
        """Return totals since the engine's start; printing them gives a summary of a few lines.

        Any thread may call this at any time: within `on_step`, while a stream is open, and after `close`.
        With replicas, the sums over all of them; seconds are divided by their number.
        """
        return self._counters.snapshot(*self._executor.load)

    # -- one request at a time ---------------------------------------------------------------------------

    def add_request(self, prompt: PromptLike, sampling_params: SamplingParams | None = None) -> str:
        """Queue one prompt and return its request id. ValueError or TypeError if it can never run."""
        params = self._params(sampling_params, 1)
        with self._calling():
            batch = PromptBatch(0, [parse_prompt(prompt, "the prompt")], params, ["the prompt"])
            self._add(self._check(batch)[0])
            return str(self._next_id - 1)

    def step(self) -> list[RequestOutput]:
        """Advance all requests and return the outputs of those that finished.

        A step is launched while the previous one still runs, so an empty list does not mean the end: call
        `is_finished`. If a step fails, all unfinished requests are dropped and the engine is empty.
        """
        with self._calling(), self._emptied_on_error():
            return self._counted(self._executor.step()).outputs

    def is_finished(self) -> bool:
        """Whether no request is waiting or running."""
        self._lifecycle.check_open()
        return not self._executor.load.num_requests

    def abort(self, request_id: str | int) -> RequestOutput | None:
        """End a request and return its output so far; None if it is unknown or finished.

        Any thread may call this; it waits until the next step of another thread's call. A running `generate`
        and an open stream return the output too. Request ids of a call count up in the order of its prompts.
        """
        return self._lifecycle.visit(lambda: self._abort_between_steps(request_id))

    def _abort_between_steps(self, request_id: str | int) -> RequestOutput | None:
        aborted, parts = self._executor.abort(request_id)
        self._times.add(parts)
        if self._awaited is not None:
            self._awaited += parts
        return aborted

    # -- between requests --------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache and return True. While requests hold blocks, do nothing and return False.

        The arguments are vLLM's and change nothing: no request runs between calls, and there is no connector.
        """
        with self._calling(asleep=True, beside=True):
            return self._executor.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the device's memory on every rank: weights, KV cache and CUDA graphs.

        level: 1 keeps a copy of the weights in host memory; 2 drops them, and `wake_up` reads the checkpoint
        again. A second call does nothing, except that level 2 after level 1 drops the copy.
        mode: vLLM's, what becomes of running requests; it changes nothing, because none runs between calls.

        ValueError for another level; RuntimeError while requests of `add_request` are unfinished. Until
        `wake_up`, calls that run the model raise RuntimeError. The prefix cache is empty afterwards.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ValueError(f"level={level!r} must be 1 (weights to host memory) or 2 (drop them)")
        with self._between_requests("sleep()"), held_interrupts():
            self._executor.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Allocate the device's memory again; return whether the engine runs now.

        tags: a list of "weights" and "kv_cache"; None means both. The engine runs when both are awake.

        After `sleep(1)` the answers are the same as before it. After `sleep(2)` the weights are the
        checkpoint's, without the changes of `update_weights`. ValueError for other tags; KVCacheMemoryError
        if a device has too little free memory, ModelLoadError if the checkpoint cannot be read. After these
        two the engine still sleeps.
        """
        chosen = _parse_tags(tags)
        with self._between_requests("wake_up()"), held_interrupts():
            self._executor.wake_up(chosen)
            return not self._executor.asleep

    def is_sleeping(self) -> bool:
        """Whether `wake_up` must come before the engine can run."""
        self._lifecycle.check_open()
        return bool(self._executor.asleep)

    def update_weights(
        self, named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Replace all or some weights; the result equals, bit for bit, a fresh load of such a checkpoint.

        named_tensors: tensors by their names in a checkpoint's safetensors files, of any float dtype and on
        any device. A dict or list is checked as a whole before any weight changes. Other iterables, such as a
        generator of tensors that do not fit into memory together, are checked one tensor at a time, each
        before it is loaded. After an error the earlier tensors stay loaded, and the engine is usable. With
        replicas all tensors are checked first, and stay in host memory for replicas that restart.

        TypeError or ValueError names the tensor and what is expected. RuntimeError while requests of
        `add_request` are unfinished, and while the weights sleep. The prefix cache is empty afterwards.
        """
        with self._between_requests("update_weights()"):
            self._check_awake((WEIGHTS,), why=", at least with tags=['weights']")
            self._executor.update(named_tensors)

    def start_profile(self, folder: str | Path | None = None) -> None:
        """Start torch.profiler on every rank; `stop_profile` ends it.

        folder: receives a Chrome trace of each rank; created if missing. None takes `torch_profiler_dir` of
        the option `profiler_config`, or the environment variable VLLM_TORCH_PROFILER_DIR. ValueError without
        a folder, OSError if it is not writable, RuntimeError if a torch profiler is active in the engine's
        process.
        """
        folder = folder or self._profile_folder or os.environ.get("VLLM_TORCH_PROFILER_DIR")
        if not folder:
            raise ValueError("start_profile() needs a folder; pass one, or set VLLM_TORCH_PROFILER_DIR")
        with self._calling(beside=True):
            path = Path(folder).expanduser().absolute()
            path.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path).close()  # it can be written to
            self._executor.start_profile(str(path), str(time_ns()))

    def stop_profile(self) -> list[Path]:
        """End the profile; return the path of each rank's trace, for chrome://tracing or ui.perfetto.dev.

        RuntimeError if there is no profile. `close` also ends a profile, and writes nothing.
        """
        with self._calling(beside=True):
            return [Path(path) for path in self._executor.stop_profile()]

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
        """Admit one caller at a time, of any thread.

        stream, beside: as in `Lifecycle.calling`. asleep: whether the engine may sleep; RuntimeError if it
        sleeps and may not.
        """
        with self._lifecycle.calling(stream, beside):
            if not asleep:
                self._check_awake()
            yield

    @contextmanager
    def _between_requests(self, call: str) -> Iterator[None]:
        """Run the block while no request is unfinished."""
        with self._calling(asleep=True):
            self._check_idle(call)
            with self._emptied_on_error():
                yield

    def _check_awake(self, needed: Collection[str] = TAGS, why: str = "") -> None:
        """Raise RuntimeError if one of `needed` sleeps."""
        sleeping = [tag for tag in TAGS if tag in self._executor.asleep and tag in needed]
        if sleeping:
            raise RuntimeError(f"this engine sleeps ({' and '.join(sleeping)}); call wake_up() first{why}")

    def _check_idle(self, call: str) -> None:
        if unfinished := self._executor.load.num_requests:
            raise RuntimeError(
                f"{unfinished} request(s) of add_request are unfinished; "
                f"call step() until is_finished(), or abort() them, before {call}"
            )

    @contextmanager
    def _emptied_on_error(self) -> Iterator[None]:
        """After an exception in the block, drop all requests, whatever their state. If nothing can run any
        more, close the engine."""
        try:
            yield
        except BaseException:
            if not self._executor.clear(failed=True):
                self.close()
            raise

    def _params(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams | BadRow]:
        chosen = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return parse_sampling_params(chosen, num_prompts)

    def _check(
        self,
        batch: PromptBatch,
        on_error: str = "raise",
        change: Callable[[Request], Request] = lambda request: request,
    ) -> tuple[list[Request], list[RequestOutput]]:
        """Check and tokenise all prompts; return requests, and the outputs of prompts that cannot run.

        Queues nothing. Each prompt gets a request id, in order. change: applied to each request first.
        """
        first_id, first_index, prompts, params, where = self._next_id, *batch
        made = self._processor.make_requests(prompts, params, where, first_id, first_index, on_error)
        requests = [change(each) if isinstance(each, Request) else each for each in made]
        fitting = [attempt(self._fitting, *row) for row in zip(requests, where, strict=True)]
        if on_error == "raise":
            raise_first(fitting)
        self._next_id = first_id + len(prompts)
        return [row for row in fitting if isinstance(row, Request)], [
            refused_output(first_id + row, first_index + row, requests[row], prompts[row], error)
            for row, error in enumerate(fitting)
            if not isinstance(error, Request)
        ]

    def _fitting(self, request: Request | BadRow, where: str) -> Request | BadRow:
        """Return the request, or the error that it already has; ValueError if it can never run."""
        if isinstance(request, Request):
            try:
                check_can_run(request, self.config, self.model_config.has_head)
                length = len(request.prompt_token_ids)
                more = 1 if request.params.max_tokens != 0 else request.num_needed - length
                self._executor.room.check_fits(length, more)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        return request

    def _add(self, requests: list[Request], deltas: bool = False) -> None:
        for request in requests:
            self._counters.queued(len(request.prompt_token_ids))
        self._executor.add(requests, deltas)

    def _finish_all(self, progress: Progress) -> list[RequestOutput]:
        """Make steps until no request is unfinished. Return all outputs, also those of `abort`, unordered."""
        outputs: list[RequestOutput] = []
        self._awaited = aborted = deque[RequestOutput]()
        try:
            while self._executor.load.num_requests:
                self._lifecycle.check_open()
                step = self._counted(self._executor.step())
                outputs += step.outputs
                if step.share is not None:
                    progress.update(step.share)
                self._lifecycle.admit()
        finally:
            self._awaited = None
        return [*outputs, *aborted]

    def _counted(self, step: Stepped) -> Stepped:
        """Count what a step did, and tell `on_step`."""
        self._counters.planned(step.peak_usage)
        if step.share is not None:
            self._counters.record(step.share, perf_counter())
        if step.outputs:
            self._times.add(step.outputs)
        if step.stats is not None and self.on_step is not None:
            self.on_step(step.stats)
        return step


def _profile_folder(profiler_config: object) -> str | None:
    """The folder of vLLM's option, a dictionary or an object."""
    if isinstance(profiler_config, Mapping):
        return profiler_config.get("torch_profiler_dir")
    return getattr(profiler_config, "torch_profiler_dir", None)


def _parse_tags(tags: object) -> frozenset[str]:
    """Return the tags of a `wake_up`; ValueError if one is unknown."""
    if tags is None:
        return frozenset(TAGS)
    if isinstance(tags, str) or not isinstance(tags, Collection) or not tags or not set(tags) <= set(TAGS):
        raise ValueError(f"tags={tags!r} must be None or a list of {' and '.join(map(repr, TAGS))}")
    return frozenset(tags)
