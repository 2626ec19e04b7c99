"""ExchangedRows: redistributes logits from some columns of all rows on each rank to whole rows on each rank.

So the ranks share the work of drawing tokens, and each draws as a single rank would. Owns the receive buffer
in the memory that `PeerMemory` allocates and exchanges.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.batch import NOT_FINITE
from nanovllm.kernels.all_to_all import all_to_all_triton

LARGEST_ID = 2**24 - 2  # ids are summed in float32, which is exact for integers up to 2**24


class ExchangedRows:
    """Rank `rank`'s buffer for its share of at most `max_rows` rows [vocab_size], and the others' addresses.

    No rank overwrites a row that is still read: once a rank has the ids of a step, all ranks have read their
    rows.
    """

    def __init__(
        self,
        rank: int,
        buffer_ptrs: torch.Tensor,
        own: torch.Tensor,
        max_rows: int,
        vocab_size: int,
        all_reduce: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """buffer_ptrs: [ranks] int64, the buffers' addresses. own: this rank's, `numel(...)` elements."""
        self._rank, self._size = rank, len(buffer_ptrs)
        self._buffer_ptrs = buffer_ptrs
        self._own = own.view(-1, self._stride(vocab_size))
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._all_reduce = all_reduce
        self._sent = torch.zeros(max_rows, dtype=torch.int32, device=own.device)
        self._nothing = torch.zeros(max_rows, 1, device=own.device)

    @staticmethod
    def _stride(vocab_size: int) -> int:
        """Elements from one row to the next: each starts at a multiple of 16 bytes."""
        return -(-vocab_size // 8) * 8

    @classmethod
    def numel(cls, max_rows: int, vocab_size: int, size: int) -> int:
        """The number of elements of a buffer."""
        return -(-max_rows // size) * cls._stride(vocab_size)

    def fits(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether there is room for `rows` rows."""
        return rows <= self._max_rows and dtype == self._own.dtype

    def whole_rows(self, x: torch.Tensor) -> tuple[slice, torch.Tensor]:
        """Return the range of this rank's rows, and these rows with all columns.

        x: [S, n], this rank's columns of all rows; rank r has the columns from r * n on. The result is valid
        until `join` returns the ids of these rows.
        """
        rows, n = x.shape
        share = -(-rows // self._size)
        first = self._rank * n
        columns = max(0, min(n, self._vocab_size - first))
        all_to_all_triton(x[:, :columns], self._buffer_ptrs, self._sent, self._own.shape[1], first, share)
        self._all_reduce(self._nothing[:rows])  # a barrier: a rank contributes after it sent its columns
        mine = slice(min(self._rank * share, rows), min((self._rank + 1) * share, rows))
        return mine, self._own[: mine.stop - mine.start, : self._vocab_size]

    def join(self, ids: torch.Tensor, mine: slice, rows: int) -> torch.Tensor:
        """Return the ids [rows] int64 of all rows, from each rank's ids of its rows."""
        whole = torch.zeros(rows, 1, device=ids.device)
        whole[mine, 0] = (ids - NOT_FINITE).float()
        return self._all_reduce(whole)[:, 0].long() + NOT_FINITE
