"""Selects an engine's attention backend: the requested one, or with "auto" the fastest that can run."""

from __future__ import annotations

import logging

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.flash_attn import FlashAttnBackend
from nanovllm.attention.reference import ReferenceBackend
from nanovllm.attention.triton import TritonBackend
from nanovllm.device import Device

logger = logging.getLogger("nanovllm")

# Fastest first, as measured on an H200 (docs/log/2026-11-22-measurements.md).
BACKENDS: tuple[type[AttentionBackend], ...] = (TritonBackend, FlashAttnBackend, ReferenceBackend)


def select(
    name: str,
    device: Device,
    dtype: torch.dtype,
    head_dim: int,
    cache_dtype: torch.dtype,
    deterministic: bool = False,
) -> AttentionBackend:
    """Return the backend called `name`, or for "auto" the first that is available.

    With `deterministic`, "auto" is "triton", whose bits do not depend on the rest of the batch. Raises
    ValueError with the reason if the requested backend cannot run here, or if the GPU does not support FP8
    (all backends use the same kernel to store an FP8 cache).
    """
    if cache_dtype != dtype and device.is_cuda and device.capability < (8, 9):
        raise ValueError(
            "kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or newer (Ada, Hopper), and "
            f"{device.name} has {'.'.join(map(str, device.capability))}; use kv_cache_dtype='auto'"
        )
    asked = f"attention_backend={name!r}"
    if deterministic and name == "auto":
        name, asked = TritonBackend.name, "deterministic=True needs attention_backend='triton', which"
    reasons: dict[str, str] = {}
    for backend in BACKENDS:
        # Triton's interpreter is only for tests: "auto" never selects it.
        if name not in ("auto", backend.name) or (
            name == "auto" and not device.is_cuda and backend.name == "triton"
        ):
            continue
        reason = backend.unavailable(device, dtype, head_dim, cache_dtype)
        if reason is None:
            logger.info("attention backend: %s%s", backend.name, f" ({reasons})" if reasons else "")
            return backend(deterministic)
        if name != "auto":
            raise ValueError(f"{asked} cannot run here: {reason}")
        reasons[backend.name] = reason
    raise ValueError(
        f"attention_backend={name!r}: no such backend; there are {[b.name for b in BACKENDS]} and 'auto'"
    )


def resolve_block_size(asked: int | None, backend: AttentionBackend) -> int:
    """Return the KV cache block size: the backend's default, or the requested one if it supports that."""
    if asked is None:
        return backend.default_block_size
    if asked % backend.block_size_multiple:
        raise ValueError(
            f"kvcache_block_size={asked} must be a multiple of {backend.block_size_multiple} "
            f"for the attention backend {backend.name!r}"
        )
    return asked
