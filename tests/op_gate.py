"""The sequence of tensor operations of some steps, as text: a line for each operation and launch of Triton.

`tests/data/op_gate` keeps the texts. A change that must not touch what the device computes leaves them as
they are; any other change shows in them what it does:

    python tests/op_gate.py --write           # the texts of a CPU
    python tests/op_gate.py --write --gpu     # those of this machine's GPU

A line holds names, shapes, dtypes and numbers, but no values of tensors: tests of tokens check those. Views
are left out, because they compute nothing; `~` marks a tensor whose layout is not contiguous. The lines are
the calls of our code before torch splits them. Both ranks of two run here, one after the other, with a group
that only writes down the collectives.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import inside
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanovllm import LLM, SamplingParams
from nanovllm.batch import Batch
from nanovllm.cpu import isa
from nanovllm.kernels.compat import triton
from nanovllm.parallel import halves
from nanovllm.parallel.group import TPGroup
from nanovllm.runner.model_runner import ModelRunner

KEPT = Path(__file__).parent / "data/op_gate"
PROMPT_LENS = (5, 7, 6)
CHUNK = 9  # tokens of a prefill step: 5 + 4 of 7, then 3 + 6
NUM_BLOCKS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}
KEYS_LEFT_OUT = {"device", "layout", "pin_memory", "generator", "non_blocking", "memory_format"}


@dataclass(frozen=True)
class Setting:
    """A model with random weights, and what runs on it."""

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)  # of config.json
    options: Mapping[str, Any] = field(default_factory=dict)  # of LLM
    params: tuple[SamplingParams, ...] = (GREEDY,) * len(PROMPT_LENS)
    ranks: int = 1
    halves: bool = False  # prefill in two halves
    pooled: bool = False  # also score and embed


BF16 = {"dtype": "bfloat16"}
TIED = {"tie_word_embeddings": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
ENDINGS = tuple(
    SamplingParams(max_tokens=2, ignore_eos=True, seed=1, **fields)
    for fields in (
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 3},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "logit_bias": {7: 2.0},
        },
        {"temperature": 0, "allowed_token_ids": [3, 5, 8], "prompt_logprobs": 2},
    )
)
CPU = {
    "llama-float32": Setting("llama"),
    "llama-bfloat16-tied": Setting("llama", TIED, BF16),
    "llama-biases": Setting("llama", BIASES),
    "llama-fp8-cache": Setting("llama", {}, BF16 | {"kv_cache_dtype": "fp8"}),
    "llama-biases-2-ranks": Setting("llama", BIASES | TIED, ranks=2),
    "llama-biases-2-ranks-halves": Setting("llama", BIASES, ranks=2, halves=True),
    "mistral-float32": Setting("mistral"),
    "mistral-bfloat16-tied": Setting("mistral", TIED, BF16),
    "qwen2-float32-tied": Setting("qwen2", TIED),
    "qwen2-bfloat16": Setting("qwen2", {}, BF16),
    "qwen3-float32": Setting("qwen3"),
    "qwen3-bfloat16-tied": Setting("qwen3", TIED, BF16),
    "qwen3-endings": Setting("qwen3", params=ENDINGS, pooled=True),
}
ALONE = (GREEDY, GREEDY, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))  # one row at the end
WIDE = {"hidden_size": 384, "intermediate_size": 768, "head_dim": 64, "vocab_size": 1000}
EAGER = BF16 | {"enforce_eager": True}
GPU = {
    "llama-bfloat16": Setting("llama", WIDE, EAGER, ALONE),
    "llama-float32-tied": Setting("llama", WIDE | TIED, EAGER | {"dtype": "float32"}, ALONE),
    "llama-biases": Setting("llama", WIDE | BIASES, EAGER, ALONE),
    "mistral-float16": Setting("mistral", WIDE, EAGER | {"dtype": "float16"}, ALONE),
    "qwen2-bfloat16-tied": Setting("qwen2", WIDE | TIED, EAGER, ALONE),
    "qwen3-bfloat16": Setting("qwen3", WIDE, EAGER, ALONE),
    "qwen3-deterministic": Setting("qwen3", WIDE, EAGER | {"deterministic": True}, ALONE),
    "qwen3-fp8-cache": Setting("qwen3", WIDE, EAGER | {"kv_cache_dtype": "fp8"}, ALONE),
    "qwen3-endings": Setting("qwen3", WIDE, EAGER, ENDINGS, pooled=True),
    "llama-graphs": Setting("llama", WIDE | TIED, BF16),
    "qwen3-graphs": Setting("qwen3", WIDE, BF16, ENDINGS),
}


# -- what a line says ---------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """An argument or a result of an operation, without the values of tensors."""
    if isinstance(value, torch.Tensor):
        layout = "" if value.is_contiguous() else "~"
        return f"{shown(value.dtype)}{list(value.shape)}{layout}".replace(" ", "")
    if isinstance(value, torch.dtype):
        name = str(value).removeprefix("torch.")
        kind = name.rstrip("0123456789")
        return DTYPES[kind] + name.removeprefix(kind) if kind in DTYPES else name
    if isinstance(value, tuple | list):
        return f"({', '.join(map(shown, value))})"
    if isinstance(getattr(value, "base", None), torch.Tensor):  # Triton's TensorDescriptor
        return f"{shown(value.base)} in {shown(value.block_shape)}"
    if isinstance(value, int) and value >= 2**40:
        return "seed"  # a capture draws one for torch's generator
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return str(value) if type(value).__module__.startswith("triton") else type(value).__name__


def call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any = None) -> str:
    parts = [shown(value) for value in args if not isinstance(value, torch.device)]
    parts += [f"{key}={shown(value)}" for key, value in kwargs.items() if key not in KEYS_LEFT_OUT]
    return f"{name}({', '.join(parts)})" + ("" if out is None else f" -> {shown(out)}")


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)


def is_view(func: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Whether every result is the memory of an argument, and the operation writes nothing."""
    if func._schema.is_mutable or not list(tensors(out)):
        return False
    memory = {each.untyped_storage().data_ptr() for each in tensors(args)}
    return all(each.untyped_storage().data_ptr() in memory for each in tensors(out))


class Recorder(TorchDispatchMode):
    """Writes down what runs in its `step`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not is_view(func, args, out):
            self.lines.append(call(str(func).removesuffix(".default"), args, kwargs or {}, out))
        return out

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        self.lines.append(f"## {title}")
        with ExitStack() as stack:
            if triton is not None:
                kernels = triton.runtime.jit.KernelInterface
                launch = partial(self._launch, kernels.__getitem__)
                stack.enter_context(
                    mock.patch.object(kernels, "__getitem__", lambda *key: partial(launch, *key))
                )
            stack.enter_context(self)
            yield

    def _launch(self, of: Callable[..., Any], kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> Any:
        """Write down and do `kernel[grid](*args, **kwargs)`."""
        own = {"grid": grid} if isinstance(grid, tuple) else {}
        self.lines.append(call(f"triton.{kernel.__name__}", args, own | kwargs))
        with _disable_current_modes():  # Triton's interpreter runs operations of torch
            return of(kernel, grid)(*args, **kwargs)


class WrittenGroup:
    """A process group of one rank that writes down the collectives. Sums lack the other ranks' parts."""

    def __init__(self, recorder: Recorder) -> None:
        self.lines = recorder.lines

    def _work(self, name: str, x: torch.Tensor) -> Any:
        self.lines.append(call(f"group.{name}", (x,), {}))
        return mock.Mock(wait=lambda: self.lines.append(f"group.wait({name})"))

    def allreduce(self, parts: list[torch.Tensor], options: Any) -> Any:
        return self._work("allreduce", parts[0])

    def gather(self, parts: list[torch.Tensor], x: torch.Tensor, root: int) -> Any:
        with _disable_current_modes():
            for part in parts:
                part.copy_(x)
        return self._work("gather", x)

    def broadcast(self, x: torch.Tensor, root: int) -> Any:
        with _disable_current_modes():
            x.fill_(3)
        return self._work("broadcast", x)

    def abort(self) -> None:
        pass


# -- what runs ----------------------------------------------------------------------------------------------


def write_config(folder: Path, setting: Setting) -> Path:
    """A checkpoint without weights, of sizes that are no powers of 2."""
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = {
        "architectures": [f"{names[setting.family]}ForCausalLM"],
        "model_type": setting.family,
        "vocab_size": 97,
        "hidden_size": 60,
        "intermediate_size": 70,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | dict(setting.config)))
    return folder


def title_of(batch: Batch) -> str:
    """The kind of a step, and its tokens for each sequence."""
    lens = batch.query_lens.tolist() if len(batch.token_ids) > len(batch.slots) else len(batch.slots)
    return f"{batch.kind.name.lower()} of {lens}"


def steps_of(setting: Setting, device: str, folder: Path) -> list[str]:
    """Run all steps of a setting; return their lines, each step under a title."""
    recorder, batches = Recorder(), []
    prompts = [[2 + 11 * i + j for j in range(length)] for i, length in enumerate(PROMPT_LENS)]

    def record(method: Callable[..., Any], title: Callable[..., str]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any) -> Any:
            with recorder.step(title(*args)):
                return method(*args)

        return run

    with ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        # torch does not see launches of our own kernels on a CPU
        stack.enter_context(isa.compiling_for("torch"))
        if device != "cpu":
            capture = ModelRunner.capture_cudagraph
            patch(ModelRunner, "capture_cudagraph", record(capture, lambda *_: "captured graphs"))
        llm = stack.enter_context(open_llm(setting, device, folder))
        runner = inside.runner(llm)
        runner.kv_cache.fill_(0)  # else NaN in fresh memory decides what the reference does
        launch, draw = runner.launch, runner.draw
        if setting.ranks == 1:
            patch(runner, "launch", record(launch, title_of))
            patch(runner, "draw", record(draw, lambda masks: f"drawn with masks of {len(masks.rows)} rows"))
        else:
            patch(runner, "launch", lambda batch: batches.append(batch) or launch(batch))
        llm.generate(prompts, list(setting.params), use_tqdm=False)
        if setting.pooled:
            llm.score_pairs([(prompt, [5, 6]) for prompt in prompts[:2]], use_tqdm=False)
            llm.embed(prompts[:1], use_tqdm=False)
        if setting.halves:
            patch(halves, "OVERLAP_TOKENS", CHUNK)
        for rank in range(setting.ranks) if batches else ():
            group = TPGroup(rank, setting.ranks, WrittenGroup(recorder))
            same = runner.config, runner.model_config, runner.model_path, runner.device
            own = ModelRunner(*same, group, runner.max_model_len)
            own.allocate_kv_cache(NUM_BLOCKS)
            own.kv_cache.fill_(0)
            for batch in batches:
                record(own.launch, lambda batch, rank=rank: f"rank {rank}: {title_of(batch)}")(batch)
    return recorder.lines


def open_llm(setting: Setting, device: str, folder: Path) -> LLM:
    options: dict[str, Any] = {
        "device": device,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": len(PROMPT_LENS),
        "max_model_len": 64,
        "num_kvcache_blocks": NUM_BLOCKS,
        "attention_backend": "reference" if device == "cpu" else "triton",
    }
    return LLM(str(write_config(folder, setting)), **options | dict(setting.options))


# -- kept texts ---------------------------------------------------------------------------------------------


def settings(device: str) -> dict[str, Setting]:
    return CPU if device == "cpu" else GPU


def made_with(device: str) -> str:
    """What else decides which operations run; the sequences of another torch, Triton or GPU may differ."""
    versions = f"torch {minor(torch.__version__)}"
    if device == "cpu":
        return versions
    return f"{versions}, triton {minor(triton.__version__)}, {torch.cuda.get_device_name()}"


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def path_of(name: str, device: str) -> Path:
    return (KEPT if device == "cpu" else KEPT / "gpu") / f"{name}.txt"


def text_of(lines: list[str], device: str) -> str:
    """The kept text: what it was made with, the hash of its lines, and the lines."""
    return "\n".join([f"# {made_with(device)}", f"# sha256 {digest(lines)}", *lines, ""])


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def difference(kept: str, found: str) -> str:
    """The first difference of two texts and the two lines before it; empty if there is none."""
    a, b = kept.splitlines(), found.splitlines()
    if a[1:] == b[1:]:
        return ""
    first = next(i for i, (x, y) in enumerate(zip_longest(a[2:], b[2:]), 2) if x != y)
    step = next(line for line in (*b[first::-1], "## the beginning") if line.startswith("##"))
    before = "".join(f"    {line}\n" for line in b[max(first - 2, 2) : first])
    was, now = ((*text[first : first + 1], "nothing")[0] for text in (a, b))
    return f"{step.removeprefix('## ')}, line {first + 1} of the text:\n{before}kept   {was}\nfound  {now}"


def check(name: str, device: str, folder: Path) -> None:
    """Fail if the operations of a setting differ from the kept ones. Skip if those are of something else.

    Which operations run is a matter of torch too, and of Triton and the GPU: with others a difference says
    nothing about our code.
    """
    path, here = path_of(name, device), made_with(device)
    command = "python tests/op_gate.py --write" + (" --gpu" if device == "cuda" else "")
    kept = path.read_text()
    made = kept.splitlines()[0].removeprefix("# ")
    if made != here:
        pytest.skip(f"the kept sequence is of {made}, here is {here}: {command}")
    different = difference(kept, text_of(steps_of(settings(device)[name], device, folder), device))
    if different:
        pytest.fail(f"{name}: other operations in {different}\nIf they should change: {command}", False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare or renew the kept sequences of operations.")
    parser.add_argument("--write", action="store_true", help="renew the texts")
    parser.add_argument("--gpu", action="store_true", help="those of this machine's GPU")
    parser.add_argument("names", nargs="*", help="settings; all without any")
    args = parser.parse_args()
    device = "cuda" if args.gpu else "cpu"
    for name in args.names or settings(device):
        path = path_of(name, device)
        with tempfile.TemporaryDirectory() as folder:
            found = text_of(steps_of(settings(device)[name], device, Path(folder)), device)
        if args.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found)
        print(f"{name}: {found.count(chr(10)) - 2} lines", difference(path.read_text(), found))


if __name__ == "__main__":
    main()
