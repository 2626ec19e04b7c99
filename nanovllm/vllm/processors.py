"""Classes of logits processors in vLLM's form, for `LLM(logits_processors=[Class])`; a request tells them in
`extra_args` what to do. Each sequence has its own object, which sees a batch of one row.

Knows neither the batch nor the engine.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nanovllm.checks import show
from nanovllm.extras.logits_processors import call_processor
from nanovllm.params import SamplingParams

if TYPE_CHECKING:
    import torch

State = TypeVar("State")
RequestLogitsProcessor = Callable[..., Any]  # (output ids, logits) or (prompt ids, output ids, logits)


class MoveDirectionality(Enum):
    """How two rows of a batch change places. Here no row moves."""

    UNIDIRECTIONAL = 0
    SWAP = 1


@dataclass(frozen=True)
class BatchUpdate:
    """What changed in a batch: first `removed` rows, then `added`, then `moved` ones.

    added: (row, params, prompt ids, output ids) for each; the list of output ids grows while the row runs.
    moved: (row, row, direction) for each.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Changes the logits of a batch, as in vLLM. Here a batch is one sequence: row 0.

    The constructor gets (vllm_config, device, is_pin_memory): `llm.vllm_config`, a torch.device, a bool.
    """

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None: ...

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters of a request that this class cannot use."""
        return None

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Learn what changed before a token is drawn; None: only the output ids grew."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the changed logits, [rows, vocabulary] float32; they may be changed in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether greedy tokens stay the same. Nothing here depends on it."""


def process_dict_updates(
    entries: MutableMapping[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Bring states by row up to date with a batch; return whether any changed.

    new_state: (params, prompt ids, output ids) -> the state of a new row, or None for a row without one.
    """
    if batch_update is None:
        return False
    changed = False
    for row in batch_update.removed:
        changed |= entries.pop(row, None) is not None
    for row, params, prompt_ids, output_ids in batch_update.added:
        changed |= entries.pop(row, None) is not None
        state = new_state(params, prompt_ids, output_ids)
        if state is not None:
            entries[row], changed = state, True
    for first, second, direction in batch_update.moved:
        one, other = entries.pop(first, None), entries.pop(second, None)
        if one is not None:
            entries[second] = one
        if other is not None and direction is MoveDirectionality.SWAP:
            entries[first] = other
        changed |= one is not None or other is not None
    return changed


class AdapterLogitsProcessor(LogitsProcessor):
    """Makes a function for each request: a subclass has `new_req_logits_processor`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function of a request, as in `SamplingParams(logits_processors=...)`; None: no change."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bound)

    def _bound(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        return lambda logits: call_processor(function, prompt_ids or [], output_ids, logits)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, function in self.req_info.items():
            logits[row] = function(logits[row])
        return logits


def load_processors(given: Sequence[type | str] | None) -> list[type[LogitsProcessor]]:
    """The classes, given as such or as "module:Class". TypeError or ValueError names what is none."""
    found: list[type[LogitsProcessor]] = []
    for index, each in enumerate(given or ()):
        where = f"logits_processors[{index}]"
        loaded: Any = each
        if isinstance(each, str):
            module, _, name = each.partition(":")
            if not module or not name:
                raise ValueError(f"{where} must be a class or 'module:Class', not {show(each)}")
            try:
                loaded = import_module(module)
                for part in name.split("."):
                    loaded = getattr(loaded, part)
            except (ImportError, AttributeError) as error:
                raise ValueError(f"{where}={each!r} cannot be imported: {error}") from error
        if not isinstance(loaded, type) or not issubclass(loaded, LogitsProcessor):
            raise TypeError(f"{where} must be a subclass of nanovllm.LogitsProcessor, not {show(loaded)}")
        if inspect.isabstract(loaded):
            missing = ", ".join(sorted(loaded.__abstractmethods__))
            raise TypeError(f"{where}: {loaded.__name__} lacks {missing}")
        found.append(loaded)
    return found


class _Running(NamedTuple):
    """The processor of one sequence, and the list of output ids that it was given."""

    processor: LogitsProcessor
    output_ids: list[int]


class OfRequest:
    """A class of processors as the function of one request.

    Completions of a request (`n` above 1) share this function: each finds its own object by the tokens that
    the object has seen. Equal ones may change places, which is the same.
    """

    def __init__(self, made_by: type[LogitsProcessor], vllm_config: Any, params: SamplingParams) -> None:
        self._made_by, self._vllm_config, self._params = made_by, vllm_config, params
        self._running: list[_Running] = []

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        found = None
        if output_ids:
            before = output_ids[:-1]
            found = next((each for each in self._running if each.output_ids == before), None)
        if found is None:
            is_cuda = logits.device.type == "cuda"
            found = _Running(self._made_by(self._vllm_config, logits.device, is_cuda), list(output_ids))
            self._running.append(found)
            row = (0, self._params, list(prompt_ids), found.output_ids)
            found.processor.update_state(BatchUpdate(1, removed=(), added=(row,), moved=()))
        else:
            found.output_ids.append(output_ids[-1])
            found.processor.update_state(None)
        made = found.processor.apply(logits.clone()[None])
        if getattr(made, "shape", None) != (1, *logits.shape):
            name = self._made_by.__name__
            raise ValueError(
                f"{name}.apply must return logits of shape {(1, *logits.shape)}, not {show(made)}"
            )
        return made[0]
