"""GGUFCheckpoint: a model in GGUF files, with the names, shapes and settings that transformers gives it.

`gguf_file.py` reads the files, `gguf_tokenizer.py` makes the tokenizer. Refuses by name what it does not
know: an architecture, a setting, a type of tensors.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import xxhash

from nanovllm.errors import ModelLoadError
from nanovllm.formats.gguf import gemma, granite, hybrids, lfm2, olmo2, phi3
from nanovllm.formats.gguf.ends import ends
from nanovllm.formats.gguf.file import GGUFFile, GGUFTensor, all_tensors
from nanovllm.formats.gguf.keys import distinct, shortest
from nanovllm.formats.gguf.parts import models, parts
from nanovllm.formats.gguf.tokenizer import write_tokenizer
from nanovllm.models.registry import Checkpoint, T
from nanovllm.quantization.shards import WeightSource

# What reads files whose layers differ, or have names or settings of their own: see `hybrids.read`.
_FILES = (gemma, granite, hybrids, lfm2, olmo2, phi3)
_READERS = {name: each.read for each in _FILES for name in each.ARCHITECTURES}
_ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",  # whose every fourth layer has no rope; files do not state it
    **{name: family for each in _FILES for name, family in each.ARCHITECTURES.items()},
}
_PERMUTED = ("llama", "smollm3", *granite.ARCHITECTURES)  # rows of q and k
_WITHOUT_WINDOWS = ("smollm3", *granite.ARCHITECTURES)
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_EXPERTS = {  # the projections of all experts that a tensor holds, of an expert one after the other
    **{"ffn_gate_exps": ["gate_proj"], "ffn_up_exps": ["up_proj"], "ffn_down_exps": ["down_proj"]},
    "ffn_gate_up_exps": ["gate_proj", "up_proj"],
}
_MIXTRAL = {
    **{"mlp.gate.": "block_sparse_moe.gate.", "mlp.experts.": "block_sparse_moe.experts."},
    **{"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
}
_MAX_EXPERTS = 2**12
_NORMALISED = ("qwen3moe", *hybrids.ARCHITECTURES)  # the weights of a token's experts, if a file is silent
_FLOATS = ("F32", "F16", "BF16")
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# Settings that the families do not have, each with the values that turn them off.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv"), (0,)),
    **{"attention.causal": (True,), "attention.scale": (0,), "attention.max_alibi_bias": (0,)},
    **{"use_parallel_residual": (False,), "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1)},
    **dict.fromkeys(("expert_group_count", "leading_dense_block_count"), (0,)),
    **dict.fromkeys(("nextn_predict_layers", "attention.shared_kv_layers"), (0,)),
}
_SAMPLING = {
    **{"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"},
    "penalty_repeat": "repetition_penalty",
}


class GGUFCheckpoint(Checkpoint):
    """A .gguf file, one of the parts of a model that is split, or a folder with the files of one model."""

    states_ends = False

    @classmethod
    def reads(cls, path: Path) -> bool:
        if path.is_file():
            return path.suffix == ".gguf"
        return path.is_dir() and not any(path.glob("*.safetensors")) and bool(models(path))

    def config(self) -> dict[str, Any]:
        return _Config(self._files).read()

    def generation(self) -> dict[str, Any]:
        file = self._files[0]
        found: dict[str, Any] = {"eos_token_id": ends(file)}
        for key, name in _SAMPLING.items():
            if (value := file.metadata.get(f"general.sampling.{key}")) is not None:
                found[name] = shortest(value)
        return found

    def tokenizer(self, read: Callable[[Path], T]) -> T:
        with tempfile.TemporaryDirectory(prefix="nanovllm_gguf_") as folder:
            write_tokenizer(self._files[0], Path(folder))
            try:
                found = read(Path(folder))
            except ModelLoadError as error:
                raise ModelLoadError(str(error).replace(folder, str(self.path))) from error
        if hasattr(found, "name_or_path"):
            found.name_or_path = str(self.path)
        return found

    @contextmanager
    def tensors(self) -> Iterator[Mapping[str, WeightSource]]:
        config = _Config(self._files)
        renamed = (
            (stored, *item)
            for stored, tensor in config.tensors.items()
            for item in _renamed(stored, tensor, config).items()
        )
        yield distinct(config.file, renamed)

    def files(self) -> tuple[list[Path], list[Path]]:
        return [], [file.path for file in self._files]

    def fingerprint(self) -> str:
        headers = [xxhash.xxh3_128(file.header()).hexdigest() for file in self._files]
        return xxhash.xxh3_128(" ".join([super().fingerprint(), *headers]).encode()).hexdigest()

    @cached_property
    def _files(self) -> list[GGUFFile]:
        """All files of the model, the one with the settings first."""
        paths = parts(self.path)
        files = [GGUFFile(path) for path in paths]
        for index, file in enumerate(files):
            number, count = (file.scalar(key, int, 0) for key in ("split.no", "split.count"))
            if (number, count) != (index, len(files)) and (count, len(files)) not in ((0, 1), (1, 1)):
                raise file.problem(
                    f"it says that it is part {number} of {count} (split.no, split.count), and its name says "
                    f"{index} of {len(files)}; pass the first part, named *-00001-of-{count:05}.gguf"
                )
        stated = files[0].scalar("split.tensors.count", int, 0)
        total = sum(len(file.tensors) for file in files)
        if len(files) > 1 and stated not in (0, total):
            raise files[0].problem(f"split.tensors.count is {stated}, and the files have {total} tensors")
        return files


def _renamed(stored: str, tensor: GGUFTensor, config: _Config) -> dict[str, GGUFTensor]:
    """A tensor under its name in transformers; the experts of a layer, each under its own. A name that is not
    known stays, so that it is refused by it."""
    match = _TENSOR.fullmatch(stored)
    if match is None or stored == _ROPE_FACTORS:
        return {} if stored == _ROPE_FACTORS else {stored: tensor}
    layer, last, kind = match.groups()
    if layer is None:
        return {f"{_NAMES[last]}.{kind}" if last in _NAMES else stored: tensor}
    prefix, shape = f"model.layers.{int(layer)}.", tensor.shape
    if last in _EXPERTS and len(shape) == 3:
        if shape[0] > _MAX_EXPERTS:
            raise config.file.problem(f"tensor {stored!r} has {shape[0]} experts; at most {_MAX_EXPERTS}")
        names, rows = _EXPERTS[last], shape[1] // len(_EXPERTS[last])
        return {
            config.name(f"{prefix}mlp.experts.{index}.{name}.{kind}"): replace(
                expert, shape=(rows, shape[2]), raw=expert.raw[rows * number : rows * (number + 1)]
            )
            for index, expert in enumerate(tensor.parts())
            for number, name in enumerate(names)
        }
    if last not in _LAYER_NAMES:
        return {stored: tensor}
    if last == "ffn_gate_inp_shexp" and len(shape) == 1:
        tensor = tensor.reshaped((1, *shape))
    if last in ("attn_q", "attn_k") and config.permutes:
        tensor = tensor.ordered(config.order(stored, shape[0], "" if last == "attn_q" else "_kv"))
    return {config.name(f"{prefix}{_LAYER_NAMES[last]}.{kind}"): tensor}


class _Config:
    """config.json, made of the metadata and of the names of tensors."""

    def __init__(self, files: list[GGUFFile]) -> None:
        self.file = files[0]
        self.tensors = all_tensors(files)
        self._keys = self.file.metadata
        self._architecture = self.file.scalar("general.architecture", str)
        if self._architecture not in _ARCHITECTURES:
            raise self.file.problem(
                f"general.architecture {self._architecture!r} is not supported in GGUF files; supported: "
                f"{', '.join(_ARCHITECTURES)}"
            )
        self.permutes = self._architecture in _PERMUTED
        self._is_mixtral = self._architecture == "llama" and bool(self._get("expert_count"))
        self._more: dict[str, Any] = {}
        if reader := _READERS.get(self._architecture):
            self._keys, self.tensors, self._more = reader(self.file, self.tensors)

    def name(self, name: str) -> str:
        """The name of a tensor in the family of this model; Mixtral has others."""
        if self._is_mixtral and ".mlp." in name:
            for ours, other in _MIXTRAL.items():
                name = name.replace(ours, other)
        return name

    def order(self, name: str, rows: int, kind: str) -> np.ndarray:
        """The stored place of each row of a query or key: Llama's files have the two halves of each head
        interleaved."""
        heads = self._same(f"attention.head_count{kind}") or self._same("attention.head_count")
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            raise self.file.problem(f"tensor {name!r} has {rows} rows, which are not those of {heads} heads")
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def read(self) -> dict[str, Any]:
        """Numbers are checked by the family. ModelLoadError for a setting that is not supported."""
        for key, neutral in _NEUTRAL.items():
            if (value := self._get(key)) is not None and value not in neutral:
                raise self._refuse(key, value)
        embedding, heads = self.tensors.get("token_embd.weight"), self._same("attention.head_count")
        vocab_size = self._get("vocab_size") if embedding is None else embedding.shape[0]
        config = {
            "architectures": [self._family()],
            "vocab_size": vocab_size,
            "hidden_size": self._get("embedding_length"),
            "intermediate_size": self._same("feed_forward_length"),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._same("attention.head_count_kv") or heads,
            "head_dim": self._head_dim(heads),
            "rms_norm_eps": shortest(self._get("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": self._get("context_length"),
            "rope_theta": shortest(self._get("rope.freq_base") or 10000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in self.tensors,
            "hidden_act": "silu",
            "torch_dtype": self._dtype(),
            "bos_token_id": self._keys.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": ends(self.file) or None,
        }
        return config | self._window() | self._experts() | self._quantization() | self._more

    def _quantization(self) -> dict[str, Any]:
        """What quantised matrices are stored as, by their module. A projection of all experts of a layer is
        one tensor, named like experts.up_proj."""
        types: dict[str, str] = {}
        block = "block_sparse_moe" if self._is_mixtral else "mlp"
        for stored, tensor in self.tensors.items():
            match = _TENSOR.fullmatch(stored)
            if len(tensor.shape) == 1 or tensor.stored_as in _FLOATS:
                continue
            if match is None:
                if stored.startswith("model."):  # its name already
                    types[stored.removesuffix(".weight")] = tensor.kept_as
                continue
            layer, last, _ = match.groups()
            known = _NAMES if layer is None else _LAYER_NAMES
            names = [f"{block}.experts.{each}" for each in _EXPERTS.get(last, ())]
            for name in names or [known.get(last, last)]:
                types[name if layer is None else f"model.layers.{int(layer)}.{name}"] = tensor.kept_as
        return {"quantization_config": {"quant_method": "gguf", "types": types}} if types else {}

    def _get(self, key: str) -> Any:
        value = self._keys.get(f"{self._architecture}.{key}")
        if not isinstance(value, (int, float, str, NoneType)):
            raise self._refuse(key, "as a list")
        return value

    def _refuse(self, key: str, value: Any) -> ModelLoadError:
        return self.file.problem(f"{self._architecture}.{key} {value} is not supported")

    def _same(self, key: str) -> Any:
        """A number that may be given for each layer, and is the same for all."""
        value = self._keys.get(f"{self._architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return self._get(key)
        if not len(value) or (value != value[0]).any():
            raise self._refuse(key, f"{value[:8].tolist()}, not the same for all layers,")
        return value[0].item()

    def _family(self) -> str:
        if self._is_mixtral:
            return "MixtralForCausalLM"
        if self._architecture == "llama" and self._get("attention.sliding_window"):
            return "MistralForCausalLM"
        return _ARCHITECTURES[self._architecture]

    def _head_dim(self, heads: Any) -> Any:
        hidden = self._get("embedding_length")
        derived = hidden // heads if type(hidden) is type(heads) is int and heads > 0 else None
        head_dim = self._get("attention.key_length") or derived
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._get(key) not in (None, 0, head_dim):
                raise self._refuse(key, f"{self._get(key)}, not the size {head_dim} of a head,")
        return head_dim

    def _dtype(self) -> str:
        """What matrices are stored as, but for some that always are float32; bfloat16, of which most models
        are made, if they are quantised."""
        kinds = {each.stored_as for each in self.tensors.values() if len(each.shape) > 1} - {"F32"}
        return {"": "float32", "F16": "float16"}.get("".join(kinds), "bfloat16")

    def _window(self) -> dict[str, Any]:
        window = self._get("attention.sliding_window") or None
        if window and self._architecture in _WITHOUT_WINDOWS:
            raise self._refuse("attention.sliding_window", window)
        return {"sliding_window": window, "use_sliding_window": window is not None, "max_window_layers": 0}

    def _experts(self) -> dict[str, Any]:
        count = self._get("expert_count")
        if not count:
            return {}
        if self._is_mixtral:
            return {"num_local_experts": count, "num_experts_per_tok": self._get("expert_used_count")}
        layers = {int(match[1]) for match in map(_TENSOR.fullmatch, self.tensors) if match and match[1]}
        norm = self._get("expert_weights_norm")
        found = {
            "num_experts": count,
            "num_experts_per_tok": self._get("expert_used_count"),
            "moe_intermediate_size": self._get("expert_feed_forward_length"),
            "norm_topk_prob": self._architecture in _NORMALISED if norm is None else norm,
            "mlp_only_layers": [n for n in sorted(layers) if f"blk.{n}.ffn_gate.weight" in self.tensors],
            "decoder_sparse_step": 1,
        }
        shared = self._get("expert_shared_feed_forward_length")
        return found | ({"shared_expert_intermediate_size": shared} if shared else {})

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind, factor = self._get("rope.scaling.type"), self._get("rope.scaling.factor")
        original = self._get("rope.scaling.original_context_length")
        if _ROPE_FACTORS in self.tensors:
            if kind not in (None, "none"):
                raise self._refuse("rope.scaling.type", f"{kind} together with {_ROPE_FACTORS}")
            return self._llama3_scaling(self.tensors[_ROPE_FACTORS])
        if kind is None and (old := self._get("rope.scale_linear")) not in (None, 1):
            kind, factor = "linear", old
        if kind in (None, "none"):
            return None
        if kind not in ("linear", "yarn"):
            raise self._refuse("rope.scaling.type", kind)
        found = {"rope_type": kind, "factor": shortest(factor)}
        if kind == "linear":
            return found
        names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        found |= {key: shortest(self._get(f"rope.scaling.{name}")) for key, name in names.items()}
        if (stated := self._get("rope.scaling.yarn_attn_factor")) not in (None, 0, 1):
            found["attention_factor"] = shortest(stated)
        for key in ("attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
            if self._get(f"rope.scaling.{key}") not in (None, 0, 1):
                raise self._refuse(f"rope.scaling.{key}", self._get(f"rope.scaling.{key}"))
        return found | {"original_max_position_embeddings": original}

    def _llama3_scaling(self, tensor: GGUFTensor) -> dict[str, Any] | None:
        """The settings of Llama 3.1 that give these factors; ModelLoadError if none does."""
        factors = tensor[:].flatten().double().numpy()
        theta = self.file.scalar(f"{self._architecture}.rope.freq_base", float, 10000.0)
        if not theta > 0:
            raise self._refuse("rope.freq_base", theta)
        if (factors == 1).all():
            return None
        largest = round(float(np.nan_to_num(factors.max())), 6)
        wavelengths = 2 * math.pi * theta ** (np.arange(len(factors)) / max(1, len(factors)))
        for low, high, original in ((1.0, 4.0, 2.0**power) for power in range(10, 21)):
            smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
            if np.allclose(factors, 1 / ((1 - smooth) / max(largest, 1e-3) + smooth), rtol=1e-5, atol=0):
                return {
                    **{"rope_type": "llama3", "factor": largest, "low_freq_factor": low},
                    **{"high_freq_factor": high, "original_max_position_embeddings": int(original)},
                }
        raise self.file.problem(
            f"tensor {_ROPE_FACTORS!r} has factors that are not those of Llama 3.1 (rope type llama3 with "
            f"low_freq_factor 1 and high_freq_factor 4): {factors[:8].round(4).tolist()}, ..., {largest}"
        )
