"""Triton's interpreter as tests need it: without work that has no effect, with the same bits in each row."""

from __future__ import annotations

import dataclasses
import sys
from functools import cache
from typing import Any

import numpy as np


def speed_up() -> None:
    """Leave out what the interpreter does in vain, if a kernel was imported, and round products alike.

    - It replaces the functions of `triton.language` at each launch, and again at each call of a jit function
      within one, when they are replaced already.
    - It computes whether sums of integers overflow, and asserts it only with `debug`, which it does not set.
    - It makes types, shapes and a table of dtypes at each operation, and broadcasts to the shape it has.
    - It multiplies by NumPy's BLAS, which gives equal rows of a matrix unequal bits if the processor has no
      AVX-512. A GPU does not. So products are summed in float64 and rounded once.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "is_quick"):
        return
    interpreter.is_quick = True
    language, patch, builder = interpreter.tl, interpreter._patch_lang, interpreter.interpreter_builder

    @cache
    def modules(fn: Any) -> list[Any]:
        found = [*fn.__globals__.values()]
        return [each for each in (language, language.core) if any(each is value for value in found)]

    class Nothing:
        def restore(self) -> None:
            """The launch restores what it has replaced."""

    def patch_unless_patched(fn: Any) -> Any:
        is_patched = [not language.core.is_builtin(each.load) for each in modules(fn)]
        return Nothing() if is_patched and all(is_patched) else patch(fn)

    interpreter._patch_lang = patch_unless_patched
    if not builder.options.debug and hasattr(builder.options, "sanitize_overflow"):
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    remember_types(interpreter)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        is_float = d.data.dtype == np.float32
        if not is_float or 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return dot(self, a, b, d, *others)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    dot, type(builder).create_dot = type(builder).create_dot, create_dot


def remember_types(interpreter: Any) -> None:
    """Make a type's dtype of NumPy, a block's type and a tensor's shape once for each kind of them.

    A version of Triton whose tensors or types hold other things keeps its own way.
    """
    core, semantic = interpreter.tl.core, interpreter.tl.semantic.TritonSemantic
    dtypes: dict[str, Any] = {}
    find = interpreter._get_np_dtype

    def get_np_dtype(kind: Any) -> Any:
        found = dtypes.get(kind.name)
        if found is None:
            found = dtypes[kind.name] = find(kind)
        return found

    interpreter._get_np_dtype = get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    make_block = core.block_type.__init__

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not core.dtype or any(type(each) is not int for each in shape):
            make_block(self, element_ty, shape)
            return
        key = (element_ty.name, *shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {**vars(self)}
        vars(self).update(blocks[key])

    core.block_type.__init__ = init_block
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}
    make_tensor = core.tensor.__init__

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if shape not in shapes:
            make_tensor(self, handle, type)
            shapes[shape] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(shapes[shape], handle=handle, type=type, dtype=type.scalar)

    block = core.block_type(core.float32, [2])
    if vars(core.tensor(None, block)).keys() == {"handle", "shape", "numel", "type", "dtype"}:
        core.tensor.__init__ = init_tensor
    broadcast = semantic.broadcast_impl_value

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape == rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_unless_equal
