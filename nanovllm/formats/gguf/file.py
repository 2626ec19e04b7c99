"""GGUF files: metadata and tensors, found in the header and dequantised as they are read.

Every count, length and offset of the header is compared with the file before it is used, so a damaged file
costs neither memory nor time. Knows no model.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from nanovllm.errors import ModelLoadError
from nanovllm.formats.json_files import check_no_pointer
from nanovllm.models.registry import T, shortened

# The types of tensors, each with the places in a block of its scale, and perhaps its minimum, in float16.
# Others have none there, or, as IQ1_M, a scale whose bits are spread.
_SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("F32", "F16", "BF16"), ()),
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **{"IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": ()},
}
TYPES = tuple(_SCALES)
_FLOATS = ("F32", "F16", "BF16")
_NOT_FINITE = 0x7C  # the exponent of float16 values that are infinite or NaN, in their second byte
_VERSIONS = (2, 3)
_SCALARS = {  # the types of metadata, as NumPy and struct name them
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8"},
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_KEYS = 2**16
_MAX_TENSORS = 2**18
_MAX_STRINGS = 2**22  # in one list: the largest vocabularies have 2**18 tokens, with 2**19 merges
_MAX_NAME = 2**12  # bytes of a key or of a tensor's name
_MAX_ALIGNMENT = 2**16
_MAX_THREADS = 8


def gguf_package() -> ModuleType:
    """The package `gguf`, imported when the first file is opened; ModelLoadError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ModelLoadError(
            f"GGUF files are read with the package gguf ({error}); install it with "
            '`pip install "nanovllm[gguf]"`'
        ) from None
    return gguf


@cache
def _dequantises(stored_as: str) -> bool:
    """Whether the installed package reads a type of TYPES; older ones know fewer."""
    gguf = gguf_package()
    try:
        kind = gguf.GGMLQuantizationType[stored_as]
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (KeyError, NotImplementedError):
        return False
    return True


@dataclass(frozen=True)
class _Strings:
    """A list of strings in a file, which is decoded when it is needed."""

    data: mmap.mmap
    at: int
    count: int

    def __iter__(self) -> Iterator[str]:
        at, length = self.at, struct.Struct("<Q")
        for _ in range(self.count):
            (size,) = length.unpack_from(self.data, at)
            yield self.data[at + 8 : at + 8 + size].decode()
            at += 8 + size


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """A tensor in a file, a `WeightSource`. Indexing with slices dequantises only what is asked for.

    Reading raises ModelLoadError for scales of blocks that are infinite or NaN.
    """

    stored_as: str  # one of TYPES
    shape: tuple[int, ...]
    raw: np.ndarray  # [rows, bytes]: the bytes of each row; of one row if the tensor has one dimension
    order: np.ndarray | None = None  # the stored place of each row; None: as they are stored
    where: str = ""  # the file and the name, for errors
    factor: torch.Tensor | None = None  # of all values, [] float32, or of each matrix, [matrices, 1, 1]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    @property
    def kept_as(self) -> str:
        """The type, and what keeps its blocks from being used as they are stored."""
        return self.stored_as if self.factor is None else f"{self.stored_as} with a scale"

    def get_dtype(self) -> str:
        """Always float32, which is what indexing returns; safetensors' name of it."""
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if len(self.shape) == 1:
            values = self._dequantised(self.raw)[0]
            return (values if self.order is None else values[self.order])[first]
        if len(self.shape) > 2:
            return self._dequantised(self.raw)[index]
        rows = self.raw[first] if self.order is None else self.raw[self.order[first]]
        if not rest:
            return self._dequantised(rows)
        block, size = self._block()
        start, stop, _ = rest[0].indices(self.shape[1])
        begin = start // block
        part = self._dequantised(rows[:, begin * size : -(-stop // block) * size])
        return part[:, start - begin * block : stop - begin * block]

    def blocks(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stored blocks [rows, blocks, bytes] of a matrix, uint8; `columns` are whole blocks. None: they
        are in order."""
        block, size = self._block()
        own = self.raw[rows] if self.order is None else self.raw[self.order[rows]]
        part = own[:, columns.start // block * size : columns.stop // block * size]
        found = part.reshape(len(part), -1, size).copy()
        self._check_scales(found)
        return torch.from_numpy(found), None

    def ordered(self, order: np.ndarray) -> GGUFTensor:
        """The same tensor with its rows in another order."""
        return replace(self, order=order)

    def reshaped(self, shape: tuple[int, ...]) -> GGUFTensor:
        """The same values in another shape; the last dimension stays."""
        return replace(self, shape=shape)

    def scaled(self, scale: GGUFTensor) -> GGUFTensor:
        """The same tensor times a number, or times one for each matrix."""
        factor = scale[:]
        matrices = self.shape[0] if len(self.shape) > 2 else 1
        if len(scale.shape) > 1 or len(factor) not in (1, matrices) or not factor.isfinite().all():
            raise ModelLoadError(
                f"{scale.where} must be one finite number, or one for each of {matrices} matrices; it has "
                f"the shape {scale.shape} and the values {factor[:8].tolist()}"
            )
        return replace(self, factor=factor[0] if len(factor) == 1 else factor.view(-1, 1, 1))

    def parts(self) -> list[GGUFTensor]:
        """The matrices of a tensor with three dimensions."""
        count, rows, _ = self.shape
        split = self.raw.reshape(count, rows, -1)
        factors = [None] * count if self.factor is None else self.factor.flatten().expand(count)
        return [
            replace(self, shape=self.shape[1:], raw=each, factor=factor)
            for each, factor in zip(split, factors, strict=True)
        ]

    def _block(self) -> tuple[int, int]:
        """Elements and bytes of a block."""
        gguf = gguf_package()
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.stored_as]]
        return block, size

    def _check_scales(self, rows: np.ndarray) -> None:
        """ModelLoadError if blocks of contiguous rows have scales that are not finite."""
        for place in _SCALES[self.stored_as]:
            exponents = rows.reshape(-1)[place + 1 :: self._block()[1]] & _NOT_FINITE
            if exponents.size and exponents.max() == _NOT_FINITE:
                raise self._damaged()

    def _damaged(self) -> ModelLoadError:
        return ModelLoadError(
            f"{self.where} has blocks whose scale is infinite or NaN; the file is damaged, or was made from "
            "a model with such values"
        )

    def _dequantised(self, rows: np.ndarray) -> torch.Tensor:
        """rows [n, bytes] -> [n, elements] float32; [matrices, n / matrices, elements] with three
        dimensions."""
        gguf = gguf_package()
        kind = gguf.GGMLQuantizationType[self.stored_as]
        block, size = self._block()
        out = np.empty((rows.shape[0], rows.shape[1] // size * block), np.float32)
        step = max(1, 2**20 // max(1, out.shape[1]))  # rows at once: what it needs besides stays small

        def convert(start: int) -> None:
            some = np.ascontiguousarray(rows[start : start + step])
            self._check_scales(some)
            with np.errstate(all="ignore"):  # of floats that are not finite
                part = out[start : start + step] = gguf.quants.dequantize(some, kind)
            if self.stored_as not in _FLOATS and not _SCALES[self.stored_as] and not np.isfinite(part).all():
                raise self._damaged()

        with ThreadPoolExecutor(min(_MAX_THREADS, torch.get_num_threads())) as pool:
            list(pool.map(convert, range(0, len(out), step)))
        found = torch.from_numpy(out)
        if len(self.shape) > 2:
            found = found.view(self.shape)
        return found if self.factor is None else found * self.factor


class GGUFFile:
    """What the header of one file says. Opens the file; raises ModelLoadError that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = gguf_package()
        self._kinds = {each.value: each.name for each in self._gguf.GGMLQuantizationType}
        try:
            with path.open("rb") as file:
                check_no_pointer(path, file.read(64))
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ModelLoadError(f"{path} cannot be read, is it complete? {error}") from error
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        num_tensors, num_keys = self._counts()
        for _ in range(num_keys):
            key = self._name("a key")
            if key in self.metadata:
                raise self.problem(f"it has the key {key!r} twice")
            (kind,) = self._take("<I")
            self.metadata[key] = self._value(key, kind)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self.header_bytes = self._at
        alignment = self.scalar("general.alignment", int, 32)
        if alignment.bit_count() != 1 or alignment > _MAX_ALIGNMENT:
            raise self.problem(f"general.alignment must be a power of two, not {alignment!r}")
        base = -(-self._at // alignment) * alignment
        for name, shape, stored_as, offset in infos:
            if name in self.tensors:
                raise self.problem(f"it has the tensor {name!r} twice")
            self.tensors[name] = self._tensor(name, shape, stored_as, base + offset)

    def problem(self, what: str) -> ModelLoadError:
        """The error of this file."""
        return ModelLoadError(f"{self.path}: {shortened(what)}")

    def scalar(self, key: str, kind: type[T], default: Any = None) -> T | Any:
        """The value of a key, of this type; `default` without the key."""
        value = self.metadata.get(key, default)
        if value is not default and type(value) is not kind:
            raise self.problem(f"{key} must be of type {kind.__name__}, not {value!r}")
        return value

    def strings(self, key: str) -> list[str]:
        """The list of strings of a key."""
        value = self.metadata.get(key)
        if not isinstance(value, _Strings):
            raise self.problem(f"{key} must be a list of strings, not {value!r}")
        with suppress(UnicodeDecodeError):
            return list(value)
        raise self.problem(f"{key} has a string that is not UTF-8")

    def header(self) -> bytes:
        """The bytes before the tensors."""
        return self._data[: self.header_bytes]

    def _counts(self) -> tuple[int, int]:
        magic, version, num_tensors, num_keys = self._take("<4sIQQ")
        if magic != b"GGUF":
            raise self.problem(
                f"it begins with {magic!r} and not with b'GGUF', so it is another kind of file"
            )
        if version not in _VERSIONS:
            swapped = " (of a big-endian machine)" if version >= 2**16 else ""
            raise self.problem(f"GGUF version {version}{swapped} is not supported; supported: 2 and 3")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise self.problem(f"its header is damaged: it counts {num_tensors} tensors and {num_keys} keys")
        return num_tensors, num_keys

    def _take(self, form: str) -> tuple[Any, ...]:
        """The next values of the header."""
        size = struct.calcsize(form)
        self._need(size)
        values = struct.unpack_from(form, self._data, self._at)
        self._at += size
        return values

    def _need(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise self.problem("the file ends within its header; is it complete?")

    def _string(self, what: str, most: int = 2**26) -> str:
        (size,) = self._take("<Q")
        self._need(min(size, most))
        if size > most:
            raise self.problem(f"its header is damaged: {what} has {size} bytes")
        text = self._data[self._at : self._at + size]
        self._at += size
        with suppress(UnicodeDecodeError):
            return text.decode()
        raise self.problem(f"{what} is not UTF-8: {text[:80]!r}")

    def _name(self, what: str) -> str:
        return self._string(what, _MAX_NAME)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._list(key)
        return self._scalars(key, kind, 1)[0].item()

    def _scalars(self, key: str, kind: int, count: int) -> np.ndarray:
        if kind not in _SCALARS:
            raise self.problem(f"{key} has the type {kind}, which is not supported")
        dtype: np.dtype[Any] = np.dtype(_SCALARS[kind])
        self._need(count * dtype.itemsize)
        values = np.frombuffer(self._data, dtype, count, self._at)
        self._at += count * dtype.itemsize
        return values

    def _list(self, key: str) -> Any:
        kind, count = self._take("<IQ")
        if kind != _STRING:
            return self._scalars(key, kind, count)
        self._need(8 * count)
        if count > _MAX_STRINGS:
            raise self.problem(f"its header is damaged: {key} has {count} strings")
        found, data, at = _Strings(self._data, self._at, count), self._data, self._at
        length, end = struct.Struct("<Q"), len(self._data) - 8
        for _ in range(count):
            at += 8 + (length.unpack_from(data, at)[0] if at <= end else len(data))
        if at > len(data):
            raise self.problem(f"the file ends within {key}; is it complete?")
        self._at = at
        return found

    def _tensor_info(self) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape, type and offset of the next tensor."""
        name = self._name("a tensor's name")
        (num_dims,) = self._take("<I")
        if not 1 <= num_dims <= 4:
            raise self.problem(f"tensor {name!r} has {num_dims} dimensions; 1 to 4 are possible")
        shape = self._take(f"<{num_dims}Q")[::-1]
        number, offset = self._take("<IQ")
        stored_as = self._kinds.get(number, f"number {number}")
        if stored_as not in TYPES or not _dequantises(stored_as):
            raise self.problem(
                f"tensor {name!r} is stored as {stored_as}, which is not supported; supported: "
                f"{', '.join(filter(_dequantises, TYPES))}. Use a file with these types, such as a Q4_K_M or "
                "a Q8_0; a newer gguf package may know more (`pip install -U gguf`)"
            )
        return name, shape, stored_as, offset

    def _tensor(self, name: str, shape: tuple[int, ...], stored_as: str, at: int) -> GGUFTensor:
        block, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType[stored_as]]
        rows, (width, left) = 1, divmod(shape[-1], block)
        for each in shape[:-1]:
            rows *= each
        if left or not rows or not width:
            raise self.problem(
                f"tensor {name!r} of shape {shape} cannot be stored as {stored_as}, in blocks of {block}"
            )
        if at + rows * width * size > len(self._data):
            raise self.problem(f"the file ends within tensor {name!r}; is it complete?")
        raw = np.frombuffer(self._data, np.uint8, rows * width * size, at)
        where = f"{self.path}: tensor {shortened(repr(name))}"
        return GGUFTensor(stored_as, shape, raw.reshape(rows, width * size), where=where)


def all_tensors(files: list[GGUFFile]) -> dict[str, GGUFTensor]:
    """The tensors of all files by their names. ModelLoadError for a name that two files have.

    A weight is multiplied by the tensor `.scale` that some have, mostly those in NVFP4. `.input_scale` is for
    products in 4 bits, and left out.
    """
    found: dict[str, GGUFTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in found:
                raise file.problem(f"tensor {name!r} is in another file too")
            found[name] = tensor
    for name in [name for name in found if name.endswith(".weight")]:
        base = name.removesuffix("weight")
        if scale := found.pop(f"{base}scale", None):
            found[name] = found[name].scaled(scale)
        if found[name].stored_as == "NVFP4":
            found.pop(f"{base}input_scale", None)
    return found
