"""sleep, wake_up and update_weights on GPUs: the driver gets the memory back, and CUDA graphs read new
weights.

Also with two ranks where there are two GPUs.
"""

from __future__ import annotations

import random
from pathlib import Path

import inside
import pytest
import torch
from checked_llm import logits_of
from digests import DigestLLM
from needs import needs_kv_cache_dtype
from safetensors.torch import load_file
from tiny_models import edit_json, write_tiny_model

from nanovllm import KVCacheMemoryError, SamplingParams

pytestmark = pytest.mark.gpu

MIB = 2**20
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=24, ignore_eos=True)
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 32}
CACHE_DTYPES = ["auto", "fp8"]


@pytest.fixture(params=[1, 2])
def size(request: pytest.FixtureRequest) -> int:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"{request.param} ranks need as many GPUs")
    return request.param


@pytest.fixture(params=CACHE_DTYPES)
def cache_dtype(request: pytest.FixtureRequest) -> str:
    needs_kv_cache_dtype(request.param)
    return request.param


def small_model(folder: Path, seed: int) -> Path:
    return write_tiny_model(
        folder,
        "llama",
        seed=seed,
        dtype="bfloat16",
        vocab_size=1001,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=4096,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [small_model(tmp_path_factory.mktemp("model"), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(2, 1000) for _ in range(n)] for n in (300, 17, 1, 64, 257)]


def answers(llm: DigestLLM, prompts: list[list[int]]) -> tuple[torch.Tensor, list[list[int]]]:
    """The logits of the first prompt, and all tokens, greedy and sampled."""
    llm.reset_prefix_cache()
    params = [GREEDY, DRAWN, GREEDY, DRAWN, GREEDY]
    logits, _ = logits_of(llm, prompts, params, 0)
    llm.reset_prefix_cache()
    return logits, [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def check_same(one: tuple[torch.Tensor, list], other: tuple[torch.Tensor, list]) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1] == other[1]


@pytest.mark.parametrize("level", [1, 2])
def test_the_memory_goes_to_the_driver_and_comes_back(tmp_path: Path, size: int, level: int) -> None:
    small_model(tmp_path, 0)
    edit_json(tmp_path / "config.json", hidden_size=2048, intermediate_size=8192, vocab_size=50_000)
    options = OPTIONS | {"load_format": "dummy", "num_kvcache_blocks": 2000, "tensor_parallel_size": size}
    with DigestLLM(tmp_path, **options) as llm:
        sizes = zip(llm.on_ranks("weight_bytes"), llm.on_ranks("cache_bytes"), strict=True)
        wanted = [sum(both) for both in sizes]
        assert min(wanted) > 400 * MIB
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        tokens = [output["token_ids"] for output in llm.generate([[5, 6, 7]] * 32, params, use_tqdm=False)]
        inside.runner(llm).device.empty_cache()
        allocated, free, slept = torch.cuda.memory_allocated(), llm.on_ranks("free_bytes"), []
        for _ in range(3):
            llm.sleep(level)
            assert torch.cuda.memory_allocated() < allocated - 0.99 * wanted[0]
            slept.append(llm.on_ranks("free_bytes"))
            for now, before, held in zip(slept[-1], free, wanted, strict=True):
                assert now > before + 0.99 * held
            llm.wake_up()
            assert abs(torch.cuda.memory_allocated() - allocated) < 16 * MIB
            for now, before in zip(llm.on_ranks("free_bytes"), free, strict=True):
                assert abs(now - before) < 128 * MIB
            again = [output["token_ids"] for output in llm.generate([[5, 6, 7]] * 32, params, use_tqdm=False)]
            assert again == tokens
        for now, first in zip(slept[-1], slept[0], strict=True):  # no memory accumulates
            assert now > first - 16 * MIB


@pytest.mark.parametrize("level", [1, 2])
def test_answers_are_as_before(
    models: list[Path], prompts: list[list[int]], size: int, level: int, cache_dtype: str
) -> None:
    with DigestLLM(models[0], tensor_parallel_size=size, kv_cache_dtype=cache_dtype, **OPTIONS) as llm:
        before, weights = answers(llm, prompts), llm.on_ranks("digest")
        llm.sleep(level)
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        assert inside.runner(llm).graphs
        assert llm.on_ranks("digest") == weights
        check_same(answers(llm, prompts), before)


def test_an_update_is_a_fresh_load(
    models: list[Path], prompts: list[list[int]], size: int, cache_dtype: str
) -> None:
    """From tensors on the CPU and on a GPU. The graphs stay valid and use the new weights and scales."""
    options = OPTIONS | {"tensor_parallel_size": size, "kv_cache_dtype": cache_dtype}
    with DigestLLM(models[1], **options) as llm:
        expected, weights = answers(llm, prompts), llm.on_ranks("digest")
    new, old = (load_file(models[index] / "model.safetensors") for index in (1, 0))
    with DigestLLM(models[0], **options) as llm:
        before, graphs = answers(llm, prompts), dict(inside.runner(llm).graphs)
        assert graphs and before[1] != expected[1]
        llm.update_weights(new)
        assert llm.on_ranks("digest") == weights
        check_same(answers(llm, prompts), expected)
        llm.update_weights((name, tensor.cuda().float()) for name, tensor in old.items())
        check_same(answers(llm, prompts), before)
        assert inside.runner(llm).graphs == graphs
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.update_weights(new)
        llm.wake_up()
        check_same(answers(llm, prompts), expected)


def test_head_and_embedding_are_compared_on_the_gpu(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=True, dtype="bfloat16")
    both = torch.randn(97, 32, device="cuda", dtype=torch.bfloat16)
    with DigestLLM(folder, attention_backend="reference", **OPTIONS | {"max_model_len": 512}) as llm:
        llm.update_weights({"lm_head.weight": both, "model.embed_tokens.weight": both.cpu()})
        assert torch.equal(inside.model(llm).lm_head.method.weight, both)
        with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
            llm.update_weights({"lm_head.weight": both, "model.embed_tokens.weight": both + 1})


def test_a_full_device_is_named_and_can_be_emptied(models: list[Path], prompts: list[list[int]]) -> None:
    with DigestLLM(models[0], num_kvcache_blocks=4000, **OPTIONS) as llm:
        before = answers(llm, prompts)
        llm.sleep()
        free, _ = torch.cuda.mem_get_info()
        other = torch.empty(free - 256 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(KVCacheMemoryError, match=r"no room to wake up on rank 0: .* GiB are needed"):
            llm.wake_up()
        assert llm.is_sleeping()
        del other
        llm.wake_up()
        check_same(answers(llm, prompts), before)
