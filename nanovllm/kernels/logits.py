"""Penalties and token masks on logits in one pass, and the token counts for penalties.

Knows no sequence and no rule: a mask is bits, a count is a number in a table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels.compat import jit, tl, use_triton

BLOCK = 2048  # vocabulary entries of a program
IN_PROMPT = 1 << 14  # bit of a count: the token is in the prompt; the other bits count it in the output
MAX_COUNT = IN_PROMPT - 1  # the largest count
WORD = 32  # tokens in a word of a mask


class RowPenalties(NamedTuple):
    """The penalties of S rows, each [S] float32, and the token counts."""

    repetition: torch.Tensor  # 1: none
    frequency: torch.Tensor  # 0: none
    presence: torch.Tensor  # 0: none
    slots: torch.Tensor  # [S] int64, each row's index into `counts`
    counts: torch.Tensor  # [slots, V] int16

    def of(self, rows: slice) -> RowPenalties:
        """The penalties of some rows."""
        return self._replace(
            repetition=self.repetition[rows],
            frequency=self.frequency[rows],
            presence=self.presence[rows],
            slots=self.slots[rows],
        )


class RowMasks(NamedTuple):
    """The token masks of S rows."""

    mask_of_row: torch.Tensor  # [S] int64; -1: the row has none
    bits: torch.Tensor  # [M, ceil(V / 32)] int32; bit i % 32 of word i // 32: token i is allowed

    def of(self, rows: slice) -> RowMasks:
        """The masks of some rows."""
        return RowMasks(self.mask_of_row[rows], self.bits)


@jit("slots_ptr", "mask_of_row_ptr", "words")
def _process_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    mask_of_row_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    x_stride: int,
    vocab: int,
    words: int,
    PENALTIES: tl.constexpr,
    MASKS: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per (row, block)."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = index < vocab
    x = tl.load(x_ptr + row * x_stride + index, mask=live, other=0.0).to(tl.float32)
    if PENALTIES:
        repetition, frequency = tl.load(repetition_ptr + row), tl.load(frequency_ptr + row)
        presence = tl.load(presence_ptr + row)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            slot = tl.load(slots_ptr + row)
            seen = tl.load(counts_ptr + slot * vocab + index, mask=live, other=0).to(tl.int32)
            count = seen & (IN_PROMPT - 1)
            x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
            x -= frequency * count.to(tl.float32)
            x -= tl.where(count > 0, presence, 0.0)
    if MASKS:
        mask = tl.load(mask_of_row_ptr + row)
        if mask >= 0:
            word = tl.load(bits_ptr + mask * words + index // WORD, mask=live, other=0)
            x = tl.where((((word >> (index % WORD)) & 1) != 0) | (x != x), x, float("-inf"))
    tl.store(out_ptr + row * vocab + index, x, mask=live)


def process_logits_triton(
    logits: torch.Tensor, penalties: RowPenalties | None, masks: RowMasks | None
) -> torch.Tensor:
    """`process_logits` with Triton."""
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return out
    nothing = logits
    _process_kernel[(rows, -(-vocab // BLOCK))](
        logits,
        out,
        *(penalties or (nothing,) * len(RowPenalties._fields)),
        *(masks or (nothing,) * len(RowMasks._fields)),
        logits.stride(0),
        vocab,
        0 if masks is None else masks.bits.shape[1],
        PENALTIES=penalties is not None,
        MASKS=masks is not None,
        IN_PROMPT=IN_PROMPT,
        WORD=WORD,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


def process_logits_reference(
    logits: torch.Tensor, penalties: RowPenalties | None, masks: RowMasks | None
) -> torch.Tensor:
    """`process_logits` in plain torch."""
    x = logits.float()
    if penalties is not None:
        seen = penalties.counts[penalties.slots]
        count = (seen & MAX_COUNT).float()
        repetition = penalties.repetition[:, None]
        x = torch.where(seen != 0, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - penalties.frequency[:, None] * count - penalties.presence[:, None] * (count > 0)
    if masks is not None:
        rows = (masks.mask_of_row >= 0).nonzero()[:, 0]
        index = torch.arange(logits.shape[1], device=logits.device)
        words = masks.bits[masks.mask_of_row[rows]][:, index // WORD]
        may = ((words >> (index % WORD)) & 1) != 0
        x = x.index_copy(0, rows, x[rows].where(may | x[rows].isnan(), float("-inf")))
    return x


def process_logits(
    logits: torch.Tensor, penalties: RowPenalties | None, masks: RowMasks | None
) -> torch.Tensor:
    """Return logits [S, V] as float32 with penalties, then masks, applied; `logits` does not change.

    Repetition penalty: logits of tokens in prompt or output are divided by it if positive, else multiplied
    (Keskar et al. 2019, CTRL). Frequency penalty: subtracted once for each occurrence in the output. Presence
    penalty: subtracted once for each token in the output. A token whose bit is 0 gets -inf, but NaN stays.
    """
    if use_triton(logits):
        return process_logits_triton(logits, penalties, masks)
    return process_logits_reference(logits, penalties, masks)


def restart_counts(
    counts: torch.Tensor,
    slots: torch.Tensor,
    prompt_cells: torch.Tensor,
    cells: torch.Tensor,
    times: torch.Tensor,
) -> None:
    """Reset the counts of `slots` [R], then set those of prompt_cells [P] and cells [Q] of outputs.

    counts: [slots, V] int16. A cell is slot * V + token id, without repetitions. times: [Q], the counts of
    `cells`, up to MAX_COUNT.
    """
    counts[slots] = 0
    flat = counts.view(-1)
    flat[cells] = times.to(counts.dtype)
    flat[prompt_cells] |= IN_PROMPT


def count_tokens(counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Count the drawn tokens token_ids [S] int64 of `slots` [S] int64, all different. Negative values in
    either are skipped."""
    cells = slots.clamp(min=0) * counts.shape[1] + token_ids.clamp(min=0)
    flat = counts.view(-1)
    more = (slots >= 0) & (token_ids >= 0) & ((flat[cells] & MAX_COUNT) < MAX_COUNT)
    flat.index_add_(0, cells, more.to(counts.dtype))
