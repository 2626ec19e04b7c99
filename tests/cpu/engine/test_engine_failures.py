"""The engine on a CPU stays usable after any failure, frees all at its end, and says which input is wrong."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import weakref
from pathlib import Path

import inside
import pytest
from checked_llm import make_tiny, run
from engine_cases import GREEDY, make_prompts, tokens
from tiny_models import VOCAB_SIZE, edit_json, transformers_greedy

from nanovllm import LLM, EngineClosedError, KVCacheMemoryError, SamplingParams
from nanovllm.batch import Batch
from nanovllm.errors import ModelLoadError
from nanovllm.runner.inputs import PendingOutput


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [transformers_greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts]


# -- the ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_failing_step_leaves_a_usable_engine(
    model: Path, prompts: list, expected: list, after: int, run_ahead: bool
) -> None:
    with make_tiny(model, async_scheduling=run_ahead) as llm:
        launch, calls = inside.runner(llm).launch, itertools.count()

        def fail(batch: object) -> object:
            if next(calls) == after:
                raise RuntimeError("out of luck")
            return launch(batch)

        inside.runner(llm).launch = fail
        with pytest.raises(RuntimeError, match="out of luck"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.is_finished()
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_ctrl_c_in_generate(model: Path, prompts: list, expected: list) -> None:
    rng = random.Random(0)
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with make_tiny(model, num_kvcache_blocks=40) as llm:
        for _ in range(10):
            timer = threading.Timer(rng.uniform(0, 0.1), os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                timer.start()
                while True:
                    llm.generate(prompts, long, use_tqdm=False)
            timer.join()
            assert llm.is_finished() and llm.num_free_blocks == 40
            assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_full_collections_wait_for_generate(
    model: Path, prompts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delay ends with the call, also if it fails; `step` delays nothing."""
    before, seen = gc.get_threshold(), []
    with make_tiny(model) as llm:
        launch = inside.runner(llm).launch

        def recorded(batch: Batch) -> PendingOutput:
            seen.append(gc.get_threshold()[2])
            if len(seen) == 3:
                raise ZeroDivisionError
            return launch(batch)

        monkeypatch.setattr(inside.runner(llm), "launch", recorded)
        with pytest.raises(ZeroDivisionError):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert gc.get_threshold() == before
        assert min(seen) > 10**6 > before[2]
        llm.add_request(prompts[0], GREEDY)
        llm.step()
        assert seen[3] == before[2]


def test_close_del_and_a_second_engine(model: Path, prompts: list, expected: list) -> None:
    first, second = make_tiny(model), make_tiny(model)
    weights = weakref.ref(inside.model(first).lm_head.weight)
    cache = weakref.ref(inside.runner(second).kv_cache)
    assert tokens(first.generate(prompts, GREEDY, use_tqdm=False)) == expected
    first.close()
    first.close()
    first.exit()
    assert weights() is None
    with pytest.raises(EngineClosedError, match="closed"):
        first.generate([[5]])
    with pytest.raises(EngineClosedError):
        first.step()
    assert tokens(second.generate(prompts, GREEDY, use_tqdm=False)) == expected
    del second
    gc.collect()
    assert cache() is None


def test_with_closes_also_after_an_error(model: Path) -> None:
    with pytest.raises(ZeroDivisionError), make_tiny(model) as llm:
        _ = 1 / 0
    with pytest.raises(EngineClosedError):
        llm.is_finished()


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([], ValueError, r"prompts\[1\] is empty"),
        ("", ValueError, r"prompts\[1\] is empty"),
        ("text", ValueError, r"prompts\[1\] is a string, and skip_tokenizer_init"),
        (
            [5, VOCAB_SIZE],
            ValueError,
            rf"prompts\[1\]: token id {VOCAB_SIZE} at position 1 .*0 to {VOCAB_SIZE - 1}",
        ),
        ([-1], ValueError, r"prompts\[1\]: token id -1 at position 0"),
        ([5, 2**40], ValueError, rf"prompts\[1\]: token id {2**40} at position 1"),
        ([5, 1.5], TypeError, r"prompts\[1\]: token id at position 1 .* 1.5"),
        ([5, True], TypeError, r"prompts\[1\]: token id at position 1"),
        ([5] * 65, ValueError, r"prompts\[1\]: the prompt has 65 tokens, and at most 63 leave room"),
        (None, TypeError, r"prompts\[1\] must be a string, a list of token ids or a dictionary, not None"),
        ({"text": "x"}, ValueError, r"prompts\[1\] must have the key 'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": []}, ValueError, r"prompts\[1\]\['prompt_token_ids'\] is empty"),
        ({"prompt": 5, "prompt_token_ids": [5]}, TypeError, r"prompts\[1\]\['prompt'\] must be a string"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_is_queued(
    model: Path, bad: object, error: type[Exception], message: str
) -> None:
    with make_tiny(model) as llm:
        with pytest.raises(error, match=message):
            llm.generate([[5], bad], GREEDY, use_tqdm=False)
        assert llm.is_finished()
        assert len(llm.generate([[5]], GREEDY, use_tqdm=False)) == 1


def test_a_bad_request_does_not_disturb_others(model: Path, prompts: list, expected: list) -> None:
    with make_tiny(model) as llm:
        request = llm.add_request(prompts[3], GREEDY)
        llm.step()
        for bad in ([], [VOCAB_SIZE], [5] * 100):
            with pytest.raises(ValueError, match="the prompt"):
                llm.add_request(bad, GREEDY)
        assert [(o.request_id, o["token_ids"]) for o in run(llm)] == [(request, expected[3])]


def test_lists_of_unequal_length_and_wrong_types(model: Path) -> None:
    with make_tiny(model) as llm:
        with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
            llm.generate([[5], [6]], [GREEDY])
        with pytest.raises(TypeError, match=r"sampling_params\[1\]"):
            llm.generate([[5], [6]], [GREEDY, {"temperature": 0}])
        with pytest.raises(TypeError, match="sampling_params must be"):
            llm.generate([[5]], {"temperature": 0})
        with pytest.raises(TypeError, match="prompts must be"):
            llm.generate(5)
        with pytest.raises(ValueError, match=rf"prompts\[0\]: stop_token_ids: token id {VOCAB_SIZE}"):
            llm.generate([[5]], SamplingParams(stop_token_ids=[VOCAB_SIZE]))
        with pytest.raises(ValueError, match="skip_tokenizer_init=True; pass token ids to gen"):
            llm.chat([{"role": "user", "content": "Hi"}])


def test_a_failed_kv_cache_allocation(model: Path) -> None:
    with (
        make_tiny(model) as llm,
        pytest.raises(
            KVCacheMemoryError, match=r"cpu has no memory for a KV cache of 1000000000000 blocks, .* Gi"
        ),
    ):
        inside.runner(llm).allocate_kv_cache(10**12)


def test_options_are_checked(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model must be a folder or a Hugging Face hub id, .* not None"):
        LLM()
    with pytest.raises(TypeError, match="'modle'; did you mean 'model'"):
        LLM(modle=str(model))
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        LLM(str(model), max_num_seq=4)
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide"):
        LLM(str(model), tensor_parallel_size=3)
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        LLM(str(model), gpu_memory_utilization=1.5)
    with pytest.raises(ValueError, match="'flash_attn' cannot run here: it needs a CUDA device"):
        make_tiny(model, attention_backend="flash_attn", device="cpu")
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        LLM(str(model))
    with pytest.raises(ValueError, match="does not exist"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        LLM(str(tmp_path))


def test_a_wrong_checkpoint_is_found_before_the_device_is_touched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.engine.core.Device", None)
    weights = (model / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(ModelLoadError, match="cannot be read, is it complete"):
        make_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    edit_json(tmp_path / "config.json", intermediate_size=40)
    with pytest.raises(ModelLoadError, match=r"wrong shape: .*gate_proj"):
        make_tiny(tmp_path)


def test_too_little_memory_says_how_much(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        KVCacheMemoryError, match=r"MiB.*Lower num_kvcache_blocks \(now 1000000000\); or close"
    ):
        make_tiny(model, num_kvcache_blocks=10**9)
    monkeypatch.setattr("nanovllm.device.Device.kv_cache_budget", lambda *_: (100, 0))
    with pytest.raises(
        KVCacheMemoryError, match=r"1 block\(s\) of 8 .*Pass kv_cache_memory_bytes, up to "
    ) as caught:
        make_tiny(model)
    assert "gpu_memory_utilization" not in str(caught.value)
