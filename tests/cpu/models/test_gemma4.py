"""Gemma 4: layers whose heads differ share one cache, with all backends; and the rest of the family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checked_llm import make_tiny
from engine_cases import make_prompts, tokens
from safetensors.torch import load_file
from test_models import PROMPT, forward, load
from tiny_models import (
    MORE_FAMILIES,
    edit_json,
    transformers_answers,
    transformers_greedy,
    transformers_model,
    write_tiny_model,
)

from nanovllm import LLM, SamplingParams
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.batch import PADDING
from nanovllm.cpu import isa
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import load_model_config
from nanovllm.runner.memory import CacheLayout, attach
from nanovllm.windows.blocks import SlabPool
from nanovllm.windows.layout import TwoGroups

KINDS = ("gemma4", "gemma4-small")
ROPE = {"rope_type": "default", "rope_theta": 300.0}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
needs_kernels = pytest.mark.skipif(not isa.has_kernels(), reason="numba is not installed")


@needs_kernels
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ((24, 40), {"max_num_batched_tokens": 7, "num_kvcache_blocks": 12}),
        ((16, 32), {"kvcache_block_size": 3, "num_kvcache_blocks": 60, "enable_prefix_caching": False}),
    ],
)
def test_the_engine_with_cpu_kernels(
    tmp_path: Path, family: str, dims: tuple[int, int], options: dict[str, Any]
) -> None:
    sizes = dict(zip(("head_dim", "global_head_dim"), dims, strict=True))
    folder = write_tiny_model(tmp_path, family, **sizes)
    with make_tiny(folder, attention_backend="cpu", **options) as llm:
        found = [tokens(llm.generate(make_prompts(), GREEDY, use_tqdm=False)) for _ in range(2)]
    assert found == [transformers_answers(folder, make_prompts(), 10, found[0])] * 2


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs the engine over them")
@pytest.mark.parametrize("family", KINDS)
def test_the_engine_with_triton_kernels(tmp_path: Path, family: str) -> None:
    """In Triton's interpreter, with shared prefixes and a window shorter than a block."""
    folder = write_tiny_model(tmp_path, family, head_dim=24, global_head_dim=32)
    prompts, params = make_prompts()[3:7], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = [transformers_greedy(folder, prompt, 5) for prompt in prompts]
    options = {"attention_backend": "triton", "kvcache_block_size": 16, "max_num_batched_tokens": 17}
    with make_tiny(folder, num_kvcache_blocks=9, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [each["token_ids"] for each in outputs] == expected


@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("cpu", marks=[needs_kernels, pytest.mark.full]), "triton"]
)
def test_heads_of_256_and_512(tmp_path: Path, backend: str) -> None:
    folder = write_tiny_model(tmp_path, "gemma4", head_dim=256, global_head_dim=512)
    prompt = make_prompts()[4]
    with make_tiny(
        folder, attention_backend=backend, kvcache_block_size=16, num_kvcache_blocks=9, max_model_len=48
    ) as llm:
        [output] = llm.generate([prompt], replace(GREEDY, max_tokens=4), use_tqdm=False)
    assert output["token_ids"] == transformers_greedy(folder, prompt, 4)


def heads(window: tuple[int, int], full: tuple[int, int], kinds: str) -> list[AttentionSpec]:
    """By KV heads and head_dim of both kinds; kinds: "s" is a layer with a window, "f" one without."""
    specs = {"s": AttentionSpec(32, *window, window=1024), "f": AttentionSpec(32, *full)}
    return [specs[kind] for kind in kinds]


@pytest.mark.parametrize(
    ("specs", "layers", "cell", "parts", "pieces"),
    [
        (heads((16, 256), (4, 512), "sssssf" * 10), 50, 4096, 10, (2, 1)),  # Gemma 4 31B
        (heads((8, 256), (2, 512), "sssssf" * 10), 50, 2048, 10, (2, 1)),  # on two ranks
        (heads((1, 256), (1, 512), "ssssf" * 3), 6, 512, 2, (1, 2)),  # E2B, without layers that share
        (heads((2, 256), (2, 512), "sssssf" * 4), 12, 1024, 3, (1, 2)),  # E4B
        (heads((8, 256), (2, 512), "sssssf" * 5), 25, 2048, 10, (2, 1)),  # 26B-A4B
        (heads((2, 12), (1, 16), "ssf" * 2), 2, 48, 3, (3, 2)),
        (heads((2, 12), (1, 16), "sf"), 1, 40, None, (1, 1)),  # most of a slab would be unused
    ],
)
def test_the_layout_of_layers_whose_heads_differ(
    specs: list[AttentionSpec], layers: int, cell: int, parts: int | None, pieces: tuple[int, int]
) -> None:
    layout = CacheLayout.of(specs, 256, 128)
    two = isinstance(layout, TwoGroups)
    found = (layout.groups[0].per_slab, layout.pieces) if two else (None, (1, 1))
    assert (layout.layers, layout.cell, *found) == (layers, cell, parts, pieces)
    values = sum(spec.num_kv_heads * spec.head_dim for spec in specs)
    assert layers * cell >= values / (1 if parts is None else (parts + 1)), "a slab holds its blocks"


class Layer:
    """What `attach` needs of a layer."""

    def __init__(self, spec: AttentionSpec) -> None:
        from nanovllm.kernels.paged import KVCache

        self.spec, self.cache, self.group = spec, KVCache(torch.empty(0), torch.empty(0)), 0


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    "specs",
    [
        heads((2, 12), (1, 16), "ssf" * 2),
        heads((1, 8), (1, 16), "ssssf" * 2),
        heads((4, 8), (1, 16), "sssf"),
        heads((2, 8), (1, 16), "ssfssf"),
        heads((2, 12), (1, 16), "sf"),
    ],
)
def test_blocks_lie_in_their_slabs(specs: list[AttentionSpec], heads_first: bool) -> None:
    """Each cell of a layer's block belongs to this block alone, and to the slab that the pool has for it."""
    layout, slabs, page = CacheLayout.of(specs, 16, 1), 5, 3
    cache = torch.full(layout.shape(slabs, page), -1.0)
    layers = [Layer(spec) for spec in specs]
    attach(layers, cache, layout, heads_first)  # type: ignore[arg-type]
    pool = SlabPool(slabs, [each.per_slab for each in layout.groups], lambda _: None)
    for group in {*layout.group_of}:
        number = pool.offsets[group]
        names = np.arange(pool.offsets[group + 1] - number, dtype=np.int32)
        blocks = names
        if isinstance(layout, TwoGroups):
            blocks = layout.blocks_of(names, group, slabs)
            assert layout.blocks_of(np.array([PADDING], np.int32), group, slabs) == [PADDING]
        cache.fill_(-1)
        for layer in layers:
            if layer.group == group:
                for name, block in zip(names, blocks, strict=True):
                    for cells in layer.cache[:2]:
                        assert (cells[block] == -1).all(), "no other block lies there"
                        cells[block] = float(name)
                shape = (page, layer.spec.num_kv_heads, layer.spec.head_dim)
                assert layer.cache.k.shape[1:] == shape
                assert layer.cache.k.transpose(1, 2).is_contiguous() or not heads_first
        if isinstance(layout, TwoGroups):
            for slab in range(slabs):
                found = {int(each) for each in cache[:, :, slab].unique()} - {-1}
                assert found == {int(n) for n in names if (n + number) % slabs == slab}


@pytest.mark.parametrize("family", KINDS)
def test_new_weights_sleep_and_a_second_start(tmp_path: Path, family: str) -> None:
    first, second = (write_tiny_model(tmp_path / str(seed), family, seed=seed) for seed in (0, 5))
    with make_tiny(first, num_kvcache_blocks=20) as llm:
        for folder in (first, second):
            if folder == second:
                llm.update_weights(transformers_model(second).state_dict())
            for _ in range(2):
                [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
                assert output["token_ids"] == transformers_greedy(folder, PROMPT, 10)
                llm.sleep()
                llm.wake_up()


@pytest.mark.parametrize("family", KINDS)
def test_the_text_part_of_a_model_that_reads_images(tmp_path: Path, family: str) -> None:
    """Its file also has keys and values of layers that read those of others."""
    text = MORE_FAMILIES[family][2] | {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    text["pad_token_id"] = 0
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    state = model.state_dict()
    for layer in (5, 6) if family == "gemma4-small" else ():
        state[f"model.language_model.layers.{layer}.self_attn.k_proj.weight"] = torch.zeros(3)
    model.save_pretrained(tmp_path, state_dict=state)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(forward(load(tmp_path), PROMPT), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", [{"global_head_dim": 16, "num_global_key_value_heads": 1}, {}])
def test_sizes_by_the_names_of_the_published_files(tmp_path: Path, changes: dict[str, int]) -> None:
    """They have one pair of sizes for all layers without a window, newer ones each layer's."""
    folder = write_tiny_model(tmp_path, "gemma4")
    expected = load_model_config(folder)
    edit_json(folder / "config.json", remove=("per_layer_config",) if changes else (), **changes)
    config = load_model_config(folder)
    assert config.attention == expected.attention
    assert [(spec.num_kv_heads, spec.head_dim, spec.v_from_k) for spec in config.attention[1:3]] == [
        (2, 12, False),
        (1, 16, True),
    ]
    assert config.cached_values() == 2 * (4 * 24 + 2 * 16) and config.cached_values(2, far=True) == 2 * 2 * 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        (
            {"per_layer_config": {"2": {"sliding_window": 3}}},
            "per_layer_config must give head_dim and num_key",
        ),
        (
            {"per_layer_config": {"2": {"head_dim": 15}}},
            "layer 2 has 2 KV heads for 4 query heads, and a head",
        ),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers 6 leaves no full_attention and no sliding_atten"),
        (
            {"rope_parameters": {"full_attention": 3}},
            "rope_parameters must have an object for 'full_attention'",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": ROPE}},
            "rope_parameters must have a rope_theta for 'full_attention'",
        ),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50},
            "vocab_size_per_layer_input 50 must be at least vocab_size 97",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_tiny_model(tmp_path, "gemma4")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True)


@pytest.mark.parametrize("family", KINDS)
def test_prefill_in_two_halves(tmp_path: Path, family: str) -> None:
    """Two ranks split a step of 2,048 tokens or more."""
    folder = write_tiny_model(tmp_path, family)
    prompts = [[2 + (7 * row + 3 * place) % 90 for place in range(50 + row)] for row in range(40)]
    answers = []
    for ranks in (1, 2):
        options = {"tensor_parallel_size": ranks, "max_num_batched_tokens": 2200, "max_num_seqs": 40}
        with make_tiny(folder, num_kvcache_blocks=600, max_model_len=128, **options) as llm:
            outputs = llm.generate(prompts, replace(GREEDY, max_tokens=3), use_tqdm=False)
            assert max(len(batch.token_ids) for batch in llm.batches) >= 2048
            answers.append([each["token_ids"] for each in outputs])
    assert answers[0] == answers[1]


def test_the_text_part_of_the_unified_model(tmp_path: Path) -> None:
    """Gemma 4 12B, whose files embed images and sound without towers; its defaults are others."""
    text = MORE_FAMILIES["gemma4-unified"][2] | {"vocab_size": 97, "hidden_size": 32}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    text |= {"pad_token_id": 0, "intermediate_size": 48}
    vision = {"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8}
    config = transformers.Gemma4UnifiedConfig(
        text_config=text, vision_config=vision | {"output_proj_dims": 16}, audio_config={"audio_embed_dim": 8}
    )
    torch.manual_seed(0)
    model = transformers.Gemma4UnifiedForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(forward(load(tmp_path), PROMPT), expected, atol=1e-4, rtol=1e-4)
    file = tmp_path / "model.safetensors"
    others = [name for name in load_file(file) if "language_model" not in name]
    assert {name.split(".")[1] for name in others} >= {"vision_embedder", "embed_vision", "embed_audio"}
    edit_json(tmp_path / "config.json", text_config={})
    read = load_model_config(tmp_path)
    assert [spec.window for spec in read.attention[:6]] == [1024] * 5 + [None]
    assert (read.max_position_embeddings, read.layer_inputs) == (262144, None)
