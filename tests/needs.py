"""The requirements of some GPU tests; where one is missing, the test is skipped with the engine's own reason.

The backends "triton" and "reference" run on every supported GPU, so their tests are never skipped.
"""

from __future__ import annotations

import pytest
import torch

from nanovllm.attention.backends import select
from nanovllm.attention.reference import ReferenceBackend
from nanovllm.device import Device
from nanovllm.flash_attn.backend import FlashAttnBackend


def this_gpu() -> Device:
    return Device("cuda")


def needs_backend(name: str, dtype: str = "auto") -> None:
    """Skip the current test if backend `name` does not support a bfloat16 model loaded as `dtype`."""
    if name != FlashAttnBackend.name:
        return
    gpu = this_gpu()
    resolved = gpu.resolve_dtype(dtype, "bfloat16")
    reason = FlashAttnBackend.unavailable(gpu, resolved, resolved)
    if reason is not None:
        pytest.skip(f"attention backend {name!r}: {reason}")


def needs_kv_cache_dtype(name: str) -> None:
    """Skip the current test if `kv_cache_dtype=name` is not supported."""
    if name != "fp8":
        return
    try:
        select(ReferenceBackend.name, this_gpu(), torch.bfloat16, (), torch.float8_e4m3fn)
    except ValueError as error:
        pytest.skip(str(error))
