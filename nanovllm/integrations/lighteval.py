"""A model for lighteval, which loads this file: `lighteval custom MODEL FILE TASKS`.

`python -m nanovllm.integrations.lighteval` prints FILE. Metrics equal those of `lighteval accelerate`. All
requests of a kind go to the engine in one call. Has no tasks and computes no metrics.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from nanovllm.llm import LLM
from nanovllm.params import SamplingParams

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

_GENERATION = r",?(generation_parameters=\{[^}]*\})"


class NanoVLLM(LightevalModel):
    """`config.model_name` is `MODEL` or `MODEL,option=value,...`: a folder or hub id, with options of `LLM`.

    Further options are as in lighteval's own models: `override_chat_template` (whether to apply the chat
    template; by default if the model has one), `add_special_tokens` (True), `pairwise_tokenization` (True:
    context and continuation are tokenised separately, as in `lighteval accelerate`), `system_prompt`, and
    `generation_parameters={temperature:0.6,top_p:0.95}`. Prompts that are too long are cut on the left.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Load the model. Raises the errors of `LLM`, and ValueError for an option without `name=value`."""
        model, options, generation = _parse(config.model_name)
        if generation is not None:
            config = config.model_copy(update={"generation_parameters": generation})
        override = options.pop("override_chat_template", None)
        self._add_special_tokens = options.pop("add_special_tokens", True)
        self._pairwise = options.pop("pairwise_tokenization", True)
        system_prompt = options.pop("system_prompt", config.system_prompt)
        self.config = config.model_copy(update={"system_prompt": system_prompt})
        self.model = LLM(model, **options)
        self._tokenizer: Any = self.model.get_tokenizer()
        is_chat = uses_chat_template(tokenizer=self.tokenizer, override_chat_template=override)
        self.prompt_manager = PromptManager(is_chat, self._tokenizer, system_prompt)
        # "/" is stripped so that an absolute model path also becomes a folder below the cache
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
        """The maximum number of tokens of a sequence, prompt and output."""
        return int(self.model.llm_engine.model_config.max_model_len or 0)

    @cached(SamplingMethod.GENERATIVE)
    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """`num_samples` answers to each document, without the stop string that ended them."""
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
        """The log-probability of each choice, and whether greedy sampling gives it."""
        pairs, responses = [], []
        for doc in docs:
            context = self.prompt_manager.prepare_prompt(doc)
            contexts, endings = self.tok_encode_pair(context, doc.choices, pairwise=self._pairwise)
            rows = list(zip(contexts, endings, strict=True))
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
        """The log-probability of each text: the sum over windows that contain every token once.

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
        """Score each (context, continuation); contexts that are too long are cut on the left."""
        kept = []
        for context, continuation in pairs:
            room = self.max_length - len(continuation)
            if room < 1:
                raise ValueError(
                    f"a choice has {len(continuation)} tokens, but max_model_len={self.max_length} leaves "
                    f"room for {self.max_length - 1}; raise it or drop the choice"
                )
            kept.append((context[-room:] or [self._first_token()], continuation))
        scores = self.model.score_pairs(kept)
        for score in scores:
            if score.error is not None:
                raise RuntimeError(f"a choice has no score: {score.error}")
        return [(score.logprob, score.is_greedy) for score in scores]

    def _first_token(self) -> int:
        """The context of a text that has none."""
        bos = self._tokenizer.bos_token_id
        return int(self._tokenizer.eos_token_id if bos is None else bos)

    def _sampling_params(self, given: SamplingParams, doc: Doc, prompt_len: int) -> SamplingParams:
        """The user's generation parameters, adjusted for the task."""
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
    """Parse `MODEL,option=value,...` into the model, its options and its generation parameters."""
    found = re.search(_GENERATION, text)
    model, *parts = re.sub(_GENERATION, "", text).split(",")
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
    """Split a text into windows of at most `longest` tokens, as (context, tokens to score)."""
    windows = []
    for start in range(1, len(ids), longest - 1):
        scored = ids[start : start + longest - 1]
        windows.append((ids[max(0, start + len(scored) - longest) : start], scored))
    return windows


if __name__ == "__main__":
    print(__file__)
