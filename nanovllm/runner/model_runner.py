"""ModelRunner: what one rank needs to run steps. Loads the model, and owns it, the KV cache and the buffers.

Measures and takes memory, at a start and whenever it changes; `BatchRunner` runs the steps. RankSetup: what a
process needs to make one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np
import torch

from nanovllm import doors
from nanovllm.attention.backends import cache_dtype, resolve_block_size, select
from nanovllm.batch import Batch, StepKind, StepOutput, StepSize, greedy
from nanovllm.config import Config
from nanovllm.device import Device, has_cpu_kernels
from nanovllm.doors import Table, cpu_door
from nanovllm.errors import KVCacheMemoryError
from nanovllm.kernels.decode_attention import SharedUnit
from nanovllm.kernels.logits import WORD
from nanovllm.layers.stream import Group
from nanovllm.layers.weights import allocate
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.weights import load_weights
from nanovllm.quantization.shards import WeightOptions
from nanovllm.runner.batch_runner import BatchRunner, Ending
from nanovllm.runner.inputs import Staging
from nanovllm.runner.memory import CacheLayout, KVCacheSpace, attach
from nanovllm.runner.protocols import PrefixFinder

CALIBRATIONS: Table[Callable[[ModelRunner], None]] = Table(doors.CALIBRATIONS)
_FILLS: Table[Callable[[DecoderForCausalLM, int, Callable[[], None]], None]] = Table(doors.LOAD_FORMATS)
_PREFIXES: Table[Callable[[ModelRunner, SharedUnit], PrefixFinder]] = Table(doors.SHARED_PREFIXES)
_CAPTURE: Table[Callable[[ModelRunner], None]] = Table(doors.CUDA_GRAPHS)


class ModelRunner(BatchRunner):
    """A model on one device, as one rank of a tensor-parallel group."""

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
        self.backend = select(
            config.attention_backend,
            device,
            self.dtype,
            model_config.attention,
            self.cache_dtype,
            config.deterministic,
        )
        self.block_size = resolve_block_size(config.kvcache_block_size, self.backend)
        self.max_blocks = -(-max_model_len // self.block_size)  # of one sequence
        fuse = tp.size == 1 and (self.dtype == torch.bfloat16 if device.is_cuda else has_cpu_kernels())
        self.model = DecoderForCausalLM(model_config, tp, self.backend, max_model_len)
        options = WeightOptions(self.dtype, device.torch, config.deterministic, fuse)
        allocate(self.model, options, model_config.quant)
        self.load_weights()
        self.graphs = {}
        specs = [layer.spec for layer in self.model.attention_layers]
        self.spec = max(specs, key=lambda spec: (spec.window is None, spec.num_heads))
        self.layout = CacheLayout.of(specs, self.block_size, self.backend.window_tile)
        if self.model.state_layers:
            self.layout = replace(self.layout, groups=doors.find(doors.STATES["groups"])(config.max_num_seqs))
        self.shared_unit = self.backend.shared_unit(self.spec, self.cache_dtype, device.torch)
        max_seqs, max_tokens = config.max_num_seqs, max(config.max_num_batched_tokens, config.max_num_seqs)
        unit = 0 if self.shared_unit is None else self.shared_unit.sequences
        copies = max_seqs * min(max_seqs, self.block_size)  # a row's come from a block of each earlier row
        self.size = StepSize(max_tokens, max_seqs, self.max_blocks, unit, copies)  # of the largest step
        self.staging = Staging(device, self.size, len(self.layout.groups))
        if config.return_routed_experts and model_config.moe is not None:
            self.routed = model_config.moe.record([*self.model.model.layers], max_tokens, device.torch)
        self.ending = Ending(self.model, tp, device, max_seqs, config.logprobs_mode)
        self._set_kv_cache(0)

    def load_weights(self) -> None:
        """Load the checkpoint's weights, or dummy weights; see `load_weights` of the loader."""
        if self.config.load_format == "auto":
            load_weights(self.model, self.model_path, self._check)
        else:
            _FILLS[self.config.load_format](self.model, self.config.seed, self._check)
        self.device.empty_cache()  # else permanent workspaces might keep all memory of the loading

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
            if not self.config.enforce_eager:
                needed += int(needed * doors.find(doors.PREFILL_SHARE)(self))
            self.prefixes = self._make_prefix_finder()  # equal sequences share everything: the most memory
            needed += self._warmup_peak(StepKind.DECODE, self.config.max_num_seqs, 1, self.max_model_len)
        # For extras: the counts of penalties, and two float32 chunks of logits, as each change copies them.
        needed += (2 * self.ending.max_seqs + 2 * 4 * self.ending.max_rows) * self.ending.vocab_size
        needed += sum(layer.state_bytes(self.config.max_num_seqs) for layer in self.model.state_layers)
        self._set_kv_cache(0)
        self.device.release_memory()
        return needed

    def _warmup_peak(self, kind: StepKind, num_seqs: int, query_len: int, context_len: int) -> int:
        """Run a step of equal sequences with the costliest sampling; return its peak of additional bytes."""
        self.device.reset_peak()
        self.run(self.equal_batch(kind, num_seqs, query_len, context_len))
        return self.device.peak_above_current()

    def run(self, batch: Batch) -> StepOutput[np.ndarray]:
        """Run a step and wait for its tokens."""
        handle = self.launch(batch)
        assert handle is not None, "no rules, nothing to wait for"
        return handle.result()

    @cached_property
    def mask_buffer(self) -> np.ndarray:
        """Host memory for token masks: [max_num_seqs, ceil(vocabulary / 32)] int32.

        It can be reused once its step was read. It is kept, because page faults in megabytes of fresh memory
        would take longer than the writing.
        """
        words = -(-self.model_config.vocab_size // WORD)
        return self.device.host_buffer(self.size.seqs * words, torch.int32).numpy().reshape(-1, words)

    def equal_batch(self, kind: StepKind, num_seqs: int, query_len: int, context_len: int) -> Batch:
        """A step of equal sequences with filters, to measure its memory; which filter makes no difference.
        Token ids are 0.

        All sequences have the same block table, in all groups of layers, which repeats the existing blocks:
        their content does not matter.
        """
        ones = np.ones(num_seqs, np.float32)
        table = np.arange(-(-context_len // self.block_size), dtype=np.int32) % self.kv_cache.shape[2]
        return Batch(
            kind=kind,
            seq_ids=tuple(range(num_seqs)),
            slots=np.arange(num_seqs, dtype=np.int32),
            token_ids=np.zeros(num_seqs * query_len, np.int32),
            query_lens=np.full(num_seqs, query_len, np.int32),
            context_lens=np.full(num_seqs, context_len, np.int32),
            tables=(np.tile(table, (num_seqs, 1)),) * len(self.layout.groups),
            draws=np.ones(num_seqs, np.int32),
            sampling=replace(greedy(num_seqs), temperature=ones, top_k=np.full(num_seqs, 50, np.int32)),
        )

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

    def _make_prefix_finder(self) -> PrefixFinder | None:
        if self.shared_unit is None or not self.config.enable_prefix_caching:
            return None
        return _PREFIXES["finder"](self, self.shared_unit)

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
            for num_seqs in (0, self.config.max_num_seqs if num_blocks else 0):  # frees the old states
                for state_layer in self.model.state_layers:
                    state_layer.allocate_states(num_seqs)
            self.kv_cache = torch.empty(shape, dtype=self.cache_dtype, device=self.device.torch)
        except RuntimeError as error:
            size = prod(shape) * self.cache_dtype.itemsize / 2**30
            raise KVCacheMemoryError(
                f"{self.device.torch} has no memory for a KV cache of {num_blocks} blocks, {size:.2f} GiB; "
                "give LLM a smaller num_kvcache_blocks"
            ) from error
        attach(layers, self.kv_cache, self.layout, self.backend.heads_first)

    @torch.inference_mode()
    def capture_cudagraph(self) -> None:
        """Prepare graphs of decode steps over the fixed input buffer, and capture the largest one; on a CPU,
        record the steps that follow."""
        if not (self.config.enforce_eager or self.device.is_cuda or self.tp.size > 1):
            self.recorded = cpu_door("recorded_steps")()
        if self.config.enforce_eager or not (self.device.is_cuda and self.backend.supports_cuda_graph):
            return
        _CAPTURE["graphs"](self)

    def forget_recorded(self) -> None:
        """Addresses that recorded steps use change: record steps again."""
        if self.recorded is not None:
            self.recorded.clear()

    def exit(self) -> None:
        """Free everything on the device and leave the group. The runner cannot be used afterwards."""
        try:
            self.device.synchronize()
        finally:
            owned = "graphs prefills recorded model kv_cache staging ending _undrawn mask_buffer"
            for name in owned.split():
                self.__dict__.pop(name, None)
            self.tp.close()
            self.device.release_memory()


@dataclass(frozen=True)
class RankSetup:
    """Everything that a process needs to become rank `rank` of `size`."""

    rank: int
    size: int
    device: str
    config: Config
    model_config: ModelConfig
    model_path: Path
    max_model_len: int
    runner: type[ModelRunner] = ModelRunner

    def load(self, device: Device, group: Group, check: Callable[[], None] = lambda: None) -> ModelRunner:
        """Load this rank's part of the model; `check` as in `ModelRunner`."""
        return self.runner(
            self.config, self.model_config, self.model_path, device, group, self.max_model_len, check
        )
