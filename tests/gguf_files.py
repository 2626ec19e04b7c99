"""GGUF files with a mutated header, drawn from a seed; `tools/fuzz_gguf.py` tries many. And files with random
blocks of any type."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_hybrids import write_hybrid
from model_folders import Hang, outcome
from tiny_models import write_tiny_model

from tools.write_gguf import write_gguf

NUMBERS = [0, 1, 2, 3, 7, 8, 9, 13, 31, 255, 2**16, 2**24, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def write_base(folder: Path, hybrid: bool = False) -> Path:
    """A tiny model with the tokenizer of the demo model, in one file. hybrid: one with states, without a
    tokenizer."""
    from model_folders import write_base as write_folder

    if hybrid:
        return write_hybrid(write_tiny_model(folder / "plain", "qwen3_5"), folder / "base.gguf", "Q8_0")
    source = write_folder(folder / "source")
    path = write_gguf(source, folder / "base.gguf", "Q8_0", pre="gpt-2")
    shutil.rmtree(source)
    return path


def fields(data: bytes) -> tuple[list[tuple[str, int, int]], int]:
    """(what, offset, bytes) of each number and text of a header, and where it ends."""
    found = [("magic", 0, 4), ("version", 4, 4), ("tensors", 8, 8), ("keys", 16, 8)]
    at = 24

    def string(what: str) -> None:
        nonlocal at
        (size,) = struct.unpack_from("<Q", data, at)
        found.extend([(f"length of {what}", at, 8), (what, at + 8, size)])
        at += 8 + size

    def number(what: str, size: int) -> int:
        nonlocal at
        found.append((what, at, size))
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def value(what: str, kind: int) -> None:
        if kind == 8:
            string(what)
        elif kind == 9:
            inner, count = number(f"element type of {what}", 4), number(f"count of {what}", 8)
            for _ in range(count):
                value(f"element of {what}", inner)
        else:
            number(what, WIDTHS[kind])

    num_tensors, num_keys = struct.unpack_from("<QQ", data, 8)
    for _ in range(num_keys):
        string("key")
        name = data[found[-1][1] :][: found[-1][2]].decode()
        value(name, number(f"type of {name}", 4))
    for _ in range(num_tensors):
        string("tensor")
        name = data[found[-1][1] :][: found[-1][2]].decode()
        for _ in range(number(f"dimensions of {name}", 4)):
            number(f"dimension of {name}", 8)
        number(f"type of {name}", 4)
        number(f"offset of {name}", 8)
    return found, at


def mutate(data: bytes, seed: int) -> tuple[bytes, str]:
    """A changed file, and what was done."""
    rng = random.Random(seed)
    all_fields, end = fields(data)
    by_kind: dict[str, list[tuple[str, int, int]]] = {}
    for each in all_fields:
        by_kind.setdefault("element" if each[0].startswith("element of") else each[0], []).append(each)
    what, at, size = rng.choice(by_kind[rng.choice(list(by_kind))])
    roll = rng.random()
    if roll < 0.55 or size == 0:
        number = rng.choice(NUMBERS) % 2 ** (8 * min(size, 8)) if size else 0
        new = number.to_bytes(min(size, 8), "little") + data[at + 8 : at + size]
        return data[:at] + new + data[at + size :], f"{what} is {number}"
    if roll < 0.7:
        other, from_, length = rng.choice(all_fields)
        return data[:at] + data[from_ : from_ + length] + data[at + size :], f"{what} is that of {other}"
    if roll < 0.8:
        return data[:at] + b"\xff" * size + data[at + size :], f"{what} is not UTF-8"
    if roll < 0.9:
        cut = rng.choice([at, at + size, end, rng.randrange(len(data))])
        return data[:cut], f"cut at {cut} of {len(data)}"
    if roll < 0.95:
        deep = struct.pack("<IQ", 9, 1) * 100_000
        return data[:at] + deep + data[at + size :], f"{what} is nested lists"
    place = rng.randrange(24, end)
    return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :], f"byte {place}"


def try_file(base: bytes, path: Path, seed: int, with_tokenizer: bool = True) -> tuple[str, str]:
    """Write a mutated file to `path` and load it; return what was done and the outcome."""
    data, what = mutate(base, seed)
    path.write_bytes(data)
    try:
        return what, outcome(path, with_tokenizer)
    except (Exception, Hang) as error:
        raise AssertionError(f"seed {seed}, {what}: {type(error).__name__}: {error}") from error


# Where a block has its float16 scales; a type that is not here has one at its begin.
SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,)},
    **dict.fromkeys(("IQ1_M", "MXFP4", "NVFP4"), ()),
}


def random_blocks(stored_as: str, seed: int = 0) -> Any:
    """An `encode` of `write_gguf`: matrices become random blocks of a type, with scales of a small model."""
    kind = gguf.GGMLQuantizationType[stored_as]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    scales = SCALES.get(stored_as, (0,))
    rng = np.random.default_rng(seed)

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if values.ndim == 1:
            return values, gguf.GGMLQuantizationType.F32
        shape = (*values.shape[:-1], values.shape[-1] // block)
        raw = rng.integers(0, 256, (*shape, size), dtype=np.uint8)
        for place in scales:
            multiples = 8 if stored_as in ("Q4_K", "Q5_K", "Q6_K") else 1
            small = rng.normal(0, 0.2 / block / multiples, (*shape, 1)).astype(np.float16)
            raw[..., place : place + 2] = small.view(np.uint8).reshape(*shape, 2)
        if stored_as == "MXFP4":  # a power of two
            raw[..., 0] = rng.integers(118, 123, shape)
        if stored_as == "NVFP4":  # four numbers of 8 bits; 0x7F and 0xFF are NaN
            raw[..., :4] = rng.integers(1, 24, (*shape, 4))
        if stored_as == "IQ1_M":  # the upper 4 bits of four numbers are one of 16: its exponent is small
            raw[..., 55] = raw[..., 55] & 15 | 16 * rng.integers(0, 3, shape, dtype=np.uint8)
        return raw.reshape(*values.shape[:-1], -1), kind

    return encode
