"""IntWeight: a weight of 8 or 4 bits in groups of 32 inputs, packed for products on CPUs; in torch.

The formats are those of GGUF. A value is code * scale, in some plus a minimum; codes are unsigned: formats
without a minimum subtract a middle from them. Codes of 5 and 6 bits are bytes. Knows no kernel and no file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nanovllm.kernels.kinds import Kinds

GROUP = 32  # inputs that share a scale
LANES = 16  # outputs of a block
_LINE = 64
FACTORS = tuple(0.82 + 0.06 * step for step in range(5))  # of the scale of 4 bits, tried in turn


@dataclass(frozen=True, slots=True)
class IntFormat:
    """bits: of a code as it is packed. middle: the code of 0, if there is no minimum. numbers: float16 of a
    group, or of the groups that share them: the scale, and perhaps the minimum.

    shared: 0, or how many groups share their numbers. Then each has two multiples of them, int8: of the scale
    and of the minimum, which is subtracted; without a minimum, of the scale for each half of the group.
    """

    name: str
    bits: int
    middle: int
    numbers: int
    shared: int = 0
    most: int = 15  # the largest code

    def __post_init__(self) -> None:
        """ValueError for a format that no kernel computes: those with 4 bits take codes as nibbles, those
        with 8 as bytes, and two numbers are a scale and a minimum."""
        if self.bits not in (4, 8) or self.numbers not in (1, 2) or self.shared not in (0, 4, 8):
            shared = f" that {self.shared} groups share" if self.shared else ""
            raise ValueError(f"no kernel computes {self.bits} bits with {self.numbers} numbers{shared}")

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a group of one output."""
        return GROUP * self.bits // 8

    @property
    def group_bytes(self) -> int:
        """Bytes of what a group of one output has beside its codes, for itself."""
        return 2 if self.shared else 2 * self.numbers

    @property
    def block(self) -> int:
        """Inputs of a block of a file."""
        return GROUP * max(1, self.shared)

    @property
    def itemsize(self) -> float:
        """Bytes of a weight, with its share of the scales."""
        common = 2 * self.numbers / self.shared if self.shared else 0
        return (self.code_bytes + self.group_bytes + common) / GROUP


_GGUF = (
    IntFormat("Q8_0", 8, 128, 1, most=255),
    IntFormat("Q4_0", 4, 8, 1),
    IntFormat("Q4_1", 4, 0, 2),
    IntFormat("Q5_0", 8, 16, 1, most=31),
    IntFormat("Q5_1", 8, 0, 2, most=31),
    IntFormat("Q4_K", 4, 0, 2, shared=8),
    IntFormat("Q5_K", 8, 0, 2, shared=8, most=31),
    IntFormat("Q6_K", 8, 32, 1, shared=8, most=63),
)
# Blocks of which a model has the halves in another order: each half has the numbers of its block.
_HALVES = (
    replace(each, name=f"{each.name} in halves", shared=each.shared // 2) for each in _GGUF if each.shared
)
HALVES = {each.name: each for each in _HALVES}
FORMATS = {each.name: each for each in _GGUF} | HALVES


@dataclass(frozen=True, slots=True)
class IntWeight:
    """data [blocks, bytes] uint8. A block is 16 outputs: first the codes of all groups, then what each group
    has for itself, then what groups share.

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
        used = groups * LANES * (format.code_bytes + format.group_bytes)
        if format.shared:
            used += -(-groups // format.shared) * LANES * 2 * format.numbers
        shape = -(-n // LANES), -(-used // _LINE) * _LINE
        data = torch.zeros(shape, dtype=torch.uint8, device=device)
        return cls(format, n, k, data)

    @property
    def groups(self) -> int:
        return -(-self.k // GROUP)

    def _parts(self) -> list[torch.Tensor]:
        """Views [blocks, groups, each, outputs]: words of codes, int32; the scale and perhaps the minimum,
        float16; or two multiples, int8, and the numbers of groups that share them, float16."""
        format, at = self.format, 0

        def view(count: int, each: int, dtype: torch.dtype) -> torch.Tensor:
            nonlocal at
            start, at = at, at + count * each * LANES * dtype.itemsize
            return self.data[:, start:at].view(dtype).unflatten(1, (count, each, LANES))

        words = view(self.groups, format.code_bytes // 4, torch.int32)
        if not format.shared:
            return [words, view(self.groups, format.numbers, torch.float16)]
        multiples = view(self.groups, 2, torch.int8)
        return [words, multiples, view(-(-self.groups // format.shared), format.numbers, torch.float16)]

    def store(self, first: int, parts: tuple[torch.Tensor, ...]) -> None:
        """Fill the outputs from `first` on. parts, as `from_blocks` gives them: codes [n, groups, code_bytes]
        uint8 and scales [n, groups, numbers] float16, or multiples [n, groups, 2] int8 and the scales of
        those that share them.

        They may be those of fewer groups than the weight has.
        """
        codes, *numbers = parts
        start = min(len(codes), -first % LANES)  # of whole blocks
        end = start + (len(codes) - start) // LANES * LANES
        whole = slice((first + start) // LANES, (first + end) // LANES)
        for own, new in zip(self._parts(), (codes.contiguous().view(torch.int32), *numbers), strict=True):
            groups = new.shape[1]
            own[whole, :groups] = new[start:end].unflatten(0, (-1, LANES)).permute(0, 2, 3, 1)
            for part in (slice(0, start), slice(end, len(codes))):
                row = torch.arange(first, first + len(codes))[part]
                own[row // LANES, :groups, :, row % LANES] = new[part]

    def stored(self, first: int, count: int) -> tuple[torch.Tensor, ...]:
        """Codes and numbers of outputs, as `store` takes them."""
        row = torch.arange(first, first + count)
        words, *numbers = (each[row // LANES, :, :, row % LANES] for each in self._parts())
        return words.contiguous().view(torch.uint8), *numbers

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


def dequantised(format: IntFormat, codes: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
    """[n, groups * 32] float32."""
    values = levels(format, codes)
    if not format.shared:
        [scales] = numbers
        scale, *minimum = scales.float().split(1, -1)
    else:
        multiples, common = numbers
        common = common.float().repeat_interleave(format.shared, 1)[:, : codes.shape[1]]
        if format.numbers == 1:
            scale, minimum = (common * multiples).repeat_interleave(GROUP // 2, -1), []
        else:
            scale, subtracted = (common * multiples).split(1, -1)
            minimum = [-subtracted]
    values = values * scale
    return (values + minimum[0] if minimum else values).flatten(1)


def from_blocks(
    format: IntFormat, blocks: torch.Tensor, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """GGUF's blocks [n, blocks, bytes] uint8 -> codes and numbers, as `IntWeight.store` takes them.

    order: [blocks of the format] int64, the place of each among those that `blocks` has; None: as they are.
    """
    codes, *numbers = _UNPACKED[format.name](blocks)
    own, last = [codes], numbers[-1].contiguous().view(torch.float16)
    if format.shared:
        multiples = numbers[0].contiguous().view(torch.int8).flatten(1).unflatten(1, (-1, 2))
        own = [_packed_codes(format, codes), multiples]
        last = last.repeat_interleave(8 // format.shared, 1)
    if order is not None:
        each = max(1, format.shared)
        groups = (order[:, None] * each + torch.arange(each)).flatten()
        own, last = [part[:, groups] for part in own], last[:, order]
    return *own, last


def _from_bytes(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales, codes = blocks.split((2, 32), -1)
    return codes ^ 0x80, scales


def _from_nibbles(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales, codes = blocks.split((blocks.shape[-1] - 16, 16), -1)
    return codes.contiguous(), scales


def _from_five_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The fifth bits of 32 codes are a word of 4 bytes."""
    scales, high, low = blocks.split((blocks.shape[-1] - 20, 4, 16), -1)
    fifth = torch.stack([high >> bit & 1 for bit in range(8)], -1).flatten(-2)
    return torch.cat([low & 15, low >> 4], -1) | fifth << 4, scales


def _half_bytes(part: torch.Tensor, run: int) -> torch.Tensor:
    """Runs of bytes, their lower halves before their upper ones: [n, blocks, 256]."""
    runs = part.unflatten(-1, (-1, 1, run))
    return torch.cat([runs & 15, runs >> 4], -2).flatten(2)


def _bits(part: torch.Tensor, count: int) -> torch.Tensor:
    """The lowest `count` bits of all bytes of a run, then the next ones: [n, blocks, 8 / count * run]."""
    most = 2**count - 1
    return torch.stack([part >> shift & most for shift in range(0, 8, count)], -2).flatten(2)


def _six_bits(packed: torch.Tensor) -> torch.Tensor:
    """12 bytes -> the multiples of 8 groups, of the scale and of the minimum. Two bits of each of the last
    four are in the first ones."""
    scale, minimum, rest = packed.split(4, -1)
    last = (rest & 15 | scale >> 6 << 4, rest >> 4 | minimum >> 6 << 4)
    pairs = zip((scale, minimum), last, strict=True)
    return torch.stack([torch.cat([first & 63, end], -1) for first, end in pairs], -1)


def _from_q4_k(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    common, packed, low = blocks.split((4, 12, 128), -1)
    return _half_bytes(low, 32), _six_bits(packed), common


def _from_q5_k(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    common, packed, high, low = blocks.split((4, 12, 32, 128), -1)
    return _half_bytes(low, 32) | _bits(high, 1) << 4, _six_bits(packed), common


def _from_q6_k(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    low, high, multiples, common = blocks.split((128, 64, 16, 2), -1)
    upper = torch.cat([_bits(each, 2) for each in high.split(32, -1)], -1)
    return _half_bytes(low, 64) | upper << 4, multiples, common


# Blocks [n, blocks, bytes] -> codes and scales; of 8 groups, codes [n, blocks, 256], multiples and common
# numbers. The layouts are those of `block_q4_0`, `block_q4_K` and so on in ggml-common.h of llama.cpp.
_UNPACKED = Kinds(
    "format",
    {
        "Q8_0": _from_bytes,
        **{"Q4_0": _from_nibbles, "Q4_1": _from_nibbles},
        **{"Q5_0": _from_five_bits, "Q5_1": _from_five_bits},
        **{"Q4_K": _from_q4_k, "Q5_K": _from_q5_k, "Q6_K": _from_q6_k},
        **{"Q4_K in halves": _from_q4_k, "Q5_K in halves": _from_q5_k, "Q6_K in halves": _from_q6_k},
    },
)


def _packed_codes(format: IntFormat, codes: torch.Tensor) -> torch.Tensor:
    """[n, blocks, 256] or [n, blocks, groups, ...] bytes -> [n, groups, code_bytes]."""
    codes = codes.flatten(1).unflatten(1, (-1, GROUP))
    return codes if format.bits == 8 else codes[..., :16] | codes[..., 16:] << 4


def quantise_shared(format: IntFormat, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[n, k] -> codes and numbers of a format whose groups share them, rounded to the nearest; in torch.
    Groups with a value that is not finite, and those that share numbers with them, are NaN."""
    count = -(-values.shape[1] // GROUP)
    x = torch.nn.functional.pad(values.float(), (0, -values.shape[1] % format.block))
    if format.numbers == 1:
        parts = x.unflatten(1, (-1, format.shared, 2, GROUP // 2))
        sizes: tuple[torch.Tensor, ...] = (parts.abs().amax(-1) / (format.middle - 1),)
        most = 127
    else:
        parts = x.unflatten(1, (-1, format.shared, GROUP))
        low = parts.amin(-1).clamp_max(0)
        sizes = (parts.amax(-1).clamp_min(0) - low) / format.most, -low
        most = 63
    rest = tuple(range(2, parts.ndim - 1))
    common = torch.stack([each.amax(rest) / most for each in sizes], -1).half()
    shape = (..., *[None] * len(rest))
    multiples = [_divided(each, common[..., at][shape]).clamp(0, most) for at, each in enumerate(sizes)]
    scale, *minimum = (common[..., at][shape].float() * each for at, each in enumerate(multiples))
    offset = -minimum[0][..., None] if minimum else 0.0
    codes = _divided(parts - offset, scale[..., None]) + format.middle
    codes = _packed_codes(format, codes.nan_to_num(0).clamp(0, format.most).to(torch.uint8))
    found = multiples[0] if not minimum else torch.stack(multiples, -1)
    found = found.nan_to_num(0).to(torch.int8).flatten(1).unflatten(1, (-1, 2))
    return codes[:, :count], found[:, :count], common


def quantise_reference(format: IntFormat, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantise` of `int_quantise.py` in plain torch, for finite values; also of formats without shared
    numbers for which it has no kernel."""
    x = torch.nn.functional.pad(values.float(), (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    most = format.most
    if most == 255:
        scale = (x.abs().amax(-1, keepdim=True) / 127).half()
        return (_divided(x, scale).clamp(-127, 127) + 128).to(torch.uint8), scale
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    best: list[torch.Tensor] = []
    for factor in FACTORS:
        if format.numbers == 2:
            minimum = (low + (high - low) * (1 - factor) / 2).clamp_max(high).half()
            found = [((high - low) * factor / most).half(), minimum]
        else:
            found = [(torch.where(high > -low, high, low) * factor / -format.middle).half()]
        offset = found[1].float() if format.numbers == 2 else 0.0
        codes = (_divided(x - offset, found[0]) + format.middle).clamp_(0, most)
        error = ((codes - format.middle) * found[0].float() + offset - x).square_().sum(-1, keepdim=True)
        if not best:
            best = [error, codes, torch.cat(found, -1)]
            continue
        better = error < best[0]
        new = error, codes, torch.cat(found, -1)
        best = [torch.where(better, each, old) for each, old in zip(new, best, strict=True)]
    return _packed_codes(format, best[1].nan_to_num(0).to(torch.uint8)), best[2]


def _divided(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, rounded; 0 where the scale is 0."""
    scale = scale.float()
    return (x * torch.where(scale == 0, scale, 1 / scale)).round_()
