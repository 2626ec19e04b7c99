"""BatchRunner: one Batch in, one set of sampled tokens out, on a model that is loaded.

Never sees a Sequence and never decides what runs. Only `PendingOutput.result` waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch

from nanovllm.attention.base import SharedPrefixes
from nanovllm.batch import Batch, StepKind, StepOutput, StepSize
from nanovllm.device import Device
from nanovllm.kernels.last_tokens import take_tokens
from nanovllm.kernels.logits import WORD
from nanovllm.layers.stream import Group, Step
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.runner.ending import Ending
from nanovllm.runner.inputs import BatchInputs, PendingOutput, Staging, prepare_decode, prepare_prefill
from nanovllm.runner.memory import CacheLayout

GraphOutput = tuple[torch.Tensor, torch.Tensor | None]
SharedRows = SharedPrefixes[np.ndarray]


class PrefixFinder(Protocol):
    """What finds the rows of a decode step that begin with the same blocks; see `shared_prefixes/`."""

    nothing: dict[int, SharedRows]  # no such rows, by each chunk that `find` may choose

    def find(self, batch: Batch) -> SharedRows | None:
        """The prefixes to read once for several rows; None if that does not pay."""


class Graphs(Protocol):
    """Decode steps over fixed tensors, captured by number of rows; see `cuda_graphs/`."""

    def size_for(self, num_seqs: int) -> int:
        """The smallest size that holds `num_seqs` rows."""

    def capture(self, size: int) -> None:
        """Capture one size, unless it is captured."""

    def replay(self, size: int) -> Any:
        """Run the captured step of `size` rows; return its output, which is valid until the next replay."""


class Prefills(Protocol):
    """Prefill steps that are captured in part; see `cuda_graphs/prefill.py`."""

    def run(self, token_ids: torch.Tensor, step: Step, wanted: torch.Tensor | None) -> torch.Tensor | None:
        """As the model; None if this step is not captured."""


class RecordedSteps(Protocol):
    """What a door has in place of graphs: decode steps, recorded when they first run and then replayed."""

    @property
    def usable(self) -> bool:
        """Whether steps can be recorded, as far as is known."""

    def clear(self) -> None:
        """Forget all recordings: addresses of weights or of the KV cache change."""

    def run(self, key: object, make_step: Callable[[], Callable[[], Any]]) -> Any:
        """The output of the step `key`, of its recording or of the step that `make_step` makes, which is
        recorded. None if it cannot be recorded; then it has stored no token."""


class BatchRunner:
    """Runs steps on one device, as one rank of a tensor-parallel group. `ModelRunner` sets what it needs."""

    model: DecoderForCausalLM
    model_config: ModelConfig
    max_model_len: int
    device: Device
    tp: Group
    dtype: torch.dtype
    size: StepSize  # of the largest step
    staging: Staging
    ending: Ending
    layout: CacheLayout
    kv_cache: torch.Tensor  # of `layout`
    block_size: int
    prefixes: PrefixFinder | None = None  # None without a KV cache
    graphs: dict[tuple[int, bool], Graphs]  # by chunk of shared prefixes, and whether drawn
    prefills: Prefills | None = None
    recorded: RecordedSteps | None = None  # on a CPU, in place of graphs
    routed: torch.Tensor | None = None  # the experts of each token, if they are returned
    _undrawn: tuple[Batch, torch.Tensor, BatchInputs[torch.Tensor]] | None = None  # as of `Ending.end`

    def run(self, batch: Batch) -> StepOutput[np.ndarray]:
        """Run a step and wait for its tokens."""
        handle = self.launch(batch)
        assert handle is not None, "no rules, nothing to wait for"
        return handle.result()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingOutput | None:
        """Queue a step on the device; the handle returns its outputs, the same on every rank.

        None if the sequences have rules: then call `draw` before the next launch.
        """
        if self.layout.own_numbers:
            batch = self.layout.numbered(batch, self.kv_cache.shape[2])
        shared, replayed = None, None
        if batch.kind is StepKind.DECODE:
            shared = None if self.prefixes is None else self.prefixes.find(batch)
            replayed = self._replay(batch, shared)
        if replayed is not None:
            (hidden, token_ids), staged = replayed
            if token_ids is not None:
                return self._receive(StepOutput(token_ids[: len(batch.slots), None]), len(batch.token_ids))
            inputs = staged()
        else:
            if batch.kind is StepKind.DECODE:
                arrays = prepare_decode(batch, self.block_size, shared)
            else:
                assert batch.kind is StepKind.PREFILL, f"no code here for the step {batch.kind!r}"
                split = None if self.routed is not None or self.model.state_layers else self.tp.split
                arrays = prepare_prefill(batch, self.block_size, split)
            inputs = self.staging.send(arrays)()
            hidden = self.run_model(inputs)
        if batch.extras.has_rules:
            self._undrawn = batch, hidden, inputs
            return None
        return self._receive(self.ending.end(batch, hidden, inputs), len(batch.token_ids))

    def _replay(
        self, batch: Batch, shared: SharedRows | None
    ) -> tuple[GraphOutput, Callable[[], BatchInputs[torch.Tensor]]] | None:
        """Replay a decode step; return its output, and a function that creates its inputs. None if there is
        no graph for it, and it cannot be recorded."""
        drawn = not batch.extras.needs_logits
        rows, recorded = len(batch.slots), self.recorded
        graphs = self.graphs.get((shared.chunk if shared else 0, drawn))
        if graphs is not None:
            rows = graphs.size_for(rows)
            graphs.capture(rows)
            arrays = prepare_decode(batch, self.block_size, shared)
            staged = self.staging.send(arrays, replace(self.size, tokens=rows, seqs=rows))
            return graphs.replay(rows), staged
        if recorded is None or shared is not None or not recorded.usable:
            return None
        arrays = prepare_decode(batch, self.block_size, None, self.max_model_len)
        staged = self.staging.send(arrays, replace(self.size, tokens=rows, seqs=rows))
        output = recorded.run((rows, drawn), lambda: partial(self.graph_step, staged(), drawn))
        return None if output is None else (output, staged)

    def _receive(self, tensors: StepOutput[torch.Tensor], num_tokens: int) -> PendingOutput:
        routed = None if self.routed is None else self.routed[:num_tokens]
        return self.staging.receive(replace(tensors, routed=routed))

    @cached_property
    def mask_buffer(self) -> np.ndarray:
        """Host memory for token masks: [max_num_seqs, ceil(vocabulary / 32)] int32.

        It can be reused once its step was read. It is kept, because page faults in megabytes of fresh memory
        would take longer than the writing.
        """
        words = -(-self.model_config.vocab_size // WORD)
        return self.device.host_buffer(self.size.seqs * words, torch.int32).numpy().reshape(-1, words)

    @torch.inference_mode()
    def draw(self, masks: object) -> PendingOutput:
        """Queue the end of the launched step; `masks` are its allowed tokens."""
        assert self._undrawn is not None, "a step with rules was launched"
        (batch, hidden, inputs), self._undrawn = self._undrawn, None
        return self._receive(self.ending.end(batch, hidden, inputs, masks), len(batch.token_ids))

    def graph_step(self, inputs: BatchInputs[torch.Tensor], drawn: bool) -> GraphOutput:
        """The part of a step that a graph captures: (hidden states, drawn tokens or None).

        Drawing that needs NCCL is not captured, because NCCL keeps the graph alive and cannot be aborted.
        """
        hidden = self.run_model(inputs)
        drawn = drawn and self.tp.exchanges_rows(len(hidden), self.dtype)
        return hidden, self.ending.draw(hidden, inputs) if drawn else None

    def run_model(self, inputs: BatchInputs[torch.Tensor]) -> torch.Tensor:
        """Run the model; return the hidden states [n, hidden_size] that are needed for logits."""
        # A stored token may be NOT_FINITE, or garbage from an aborted sum: `take_tokens` clamps it.
        vocab_size = self.model_config.vocab_size
        token_ids = take_tokens(inputs.token_ids, inputs.token_slots, self.ending.last_token_ids, vocab_size)
        step = Step(inputs.positions, inputs.attention, halves=inputs.halves, slots=inputs.token_slots)
        hidden = None if self.prefills is None else self.prefills.run(token_ids, step, inputs.wanted_rows)
        return self.model(token_ids, step, inputs.wanted_rows) if hidden is None else hidden
