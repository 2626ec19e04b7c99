"""Prefill steps in pieces: a CUDA graph for all that stands between two attentions, which are launched.

Between attentions a step depends on nothing but its number of tokens; attention depends on the lengths of
all sequences. So steps are padded to one of few numbers of tokens, and those that come again and again are
captured. A step without graphs is padded too, and pieces launch its kernels: whether it is captured changes
no bit of an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from nanovllm.attention.backends import AttentionBackend
from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.batch import NO_SLOT
from nanovllm.cuda_graphs.graphs import capture_stream
from nanovllm.device import Device
from nanovllm.kernels.paged import KVCache
from nanovllm.layers.stream import Step, Stream
from nanovllm.models.decoder import Attention, DecoderForCausalLM

# On H200s a layer takes the host 0.5 to 1 ms to launch, and a device 2 * weights * tokens / 600e12 s to run.
# Above this product the device takes longer than three times the host.
_WEIGHTS_TIMES_TOKENS = 5e11
_STEPS = 3  # of so many tokens run without a graph: a capture takes the host as long as about four
_MOST_SIZES = 16  # numbers of tokens that are captured; each takes some megabytes of the driver
_LEAST_UNIT = 16  # tokens; the padded number of tokens is a multiple of it


def padded(tokens: int) -> int:
    """The number of tokens that a step of `tokens` is padded to: one of eight between two powers of 2.

    From 128 tokens on that adds 4 % on average, and less than an eighth.
    """
    unit = max(_LEAST_UNIT, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // unit) * unit


def most_tokens(model: DecoderForCausalLM, max_tokens: int) -> int:
    """The most tokens of a step, at most `max_tokens`, that the host may launch more slowly than it runs."""
    layers = model.model.layers
    weights = sum(each.numel() for each in layers.parameters()) / len(layers)
    return min(max_tokens, int(_WEIGHTS_TIMES_TOKENS / weights))


class _Memory:
    """Memory that torch shall read as a tensor without owning it."""

    def __init__(self, x: torch.Tensor) -> None:
        integers = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}
        kind = {"shape": tuple(x.shape), "typestr": integers[x.element_size()], "version": 3}
        self.__cuda_array_interface__ = kind | {"data": (x.data_ptr(), False)}


def _not_owned(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous, as a tensor that does not keep its memory: later graphs of the pool may use it again."""
    assert x.is_contiguous()
    return torch.as_tensor(_Memory(x), device=x.device).view(x.dtype)


class _Piece(NamedTuple):
    graph: torch.cuda.CUDAGraph
    layer: Attention | None = None  # whose attention follows; None: the last layer does
    q: torch.Tensor | None = None  # its queries, which the attention overwrites


class _Pieces(NamedTuple):
    pieces: list[_Piece]
    stream: Stream  # before the last layer
    layer_inputs: torch.Tensor | None


class PrefillGraphs:
    """Runs the prefill steps of one model on one GPU; it has all weights, and each layer attends once."""

    def __init__(
        self, model: DecoderForCausalLM, device: Device, pool: Any, max_tokens: int, groups: int
    ) -> None:
        """pool: the memory pool of all graphs, which never run at once. groups: how many `KVGroup`s."""
        self.most = most_tokens(model, max_tokens)
        self._model, self._device, self._pool = model, device, pool
        first = model.model.layers[:-1]
        self._layers = [each for each in first.modules() if isinstance(each, Attention)]
        self._groups = groups
        self._steps: Counter[int] = Counter()  # that were launched, by their number of tokens
        self.captured: dict[int, _Pieces | None] = {}  # the same; None: there was no memory

    @cached_property
    def _inputs(self) -> list[torch.Tensor]:
        """What graphs read: token ids, positions, and the cache slots of each group."""
        dtypes = torch.int64, torch.int32, *[torch.int32] * self._groups
        return [torch.zeros(self.most, dtype=dtype, device=self._device.torch) for dtype in dtypes]

    def run(self, token_ids: torch.Tensor, step: Step, wanted: torch.Tensor | None) -> torch.Tensor | None:
        """As the model; None for a step of a kind or size that is never captured."""
        tokens, meta = len(token_ids), step.meta
        if not 0 < tokens <= self.most or step.halves is not None or meta.cu_seqlens_q is None:
            return None
        size = min(padded(tokens), self.most)
        static = [each[:size] for each in self._inputs]
        given = [token_ids, step.positions, meta.slot_mapping, *(other.slot_mapping for other in meta.others)]
        ids, positions, mine, *others = static
        pairs = zip(meta.others, others, strict=True)
        meta = replace(
            meta, slot_mapping=mine, others=tuple(replace(other, slot_mapping=own) for other, own in pairs)
        )
        step = Step(positions, meta)
        pieces = self.captured.get(size)
        if pieces is None and self._pays(size):
            pieces = self.captured[size] = self._capture_if_it_fits(static, step)
        for fixed, own, none in zip(static, given, (0, 0, *[NO_SLOT] * self._groups), strict=True):
            fixed[:tokens].copy_(own)
            if tokens < size:
                fixed[tokens:].fill_(none)
        if pieces is None:
            hidden = self._model(ids, step, wanted)
        else:
            metas = [meta.of_group(group) for group in range(self._groups)]
            for piece in pieces.pieces:
                piece.graph.replay()
                if piece.layer is not None and piece.q is not None:
                    _attend(piece.layer, piece.q, metas[piece.layer.group])
            step = step._replace(layer_inputs=pieces.layer_inputs)
            hidden = self._model.leave(pieces.stream, step, wanted)
        return hidden if wanted is not None else hidden[:tokens]

    def _pays(self, tokens: int) -> bool:
        """Whether to capture steps of so many tokens; counts them."""
        if tokens in self.captured or len(self.captured) == _MOST_SIZES:
            return False
        self._steps[tokens] += 1
        return self._steps[tokens] > _STEPS

    def _capture_if_it_fits(self, static: list[torch.Tensor], step: Step) -> _Pieces | None:
        token_ids, _, *slots = static
        for each in slots:
            each.fill_(NO_SLOT)
        others = tuple(replace(other, copies=None) for other in step.meta.others)
        step = step._replace(meta=replace(step.meta, copies=None, others=others))  # copies are launched
        enter = partial(self._model.enter, token_ids, step)

        # This run compiles kernels and creates library handles, which a capture must not do.
        self._device.reset_peak()
        with self._cut(lambda layer, q: None):
            enter()
        need = self._device.peak_above_current()
        self._device.empty_cache()
        return self._capture(enter) if self._device.memory()[0] > 2 * need else None

    def _capture(self, enter: Callable[[], tuple[Any, Step]]) -> _Pieces:
        device = self._device.torch
        self._device.synchronize()
        pieces: list[_Piece] = []
        graph = None

        def begin() -> None:
            nonlocal graph
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def end(layer: Attention | None = None, q: torch.Tensor | None = None) -> None:
            nonlocal graph
            ended, graph = graph, None
            assert ended is not None
            ended.capture_end()
            pieces.append(_Piece(ended, layer, None if q is None else _not_owned(q)))

        def cut(layer: Attention, q: torch.Tensor) -> None:
            end(layer, q)
            begin()

        with torch.cuda.stream(capture_stream(device)), self._cut(cut):
            begin()
            try:
                x, step = enter()
                assert isinstance(x, Stream), "one rank, whole"
                end()
            except BaseException:
                if graph is not None:
                    graph.capture_end()
                raise
            residual = None if x.residual is None else _not_owned(x.residual)
            stream_out = replace(x, term=_not_owned(x.term), residual=residual)
            inputs = None if step.layer_inputs is None else _not_owned(step.layer_inputs)
        self._device.synchronize()
        return _Pieces(pieces, stream_out, inputs)

    @contextmanager
    def _cut(self, at: Callable[[Attention, torch.Tensor], None]) -> Iterator[None]:
        """In this context the layers call `at` with their queries, and take them for what was attended."""
        backends = [layer.backend for layer in self._layers]
        for layer in self._layers:
            layer.backend = _Cut(partial(at, layer))
        try:
            yield
        finally:
            for layer, backend in zip(self._layers, backends, strict=True):
                layer.backend = backend


def _attend(layer: Attention, q: torch.Tensor, meta: AttentionMetadata) -> None:
    """What `Attention.forward` does between two pieces; the result overwrites q. meta: of its group."""
    if layer.spec.kv_from is None:
        layer.copy_cells(meta)
    layer.backend.replace(q, layer.cache, meta, layer.spec, layer.sinks)


class _Cut(AttentionBackend):
    """In place of a backend: a piece ends where it is called."""

    def __init__(self, at: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._at = at

    @classmethod
    def unavailable(cls, device: Device, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
        return None

    def forward(
        self,
        q: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q = q.contiguous()
        self._at(q)
        return q
