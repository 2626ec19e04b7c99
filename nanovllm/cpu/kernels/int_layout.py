"""IntWeight: a weight of 8 or 4 bits in groups of 32 inputs, packed for products on CPUs; in torch.

The formats are those of GGUF. A value is code * scale, with Q4_1 plus a minimum; codes are unsigned: Q8_0 and
Q4_0 subtract 128 and 8 from them. Knows no kernel and no file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32  # inputs that share a scale
LANES = 16  # outputs of a block
_LINE = 64
FACTORS = tuple(0.82 + 0.06 * step for step in range(5))  # of the scale of 4 bits, tried in turn


@dataclass(frozen=True, slots=True)
class IntFormat:
    """bits: of a code. middle: the code of 0, if there is no minimum. numbers: float16 of a group: the scale,
    and perhaps the minimum."""

    name: str
    bits: int
    middle: int
    numbers: int

    def __post_init__(self) -> None:
        """ValueError for a format that no kernel computes: those with 4 bits take codes as nibbles, those
        with 8 as bytes, and two numbers are a scale and a minimum."""
        if self.bits not in (4, 8) or self.numbers not in (1, 2):
            raise ValueError(f"no kernel computes {self.bits} bits with {self.numbers} numbers for a group")

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a group of one output."""
        return GROUP * self.bits // 8

    @property
    def itemsize(self) -> float:
        """Bytes of a weight, with its share of the scales."""
        return (self.code_bytes + 2 * self.numbers) / GROUP


FORMATS = {
    each.name: each
    for each in (IntFormat("Q8_0", 8, 128, 1), IntFormat("Q4_0", 4, 8, 1), IntFormat("Q4_1", 4, 0, 2))
}


@dataclass(frozen=True, slots=True)
class IntWeight:
    """data [blocks, bytes] uint8. A block is 16 outputs: first the codes of all groups, then all scales.

    Codes of a group are [quads, 16 outputs, 4 inputs] bytes. With 4 bits, byte i of an output has the code of
    input i in its lower and that of input 16 + i in its upper half, as in GGUF.
    """

    format: IntFormat
    n: int
    k: int
    data: torch.Tensor

    @classmethod
    def zeros(cls, format: IntFormat, n: int, k: int, device: torch.device | None = None) -> IntWeight:
        """A weight whose values are all 0, also those beyond `n` and `k`."""
        groups = -(-k // GROUP)
        used = groups * LANES * (format.code_bytes + 2 * format.numbers)
        shape = -(-n // LANES), -(-used // _LINE) * _LINE
        data = torch.zeros(shape, dtype=torch.uint8, device=device)
        return cls(format, n, k, data)

    @property
    def groups(self) -> int:
        return -(-self.k // GROUP)

    def _codes(self) -> torch.Tensor:
        """A view [blocks, groups, quads, outputs, inputs]."""
        quads = self.format.code_bytes // 4
        used = self.groups * LANES * self.format.code_bytes
        return self.data[:, :used].unflatten(1, (self.groups, quads, LANES, 4))

    def _scales(self) -> torch.Tensor:
        """A view [blocks, groups, numbers, outputs], float16."""
        first = self.groups * LANES * self.format.code_bytes
        used = self.groups * LANES * 2 * self.format.numbers
        part = self.data[:, first : first + used].view(torch.float16)
        return part.unflatten(1, (self.groups, self.format.numbers, LANES))

    def store(self, first: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Fill the outputs from `first` on: codes [n, groups, code_bytes] uint8, scales [n, groups, numbers].

        They may be those of fewer groups than the weight has.
        """
        groups = codes.shape[1]
        words = codes.contiguous().view(torch.int32)
        own_words, own_scales = self._codes().view(torch.int32)[..., 0], self._scales()
        start = min(len(codes), -first % LANES)  # of whole blocks
        end = start + (len(codes) - start) // LANES * LANES
        whole = slice((first + start) // LANES, (first + end) // LANES)
        for own, new in ((own_words, words), (own_scales, scales)):
            own[whole, :groups] = new[start:end].unflatten(0, (-1, LANES)).permute(0, 2, 3, 1)
            for part in (slice(0, start), slice(end, len(codes))):
                row = torch.arange(first, first + len(codes))[part]
                own[row // LANES, :groups, :, row % LANES] = new[part]

    def stored(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of outputs, as `store` takes them."""
        row = torch.arange(first, first + count)
        codes = self._codes()[row // LANES, :, :, row % LANES].flatten(2)
        return codes, self._scales()[row // LANES, :, :, row % LANES]

    def dense(self) -> torch.Tensor:
        """The weight, [n, k] float32."""
        return dequantised(self.format, *self.stored(0, self.n))[:, : self.k]

    def first_rows(self, n: int) -> IntWeight:
        """The first `n` outputs, in the same memory."""
        return IntWeight(self.format, n, self.k, self.data[: -(-n // LANES)])


@dataclass(frozen=True, slots=True)
class IntExperts:
    """The weights of E experts. data [E, blocks, bytes] uint8, each expert's as in IntWeight."""

    format: IntFormat
    n: int
    k: int
    data: torch.Tensor

    @classmethod
    def zeros(cls, format: IntFormat, experts: int, n: int, k: int, device: torch.device) -> IntExperts:
        one = IntWeight.zeros(format, n, k, device).data
        return cls(format, n, k, one.new_zeros(experts, *one.shape))

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.data), self.n, self.k

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, expert: int) -> IntWeight:
        """The weight of an expert, in the same memory."""
        return IntWeight(self.format, self.n, self.k, self.data[expert])


def levels(format: IntFormat, codes: torch.Tensor) -> torch.Tensor:
    """codes [n, groups, code_bytes] -> integers [n, groups, 32], in float32, the middle subtracted."""
    if format.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    return codes.float() - format.middle


def dequantised(format: IntFormat, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[n, groups * 32] float32."""
    numbers = scales.float()
    values = levels(format, codes) * numbers[..., :1]
    return (values + numbers[..., 1:] if format.numbers == 2 else values).flatten(1)


def from_blocks(format: IntFormat, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GGUF's blocks [n, groups, bytes] uint8 -> codes and scales."""
    first = 2 * format.numbers
    codes = blocks[..., first:].contiguous()
    if format.bits == 8:
        codes = codes ^ 0x80
    return codes, blocks[..., :first].contiguous().view(torch.float16)


def quantise_reference(format: IntFormat, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantise` of `int_quantise.py` in plain torch, for finite values."""
    x = torch.nn.functional.pad(values.float(), (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    if format.bits == 8:
        scale = (x.abs().amax(-1, keepdim=True) / 127).half()
        return (_divided(x, scale).clamp(-127, 127) + 128).to(torch.uint8), scale
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    best: list[torch.Tensor] = []
    for factor in FACTORS:
        if format.numbers == 2:
            minimum = (low + (high - low) * (1 - factor) / 2).clamp_max(high).half()
            found = [((high - low) * factor / 15).half(), minimum]
        else:
            found = [(torch.where(high > -low, high, low) * factor / -8).half()]
        offset = found[1].float() if format.numbers == 2 else 0.0
        codes = (_divided(x - offset, found[0]) + format.middle).clamp_(0, 15)
        error = ((codes - format.middle) * found[0].float() + offset - x).square_().sum(-1, keepdim=True)
        if not best:
            best = [error, codes, torch.cat(found, -1)]
            continue
        better = error < best[0]
        new = error, codes, torch.cat(found, -1)
        best = [torch.where(better, each, old) for each, old in zip(new, best, strict=True)]
    codes = best[1].to(torch.uint8)
    return codes[..., :16] | codes[..., 16:] << 4, best[2]


def _divided(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, rounded; 0 where the scale is 0."""
    scale = scale.float()
    return (x * torch.where(scale == 0, scale, 1 / scale)).round_()
