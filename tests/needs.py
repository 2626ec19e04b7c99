"""What some GPU tests need beyond a GPU; without it they are skipped with the engine's own reason.

Never skips what every GPU that the engine supports can do: the backends "triton" and "reference" always run.
"""

from __future__ import annotations

import pytest
import torch

from nanovllm.attention.flash_attn import FlashAttnBackend
from nanovllm.attention.reference import ReferenceBackend
from nanovllm.attention.select import select
from nanovllm.device import Device

HEAD_DIM = 128  # as all models of these tests have, or a smaller one that is no less supported


def this_gpu() -> Device:
    return Device("cuda")


def needs_backend(name: str, dtype: str = "auto") -> None:
    """Skip the test in progress where attention backend `name` cannot run a model of bfloat16 as `dtype`."""
    if name != FlashAttnBackend.name:
        return
    gpu = this_gpu()
    resolved = gpu.resolve_dtype(dtype, "bfloat16")
    reason = FlashAttnBackend.unavailable(gpu, resolved, HEAD_DIM, resolved)
    if reason is not None:
        pytest.skip(f"attention backend {name!r}: {reason}")


def needs_kv_cache_dtype(name: str) -> None:
    """Skip the test in progress where a KV cache of `kv_cache_dtype=name` is refused."""
    if name != "fp8":
        return
    try:
        select(ReferenceBackend.name, this_gpu(), torch.bfloat16, HEAD_DIM, torch.float8_e4m3fn)
    except ValueError as error:
        pytest.skip(str(error))
