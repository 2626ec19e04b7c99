"""typed_quickly: numba types a kernel without work whose result it has, or that nothing reads.

Knows numba alone. The machine code is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# By the types of the function and its arguments. A function that gets more implementations is another type.
_known: dict[tuple[Any, tuple[Any, ...]], Any] = {}


@contextmanager
def typed_quickly() -> Iterator[None]:
    """During the block numba remembers how it resolves functions whose arguments are numbers, and makes no
    text of the types.

    Otherwise it tries each implementation with and without literal types at each use, and words an error for
    each that does not fit: a quarter of the time that a kernel takes to compile.
    """
    from numba.core import typed_passes, types
    from numba.core.types import functions

    texts: Any = typed_passes.AnnotateTypes
    function: Any = functions.BaseFunction
    find, annotate = function.get_call_type, texts.run_pass
    numbers = (types.Number, types.Boolean, types.IntegerLiteral, types.BooleanLiteral)

    def get_call_type(self: Any, context: Any, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        if kws or not all(isinstance(each, numbers) for each in args):
            return find(self, context, args, kws)
        key = (self, tuple(args))
        if key not in _known:
            _known[key] = find(self, context, args, kws)
        return _known[key]

    function.get_call_type = get_call_type
    texts.run_pass = lambda _, state: False
    try:
        yield
    finally:
        function.get_call_type, texts.run_pass = find, annotate
