"""The scales of an FP8 KV cache that files hold: used with kv_cache_dtype="fp8", split, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import make_tiny
from digests import make_digest
from odd_files import edit_quantization, edit_tensors
from safetensors.torch import load_file
from tiny_models import write_tiny_model

from nanovllm import ModelLoadError, SamplingParams
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights
from tools.write_nvfp4 import write_nvfp4

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "attention_backend": "reference"}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
K, V = "model.layers.{}.self_attn.k_proj.k_scale", "model.layers.{}.self_attn.v_proj.v_scale"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), "qwen3", **SIZES)


def with_scales(plain: Path, target: Path, kind: str, scales: dict[str, torch.Tensor]) -> Path:
    folder, _ = write_nvfp4(plain, target, kind)
    edit_quantization(folder, kv_cache_scheme=SCHEME)
    return edit_tensors(folder, lambda t: t.update(scales))


def scales_of(llm: Any) -> list[tuple[list[float], list[float]]]:
    caches = [layer.cache for layer in inside.model(llm).attention_layers]
    return [(cache.k_scale.tolist(), cache.v_scale.tolist()) for cache in caches]


def test_scales_of_layers(plain: Path, tmp_path: Path) -> None:
    """ModelOpt's, one for each layer; an update of the weights makes new ones, and a reload these again."""
    scales = {K.format(0): 0.5, K.format(1): 0.25, V.format(0): 2.0, V.format(1): 1.5}
    made = {name: torch.tensor(value) for name, value in scales.items()}
    folder = with_scales(plain, tmp_path / "nvfp4", "modelopt", made)
    with make_digest(folder, **FP8) as llm:
        heads = inside.model(llm).attention_layers[0].spec.num_kv_heads
        wanted = [([0.5] * heads, [2.0] * heads), ([0.25] * heads, [1.5] * heads)]
        assert scales_of(llm) == wanted
        before = llm.on_ranks("digest")
        llm.sleep(2)
        llm.wake_up()
        assert llm.on_ranks("digest") == before
        llm.update_weights(load_file(folder / "model.safetensors").items())
        assert scales_of(llm) != wanted
        llm.sleep(2)
        llm.wake_up()
        assert scales_of(llm) == wanted
    with make_tiny(folder) as llm:  # whose cache is in the model's dtype
        assert inside.model(llm).attention_layers[0].cache.k_scale is None
        llm.generate([[5, 6, 7]], SHORT, use_tqdm=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_scales_of_heads(plain: Path, tmp_path: Path, ranks: int) -> None:
    """compressed-tensors' strategy attn_head; of a layer without scales they are computed."""
    heads = load_model_config(plain).attention[0].num_kv_heads
    names = {name: f"model.layers.1.self_attn.{name}_scale" for name in "kv"}
    made = {name: torch.arange(1.0, 1 + heads).bfloat16().view(-1, 1, 1) for name in names.values()}
    folder = with_scales(plain, tmp_path / "nvfp4", "nvfp4", made)
    with make_tiny(folder, tensor_parallel_size=ranks, **FP8) as llm:
        computed, stated = scales_of(llm)
        own = [float(each) for each in range(1, 1 + heads // ranks)]
        assert stated == (own, own) and len(set(computed[0])) == len(own) and computed[0][0] < 0.5


def test_scales_of_another_cache(plain: Path, tmp_path: Path) -> None:
    """Those of a cache in NVFP4 or INT8 have another meaning, and are left out."""
    scales = {name.format(index): torch.tensor(3.0) for name in (K, V) for index in range(2)}
    for kind, other in (("modelopt", "NVFP4"), ("nvfp4", SCHEME | {"type": "int"})):
        folder = with_scales(plain, tmp_path / kind, kind, scales)
        edit_quantization(folder, kv_cache_scheme=other)
        config = load_model_config(folder)
        check_weights(config, folder)
        assert "a KV cache that is not in FP8 are not used" in " ".join(config.quant.notes)
        with make_tiny(folder, **FP8) as llm:
            assert 3.0 not in scales_of(llm)[0][0]


@pytest.mark.parametrize("values", [[0.0], [float("nan")], [1.0, 2.0, 3.0]])
def test_scales_that_are_refused(plain: Path, tmp_path: Path, values: list[float]) -> None:
    folder = with_scales(plain, tmp_path, "modelopt", {K.format(1): torch.tensor(values)})
    with pytest.raises(
        ModelLoadError, match=r"layers\.1\.self_attn\.k_proj\.k_scale has \[.*auto' needs none"
    ):
        make_tiny(folder, **FP8)
