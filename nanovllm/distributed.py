"""TPGroup: the ranks that share one model, and the two collectives that its layers need.

The only module that speaks to torch.distributed. It starts no process and reads no environment variable.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class TPGroup:
    """Rank `rank` of `size` tensor-parallel ranks. With one rank every collective is the identity.

    Without a `process_group` the group of several ranks still says which shard a layer owns, but cannot
    communicate: calling a collective is then a RuntimeError.
    """

    def __init__(self, rank: int = 0, size: int = 1, process_group: dist.ProcessGroup | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), not {rank}")
        self.rank = rank
        self.size = size
        self._process_group = process_group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over the ranks, on each of them; `x` is overwritten."""
        if self.size > 1:
            self._group().allreduce([x]).wait()
        return x

    def gather_last_dim(self, x: torch.Tensor) -> torch.Tensor | None:
        """Concatenate the ranks' `x` [..., n] to [..., size * n] on rank 0; the others get None."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._group().gather(parts, x, 0).wait()
        return torch.cat(parts, dim=-1) if parts else None

    def _group(self) -> dist.ProcessGroup:
        if self._process_group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no process group to communicate through")
        return self._process_group
