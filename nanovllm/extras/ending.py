"""ExtrasEnding: the end of a step with extras: from hidden states to tokens, logprobs, scores, pooled sums.

Owns the token counts of penalties. Rows without extras get the same tokens as from `Ending.draw`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.batch import NOT_DRAWN, PADDING, Batch, StepOutput, rows_of
from nanovllm.extras.columns import (
    EACH_TOKEN,
    NO_LOGPROBS,
    WITH_HEAD,
    BatchExtras,
    ExtraOutput,
    LogprobColumns,
    Penalties,
    ScoredTokens,
    TokenMasks,
    has_filters,
)
from nanovllm.extras.kernels.logprobs import token_logprobs
from nanovllm.extras.logits_processors import call_processor
from nanovllm.kernels.last_tokens import keep_tokens
from nanovllm.kernels.logits import (
    MAX_COUNT,
    RowMasks,
    RowPenalties,
    count_tokens,
    process_logits,
    restart_counts,
)
from nanovllm.kernels.sampling import filtered_logits, sample
from nanovllm.runner.batch_runner import Ending
from nanovllm.runner.inputs import BatchInputs, last_rows, wanted_rows

Draw = Callable[[torch.Tensor, BatchInputs[torch.Tensor]], torch.Tensor]


class ExtrasEnding:
    """What an `Ending` does with steps that have `Extras`. It keeps no reference to the `Ending`."""

    def __init__(self, plain: Ending) -> None:
        self._model, self._tp, self._device = plain.model, plain.tp, plain.device
        self._vocab_size, self._mode = plain.vocab_size, plain.logprobs_mode
        self._max_rows, self._max_seqs = plain.max_rows, plain.max_seqs
        self._last_token_ids = plain.last_token_ids
        self.counts: torch.Tensor | None = None  # [slots, V] int16, once a sequence has penalties

    def _send(self, array: np.ndarray) -> torch.Tensor:
        """A copy of a host array on the device, queued after earlier work. Does not wait."""
        tensor = torch.from_numpy(array)
        if not self._device.is_cuda:
            return tensor
        return tensor.pin_memory().to(self._device.torch, non_blocking=True)

    def end(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        inputs: BatchInputs[torch.Tensor],
        masks: TokenMasks | None,
        draw: Draw,
    ) -> StepOutput[torch.Tensor]:
        """Draw a step's tokens, and compute its other requested outputs. Arguments as in `Ending.end`; draw:
        `Ending.draw`."""
        extras = batch.extras
        assert isinstance(extras, BatchExtras)
        last, scores, pooled, logprobs = hidden[: len(batch.slots)], None, None, None
        if extras.scored is not None or extras.pooled is not None:
            wanted = wanted_rows(batch)

            def of(places: np.ndarray) -> torch.Tensor:
                return hidden[self._send(np.searchsorted(wanted, places))]

            last = of(last_rows(batch.draws, batch.query_lens))
            if extras.scored is not None:
                scores = self._score(of(extras.scored.wanted.places), extras.scored)
            if extras.pooled is not None:
                pooled = self._pool(of(extras.pooled.places), extras, len(batch.slots))
        if not batch.draws.any():  # only prompts to score or pool, or chunks of prompts
            token_ids = last.new_full((len(last),), NOT_DRAWN, dtype=torch.int64)
        elif extras.needs_logits:
            token_ids, logprobs = self._draw_with(last, inputs, batch, extras, masks)
        else:
            token_ids = draw(last, inputs)
        return StepOutput(token_ids[:, None], ExtraOutput(logprobs, scores), pooled)

    def _draw_with(
        self,
        hidden: torch.Tensor,
        inputs: BatchInputs[torch.Tensor],
        batch: Batch,
        extras: BatchExtras,
        masks: TokenMasks | None,
    ) -> tuple[torch.Tensor, LogprobColumns[torch.Tensor] | None]:
        """As `Ending.draw`, with the step's extras; return the tokens, and their logprobs if requested.

        A row without extras gets the same token as from `Ending.draw`.
        """
        slots = inputs.sample_slots[: len(hidden)]
        penalties = self._row_penalties(extras.penalties, slots)
        row_masks = self._row_masks(masks, len(hidden))
        logits = self._model.compute_logits(hidden)
        mine, whole = self._tp.whole_rows(logits, self._vocab_size)
        token_ids: list[torch.Tensor] = []
        logprobs: list[LogprobColumns[torch.Tensor]] = []
        for start in range(0, len(whole), self._max_rows):
            raw = whole[start : start + self._max_rows]
            rows = slice(mine.start + start, mine.start + start + len(raw))
            params = rows_of(inputs.sampling, rows)
            x = self._biased(raw, extras, masks, rows)
            if penalties is not None or row_masks is not None:
                x = process_logits(x, penalties and penalties.of(rows), row_masks and row_masks.of(rows))
            ids = sample(x, params)
            token_ids.append(ids)
            if extras.num_logprobs != NO_LOGPROBS:
                logprob_logits = raw
                if self._mode.startswith("processed"):
                    logprob_logits = filtered_logits(x, params, has_filters(batch.sampling))
                asked = None if extras.asked_ids is None else self._send(extras.asked_ids[rows])
                logprobs.append(self._logprobs(logprob_logits, ids, extras.num_logprobs, asked))
        own = torch.cat(token_ids) if token_ids else hidden.new_empty(0, dtype=torch.int64)
        drawn = self._tp.join_rows(own, mine, logits)
        keep_tokens(drawn, slots, self._last_token_ids)
        if self.counts is not None and extras.penalties is not None:
            count_tokens(self.counts, slots, drawn)
        if extras.num_logprobs == NO_LOGPROBS:
            return drawn, None
        num_asked = 0 if extras.asked_ids is None else extras.asked_ids.shape[1]
        return drawn, self._join(logprobs, mine, logits, self._width(extras.num_logprobs) + num_asked)

    def _score(self, hidden: torch.Tensor, scored: ScoredTokens) -> LogprobColumns[torch.Tensor]:
        """The logprobs of prompt tokens. hidden: [n, hidden_size], of the token before each of them.

        Computed in chunks, so that their logits take no more memory than those of drawn tokens.
        """
        targets = self._send(scored.token_ids)
        parts = []
        for start in range(0, len(hidden), self._max_rows):
            logits = self._model.compute_logits(hidden[start : start + self._max_rows])
            mine, whole = self._tp.whole_rows(logits, self._vocab_size)
            ids = targets[start : start + self._max_rows][mine]
            own = [self._logprobs(whole, ids, scored.num_logprobs)] if len(whole) else []
            parts.append(self._join(own, mine, logits, self._width(scored.num_logprobs)))
        return all_rows(parts)

    def _pool(self, hidden: torch.Tensor, extras: BatchExtras, num_seqs: int) -> torch.Tensor:
        """What becomes of hidden [n, hidden_size], in float32: these rows, or with a head its values
        [n, labels]; or their sums over each sequence, [num_seqs, hidden_size or labels]."""
        head = self._model.score if extras.pooling in WITH_HEAD else None
        values: torch.Tensor = hidden.float() if head is None else head(hidden)
        if extras.pooling in EACH_TOKEN:
            return values
        assert extras.pooled is not None
        sums = torch.zeros(num_seqs, values.shape[1], device=values.device)
        return sums.index_add_(0, self._send(extras.pooled.rows), values)

    def _row_penalties(self, penalties: Penalties | None, slots: torch.Tensor) -> RowPenalties | None:
        """Count the history tokens, then return the columns of penalties on the device."""
        if penalties is None:
            return None
        send = self._send
        if self.counts is None:
            shape = (self._max_seqs, self._vocab_size)
            self.counts = torch.zeros(shape, dtype=torch.int16, device=self._device.torch)
        if len(penalties.history_ids):
            cells = penalties.history_slots * self._vocab_size + penalties.history_ids
            outputs, times = np.unique(cells[~penalties.history_is_prompt], return_counts=True)
            prompts = np.unique(cells[penalties.history_is_prompt])
            changed = np.unique(penalties.history_slots), prompts, outputs, np.minimum(times, MAX_COUNT)
            restart_counts(self.counts, *map(send, changed))
        for each in penalties.counted:
            own = send(each.slots)
            self.counts[own] = self.counts[send(each.sources)]
            count_tokens(self.counts, own, send(each.token_ids))
        return RowPenalties(
            send(penalties.repetition),
            send(penalties.frequency),
            send(penalties.presence),
            slots.clamp(min=0),
            self.counts,
        )

    def _row_masks(self, masks: TokenMasks | None, num_rows: int) -> RowMasks | None:
        if masks is None or not len(masks.rows):
            return None
        mask_of_row = np.full(num_rows, PADDING, np.int64)
        mask_of_row[masks.rows] = masks.mask_of
        return RowMasks(self._send(mask_of_row), self._send(masks.bits))

    def _biased(
        self, raw: torch.Tensor, extras: BatchExtras, masks: TokenMasks | None, rows: slice
    ) -> torch.Tensor:
        """Logits after logits processors and biases; a new tensor if there are any."""
        every, bias = () if masks is None else masks.processors, extras.bias
        functions = [each for each in every if rows.start <= each[0] < rows.stop]
        inside = None if bias is None else (bias.rows >= rows.start) & (bias.rows < rows.stop)
        if not functions and (inside is None or not inside.any()):
            return raw
        x = raw.to(torch.float32, copy=True)
        for row, function, prompt_ids, output_ids in functions:
            x[row - rows.start] = call_processor(function, prompt_ids, output_ids, x[row - rows.start])
        if bias is not None and inside is not None:
            send = self._send
            where = send(bias.rows[inside] - rows.start), send(bias.token_ids[inside])
            x.index_put_(where, send(bias.values[inside]), accumulate=True)
        return x

    def _width(self, k: int) -> int:
        return 1 + min(k, self._vocab_size)

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, k: int, asked: torch.Tensor | None = None
    ) -> LogprobColumns[torch.Tensor]:
        """As `token_logprobs`; asked: [n, M] int64, tokens whose logprobs are columns after the others."""
        found = token_logprobs(logits, token_ids, k, self._mode.endswith("logprobs"))
        if asked is None:
            return found
        ids = asked.clamp(min=0)
        normalizers = logits.gather(1, found.token_ids[:, :1]).float() - found.values[:, :1]
        values = torch.cat([found.values, logits.gather(1, ids).float() - normalizers], dim=1)
        return LogprobColumns(values, torch.cat([found.token_ids, ids], dim=1), found.ranks)

    def _join(
        self, own: list[LogprobColumns[torch.Tensor]], mine: slice, logits: torch.Tensor, width: int
    ) -> LogprobColumns[torch.Tensor]:
        """The logprobs of all rows, at least on rank 0, from those of each rank's rows; `width` columns."""
        if self._tp.size == 1:
            return all_rows(own)
        none = torch.empty(0, width, dtype=torch.float32, device=logits.device)
        columns = all_rows([LogprobColumns(none, none.long(), none[:, 0].long()), *own]).columns
        flat = [(x if x.dim() == 2 else x[:, None]).float() for x in columns]
        joined = self._tp.join_columns(torch.cat(flat, dim=1), mine, logits)
        split = joined.split([x.shape[1] for x in flat], dim=1)
        return LogprobColumns(
            *(part.to(x.dtype).reshape(-1, *x.shape[1:]) for part, x in zip(split, columns, strict=True))
        )


def all_rows(parts: list[LogprobColumns[torch.Tensor]]) -> LogprobColumns[torch.Tensor]:
    """The rows of all parts."""
    return LogprobColumns(*map(torch.cat, zip(*(part.columns for part in parts), strict=True)))
