"""Ending: the end of a step, from hidden states through the LM head to tokens.

Owns each slot's last token. Knows no graph; what a batch's extras ask for is computed in `extras/ending.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.batch import NOT_DRAWN, Batch, StepOutput, rows_of
from nanovllm.device import Device
from nanovllm.doors import EXTRAS, Table
from nanovllm.kernels.last_tokens import keep_tokens
from nanovllm.kernels.sampling import sample
from nanovllm.layers.stream import Group
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.runner.inputs import BatchInputs

_EXTRAS: Table[Any] = Table(EXTRAS)
_CHUNK_BYTES = 2**28  # of float32 logits that are computed at once


class Ending:
    """The end of every step of one rank. Each rank processes a part of the rows; all get all token ids."""

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
        self,
        batch: Batch,
        hidden: torch.Tensor,
        inputs: BatchInputs[torch.Tensor],
        masks: object = None,
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

    def free_extras(self) -> None:
        """Free what extras keep, while no sequence is unfinished; it is created again on use."""
        self.extras = None

    def reserved_bytes(self) -> int:
        """The bytes that extras may need: the counts of penalties, which are created on first use, and two
        float32 chunks of logits, because each change of logits copies them."""
        return (2 * self.max_seqs + 2 * 4 * self.max_rows) * self.vocab_size
