"""GGUF files of Qwen3-Next and Qwen3.5: what their writers rename, reorder and change in layers with states.

Each part of a stored matrix becomes the model's own tensor, whose rows or columns are found in place, so
blocks can stay as they are stored. Refuses by name what does not fit; opens no file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nanovllm.formats.gguf.file import GGUFFile, GGUFTensor
from nanovllm.formats.gguf.keys import Keys, changed, distinct, less_1

ARCHITECTURES = {
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
}
_LINEAR, _FULL = "linear_attention", "full_attention"
_MODULES = {_FULL: "attn_q", _LINEAR: "ssm_out"}  # that only layers of a kind have
_STORED = re.compile(r"blk\.(\d{1,9})\.(.+)")
_SUPER = 256  # values of a block that has several groups
_NORMS = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")  # are stored + 1
Part = tuple[str, np.ndarray]  # the module of a part of a stored matrix, and the stored place of its rows


@dataclass(frozen=True, eq=False)
class _Columns(GGUFTensor):
    """A matrix with its columns in another order."""

    columns: np.ndarray = field(kw_only=True)  # the stored place of each

    @property
    def kept_as(self) -> str:
        """Half blocks can move where those of a block have numbers of their own."""
        block, _ = self._block()
        if self.factor is not None or self._moves_in(block):
            return super().kept_as
        halves = block == _SUPER and self._moves_in(block // 2)
        return f"{self.stored_as} {'in halves' if halves else 'across heads'}"

    def _moves_in(self, size: int) -> bool:
        """Whether columns move in runs of this size that begin at multiples of it."""
        starts = self.columns[::size]
        whole = len(starts) * size == len(self.columns) and not (starts % size).any()
        return whole and bool((self.columns == (starts[:, None] + np.arange(size)).flatten()).all())

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        columns = self.columns[rest[0]] if rest else self.columns
        return super().__getitem__(first)[:, torch.from_numpy(columns)]

    def blocks(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All blocks of rows, and the places of those of the columns, which are blocks or halves."""
        block, _ = self._block()
        size = block if self._moves_in(block) else block // 2
        stored, _ = super().blocks(rows, slice(0, self.shape[1]))
        return stored, torch.from_numpy(self.columns[columns][::size] // size)


def read(
    file: GGUFFile, tensors: dict[str, GGUFTensor]
) -> tuple[dict[str, Any], dict[str, GGUFTensor], dict[str, Any]]:
    """The metadata as those of a model whose layers all have attention; the tensors, those of layers with
    states by the model's own names; and what config.json says besides.

    ModelLoadError for missing numbers, for layers of no known kind, and matrices of other sizes.
    """
    reader = _Reader(file, tensors)
    renamed = (
        (stored, *item) for stored, each in tensors.items() for item in reader.renamed(stored, each).items()
    )
    return reader.keys, distinct(file, renamed), reader.settings()


class _Reader(Keys):
    """The sizes of one file, and the order of rows that follows from them."""

    def __init__(self, file: GGUFFile, tensors: dict[str, GGUFTensor]) -> None:
        super().__init__(file, tensors)
        self._tiled = self._architecture != "qwen3next"  # the value heads of a key head are no neighbours
        self._k_heads, self._v_heads, self._k_dim = (
            self._count(f"ssm.{key}") for key in ("group_count", "time_step_rank", "state_size")
        )
        inner = self._count("ssm.inner_size")
        if self._v_heads % self._k_heads or inner % self._v_heads:
            raise self._file.problem(
                f"{self._architecture}.ssm.time_step_rank {self._v_heads}, the heads of values, must be a "
                f"multiple of ssm.group_count {self._k_heads}, those of keys, and divide ssm.inner_size "
                f"{inner}"
            )
        self._v_dim, self._ratio = inner // self._v_heads, self._v_heads // self._k_heads
        self._heads = self._same("attention.head_count")
        self._layers = self._count("block_count") - file.scalar(self._key("nextn_predict_layers"), int, 0)
        names = filter(None, map(_STORED.fullmatch, tensors))
        layers = {int(match[1]) for match in names}
        if not 0 < self._layers <= len(layers):
            raise file.problem(
                f"{self._key('block_count')} and nextn_predict_layers say that it has {self._layers} layers, "
                f"and the file has {len(layers)}; use the files of one model"
            )
        self._kinds = [self._kind(layer, _MODULES) for layer in range(self._layers)]

    @property
    def keys(self) -> dict[str, Any]:
        """The metadata, in which all layers are alike."""
        changed: dict[str, Any] = {
            **{"block_count": self._layers, "nextn_predict_layers": 0, "rope.dimension_count": None},
            "attention.head_count": self._heads,
            "attention.head_count_kv": self._same("attention.head_count_kv"),
        }
        return self._file.metadata | {self._key(key): value for key, value in changed.items()}

    def settings(self) -> dict[str, Any]:
        """What config.json says of layers with states, and what the writer leaves out."""
        full = [f"blk.{layer}.attn_q.bias" for layer, kind in enumerate(self._kinds) if kind == _FULL]
        found: dict[str, Any] = {
            "layer_types": self._kinds,
            "attention_bias": any(name in self._tensors for name in full),
            "linear_num_key_heads": self._k_heads,
            "linear_num_value_heads": self._v_heads,
            "linear_key_head_dim": self._k_dim,
            "linear_value_head_dim": self._v_dim,
            "linear_conv_kernel_dim": self._count("ssm.conv_kernel"),
        }
        head_dim = self._file.scalar(self._key("attention.key_length"), int)
        if rotated := self._file.scalar(self._key("rope.dimension_count"), int, 0):
            head_dim = head_dim or self._count("embedding_length") // self._heads
            found["partial_rotary_factor"] = _share(rotated, head_dim)
        width = self._file.scalar(self._key("expert_feed_forward_length"), int)
        if width and self._file.metadata.get(self._key("feed_forward_length")) is None:
            found["intermediate_size"] = width  # of layers without experts, of which there are none
        shared = self._tensors.get("blk.0.ffn_up_shexp.weight")
        return found | ({"shared_expert_intermediate_size": shared.shape[0]} if shared is not None else {})

    def renamed(self, stored: str, tensor: GGUFTensor) -> dict[str, GGUFTensor]:
        """A tensor under the model's names, or the name that it has in a file of other layers."""
        match = _STORED.fullmatch(stored)
        last, _, kind = (stored if match is None else match[2]).partition(".")
        layer = int(match[1]) if match is not None else 0
        if layer >= self._layers:  # of speculation
            return {}
        if last in _NORMS and kind == "weight":
            return {stored.replace("post_attention_norm", "ffn_norm"): less_1(tensor)}
        if match is None:
            return {stored: tensor}
        if last == "ffn_norm":
            raise self._file.problem(f"tensor {stored!r} is none of {self._architecture}")
        prefix = f"model.layers.{layer}."
        if self._kinds[layer] == _FULL:
            if last != "attn_q":
                return {stored: tensor}
            parts = self._parts(stored, tensor, self._queries(tensor))
            return {f"{prefix}self_attn.{name}.{kind}": part for name, part in parts.items()}
        found = self._of_state(stored, tensor, match[2])
        return {
            (f"{prefix}linear_attn.{name}" if found is not None else stored): part
            for name, part in (found or {"": tensor}).items()
        }

    def _of_state(self, stored: str, tensor: GGUFTensor, last: str) -> dict[str, GGUFTensor] | None:
        """A tensor of a layer with a state by names below it; None: of its MLP, or unknown."""
        values = self._values(1)
        if last == "ssm_norm.weight":
            return {"norm.weight": tensor}
        if last == "ssm_dt.bias":
            return self._parts(stored, tensor, [("dt_bias", values)])
        if last == "ssm_a":
            [(name, part)] = self._parts(stored, tensor, [("A_log", values)]).items()
            return {name: changed(part, self._log, part.shape)}
        if last == "ssm_out.weight":
            columns = self._values(self._v_dim)
            if len(tensor.shape) != 2 or tensor.shape[1] != len(columns):
                raise self._sizes(stored, tensor, f"{len(columns)} columns")
            return {"out_proj.weight": _Columns(**vars(tensor), columns=columns)}
        if last == "ssm_conv1d.weight":
            if len(tensor.shape) != 2:
                raise self._sizes(stored, tensor, "two dimensions")
            taps = [(f"conv_{name[-1]}", rows) for name, rows in self._qkv()]
            return {
                f"{name}.weight": changed(
                    part, lambda weight: weight[:, None], (part.shape[0], 1, part.shape[1])
                )
                for name, part in self._parts(stored, tensor, taps).items()
            }
        known = {
            "attn_qkv.weight": self._qkv,
            "attn_gate.weight": lambda: [("in_proj_z", self._values(self._v_dim))],
            "ssm_in.weight": self._by_key_head,
            "ssm_ba.weight": self._gates_by_key_head,
            "ssm_beta.weight": lambda: [("in_proj_b", values)],
            "ssm_alpha.weight": lambda: [("in_proj_a", values)],
        }
        if last not in known:
            return None
        parts = self._parts(stored, tensor, known[last]())
        return {f"{name}.weight": part for name, part in parts.items()}

    # -- orders of rows --------------------------------------------------------------------------------------

    def _values(self, size: int) -> np.ndarray:
        """The stored place of each row of all value heads, of `size` rows each. Qwen3.5's files hold the
        first value head of every key head, then the second ones."""
        head = np.arange(self._v_heads)
        if self._tiled:
            head = head % self._ratio * self._k_heads + head // self._ratio
        return (head[:, None] * size + np.arange(size)).flatten()

    def _qkv(self) -> list[Part]:
        keys = self._k_heads * self._k_dim
        values = 2 * keys + self._values(self._v_dim)
        return [
            ("in_proj_q", np.arange(keys)),
            ("in_proj_k", np.arange(keys, 2 * keys)),
            ("in_proj_v", values),
        ]

    def _by_key_head(self) -> list[Part]:
        """Of older files of Qwen3-Next: q, k, v and z of a key head, then those of the next one."""
        values = self._ratio * self._v_dim
        sizes = {"in_proj_q": self._k_dim, "in_proj_k": self._k_dim, "in_proj_v": values, "in_proj_z": values}
        return _grouped(self._k_heads, sizes)

    def _gates_by_key_head(self) -> list[Part]:
        return _grouped(self._k_heads, {"in_proj_b": self._ratio, "in_proj_a": self._ratio})

    def _queries(self, tensor: GGUFTensor) -> list[Part]:
        """Each head's query, then its gate."""
        size = tensor.shape[0] // (2 * self._heads)
        return _grouped(self._heads, {"q_proj": size, "g_proj": size})

    def _parts(self, stored: str, tensor: GGUFTensor, parts: list[Part]) -> dict[str, GGUFTensor]:
        rows = sum(len(order) for _, order in parts)
        if tensor.shape[0] != rows or len(tensor.shape) > 2:
            raise self._sizes(stored, tensor, f"{rows} rows")
        rest = tensor.shape[1:]
        return {name: tensor.ordered(order).reshaped((len(order), *rest)) for name, order in parts}

    def _log(self, a: torch.Tensor) -> torch.Tensor:
        """A_log of a stored -exp(A_log)."""
        if not (a.isfinite() & (a <= 0)).all():
            raise self._file.problem(f"ssm_a must be -exp(A_log), finite and below 0, not {a[:8].tolist()}")
        return (-a).double().log().float()

    def _sizes(self, stored: str, tensor: GGUFTensor, needed: str) -> Exception:
        return self._file.problem(
            f"tensor {stored!r} has the shape {tensor.shape}, and {needed} are needed for {self._k_heads} "
            f"key heads of {self._k_dim}, {self._v_heads} value heads of {self._v_dim} and {self._heads} "
            "queries"
        )


def _grouped(groups: int, sizes: dict[str, int]) -> list[Part]:
    """Parts of a tensor in which each of `groups` equal ranges of rows has `sizes` rows of each part."""
    width, start, found = sum(sizes.values()), 0, []
    for name, size in sizes.items():
        found.append((name, (np.arange(groups)[:, None] * width + start + np.arange(size)).flatten()))
        start += size
    return found


def _share(rotated: int, head_dim: int) -> float:
    """What times head_dim is `rotated`, or not much more."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else float(np.nextafter(share, 2))
