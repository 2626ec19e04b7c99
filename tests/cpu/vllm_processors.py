"""Classes of logits processors, as users of vLLM write them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from nanovllm import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
    SamplingParams,
    VllmConfig,
)
from nanovllm.vllm.processors import process_dict_updates


class Only(LogitsProcessor):
    """Lets only the token `extra_args["only"]` be drawn."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.model_config.get_vocab_size() == 512 and not is_pin_memory
        self.only: dict[int, int] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        only = (sampling_params.extra_args or {}).get("only")
        if only is not None and not isinstance(only, int):
            raise ValueError(f"only must be a token id, not {only!r}")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.only, batch_update, lambda params, _, __: (params.extra_args or {}).get("only")
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token_id in self.only.items():
            kept = logits[row, token_id].item()
            logits[row] = float("-inf")
            logits[row, token_id] = kept
        return logits


class Adapter(AdapterLogitsProcessor):
    """Writes the tokens of `extra_args["adapted"]` in turn; "fail" divides by zero."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        adapted: Any = (params.extra_args or {}).get("adapted")
        if adapted is None:
            return None

        def forced(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if adapted == "fail":
                logits += 1 / 0
            assert prompt_ids
            changed = torch.full_like(logits, float("-inf"))
            changed[adapted[len(output_ids) % len(adapted)]] = 0.0
            return changed

        return forced


class Counted(LogitsProcessor):
    """Changes nothing, and notes steps at which it was not told of every token of its row."""

    wrong: ClassVar[list[str]] = []

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.output_ids: list[int] | None = None
        self.seen = 0

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            [(row, _, prompt_ids, self.output_ids)] = batch_update.added
            if row or not prompt_ids or self.output_ids:
                self.wrong.append(f"{row} {prompt_ids} {self.output_ids}")
            return
        self.seen += 1
        if self.output_ids is None or len(self.output_ids) != self.seen:
            self.wrong.append(f"{self.seen} {self.output_ids}")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
