"""Names that this library does not have: errors that say which one it has, or what to write instead.

Knows no other library. Only for a name that is unknown here a door is asked (`doors.OTHER_NAMES`), which may
accept values that change nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from nanovllm.checks import show
from nanovllm.doors import OTHER_NAMES, Table

T = TypeVar("T")
_OTHERS: Table[Any] = Table(OTHER_NAMES)


class OtherArgument(Protocol):
    """An argument of another library."""

    @property
    def neutral(self) -> tuple[Any, ...] | None:
        """The values that are accepted and change nothing; None: any."""

    @property
    def default(self) -> Any:
        """The value that reading it returns."""

    @property
    def advice(self) -> str:
        """What to do instead."""

    def allows(self, value: object) -> bool:
        """Whether the value changes nothing."""


def others_of(call: str) -> Mapping[str, OtherArgument]:
    """The arguments of other libraries that a door knows for a call or class, such as "LLM.generate"."""
    found: Mapping[str, OtherArgument] = _OTHERS["arguments"].get(call, {})
    return found


def elsewhere(name: str) -> str | None:
    """One sentence on what to write instead of a name of another library; None for any other name."""
    found: str | None = _OTHERS["elsewhere"](name)
    return found


def nearest(name: str, known: Iterable[str], call: str = "") -> str:
    """A hint about the intended name: what to write for another library's, one of `known`, or one for which
    a door has advice."""
    if (write := elsewhere(name)) is not None:
        return write
    known = list(known)
    advised = [each for each, other in others_of(call).items() if other.neutral is not None]
    near = difflib.get_close_matches(name, dict.fromkeys([*known, *advised]), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"it knows: {', '.join(known)}"


def refuse_unknown(
    call: str, arguments: Mapping[str, object], known: Iterable[str], where: str | None = None
) -> None:
    """Check arguments that `call` does not have; `known` are the ones that it has. where: its name in errors.

    TypeError with the nearest name. ValueError for an argument of another library without a neutral value.
    """
    if not arguments:
        return
    others, where = others_of(call), where or f"{call}()"
    for name, value in arguments.items():
        if name not in others:
            raise TypeError(f"{where} got an unknown argument {name!r}; {nearest(name, known, call)}")
        if not others[name].allows(value):
            raise ValueError(f"{where}: {name}={value!r} is not supported; {others[name].advice}")


class KnownFields:
    """Base of dataclasses whose errors of an unknown argument say what to write."""

    if not TYPE_CHECKING:

        def __new__(cls, *positional: object, **values: object) -> Any:
            known = cls.__dataclass_fields__
            refuse_unknown(cls.__name__, {name: values[name] for name in values if name not in known}, known)
            return super().__new__(cls)


def takes_others(cls: type[T]) -> type[T]:
    """Decorates a dataclass of keyword arguments: its constructor takes those of other libraries too, with
    their neutral values, and its errors of an unknown argument say what to write."""
    known: Mapping[str, Field[Any]] = cls.__dataclass_fields__  # type: ignore[attr-defined]

    @wraps(cls.__init__)
    def __init__(self: Any, *positional: object, **values: object) -> None:
        if positional:
            first = fields(cls)[0].name  # type: ignore[arg-type]
            raise TypeError(
                f"{cls.__name__}() takes keyword arguments only, not {show(positional)}: their order differs "
                f"from engine to engine. Write their names, as in {cls.__name__}({first}=...)"
            )
        refuse_unknown(cls.__name__, {name: values[name] for name in values if name not in known}, known)
        vars(self).update({name: values.get(name, each.default) for name, each in known.items()})
        self.__post_init__()

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


class FieldsOfOthers:
    """Base of a dataclass that has the fields of other libraries, too, with their neutral values alone."""

    _call: ClassVar[str]  # as for `others_of`

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field, checked when a request is made. An unsupported field accepts its neutral value."""
        if name in self.__dataclass_fields__:  # type: ignore[attr-defined]
            super().__setattr__(name, value)
        elif name in others_of(self._call):
            refuse_unknown(self._call, {name: value}, (), self._call)
        else:
            raise self._no_field(name)

    def __getattr__(self, name: str) -> Any:
        """An unsupported field of another library reads as its neutral value."""
        if name.startswith("_"):
            raise AttributeError(f"{self._call} has no field {name!r}")
        others = others_of(self._call)
        if name not in others:
            raise self._no_field(name)
        return others[name].default

    def _no_field(self, name: str) -> AttributeError:
        known: Iterable[str] = type(self).__dataclass_fields__  # type: ignore[attr-defined]
        return AttributeError(f"{self._call} has no field {name!r}; {nearest(name, known, self._call)}")
