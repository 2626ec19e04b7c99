"""GrammarCompiler: compiles structured outputs to grammars over a tokenizer's tokens, with llguidance.

Caches the compiled grammars; follows no output.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.checks import show
from nanovllm.extras.json_schemas import enforceable, escapes, strings, warn_once
from nanovllm.extras.structured_outputs import CONSTRAINTS, StructuredOutputsParams
from nanovllm.extras.token_rules import Ends

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

CACHE_SIZE = 1024  # cached grammars, a few hundred kilobytes each
COPIES, ORIGINALS = 32, 8  # consecutive copies of one original matcher; number of originals
_TRIED_TOKENS = 8  # of a text that tries a constraint


class Constraint:
    """A valid constraint, for any number of outputs.

    Copies of a matcher share the lexer's states behind a lock, so a state that one output computed is free
    for the next. Several originals avoid that all copies wait for one lock.
    """

    def __init__(
        self, first: LLMatcher, make: Callable[[], LLMatcher], executor: LLExecutor, end_id: int
    ) -> None:
        """first: an original. make: creates another original. executor: runs many matchers in parallel.
        end_id: the tokenizer's token that ends a text."""
        self.executor = executor
        self.longest = (0, "")  # of choices the one with the most tokens, behind their number
        self.ends = Ends(end_id)
        self._originals = [first]
        self._make = make
        self._num_copies = 0

    def new(self) -> LLMatcher:
        """Return a matcher for one output, in its initial state."""
        index = self._num_copies // COPIES % ORIGINALS
        self._num_copies += 1
        if index >= len(self._originals):
            index = len(self._originals)
            self._originals.append(self._make())
        return self._originals[index].deep_copy()

    def alone(self) -> LLMatcher:
        """Return a matcher that shares nothing. Use it after an error: shared states may be at a limit."""
        self._originals.clear()
        self._num_copies = 0
        return self._make()


class GrammarCompiler:
    """Compiles constraints for one tokenizer, each once while it is cached."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """vocab_size: of the model's logits. eos_token_ids: the tokens that end a text. llguidance gets only
        the first one; a sequence's `Grammar` rule then allows all of them.

        ImportError without llguidance; ValueError for a tokenizer that it cannot read.
        """
        try:
            import llguidance
        except ImportError:
            raise ImportError(
                "structured_outputs need llguidance; install it with: pip install 'nanovllm[structured]'"
            ) from None
        if not eos_token_ids:
            raise ValueError(
                "structured_outputs need a token that ends a text; set eos_token_id in config.json"
            )
        self.tokenizer = tokenizer
        self._llguidance: Any = llguidance
        known = [token_id for token_id in eos_token_ids if token_id < len(tokenizer)]
        self._tokens = self._read_tokenizer(vocab_size, (known or [tokenizer.eos_token_id])[0])
        self._executor: LLExecutor = llguidance.LLExecutor()
        self.constraint = lru_cache(CACHE_SIZE)(self._constraint)

    def _read_tokenizer(self, vocab_size: int, eos_token_id: int) -> LLTokenizer:
        """The tokenizer as llguidance reads it, with as many tokens as the model has logits."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                "structured_outputs need a tokenizer with a tokenizer.json, not "
                f"{type(self.tokenizer).__name__}"
            )
        content = json.loads(backend.to_str())
        # The model never draws tokens without logits.
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocab_size]
        content["padding"] = content["truncation"] = None
        text = json.dumps(content, ensure_ascii=False)
        return self._llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_id)

    def _constraint(self, params: StructuredOutputsParams) -> Constraint:
        """Compile a constraint. ValueError if it is invalid, with llguidance's message, or if no text can be
        seen to satisfy it."""
        name = next(name for name in CONSTRAINTS if getattr(params, name))
        text = show(getattr(params, name))
        try:
            grammar = self._grammar(params)
            make = partial(self._llguidance.LLMatcher, self._tokens, grammar, log_level=0)
            first = make()
            probe = first.deep_copy()
            if not first.is_error():
                probe.compute_bitmask()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, and no Exception
                raise
            raise ValueError(f"{name}: llguidance cannot compile it ({error}); make it smaller") from None
        if first.is_error():
            raise ValueError(f"{name}: {first.get_error().strip()}")
        if probe.is_error():
            raise ValueError(f"{name}: no text satisfies {text}, for no token may come first")
        if params.regex is not None or params.grammar is not None:
            self._try(first, f"{name}: {text}")
        for warning in first.get_grammar_warnings():
            warn_once(f"{name}: {warning}")
        constraint = Constraint(first, make, self._executor, self._tokens.eos_token)
        if params.choice is not None:
            constraint.longest = max((len(self._tokens.tokenize_str(each)), each) for each in params.choice)
        return constraint

    def _grammar(self, params: StructuredOutputsParams) -> str:
        """The constraint in llguidance's format, not checked yet."""
        llguidance = self._llguidance
        if params.regex is not None:
            return str(llguidance.grammar_from("regex", params.regex))
        if params.choice is not None:
            return str(llguidance.grammar_from("choice", json.dumps(params.choice)))
        if params.grammar is not None:
            return str(llguidance.grammar_from("lark", self._lark(params.grammar)))
        is_flexible = params.disable_any_whitespace is False or params.whitespace_pattern is not None
        options: dict[str, Any] = {"whitespace_flexible": is_flexible, "coerce_one_of": True}
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        if params.structural_tag is not None:
            tag = json.loads(str(params.structural_tag))
            for each in tag["structures"]:
                each["schema"] = self._enforceable(each["schema"], params)
            return self._tagged(tag, options)
        schema = {"type": "object"} if params.json is None else json.loads(str(params.json))
        schema = self._enforceable(schema, params)
        options["json_allowed_escapes"] = escapes(schema)
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        return str(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options))

    def _enforceable(self, schema: dict[str, Any], params: StructuredOutputsParams) -> dict[str, Any]:
        """The schema as llguidance enforces it. ValueError for one that it cannot follow."""
        schema = enforceable(schema, params, self._is_format, self._only_names)
        for each in strings(schema):
            self._try(self._of_schema(each), f"the string {show(each)}")
        return schema

    def _of_schema(self, schema: dict[str, Any]) -> LLMatcher:
        """A matcher of a small schema; it may be in an error."""
        grammar = self._llguidance.LLMatcher.grammar_from_json_schema(schema)
        return self._llguidance.LLMatcher(self._tokens, grammar, log_level=0)

    @lru_cache  # noqa: B019
    def _is_format(self, name: str) -> bool:
        return not self._of_schema({"type": "string", "format": name}).is_error()

    def _only_names(self, pattern: str, names: Sequence[str]) -> list[str] | None:
        """Those of the names that match a pattern, if no other name matches it; else None."""
        matcher = self._of_schema({"type": "string", "pattern": pattern})
        if matcher.is_error():
            return [] if "nsatisfiable" in matcher.get_error() else None
        quoted = {name: json.dumps(name, ensure_ascii=False).encode() for name in names}
        prefixes = {each[:size] for each in quoted.values() for size in range(len(each))} or {b""}
        for prefix in sorted(prefixes, key=len):
            here = matcher.deep_copy()
            if here.consume_tokens(self._tokens.tokenize_bytes(prefix)):
                for token_id in _allowed(here):
                    text = prefix + self._tokens.decode_bytes([int(token_id)])
                    if not any(each.startswith(text) for each in quoted.values()):
                        return None
        return [
            name
            for name, each in quoted.items()
            if matcher.deep_copy().consume_tokens(self._tokens.tokenize_bytes(each))
        ]

    def _try(self, matcher: LLMatcher, named: str) -> None:
        """Follow one text a few tokens far. ValueError if it cannot be continued there."""
        if matcher.is_error():
            return  # the whole schema's error says more
        here, rng, text = matcher.deep_copy(), random.Random(0), b""
        for _ in range(_TRIED_TOKENS):
            forced = here.compute_ff_bytes()
            if forced:
                here.consume_tokens(self._tokens.tokenize_bytes(forced))
                text += forced
            may = np.empty(0, int) if here.is_stopped() else _allowed(here)
            if here.is_error() or (not len(may) and not here.is_stopped()):
                why = here.get_error().split("\n")[0] if here.is_error() else "NoExtension"
                why = "no token may follow" if "NoExtension" in why else f"llguidance fails: {why}"
                shown = show(text.decode("utf-8", "replace"))
                raise ValueError(f"{named} cannot be followed after {shown}: {why}; make it simpler")
            may = may[may != self._tokens.eos_token]
            if not len(may):
                return
            token_id = int(may[rng.randrange(len(may))])
            text += self._tokens.decode_bytes([token_id])
            here.consume_token(token_id)

    def _lark(self, grammar: str) -> str:
        """A grammar as Lark. ValueError for a wrong one in GBNF."""
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return str(any_to_lark(grammar))
        except Exception as error:  # it raises plain Exceptions
            raise ValueError(f"Failed to convert the grammar from GBNF to Lark: {error}") from None

    def _tagged(self, tag: dict[str, Any], options: dict[str, Any]) -> str:
        """Free text, in which a structure that begins with a trigger follows the trigger.

        options: of the JSON in structures."""
        StructTag = self._llguidance.StructTag
        tags = [
            StructTag(
                trigger=trigger,
                begin=each["begin"],
                grammar=each["schema"]
                | {"x-guidance": options | {"json_allowed_escapes": escapes(each["schema"])}},
                end=each["end"],
            )
            for each in tag["structures"]
            for trigger in tag["triggers"]
            if each["begin"].startswith(trigger)
        ]
        return str(StructTag.to_grammar(tags))


def _allowed(matcher: LLMatcher) -> np.ndarray:
    """The tokens that may follow."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits)
