"""States in bfloat16: half of the memory; log-probabilities near those of transformers in every schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import make_tiny
from test_hybrids import HYBRIDS, PROMPTS
from tiny_models import transformers_logits, write_tiny_model

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.models.registry import load_model_config
from nanovllm.report.roofline import Cost
from nanovllm.states.spec import StateSpec, most_seqs, num_kept, num_rows, pool_bytes

SPEC = StateSpec(2, 6, 16, 32, 4)
SPEC16 = replace(SPEC, dtype=torch.bfloat16)
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
# Of log-probabilities, on average over an answer. States in float32 are below the first one.
EXACT, NEAR = 1e-4, 0.02


def errors(folder: Path, prompts: list[list[int]], outputs: list[Any]) -> list[float]:
    """How far the logprobs of each completion are from transformers' in float32, on average."""
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            tokens = list(completion.token_ids)
            expected = transformers_logits(folder, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
            own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            pairs = zip(completion.logprobs, tokens, strict=True)
            found.append(
                (torch.tensor([row[token].logprob for row, token in pairs]) - own).abs().mean().item()
            )
    return found


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_dtype_of_states(tmp_path: Path, dtype: str) -> None:
    """Also after a kept state, from which the second prompt begins."""
    folder = write_tiny_model(tmp_path, "qwen3_5")
    with make_tiny(
        folder, mamba_ssm_cache_dtype=dtype, max_num_batched_tokens=16, max_model_len=96, max_num_seqs=8
    ) as llm:
        for prompt in (PROMPTS[0], [*PROMPTS[0], 5]):
            [error] = errors(folder, [prompt], llm.generate([prompt], PARAMS, use_tqdm=False))
            assert EXACT < error < NEAR if dtype == "bfloat16" else error < EXACT
        assert [seq.num_cached_tokens for seq in llm.sequences] == [0, 45]
        own = SPEC16 if dtype == "bfloat16" else SPEC
        for layer in inside.model(llm).state_layers:
            assert layer.pool.dtype == own.dtype and layer.conv_pool.dtype == torch.float32
            size = layer.pool.nbytes + layer.conv_pool.nbytes
            assert size == layer.state_bytes(8) == num_rows(8) * own.row_bytes(4)


@pytest.mark.parametrize(
    ("family", "options", "near"),
    [
        ("qwen3_5_moe", {}, 0.1),  # a token may have another expert
        ("qwen3_next", {"max_num_batched_tokens": 7}, NEAR),
        ("qwen3_5", {"num_kvcache_blocks": 20, "max_num_seqs": 4, "max_model_len": 96}, NEAR),
        ("qwen3_5", {"tensor_parallel_size": 2}, NEAR),
        ("qwen3_5", {"dtype": "bfloat16"}, 0.2),
    ],
    ids=["experts", "chunks", "preempted", "ranks", "bfloat16"],
)
def test_states_in_bfloat16(tmp_path: Path, family: str, options: dict[str, Any], near: float) -> None:
    """Prompts that begin alike, two completions of each, and again after sleep."""
    folder = write_tiny_model(tmp_path, family)
    prompts, params = PROMPTS[:3], SamplingParams(n=2, max_tokens=24, ignore_eos=True, logprobs=0)
    with make_tiny(folder, mamba_ssm_cache_dtype="bfloat16", **options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found = errors(folder, prompts, outputs)
            assert len(found) == 6 and max(found) < near
            assert min(found) > EXACT
            llm.sleep()
            llm.wake_up()
        if "max_model_len" in options:
            assert any(seq.num_preemptions for seq in llm.sequences)
        if "dtype" in options:
            assert {each.pool.dtype for each in inside.model(llm).state_layers} == {torch.bfloat16}


def test_a_reset_forgets_how_chats_go_on(tmp_path: Path) -> None:
    """A chat that goes on shows which tokens a template does not repeat, and states are kept, and rounded,
    before these. Behind a reset the same prompt has the bits that it had in a new engine."""
    begin, opening = [3 + 7 * index % 83 for index in range(40)], [11, 12]
    goes_on = [*begin, 20, 21, 22, *begin[::-1], *opening]
    folder, room = write_tiny_model(tmp_path, "qwen3_5"), {"max_model_len": 128, "num_kvcache_blocks": 60}
    with make_tiny(folder, mamba_ssm_cache_dtype="bfloat16", **room) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)

        def answers() -> list[Any]:
            prompts = ([*begin, *opening], goes_on, [*goes_on[5:]])
            return [llm.generate([each], params, use_tqdm=False)[0].outputs[0].logprobs for each in prompts]

        first = answers()
        assert llm.reset_prefix_cache()
        assert answers() == first


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_counts_the_memory(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the door's page: doctor, the sequences that run at once, and the bytes of a step in a report."""
    folder = write_tiny_model(tmp_path, family)
    model, device = load_model_config(folder), Device("cpu")
    layers = sum(spec.state is not None for spec in map(model.spec, range(model.num_layers)))
    halves = Config("m", max_num_seqs=5, dtype="float32", mamba_ssm_cache_dtype="bfloat16")
    assert SPEC16.row_bytes(4) == 2 * 6 * 16 * 32 + 4 * 3 * (2 * 2 * 16 + 6 * 32)
    assert pool_bytes(halves, model, device) == layers * num_rows(5) * SPEC16.row_bytes(4)
    monkeypatch.setattr("nanovllm.states.spec._CPU_BYTES", 30 * layers * SPEC.row_bytes(4))
    asked = replace(halves, max_num_seqs=1024)
    most = most_seqs(asked, model, device)
    assert most == 30 * SPEC.row_bytes(4) // SPEC16.row_bytes(4) - num_kept(most)
    assert most_seqs(replace(asked, mamba_ssm_cache_dtype="auto"), model, device) == 14 < most
    with make_tiny(folder, mamba_ssm_cache_dtype="bfloat16") as llm:
        cost = Cost.of(llm.model_config, 4, 4)
        assert cost.state_bytes == 2 * layers * SPEC16.row_bytes(4)


def test_what_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen3_5")
    with pytest.raises(
        ValueError,
        match="mamba_ssm_cache_dtype='bfloat16': with deterministic=True states are kept in float32",
    ):
        make_tiny(folder, mamba_ssm_cache_dtype="bfloat16", deterministic=True)
    with pytest.raises(ValueError, match=r"mamba_ssm_cache_dtype.*float16"):
        make_tiny(folder, mamba_ssm_cache_dtype="float16")
    with make_tiny(write_tiny_model(tmp_path / "plain"), mamba_ssm_cache_dtype="bfloat16") as llm:
        assert len(llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)[0]["token_ids"]) == 24
