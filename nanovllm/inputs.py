"""What callers pass: the types of prompts, with vLLM's names, and checks of further arguments.

Errors for names that LLM does not have say what to write. `text/prompts.py` checks prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypedDict

from nanovllm.sampling_params import SamplingParams
from nanovllm.vllm.arguments import SAMPLING, Absent, elsewhere, nearest, refuse_absent

PromptLike: TypeAlias = "str | Iterable[int] | Mapping[str, Any]"


class TextPrompt(TypedDict):
    """A text prompt: `TextPrompt(prompt="Hello")`, a dictionary."""

    prompt: str


class _WithText(TypedDict, total=False):
    prompt: str  # the text that the ids came from; shown in the output


class TokensPrompt(_WithText):
    """A prompt of token ids: `TokensPrompt(prompt_token_ids=[5, 6])`, a dictionary."""

    prompt_token_ids: list[int]


class OtherNames:
    """Errors for what other libraries' models have and LLM does not. They say what to write."""

    def __init_subclass__(cls) -> None:
        """Name methods after LLM in Python's own errors, whichever class defines them, and let public ones
        refuse unknown arguments as those do that have `others`."""
        for owner in cls.__mro__:
            for name, function in list(vars(owner).items()):
                if not inspect.isfunction(function) or not function.__module__.startswith("nanovllm."):
                    continue
                if function.__name__ == name and (name == "__init__" or not name.startswith("_")):
                    function.__qualname__ = f"LLM.{name}"
                if not name.startswith("_") and not function.__code__.co_flags & inspect.CO_VARKEYWORDS:
                    setattr(owner, name, _refusing(function))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else f"; {nearest(name, _public(type(self)), {})}"
            raise AttributeError(f"LLM has no attribute {name!r}{hint}", name=name, obj=self)

    def __call__(self, *args: object, **others: object) -> NoReturn:
        raise TypeError(f"LLM is not a function; {elsewhere('__call__')}")

    @classmethod
    def from_pretrained(cls, *args: object, **others: object) -> NoReturn:
        raise TypeError(f"LLM.from_pretrained() does not exist; {elsewhere('from_pretrained')}")


def _refusing(call: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with an error of ours for unknown arguments."""
    known = inspect.signature(call).parameters

    @wraps(call)
    def refusing(self: Any, *args: Any, **named: Any) -> Any:
        if named and not named.keys() <= known.keys():
            refuse_others(call, {name: named[name] for name in named if name not in known}, {})
        return call(self, *args, **named)

    return refusing


def _public(owner: type) -> Iterable[str]:
    return [name for name in dir(owner) if not name.startswith("_") and name != "from_pretrained"]


def given_prompts(prompts: Any, prompt_token_ids: Any) -> Any:
    """The prompts, under either of vLLM's names. TypeError for none, ValueError for both."""
    if prompts is None and prompt_token_ids is None:
        raise TypeError("LLM.generate() needs prompts: a string, token ids, or a list of these")
    if prompts is not None and prompt_token_ids is not None:
        raise ValueError("prompts and prompt_token_ids are the same argument; pass one of them")
    return prompt_token_ids if prompts is None else prompts


def check_on_error(on_error: object) -> None:
    """Raise ValueError unless `on_error` is "raise" or "return"."""
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', not {on_error!r}")


def refuse_others(
    call: Callable[..., Any], others: Mapping[str, object], table: Mapping[str, Absent], hint: str = ""
) -> None:
    """Check keyword arguments that `call` of LLM does not have; `table` holds vLLM's arguments.

    ValueError for an unsupported value. TypeError for a field of SamplingParams, and for an unknown name;
    the message of a name that no library here is known to have ends with `hint`.
    """
    if not others:
        return
    function = f"LLM.{call.__name__}()"
    known = [name for name in inspect.signature(call).parameters if name not in ("self", "others")]
    for name in others:
        is_sampling = name in SamplingParams.__dataclass_fields__ or name in SAMPLING
        if is_sampling and "sampling_params" in known and name not in table and elsewhere(name) is None:
            raise TypeError(f"{function} got {name!r}; pass it as SamplingParams({name}=...)")
    try:
        refuse_absent(function, others, table, known)
    except TypeError as error:
        raise TypeError(f"{error}{'' if any(map(elsewhere, others)) else hint}") from None
