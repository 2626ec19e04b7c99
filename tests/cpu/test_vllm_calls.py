"""Calls of vLLM's: the queue, ids of the caller, and functions on one rank, two ranks and two replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checked_llm import make_tiny
from rank_functions import cannot_return, fails, num_weights, place

from nanovllm import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module", params=[{}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}])
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    options = {"device": "cpu", "skip_tokenizer_init": True, "num_kvcache_blocks": 16, **request.param}
    with LLM(model, **options) as llm:
        yield llm


def test_the_queue(model: Path) -> None:
    with make_tiny(model) as llm:
        expected = [each["token_ids"] for each in llm.generate([[5], [6, 7], [8]], GREEDY, use_tqdm=False)]
        ids = [*llm.enqueue([[5], [6, 7]], GREEDY), *llm.enqueue([8], [GREEDY], priority=3, use_tqdm=True)]
        assert ids == ["3", "4", "5"] and llm.has_unfinished_requests()
        assert llm.get_num_unfinished_requests() == 3
        with pytest.raises(RuntimeError, match=r"3 request\(s\) of add_request are unfinished"):
            llm.generate([5], GREEDY)
        outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
        assert [each["token_ids"] for each in outputs] == expected
        assert [each.request_id for each in outputs] == ids
        assert llm.wait_for_completion() == [] and not llm.has_unfinished_requests()
        with pytest.raises(ValueError, match=r"prompts\[1\]"):
            llm.enqueue([[5], [9999]], GREEDY)
        with pytest.raises(ValueError, match=r"LLM\.enqueue\(\): lora_request=5 is not supported"):
            llm.enqueue([5], GREEDY, lora_request=5)
        with pytest.raises(TypeError, match="output_type must be RequestOutput or None, not <class 'int'>"):
            llm.wait_for_completion(int)
        assert llm.is_finished()


def test_requests_with_ids_of_the_caller(model: Path) -> None:
    with make_tiny(model) as llm:
        assert llm.add_request("a", [5], GREEDY) == "a"
        assert llm.add_request(request_id="b", prompt=[6], params=GREEDY, priority=2) == "b"
        assert llm.add_request("c", {"prompt_token_ids": [7]}, params=GREEDY) == "c"
        assert llm.add_request([8], GREEDY) == "3"
        with pytest.raises(ValueError, match="request_id='b' belongs to an unfinished request"):
            llm.add_request("b", [5], GREEDY)
        with pytest.raises(TypeError, match="request_id must be a string, not 5"):
            llm.add_request(5, [5], GREEDY)
        with pytest.raises(
            TypeError, match=r"add_request\(\) takes \(prompt, sampling_params\) or \(request_id"
        ):
            llm.add_request()
        with pytest.raises(
            TypeError, match=r"add_request\(\) got an unknown argument 'sampling_param'; did you"
        ):
            llm.add_request([5], sampling_param=GREEDY)
        aborted = llm.abort("b")
        assert aborted is not None and aborted.request_id == "b" and llm.abort("b") is None
        found = []
        while llm.has_unfinished_requests():
            found += [output.request_id for output in llm.step()]
        assert sorted(found) == ["3", "a", "c"]
        assert llm.add_request("a", [5], GREEDY) == "a"
        assert [output.request_id for output in llm.wait_for_completion(use_tqdm=False)] == ["a"]


def test_functions_on_every_rank(llm: LLM) -> None:
    size, replicas = llm.config.tensor_parallel_size, llm.config.data_parallel_size
    assert llm.get_world_size() == size * replicas and llm.get_world_size(include_dp=False) == size
    counts = llm.apply_model(num_weights)
    assert len(counts) == size * replicas and len(set(counts)) == 1
    places = llm.collective_rpc(place, timeout=5.0, args=("at",), kwargs={"factor": 10})
    assert places == [("at cpu", 10 * rank, rank) for _ in range(replicas) for rank in range(size)]
    with pytest.raises((LookupError, RuntimeError), match="no such layer"):
        llm.apply_model(fails)
    with pytest.raises(
        ValueError, match=r"collective_rpc\('reload_weights'\) is not supported: workers do not"
    ):
        llm.collective_rpc("reload_weights")
    if size * replicas > 1:
        with pytest.raises(TypeError, match=r"cannot be pickled .*; pass a function of a module that other"):
            llm.apply_model(lambda model: 5)
        with pytest.raises(RuntimeError, match=r"rank 0: .*pickle"):
            llm.apply_model(cannot_return)
    else:
        assert llm.apply_model(lambda model: 5) == [5]
    assert len(llm.generate([[5], [6]], GREEDY, use_tqdm=False)) == 2, "the engine is usable after errors"


def test_a_function_of_the_script_itself(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    monkeypatch.setattr(num_weights, "__module__", "__main__")
    monkeypatch.setattr(__main__, "num_weights", num_weights, raising=False)
    if llm.get_world_size() == 1:
        assert len(llm.apply_model(num_weights)) == 1
        return
    with pytest.raises(
        TypeError, match="is of the script itself, which no other process runs; pass a function of"
    ):
        llm.apply_model(num_weights)


def test_not_while_requests_run_or_the_engine_sleeps(model: Path) -> None:
    calls: list[Any] = [
        lambda llm: llm.apply_model(num_weights),
        lambda llm: llm.collective_rpc(place, args=("",)),
    ]
    with make_tiny(model) as llm:
        llm.add_request([5], GREEDY)
        for call in calls:
            with pytest.raises(RuntimeError, match="unfinished; call step"):
                call(llm)
        llm.wait_for_completion(use_tqdm=False)
        llm.sleep(1, mode="keep")
        for call in calls:
            with pytest.raises(RuntimeError, match="this engine sleeps"):
                call(llm)
        assert llm.wake_up(["weights"]) is False and llm.wake_up() is True
