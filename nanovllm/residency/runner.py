"""ResidentModelRunner: a ModelRunner that can free its device memory and take new weights.

Owns the freed storages and the host copies of weights. Never decides when to sleep; `models/weights.py`
checks new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm.layers.weights import methods, named, weight_slots
from nanovllm.precompile.runner import AheadModelRunner
from nanovllm.quantization.shards import WeightMethod

WEIGHTS, KV_CACHE = TAGS = ("weights", "kv_cache")


class _FreedStorage(NamedTuple):
    """The freed memory of a parameter. Views of it stay, and are valid after it is allocated again."""

    storage: torch.UntypedStorage
    num_bytes: int
    copy: torch.UntypedStorage | None  # on the host


def _finish(path: str, method: WeightMethod) -> list[ValueError]:
    """Prepare a weight for use; return what was missing. An error forgets what had come of its module."""
    errors: list[ValueError] = []
    while True:
        try:
            with named(path):
                method.finish_loading()
            return errors
        except ValueError as error:
            if errors and str(error) == str(errors[-1]):
                raise
            errors.append(error)


class WakeUpNeed(NamedTuple):
    """The memory that a rank needs to wake up, and its device's memory, in bytes."""

    need: int
    free: int
    total: int


class FailedCall(NamedTuple):
    """The exception of a user's function."""

    error: Exception


class RankView(NamedTuple):
    """One rank, as a function of the user sees it, with the names of vLLM's worker."""

    rank: int
    local_rank: int
    device: torch.device
    model: torch.nn.Module

    @property
    def model_runner(self) -> RankView:
        return self

    def get_model(self) -> torch.nn.Module:
        return self.model


class ResidentModelRunner(AheadModelRunner):
    """Runs steps while nothing sleeps. All ranks make the same calls."""

    asleep: frozenset[str] = frozenset()  # subset of TAGS
    profile: torch.profiler.profile | None = None  # the active one
    _trace = ""  # the path of its trace
    has_new_weights = False  # those of an update, not of the files
    _freed: tuple[_FreedStorage, ...] = ()
    _num_blocks = 0  # of the freed KV cache
    _freed_bytes = 0  # of the freed KV cache and CUDA graphs

    @property
    def drops_weights(self) -> bool:
        """Whether weights sleep without a copy."""
        return any(freed.copy is None for freed in self._freed)

    def apply(self, function: Callable[[RankView], Any]) -> Any:
        """The result of a function of this rank. An exception is returned, so that the ranks stay in step."""
        rank = self.tp.rank
        self.forget_recorded()  # it may replace tensors of the model
        try:
            return function(RankView(rank, rank, self.device.torch, self.model))
        except Exception as error:
            return FailedCall(error)

    def sleep(self, level: int) -> None:
        """Free the weights, the KV cache and the CUDA graphs; level 1 keeps the weights on the host.

        If the weights already sleep, level 2 drops their host copy.
        """
        self.device.empty_cache()
        free, _ = self.device.memory()
        if KV_CACHE not in self.asleep:
            self._num_blocks = self.kv_cache.shape[2]
            kv_bytes = self.kv_cache.nbytes
            self.graphs.clear()  # they hold addresses of weights and KV cache
            self.prefills = None
            self.ending.extras = None  # created again on use; no sequence is unfinished
            self._set_kv_cache(0)
            self.device.empty_cache()
            self._freed_bytes = max(kv_bytes, self.device.memory()[0] - free)
        awake = WEIGHTS not in self.asleep
        self.asleep = frozenset(TAGS)
        if level > 1:
            self._freed = tuple([freed._replace(copy=None) for freed in self._freed])
        if awake:
            self._free_weights(level == 1)
        self.device.empty_cache()

    def _free_weights(self, copies: bool) -> None:
        for _, method in methods(self.model):
            method.unpack()
        storages = [parameter.untyped_storage() for parameter in self.model.parameters()]
        for storage in {storage.data_ptr(): storage for storage in storages}.values():
            num_bytes = storage.nbytes()
            copy = torch.UntypedStorage(num_bytes).copy_(storage) if copies else None
            self._freed += (_FreedStorage(storage, num_bytes, copy),)
            storage.resize_(0)

    def wake_up_need(self, tags: Collection[str]) -> WakeUpNeed:
        """The memory that `wake_up(tags)` takes; 0 on a CPU, which takes memory on use."""
        self.device.empty_cache()
        need = 0
        if self.device.is_cuda and WEIGHTS in self.asleep & set(tags):
            need += sum(freed.num_bytes for freed in self._freed)
        if self.device.is_cuda and KV_CACHE in self.asleep & set(tags):
            need += self._freed_bytes
        return WakeUpNeed(need, *self.device.memory())

    def wake_up(self, tags: Collection[str]) -> None:
        """Allocate those of `tags` that sleep; when nothing sleeps any more, capture the CUDA graphs.

        After `sleep(1)` the weights are the same as before, after `sleep(2)` the checkpoint's. The KV cache
        is empty.
        """
        waking = self.asleep & set(tags)
        if WEIGHTS in waking:
            self._restore_weights()
            self.asleep -= {WEIGHTS}
        if KV_CACHE in waking:
            self.allocate_kv_cache(self._num_blocks)
            self.asleep -= {KV_CACHE}
        if waking and not self.asleep:
            self.capture_cudagraph()

    def _restore_weights(self) -> None:
        for storage, num_bytes, copy in self._freed:
            storage.resize_(num_bytes)
            if copy is not None:
                storage.copy_(copy)
        if self.drops_weights:
            for parameter in self.model.parameters():
                parameter.zero_()  # some have padding rows, which no checkpoint fills
            self.load_weights()
            self.has_new_weights = False
            self.calibrate_kv_cache()
        for _, method in methods(self.model):
            method.pack()
        self._freed = ()

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> ValueError | None:
        """Load checked tensors by their checkpoint names. Call `finish_update` before the next step. An error
        is returned, so that the ranks stay in step."""
        slots = weight_slots(self.model)
        for name, tensor in tensors:
            layer, shard = slots[name]
            try:
                layer.load(shard, tensor)
            except ValueError as error:
                return error
        return None

    def finish_update(self) -> ValueError | None:
        """Prepare for the next step. A module of which some tensors are missing keeps its weights, and the
        first such error is returned."""
        self.forget_recorded()
        self.has_new_weights = True
        errors = [error for path, method in methods(self.model) for error in _finish(path, method)]
        self.calibrate_kv_cache()
        return errors[0] if errors else None

    def start_profile(self, folder: str, name: str) -> None:
        """Start a profile, for a trace in `folder` with the rank and `name` in its file name."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._trace = str(Path(folder, f"rank{self.tp.rank}.{name}.pt.trace.json.gz"))
        profile = torch.profiler.profile(activities=activities, acc_events=True)
        profile.start()
        self.profile = profile

    def stop_profile(self) -> str:
        """Wait for the device, end the profile, write its trace and return the path."""
        assert self.profile is not None, "the caller checks that a profile is active"
        profile, self.profile = self.profile, None
        self.device.synchronize()
        profile.stop()
        profile.export_chrome_trace(self._trace)
        return self._trace

    def exit(self) -> None:
        if self.profile is not None:
            self.profile.stop()
        self._freed = ()
        super().exit()
