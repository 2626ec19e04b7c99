"""Model folders with one mutated file, drawn from a seed: config.json, generation_config.json,
tokenizer_config.json or the header of the weights. `tools/fuzz_model_folders.py` tries many.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.checks import attempt
from nanovllm.errors import KVCacheMemoryError, ModelLoadError
from tools.write_fp8 import write_fp8
from tools.write_int4 import write_int4
from tools.write_nvfp4 import write_nvfp4

# What writes a hybrid in each format of folders; one of Qwen3.5, or of the family that it is called after.
HYBRIDS: dict[str, Callable[[Path, Path], object]] = {
    "fp8": lambda source, target: write_fp8(source, target, "channel"),
    "awq": lambda source, target: write_int4(source, target, "awq", group=32),
    "gptq": lambda source, target: write_int4(source, target, "gptq", group=32),
    "w4a16": lambda source, target: write_int4(source, target, "compressed-tensors", group=32),
    "nvfp4": lambda source, target: write_nvfp4(source, target, "modelopt"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), lambda source, target: write_fp8(source, target, "channel")),
}
_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # whole groups
_PREFIXES = ("linear_", "conv_", "block_", "full_attn_", "num_dense_", "use_expert_", "routed_")
_OF_HYBRIDS = ("layer_types", "full_attention_interval", "rope_parameters", "quantization_config", "head_dim")
KINDS = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors")
LIMIT = 60  # seconds for a folder to load or to be refused
NESTED: Any = json.loads("[" * 90 + "]" * 90)
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 10**7, 2 * 10**7, 2**31, 10**12, 10**18, 10**400, -(10**9)),
    *(
        0.0,
        0.5,
        -0.5,
        1e-300,
        1e300,
        float("nan"),
        float("inf"),
        "",
        "x",
        "1",
        "float16",
        "\x00",
        "a" * 10**5,
    ),
    *([], [0], ["x"], [None], [[]], [10**9], {}, {"x": 1}, {"rope_type": "yarn"}, {"type": []}, NESTED),
    *({"rope_type": kind, "factor": 1e9} for kind in ("linear", "dynamic", "llama3", "yarn", "su")),
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 0, "high_freq_factor": 0},
    {"rope_type": "yarn", "factor": 4, "rope_theta": 1, "beta_fast": 0},
    {"rope_type": "yarn", "factor": 0, "original_max_position_embeddings": 1e-9},
]
KEYS = {
    "config.json": (
        "rope_theta rope_scaling rope_parameters sliding_window use_sliding_window max_window_layers "
        "layer_types quantization_config num_experts dual_chunk_attention_config partial_rotary_factor "
        "attention_bias original_max_position_embeddings"
    ),
    "generation_config.json": "temperature top_k top_p min_p max_new_tokens repetition_penalty do_sample",
    "tokenizer_config.json": "chat_template model_max_length auto_map added_tokens_decoder eos_token",
}


class Hang(BaseException):
    """The folder took longer than the limit."""


def write_base(folder: Path, hybrid: str | None = None) -> Path:
    """A tiny model with the tokenizer of the demo model. hybrid: one with states, in a format of HYBRIDS."""
    if hybrid is None:
        write_tiny_model(folder, vocab_size=512)
    else:
        source = write_tiny_model(
            folder.with_name(f"{folder.name}-plain"),
            hybrid if hybrid.startswith("lfm2") else "qwen3_5",
            vocab_size=512,
            **_SIZES,
        )
        HYBRIDS[hybrid](source, folder)
        shutil.rmtree(source)
    for path in Path(demo_model_path()).glob("tokenizer*.json"):
        shutil.copy(path, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": [1]}')
    return folder


def mutate(folder: Path, seed: int) -> str:
    """Change one file of a folder of `write_base`; return what was done."""
    rng = random.Random(seed)
    name = KINDS[seed % len(KINDS)]
    path = folder / name
    data = path.read_bytes()
    header, rest = data, b""
    if name == "model.safetensors":
        (length,) = struct.unpack("<Q", data[:8])
        header, rest = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.2:
        header, what = damaged(header, rng)
    else:
        content = json.loads(header)
        what = changed(content, KEYS.get(name, "").split(), rng)
        header = json.dumps(content).encode()
    size = len(header) if rng.random() < 0.9 else rng.choice([0, 1, 2**31, 2**63, 2**64 - 1])
    path.write_bytes((struct.pack("<Q", size) if name == "model.safetensors" else b"") + header + rest)
    return f"{name}: {what}"


def damaged(text: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The text cut, with a byte changed, or something else."""
    at = rng.randrange(len(text))
    choices = {
        "cut": text[:at],
        "a byte": text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :],
        "deep": b"[" * 100_000,
        "deep object": b'{"a":' * 100_000,
        "long number": b'{"vocab_size": ' + b"9" * 10_000 + b"}",
        "list": b"[]",
        "nothing": b"",
        "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    }
    what = rng.choice(list(choices))
    return choices[what], what


def changed(content: dict[str, Any], keys: list[str], rng: random.Random) -> str:
    """Change, add or remove a key of `content`, or of an object in it."""
    key = rng.choice([*content, *keys])
    if isinstance(content.get(key), dict) and rng.random() < 0.7:
        return f"{key}.{changed(content[key], [], rng)}" if content[key] else "nothing"
    if rng.random() < 0.1:
        content.pop(key, None)
        return f"no {key}"
    content[key] = rng.choice(VALUES)
    return f"{key}={content[key]!r:.80}"


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise Hang in the block after so many seconds."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(folder: Path, with_tokenizer: bool = True) -> str:
    """Load a folder and answer a prompt: "loaded" or "refused"; anything else is raised."""
    options = {"device": "cpu", "num_kvcache_blocks": 4, "max_num_seqs": 4}
    try:
        with within(LIMIT), LLM(folder, skip_tokenizer_init=not with_tokenizer, **options) as llm:
            prompts = ["a" if with_tokenizer else [5]]
            params = attempt(llm.get_default_sampling_params)
            if isinstance(params, SamplingParams):
                params.max_tokens = min(params.max_tokens or 4, 4)
                llm.generate(prompts, params, use_tqdm=False)
        return "loaded"
    except (ValueError, TypeError, ModelLoadError, KVCacheMemoryError) as error:
        message = str(error)
        names = (str(folder), "config", "the model does not fit", "KV cache")
        assert any(name in message for name in names), f"the message names nothing: {message}"
        assert len(message) < 20_000
        return "refused"


def mutate_hybrid(folder: Path, seed: int) -> str:
    """Change what config.json of a hybrid says of its states or of its quantisation."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    names = [name for name in content if name.startswith(_PREFIXES) or name in _OF_HYBRIDS]
    part = {name: content.pop(name) for name in names}
    what = changed(part, ["quantization_config"] * len(part), random.Random(seed))
    path.write_text(json.dumps(content | part))
    return f"config.json: {what}"


def try_folder(
    base: Path, work: Path, seed: int, mutate: Callable[[Path, int], str] = mutate
) -> tuple[str, str]:
    """Mutate a copy of `base` in `work` and load it; return what was done and the outcome."""
    shutil.copytree(base, work)
    try:
        what = mutate(work, seed)
        try:
            return what, outcome(work, what.startswith("tokenizer"))
        except (Exception, Hang) as error:
            raise AssertionError(f"seed {seed}, {what}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(work)
