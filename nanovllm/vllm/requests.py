"""ToldEngine: what classes of logits processors and `structured_outputs_config` make of the parameters of
each request. An engine without these options has nothing of it. Makes no step and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from nanovllm.checks import BadRow, attempt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.inputs import calls_of_llm
from nanovllm.models.config import ModelConfig
from nanovllm.names import refuse_unknown
from nanovllm.params import SamplingParams
from nanovllm.precompile.ahead import started_early
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import Prompt, Request
from nanovllm.vllm.configs import VllmConfig, profile_folder, view_of
from nanovllm.vllm.engine_args import takes_options
from nanovllm.vllm.processors import LogitsProcessor, OfRequest, load_processors

_OPTIONS = ("logits_processors", "structured_outputs_config")


@dataclass(frozen=True)
class NamedModelConfig(ModelConfig):
    """The shape of the model, also under vLLM's names."""

    @property
    def embedding_size(self) -> int:
        """The number of values of an embedding."""
        return self.hidden_size

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True)
class Telling:
    """What an engine adds to the parameters of its requests."""

    classes: Sequence[type[LogitsProcessor]]
    vllm_config: VllmConfig
    whitespace: bool | None  # `disable_any_whitespace` of requests that do not set it
    closed: bool  # whether `disable_additional_properties` holds for all requests

    def change(self, processor: Processor) -> None:
        """Have a processor change the parameters of all requests that it makes."""
        make = processor.make_requests

        def make_requests(
            prompts: Sequence[Prompt | BadRow],
            params: Sequence[SamplingParams | BadRow],
            first_id: int,
            rows: Sequence[int] = (),
            on_error: str = "raise",
        ) -> list[Request | BadRow]:
            return make(prompts, self._told(params), first_id, rows, on_error)

        vars(processor)["make_requests"] = make_requests

    def _told(self, params: Sequence[SamplingParams | BadRow]) -> list[SamplingParams | BadRow]:
        """The changed parameters. Rows that share an object go on to share one, unless classes make an own
        function for each; an error stands in place of parameters that a class refuses."""
        closed: dict[int, SamplingParams] = {}  # by identity
        rows: list[SamplingParams | BadRow] = []
        for each in params:
            if isinstance(each, SamplingParams):
                if id(each) not in closed:
                    closed[id(each)] = self._structured(each)
                rows.append(attempt(self._processed, closed[id(each)]))
            else:
                rows.append(each)
        return rows

    def _structured(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with the engine's settings where the request's own constraint says nothing."""
        own = params.structured_outputs
        if own is None:
            return params
        space = own.disable_any_whitespace
        if space is None and own.whitespace_pattern is None:
            space = self.whitespace
        changed = params.clone()
        changed.structured_outputs = replace(
            own,
            disable_any_whitespace=space,
            disable_additional_properties=own.disable_additional_properties or self.closed,
        )
        return changed

    def _processed(self, params: SamplingParams) -> SamplingParams:
        """The parameters of one request, with the functions that the classes make for it."""
        if not self.classes or params.max_tokens == 0:  # such a request draws nothing
            return params
        for each in self.classes:
            each.validate_params(params)
        changed = params.clone()
        own = [OfRequest(each, self.vllm_config, params) for each in self.classes]
        changed.logits_processors = [*(params.logits_processors or ()), *own]
        return changed


def refuse_nameless(others: Sequence[object]) -> None:
    """TypeError for arguments of LLM behind the model, which have no names."""
    if others:
        is_device = str(others[0]).startswith(("cpu", "cuda"))
        named = f"device={others[0]!r}" if is_device else "its name, as in device='cpu'"
        raise TypeError(f"LLM() got {others[0]!r} behind the model; options have names: write {named}")


@calls_of_llm
class ToldEngine(LLMEngine):
    """An engine with classes of logits processors, and settings under vLLM's names."""

    @takes_options
    def __init__(self, model: Any = None, *others: object, **options: Any) -> None:
        refuse_nameless(others)
        own = {name: options.get(name) for name in _OPTIONS}
        refuse_unknown("LLM", own, ())
        classes = load_processors(own["logits_processors"])
        devices = [options.get(name) or 1 for name in ("tensor_parallel_size", "data_parallel_size")]
        if classes and devices != [1, 1]:
            raise ValueError(
                "logits_processors are classes of this process and need tensor_parallel_size=1 and "
                f"data_parallel_size=1, not {devices[0]} and {devices[1]}"
            )
        structured = own["structured_outputs_config"] or {}
        if parser := structured.get("reasoning_parser"):
            if options.get("reasoning_parser") not in (None, parser):
                raise ValueError(
                    f"reasoning_parser={options['reasoning_parser']!r}, and in structured_outputs_config "
                    f"{parser!r}; pass one of them"
                )
            options["reasoning_parser"] = parser
        with started_early(options):
            super().__init__(model, **options)
        names = [each.name for each in fields(ModelConfig)]
        self.model_config = NamedModelConfig(**{name: getattr(self.model_config, name) for name in names})
        self._profile_folder = profile_folder(options.get("profiler_config"))
        whitespace = structured.get("disable_any_whitespace")
        closed = bool(structured.get("disable_additional_properties"))
        if classes or whitespace is not None or closed:
            Telling(classes, self.vllm_config, whitespace, closed).change(self._processor)
        if classes:
            self._processor.extras.reads_extra_args = True

    @cached_property
    def vllm_config(self) -> VllmConfig:
        """The engine's settings under vLLM's names, such as `vllm_config.cache_config.block_size`."""
        vocab_size = self._processor.vocab_size
        return view_of(self.config, self.model_config, self._executor.room, vocab_size)
