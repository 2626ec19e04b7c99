"""Checks of the kernels between logits and tokens for any device: penalties, masks and logprobs.

A check compares the Triton launcher and the torch reference with a computation of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import torch
from tensors import F32, randn
from transformers import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor

from nanovllm.extras.columns import LogprobColumns
from nanovllm.extras.kernels import logprobs
from nanovllm.extras.kernels.logprobs import token_logprobs
from nanovllm.kernels.logits import (
    IN_PROMPT,
    MAX_COUNT,
    WORD,
    RowMasks,
    RowPenalties,
    count_tokens,
    process_logits_reference,
    process_logits_triton,
    restart_counts,
)

PROCESSORS = (process_logits_triton, process_logits_reference)
# (repetition, frequency, presence) of rows in turn
PENALTIES = (
    (1.0, 0.0, 0.0),
    (1.3, 0.0, 0.0),
    (0.5, 0.0, 0.0),
    (1.0, 1.5, 0.0),
    (1.0, -0.7, 0.0),
    (1.0, 0.0, 2.0),
    (1.0, 0.0, -1.0),
    (2.0, 0.3, 0.2),
)
SPARE_SLOTS = 3  # that no row of a check has


def make_histories(rows: int, vocab: int) -> list[tuple[list[int], list[int]]]:
    """The prompt and the output of each row. Both repeat tokens and share some, and have the first and the
    last id of the vocabulary.
    """
    generator = torch.Generator().manual_seed(rows)
    histories = []
    for row in range(rows):
        ids = torch.randint(vocab, (9,), generator=generator).tolist()
        prompt = [*ids[:5], ids[0], vocab - 1] if row % 3 else []
        output = [*ids[4:], *ids[6:], ids[6], 0] if row % 4 else []
        histories.append((prompt, output))
    return histories


def make_counts(
    histories: list[tuple[list[int], list[int]]], slots: torch.Tensor, vocab: int
) -> torch.Tensor:
    """The table of counts of these rows. Other slots hold counts that no row may use."""
    counts = torch.full((len(slots) + SPARE_SLOTS, vocab), IN_PROMPT + 5, dtype=torch.int16)
    for (prompt, output), slot in zip(histories, slots.tolist(), strict=True):
        counts[slot] = 0
        for token_id in output:
            counts[slot, token_id] += 1
        for token_id in set(prompt):
            counts[slot, token_id] += IN_PROMPT
    return counts.to(slots.device)


def make_slots(rows: int, device: str) -> torch.Tensor:
    """Slots that are neither in order nor the first ones."""
    return torch.randperm(rows + SPARE_SLOTS, generator=torch.Generator().manual_seed(rows))[:rows].to(device)


def make_masks(rows: int, vocab: int, device: str) -> tuple[RowMasks, list[set[int] | None]]:
    """Masks of two rows in three, in another order, and the tokens that each row allows. Bits beyond the
    vocabulary are set. One mask allows a single token, one allows nothing.
    """
    generator = torch.Generator().manual_seed(vocab)
    num_masks = len([row for row in range(rows) if row % 3])
    order = torch.randperm(num_masks, generator=generator).tolist()
    bits = torch.full((num_masks, -(-vocab // WORD)), -1, dtype=torch.int64)
    mask_of_row, allowed, place = torch.full((rows,), -1), [], 0
    for row in range(rows):
        if row % 3 == 0:
            allowed.append(None)
            continue
        some = set(torch.randint(vocab, (max(1, vocab // 3),), generator=generator).tolist())
        some = {vocab - 1} if row % 7 == 1 else set() if row % 7 == 2 else some
        allowed.append(some)
        mask_of_row[row] = order[place]
        for token_id in set(range(vocab)) - some:
            bits[order[place], token_id // WORD] &= ~(1 << (token_id % WORD))
        place += 1
    signed = torch.where(bits >= 2**31, bits - 2**32, bits & 0xFFFFFFFF)
    signed = torch.where(signed >= 2**31, signed - 2**32, signed)
    return RowMasks(mask_of_row.to(device), signed.to(device, torch.int32)), allowed


def processed(
    logits: list[float],
    penalties: tuple[float, float, float],
    history: tuple[list[int], list[int]],
    allowed: set[int] | None,
) -> list[float]:
    """One row by definition, token by token."""
    repetition, frequency, presence = penalties
    prompt, output = history
    result = []
    for token_id, x in enumerate(logits):
        if token_id in prompt or token_id in output:
            x = x / repetition if x > 0 else x * repetition
        x -= frequency * output.count(token_id) + (presence if token_id in output else 0.0)
        may = allowed is None or token_id in allowed or math.isnan(x)
        result.append(x if may else -math.inf)
    return result


def check_process_logits(rows: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Penalties alone, masks alone and both, for a strided matrix with NaN and infinities."""
    logits = (3 * randn(rows, vocab + 7, dtype=F32, device=device)).to(dtype)[:, :vocab]
    logits[0, vocab // 2] = 0.0
    logits[-1, 0], logits[-1, vocab - 1] = math.nan, -math.inf
    logits[rows // 2, vocab // 3] = math.inf
    kept = logits.clone()
    slots, histories = make_slots(rows, device), make_histories(rows, vocab)
    counts = make_counts(histories, slots, vocab)
    columns = [PENALTIES[row % len(PENALTIES)] for row in range(rows)]
    penalties = RowPenalties(*torch.tensor(columns, device=device).T.contiguous(), slots, counts)
    masks, allowed = make_masks(rows, vocab, device)
    free = [None] * rows
    neutral = [(1.0, 0.0, 0.0)] * rows
    for own, own_columns in ((penalties, columns), (None, neutral)):
        for mask, own_allowed in ((masks, allowed), (None, free)):
            wide = logits.double().tolist()
            exact = torch.tensor(
                [processed(*each) for each in zip(wide, own_columns, histories, own_allowed, strict=True)],
                device=device,
            )
            for process in PROCESSORS:
                out = process(logits, own, mask)
                assert out.dtype == F32 and out.shape == (rows, vocab)
                torch.testing.assert_close(out, exact.float(), rtol=1e-6, atol=1e-5, equal_nan=True)
                assert torch.equal(kept.nan_to_num(), logits.nan_to_num())
    for process in PROCESSORS:
        assert process(logits[:0], None, None).shape == (0, vocab)
        some = slice(rows // 3, rows // 3 + 2)
        whole, part = (
            process(logits, penalties, masks),
            process(logits[some], penalties.of(some), masks.of(some)),
        )
        assert torch.equal(part.nan_to_num(), whole[some].nan_to_num())


def check_process_logits_as_transformers(vocab: int, device: str) -> None:
    """One row for each of transformers' processors: repetition penalty and suppressed tokens."""
    logits = 4 * randn(2, vocab, dtype=F32, device=device)
    prompt, output = [3, 5, 3, vocab - 1], [7, 5, 0]
    slots = torch.tensor([2, 0], device=device)
    counts = make_counts([(prompt, output)] * 2, slots, vocab)
    column = torch.tensor([1.7, 0.8], device=device)
    penalties = RowPenalties(column, torch.zeros_like(column), torch.zeros_like(column), slots, counts)
    masks, allowed = make_masks(5, vocab, device)
    masks = masks.of(slice(4, 5))
    ids = torch.tensor([prompt + output], device=device)
    suppressed = SuppressTokensLogitsProcessor(
        [each for each in range(vocab) if each not in (allowed[4] or ())], device
    )
    for process in PROCESSORS:
        out = process(logits, penalties, None)
        for row, penalty in enumerate(column.tolist()):
            expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[row : row + 1].clone())
            torch.testing.assert_close(out[row : row + 1], expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(process(logits[:1], None, masks), suppressed(ids, logits[:1].clone()))


def check_counts(vocab: int, device: str) -> None:
    """Restarting a slot clears its counts only. Ids that are no token and rows without a slot count nothing,
    and counts stop at MAX_COUNT.
    """
    slots = torch.tensor([4, 1, 3], device=device)
    histories = [([2, 2, 7], [7, 7, 0]), ([], [5]), ([vocab - 1], [])]
    expected = make_counts(histories, slots, vocab)
    counts = torch.full_like(expected, IN_PROMPT + 5)

    def cells(ids: list[tuple[int, int]]) -> torch.Tensor:
        return torch.tensor([slot * vocab + token_id for slot, token_id in ids], device=device)

    prompts = cells([(4, 2), (4, 7), (3, vocab - 1)])
    outputs, times = cells([(4, 7), (4, 0), (1, 5)]), torch.tensor([2, 1, 1], device=device)
    restart_counts(counts, slots, prompts, outputs, times)
    assert torch.equal(counts, expected)
    drawn = torch.tensor([7, -1, vocab - 1, 3, 2], device=device)
    count_tokens(counts, torch.tensor([4, 1, 3, -1, 1], device=device), drawn)
    for slot, token_id in ((4, 7), (3, vocab - 1), (1, 2)):
        expected[slot, token_id] += 1
    assert torch.equal(counts, expected)
    assert counts[4, 7] == IN_PROMPT + 3 and counts[3, vocab - 1] == IN_PROMPT + 1
    nothing = cells([])
    restart_counts(counts, slots[:1], prompts[:1], nothing.long(), nothing)
    expected[4], expected[4, 2] = 0, IN_PROMPT
    assert torch.equal(counts, expected)
    restart_counts(counts, slots[:1], prompts[:1], prompts[:1], torch.tensor([MAX_COUNT], device=device))
    count_tokens(counts, slots[:1], torch.tensor([2], device=device))
    assert counts[4, 2] == IN_PROMPT + MAX_COUNT


# ---- logprobs ----


def run_both(check: Callable[[], LogprobColumns[torch.Tensor]]) -> list[LogprobColumns[torch.Tensor]]:
    """The results of Triton and of the reference."""
    results = []
    for by_triton in (True, False):
        with mock.patch.object(logprobs, "use_triton", lambda _, answer=by_triton: answer):
            results.append(check())
    return results


def check_token_logprobs(rows: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Against log_softmax in float64 and a stable sort: of equal logits the lower id comes first. Rows are
    random, full of ties, nearly all -inf, or all equal.
    """
    logits = (3 * randn(rows, vocab + 3, dtype=F32, device=device)).to(dtype)[:, :vocab]
    logits[1::4] = logits[1::4].float().round().to(dtype)
    logits[2::4, 2:] = -math.inf
    logits[3::4] = -0.0
    logits[3::4, ::2] = 0.0
    wide = logits.double()
    exact = wide.log_softmax(dim=1)
    order = wide.argsort(dim=1, descending=True, stable=True)
    chosen = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    chosen[::5] = -1  # a row that is not finite
    chosen[2::4] = 0
    ids = chosen.clamp(min=0)[:, None]
    ranks = (wide >= wide.gather(1, ids)).sum(dim=1)
    interpreted = device == "cpu" and rows > 50  # token by token
    for k in (0, 3, vocab) if interpreted else (0, 1, 5, 20, vocab, 2**31 - 1):
        shown = torch.cat([ids, order[:, :k]], dim=1)
        for normalize, values in ((True, exact), (False, wide))[: 1 + (k == 5)]:
            for out in run_both(lambda k=k, n=normalize: token_logprobs(logits, chosen, k, n)):
                assert (out.values.dtype, out.token_ids.dtype) == (F32, torch.int64)
                assert torch.equal(out.token_ids, shown), k
                assert torch.equal(out.ranks, ranks)
                expected = values.gather(1, shown).float()
                torch.testing.assert_close(out.values, expected, rtol=1e-5, atol=1e-5)


def check_logprobs_rows_are_independent(rows: int, vocab: int, device: str) -> None:
    """A row has the same bits alone, in a shuffled batch, and beside NaN and infinities."""
    logits = randn(rows, vocab, dtype=F32, device=device)
    chosen = torch.arange(rows, device=device) % vocab
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(device)
    bad = torch.arange(rows, device=device) % 4 == 1
    spoilt = logits.clone()
    spoilt[bad, vocab // 2] = math.nan
    spoilt[bad, 0] = math.inf
    one = slice(rows // 2, rows // 2 + 1)
    for place, by_triton in enumerate((True, False)):
        whole, shuffled, alone, beside = (
            run_both(lambda x=x, ids=ids: token_logprobs(x, ids, 5))[place].columns
            for x, ids in (
                (logits, chosen),
                (logits[order], chosen[order]),
                (logits[one], chosen[one]),
                (spoilt, chosen),
            )
        )
        for column, mixed, single, near in zip(whole, shuffled, alone, beside, strict=True):
            assert torch.equal(mixed, column[order])
            assert torch.equal(single, column[one])
            assert torch.equal(near[~bad], column[~bad])
        # Sums of torch follow the number of rows on a GPU, where only Triton computes.
        for size in (1, 3, 20) if by_triton or device == "cpu" else ():
            parts = [
                run_both(lambda x=x, ids=ids: token_logprobs(x, ids, 5))[place].columns
                for x, ids in zip(logits.split(size), chosen.split(size), strict=True)
            ]
            for column, pieces in zip(whole, zip(*parts, strict=True), strict=True):
                assert torch.equal(torch.cat(pieces), column)
        for value in (math.nan, math.inf):  # a row that is not finite has no logprobs and no logits
            spoilt = logits.clone()
            spoilt[bad, vocab // 2] = value
            for k, normalize in ((0, True), (5, True), (5, False), (vocab, True)):
                found = run_both(lambda x=spoilt, k=k, n=normalize: token_logprobs(x, chosen, k, n))[place]
                assert found.values[bad].isnan().all() and not found.values[~bad].isnan().any()
