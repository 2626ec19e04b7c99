"""ModelRunner: one Batch in, one set of sampled tokens out. Owns the model, the KV cache and the buffers.

Never sees a Sequence and never decides what runs. Nothing here waits for the device but `StepHandle.result`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.select import resolve_block_size, select
from nanovllm.batch import ALL_GREEDY, EMPTY_BATCH, Batch, StepKind, StepOutput, prefix_sum
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.decode_attention import HEAD_TILE, WIDE_TILE, SharedPrefixes, fits_wide_tile
from nanovllm.kernels.filters import Filters
from nanovllm.kernels.last_tokens import keep_tokens, take_tokens
from nanovllm.layers.weights import WeightOptions
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.loader import init_dummy_weights, load_weights, no_check
from nanovllm.runner.cuda_graph import CUDAGraphs, graph_sizes
from nanovllm.runner.memory import KVCacheSpace, costliest_batch
from nanovllm.runner.overlap import OVERLAP_TOKENS, halves_arrays, halves_metadata, overlaps, rows_of_half
from nanovllm.runner.shared_prefixes import SHARED_FIELDS, SharedPrefixFinder, SharedRows, pad_shared_prefixes
from nanovllm.runner.staging import StagedFields, Staging, StepHandle, pad
from nanovllm.sampling.sampler import Sampler, SamplingTensors

CALIBRATION_TOKENS = 2048
GraphOutput = tuple[torch.Tensor, torch.Tensor | None]
FILTERS: tuple[tuple[str, int, type[np.generic]], ...] = (  # with the value that keeps all
    ("top_k", 0, np.int32),
    ("top_p", 1, np.float32),
    ("min_p", 0, np.float32),
)


class ModelRunner:
    """Runs steps on one device, as one rank of a tensor-parallel group."""

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        model_path: Path,
        device: Device,
        tp: TPGroup,
        max_model_len: int,
        check: Callable[[], None] = no_check,
    ) -> None:
        """Build the model and fill its weights. `check` is called now and then, and may raise to give up."""
        self.config = config
        self.model_config = model_config
        self.device = device
        self.tp = tp
        self.max_model_len = max_model_len
        device.make_current()
        self.dtype = device.resolve_dtype(config.dtype, model_config.dtype)
        self.cache_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else self.dtype
        self.backend = select(
            config.attention_backend,
            device,
            self.dtype,
            model_config.head_dim,
            self.cache_dtype,
            config.deterministic,
        )
        self.block_size = resolve_block_size(config.kvcache_block_size, self.backend)
        self.max_blocks = -(-max_model_len // self.block_size)  # of one sequence
        fuse = device.is_cuda and self.dtype == torch.bfloat16 and tp.size == 1
        self.model = DecoderForCausalLM(
            model_config,
            tp,
            self.backend,
            max_model_len,
            options=WeightOptions(self.dtype, device.torch, config.deterministic, fuse),
        )
        if config.load_format == "dummy":
            init_dummy_weights(self.model, config.seed, check)
        else:
            load_weights(self.model, model_path, check)
        self.sampler = Sampler()
        self.filters_in_graph = device.is_cuda and self.model.lm_head.part() is None
        self.graphs: CUDAGraphs | None = None
        self.shared_graphs: CUDAGraphs | None = None
        self.prefixes: SharedPrefixFinder | None = None  # until there is a KV cache
        max_seqs, max_tokens = config.max_num_seqs, max(config.max_num_batched_tokens, config.max_num_seqs)
        words = self.max_blocks + WIDE_TILE // 2 + 28  # of a sequence: its blocks, what it shares, all else
        self.staging = Staging(device, 6 * max_tokens + words * max_seqs + 256, max_seqs)
        self.spare_slot = max_seqs  # where the tokens of padded rows and of unfinished prompts go
        self.last_token_ids = torch.zeros(max_seqs + 1, dtype=torch.int64, device=device.torch)

    # -- start-up ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def calibrate_kv_cache(self) -> None:
        """Set the scales of an FP8 cache, per layer and KV head, from the K/V of a fixed random prompt.

        The largest values seen map to a quarter of what FP8 can hold; larger ones still are clamped there.
        Every start and every number of ranks gets the same scales.
        """
        if self.cache_dtype == self.dtype:
            return
        num_tokens = min(CALIBRATION_TOKENS, self.max_model_len)
        self._set_kv_cache(-(-num_tokens // self.block_size), self.dtype)
        self.kv_cache.zero_()  # what is not written must not count
        rng = np.random.default_rng(0)
        token_ids = rng.integers(self.model_config.vocab_size, size=num_tokens, dtype=np.int32)
        for start in range(0, num_tokens, self.config.max_num_batched_tokens):
            chunk = token_ids[start : start + self.config.max_num_batched_tokens]
            batch = Batch(
                kind=StepKind.PREFILL,
                seq_ids=(0,),
                slots=np.zeros(1, np.int32),
                token_ids=chunk,
                query_lens=np.full(1, len(chunk), np.int32),
                context_lens=np.full(1, start + len(chunk), np.int32),
                block_tables=np.arange(self.kv_cache.shape[2], dtype=np.int32)[None],
                draws=np.ones(1, np.int32),
                sampling=ALL_GREEDY,
            )
            self.run(batch)
        largest = self.kv_cache.float().abs().amax(dim=(2, 3, 5))  # [2, layers, KV heads]
        scales = (largest / (torch.finfo(self.cache_dtype).max / 4)).clamp(min=1e-6)
        for layer, k_scale, v_scale in zip(self.model.attention_layers, *scales, strict=True):
            layer.cache = layer.cache._replace(k_scale=k_scale, v_scale=v_scale)
        self._set_kv_cache(0)

    def warmup_model(self) -> int:
        """Run the largest steps once; return the bytes that they need beside the weights and the KV cache."""
        if not self.device.is_cuda:
            return 0  # there is no kernel to compile, and the KV cache does not take what is left
        num_seqs = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        query_len = min(self.config.max_num_batched_tokens // num_seqs, self.max_model_len)
        self._set_kv_cache(-(-query_len // self.block_size))
        needed = self._warmup_peak(StepKind.PREFILL, num_seqs, query_len, query_len)
        if rows_of_half(self.config.max_num_batched_tokens, self.tp.size):
            few = min(num_seqs, -(-OVERLAP_TOKENS // self.max_model_len))
            whole = min((OVERLAP_TOKENS - 1) // few, self.max_model_len)  # the largest step in one piece
            needed = max(needed, self._warmup_peak(StepKind.PREFILL, few, whole, whole))
        if self.backend.supports_cuda_graph:  # whose memory is apart from that of other steps
            needed += self._warmup_peak(StepKind.DECODE, self.config.max_num_seqs, 1, self.max_model_len)
        self._set_kv_cache(0)
        self.device.release_memory()
        return needed

    def _warmup_peak(self, kind: StepKind, num_seqs: int, query_len: int, context_len: int) -> int:
        """Run a step of equal sequences with the costliest sampling; return the bytes that it took on top."""
        num_blocks = self.kv_cache.shape[2]
        batch = costliest_batch(kind, num_seqs, query_len, context_len, self.block_size, num_blocks)
        self.device.reset_peak()
        self.run(batch)
        return self.device.peak_above_current()

    def measure_kv_cache(self, reserve: int) -> KVCacheSpace:
        """Return what the device has for the KV cache beside `reserve` bytes, and what a block takes."""
        layers = self.model.attention_layers
        per_token = 2 * len(layers) * layers[0].num_kv_heads * layers[0].head_dim * self.cache_dtype.itemsize
        ranks_here = 1 if self.device.is_cuda else self.tp.size
        budget = self.device.kv_cache_budget(self.config.gpu_memory_utilization, reserve) // ranks_here
        free, total = self.device.memory()
        return KVCacheSpace(str(self.device.torch), free, total, budget, reserve, per_token * self.block_size)

    def allocate_kv_cache(self, num_blocks: int) -> int:
        """Allocate the KV cache; return how many blocks it has."""
        self._set_kv_cache(num_blocks)
        if self.backend.supports_shared_prefixes and self.config.enable_prefix_caching:
            layer = self.model.attention_layers[0]
            wide = not self.config.deterministic and fits_wide_tile(self.kv_cache, layer.head_dim)
            tile = WIDE_TILE if wide else HEAD_TILE
            self.prefixes = SharedPrefixFinder(self.block_size, layer.num_heads // layer.num_kv_heads, tile)
        return self.kv_cache.shape[2]

    def _set_kv_cache(self, num_blocks: int, dtype: torch.dtype | None = None) -> None:
        """Give every layer its part of one new cache of `num_blocks` blocks."""
        dtype = self.cache_dtype if dtype is None else dtype
        layers = self.model.attention_layers
        shape = (2, len(layers), num_blocks, self.block_size, layers[0].num_kv_heads, layers[0].head_dim)
        self.kv_cache = torch.empty(0, dtype=dtype, device=self.device.torch)
        for layer in layers:  # let go of the old one first
            layer.cache = layer.cache._replace(k=self.kv_cache, v=self.kv_cache)
        self.kv_cache = torch.empty(shape, dtype=dtype, device=self.device.torch)
        for index, layer in enumerate(layers):
            layer.cache = layer.cache._replace(k=self.kv_cache[0, index], v=self.kv_cache[1, index])

    @torch.inference_mode()
    def capture_cudagraph(self, progress: bool = False) -> None:
        """Capture decode steps for batch sizes that cover `max_num_seqs`, over the fixed input buffer."""
        if self.config.enforce_eager or not (self.device.is_cuda and self.backend.supports_cuda_graph):
            return

        def make_step(size: int, shared: SharedRows | None) -> Callable[[], GraphOutput]:
            arrays = self.prepare_decode(EMPTY_BATCH, size, self.max_blocks, shared)
            inputs = self.staging.send(arrays | self.prepare_sample(EMPTY_BATCH, size))
            meta = self._metadata(inputs, is_decode=True, max_seqlen_q=1, max_seqlen_k=self.max_model_len)
            return lambda: self._graph_step(inputs, meta)

        sizes, device = graph_sizes(self.config.max_num_seqs), self.device.torch
        self.graphs = CUDAGraphs(sizes, lambda size: make_step(size, None), device)
        self.graphs.capture_all(progress and self.tp.rank == 0)
        # Captured when they are first needed, and fewer of them: most workloads share no prefixes.
        if self.prefixes is not None:
            few, nothing = sizes[::-4][::-1], self.prefixes.nothing
            self.shared_graphs = CUDAGraphs(
                few, lambda size: make_step(size, nothing), device, self.graphs.pool
            )

    # -- one step ----------------------------------------------------------------------------------------

    def run(self, batch: Batch) -> StepOutput:
        """Run a step and wait for its tokens."""
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> StepHandle:
        """Queue a step on the device; its tokens come through the handle, the same on every rank."""
        with self.device.share_of_threads(self.tp.size):
            return self._launch(batch)

    def _launch(self, batch: Batch) -> StepHandle:
        num_seqs = len(batch.slots)
        shared = None
        if batch.kind is StepKind.DECODE and self.prefixes is not None:
            shared = self.prefixes.find(batch)
        graphs = self.graphs if shared is None else self.shared_graphs
        if graphs is not None and batch.kind is StepKind.DECODE:
            rows = graphs.size_for(num_seqs)
            graphs.capture(rows)
            arrays = self.prepare_decode(batch, rows, self.max_blocks, shared)
            inputs = self.staging.send(arrays | self.prepare_sample(batch, rows))
            hidden, token_ids = graphs.replay(rows)
        else:
            if batch.kind is StepKind.DECODE:
                arrays = self.prepare_decode(batch, num_seqs, batch.block_tables.shape[1], shared)
            else:
                arrays = self.prepare_prefill(batch)
            inputs = self.staging.send(arrays | self.prepare_sample(batch, num_seqs))
            hidden, token_ids = self.run_model(batch, inputs), None
        if token_ids is None or (batch.sampling.has_filters and not self.filters_in_graph):
            token_ids = self._sample(hidden[:num_seqs], inputs)
        return self.staging.receive(token_ids[:num_seqs], batch.draws)

    def _graph_step(self, inputs: StagedFields, meta: AttentionMetadata) -> GraphOutput:
        """What a graph holds of a step: (hidden states, sampled tokens).

        Sampling is in no graph where it needs NCCL, which would hold on to the graph and cannot be aborted.
        Where ranks draw together it has no filters; a step with any is sampled anew.
        """
        hidden = self._forward(inputs, meta)
        local, part = self.tp.size == 1, self.model.lm_head.part()
        if part is not None:
            local = self.tp.sums_in_peer_memory(len(hidden), part.numbers, torch.float32)
        return hidden, self._sample(hidden, inputs) if local else None

    def _sample(self, hidden: torch.Tensor, inputs: StagedFields) -> torch.Tensor:
        """Draw the tokens [n] for hidden [n, hidden_size], the step's first rows, and keep them.

        All ranks draw together, or rank 0 for all where that takes all logits at one place.
        """
        num_rows = len(hidden)
        params = self._sampling_tensors(inputs, num_rows)
        part = self.model.lm_head.part()
        if part is not None and params.filters is None:
            token_ids = self.sampler(self.model.lm_head.own_logits(hidden), params, part)
        else:
            logits = self.model.compute_logits(hidden)
            if logits is None:
                token_ids = torch.empty(num_rows, dtype=torch.int64, device=self.device.torch)
            else:
                token_ids = self.sampler(logits, params)
            token_ids = self.tp.broadcast(token_ids)
        keep_tokens(token_ids, inputs["sample_slots"][:num_rows], self.last_token_ids)
        return token_ids

    def run_model(self, batch: Batch, inputs: StagedFields) -> torch.Tensor:
        """Run the model without a graph; return the hidden states [S, hidden] that logits are made from."""
        max_seqlen_q, max_seqlen_k = int(batch.query_lens.max()), int(batch.context_lens.max())
        meta = self._metadata(inputs, batch.kind is StepKind.DECODE, max_seqlen_q, max_seqlen_k)
        if overlaps(batch, self.tp.size):
            meta = replace(meta, halves=halves_metadata(batch, inputs, meta))
        return self._forward(inputs, meta)

    def _forward(self, inputs: StagedFields, meta: AttentionMetadata) -> torch.Tensor:
        # What is kept may be a failed row's -1 or what an aborted sum left: no token either.
        ids, slots, vocab_size = inputs["token_ids"], inputs["token_slots"], self.model_config.vocab_size
        token_ids = take_tokens(ids, slots, self.last_token_ids, vocab_size)
        return self.model(token_ids, inputs["positions"], meta)

    def _metadata(
        self, inputs: StagedFields, is_decode: bool, max_seqlen_q: int, max_seqlen_k: int
    ) -> AttentionMetadata:
        shared = None
        if inputs.get(SHARED_FIELDS[0]) is not None:
            shared = SharedPrefixes(*(inputs[name] for name in SHARED_FIELDS))
        return AttentionMetadata(
            cu_seqlens_q=inputs["cu_seqlens_q"],
            cu_seqlens_k=inputs["cu_seqlens_k"],
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            slot_mapping=inputs["slot_mapping"],
            context_lens=inputs["context_lens"],
            block_tables=inputs["block_tables"],
            is_decode=is_decode,
            wanted_rows=inputs.get("last_rows"),
            shared=shared,
        )

    def _sampling_tensors(self, inputs: StagedFields, num_rows: int) -> SamplingTensors:
        filters = None
        if inputs.get("top_k") is not None:
            filters = Filters(*(inputs[name][:num_rows] for name, *_ in FILTERS))
        return SamplingTensors(
            temperature=inputs["temperature"][:num_rows],
            seeds=inputs["seed"][:num_rows],
            positions=inputs["sample_positions"][:num_rows],
            filters=filters,
        )

    # -- a batch as arrays: everything else about it is derived here, in one place -------------------------

    def prepare_prefill(self, batch: Batch) -> dict[str, np.ndarray]:
        """Inputs of a step whose sequences bring any number of tokens."""
        query_lens = batch.query_lens
        cu_seqlens_q = prefix_sum(query_lens)
        rows = np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)  # [T] whose token it is
        num_tokens = len(batch.token_ids)
        first_positions = batch.context_lens - query_lens - cu_seqlens_q[:-1]
        positions = np.arange(num_tokens, dtype=np.int32) + first_positions[rows]
        arrays = {
            "token_ids": batch.token_ids.astype(np.int64),  # as torch's lookups want it, which else casts
            "token_slots": batch.slots[rows].astype(np.int64),
            "positions": positions,
            "slot_mapping": self._slot_mapping(batch, rows, positions),
            "context_lens": batch.context_lens,
            "sample_slots": self._sample_slots(batch),
            "last_rows": cu_seqlens_q[1:] - np.int32(1),
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": prefix_sum(batch.context_lens),
            "block_tables": batch.block_tables,
        }
        return arrays | halves_arrays(batch) if overlaps(batch, self.tp.size) else arrays

    def prepare_decode(
        self, batch: Batch, rows: int, width: int, shared: SharedRows | None = None
    ) -> dict[str, np.ndarray]:
        """Inputs of a step of one token a sequence, padded to `rows` rows that read and write nothing."""
        positions = batch.context_lens - np.int32(1)
        slot_mapping = self._slot_mapping(batch, np.arange(len(batch.slots)), positions)
        context_lens = pad(batch.context_lens, rows, 0)
        arrays = {
            "token_ids": pad(batch.token_ids, rows, 0, np.int64),
            "token_slots": pad(batch.slots, rows, self.spare_slot, np.int64),
            "positions": pad(positions, rows, 0),
            "slot_mapping": pad(slot_mapping, rows, -1),
            "context_lens": context_lens,
            "sample_slots": pad(self._sample_slots(batch), rows, self.spare_slot, np.int64),
            "cu_seqlens_q": np.arange(rows + 1, dtype=np.int32),
            "cu_seqlens_k": prefix_sum(context_lens),
            "block_tables": self.prepare_block_tables(batch, rows, width),
        }
        return arrays if shared is None else arrays | pad_shared_prefixes(shared, rows)

    def prepare_block_tables(self, batch: Batch, rows: int, width: int) -> np.ndarray:
        """The block tables [rows, width], every unused cell -1."""
        tables = np.full((rows, width), -1, np.int32)
        tables[: batch.block_tables.shape[0], : batch.block_tables.shape[1]] = batch.block_tables
        return tables

    def prepare_sample(self, batch: Batch, rows: int) -> dict[str, np.ndarray]:
        """The sampling parameters, padded to `rows`; filters where they are in use or in the graph."""
        sampling = batch.sampling
        fields = {
            "temperature": pad(sampling.temperature, rows, 0, np.float32),
            "seed": pad(sampling.seed, rows, 0, np.int64),
            # The position of the token to come: with the seed, it picks the random numbers.
            "sample_positions": pad(batch.context_lens, rows, 0),
        }
        if sampling.has_filters or self.filters_in_graph:
            fields |= {
                name: pad(getattr(sampling, name), rows, neutral, dtype) for name, neutral, dtype in FILTERS
            }
        return fields

    def _slot_mapping(self, batch: Batch, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where in the cache each token's K/V goes: block * block_size + offset."""
        blocks = batch.block_tables[rows, positions // self.block_size]
        return blocks * np.int32(self.block_size) + positions % np.int32(self.block_size)

    def _sample_slots(self, batch: Batch) -> np.ndarray:
        return np.where(batch.draws > 0, batch.slots, self.spare_slot).astype(np.int64)

    def exit(self) -> None:
        """Free everything on the device and leave the group. The runner cannot be used afterwards."""
        try:
            self.device.synchronize()
        finally:
            owned = "graphs", "shared_graphs", "model", "kv_cache", "staging", "last_token_ids", "sampler"
            for name in owned:
                self.__dict__.pop(name, None)
            self.tp.close()
            self.device.release_memory()
