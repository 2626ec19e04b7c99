"""What the functions of `vectors` are made of: types, the decorator `emitted`, and pieces of LLVM's language.

With NANOVLLM_CPU_CHECK=1 every `load` and `store` is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from nanovllm.cpu import isa
from nanovllm.cpu.kernels.checking import CHECK_SYMBOL, CHECKED
from nanovllm.kernels.kinds import Kinds

LANES = 16

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
F16 = ir.HalfType()


class _BFloat(ir.Type):  # llvmlite has none
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()
VF, VI, VM = (ir.VectorType(each, LANES) for each in (F32, I32, I1))


class _Vector(types.Type):
    def __init__(self, name: str, llvm: ir.VectorType) -> None:
        super().__init__(name=name)
        self.llvm = llvm


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: _Vector) -> None:
        super().__init__(manager, kind, kind.llvm)


f32x16, i32x16 = _Vector("f32x16", VF), _Vector("i32x16", VI)
i64, i32, f32, void = types.int64, types.int32, types.float32, types.void
Emit = Callable[..., Any]
_CONVERTS_HALVES = Kinds(
    "instruction set", {"amx": True, "avx512_bf16": True, "avx512": True, "avx2": True, "generic": False}
)
_BYTES = {I8: 1, I16: 2, BF16: 2, F16: 2, I32: 4, F32: 4, I64: 8, ir.DoubleType(): 8}


def emitted(result: Any, *arguments: Any) -> Callable[[Emit], Any]:
    """A decorator: a function (builder, *LLVM values) -> an LLVM value, as a function that kernels call."""

    def decorate(emit: Emit) -> Any:
        signature = result(*arguments)

        def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        names = ", ".join(f"a{index}" for index in range(len(arguments)))
        scope = {"signature": signature, "generate": generate}
        # An intrinsic must name its arguments.
        exec(f"def {emit.__name__}(context, {names}): return signature, generate", scope)
        return intrinsic(scope[emit.__name__])

    return decorate


def call(b: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call an LLVM intrinsic, or a function of the process."""
    kind = ir.FunctionType(result, [each.type for each in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def check(b: Any, address: Any, num_bytes: int) -> Any:
    """The address, if it may be used; else one that does no harm, and the launch fails."""
    return call(b, CHECK_SYMBOL, I64, address, ir.Constant(I64, num_bytes))


def _pointer(b: Any, address: Any, kind: Any, lanes: int) -> Any:
    if CHECKED:
        address = check(b, address, _BYTES[getattr(kind, "element", kind)] * lanes)
    return b.inttoptr(address, kind.as_pointer())


def load(b: Any, address: Any, kind: Any) -> Any:
    """Load a value of an LLVM type, without alignment beyond its elements'."""
    value = b.load(_pointer(b, address, kind, getattr(kind, "count", 1)))
    value.align = 1
    return value


def store(b: Any, address: Any, value: Any) -> None:
    done = b.store(value, _pointer(b, address, value.type, getattr(value.type, "count", 1)))
    done.align = 1


def prefetch(b: Any, address: Any) -> None:
    """Ask for the cache line of an address, which may be no valid one, into the second-level cache: requests
    into the first level hold its few miss buffers until the memory answers, and loads wait for them."""
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [b.inttoptr(address, pointer), *(ir.Constant(I32, each) for each in (0, 2, 1))])


def multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of float32 vectors, rounded once."""
    return call(b, "llvm.fma.v16f32", VF, x, y, z)


def plus(b: Any, address: Any, num_bytes: int) -> Any:
    """address + num_bytes."""
    return b.add(address, ir.Constant(I64, num_bytes)) if num_bytes else address


def constant(value: float, kind: Any = VF) -> Any:
    """A vector with the same value in all lanes."""
    return ir.Constant(kind, [value] * kind.count)


def spread(b: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector whose lanes are all `value`."""
    kind = ir.VectorType(value.type, lanes)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def converts_halves() -> bool:
    """Whether the CPU has an instruction for it: LLVM would call a function that no library here has."""
    return _CONVERTS_HALVES[isa.level()]


def from_half(b: Any, x: Any) -> Any:
    """16 float16 as float32."""
    if converts_halves():
        return b.fpext(x, VF)
    bits = b.zext(b.bitcast(x, ir.VectorType(I16, LANES)), VI)
    size = b.shl(b.and_(bits, constant(0x7FFF, VI)), constant(13, VI))
    value = b.bitcast(b.fmul(b.bitcast(size, VF), constant(2.0**112)), VI)
    is_finite = b.icmp_signed("<", size, constant(0x7C00 << 13, VI))
    value = b.select(is_finite, value, b.or_(size, constant(0x7F800000, VI)))
    sign = b.shl(b.and_(bits, constant(0x8000, VI)), constant(16, VI))
    return b.bitcast(b.or_(value, sign), VF)


def to_half(b: Any, x: Any) -> Any:
    """16 float32 as float16, rounded to nearest even; NaN stays NaN."""
    half = ir.VectorType(F16, LANES)
    if converts_halves():
        return b.fptrunc(x, half)
    bits = b.bitcast(x, VI)
    size = b.and_(bits, constant(0x7FFFFFFF, VI))
    odd = b.and_(b.lshr(size, constant(13, VI)), constant(1, VI))
    value = b.lshr(b.add(size, b.add(odd, constant(0xFFF - (112 << 23), VI))), constant(13, VI))
    small = b.bitcast(b.fadd(b.bitcast(size, VF), constant(0.5)), VI)  # the sum rounds where a half ends
    is_small = b.icmp_signed("<", size, constant(113 << 23, VI))
    value = b.select(is_small, b.sub(small, constant(126 << 23, VI)), value)
    value = b.select(b.icmp_signed("<", size, constant(143 << 23, VI)), value, constant(0x7C00, VI))
    value = b.select(b.icmp_signed(">", size, constant(0x7F800000, VI)), constant(0x7E00, VI), value)
    sign = b.and_(b.lshr(bits, constant(16, VI)), constant(0x8000, VI))
    return b.bitcast(b.trunc(b.or_(value, sign), ir.VectorType(I16, LANES)), half)


def shuffle(b: Any, x: Any, y: Any, order: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), order))
