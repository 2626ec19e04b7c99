"""Weights of 4 bits on a GPU: the compiled kernels, a row's bits, and answers of models in each format."""

from __future__ import annotations

from contextvars import copy_context
from pathlib import Path
from typing import Any

import int4_cases
import pytest
import torch
from int4_cases import NVFP4
from tensors import BF16, F16, randn
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.formats.int4.kernels.matmul import Int4Tile, choose_int4_tile, int4_linear
from nanovllm.formats.int4.kernels.values import dequantise
from nanovllm.kernels.compat import in_graph, multiprocessors
from nanovllm.kernels.matmul import linear
from tools.write_int4 import write_int4
from tools.write_nvfp4 import KINDS as NVFP4_KINDS
from tools.write_nvfp4 import write_nvfp4

pytestmark = pytest.mark.gpu

GPU = "cuda"
TILES = (
    Int4Tile(16, 128, warps=8, tma=False),
    Int4Tile(32, 64, stages=6),
    Int4Tile(64, 64, more=16, stages=3),
    Int4Tile(64, 128, more=32, warps=8, stages=3),
    Int4Tile(128, 64, stages=3),
    Int4Tile(256, 128, warps=8, stages=3),
)


@pytest.mark.parametrize(
    ("n", "k", "group", "dtype"),
    [
        *((70, 160, 32, F16), (200, 704, 64, BF16), (328, 1152, 128, BF16)),
        *((72, 144, NVFP4, F16), (328, 1168, NVFP4, BF16)),
    ],
)
def test_kernels(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    int4_cases.check_dequantise(n, k, group, dtype, GPU)
    for rows in (1, 97, 256):
        for tile in (None, *TILES, Int4Tile(16, 64, split=3, tma=False)):
            int4_cases.check_product(rows, n, k, group, dtype, GPU, tile)


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288)])
def test_deterministic_bits_are_those_of_the_dequantised_weight(n: int, k: int) -> None:
    """For any tile without a split, any number of rows, and any other rows."""
    weight, _ = int4_cases.make_weight(n, k, 128, BF16, GPU)
    dense = dequantise(weight.words, weight, BF16)
    x = randn(512, k, dtype=BF16, device=GPU)
    wanted = linear(x, dense)
    for rows in (1, 3, 16, 64, 97, 256, 512):
        for tile in (choose_int4_tile(rows, weight, multiprocessors(x.device), deterministic=True), *TILES):
            if tile is not None:
                assert torch.equal(int4_linear(x[:rows], weight, tile=tile), wanted[:rows]), (rows, tile)


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1024, 3088)])
def test_deterministic_bits_of_nvfp4(n: int, k: int) -> None:
    """A row's are the same with every tile without a split, any number of rows, and any other rows."""
    weight, _ = int4_cases.make_weight(n, k, NVFP4, BF16, GPU)
    x = randn(600, k, dtype=BF16, device=GPU)
    wanted = int4_linear(x, weight, tile=TILES[0])
    for rows in (1, 3, 16, 64, 97, 256, 600):
        for tile in (choose_int4_tile(rows, weight, multiprocessors(x.device), deterministic=True), *TILES):
            assert tile is not None
            assert torch.equal(int4_linear(x[:rows], weight, tile=tile), wanted[:rows]), (rows, tile)


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 131, 256, 512])
def test_in_a_graph(rows: int) -> None:
    weight, exact = int4_cases.make_weight(512, 1024, 128, BF16, GPU)
    x = randn(rows, 1024, dtype=BF16, device=GPU)

    def run() -> torch.Tensor:
        in_graph.set(True)
        return int4_linear(x, weight)

    copy_context().run(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = copy_context().run(run)
    for seed in (1, 2):
        x.copy_(randn(rows, 1024, dtype=BF16, device=GPU, seed=seed))
        graph.replay()
        int4_cases.assert_near(out, x.double() @ exact.T)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "awq"},
        {"format": "gptq", "group": 32, "act_order": True},
        {"format": "compressed-tensors", "group": -1, "symmetric": True},
        {"format": "modelopt"},
    ],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_are_the_cpus(tmp_path: Path, options: dict[str, Any], deterministic: bool) -> None:
    """The tokens are those that the CPU finds likeliest, or nearly."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 104}
    source = write_tiny_model(tmp_path / "dense", dtype="bfloat16", **sizes)
    if options["format"] in NVFP4_KINDS:
        folder, _ = write_nvfp4(source, tmp_path / "nvfp4", options["format"])
    else:
        folder = write_int4(source, tmp_path / "int4", scale_dtype=BF16, **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[7, 11, 13, 17], [19, 23]] * 20
    with LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, deterministic=deterministic) as llm:
        many = [each["token_ids"] for each in llm.generate(prompts, params, use_tqdm=False)]
        few = [each["token_ids"] for each in llm.generate(prompts[:1], params, use_tqdm=False)]
    assert all(tokens == many[index % 2] for index, tokens in enumerate(many))
    assert not deterministic or few[0] == many[0]
    texts = [
        prompt + tokens for prompt, tokens in zip([*prompts[:2], prompts[0]], [*many[:2], *few], strict=True)
    ]
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=1)
    with LLM(str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64) as llm:
        scored = llm.generate(texts, scoring, use_tqdm=False)
    gaps = [
        max(found.logprob for found in entry.values()) - entry[token].logprob
        for output in scored
        for token, entry in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[-12:]
    ]
    assert max(gaps) < 0.5 and sum(gaps) / len(gaps) < 0.05, gaps
