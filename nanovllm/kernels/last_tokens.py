"""The last drawn tokens, stored on the device by slot: a step reads tokens there that the host does not know.

Owns no memory.
"""

from __future__ import annotations

import torch

from nanovllm.batch import LAST_SAMPLED, NO_SLOT
from nanovllm.kernels.compat import await_inputs, by_device, jit, pdl_options, tl

_BLOCK = 256  # tokens of a program


@jit("ids_ptr", "slots_ptr", "num_tokens")
def _take_tokens_kernel(
    ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    last_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: int,
    vocab: int,
    USE_PDL: tl.constexpr,
    LAST_SAMPLED: tl.constexpr = LAST_SAMPLED,
    BLOCK: tl.constexpr = _BLOCK,
) -> None:
    """One program per BLOCK tokens."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = index < num_tokens
    await_inputs(USE_PDL)
    ids = tl.load(ids_ptr + index, mask=live, other=0)
    slots = tl.load(slots_ptr + index, mask=live, other=0)
    asked = live & (ids == LAST_SAMPLED)
    last = tl.load(last_ptr + slots, mask=asked, other=0)
    last = tl.minimum(tl.maximum(last, 0), vocab - 1)
    tl.store(out_ptr + index, tl.where(asked, last, ids), mask=live)


@jit("ids_ptr", "slots_ptr", "num_tokens")
def _keep_tokens_kernel(
    ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    last_ptr: tl.tensor,
    num_tokens: int,
    USE_PDL: tl.constexpr,
    NO_SLOT: tl.constexpr = NO_SLOT,
    BLOCK: tl.constexpr = _BLOCK,
) -> None:
    """One program per BLOCK tokens."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + index, mask=index < num_tokens, other=NO_SLOT)
    live = slots != NO_SLOT
    await_inputs(USE_PDL)
    tl.store(last_ptr + slots, tl.load(ids_ptr + index, mask=live, other=0), mask=live)


def take_tokens_triton(
    token_ids: torch.Tensor, slots: torch.Tensor, last: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Return token_ids [T] with each LAST_SAMPLED replaced by last[slots], all int64 and contiguous.

    last: [number of slots]. Its values are clamped to 0 .. vocab_size - 1.
    """
    num_tokens = len(token_ids)
    out = torch.empty_like(token_ids)
    if num_tokens:
        _take_tokens_kernel[(-(-num_tokens // _BLOCK),)](
            token_ids, slots, last, out, num_tokens, vocab_size, **pdl_options(token_ids)
        )
    return out


def keep_tokens_triton(token_ids: torch.Tensor, slots: torch.Tensor, last: torch.Tensor) -> None:
    """last[slots] = token_ids [T], except for NO_SLOT; all int64 and contiguous, without repeated slots.

    `slots` must be an input of the step, not the result of a kernel.
    """
    num_tokens = len(token_ids)
    if num_tokens:
        _keep_tokens_kernel[(-(-num_tokens // _BLOCK),)](
            token_ids, slots, last, num_tokens, **pdl_options(token_ids)
        )


def take_tokens_reference(
    token_ids: torch.Tensor, slots: torch.Tensor, last: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """`take_tokens` in plain torch."""
    asked = token_ids == LAST_SAMPLED
    taken = last.index_select(0, slots.where(asked, 0)).clamp_(0, vocab_size - 1)
    return torch.where(asked, taken, token_ids)


def keep_tokens_reference(token_ids: torch.Tensor, slots: torch.Tensor, last: torch.Tensor) -> None:
    """`keep_tokens` in plain torch."""
    live = slots != NO_SLOT
    last[slots[live]] = token_ids[live]


_IDS = (torch.int64,)
take_tokens = by_device(take_tokens_triton, take_tokens_reference, "last_tokens.take_tokens", _IDS)
keep_tokens = by_device(keep_tokens_triton, keep_tokens_reference, "last_tokens.keep_tokens", _IDS)
