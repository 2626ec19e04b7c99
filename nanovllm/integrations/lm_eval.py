"""A model for lm-evaluation-harness, with the name "nanovllm". Its metrics equal those of `--model hf`.

`python -m nanovllm.integrations.lm_eval ...` is the harness' own program plus this model. All requests of a
kind go to the engine in one call. Has no tasks and computes no metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from nanovllm.device import Device
from nanovllm.llm import LLM
from nanovllm.params import SamplingParams

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        "nanovllm.integrations.lm_eval needs lm-evaluation-harness; install it with: "
        f"pip install 'nanovllm[lm-eval]' ({error})"
    ) from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_logger = logging.getLogger("nanovllm")


@register_model("nanovllm")
class NanoVLLM(TemplateLM):
    """The arguments are those of `--model_args`; the harness also passes `batch_size` and `device`."""

    def __init__(
        self,
        pretrained: str,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        """Load the model.

        pretrained: a folder, or a Hugging Face hub id.
        max_length: the maximum number of model input tokens; None: the model's limit. A scored text may have
        one token more, which the model does not compute.
        max_gen_toks: the maximum number of tokens to generate if a task does not set it.
        add_bos_token: whether prompts begin with the tokenizer's special tokens; None: the tokenizer decides.
        prefix_token_id: the context of a text that is scored from its first token on; None: the
        beginning-of-sequence token, or else the end-of-sequence token.
        chat_template_args, enable_thinking: variables of the chat template.
        think_end_token: the string or token id that ends a model's thoughts, which are not part of answers.
        Stop strings then count only after it.
        batch_size: no effect; the engine forms its own batches. max_batch_size: sets `max_num_seqs`.
        device: as in `LLM`. "cuda:0", the harness's default, becomes the CPU if there is no GPU, as with
        `--model hf`.
        options: those of `LLM`, such as `tensor_parallel_size`.

        Raises the errors of `LLM`.
        """
        super().__init__()
        if max_length is not None:
            if options.get("max_model_len") is not None:
                raise ValueError(f"max_length={max_length} and max_model_len are one option; pass one")
            options["max_model_len"] = max_length
        if max_batch_size is not None:
            options.setdefault("max_num_seqs", max_batch_size)
        if device == "cuda:0" and len(Device.all()) == 1:
            device = "cpu"
        self.model = LLM(pretrained, device=device, **options)
        self.tokenizer = self.model.get_tokenizer()
        self.batch_size = batch_size
        self.max_gen_toks = max_gen_toks
        self._special = add_bos_token
        self._prefix = prefix_token_id
        self._template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking
        is_id = isinstance(think_end_token, str) and think_end_token.isdigit()
        self._think_end = int(think_end_token) if is_id and think_end_token else think_end_token

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is not None:
            return self._prefix
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def max_length(self) -> int:
        """The maximum number of model input tokens."""
        return int(self.model.llm_engine.model_config.max_model_len or 0)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without system messages if the template refuses them."""

        def applied(messages: list[dict[str, str]]) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    **self._template_args,
                )
            )

        try:
            return applied(chat_history)
        except TemplateError as error:
            _logger.warning("system messages are dropped, because the chat template says: %s", error)
            others = [message for message in chat_history if message["role"] != "system"]
            return applied(others)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """The token ids of a string; if it begins with the beginning-of-sequence token, no other is added."""
        special = self._special if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(str(self.tokenizer.decode(self.prefix_token_id))):
            special = False
        if special is not None:
            options["add_special_tokens"] = special
        return self.tokenizer.encode(string, **options)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
    ) -> list[tuple[float, bool]]:
        """Score each (cache key, context, continuation); contexts that are too long are cut on the left."""
        room = self.max_length + 1
        pairs, num_cut = [], 0
        for key, context, continuation in requests:
            kept = room - len(continuation)
            if kept < 1:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens, but at most {room - 1} can be scored: "
                    f"{(key or ('', 'of loglikelihood_rolling'))[1][:60]!r}; raise max_length or drop it"
                )
            num_cut += len(context) > kept
            pairs.append((context[-kept:], continuation))
        _warn_cut(num_cut, room)
        answers = []
        for (key, _, _), score in zip(requests, self.model.score_pairs(pairs, not disable_tqdm), strict=True):
            if score.error is not None:
                raise RuntimeError(f"a continuation has no score: {score.error}")
            answers.append((score.logprob, score.is_greedy))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text: the sum over windows that contain every token once."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(index)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm) if windows else []
        for owner, (logprob, _) in zip(owners, scores, strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each (context, generation options), without the stop string that ended it."""
        prompts, params, untils, num_cut = [], [], [], 0
        for context, options in (request.args for request in requests):
            known = dict(normalize_gen_kwargs(options, self.max_gen_toks))
            untils.append(known.pop("until"))
            max_tokens = int(known["max_gen_toks"])
            params.append(self._sampling_params(known, untils[-1]))
            room = self.max_length - max_tokens
            if room < 1:
                raise ValueError(
                    f"max_gen_toks={max_tokens} leaves no room for a prompt, for "
                    f"max_length={self.max_length}; lower it with --gen_kwargs max_gen_toks=..."
                )
            ids = self.tok_encode(context)
            num_cut += len(ids) > room
            prompts.append(ids[-room:])
        _warn_cut(num_cut, self.max_length)
        texts = []
        outputs = self.model.generate(prompts, params, not disable_tqdm)
        for request, output, until in zip(requests, outputs, untils, strict=True):
            if output.error is not None:
                raise RuntimeError(f"request {output.index} ended with an error: {output.error}")
            texts.append(self._answer(output.outputs[0].text, output.outputs[0].token_ids, until))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _sampling_params(self, options: dict[str, Any], until: Sequence[str]) -> SamplingParams:
        """Convert the harness' normalised options; other options pass to `SamplingParams` unchanged."""
        do_sample = options.pop("do_sample")
        options["temperature"] = options.get("temperature", 1.0) if do_sample else 0.0
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        stop = [text for text in until if text and text not in special]
        return SamplingParams(
            max_tokens=options.pop("max_gen_toks"),
            stop=stop if self._think_end is None else None,
            stop_token_ids=[self.eot_token_id, *(special[text] for text in until if text in special)],
            # a stop string may hold a special token beside other text
            skip_special_tokens=not any(token in text for text in stop for token in special),
            **options,
        )

    def _answer(self, text: str, token_ids: list[int], until: Sequence[str]) -> str:
        """The text, without thoughts and without what follows a stop string."""
        if isinstance(self._think_end, int):
            ends = [place for place, token_id in enumerate(token_ids) if token_id == self._think_end]
            if ends:
                text = str(
                    self.tokenizer.decode(token_ids[ends[-1] + 1 :], skip_special_tokens=True)
                ).lstrip()
            return postprocess_generated_text(text, until, None)
        return postprocess_generated_text(text, until, self._think_end)


def _warn_cut(num_cut: int, room: int) -> None:
    if num_cut:
        _logger.warning("%d prompts are cut on the left, to fit into %d tokens", num_cut, room)


if __name__ == "__main__":
    cli_evaluate()
