"""What rows of drafts ask for besides tokens: penalties that count the drafts before, masks of tokens.

For steps that `drafts/scheduler.py` plans. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from nanovllm.batch import Extras
from nanovllm.extras.columns import BatchExtras, CountedTokens, LogitsProcessor, TokenMasks
from nanovllm.extras.token_rules import (
    AllowedTokens,
    BadWords,
    Grammar,
    MinTokens,
    Rule,
    RuledRow,
    restrict_all,
)
from nanovllm.plan.sequence import Sequence

Planned = list[tuple[Sequence, list[int]]]  # the sequences of a step, with their drafts
_STATELESS = (AllowedTokens, MinTokens, BadWords)  # rules on the tokens before, whatever was asked before


def can_draft(seq: Sequence) -> bool:
    """Whether the tokens that may follow each draft can be known: not where a logits processor of the user,
    or a budget or gate of thinking, follows the text token by token."""
    if seq.extras is None:
        return True
    if seq.params.logits_processors:
        return False
    return all(
        isinstance(rule, _STATELESS) or (isinstance(rule, Grammar) and not rule.may_think)
        for rule in seq.extras.rules
    )


def plan_extras(extras: Extras, planned: Planned, slots: np.ndarray, accepted: list[list[int]]) -> Extras:
    """The extras of a step with the tokens that its penalties count first. slots [S]: of the rows. accepted:
    of each sequence the drafts that its last step accepted, which no row of the sequence's own slot drew."""
    if not isinstance(extras, BatchExtras) or extras.penalties is None:
        return extras
    rounds: dict[tuple[bool, int], list[tuple[int, int, int]]] = {}  # (source, slot, token), by order
    row = 0
    for (seq, drafts), before in zip(planned, accepted, strict=True):
        own = int(slots[row])
        if seq.extras is not None and seq.extras.penalties is not None:
            for place, token in enumerate(before):
                rounds.setdefault((False, place), []).append((own, own, token))
            for place, token in enumerate(drafts):
                cells = int(slots[row + place]), int(slots[row + place + 1]), token
                rounds.setdefault((True, place), []).append(cells)
        row += 1 + len(drafts)
    counted = tuple([CountedTokens(*np.array(rounds[key], np.int64).T.copy()) for key in sorted(rounds)])
    return replace(extras, penalties=replace(extras.penalties, counted=counted))


def write_masks(
    planned: Planned, unfinished: Collection[int], buffer: np.ndarray
) -> tuple[TokenMasks, dict[int, int]]:
    """The allowed tokens of a planned step, written to `buffer` as in `Scheduler.masks`; and by id of each
    sequence with a grammar how many of its drafts have a row that may be used, as their masks are known.
    unfinished: ids of sequences; others have surplus rows."""
    ruled: list[RuledRow] = []
    rows: list[int] = []
    forms: list[tuple[Grammar, Sequence, list[int], int]] = []  # with the number of its first mask
    processors: list[tuple[int, LogitsProcessor, list[int], list[int]]] = []
    row = 0
    for seq, drafts in planned:
        if seq.extras is not None and seq.extras.has_rules and seq.seq_id in unfinished:
            prompt = seq.prompt_ids[: seq.num_prompt_tokens].tolist()
            for function in seq.params.logits_processors or ():
                processors.append((row, function, prompt, seq.completion_token_ids))
            rules, form = seq.extras.rules, _grammar(seq.extras.rules)
            if form is not None and drafts:
                forms.append((form, seq, drafts, len(rows)))
            for depth in range(1 + len(drafts)) if rules else ():
                if form is None or not depth:
                    ruled.append(RuledRow(len(rows), rules, _with(seq, drafts[:depth]), 0))
                rows.append(row + depth)
        row += 1 + len(drafts)
    bits = buffer[: len(rows)]
    if ruled:
        restrict_all(ruled, bits)
    usable: dict[int, int] = {}
    for form, seq, drafts, number in forms:
        usable[seq.seq_id] = _write_ahead(form, seq, drafts, bits[number + 1 : number + 1 + len(drafts)])
    return TokenMasks(np.array(rows, np.int64), np.arange(len(rows)), bits, tuple(processors)), usable


def _with(seq: Sequence, drafts: list[int]) -> list[int]:
    return [*seq.output_ids, *drafts]


def _grammar(rules: list[Rule]) -> Grammar | None:
    return next((rule for rule in rules if isinstance(rule, Grammar)), None)


def _write_ahead(form: Grammar, seq: Sequence, drafts: list[int], bits: np.ndarray) -> int:
    """Fill the mask after each draft, once that before the first one is written; return how many are."""
    number = form.look_ahead(drafts, seq.stop_ids, bits)
    others = [rule for rule in seq.extras.rules if not isinstance(rule, Grammar)]
    for depth in range(number):
        for rule in others:
            rule.restrict(bits[depth], _with(seq, drafts[: depth + 1]), 0)
        if not bits[depth].any():  # the step after it says why
            number = depth
            break
    bits[number:] = -1
    return number
