"""SequenceExtras: what a sequence asks for besides tokens, and what it has got. From the sequences of a
planned step come its `BatchExtras` and `TokenMasks`; its `ExtraOutput` goes back to them.

Computes no logits; `extras/ending.py` does. Needs no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from nanovllm.batch import PADDING, Batch, StepOutput
from nanovllm.checks import PENALTIES
from nanovllm.extras.columns import (
    EACH_TOKEN,
    NO_LOGPROBS,
    BatchExtras,
    ExtraOutput,
    LogitBias,
    LogitsProcessor,
    Penalties,
    ScoredTokens,
    TokenLogprobs,
    TokenMasks,
    WantedTokens,
)
from nanovllm.extras.token_rules import (
    Grammar,
    Rule,
    RuledRow,
    make_rules,
    only_budget,
    only_grammar,
    restrict_all,
)
from nanovllm.plan.sequence import Sequence
from nanovllm.reasoning.budget import ThinkingBudget
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Request

_NO_TOKENS = np.empty(0, np.int64)
_NEUTRAL = tuple([column.neutral for column in PENALTIES.values()])
Ended = list[tuple[Sequence, str]]  # sequences that end with a step without a token, and why


@dataclass(slots=True, eq=False)
class SequenceExtras:
    """What one sequence asks for besides tokens, and what it has got."""

    prompt_ids: array[int]  # the whole prompt, with a last token that is only scored
    rules: list[Rule]  # on the next token
    has_rules: bool  # whether the next token depends on previous tokens, by rules or by logits processors
    next_wanted: int | None  # the next prompt position whose hidden state is needed, if any
    pooling: str | None  # of these hidden states, as in `Request`; None: they score tokens
    penalties: tuple[float, ...] | None  # in the order of `PENALTIES`
    bias: tuple[np.ndarray, np.ndarray] | None  # token ids and biases
    num_logprobs: int  # likeliest tokens of each drawn one, or NO_LOGPROBS
    asked_ids: list[int]  # the tokens of `logprob_token_ids`
    form: Grammar | None = None  # its only rule, if that is a grammar
    ender: Grammar | None = None  # the same, if nothing is asked of the tokens of a forced end
    sleeper: ThinkingBudget | None = None  # its only rule, if that says where it acts: `has_rules` changes
    wakes: int = 0  # the place in the output from which the sleeper must be asked
    counted: int | None = None  # the sequence's preemptions when penalties last counted its tokens
    logprobs: list[tuple[TokenLogprobs, int]] = field(default_factory=list)  # one row for each output token
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # in parts, in order
    pooled: np.ndarray | None = None  # float32 [size], the sum so far; or the rows of tokens, [n, size]
    routed: list[tuple[int, np.ndarray]] = field(default_factory=list)  # experts from a position on, in parts

    @classmethod
    def of(cls, request: Request, index: int, processor: Processor) -> SequenceExtras:
        """What completion `index` asks for."""
        params = request.params
        rules = make_rules(request, processor.eos_token_ids if params.min_tokens else ())
        form = only_grammar(rules)
        penalties = tuple([getattr(params, name) for name in PENALTIES])
        num_logprobs = NO_LOGPROBS if params.logprobs is None else num_likeliest(params.logprobs)
        bias = None
        if by_id := params.logit_bias:
            bias = np.array([*by_id], np.int64), np.array([*by_id.values()], np.float32)
        is_asked: object = params.logprob_token_ids or params.logprobs is not None or params.logit_bias
        is_asked = is_asked or params.stop or params.repetition_detection or params.logits_processors
        return cls(
            prompt_ids=request.prompt_token_ids,
            rules=rules,
            form=form,
            ender=None if is_asked else form,
            has_rules=bool(rules or params.logits_processors),
            sleeper=None if params.logits_processors else only_budget(rules),
            next_wanted=_next_wanted(request) if index == 0 else None,
            pooling=request.pooling,
            penalties=None if penalties == _NEUTRAL else penalties,
            bias=bias,
            num_logprobs=0 if params.logprob_token_ids else num_logprobs,
            asked_ids=list(params.logprob_token_ids or ()),
        )

    def look(self, seq: Sequence) -> None:
        """Ask the sleeper whether it may act on the token that is drawn next."""
        place = seq.num_computed_tokens - seq.num_prompt_tokens  # with those of the planned step
        if self.sleeper is not None and self.wakes <= place:
            self.wakes = self.sleeper.wakes(seq.output_ids, 0)
        self.has_rules = self.wakes <= place

    def most_cached(self, most: int) -> int:
        """Of the first `most` tokens, how many may come from the prefix cache: no hidden state is known."""
        return most if self.next_wanted is None else min(most, self.next_wanted)

    def add_pooled(self, values: np.ndarray) -> None:
        """Add what a step has pooled: the next part of a sum, or the rows [n, size] of further tokens."""
        before = self.pooled
        if self.pooling in EACH_TOKEN:
            self.pooled = np.concatenate([values] if before is None else [before, values])
        else:
            self.pooled = values if before is None else before + values

    def routed_experts(self, num_tokens: int) -> np.ndarray | None:
        """The experts [n, layers, top_k] of its first tokens, at most `num_tokens`; None if unknown."""
        if not self.routed:
            return None
        end = max(start + len(part) for start, part in self.routed)
        whole = np.zeros((end, *self.routed[0][1].shape[1:]), np.int16)
        for start, part in self.routed:  # after a preemption tokens are computed again
            whole[start : start + len(part)] = part
        return whole[:num_tokens]


# -- before a step ------------------------------------------------------------------------------------------

Asking = list[tuple[int, Sequence, SequenceExtras]]  # rows of a step that ask for something


def _next_wanted(request: Request) -> int | None:
    """The first prompt position whose hidden state is needed, to score the next token or for pooling."""
    if request.pooling is not None:
        return 0 if request.pooling in ("mean", *EACH_TOKEN) else len(request.prompt_token_ids) - 1
    return None if request.first_scored is None else request.first_scored - 1


def extras_of(seqs: list[Sequence], query_lens: np.ndarray, draws: np.ndarray) -> BatchExtras | None:
    """What the sequences of a step being planned ask for; None if none asks. query_lens, draws: [S]."""
    asking = [(row, seq, seq.extras) for row, seq in enumerate(seqs) if seq.extras is not None]
    if not asking:
        return None
    drawn = [each for each in asking if draws[each[0]]]
    for _, seq, extras in drawn:
        if extras.sleeper is not None:
            extras.look(seq)
    penalties, bias = _penalties(asking, draws), _biases(drawn)
    num_logprobs = max([extras.num_logprobs for _, _, extras in drawn], default=NO_LOGPROBS)
    has_rules = any(extras.has_rules for _, _, extras in drawn)
    scored, pooled = _prompt_tokens(asking, query_lens)
    (pooling,) = {each.pooling for _, _, each in asking} - {None} or {None}  # all of a call are alike
    return BatchExtras(
        needs_logits=bool(penalties or bias or has_rules or num_logprobs != NO_LOGPROBS),
        has_rules=has_rules,
        places=tuple([one.places for one in (scored.wanted if scored else None, pooled) if one is not None]),
        penalties=penalties,
        bias=bias,
        num_logprobs=num_logprobs,
        asked_ids=_asked_ids(asking, len(seqs)),
        scored=scored,
        pooled=pooled,
        pooling=pooling,
    )


def _asked_ids(asking: Asking, num_rows: int) -> np.ndarray | None:
    """The tokens of `logprob_token_ids` of each sequence."""
    width = max([len(extras.asked_ids) for _, _, extras in asking])
    if not width:
        return None
    padded = np.full((num_rows, width), PADDING, np.int64)
    for row, _, extras in asking:
        padded[row, : len(extras.asked_ids)] = extras.asked_ids
    return padded


def _penalties(asking: Asking, draws: np.ndarray) -> Penalties | None:
    found = [(row, seq, extras) for row, seq, extras in asking if extras.penalties is not None]
    if not found:
        return None
    columns = np.repeat(np.array(_NEUTRAL, np.float32)[:, None], len(draws), axis=1)
    columns[:, [row for row, _, _ in found]] = np.array([extras.penalties for _, _, extras in found]).T
    # Sequences whose first token since their admission is drawn by this step.
    new = [each for each in found if draws[each[0]] and each[2].counted != each[1].num_preemptions]
    for _, seq, extras in new:
        extras.counted = seq.num_preemptions
    ids = [np.array(seq.token_ids, np.int64) for _, seq, _ in new]
    are_prompt = [np.arange(seq.num_known_tokens) < seq.num_prompt_tokens for _, seq, _ in new]
    return Penalties(
        columns[0],
        columns[1],
        columns[2],
        history_slots=np.repeat(np.array([seq.slot for _, seq, _ in new], np.int64), [*map(len, ids)]),
        history_ids=np.concatenate([_NO_TOKENS, *ids]),
        history_is_prompt=np.concatenate([np.empty(0, bool), *are_prompt]),
    )


def _biases(drawn: Asking) -> LogitBias | None:
    found = [(row, *extras.bias) for row, _, extras in drawn if extras.bias is not None]
    if not found:
        return None
    return LogitBias(
        np.repeat(np.array([row for row, _, _ in found], np.int64), [len(ids) for _, ids, _ in found]),
        np.concatenate([ids for _, ids, _ in found]),
        np.concatenate([values for _, _, values in found]),
    )


def _prompt_tokens(asking: Asking, query_lens: np.ndarray) -> tuple[ScoredTokens | None, WantedTokens | None]:
    """The prompt tokens of a step to score, and those to pool.

    Each token is returned once, even if its sequence is preempted and computed again.
    """
    ends, num_logprobs = query_lens.cumsum(), 0
    scored: list[tuple[int, int, int, int]] = []  # (first place, count, row, first position)
    pooled: list[tuple[int, int, int, int]] = []
    targets: list[np.ndarray] = []
    for row, seq, extras in asking:
        if extras.next_wanted is None:
            continue
        end, is_scored = seq.num_computed_tokens, extras.pooling is None
        first = max(extras.next_wanted, end - int(query_lens[row]))
        last = len(extras.prompt_ids) - is_scored
        count = min(end, last) - first
        if count > 0:
            (scored if is_scored else pooled).append((int(ends[row]) + first - end, count, row, first))
        if count > 0 and is_scored:
            targets.append(np.array(extras.prompt_ids[first + 1 : first + 1 + count], np.int64))
        extras.next_wanted = None if end >= last else max(extras.next_wanted, end)
        if is_scored:
            num_logprobs = max(num_logprobs, num_likeliest(seq.params.prompt_logprobs or 0))
    scores = None
    if scored:
        scores = ScoredTokens(_wanted(scored), np.concatenate(targets), num_logprobs)
    return scores, _wanted(pooled) if pooled else None


def _wanted(ranges: list[tuple[int, int, int, int]]) -> WantedTokens:
    places = [np.arange(place, place + count, dtype=np.int32) for place, count, _, _ in ranges]
    rows = np.array([row for _, _, row, _ in ranges], np.int64)
    return WantedTokens(np.concatenate(places), np.repeat(rows, [count for _, count, _, _ in ranges]))


def masks_of(batch: Batch, seqs: dict[int, Sequence], buffer: np.ndarray) -> TokenMasks:
    """As `Scheduler.masks`. seqs: the unfinished sequences, by row."""
    draws = batch.draws.tolist()
    ruled: list[RuledRow] = []  # one for each mask
    rows: list[int] = []
    numbers: list[int] = []  # of the mask of each of these rows
    known: dict[object, tuple[int, Grammar]] = {}  # masks, and whose they are, by what they depend on
    shared: list[tuple[Grammar, Grammar]] = []  # those that take the mask of another sequence, and that one
    processors: list[tuple[int, LogitsProcessor, list[int], list[int]]] = []
    for row, seq in seqs.items():
        extras = seq.extras
        if extras is None or not extras.has_rules or not draws[row]:
            continue
        for function in seq.params.logits_processors or ():
            prompt = seq.prompt_ids[: seq.num_prompt_tokens].tolist()
            processors.append((row, function, prompt, seq.completion_token_ids))
        if not extras.rules:
            continue
        number, form = len(ruled), extras.form
        if form is not None and (state := form.state(seq.output_ids)) is not None:
            number, first = known.setdefault(state, (number, form))
            if first is not form:
                shared.append((form, first))
        if number == len(ruled):
            ruled.append(RuledRow(number, extras.rules, seq.output_ids, 0))
        rows.append(row)
        numbers.append(number)
    bits = buffer[: len(ruled)]
    if ruled:
        restrict_all(ruled, bits)
    for form, first in shared:
        form.dead_end = first.dead_end
    return TokenMasks(np.array(rows, np.int64), np.array(numbers, np.int64), bits, tuple(processors))


# -- after a step -------------------------------------------------------------------------------------------


def keep(batch: Batch, output: StepOutput[np.ndarray], seqs: dict[int, Sequence]) -> Ended:
    """Give a step's sequences, by row, what they asked for. Return those that end without a token: they need
    none, or their scores or hidden states are not finite."""
    asking = {row: seq for row, seq in seqs.items() if seq.extras is not None}
    if output.routed is not None:
        _keep_routed(batch, output.routed, asking)
    ended: Ended = []
    if output.extras is not None:
        assert isinstance(batch.extras, BatchExtras)
        ended = [(seq, "error") for seq in _keep_output(batch.extras, batch.draws, output, asking)]
    return ended + [
        (seq, "length")
        for row, seq in asking.items()
        if seq.max_tokens_total == seq.num_prompt_tokens == batch.context_lens[row]
    ]


def forced_ends(batch: Batch, seqs: dict[int, Sequence]) -> list[tuple[Sequence, tuple[int, ...]]]:
    """The tokens that no step need draw, after a step that was read: the forced ends of its sequences, each
    up to the token that ends it. seqs: those that are unfinished, by row."""
    if len({*batch.seq_ids}) < len(batch.seq_ids):  # a step with drafts: its tokens are counted by their rows
        return []
    draws = batch.draws.tolist()
    ended: list[tuple[Sequence, tuple[int, ...]]] = []
    for row, seq in seqs.items():
        extras = seq.extras
        if extras is None or extras.ender is None or extras.routed or not draws[row]:
            continue
        token_ids = extras.ender.forced_end(seq.output_ids)
        if not token_ids:
            continue
        token_ids = token_ids[: seq.max_tokens_total - seq.num_known_tokens]
        if not seq.stop_ids.isdisjoint(token_ids[:-1]):
            first = next(place for place, token_id in enumerate(token_ids) if token_id in seq.stop_ids)
            token_ids = token_ids[: first + 1]
        ended.append((seq, token_ids))
    return ended


def _keep_routed(batch: Batch, routed: np.ndarray, asking: dict[int, Sequence]) -> None:
    ends = batch.query_lens.cumsum()
    for row, seq in asking.items():
        length, end = int(batch.query_lens[row]), int(ends[row])
        start = int(batch.context_lens[row]) - length
        seq.extras.routed.append((start, routed[end - length : end].copy()))


def _keep_output(
    extras: BatchExtras, draws: np.ndarray, output: StepOutput[np.ndarray], asking: dict[int, Sequence]
) -> list[Sequence]:
    """Give the sequences, by row, a step's outputs. Take those out and return them that are not finite."""
    not_finite, found = [], output.extras
    assert isinstance(found, ExtraOutput)
    if found.logprobs is not None:
        _keep_logprobs(extras, draws, found.logprobs, asking)
    if found.scores is not None and extras.scored is not None:
        for row in np.unique(extras.scored.wanted.rows).tolist():
            if row in asking:
                k = num_likeliest(asking[row].params.prompt_logprobs or 0)
                scores = found.scores.take(extras.scored.wanted.rows == row, k)
                asking[row].extras.prompt_logprobs.append(scores)
                if np.isnan(scores.values[:, 0]).any():
                    not_finite.append(asking.pop(row))
    if output.pooled is not None and extras.pooled is not None:
        for row, values in _pooled_rows(extras.pooled.rows, extras.pooling in EACH_TOKEN, output.pooled):
            if row in asking:
                asking[row].extras.add_pooled(values)
                if not np.isfinite(values).all():
                    not_finite.append(asking.pop(row))
    for seq in not_finite:
        seq.extras.prompt_logprobs, seq.extras.pooled = [], None
    return not_finite


def _pooled_rows(of_tokens: np.ndarray, are_tokens: bool, pooled: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """What a step has pooled of each row, in order: its tokens' values, or a sum. of_tokens: their rows."""
    rows, firsts = np.unique(of_tokens, return_index=True)
    parts = np.split(pooled, firsts[1:]) if are_tokens else pooled[rows]
    return list(zip(rows.tolist(), parts, strict=True))


def _keep_logprobs(
    extras: BatchExtras, draws: np.ndarray, logprobs: TokenLogprobs, asking: dict[int, Sequence]
) -> None:
    """Give the sequences, by row, the logprobs of a step's drawn tokens. A sequence keeps no more than it
    asked for: a step's columns are as wide as its widest row."""
    asked: dict[tuple[int, bool], list[int]] = {}
    for row, seq in asking.items():
        if draws[row] and (number := seq.params.num_logprobs) is not None:
            asked.setdefault((num_likeliest(number), bool(seq.params.logprob_token_ids)), []).append(row)
    ids = extras.asked_ids
    for (k, by_id), rows in asked.items():
        if by_id and ids is not None:
            columns = logprobs.take_asked(np.array(rows), ids, k)
        else:
            width = 0 if ids is None else ids.shape[1]
            columns = logprobs.take(np.array(rows), min(k, logprobs.values.shape[1] - 1 - width))
        for place, row in enumerate(rows):
            asking[row].extras.logprobs.append((columns, place))


def num_likeliest(asked: int) -> int:
    """The number of likeliest tokens that `logprobs` requests; for -1 the largest int32."""
    return asked if asked >= 0 else 2**31 - 1


def dead_end(sequences: Iterable[Sequence]) -> tuple[str, int] | None:
    """Where the constraint of the first of these sequences allowed no token: llguidance's message, if any,
    and the number of tokens before. None if there is no such place."""
    for seq in sequences:
        for rule in seq.extras.rules:
            if isinstance(rule, Grammar) and rule.dead_end is not None:
                return rule.dead_end, len(seq.completion_token_ids)
    return None
