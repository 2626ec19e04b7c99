"""VLLMCalls: calls of vLLM's that `LLM` has beside its own: a queue that runs on request, requests with the
caller's ids, metrics, and functions that run on the ranks. Plans and computes nothing.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.answers import RequestOutput
from nanovllm.chat.calls import ChatCalls
from nanovllm.chat.conversations import Conversation, Thinking, check_template_options
from nanovllm.checks import BadRow, raise_first
from nanovllm.engine.startup import find_model
from nanovllm.engine.stats import progress_of
from nanovllm.inputs import PromptLike, calls_of_llm, refuse_others, show
from nanovllm.lifecycle import no_full_collections
from nanovllm.metrics import Metric
from nanovllm.models.registry import open_checkpoint
from nanovllm.names import refuse_unknown
from nanovllm.params import SamplingParams
from nanovllm.residency.calls import ResidencyCalls
from nanovllm.residency.runner import FailedCall, RankView
from nanovllm.stats.calls import StatsCalls
from nanovllm.streams.calls import StreamCalls
from nanovllm.streams.reader import PromptReader
from nanovllm.text.prompts import Prompt, parse_prompts
from nanovllm.vllm.metrics import engine_metrics
from nanovllm.vllm.queue import QueueCalls
from nanovllm.vllm.requests import ToldEngine

if TYPE_CHECKING:
    import torch

_Engine = TypeVar("_Engine", bound="VLLMCalls")


@calls_of_llm
class VLLMCalls(ToldEngine, QueueCalls, ChatCalls, StreamCalls, ResidencyCalls, StatsCalls):
    """An engine with vLLM's further calls."""

    @cached_property
    def _own_ids(self) -> dict[str, str]:
        """By the engine's request id: the id that the caller gave."""
        return {}

    _reads_files = False  # whether `reload_weights` does so with dummy weights

    @classmethod
    def from_engine_args(cls: type[_Engine], engine_args: Any, **others: Any) -> _Engine:
        """The engine of an `EngineArgs`; others: vLLM's, such as `usage_context`, which have no effect."""
        return cls(**vars(engine_args))

    # -- requests --------------------------------------------------------------------------------------------

    def enqueue(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **others: Any,
    ) -> list[str]:
        """Queue prompts, and return their request ids; `wait_for_completion` answers them.

        prompts, sampling_params, others: as for `generate`. Everything is checked before anything is queued.
        """
        self._lifecycle.check_open()
        others.pop("use_tqdm", None)  # queueing shows no progress
        refuse_others(VLLMCalls.enqueue, others)
        return self._enqueue(parse_prompts(prompts), sampling_params)

    def enqueue_chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        **others: Any,
    ) -> list[str]:
        """Queue conversations, with the arguments of `chat`, and return their request ids, as `enqueue`."""
        self._lifecycle.check_open()
        others.pop("use_tqdm", None)
        refuse_others(VLLMCalls.enqueue_chat, others)
        options = check_template_options(
            self.tokenizer,
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
            Thinking(enable_thinking, reasoning_effort),
        )
        return self._enqueue(self._rendered(messages, "raise", options), sampling_params)

    def _enqueue(
        self,
        rows: Sequence[Prompt | BadRow],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[str]:
        params = self._params(sampling_params, len(rows))
        raise_first([*rows, *params])
        with self._calling():
            requests, _ = self._check(rows, params)
            self._add(requests)
        return [str(request.request_id) for request in requests]

    @no_full_collections()
    def wait_for_completion(
        self,
        output_type: type[Any] | tuple[type[Any], ...] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Run all queued requests; return their outputs in the order of their arrival.

        output_type: `RequestOutput`, as in vLLM; TypeError for another one.
        """
        if output_type is not None and not issubclass(RequestOutput, output_type):
            raise TypeError(f"output_type must be RequestOutput or None, not {output_type!r}")
        progress = progress_of(self.get_num_unfinished_requests(), use_tqdm)
        with self._calling(), self._emptied_on_error(), progress:
            outputs = self._finish_all(progress)
        outputs.sort(key=lambda output: int(output.request_id))
        return self._renamed(outputs)

    def has_unfinished_requests(self) -> bool:
        """Whether a request is waiting or running."""
        return not self.is_finished()

    def get_num_unfinished_requests(self) -> int:
        """The number of requests that wait or run."""
        self._lifecycle.check_open()
        return self._executor.num_requests

    def add_request(self, *args: Any, **named: Any) -> str:
        """Queue one prompt and return its request id. ValueError or TypeError if it can never run.

        `add_request(prompt, sampling_params=None)`, or vLLM's `add_request(request_id, prompt, params)` with
        a string as id, which the output then has. vLLM's further arguments accept neutral values.
        """
        ours = (
            "request_id" not in named
            and len(args) < 3
            and not (
                len(args) == 2
                and ("params" in named or not isinstance(args[1], (SamplingParams, type(None))))
            )
        )
        names = ("prompt", "sampling_params") if ours else ("request_id", "prompt", "params")
        given = dict(zip(names, args, strict=False)) | named
        others = {name: given.pop(name) for name in list(given) if name not in names}
        refuse_unknown("LLM.add_request", others, ("prompt", "sampling_params", "request_id"))
        if len(args) > len(names) or "prompt" not in given:
            raise TypeError("add_request() takes (prompt, sampling_params) or (request_id, prompt, params)")
        own, params = given.get("request_id"), given.get("sampling_params", given.get("params"))
        if own is None:
            return super().add_request(given["prompt"], params)
        if not isinstance(own, str):
            raise TypeError(f"request_id must be a string, not {show(own)}")
        if not self._executor.num_requests:
            self._own_ids.clear()
        if own in self._own_ids.values():
            raise ValueError(f"request_id={own!r} belongs to an unfinished request; pass another one")
        self._own_ids[super().add_request(given["prompt"], params)] = own
        return own

    def step(self) -> list[RequestOutput]:
        return self._renamed(super().step())

    def abort(self, request_id: str | int) -> RequestOutput | None:
        number = next((key for key, own in [*self._own_ids.items()] if own == request_id), request_id)
        aborted = super().abort(number)
        return None if aborted is None else self._renamed([aborted])[0]

    def _renamed(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs with the ids that callers gave."""
        for output in outputs:
            output.request_id = self._own_ids.pop(output.request_id, output.request_id)
        return outputs

    # -- numbers ---------------------------------------------------------------------------------------------

    def get_metrics(self) -> list[Metric]:
        """The engine's numbers since its start, under vLLM's names; any thread may call this at any time.

        With `n` above 1, times are those of the whole prompt, from its arrival to its last completion. With
        replicas, the sums over all of them. `stats()` has more.
        """
        labels = {"model_name": str(self.config.model), "engine": "0"}
        found = engine_metrics(self.stats(), self.config.enable_prefix_caching, labels)
        with self._history.answers.counted() as times:
            return found + times.metrics(labels, self._executor.room.max_model_len)

    def _stream(self, reader: PromptReader, on_error: str, deltas: bool) -> Iterator[RequestOutput]:
        at_exit = sys.is_finalizing  # then modules have lost their names, and the engine is closed
        try:
            yield from super()._stream(reader, on_error, deltas)
        finally:
            if not at_exit():
                with self._history.answers.counted() as times:
                    times.drop_parts()

    # -- functions on the ranks ------------------------------------------------------------------------------

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of ranks; of all replicas, or of one."""
        return self.config.tensor_parallel_size * (self.config.data_parallel_size if include_dp else 1)

    def apply_model(self, func: Callable[[torch.nn.Module], Any]) -> list[Any]:
        """Call a function with the model of each rank; return the results, those of rank 0 first.

        One rank runs it in this process. Others need a function that can be pickled, of a module that they
        can import, and results that can be pickled. An exception of it is raised. The prefix cache is empty
        afterwards, because the function may have changed weights; replicas that restart do not have them.
        RuntimeError while requests are unfinished, or while the engine sleeps.
        """
        return self._apply(partial(_of_model, func), func)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `method(worker, *args, **kwargs)` on each rank; return the results, those of rank 0 first.

        worker: has `rank`, `local_rank`, `device`, `get_model()` and `model_runner.model`. A function as for
        `apply_model`. The one name of a method is "reload_weights", which loads the model's files again; with
        `load_format="dummy"` after `collective_rpc("update_config", args=({"load_config": {"load_format":
        "auto"}},))`. ValueError for another: the workers of vLLM have others. timeout: has no effect;
        `distributed_timeout_seconds` is the limit.
        """
        if method == "reload_weights" and not (args or kwargs):
            return self._reload_weights()
        if method == "update_config" and (args, kwargs or {}) == (
            ({"load_config": {"load_format": "auto"}},),
            {},
        ):
            self._reads_files = True
            return [None] * self.get_world_size()
        if not callable(method):
            raise ValueError(
                f"collective_rpc({method!r}) is not supported: workers do not have vLLM's methods; pass a "
                "function of the worker, or use apply_model(), sleep(), update_weights() or start_profile()"
            )
        return self._apply(_OfWorker(method, tuple(args), dict(kwargs or {})), method)

    def _reload_weights(self) -> list[None]:
        """Replace all weights by those of the files. ValueError for dummy weights, which need none."""
        if self.config.load_format == "dummy" and not self._reads_files:
            auto = "collective_rpc('update_config', args=({'load_config': {'load_format': 'auto'}},))"
            raise ValueError(
                "collective_rpc('reload_weights') has no files to load with load_format='dummy'; use "
                f"update_weights(), or call {auto} first"
            )
        with open_checkpoint(find_model(self.config)).tensors() as stored:
            self.update_weights((name, source[:]) for name, source in stored.items())
        return [None] * self.get_world_size()

    def _apply(self, call: Callable[[RankView], Any], function: object) -> list[Any]:
        if self.get_world_size() > 1:
            fix = "pass a function of a module that other processes can import, without local values"
            try:
                packed = pickle.dumps(call)
            except Exception as error:
                raise TypeError(f"{show(function)} cannot be pickled ({error}); {fix}") from None
            if b"__main__" in packed:
                raise TypeError(
                    f"{show(function)} is of the script itself, which no other process runs; {fix}"
                )
            call = partial(_elsewhere, call)
        with self._between_requests("this call"):
            self._check_awake()
            results = self._executor.apply(call)
        for result in results:
            if isinstance(result, FailedCall):
                raise result.error
        return results


def _of_model(function: Callable[[Any], Any], rank: RankView) -> Any:
    """A function of the model as one of the rank."""
    return function(rank.model)


class _OfWorker:
    """A function of the rank with its arguments."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._function, self._args, self._named = function, args, named

    def __call__(self, rank: RankView) -> Any:
        return self._function(rank, *self._args, **self._named)


def _elsewhere(call: Callable[[RankView], Any], rank: RankView) -> Any:
    """A call whose result or exception goes to another process."""
    try:
        result = call(rank)
        pickle.dumps(result)
    except Exception as error:
        what = f"rank {rank.rank}: {type(error).__name__}: {error}"
        raise RuntimeError(what) from None
    return result
