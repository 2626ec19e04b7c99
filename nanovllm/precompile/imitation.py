"""An imitation of a GPU, in a process without one: steps run, the kernels that they launch are found, and
nothing is computed.

Its tensors are on torch's device "meta": shapes without memory. It changes classes of torch and Triton for
the whole process, which must be one of its own. Starts no process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from nanovllm.batch import StepKind
from nanovllm.cuda_graphs.capture import make_step
from nanovllm.cuda_graphs.graphs import Rehearsal, graph_sizes
from nanovllm.device import Device
from nanovllm.kernels.compat import in_graph, triton
from nanovllm.layers.stream import Group
from nanovllm.layers.weights import finish_loading
from nanovllm.precompile.ahead import GPU, Wanted
from nanovllm.runner.model_runner import ModelRunner

_BLOCKS = 1024  # of the KV cache: kernels do not depend on their number
_SHAPES = "torch.fx.experimental.symbolic_shapes"
# What `triton.compile` takes: the source with its types and constants, the target and the options.
Found = Callable[[Any, Any, Any], object]


class ImitatedDevice(Device):
    """The device of the tensors, with what is known of the GPU."""

    def __init__(self, gpu: GPU) -> None:
        self.torch = torch.device("meta")
        self._gpu = gpu

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def capability(self) -> tuple[int, int]:
        return self._gpu.capability

    @property
    def name(self) -> str:
        return self._gpu.name

    def memory(self) -> tuple[int, int]:
        return self._gpu.memory

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def record_event(self) -> None:
        return None

    def tensor_bytes(self) -> int:
        return 0

    def peak_above_current(self) -> int:
        return 0

    def make_current(self) -> None:
        pass

    synchronize = empty_cache = release_memory = reset_peak = make_current


class _Driver:
    """What a launch asks of Triton's driver before it compiles."""

    def __init__(self, gpu: GPU) -> None:
        major, minor = gpu.capability
        self._target = triton.backends.compiler.GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Runner(ModelRunner):
    """A runner whose weights have no values."""

    def load_weights(self) -> None:
        finish_loading(self.model)


def imitate(gpu: GPU, found: Found) -> ImitatedDevice:
    """Let this process take tensors without memory for those of `gpu`, and give each kernel that would
    compile to `found`, in place of compiling and launching it."""

    def offset(x: torch.Tensor) -> int:
        return int(x.storage_offset()) * x.element_size()  # memory itself begins at a multiple of 512

    tensor: Any = torch.Tensor
    tensor.data_ptr = offset
    tensor.is_cuda = property(lambda x: x.device.type == "meta")
    # On "meta", torch's own import a compiler, which takes seconds.
    product: Any = functional
    tensor.addmm_, product.linear = (lambda total, *factors, **scales: total), _linear
    sys.modules.setdefault(_SHAPES, _PlainShapes(_SHAPES))
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: _Properties(gpu)
    cuda.get_device_capability = lambda device=None: gpu.capability
    triton.runtime.driver.set_active(_Driver(gpu))
    function: Any = triton.runtime.jit.JITFunction

    def without_launch(self: Any, grid: Any) -> Callable[..., Any]:
        return partial(self.run, grid=grid, warmup=True)

    def compiled(source: Any, target: Any = None, options: Any = None, **environment: Any) -> object:
        found(source, target, options)
        return found  # in place of a kernel: it is not launched

    function.__getitem__ = without_launch
    triton.compiler.compile = compiled
    return ImitatedDevice(gpu)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)


class _PlainShapes(ModuleType):
    """In place of torch's module of symbolic shapes, which imports sympy for a second: what shapes of plain
    numbers need of it. Who needs more gets the module itself."""

    expect_true = guard_or_false = guard_or_true = guard_size_oblivious = statically_known_true = bool
    has_guarding_hint, is_nested_int = staticmethod(lambda x: True), staticmethod(lambda x: False)
    guarding_hint_or_throw = staticmethod(lambda x: x)
    sym_and, sym_or = staticmethod(lambda *x: all(x)), staticmethod(lambda *x: any(x))
    sym_eq = staticmethod(lambda x, y: x == y if isinstance(x, int) else [*x] == [*y])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


class _Properties:
    """Those of torch.cuda.get_device_properties that kernels depend on."""

    def __init__(self, gpu: GPU) -> None:
        self.shared_memory_per_block_optin = gpu.shared_memory
        self.multi_processor_count = gpu.multiprocessors


def steps(wanted: Wanted, device: ImitatedDevice) -> Iterator[str]:
    """Run the steps of a start, then those of the first prompts; after each of both, yield what was run.

    A layer of each kind runs, after one of each kind that precedes it: they launch all kernels of a step.
    """
    config = wanted.config
    with torch.inference_mode():
        runner = _Runner(
            config, wanted.model_config, wanted.model_path, device, Group(), wanted.max_model_len
        )
        rehearsal = Rehearsal(runner.model.model)
        with rehearsal():
            runner.calibrate_kv_cache()
            runner.warmup_model()
            runner.allocate_kv_cache(_BLOCKS)
            if runner.backend.supports_cuda_graph and not config.enforce_eager:
                token = in_graph.set(True)
                for size in reversed(graph_sizes(config.max_num_seqs)):
                    make_step(runner, None, True, size)()
                in_graph.reset(token)
            yield "start"
            tokens = min(config.max_num_batched_tokens, wanted.max_model_len)
            while tokens > 0:
                runner.run(runner.equal_batch(StepKind.PREFILL, 1, tokens, tokens))
                tokens //= 2
            yield "prompts"
