"""ModelRunner: one Batch in, one set of sampled tokens out. Owns the model, the KV cache and the buffers.

Never sees a Sequence and never decides what runs. Only `StepHandle.result` waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path

import numpy as np
import torch

from nanovllm import doors
from nanovllm.attention.backends import resolve_block_size, select
from nanovllm.attention.base import SharedPrefixes, cache_dtype
from nanovllm.batch import EMPTY_BATCH, Batch, StepKind, StepOutput, StepSize
from nanovllm.config import Config
from nanovllm.device import Device, cpu_door, has_cpu_kernels
from nanovllm.doors import Table
from nanovllm.errors import KVCacheMemoryError
from nanovllm.kernels.decode_attention import least_chunk
from nanovllm.kernels.last_tokens import take_tokens
from nanovllm.kernels.logits import WORD
from nanovllm.layers.stream import Group
from nanovllm.layers.weights import allocate
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.weights import init_dummy_weights, load_weights
from nanovllm.quantization.base import WeightOptions
from nanovllm.runner.cuda_graph import CUDAGraphs, RecordedSteps, Rehearsal, graph_sizes
from nanovllm.runner.ending import Ending, Undrawn
from nanovllm.runner.inputs import (
    Staging,
    StepHandle,
    StepInputs,
    prepare_decode,
    prepare_prefill,
)
from nanovllm.runner.memory import (
    CacheLayout,
    KVCacheSpace,
    attach,
    equal_batch,
)
from nanovllm.runner.shared_prefixes import SharedPrefixFinder, SharedRows

GraphOutput = tuple[torch.Tensor, torch.Tensor | None]
CALIBRATIONS: Table[Callable[[ModelRunner], None]] = Table(doors.CALIBRATIONS)


class ModelRunner:
    """Runs steps on one device, as one rank of a tensor-parallel group."""

    kv_cache: torch.Tensor  # of `layout`

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        model_path: Path,
        device: Device,
        tp: Group,
        max_model_len: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Build the model and load its weights. check: called for each tensor, now and by later loads; may
        raise to give up."""
        self.config = config
        self._check = check
        self.model_config = model_config = model_config.up_to(max_model_len)
        self.model_path = model_path
        self.device = device
        self.tp = tp
        self.max_model_len = max_model_len
        device.make_current()
        self._held_by_others = device.tensor_bytes()  # other engines of this process, or a trainer
        self.dtype = device.resolve_dtype(config.dtype, model_config.dtype)
        self.cache_dtype = cache_dtype(config.kv_cache_dtype, self.dtype)
        kinds = self.dtype, model_config.attention, self.cache_dtype
        self.backend = select(config.attention_backend, device, *kinds, config.deterministic)
        self.block_size = resolve_block_size(config.kvcache_block_size, self.backend)
        self.max_blocks = -(-max_model_len // self.block_size)  # of one sequence
        fuse = tp.size == 1 and (self.dtype == torch.bfloat16 if device.is_cuda else has_cpu_kernels())
        self.model = DecoderForCausalLM(model_config, tp, self.backend, max_model_len)
        options = WeightOptions(self.dtype, device.torch, config.deterministic, fuse)
        allocate(self.model, options, model_config.quant)
        self.load_weights()
        self.graphs: dict[tuple[int, bool], CUDAGraphs] = {}  # by chunk of shared prefixes, and whether drawn
        self.recorded: RecordedSteps | None = None  # on a CPU, in place of graphs
        self._undrawn: Undrawn | None = None
        self.prefixes: SharedPrefixFinder | None = None  # None without a KV cache
        specs = [layer.spec for layer in self.model.attention_layers]
        self.spec = max(specs, key=lambda spec: (spec.window is None, spec.num_heads))
        self.layout = CacheLayout.of(specs, self.block_size, self.backend.window_tile)
        self.shared_unit = self.backend.shared_unit(self.spec, self.cache_dtype, device.torch)
        max_seqs, max_tokens = config.max_num_seqs, max(config.max_num_batched_tokens, config.max_num_seqs)
        unit = 0 if self.shared_unit is None else self.shared_unit.sequences
        copies = max_seqs * min(max_seqs, self.block_size)  # a row's come from a block of each earlier row
        self.size = StepSize(max_tokens, max_seqs, self.max_blocks, unit, copies)  # of the largest step
        self.staging = Staging(device, self.size, len(self.layout.groups))
        self.routed: torch.Tensor | None = None
        if config.return_routed_experts and model_config.moe is not None:
            self.routed = model_config.moe.record([*self.model.model.layers], max_tokens, device.torch)
        self.ending = Ending(self.model, tp, device, max_seqs, config.logprobs_mode)
        self._set_kv_cache(0)

    def load_weights(self) -> None:
        """Load the checkpoint's weights, or dummy weights; see `load_weights` of the loader."""
        if self.config.load_format == "dummy":
            init_dummy_weights(self.model, self.config.seed, self._check)
        else:
            load_weights(self.model, self.model_path, self._check)
        self.device.empty_cache()  # else permanent workspaces might keep all memory of the loading

    # -- start-up ----------------------------------------------------------------------------------------

    def calibrate_kv_cache(self) -> None:
        """Set the scales of a KV cache in another dtype than the model's. Its content is lost."""
        if self.cache_dtype != self.dtype:
            CALIBRATIONS[self.config.kv_cache_dtype](self)

    def warmup_model(self) -> int:
        """Run the largest steps once; return the bytes that they need besides weights and KV cache."""
        if not self.device.is_cuda:
            return 0  # no kernel to compile, and the KV cache does not fill the memory
        num_seqs = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        query_len = min(self.config.max_num_batched_tokens // num_seqs, self.max_model_len)
        self._set_kv_cache(-(-query_len // self.block_size))
        needed = self._warmup_peak(StepKind.PREFILL, num_seqs, query_len, query_len)
        most = self.tp.most_whole(self.config.max_num_batched_tokens)  # of the largest step that is not split
        if most < self.config.max_num_batched_tokens:
            few = min(num_seqs, -(-(most + 1) // self.max_model_len))
            whole = min(most // few, self.max_model_len)
            needed = max(needed, self._warmup_peak(StepKind.PREFILL, few, whole, whole))
        if self.backend.supports_cuda_graph:  # graphs have their own memory
            self.prefixes = self._make_prefix_finder()  # equal sequences share everything: the most memory
            needed += self._warmup_peak(StepKind.DECODE, self.config.max_num_seqs, 1, self.max_model_len)
        needed += self.ending.reserved_bytes()
        self._set_kv_cache(0)
        self.device.release_memory()
        return needed

    def _warmup_peak(self, kind: StepKind, num_seqs: int, query_len: int, context_len: int) -> int:
        """Run a step of equal sequences with the costliest sampling; return its peak of additional bytes."""
        self.device.reset_peak()
        self.run(self.equal_batch(kind, num_seqs, query_len, context_len))
        return self.device.peak_above_current()

    def equal_batch(self, kind: StepKind, num_seqs: int, query_len: int, context_len: int) -> Batch:
        """As `equal_batch` of `memory.py`, in the blocks that there are, for all groups of layers."""
        num_blocks = self.kv_cache.shape[2]
        batch = equal_batch(kind, num_seqs, query_len, context_len, self.block_size, num_blocks)
        return replace(batch, tables=batch.tables * len(self.layout.groups))

    def measure_kv_cache(self, reserve: int) -> KVCacheSpace:
        """Return the device's memory for the KV cache besides `reserve` bytes, and the size of a block."""
        per_block = prod(self.layout.shape(1, self.block_size)) * self.cache_dtype.itemsize
        ranks_here = 1 if self.device.is_cuda else self.tp.size
        held = max(self.device.tensor_bytes() - self._held_by_others, 0)
        share = self.config.gpu_memory_utilization
        budget, lacking = self.device.kv_cache_budget(share, held, reserve)
        free, total = self.device.memory()
        return KVCacheSpace(
            str(self.device.torch), free, total, budget // ranks_here, reserve, per_block, lacking
        )

    def try_kv_cache(self, num_blocks: int) -> bool:
        """Allocate the KV cache if the device still has the memory; return whether it has."""
        try:
            self.allocate_kv_cache(num_blocks)
        except KVCacheMemoryError:
            self._set_kv_cache(0)
            return False
        return True

    def allocate_kv_cache(self, num_blocks: int) -> int:
        """Allocate the KV cache; return its number of blocks."""
        self._set_kv_cache(num_blocks)
        self.prefixes = self._make_prefix_finder()
        return self.kv_cache.shape[2]

    def _make_prefix_finder(self) -> SharedPrefixFinder | None:
        if self.shared_unit is None or not self.config.enable_prefix_caching:
            return None
        max_num_seqs = self.config.max_num_seqs
        if self.config.deterministic:
            return SharedPrefixFinder(self.block_size, self.shared_unit, max_num_seqs)
        least = partial(least_chunk, self.spec.num_heads, self.spec.head_dim, self.max_model_len)
        return SharedPrefixFinder(self.block_size, self.shared_unit, max_num_seqs, least)

    def _set_kv_cache(self, num_blocks: int) -> None:
        """Give every layer its part of a new cache of `num_blocks` blocks.

        KVCacheMemoryError if the device has less memory for it than it reported, as under `ulimit -v`.
        """
        layers = self.model.attention_layers
        self.forget_recorded()
        self.kv_cache = torch.empty(self.layout.shape(0, self.block_size))
        attach(layers, self.kv_cache, self.layout)  # frees the old cache
        shape = self.layout.shape(num_blocks, self.block_size)
        try:
            self.kv_cache = torch.empty(shape, dtype=self.cache_dtype, device=self.device.torch)
        except RuntimeError as error:
            size = prod(shape) * self.cache_dtype.itemsize / 2**30
            raise KVCacheMemoryError(
                f"{self.device.torch} has no memory for a KV cache of {num_blocks} blocks, {size:.2f} GiB; "
                "give LLM a smaller num_kvcache_blocks"
            ) from error
        attach(layers, self.kv_cache, self.layout, self.backend.heads_first)

    @torch.inference_mode()
    def capture_cudagraph(self, progress: bool = False) -> None:
        """Capture decode steps for batch sizes that cover `max_num_seqs`, over the fixed input buffer; on a
        CPU, record the steps that follow."""
        if not (self.config.enforce_eager or self.device.is_cuda or self.tp.size > 1):
            self.recorded = cpu_door("recorded_steps")()
        if self.config.enforce_eager or not (self.device.is_cuda and self.backend.supports_cuda_graph):
            return

        rehearsal = Rehearsal(self.model.model)

        def make(shared: SharedRows | None, drawn: bool, sizes: list[int], pool: object) -> CUDAGraphs:
            step = partial(self._make_step, shared, drawn)
            return CUDAGraphs(sizes, step, self.device.torch, pool, rehearsal)

        sizes = graph_sizes(self.config.max_num_seqs)
        self.graphs[0, True] = first = make(None, True, sizes, None)
        first.capture_all(progress and self.tp.rank == 0)
        # Captured on first use, and in fewer sizes: most workloads do not need them.
        few = sizes[::-4][::-1]
        self.graphs[0, False] = make(None, False, sorted({*sizes[:3], *sizes[::-2]}), first.pool)
        if self.prefixes is not None:
            for chunk, nothing in self.prefixes.nothing.items():
                for drawn in (True, False):
                    self.graphs[chunk, drawn] = make(nothing, drawn, few, first.pool)

    def _make_step(self, shared: SharedRows | None, drawn: bool, rows: int) -> Callable[[], GraphOutput]:
        """A decode step of `rows` sequences over the fixed input buffer, to capture as a graph."""
        batch = replace(EMPTY_BATCH, tables=EMPTY_BATCH.tables * len(self.layout.groups))
        arrays = prepare_decode(batch, self.block_size, shared, self.max_model_len)
        inputs = self.staging.send(arrays, replace(self.size, tokens=rows, seqs=rows))()
        return lambda: self._graph_step(inputs, drawn)

    def forget_recorded(self) -> None:
        """Addresses that recorded steps use change: record steps again."""
        if self.recorded is not None:
            self.recorded.clear()

    # -- one step ----------------------------------------------------------------------------------------

    def run(self, batch: Batch) -> StepOutput[np.ndarray]:
        """Run a step and wait for its tokens."""
        handle = self.launch(batch)
        assert handle is not None, "no rules, nothing to wait for"
        return handle.result()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> StepHandle | None:
        """Queue a step on the device; the handle returns its outputs, the same on every rank.

        None if the sequences have rules: then call `draw` before the next launch.
        """
        batch = self.layout.numbered(batch, self.kv_cache.shape[2])
        shared, replayed = None, None
        if batch.kind is StepKind.DECODE:
            shared = None if self.prefixes is None else self.prefixes.find(batch)
            replayed = self._replay(batch, shared)
        if replayed is not None:
            (hidden, token_ids), staged = replayed
            if token_ids is not None:
                return self._receive(StepOutput(token_ids[: len(batch.slots), None]), batch)
            step = batch, hidden, staged()
        else:
            if batch.kind is StepKind.DECODE:
                arrays = prepare_decode(batch, self.block_size, shared)
            else:
                assert batch.kind is StepKind.PREFILL, f"no code here for the step {batch.kind!r}"
                split = self.tp.split if self.routed is None else None
                arrays = prepare_prefill(batch, self.block_size, split)
            inputs = self.staging.send(arrays)()
            step = batch, self.run_model(inputs), inputs
        if batch.extras.has_rules:
            self._undrawn = step
            return None
        return self._receive(self.ending.end(step), batch)

    def _replay(
        self, batch: Batch, shared: SharedPrefixes[np.ndarray] | None
    ) -> tuple[GraphOutput, Callable[[], StepInputs[torch.Tensor]]] | None:
        """Replay a decode step; return its output, and a function that creates its inputs. None if there is
        no graph for it, and it cannot be recorded."""
        drawn = not batch.extras.needs_logits
        rows, recorded = len(batch.slots), self.recorded
        graphs = self.graphs.get((shared.chunk if shared else 0, drawn))
        if graphs is not None:
            rows = graphs.size_for(rows)
            graphs.capture(rows)
            arrays = prepare_decode(batch, self.block_size, shared)
            staged = self.staging.send(arrays, replace(self.size, tokens=rows, seqs=rows))
            return graphs.replay(rows), staged
        if recorded is None or shared is not None or not recorded.usable:
            return None
        arrays = prepare_decode(batch, self.block_size, None, self.max_model_len)
        staged = self.staging.send(arrays, replace(self.size, tokens=rows, seqs=rows))
        output = recorded.run((rows, drawn), lambda: partial(self._graph_step, staged(), drawn))
        return None if output is None else (output, staged)

    def _receive(self, tensors: StepOutput[torch.Tensor], batch: Batch) -> StepHandle:
        routed = None if self.routed is None else self.routed[: len(batch.token_ids)]
        return self.staging.receive(replace(tensors, routed=routed))

    @cached_property
    def mask_buffer(self) -> np.ndarray:
        """Host memory for token masks: [max_num_seqs, ceil(vocabulary / 32)] int32.

        It can be reused once its step was read. It is kept, because page faults in megabytes of fresh memory
        would take longer than the writing.
        """
        words = -(-self.model_config.vocab_size // WORD)
        return self.device.host_buffer(self.size.seqs * words, torch.int32).numpy().reshape(-1, words)

    @torch.inference_mode()
    def draw(self, masks: object) -> StepHandle:
        """Queue the end of the launched step; `masks` are its allowed tokens."""
        step, self._undrawn = self._undrawn, None
        assert step is not None, "a step with rules was launched"
        return self._receive(self.ending.end(step, masks), step[0])

    def _graph_step(self, inputs: StepInputs[torch.Tensor], drawn: bool) -> GraphOutput:
        """The part of a step that a graph captures: (hidden states, drawn tokens or None).

        Drawing that needs NCCL is not captured, because NCCL keeps the graph alive and cannot be aborted.
        """
        hidden = self.run_model(inputs)
        drawn = drawn and self.tp.exchanges_rows(len(hidden), self.dtype)
        return hidden, self.ending.draw(hidden, inputs) if drawn else None

    def run_model(self, inputs: StepInputs[torch.Tensor]) -> torch.Tensor:
        """Run the model; return the hidden states [n, hidden_size] that are needed for logits."""
        # A stored token may be NOT_FINITE, or garbage from an aborted sum: `take_tokens` clamps it.
        vocab_size = self.model_config.vocab_size
        token_ids = take_tokens(inputs.token_ids, inputs.token_slots, self.ending.last_token_ids, vocab_size)
        return self.model(token_ids, inputs.positions, inputs.attention)

    def exit(self) -> None:
        """Free everything on the device and leave the group. The runner cannot be used afterwards."""
        try:
            self.device.synchronize()
        finally:
            owned = "graphs", "recorded", "model", "kv_cache", "staging", "ending", "_undrawn", "mask_buffer"
            for name in owned:
                self.__dict__.pop(name, None)
            self.tp.close()
            self.device.release_memory()
