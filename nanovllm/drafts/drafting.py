"""Drafting: what the option `speculative_config` changes in an engine. Checks that its model can draft.

Needs no torch. Drafts nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.config import Config
from nanovllm.drafts.scheduler import DraftingScheduler
from nanovllm.drafts.settings import OPTION, DraftSettings
from nanovllm.models.config import ModelConfig
from nanovllm.plan.sequence import Room

MOST_DRAFTS = 512  # of all sequences in a step: more rows are rarely as fast as fewer


@dataclass(frozen=True, slots=True)
class Drafting:
    """An engine that drafts."""

    settings: DraftSettings
    most_rows: int  # of a decode step

    @classmethod
    def of(cls, config: Config, model_config: ModelConfig) -> Drafting:
        """ValueError for a model that cannot draft."""
        if any(spec.state is not None for spec in model_config.attention):
            raise ValueError(
                f"{OPTION} needs a model whose layers all have a KV cache: {model_config.architecture} has "
                "layers with a state, which cannot forget a wrong draft; leave it out"
            )
        settings = DraftSettings.of(config.speculative_config)
        drafts = min(MOST_DRAFTS, config.max_num_seqs * settings.num_speculative_tokens)
        return cls(settings, config.max_num_seqs + drafts)

    def scheduler(self, config: Config, room: Room) -> DraftingScheduler:
        """The scheduler of its steps. config: with the options of the user."""
        return DraftingScheduler(config, room, self.settings, self.most_rows)
