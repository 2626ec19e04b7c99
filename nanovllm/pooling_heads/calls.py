"""PoolingCalls: classes, rewards, scores of pairs and rows of tokens, each made of plain requests.

Computes no hidden state and no head; the runner does. Here values become probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import torch

from nanovllm.answers import RequestOutput
from nanovllm.checks import BadRow
from nanovllm.extras.calls import ExtraCalls
from nanovllm.extras.columns import WITH_HEAD
from nanovllm.extras.outputs import PoolingRequestOutput
from nanovllm.extras.scoring import parse_pooling_params
from nanovllm.inputs import PromptLike, calls_of_llm, refuse_others, show
from nanovllm.params import SamplingParams
from nanovllm.pooling_heads.head import HeadConfig
from nanovllm.pooling_heads.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    PoolingOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from nanovllm.pooling_heads.pairs import encode_pairs, parse_texts
from nanovllm.pooling_heads.tokens import asking, token_ids, values_of
from nanovllm.pooling_params import PoolingParams
from nanovllm.text.prompts import Prompt, Request, parse_prompts

TASKS = ("embed", "classify", "token_embed", "token_classify")
_Params = PoolingParams | Sequence[PoolingParams] | None
_Progress = bool | Callable[..., Any]


@calls_of_llm
class PoolingCalls(ExtraCalls):
    """An engine whose model may have a head that judges hidden states, as `HeadConfig` says."""

    def classify(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        use_tqdm: _Progress = True,
        *,
        pooling_params: _Params = None,
        on_error: str = "raise",
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each label in `.outputs.probs`, in the order given; `.outputs.label` is
        the likeliest one's name.

        prompts, use_tqdm, on_error, others: as for `generate`. The head judges the last token of a prompt
        that is not config.json's `pad_token_id`. `problem_type` of config.json decides: softmax, sigmoid, or
        with "regression" the values themselves; without it one label has a sigmoid, several have a softmax.
        pooling_params: vLLM's; `PoolingParams(use_activation=False)` returns the values themselves.
        ValueError if the model has no head, or one for each token.
        """
        head = self._head("classify()", "classify")
        refuse_others(PoolingCalls.classify, others)
        rows = parse_prompts(prompts)
        found = self._values(rows, "classify", pooling_params, not head.is_reward, use_tqdm, on_error)
        return [
            ClassificationRequestOutput(**_fields(output, ClassificationOutput(data.tolist(), head.labels)))
            for output, data in found
        ]

    def reward(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        use_tqdm: _Progress = True,
        *,
        pooling_params: _Params = None,
        on_error: str = "raise",
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the reward of each prompt in `.outputs.data`, [labels] float32: what the head computes,
        without an activation. A model with a head for each token returns [tokens, labels], and a process
        reward model the probabilities at its step tokens.

        Arguments and errors as for `classify`.
        """
        head = self._head("reward()", None)
        refuse_others(PoolingCalls.reward, others)
        task = "token_classify" if head.each_token else "classify"
        default, rows = head.step_tag_id is not None, parse_prompts(prompts)
        found = self._values(rows, task, pooling_params, default, use_tqdm, on_error)
        return [PoolingRequestOutput(**_fields(output, PoolingOutput(data))) for output, data in found]

    def encode(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        pooling_params: _Params = None,
        *,
        use_tqdm: _Progress = True,
        pooling_task: str | None = None,
        on_error: str = "raise",
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what a task makes of each prompt in `.outputs.data`, float32, in the order given.

        pooling_task: "embed" gives [hidden_size], as `embed`; "token_embed" [tokens, hidden_size], the hidden
        state of each token after the final norm, of Euclidean length 1 unless `use_activation=False`;
        "classify" [labels], as `classify`; "token_classify" [tokens, labels], the same of each token. All
        tokens of a prompt are computed for the tasks of tokens, even those in the prefix cache.
        Other arguments as for `generate`; ValueError if the model has no head for the task.
        """
        refuse_others(PoolingCalls.encode, others)
        if pooling_task not in TASKS:
            raise ValueError(
                f"encode() needs pooling_task, one of {', '.join(map(repr, TASKS))}, not "
                f"{show(pooling_task)}; llm.get_tokenizer().encode(text) makes token ids"
            )
        if pooling_task == "embed":
            embedded = self.embed(prompts, use_tqdm, on_error=on_error, pooling_params=pooling_params)
            return [
                PoolingRequestOutput(
                    **vars(each) | {"outputs": PoolingOutput(_tensor(each.outputs.embedding))}
                )
                for each in embedded
            ]
        default = True
        if pooling_task in WITH_HEAD:
            head = self._head(f"encode(pooling_task={pooling_task!r})", pooling_task)
            default = not head.is_reward
        self._lifecycle.check_open()
        rows = parse_prompts(prompts)
        found = self._values(rows, pooling_task, pooling_params, default, use_tqdm, on_error)
        return [PoolingRequestOutput(**_fields(output, PoolingOutput(data))) for output, data in found]

    def score(
        self,
        prompt: Any,
        continuations: Any,
        use_tqdm: _Progress = True,
        *,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        **others: Any,
    ) -> list[Any]:
        """Return `ScoreOutput`s: the log-probability of each continuation of a prompt, in the order given. A
        model with a head of one label returns `ScoringRequestOutput`s: the score of each pair of texts, in
        `.outputs.score`.

        A model that generates: prompt, continuations: strings, or lists of token ids; `score_pairs` takes
        many prompts. Nothing is generated, only continuations need logits, and shared prefixes are computed
        once. A prompt and its continuation together may have `max_model_len` + 1 tokens.

        A model with a head: prompt, continuations: vLLM's `data_1` and `data_2`, each a string or a list of
        strings; one first text is paired with all second ones. A pair is tokenised as the tokenizer joins
        two texts. chat_template: one that writes messages of the roles "query" and "document" instead.
        pooling_params: as for `classify`.

        ValueError or TypeError names the prompt, the continuation or the text, and the value; ValueError for
        a head of several labels.
        """
        self._lifecycle.check_open()
        refuse_others(PoolingCalls.score, others)
        head: HeadConfig | None = self.model_config.head
        if head is None:
            for name, value in (("pooling_params", pooling_params), ("chat_template", chat_template)):
                if value is not None:
                    raise ValueError(
                        f"score(): {name} is for models that score pairs, and this one generates"
                    )
            return super().score(prompt, continuations, use_tqdm)
        if head.num_labels != 1 or head.each_token:
            raise ValueError(
                f"score() needs a head of one label for a whole text, and {head.architecture} has "
                f"{head.num_labels} label(s){' for each token' if head.each_token else ''}; use "
                f"{'encode()' if head.each_token else 'classify()'}"
            )
        pairs = parse_texts(prompt, continuations)
        check = self._processor.check_length
        ids = encode_pairs(self.tokenizer, pairs, chat_template, check, bool(head.tokens))
        rows: list[Prompt | BadRow] = [
            Prompt(None, each, where=f"pair {number}") for number, each in enumerate(ids)
        ]
        found = self._values(rows, "classify", pooling_params, True, use_tqdm, "raise")
        return [
            ScoringRequestOutput(**_fields(output, ScoringOutput(float(data[0]) if len(data) else nan)))
            for output, data in found
        ]

    # -- inside ------------------------------------------------------------------------------------------

    def _head(self, call: str, task: str | None) -> HeadConfig:
        """The model's head; ValueError if it has none for a task."""
        self._lifecycle.check_open()
        head: HeadConfig | None = self.model_config.head
        if head is None:
            raise ValueError(
                f"{call} needs a model with a head, such as one of ...ForSequenceClassification, and "
                f"{self.model_config.architecture} has none; generate() with SamplingParams(max_tokens=1, "
                "logprob_token_ids=[...]) gives the logprobs of labels, embed() embeddings"
            )
        if task == "token_classify" and head.tokens:
            raise ValueError(
                f"{call} needs a head of layers, and {head.architecture} has the logits of tokens"
            )
        if task == "classify" and head.each_token:
            raise ValueError(
                f"{call} needs a head for a whole text, and that of {head.architecture} is for each token; "
                "use encode(prompts, pooling_task='token_classify')"
            )
        return head

    def _values(
        self,
        rows: Sequence[Prompt | BadRow],
        task: str,
        params: _Params,
        default: bool,
        use_tqdm: _Progress,
        on_error: str,
    ) -> list[tuple[RequestOutput, torch.Tensor]]:
        """The output of each prompt, and what a task makes of it. default: whether the activation is applied
        unless `params` say it."""
        size = self.model_config.hidden_size
        ends = parse_pooling_params(params, len(rows), default, size)
        head: HeadConfig | None = self.model_config.head if task in WITH_HEAD else None
        if head is not None and any(dimensions != size for _, dimensions in ends):
            raise ValueError(f"pooling_params: dimensions is for embeddings, and {task!r} has labels")
        if head is not None and head.tokens:
            return self._logits(head, rows, [is_active for is_active, _ in ends], use_tqdm, on_error)
        padding: dict[int, list[int]] = {}  # what is left out at the end of a prompt, by its index

        def change(request: Request) -> Request:
            ids = request.prompt_token_ids
            if head is not None and task == "classify" and (count := head.judged(ids)) < len(ids):
                padding[request.index], ids = list(ids[count:]), ids[:count]
            return replace(request, prompt_token_ids=ids, first_scored=None, pooling=task)

        plain = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
        outputs = self._generate(rows, plain, use_tqdm, on_error, change)
        found = []
        for output in outputs:
            _note_abort(output)
            output.prompt_token_ids = [*output.prompt_token_ids, *padding.get(output.index, ())]
            found.append((output, _made(output, head, *ends[output.index])))
        return found

    def _logits(
        self,
        head: HeadConfig,
        rows: Sequence[Prompt | BadRow],
        are_active: Sequence[bool],
        use_tqdm: _Progress,
        on_error: str,
    ) -> list[tuple[RequestOutput, torch.Tensor]]:
        """As `_values`, of a model whose values are the logits of tokens."""
        ids = token_ids(self.tokenizer, head.tokens)
        outputs = self._generate(
            rows, asking(ids, head.num_labels, self.config.logprobs_mode), use_tqdm, on_error
        )
        found = []
        for output in outputs:
            _note_abort(output)
            values = _tensor(values_of(output, ids, head.num_labels) or ())
            found.append((output, _active(values, head) if are_active[output.index] else values))
        return found


def _note_abort(output: RequestOutput) -> None:
    if output.error is None and output["finish_reason"] == "abort":
        output.error = "the request was aborted"


def _made(output: RequestOutput, head: HeadConfig | None, is_active: bool, dimensions: int) -> torch.Tensor:
    """The values of an output; empty if it has an error. head: None for hidden states."""
    if output.pooled is None or output.error is not None:
        return torch.empty(0)
    values = _tensor(output.pooled)
    if head is None:
        values = values[..., :dimensions]
        return torch.nn.functional.normalize(values, dim=-1) if is_active else values
    if head.step_tag_id is not None:
        values = values[torch.tensor(output.prompt_token_ids) == head.step_tag_id]
    return _active(values, head) if is_active else values


def _active(values: torch.Tensor, head: HeadConfig) -> torch.Tensor:
    """What the head's activation makes of values [..., labels]."""
    if head.activation == "softmax":
        return values.softmax(-1)
    return values.sigmoid() if head.activation == "sigmoid" else values


def _tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.float32))


def _fields(output: RequestOutput, outputs: Any) -> dict[str, Any]:
    """The fields of a `PoolingRequestOutput`."""
    return {
        "request_id": output.request_id,
        "outputs": outputs,
        "prompt_token_ids": list(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "prompt": output.prompt,
        "error": output.error,
        "index": output.index,
    }
