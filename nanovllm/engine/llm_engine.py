"""LLMEngine: puts the parts together and turns the crank. Text and tokens outside, one Batch at a time
inside.

Owns the tokenizer, the Scheduler and the ModelRunner, all freed by `close`; no state outlives it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, SupportsIndex

import xxhash

from nanovllm.batch import Batch
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.distributed.group import TPGroup
from nanovllm.distributed.rendezvous import Rendezvous
from nanovllm.engine.progress import Progress
from nanovllm.lifecycle import Lifecycle
from nanovllm.models.loader import check_weights, load_model_config, resolve_model_path, weight_bytes
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.plan.scheduler import Scheduler
from nanovllm.plan.sequence import Sequence
from nanovllm.runner.memory import check_weights_fit, fit_kv_cache
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.staging import StepHandle
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.prompts import (
    Prompt,
    PromptLike,
    pack_token_ids,
    parse_prompt,
    parse_prompts,
    parse_sampling_params,
)
from nanovllm.text.tokenizer import load_tokenizer
from nanovllm.workers.interrupts import HeldInterrupts, no_full_collections
from nanovllm.workers.worker import RankSetup, Workers

logger = logging.getLogger("nanovllm")


class LLMEngine:
    """One model on one device or split over several. `LLM` adds the calls that most people want."""

    _detokenizer: Detokenizer | None = None  # made with the first text

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load `model`, a folder or a hub id; `options` are the fields of `Config`.

        Raises TypeError or ValueError for a wrong option, ModelLoadError for a checkpoint that cannot be
        loaded and KVCacheMemoryError when the device is too full, in this order, the cheap checks first.
        """
        self.config = Config.from_kwargs(model, **options)
        path = resolve_model_path(self.config.model)
        self.model_config = load_model_config(path)
        self.model_config.check_tensor_parallel_size(self.config.tensor_parallel_size)
        max_model_len = self._max_model_len()
        self.tokenizer = None if self.config.skip_tokenizer_init else load_tokenizer(path)
        if self.config.load_format == "auto":
            check_weights(self.model_config, path)
        device = Device(self.config.device)
        self._start(device, path, max_model_len)
        asked = self.config.async_scheduling
        self._run_ahead = device.is_cuda if asked is None else asked
        self._scheduler = self._make_scheduler()
        self._in_flight: tuple[Batch, StepHandle] | None = None
        self._prompts: dict[int, Prompt] = {}
        self._num_requests = 0
        self._lifecycle = Lifecycle(self, partial(_free, self._workers, self._runner))

    def _start(self, device: Device, path: Path, max_model_len: int) -> None:
        """Bring up all ranks: nothing of them is left when this raises."""
        config, model_config, size = self.config, self.model_config, self.config.tensor_parallel_size
        devices = device.ranks(size)
        dtype = device.resolve_dtype(config.dtype, model_config.dtype)
        need = weight_bytes(model_config, TPGroup(0, size), dtype)
        rendezvous = Rendezvous() if size > 1 else None
        port = rendezvous.port if rendezvous else 0
        setups = [
            RankSetup(rank, size, devices[rank], port, config, model_config, path, max_model_len)
            for rank in range(size)
        ]
        self._workers = Workers(setups[1:])
        try:
            check_weights_fit(need, [device.memory(), *self._workers.collect()], config, device)
            self._runner, *_ = self._workers.call(lambda: self._load(setups[0], device, rendezvous), "load")
            self._call("calibrate_kv_cache")
            reserve = max(self._call("warmup_model"))
            spaces = self._call("measure_kv_cache", reserve)
            most = config.max_num_seqs * self._runner.max_blocks
            self._num_blocks = fit_kv_cache(spaces, config, self._runner.block_size, most)
            allocated = self._call("allocate_kv_cache", self._num_blocks)
            assert set(allocated) == {self._num_blocks}, "every rank has as many blocks as the scheduler"
            self._call("capture_cudagraph", logger.isEnabledFor(logging.INFO))
        except BaseException:
            self._workers.kill()
            if hasattr(self, "_runner"):
                self._runner.exit()
            raise

    def _load(self, setup: RankSetup, device: Device, rendezvous: Rendezvous | None) -> ModelRunner:
        group = TPGroup()
        if rendezvous is not None:
            self._workers.on_failure(rendezvous.leave)
            group = self._workers.watched(lambda: setup.meet(device, rendezvous))
            self._workers.on_failure(group.abort)
        return setup.load(device, group, self._workers.check)

    def _call(self, method: str, *args: object) -> list[Any]:
        """Call a method of every rank's ModelRunner; return the results, rank 0's first."""
        return self._workers.call(getattr(self._runner, method), method, *args)

    def _max_model_len(self) -> int:
        asked, positions = self.config.max_model_len, self.model_config.max_position_embeddings
        if asked is None:
            asked = self.model_config.longest
            if asked < positions:
                logger.info(
                    "max_model_len=%d, the length up to which full attention is what this model computes "
                    "(it has %d positions)",
                    asked,
                    positions,
                )
        if asked > positions:
            logger.info("max_model_len=%d is lowered to the model's own limit, %d", asked, positions)
        max_model_len = min(asked, positions)
        self.model_config.check_max_model_len(max_model_len)
        return max_model_len

    def _make_scheduler(self) -> Scheduler:
        return Scheduler(
            num_blocks=self._num_blocks,
            block_size=self._runner.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self._runner.max_model_len,
            enable_prefix_caching=self.config.enable_prefix_caching,
            share_outputs=not self.config.deterministic,  # their K/V would differ in bits from a prompt's
            longest=self.model_config.longest,
        )

    # -- one request at a time ---------------------------------------------------------------------------

    def add_request(self, prompt: PromptLike, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt and return its request id. ValueError or TypeError when it can never run."""
        params = parse_sampling_params(sampling_params, 1)
        with self._calling():
            return self._add([parse_prompt(prompt, "the prompt")], params, ["the prompt"])[0]

    def step(self) -> list[RequestOutput]:
        """Advance all requests and return those that have finished.

        One step is launched while the one before is still running, so an empty list is no sign of the end:
        `is_finished` is. If a step fails, all unfinished requests are dropped and the engine is empty again.
        """
        with self._calling():
            try:
                return [self._output(seq) for seq in self._step()[1]]
            except BaseException:
                self._reset()
                raise

    def is_finished(self) -> bool:
        """Whether no request is waiting or running."""
        self._lifecycle.check_open()
        return self._scheduler.is_finished()

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request now and return what it has so far; None when it is unknown or has finished."""
        with self._calling():
            seq = self._scheduler.abort(request_id)
            return None if seq is None else self._output(seq)

    # -- all at once -------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Answer every prompt, in the order given.

        prompts: a text, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`, or a list of
        these; also generators of them, arrays and tensors (one dimension is a prompt, two are several), and
        what a tokenizer of transformers returns.
        sampling_params: one for all prompts, or a list with one for each.
        use_tqdm: whether to show progress of more than one prompt, or a class like tqdm's to show it with.

        Everything is checked before anything runs: ValueError or TypeError names the index and the value.
        After an exception, Ctrl-C included, the engine is empty and usable. RuntimeError when requests of
        `add_request` are unfinished: their answers would have no one to go to.
        """
        self._lifecycle.check_open()
        parsed = parse_prompts(prompts)
        progress = Progress(len(parsed), use_tqdm)
        params = parse_sampling_params(sampling_params, len(parsed))
        where = [f"prompts[{index}]" for index in range(len(parsed))]
        with self._calling(), no_full_collections():
            if not self._scheduler.is_finished():
                raise RuntimeError(
                    f"{self._scheduler.num_unfinished} request(s) of add_request are unfinished; "
                    "call step() until is_finished(), or abort() them, before generate()"
                )
            try:
                request_ids = self._add(parsed, params, where)
                outputs: dict[int, RequestOutput] = {}
                with progress:
                    while not self._scheduler.is_finished():
                        batch, finished = self._step()
                        for seq in finished:
                            outputs[seq.seq_id] = self._output(seq)
                        progress.update(batch, len(finished))
            except BaseException:
                self._reset()
                raise
        return [outputs[request_id] for request_id in request_ids]

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the device memory and end the workers. Can be called twice.

        `with`, `exit`, the collection of the engine and the end of the process do the same. A call that
        another thread is in ends with EngineClosedError first. A forked process does not own the engine:
        nothing happens there.
        """
        self._lifecycle.close()

    exit = close  # nano-vLLM's name

    def __enter__(self) -> LLMEngine:
        self._lifecycle.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "an engine cannot be copied or pickled, for it owns a device's memory and processes; pass on the "
            "engine itself, or make another LLM where it is needed"
        )

    # -- inside ------------------------------------------------------------------------------------------

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """One caller at a time, whichever thread it is, with this engine's device as the current one."""
        with self._lifecycle.calling(), self._runner.device.current():
            yield

    def _add(self, prompts: list[Prompt], params: list[SamplingParams], where: list[str]) -> list[int]:
        """Check and tokenise all prompts, then queue them all: an error leaves nothing queued."""
        sequences = []
        all_ids = self._tokenize(prompts, where)
        stop_ids: dict[int, frozenset[int]] = {}  # of each object
        for index, (token_ids, param) in enumerate(zip(all_ids, params, strict=True)):
            packed = pack_token_ids(token_ids, self.model_config.vocab_size, where[index])
            if id(param) not in stop_ids:
                stop_ids[id(param)] = self._stop_ids(param, where[index])
            seq_id = self._num_requests + index
            seq = Sequence(seq_id, token_ids, param, self._seed(seq_id, param), stop_ids[id(param)], packed)
            try:
                self._scheduler.check_fits(seq)
            except ValueError as error:
                raise ValueError(f"{where[index]}: {error}") from None
            sequences.append(seq)
        self._num_requests += len(sequences)
        for seq, prompt in zip(sequences, prompts, strict=True):
            self._prompts[seq.seq_id] = prompt
            self._scheduler.add(seq)
        return [seq.seq_id for seq in sequences]

    def _stop_ids(self, params: SamplingParams, where: str) -> frozenset[int]:
        """All token ids that end an output. ValueError when one is not in the vocabulary."""
        stop_ids = list(params.stop_token_ids or ())
        pack_token_ids(stop_ids, self.model_config.vocab_size, f"{where} stop_token_ids")
        return frozenset(stop_ids if params.ignore_eos else [*stop_ids, *self.model_config.eos_token_ids])

    def _tokenize(self, prompts: list[Prompt], where: list[str]) -> list[list[int]]:
        texts = [prompt.text for prompt in prompts if prompt.token_ids is None]
        encoded: list[list[int]] = []
        if texts:
            if self.tokenizer is None:
                index = next(i for i, prompt in enumerate(prompts) if prompt.token_ids is None)
                raise ValueError(f"{where[index]} is a text, and skip_tokenizer_init=True; pass token ids")
            encoded = self.tokenizer(texts)["input_ids"]
        rest = iter(encoded)
        all_ids = [next(rest) if prompt.token_ids is None else prompt.token_ids for prompt in prompts]
        for index, ids in enumerate(all_ids):
            if not ids:
                raise ValueError(f"{where[index]} has no tokens: {prompts[index].text!r}")
        return all_ids

    def _seed(self, seq_id: int, params: SamplingParams) -> int:
        """The request's own seed, or one drawn from the engine's seed and the request's number."""
        if params.seed is not None:
            return int(params.seed)
        return xxhash.xxh3_64_intdigest(struct.pack("<QQ", self.config.seed % 2**64, seq_id)) >> 1

    def _step(self) -> tuple[Batch | None, list[Sequence]]:
        """Launch the next step, then take in the one before it; or the same one, without
        `async_scheduling`. Ctrl-C acts at the end: until then the ranks would fall out of step."""
        with HeldInterrupts():
            return self._held_step()

    def _held_step(self) -> tuple[Batch | None, list[Sequence]]:
        self._lifecycle.check_open()
        batch = self._scheduler.schedule()
        launched = None
        if batch is not None:
            launched = batch, self._workers.run(self._runner.launch, "launch", batch)
        if self._run_ahead:
            launched, self._in_flight = self._in_flight, launched
        if launched is None:
            idle = batch is None and self._scheduler.is_finished()
            assert batch is not None or idle, "nothing can be scheduled, and nothing is running"
            return None, []
        batch, handle = launched
        with self._workers.giving_up_on_error():
            output = handle.result()
        return batch, self._scheduler.postprocess(batch, output)

    def _output(self, seq: Sequence) -> RequestOutput:
        prompt = self._prompts.pop(seq.seq_id)
        token_ids = seq.completion_token_ids
        # A token that ended the output is part of the ids, not of the text.
        text_ids = token_ids[:-1] if seq.finish_reason == "stop" else token_ids
        prompt_token_ids = seq.token_ids[: seq.num_prompt_tokens]
        stop_reason = None if self._is_eos(seq) else seq.stop_reason
        assert seq.finish_reason is not None
        return RequestOutput(
            request_id=seq.seq_id,
            prompt=prompt.text,
            prompt_token_ids=prompt_token_ids,
            outputs=[
                CompletionOutput(
                    0, self._text(prompt_token_ids, text_ids), token_ids, seq.finish_reason, stop_reason
                )
            ],
            num_cached_tokens=seq.num_cached_tokens or 0,
            error="the model's logits were not finite" if seq.finish_reason == "error" else None,
        )

    def _text(self, prompt_ids: list[int], output_ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        if self._detokenizer is None or self._detokenizer.tokenizer is not self.tokenizer:
            self._detokenizer = Detokenizer(self.tokenizer)
        return self._detokenizer.text(prompt_ids, output_ids)

    def _is_eos(self, seq: Sequence) -> bool:
        """Whether the model's own end-of-sequence token ended `seq`: the tokenizer's, or its only one."""
        all_eos = self.model_config.eos_token_ids
        only = all_eos[0] if len(all_eos) == 1 else None
        eos = only if self.tokenizer is None else self.tokenizer.eos_token_id
        return seq.stop_reason == eos and eos in all_eos and not seq.params.ignore_eos

    def _reset(self) -> None:
        """Drop all requests, whatever state an exception left them in, and start from an empty scheduler.

        An engine whose workers are gone is closed.
        """
        self._in_flight = None
        self._prompts.clear()
        self._scheduler = self._make_scheduler()
        if self._workers.failed:
            self.close()


def _free(workers: Workers, runner: ModelRunner) -> None:
    """End the workers, then free this rank's memory."""
    workers.stop()
    runner.exit()
