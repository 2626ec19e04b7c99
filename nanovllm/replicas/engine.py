"""ReplicatedEngine: makes requests as any engine, has replicas compute them, and gives their outputs.

Owns the Replicas. Has no model on any device; its scheduler only says which prompts fit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.device import Device
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.stats import StepStats
from nanovllm.outputs import RequestOutput
from nanovllm.plan.scheduler import Scheduler
from nanovllm.replicas.pool import Replicas
from nanovllm.replicas.replica import ReplicaSetup
from nanovllm.text.processor import join_completions, refused_output
from nanovllm.text.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ReplicatedEngine(LLMEngine):
    """`data_parallel_size` replicas, fed from one queue: outputs and their seeds are those of one engine.

    A replica that ends is started again, and what it had not answered runs again. A request that three
    replicas in turn did not survive becomes an output with an `error`. WorkerError when no replica is left.
    """

    def _start(self, path: Path, max_model_len: int) -> Callable[[], None]:
        config, size = self.config, self.config.tensor_parallel_size
        devices = Device(config.device).ranks(size, config.data_parallel_size)
        own = replace(config, model=str(path), data_parallel_size=1)
        setups = [
            ReplicaSetup(replace(own, device=device), config.data_parallel_size) for device in devices[::size]
        ]
        self._replicas = Replicas(setups)
        try:
            room = self._replicas.smallest
            self._scheduler = Scheduler(
                num_blocks=room.num_blocks,
                block_size=room.block_size,
                max_num_seqs=1,
                max_num_batched_tokens=1,
                max_model_len=room.max_model_len,
                longest=self.model_config.longest,
            )
            self._replicas.set("limit_model_len", self._scheduler.max_model_len)
        except BaseException:
            self._replicas.kill()
            raise
        return self._replicas.stop

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """As of any engine. One that is set is copied to the replicas."""
        return self._processor.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        with self._calling():
            self._check_idle("setting the tokenizer")
            self._replicas.set("set_tokenizer", tokenizer)
            self._processor.tokenizer = tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget what the KV caches hold. False, and nothing is done, while there are requests."""
        with self._calling(self._open_stream):
            return not self._requests and all(self._replicas.call("reset_prefix_cache"))

    def abort(self, request_id: int) -> RequestOutput | None:
        """As of any engine."""
        with self._calling(self._open_stream):
            found = self._replicas.abort(request_id)
            if found is None:
                return None
            request = self._requests.remove(request_id)
            if isinstance(found, Request):
                indices = range(request.params.n)
                completions = [self._processor.completion(request, i, [], "abort", None) for i in indices]
                found = join_completions(request, completions, 0)
            output = self._with_prompt(found, request)
            if self._open_stream is not None:
                self._open_stream.append(output)
            return output

    # -- inside ------------------------------------------------------------------------------------------

    def _current_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _start_afresh(self) -> None:
        self._abort_all()
        if not self._replicas.processes:
            self.close()

    def _abort_all(self) -> None:
        self._requests.clear()
        self._replicas.clear()

    def _queue(self, requests: list[Request]) -> None:
        for request in requests:
            self._requests.add(request, [])
        self._replicas.add(requests)

    def _step(self) -> tuple[list[RequestOutput], StepStats | None]:
        """Wait for the next step of any replica; return the requests that finished with it, and its stats.

        Replicas compute at the same time, so what is returned took a replica's share of its seconds.
        """
        if not self._requests:
            return [], None
        outputs, lost, stats = self._replicas.next_arrival(self._lifecycle.check_open)
        outputs = [self._with_prompt(each, self._requests.remove(each.request_id)) for each in outputs]
        for request_id, why in lost.items():
            request, error = self._requests.remove(request_id), ValueError(why)
            outputs.append(refused_output(request_id, request.index, request, error, error))
        if stats is None:
            return outputs, None
        if self.stats is not None:
            self.stats(stats)
        return outputs, replace(stats, seconds=stats.seconds / self.config.data_parallel_size)

    @staticmethod
    def _with_prompt(output: RequestOutput, request: Request) -> RequestOutput:
        return replace(output, prompt=request.prompt, prompt_token_ids=request.prompt_token_ids)
