"""LLM: the API that users call. It joins the core with the doors that have calls of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.inputs import calls_of_llm
from nanovllm.parallel.replicas.replicas import Replicas
from nanovllm.pooling_heads.calls import PoolingCalls
from nanovllm.tables.calls import TableCalls
from nanovllm.vllm.calls import VLLMCalls
from nanovllm.vllm.names import OtherNames

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@calls_of_llm
class LLM(OtherNames, VLLMCalls, TableCalls, PoolingCalls):
    """A loaded model: `LLM(folder_or_hub_id, **options)`; `Config` lists the options.

    >>> with LLM(nanovllm.demo_model_path()) as llm:
    ...     llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16))[0]["text"]
    """

    _replicated = Replicas

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The transformers tokenizer of the engine. ValueError with `skip_tokenizer_init=True`."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer, because of skip_tokenizer_init=True")
        return self.tokenizer

    @property
    def llm_engine(self) -> LLM:
        """This object: vLLM scripts read `llm.llm_engine.model_config`."""
        return self
