"""A model for lighteval, which loads this file: `lighteval custom MODEL FILE TASKS`.

`python -m nanovllm.integrations.lighteval` prints FILE. Metrics are those of `lighteval accelerate`. All
requests of a kind go to the engine in one call. Holds no task, computes no metric, defines one model alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

try:
    from lighteval.models.abstract_model import LightevalModel, ModelConfig
    from lighteval.models.model_input import GenerationParameters
    from lighteval.models.model_output import ModelResponse
    from lighteval.models.utils import uses_chat_template
    from lighteval.tasks.prompt_manager import PromptManager
    from lighteval.tasks.requests import Doc, SamplingMethod
    from lighteval.utils.cache_management import SampleCache, cached
except ImportError as error:
    raise ImportError(
        "nanovllm.integrations.lighteval needs lighteval; install it with: "
        f"pip install 'nanovllm[lighteval]' ({error})"
    ) from error

GENERATION = r",?(generation_parameters=\{[^}]*\})"


class NanoVLLM(LightevalModel):
    """`config.model_name` is `MODEL` or `MODEL,option=value,...`: a folder or hub id, with options of `LLM`.

    Further options, as of lighteval's own models: `override_chat_template` (whether prompts go through the
    chat template; where there is one they do), `add_special_tokens` (True), `pairwise_tokenization` (True:
    context and continuation are tokenised apart, as `lighteval accelerate` does), `system_prompt`, and
    `generation_parameters={temperature:0.6,top_p:0.95}`. Prompts are cut on the left where they are too long.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Load the model. Raises what `LLM` does, and ValueError for an option that is not `name=value`."""
        model, options, generation = _parse(config.model_name)
        if generation is not None:
            config = config.model_copy(update={"generation_parameters": generation})
        override = options.pop("override_chat_template", None)
        self._add_special_tokens = options.pop("add_special_tokens", True)
        self._pairwise = options.pop("pairwise_tokenization", True)
        system_prompt = options.pop("system_prompt", config.system_prompt)
        self.config = config.model_copy(update={"system_prompt": system_prompt})
        self.model = LLM(model, **options)
        tokenizer: Any = self.model.get_tokenizer()
        self._tokenizer = tokenizer
        self._max_length = int(self.model.llm_engine.model_config.max_model_len or 0)
        is_chat = uses_chat_template(tokenizer=tokenizer, override_chat_template=override)
        self.prompt_manager = PromptManager(is_chat, tokenizer, system_prompt)
        # the cache is a folder below its own, also for a model in a folder with an absolute path
        self._cache = SampleCache(self.config.model_copy(update={"model_name": config.model_name.strip("/")}))

    def cleanup(self) -> None:
        self.model.close()

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def add_special_tokens(self) -> bool:
        return bool(self._add_special_tokens)

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence, prompt and output."""
        return self._max_length

    @cached(SamplingMethod.GENERATIVE)
    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """The answers to each document, `num_samples` of them, without the stop text that ended them."""
        contexts = [self.prompt_manager.prepare_prompt(doc) for doc in docs]
        prompts = [self.tok_encode(context)[-(self.max_length - 1) :] for context in contexts]
        given = SamplingParams(**self.config.generation_parameters.to_vllm_dict())
        params = [
            self._sampling_params(given, doc, len(prompt)) for doc, prompt in zip(docs, prompts, strict=True)
        ]
        responses = []
        for context, output in zip(contexts, self.model.generate(prompts, params), strict=True):
            if output.error is not None:
                raise RuntimeError(f"document {output.index} ended with an error: {output.error}")
            responses.append(
                ModelResponse(
                    input=context,
                    input_tokens=output.prompt_token_ids,
                    text=[completion.text for completion in output.outputs],
                    output_tokens=[completion.token_ids for completion in output.outputs],
                )
            )
        return responses

    @cached(SamplingMethod.LOGPROBS)
    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """The logarithm of each choice's probability, and whether greedy sampling gives it."""
        pairs, responses = [], []
        for doc in docs:
            context = self.prompt_manager.prepare_prompt(doc)
            encoded = self.tok_encode_pair(context, doc.choices, pairwise=self._pairwise)
            rows = list(zip(*encoded, strict=True))
            pairs += rows
            prompt, choices = rows[0][0], [choice for _, choice in rows]
            responses.append(ModelResponse(input=context, input_tokens=prompt, output_tokens=choices))
        scores = iter(self._score(pairs))
        for response in responses:
            for _ in response.output_tokens:
                logprob, is_greedy = next(scores)
                response.logprobs.append(logprob)
                response.argmax_logits_eq_gold.append(is_greedy)
        return responses

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        """The logarithm of each text's probability: the sum over windows that hold every token once.

        Not cached: the cache of lighteval 0.13 returns no perplexities.
        """
        pairs, owners, responses = [], [], []
        for index, doc in enumerate(docs):
            ids: list[int] = self._tokenizer.encode(doc.query, add_special_tokens=False)
            responses.append(ModelResponse(input=doc.query, input_tokens=ids, logprobs=[0.0]))
            windows = _windows([self._first_token(), *ids], self.max_length)
            pairs += windows
            owners += [index] * len(windows)
        for owner, (logprob, _) in zip(owners, self._score(pairs), strict=True):
            responses[owner].logprobs[0] += logprob
        return responses

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Score each (context, continuation), cut on the left where too long."""
        kept = []
        for context, continuation in pairs:
            room = self.max_length - len(continuation)
            if room < 1:
                raise ValueError(
                    f"a choice has {len(continuation)} tokens, and max_model_len={self.max_length} leaves "
                    f"room for {self.max_length - 1}; raise it or drop the choice"
                )
            kept.append((context[-room:] or [self._first_token()], continuation))
        return [(score.logprob, score.is_greedy) for score in self.model.score_pairs(kept)]

    def _first_token(self) -> int:
        """What a text without a context is given."""
        bos = self._tokenizer.bos_token_id
        return int(self._tokenizer.eos_token_id if bos is None else bos)

    def _sampling_params(self, given: SamplingParams, doc: Doc, prompt_len: int) -> SamplingParams:
        """The user's generation parameters, with what the task asks for."""
        params = given.clone()
        room = self.max_length - prompt_len
        asked = given.max_tokens or doc.generation_size or room
        params.max_tokens = min(asked, room) if asked > 0 else room  # -1: no limit
        params.n = doc.num_samples
        params.stop_token_ids = [int(self._tokenizer.eos_token_id)]
        if not self.prompt_manager.use_chat_template:
            params.stop = [*(given.stop or ()), *(doc.stop_sequences or ())]
        return params


def _parse(text: str) -> tuple[str, dict[str, Any], GenerationParameters | None]:
    """The model, its options and its generation parameters, of `MODEL,option=value,...`."""
    found = re.search(GENERATION, text)
    model, *parts = re.sub(GENERATION, "", text).split(",")
    options: dict[str, Any] = {}
    for part in parts:
        name, separator, value = part.partition("=")
        if not separator:
            raise ValueError(f"model {text!r}: {part!r} is not an option; write name=value")
        try:
            options[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[name] = value
    return model, options, GenerationParameters.from_model_args(found[1]) if found else None


def _windows(ids: list[int], longest: int) -> list[tuple[list[int], list[int]]]:
    """Parts of a text of at most `longest` tokens, as (context, tokens that are scored)."""
    windows = []
    for start in range(1, len(ids), longest - 1):
        scored = ids[start : start + longest - 1]
        windows.append((ids[max(0, start + len(scored) - longest) : start], scored))
    return windows


if __name__ == "__main__":
    print(__file__)
