"""Names of other libraries' models: errors for those that LLM does not have, and vLLM's kinds of outputs."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, NoReturn

from nanovllm.names import nearest
from nanovllm.vllm.arguments import elsewhere


class RequestOutputKind(Enum):
    """vLLM's kinds of outputs. Here `step` returns whole answers, and `LLM.stream(deltas=True)` parts."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class OtherNames:
    """Errors for what other libraries' models have and LLM does not. They say what to write."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else f"; {nearest(name, _public(type(self)))}"
            raise AttributeError(f"LLM has no attribute {name!r}{hint}", name=name, obj=self)

    def __call__(self, *args: object, **others: object) -> NoReturn:
        raise TypeError(f"LLM is not a function; {elsewhere('__call__')}")

    @classmethod
    def from_pretrained(cls, *args: object, **others: object) -> NoReturn:
        raise TypeError(f"LLM.from_pretrained() does not exist; {elsewhere('from_pretrained')}")


def _public(owner: type) -> Iterable[str]:
    return [name for name in dir(owner) if not name.startswith("_") and name != "from_pretrained"]
