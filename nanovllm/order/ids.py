"""Ids: a list of lists of token ids as prompts, each of which is made when it is looked at.

Packs all ids at once, and knows no vocabulary.
"""

from __future__ import annotations

import marshal
from array import array
from typing import Any

import numpy as np

from nanovllm.order.texts import Late, Texts
from nanovllm.text.prompts import Prompt, portions

_LONG = 4096  # strings; fewer are parsed one by one
_PACKED = 2**15  # token ids that are packed at once
_ITEM = np.dtype([("kind", np.uint8), ("value", "<i4")])
_LIST, _INT = b"[i"


class Ids(Late):
    """The `Prompt`s of lists of token ids, none of them empty; all ids fit into int32."""

    def __init__(self, ids: list[array[int]], highest: np.ndarray) -> None:
        """highest: of the ids of each prompt, uint32 [prompts]; a negative one is above 2**31."""
        self.ids, self.highest = ids, highest

    @staticmethod
    def of(prompts: list[Any]) -> Ids | None:
        """Lists of valid ids as prompts; None if any of it needs a closer look."""
        if set(map(type, prompts)) != {list} or not all(prompts):
            return None
        ids: list[array[int]] = []
        highest: list[np.ndarray] = []
        for some in portions(prompts, _PACKED, len):
            packed = _packed(some)
            if packed is None:
                return None
            ids += packed[0]
            highest.append(packed[1])
        return Ids(ids, np.concatenate(highest))

    def __len__(self) -> int:
        return len(self.ids)

    def _prompt(self, row: int) -> Prompt:
        return Prompt(None, self.ids[row], where=f"prompts[{row}]")


def late_prompts(prompts: list[Any]) -> Late | None:
    """A list of token ids, or a long one of strings, whose prompts are made late; None for any other."""
    if type(prompts[0]) is list:
        return Ids.of(prompts)
    return Texts.of(prompts) if len(prompts) > _LONG else None


def _packed(rows: list[list[Any]]) -> tuple[list[array[int]], np.ndarray] | None:
    """The ids of each row as int32, and the highest of each row as uint32; None unless all are of the type
    int and fit.

    One pass of C does it: `marshal` writes a list as five bytes, its kind and its length, then its elements,
    an integer of 32 bits as five bytes, its kind and its value. Any other value has another kind. So where
    all kinds up to a place are right, the next five bytes begin there.
    """
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    try:
        data = marshal.dumps(rows, 2)
    except ValueError:  # values that it does not write
        return None
    ends = np.cumsum(lengths + 1) + 1
    if len(data) != ends[-1] * _ITEM.itemsize:
        return None
    items = np.frombuffer(data, _ITEM)
    kinds = np.full(len(items), _INT, np.uint8)
    heads = ends - lengths - 1
    kinds[0] = kinds[heads] = _LIST
    if (items["kind"] != kinds).any():
        return None
    values = items["value"].astype(np.int32)
    values[heads] = 0  # no ids
    highest = np.maximum.reduceat(values.view(np.uint32), heads)
    packed = array("i", values.tobytes())
    begins_ends = zip((heads + 1).tolist(), ends.tolist(), strict=True)
    return [packed[begin:end] for begin, end in begins_ends], highest
