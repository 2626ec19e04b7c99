"""PromptChecker: what a model refuses of prompts and parameters, from its small files. Loads no weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from nanovllm.checks import BadRow, attempt
from nanovllm.config import Config
from nanovllm.engine.startup import (
    find_model,
    make_processor,
    overridden,
    read_generation_config,
    recommended_params,
    resolve_max_model_len,
)
from nanovllm.jobs.check import Problem
from nanovllm.jobs.errors import refusing
from nanovllm.jobs.job import engine_options
from nanovllm.jobs.tasks import Renderer, RowFormat, Task
from nanovllm.models.registry import load_model_config
from nanovllm.pooling_heads.jobs import format_for
from nanovllm.text.prompts import Prompt, parse_prompt


class PromptChecker:
    """Renders and tokenises the prompts of rows as a run would.

    params: the model's own sampling parameters.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """JobRefusedError if there is no such model, or an option is wrong."""
        with refusing():
            config = Config.from_kwargs(args.model, **engine_options(args))
            path = find_model(config)
            generation = read_generation_config(config.generation_config, path)
            model_config = load_model_config(path, generation, config.hf_overrides, config.quantization)
            changes = config.override_generation_config or {}
            self.params = recommended_params(overridden(generation, config.generation_config, changes))
            limit = resolve_max_model_len(config.max_model_len, model_config)
            self._head = model_config.head
            self._processor = make_processor(config, path, model_config)
        is_chat = args.chat or args.messages_column is not None
        self._renderer = Renderer(self._processor.tokenizer, args.chat_template_kwargs, is_chat)
        self._processor.max_model_len = limit

    def format(self, row_format: RowFormat, sampling: Mapping[str, Any]) -> RowFormat:
        """How a run with the model reads its rows. JobRefusedError for a job that it cannot serve."""
        return format_for(self._head, row_format, sampling)

    def refused(self, tasks: list[Task]) -> Iterator[Problem]:
        """The tasks whose prompts or parameters the model refuses."""
        tasks = [task for task in tasks if task.kind in ("generate", "classify")]
        prompts: list[Prompt | BadRow] = [
            each if isinstance(each, Exception) else attempt(parse_prompt, each, "the prompt")
            for each in self._renderer.prompts(tasks)
        ]
        limit = self._processor.max_model_len
        requests = self._processor.make_requests(prompts, [task.params for task in tasks], 0)
        for task, request in zip(tasks, requests, strict=True):
            if isinstance(request, Exception):
                yield task.index, f"{task.place}: {request}", True
                continue
            length, more = len(request.prompt_token_ids), task.kind == "generate"
            if limit is not None and length + more > limit:
                fit = "leave room for one more" if more else "fit"
                why = f"the prompt has {length} tokens, and at most {limit - more} {fit}"
                yield task.index, f"{task.place}: {why} (max_model_len={limit})", True
