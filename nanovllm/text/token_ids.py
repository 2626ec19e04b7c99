"""Token ids as arrays of int32, and what they must be. Looks at no single id of a list that is right.

Knows no prompt and no tokenizer.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanovllm.checks import show


def pack_token_ids(token_ids: Sequence[int], vocab_size: int, where: str, ordered: bool = True) -> array[int]:
    """Return the ids as int32; an array of them as it is. ValueError if one is not in the vocabulary, with
    its position if the ids are `ordered`."""
    try:
        ids = token_ids if isinstance(token_ids, array) else _packed(token_ids)
        known = not token_ids or np.frombuffer(ids, np.uint32).max() < vocab_size  # negative: above 2**31
    except struct.error:  # an id does not fit into int32
        ids, known = array("i"), False
    if not known:
        position, bad = next((i, id_) for i, id_ in enumerate(token_ids) if not 0 <= id_ < vocab_size)
        at = f" at position {position}" if ordered else ""
        raise ValueError(
            f"{where}: token id {show(bad)}{at} is outside the vocabulary (0 to {vocab_size - 1})"
        )
    return ids


def _packed(ids: Sequence[int]) -> array[int]:
    """The ids as int32; struct.error if one does not fit. Three times as fast as np.array or array alone."""
    return array("i", struct.pack(f"={len(ids)}i", *ids))


def packed_ints(ids: list[Any]) -> array[int] | None:
    """The ids as int32; None unless all are of the type int and fit. Looks at no single id: packing
    refuses what is no integer, an integer of another library makes the sum one, and True and False pack to 1
    and 0."""
    try:
        packed = _packed(ids)
        if type(sum(ids)) is not int:
            return None
    except (struct.error, TypeError):
        return None
    has_bool = np.frombuffer(packed, np.int32).min() <= 1 and bool in set(map(type, ids))
    return None if has_bool else packed
