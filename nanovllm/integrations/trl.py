"""Completions for TRL's GRPOTrainer: `GRPOTrainer(..., rollout_func=Rollouts())`.

Every process of the trainer has its own engine on the trainer's device, which gets the trainer's weights
after every optimiser step. Computes no reward and no loss.
"""

from __future__ import annotations

from typing import Any

from nanovllm.answers import RequestOutput
from nanovllm.batch import SAMPLING_PARAMETERS
from nanovllm.config import Config
from nanovllm.llm import LLM
from nanovllm.params import SamplingParams


class Rollouts:
    """A `rollout_func`: samples one completion for each of the trainer's prompts.

    The trainer repeats a prompt for every completion of its group; they share the prompt's KV blocks. The
    trainer's `temperature`, filters such as `top_p`, `repetition_penalty`, `max_completion_length` and
    `generation_kwargs` apply. Logprobs are those of the distribution that tokens were drawn from.
    """

    def __init__(self, model: str | None = None, *, sleep: bool = False, **options: Any) -> None:
        """Check the options; the first rollout creates the engine.

        model: a checkpoint with the shapes of the trainer's model; None: the one that it was loaded from.
        sleep: give the device's memory to the trainer between rollouts.
        options: those of `LLM`. By default the device is the trainer's, and the seed is the trainer's plus
        the process index. `gpu_memory_utilization` is the engine's share, without the trainer's memory.

        TypeError or ValueError for wrong options, without a trainer.
        """
        self._model = model
        self._sleep = sleep
        self._options = {"logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True} | options
        Config.from_kwargs(model or ".", **self._options)
        self.llm: LLM | None = None
        self._loaded_step: int | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return `prompt_ids`, `completion_ids` and `logprobs`, a list for each prompt.

        prompts: strings, or conversations, which get the trainer's chat template. A completion that is not
        cut includes its end-of-sequence token. ValueError for adapters, which the engine does not support;
        RuntimeError for a completion that ended with an error, such as logits that are not finite.
        """
        prompt_ids = _encode(prompts, trainer)
        llm = self._awake(trainer)
        outputs = llm.generate(prompt_ids, _sampling_params(trainer), use_tqdm=False)
        if self._sleep:
            llm.sleep()
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [output.outputs[0].token_ids for output in outputs],
            "logprobs": [_logprobs(output) for output in outputs],
        }

    def _awake(self, trainer: Any) -> LLM:
        """The engine, with the trainer's weights."""
        if self.llm is None:
            own = {
                "device": str(trainer.accelerator.device),
                "seed": trainer.args.seed + trainer.accelerator.process_index,
            }
            self.llm = LLM(self._model or trainer.model.config.name_or_path, **own | self._options)
        elif self._sleep:
            self.llm.wake_up()
        step = trainer.state.global_step
        if step != self._loaded_step:
            model = trainer.accelerator.unwrap_model(trainer.model)
            if hasattr(model, "peft_config"):
                raise ValueError(
                    "the trainer trains adapters (peft_config), which are not supported; train all "
                    "weights, or use the trainer's own generation"
                )
            self.llm.update_weights((name, weight.detach()) for name, weight in model.named_parameters())
            self._loaded_step = step
        return self.llm


def _encode(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Tokenise prompts like the trainer."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return list(tokenizer(text=prompts)["input_ids"])
    encoded = tokenizer.apply_chat_template(
        prompts,
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return list(encoded["input_ids"])


def _sampling_params(trainer: Any) -> SamplingParams:
    values = {name: getattr(trainer, name, None) for name in (*SAMPLING_PARAMETERS, "repetition_penalty")}
    values = {name: value for name, value in values.items() if value is not None} | {
        "max_tokens": trainer.max_completion_length,
        "stop_token_ids": trainer.eos_token_ids,
        "logprobs": 0,
        "detokenize": False,
    }
    return SamplingParams(**values | (trainer.args.generation_kwargs or {}))


def _logprobs(output: RequestOutput) -> list[float]:
    if output.error is not None:
        raise RuntimeError(f"completion {output.index} ended with an error: {output.error}")
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
