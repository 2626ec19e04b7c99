"""Batch, StepOutput and TokenEvents: the values that pass between plan, compute and the engine.

Also `Column`, which declares an array of a step once, for the host and the device. Values are immutable.
Positions and cache slots are derived from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from enum import Enum, auto
from functools import cache
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

LAST_SAMPLED = -1  # as an input token: the last token sampled in this slot, which only the device knows
NOT_FINITE = -1  # as a sampled token: the row's logits have NaN or infinity
NOT_DRAWN = -2  # as a sampled token: the step drew fewer tokens for this row than `draws`
NO_SLOT = -1  # as a slot: the row's token is not kept, or the token's K/V not stored
PADDING = -1  # in a table: no block, or no row

# A value made of columns is a frozen dataclass over A, the type of its arrays. A field is a column, which is
# `Annotated[A, Column(...)]`, another such value, a tuple of them, or plain data. The class has no slots,
# because calling an alias such as `SamplingTensors` sets an attribute.
A = TypeVar("A")
B = TypeVar("B")
Columns = TypeVar("Columns")


@dataclass(frozen=True, slots=True)
class StepSize:
    """The dimensions of a step's columns, padding included."""

    tokens: int
    seqs: int
    blocks: int  # width of a block table
    unit: int  # sequences in a group that reads a shared prefix once
    copies: int = 0  # of cells of the KV cache


@dataclass(frozen=True, slots=True)
class Column:
    """A column's dtype, its padded shape in a step of a given size, and its neutral value, which pads it.

    If it is a field of `SamplingParams`: what its value must be, in words and as a check.
    """

    dtype: type[np.generic]
    shape: Callable[[StepSize], tuple[int, ...]]
    neutral: int = 0
    expected: str = ""
    is_right: Callable[[float], bool] = bool


def parameter(
    dtype: type[np.generic], neutral: int, expected: str, is_right: Callable[[float], bool]
) -> Column:
    """The column of a field of `SamplingParams`, one value for each sequence."""
    return Column(dtype, lambda n: (n.seqs,), neutral, expected, is_right)


def all_columns(hint: Any) -> list[Column]:
    """Every column that a type declares, including those of optional parts."""
    found = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Column)]
    return found or [column for columns in _fields(hint).values() for column in columns]


def map_columns(value: Any, convert: Callable[[Column, Any], Any]) -> Any:
    """Return `value` with `convert(column, array)` for each of its arrays, in the order of declaration."""
    fields: dict[str, Any] = {}
    kind: Any = type(value)
    for name, columns in _fields(kind).items():
        field = fields[name] = getattr(value, name)
        if not columns or field is None:
            continue
        if isinstance(field, tuple):
            fields[name] = tuple([map_columns(each, convert) for each in field])
        elif is_dataclass(field):
            fields[name] = map_columns(field, convert)
        else:
            fields[name] = convert(columns[0], field)
    return kind(**fields)


def rows_of(value: Columns, rows: Any) -> Columns:
    """Some rows of each column, given as NumPy and torch index them."""
    taken: Columns = map_columns(value, lambda _, column: column[rows])
    return taken


@cache
def _fields(hint: Any) -> dict[str, list[Column]]:
    """The columns of each field of a dataclass, or of each argument of another type."""
    kind = get_origin(hint) or hint
    if is_dataclass(kind):
        inner = get_type_hints(kind, include_extras=True)
    else:
        inner = {str(index): each for index, each in enumerate(get_args(hint))}
    return {name: all_columns(each) for name, each in inner.items()}


class StepKind(Enum):
    """Which kernels a step runs; the planner decides. A prompt of one token is also PREFILL."""

    PREFILL = auto()  # each sequence has any number of known tokens
    DECODE = auto()  # each sequence has one token, its newest


@dataclass(frozen=True, eq=False)
class SamplingColumns(Generic[A]):
    """The sampling parameters of S rows. A greedy row has only neutral values, except for its seed."""

    temperature: Annotated[
        A, parameter(np.float32, 0, "0 for greedy or a positive number", lambda value: value >= 0)
    ]
    seeds: Annotated[A, Column(np.int64, lambda n: (n.seqs,))]
    positions: Annotated[A, Column(np.int32, lambda n: (n.seqs,))]  # of the token to draw
    # The filters; the likeliest token is always kept. top_k: how many to keep; of equal ones those with the
    # lowest ids.
    top_k: Annotated[
        A, parameter(np.int32, 0, "a positive integer, or 0 or -1 to keep all tokens", lambda k: k >= -1)
    ]
    # Keep the fewest of which the sum reaches it.
    top_p: Annotated[A, parameter(np.float32, 1, "in (0, 1]; 1 keeps all tokens", lambda p: 0 < p <= 1)]
    # The least share of the likeliest token's probability.
    min_p: Annotated[A, parameter(np.float32, 0, "in [0, 1]; 0 keeps all tokens", lambda p: 0 <= p <= 1)]


# The fields of `SamplingParams` that are columns of each step, by name.
SAMPLING_PARAMETERS = {
    name: column for name, [column] in _fields(SamplingColumns).items() if name not in ("seeds", "positions")
}
FILTERS = {name: column for name, column in SAMPLING_PARAMETERS.items() if name != "temperature"}


class Extras:
    """What the sequences of a step ask for besides `SamplingColumns`: here nothing. `BatchExtras` in
    `extras/columns.py`, which is true, is what some ask for."""

    needs_logits: bool = False  # whether drawing needs more than logits and `SamplingColumns`
    has_rules: bool = False  # masks of tokens follow, and tokens are drawn after that
    places: tuple[np.ndarray, ...] = ()  # ascending, of a prefill step's tokens whose states are needed too

    def __bool__(self) -> bool:
        return False


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of S sequences and T tokens: all that a rank needs. Read-only."""

    kind: StepKind
    seq_ids: tuple[int, ...]
    slots: np.ndarray  # [S] int32, a stable row for each running sequence
    token_ids: np.ndarray  # [T] int32, flat; LAST_SAMPLED where only the device knows the token
    query_lens: np.ndarray  # [S] int32, number of new tokens of each sequence; they sum to T
    context_lens: np.ndarray  # [S] int32, cached + new tokens
    # Of each `KVGroup`, [S, W] int32: PADDING where there is no block, or it was freed and is not read.
    tables: tuple[np.ndarray, ...]
    draws: np.ndarray  # [S] int32, number of tokens to draw: 0 while the prompt is unfinished, else 1
    sampling: SamplingColumns[np.ndarray]
    extras: Extras = NO_EXTRAS
    # Of each group, [C, 4] int32: source block, target block, first cell, number of cells. Each layer copies
    # the K/V of these cells after it stores the step's and before any row attends. No cell is source and
    # target. (): nothing is copied.
    copies: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput(Generic[A]):
    """The tokens that a step of S sequences drew, and its other requested outputs."""

    # [S, maximum draws of a row] int64; may be NOT_FINITE or NOT_DRAWN. Undefined from column `draws` on.
    token_ids: A
    extras: Any = None  # what `Batch.extras` asked for, `ExtraOutput` in `extras/columns.py`
    pooled: A | None = None  # float32 [S, n], sums of hidden states or of a head's values; or rows of these
    routed: A | None = None  # [T, layers, top_k] int16, the experts of the step's tokens

    def map(self, convert: Callable[[A], B]) -> StepOutput[B]:
        """The same with `convert` applied to each column."""
        extras = None if self.extras is None else self.extras.map(convert)
        token_ids = convert(self.token_ids)
        pooled, routed = (None if each is None else convert(each) for each in (self.pooled, self.routed))
        return StepOutput(token_ids, extras, pooled, routed)


@dataclass(frozen=True, slots=True, eq=False)
class TokenEvents:
    """The new tokens of one step and the sequences that ended with it, without surplus rows.

    Columns, because an object for each of hundreds of tokens would take longer than planning the step.
    """

    seq_ids: list[int]  # [N] the sequence of each token; a sequence's tokens are in order
    token_ids: list[int]  # [N] including tokens that ended their sequence
    finish_reasons: dict[int, str]  # by id of each sequence that ended


def greedy(num_rows: int) -> SamplingColumns[np.ndarray]:
    """The sampling columns of greedy rows at position 0."""
    own = {name: np.full(num_rows, each.neutral, each.dtype) for name, each in SAMPLING_PARAMETERS.items()}
    seeds, positions = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int32)
    return SamplingColumns(own["temperature"], seeds, positions, *[own[name] for name in FILTERS])


def prefix_sum(lens: np.ndarray) -> np.ndarray:
    """Return [0, lens[0], lens[0] + lens[1], ...] as int32."""
    sums = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, dtype=np.int32, out=sums[1:])
    return sums
