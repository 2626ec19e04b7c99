"""FP8 weights on a GPU that multiplies FP8 values: kernels against references, engines, updates, bits."""

from __future__ import annotations

import random
from pathlib import Path

import fp8_cases
import pytest
import torch
from checked_llm import CheckedLLM, logits_of
from digests import DigestLLM
from fp8_models import tensors_of
from tensors import BF16, F16, F32
from tiny_models import write_tiny_model

from nanovllm import SamplingParams
from nanovllm.formats.fp8.kernels.values import GROUP
from nanovllm.moe.kernels.grouped_matmul import choose_experts
from tools.write_fp8 import SCALES, write_fp8

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FP8, reason="needs a GPU that multiplies FP8 values"),
]

GPU = "cuda"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": 32, "num_kvcache_blocks": 64}
PROMPTS = [[random.Random(n).randrange(2, 97) for _ in range(n)] for n in (3, 40, 97, 7, 1)]


@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 97, 256])
def test_rows_in_fp8(rows: int, dtype: torch.dtype, group: int | None) -> None:
    for columns in (48, 200, 4096, 12288):
        fp8_cases.check_rows(rows, columns, group, GPU, dtype)


@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("rows", [0, 1, 3, 97, 256])
def test_products(rows: int, group: int | None) -> None:
    fp8_cases.check_linear(rows, (200, 336), group, GPU, full=True)
    fp8_cases.check_linear(rows, (1536, 1024), group, GPU)
    fp8_cases.check_linear(rows, (72, 64), group, GPU, group_rows=1)


@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("shape", [(256, 208), (1536, 1024), (6144, 4096)])
def test_fused_vector_products(rows: int, shape: tuple[int, int], group: int | None) -> None:
    fp8_cases.check_gemv(rows, shape, group, GPU)


@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("shape", [(1024, 2048), (200, 336)])
def test_rows_of_a_product_are_independent(shape: tuple[int, int], group: int | None) -> None:
    fp8_cases.check_rows_are_independent(shape, group, GPU)


@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("rows", [1, 3, 97, 256])
def test_experts(rows: int, group: int | None) -> None:
    for pairs in (1, 100, 1000):
        choice = choose_experts(pairs, 5, BF16, torch.device(GPU, 0))
        fp8_cases.check_experts(rows, group, GPU, choice)


@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("sizes", [(272, 144), (2048, 768)])
def test_rows_of_experts_are_independent(sizes: tuple[int, int], group: int | None) -> None:
    """With every tile, of few pairs (transposed) and of many."""
    choices = [choose_experts(pairs, 5, BF16, torch.device(GPU, 0)) for pairs in (1, 100, 400, 10_000)]
    assert len({choice.rows for choice in choices}) == len(choices)
    counts = [1, 2, 16, 97, 256, 1000]
    fp8_cases.check_rows_of_experts_are_independent(counts, sizes, group, GPU, choices)


def model(folder: Path, seed: int = 0) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}
    return write_tiny_model(folder, seed=seed, dtype="bfloat16", **sizes)


def first_logits(folder: Path, **options: object) -> torch.Tensor:
    """The logits [24, vocabulary] of the first tokens of as many prompts, each run alone.

    After them a batch decodes, so that graphs run too.
    """
    prompts = [[random.Random(1000 + i).randrange(2, 97) for _ in range(3 + 5 * i)] for i in range(24)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with CheckedLLM(folder, **OPTIONS | options) as llm:  # type: ignore[operator]
        found = torch.cat([logits_of(llm, [prompt], [one], 0)[0].float() for prompt in prompts])
        answers = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert all(len(answer["token_ids"]) == GREEDY.max_tokens for answer in answers)
        return found


@pytest.mark.parametrize("kind", [*SCALES, "fly"])
def test_engines_are_near_bf16(tmp_path: Path, kind: str) -> None:
    """The mean of 24 rows: one row of a tiny random model is 0.08 to 0.2 away, the mean of 120 rows 0.126."""
    plain = model(tmp_path / "plain")
    asked = "fp8" if kind == "fly" else None
    folder = plain if kind == "fly" else write_fp8(plain, tmp_path / kind, kind)
    exact = first_logits(plain)
    for eager in (False, True):
        near = first_logits(folder, quantization=asked, enforce_eager=eager)
        assert 0.05 < ((near - exact).norm(dim=1) / exact.norm(dim=1)).mean() < 0.14


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_deterministic_answers_do_not_depend_on_the_batch(tmp_path: Path, kind: str) -> None:
    folder = write_fp8(model(tmp_path / "plain"), tmp_path / kind, kind)
    with CheckedLLM(folder, deterministic=True, kvcache_block_size=16, **OPTIONS) as llm:
        alone, _ = logits_of(llm, PROMPTS[1:2], [GREEDY], 0)
        among, _ = logits_of(llm, PROMPTS * 5, [GREEDY] * 5 * len(PROMPTS), 1)
        assert torch.equal(alone, among)


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_deterministic_answers_of_experts(tmp_path: Path, kind: str) -> None:
    """As above. The batches take other tiles for the products of experts."""
    sizes = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    plain = write_tiny_model(tmp_path / "plain", "qwen3_moe", dtype="bfloat16", **sizes)
    folder = write_fp8(plain, tmp_path / kind, kind)
    with CheckedLLM(folder, deterministic=True, kvcache_block_size=16, **OPTIONS) as llm:
        alone, _ = logits_of(llm, PROMPTS[1:2], [GREEDY], 0)
        among, _ = logits_of(llm, PROMPTS * 5, [GREEDY] * 5 * len(PROMPTS), 1)
        assert torch.equal(alone, among)


@pytest.mark.parametrize("kind", ["channel", "block", "fly"])
def test_an_update_is_a_fresh_load(tmp_path: Path, kind: str) -> None:
    """Bit for bit, with CUDA graphs that were captured before."""
    first, second = model(tmp_path / "a"), model(tmp_path / "b", seed=1)
    asked, tensors = "fp8" if kind == "fly" else None, tensors_of(second)
    if kind != "fly":
        first, second = (write_fp8(each, tmp_path / f"{each.name}8", kind) for each in (first, second))

    def answers(llm: DigestLLM) -> list[list[int]]:
        llm.reset_prefix_cache()
        return [out["token_ids"] for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    with DigestLLM(second, quantization=asked, **OPTIONS) as llm:
        fresh, expected = llm.on_ranks("digest"), answers(llm)
    with DigestLLM(first, quantization=asked, **OPTIONS) as llm:
        before = llm.on_ranks("digest")
        assert answers(llm) != expected
        llm.update_weights({name: tensor.to(GPU) for name, tensor in tensors.items()})
        assert llm.on_ranks("digest") == fresh and answers(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.on_ranks("digest") == before
        llm.update_weights(tensors_of(second))
        assert llm.on_ranks("digest") == fresh and answers(llm) == expected
