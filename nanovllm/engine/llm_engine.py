"""LLMEngine: the life of an engine, from start to end. No state outlives `close`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar

from nanovllm.config import Config
from nanovllm.engine.core import Core
from nanovllm.engine.executor import Executor
from nanovllm.engine.startup import OpenedModel, open_model, recommended_params, warn_of_options
from nanovllm.engine.stats import History
from nanovllm.inputs import calls_of_llm
from nanovllm.lifecycle import Lifecycle
from nanovllm.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from nanovllm.engine.generate import Generation

Engine = TypeVar("Engine", bound="LLMEngine")


@calls_of_llm
class LLMEngine(Generation):
    """One model, on one device or split over several. `LLM` adds the calls that most users need.

    on_step: called with the `StepStats` of every finished step, in the caller's thread; an exception ends the
    caller's call. None: no callback.
    """

    _alone: Callable[[OpenedModel], Executor] = Core  # makes the executor of one model
    _replicated: Callable[[OpenedModel], Executor] | None = None  # makes the executor of several replicas

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Load `model`, a folder or a hub id (required); `options` are the fields of `Config`.

        Raises TypeError or ValueError for a wrong option, ModelLoadError for a checkpoint that cannot be
        loaded, and KVCacheMemoryError if the device is too full, in this order. Cheap checks come first.
        """
        self.config = Config.from_kwargs(model, **options)
        opened = open_model(self.config)
        self._defaults, self._processor = opened.defaults, opened.processor
        self._embedding = opened.embedding
        if (size := self.config.data_parallel_size) == 1:
            self._executor = self._alone(opened)
        elif self._replicated is None:
            raise ValueError(f"data_parallel_size={size} needs LLM itself, not {type(self).__name__}")
        else:
            self._executor = self._replicated(opened)
        self._processor.max_model_len = longest = self._executor.room.max_model_len
        self.model_config = replace(opened.model_config, max_model_len=longest)
        warn_of_options(self.config, opened.max_model_len, longest)
        self._history = History()
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

    # -- between requests --------------------------------------------------------------------------------

    @contextmanager
    def _between_requests(self, call: str) -> Iterator[None]:
        """Run the block while no request is unfinished."""
        with self._calling(asleep=True):
            self._check_idle(call)
            with self._emptied_on_error():
                yield

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache and return True. While requests hold blocks, do nothing and return False.

        The arguments are vLLM's and change nothing: no request runs between calls, and there is no connector.
        """
        with self._calling(asleep=True, beside=True):
            return self._executor.reset_prefix_cache()

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
