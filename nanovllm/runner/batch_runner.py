"""BatchRunner: one Batch in, one set of sampled tokens out, on a model that is loaded. Ending: the end of a
step, from hidden states through the LM head to tokens; `extras/ending.py` computes what extras ask for.

Never sees a Sequence and never decides what runs. Only `PendingOutput.result` waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nanovllm.batch import NOT_DRAWN, Batch, StepKind, StepOutput, StepSize, rows_of
from nanovllm.device import Device
from nanovllm.doors import EXTRAS, Table
from nanovllm.kernels.last_tokens import keep_tokens, take_tokens
from nanovllm.kernels.sampling import sample
from nanovllm.layers.stream import Group, Step
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.runner.inputs import BatchInputs, PendingOutput, Staging, prepare_decode, prepare_prefill
from nanovllm.runner.memory import CacheLayout
from nanovllm.runner.protocols import GraphOutput, Graphs, Prefills, PrefixFinder, RecordedSteps, SharedRows

_EXTRAS: Table[Any] = Table(EXTRAS)
_CHUNK_BYTES = 2**28  # of float32 logits that are computed at once


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
                whole = self.routed is not None or not self.layout.groups[-1].policy.in_parts
                arrays = prepare_prefill(batch, self.block_size, None if whole else self.tp.split)
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


class Ending:
    """The end of every step of one rank. Each rank processes a part of the rows; all get all token ids. Owns
    each slot's last token."""

    def __init__(
        self, model: DecoderForCausalLM, tp: Group, device: Device, max_seqs: int, logprobs_mode: str
    ) -> None:
        """max_seqs: sequences of the largest step, and the number of slots. logprobs_mode: as in `Config`."""
        self.model, self.tp, self.device = model, tp, device
        self.vocab_size = model.config.vocab_size
        self.logprobs_mode = logprobs_mode
        self.max_rows = max(1, min(max_seqs, _CHUNK_BYTES // (4 * self.vocab_size)))  # of logits with extras
        self.max_seqs = max_seqs
        self.extras: Any = None  # the door's `ExtrasEnding`, once a step has extras
        self.last_token_ids = torch.zeros(max_seqs, dtype=torch.int64, device=device.torch)  # by slot

    def end(
        self, batch: Batch, hidden: torch.Tensor, inputs: BatchInputs[torch.Tensor], masks: object = None
    ) -> StepOutput[torch.Tensor]:
        """Draw a step's tokens, and compute what its extras ask for.

        hidden: [n, hidden_size], of the tokens in `wanted_rows`, or of all decode rows. masks: of
        `Scheduler.masks`.
        """
        if batch.extras:
            if self.extras is None:
                self.extras = _EXTRAS["ending"](self)
            output: StepOutput[torch.Tensor] = self.extras.end(batch, hidden, inputs, masks, self.draw)
            return output
        last = hidden[: len(batch.slots)]
        if batch.draws.any():
            token_ids = self.draw(last, inputs)
        else:  # only chunks of prompts
            token_ids = last.new_full((len(last),), NOT_DRAWN, dtype=torch.int64)
        return StepOutput(token_ids[:, None])

    def draw(self, hidden: torch.Tensor, inputs: BatchInputs[torch.Tensor]) -> torch.Tensor:
        """Draw the tokens [n] for hidden [n, hidden_size] of the step's first n sequences, and store them by
        slot."""
        logits = self.model.compute_logits(hidden)
        mine, whole = self.tp.whole_rows(logits, self.vocab_size)
        token_ids = sample(whole, rows_of(inputs.sampling, mine))
        token_ids = self.tp.join_rows(token_ids, mine, logits)
        keep_tokens(token_ids, inputs.sample_slots[: len(hidden)], self.last_token_ids)
        return token_ids
