"""The last drawn tokens by slot, on a CPU. A program is a range of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.batch import LAST_SAMPLED, NO_SLOT
from nanovllm.cpu.kernels.launch import Address, Kernel, empty

_BLOCK = 1024  # tokens of a program


def _make_take() -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    get_i64, set_i64, block, last_sampled = v.get_i64, v.set_i64, _BLOCK, LAST_SAMPLED

    def take_tokens(
        ids: Address,
        slots: Address,
        last: Address,
        out: Address,
        num_tokens: int,
        vocab: int,
        program: int,
        thread: int,
    ) -> None:
        for i in range(block * program, min(block * (program + 1), num_tokens)):
            token = get_i64(ids + 8 * i)
            if token == last_sampled:
                token = min(max(get_i64(last + 8 * get_i64(slots + 8 * i)), 0), vocab - 1)
            set_i64(out + 8 * i, token)

    return take_tokens


def _make_keep() -> Callable[..., None]:
    from nanovllm.cpu.kernels import vectors as v

    get_i64, set_i64, block, no_slot = v.get_i64, v.set_i64, _BLOCK, NO_SLOT

    def keep_tokens(
        ids: Address, slots: Address, last: Address, num_tokens: int, program: int, thread: int
    ) -> None:
        for i in range(block * program, min(block * (program + 1), num_tokens)):
            slot = get_i64(slots + 8 * i)
            if slot != no_slot:
                set_i64(last + 8 * slot, get_i64(ids + 8 * i))

    return keep_tokens


_TAKE, _KEEP = Kernel(_make_take), Kernel(_make_keep)


def take_tokens(
    token_ids: torch.Tensor, slots: torch.Tensor, last: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """`take_tokens` of kernels/last_tokens.py."""
    count = len(token_ids)
    out = empty((count,), torch.int64)
    _TAKE.launch((), -(-count // _BLOCK), token_ids, slots, last, out, count, vocab_size)
    return out


def keep_tokens(token_ids: torch.Tensor, slots: torch.Tensor, last: torch.Tensor) -> None:
    """`keep_tokens` of kernels/last_tokens.py."""
    count = len(token_ids)
    _KEEP.launch((), -(-count // _BLOCK), token_ids, slots, last, count)
