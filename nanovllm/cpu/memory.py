"""The memory of a KV cache on a CPU, which others share: a large one that nobody asked for is said."""

from __future__ import annotations

import logging

logger = logging.getLogger("nanovllm")

_LARGE = 1 / 3  # of the free memory


def warn_of_cache(size: float, ranks: int, free: float) -> None:
    """Warn of a KV cache of `size` GiB on each of so many ranks, if it may take much of `free` GiB."""
    if ranks * size > _LARGE * max(free, 2**-30):
        logger.warning(
            "up to %.2f GiB of memory%s will be used for keys and values of the texts that run at once; to "
            "use less, pass kv_cache_memory_bytes, for example 2**30 for 1 GiB",
            *(size, " on each rank" if ranks > 1 else ""),
        )
