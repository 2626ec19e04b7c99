"""What callers pass: the types of prompts, with vLLM's names, and checks of further arguments.

`text/prompts.py` checks prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeAlias, TypedDict, TypeVar

from nanovllm.names import elsewhere, others_of, refuse_unknown
from nanovllm.params import SamplingParams

_Class = TypeVar("_Class")
PromptLike: TypeAlias = "str | Iterable[int] | Mapping[str, Any]"


class TextPrompt(TypedDict):
    """A text prompt: `TextPrompt(prompt="Hello")`, a dictionary."""

    prompt: str


class _WithText(TypedDict, total=False):
    prompt: str  # the text that the ids came from; shown in the output


class TokensPrompt(_WithText):
    """A prompt of token ids: `TokensPrompt(prompt_token_ids=[5, 6])`, a dictionary."""

    prompt_token_ids: list[int]


def calls_of_llm(owner: type[_Class]) -> type[_Class]:
    """A class whose public methods are calls of LLM: Python's own errors name them so, and those that take no
    `others` refuse unknown arguments with an error of ours."""
    for name, function in list(vars(owner).items()):
        if not inspect.isfunction(function):
            continue
        if function.__name__ == name and (name == "__init__" or not name.startswith("_")):
            function.__qualname__ = f"LLM.{name}"
        if not name.startswith("_") and not function.__code__.co_flags & inspect.CO_VARKEYWORDS:
            setattr(owner, name, _refusing(function))
    return owner


def _refusing(call: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with an error of ours for unknown arguments."""
    known = inspect.signature(call).parameters

    @wraps(call)
    def refusing(self: Any, *args: Any, **named: Any) -> Any:
        if named and not named.keys() <= known.keys():
            refuse_others(call, {name: named[name] for name in named if name not in known})
        return call(self, *args, **named)

    return refusing


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


def refuse_others(call: Callable[..., Any], others: Mapping[str, object], hint: str = "") -> None:
    """Check keyword arguments that `call` of LLM does not have.

    TypeError for a field of SamplingParams, and for an unknown name; the message of a name that no library
    here is known to have ends with `hint`. ValueError for an argument of vLLM's without a neutral value.
    """
    if not others:
        return
    name_of_call = f"LLM.{call.__name__}"
    known = [name for name in inspect.signature(call).parameters if name not in ("self", "others")]
    for name in others:
        is_sampling = name in SamplingParams.__dataclass_fields__ or name in others_of("SamplingParams")
        is_other = name in others_of(name_of_call) or elsewhere(name) is not None
        if is_sampling and "sampling_params" in known and not is_other:
            raise TypeError(f"{name_of_call}() got {name!r}; pass it as SamplingParams({name}=...)")
    try:
        refuse_unknown(name_of_call, others, known)
    except TypeError as error:
        raise TypeError(f"{error}{'' if any(map(elsewhere, others)) else hint}") from None
