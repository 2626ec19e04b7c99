"""Calls of vLLM's: the queue, ids of the caller, functions on ranks and replicas, embeddings, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_llm import make_tiny
from rank_functions import cannot_return, fails, num_weights, place

from nanovllm import (
    LLM,
    EngineArgs,
    Histogram,
    PoolingParams,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    demo_model_path,
)
from nanovllm.vllm.metrics import RequestTimes

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_every_default_of_vllm_is_accepted() -> None:
    """The defaults that vLLM 0.32 itself states, but for objects; both as arguments and as `vars(args)`."""
    defaults = json.loads((Path(__file__).parents[2] / "data" / "vllm_defaults.json").read_text())
    assert len(defaults["EngineArgs"]) > 230 and len(defaults["SamplingParams"]) > 30
    for name, value in defaults["EngineArgs"].items():
        EngineArgs(model="x", **{name: value})
    for name, value in defaults["SamplingParams"].items():
        SamplingParams(**{name: value})
    EngineArgs(model="x", **defaults["EngineArgs"])
    SamplingParams(**defaults["SamplingParams"])


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
        ValueError, match=r"collective_rpc\('update_config'\) is not supported: workers do not"
    ):
        llm.collective_rpc("update_config", args=({},))
    if size * replicas > 1:
        with pytest.raises(TypeError, match=r"cannot be pickled .*; pass a function of a module that other"):
            llm.apply_model(lambda model: 5)
        with pytest.raises(RuntimeError, match=r"rank 0: .*local object"):
            llm.apply_model(cannot_return)
    else:
        assert llm.apply_model(lambda model: 5) == [5]
    assert len(llm.generate([[5], [6]], GREEDY, use_tqdm=False)) == 2, "the engine is usable after errors"


def test_weights_are_loaded_again(llm: LLM) -> None:
    """Also as vLLM's page on sleep mode says it, before the KV cache wakes up."""

    def answer() -> list[int]:
        return list(llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0]["token_ids"])

    expected = answer()
    name = "model.embed_tokens.weight"
    llm.update_weights({name: torch.zeros(llm.model_config.vocab_size, llm.model_config.hidden_size)})
    assert answer() != expected
    assert llm.collective_rpc("reload_weights") == [None] * llm.get_world_size()
    assert answer() == expected
    llm.sleep(level=2)
    with pytest.raises(RuntimeError, match="sleeps"):
        llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    assert answer() == expected


def test_dummy_weights_have_no_files(model: Path) -> None:
    with make_tiny(model) as llm:
        expected = llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0]["token_ids"]
    with make_tiny(model, load_format="dummy") as llm:
        with pytest.raises(
            ValueError, match=r"no files to load .* call collective_rpc\('update_config', args="
        ):
            llm.collective_rpc("reload_weights")
        assert llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0]["token_ids"] != expected
        assert llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},)) == [None]
        llm.collective_rpc("reload_weights")
        assert llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0]["token_ids"] == expected
        with pytest.raises(ValueError, match=r"collective_rpc\('update_config'\) is not supported"):
            llm.collective_rpc("update_config", args=({"load_config": {"load_format": "tensorizer"}},))


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


def test_the_queue_of_conversations() -> None:
    """Whatever `chat` refuses or adds, `enqueue_chat` does too, before anything is queued."""
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    with LLM(demo_model_path(), device="cpu", kv_cache_memory_bytes=2**24) as llm:
        template = "{{ messages[0]['content'] }}"
        ids = llm.enqueue_chat([chat, chat], [GREEDY, GREEDY], chat_template=template, priority=[1, 2])
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [each.request_id for each in outputs] == ids == ["0", "1"]
        assert {each.prompt for each in outputs} == {"What is 2 + 3?"}
        one: dict[str, Any] = {"chat_template": template, "priority": 3, "use_tqdm": False}
        assert llm.chat(chat, GREEDY, **one)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
        for wrong, error, message in (
            ({"messages": [chat, []]}, ValueError, "conversation 1 has no messages"),
            ({"messages": chat, "temperature": 1}, TypeError, r"SamplingParams\(temperature=\.\.\.\)"),
            ({"messages": chat, "lora_request": 1}, ValueError, r"LLM\.enqueue_chat\(\): lora_request=1 is"),
            ({"messages": chat, "chat_templat": ""}, TypeError, "did you mean 'chat_template'"),
        ):
            with pytest.raises(error, match=message):
                llm.enqueue_chat(**wrong)
        assert llm.is_finished()


def test_pooling_params(llm: LLM) -> None:
    prompts: list[list[int]] = [[5] * 20, [5, 6, 7], [7], []]
    params = [
        PoolingParams(),
        PoolingParams(dimensions=5, normalize=True, task="embed"),
        PoolingParams(dimensions=np.int64(7), use_activation=False),
        PoolingParams(late_chunking_params=None),
    ]
    plain = llm.embed(prompts[:3], use_tqdm=False, normalize=False)
    given = llm.embed(prompts, use_tqdm=False, normalize=False, pooling_params=params, on_error="return")
    assert given[0].outputs.embedding == plain[0].outputs.embedding and given[3].outputs.embedding == []
    five = np.array(plain[1].outputs.embedding[:5])
    assert np.allclose(given[1].outputs.embedding, five / np.linalg.norm(five), atol=1e-6)
    assert given[2].outputs.embedding == plain[2].outputs.embedding[:7]
    assert params[1].clone() == params[1] and params[1].clone() is not params[1]
    wrong: list[tuple[Any, type[Exception], str]] = [
        (PoolingParams(dimensions=1000), ValueError, "dimensions=1000 is more than this model's"),
        ([PoolingParams()], ValueError, "1 pooling_params for 2 prompts"),
        ([PoolingParams(), 5], TypeError, r"pooling_params\[1\] must be PoolingParams, not 5"),
        ("mean", TypeError, "pooling_params must be PoolingParams or a list of them, not 'mean'"),
    ]
    for value, error, message in wrong:
        with pytest.raises(error, match=message):
            llm.embed([[5], [6]], use_tqdm=False, pooling_params=value)
    for fields, message in (
        ({"dimensions": 0}, "dimensions must be None or an integer of at least 1, not 0"),
        ({"use_activation": True, "normalize": False}, "are one parameter; pass one of them"),
        ({"softmax": True}, r"PoolingParams\(\): softmax=True is not supported; use use_activation"),
        ({"task": "classify"}, "task='classify' is not supported; pass pooling_task"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens=5 is not supported; cut"),
    ):
        with pytest.raises(ValueError, match=message):
            PoolingParams(**fields)
    with pytest.raises(TypeError, match="'dimension'; did you mean 'dimensions'"):
        PoolingParams(**{"dimension": 5})
    with pytest.raises(TypeError, match="use_activation must be True or False, not 1"):
        PoolingParams(use_activation=1)  # type: ignore[arg-type]


# -- metrics -------------------------------------------------------------------------------------------------


def found(llm: LLM) -> dict[str, Any]:
    """The values of counters and gauges, and whole histograms, by name and reason."""
    by_name: dict[str, Any] = {}
    for metric in llm.get_metrics():
        assert metric.name.startswith("vllm:") and metric.labels["model_name"] == llm.config.model
        name = metric.labels.get("finished_reason", metric.name.removeprefix("vllm:"))
        assert name not in by_name
        by_name[name] = metric if isinstance(metric, Histogram) else metric.value  # type: ignore[attr-defined]
    return by_name


def test_metrics_are_those_of_the_outputs(llm: LLM) -> None:
    before, stats = found(llm), llm.stats()
    prompts = [[5] * 20, [5] * 20, [6, 7]]
    outputs = llm.generate(prompts, SamplingParams(n=2, max_tokens=3, ignore_eos=True), use_tqdm=False)
    parts = [*llm.stream([[8, 9]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), deltas=True)]
    assert len(parts) == 4
    after = found(llm)
    new = {name: after[name] - before[name] for name in before if not isinstance(before[name], Histogram)}
    assert new == {
        "num_requests_running": 0.0,
        "num_requests_waiting": 0.0,
        "kv_cache_usage_perc": 0.0,
        "num_preemptions": 0,
        "prompt_tokens": 44,
        "prompt_tokens_cached": llm.stats().num_cached_tokens - stats.num_cached_tokens,
        "generation_tokens": 22,
        "prefix_cache_queries": new["prompt_tokens_cached"]
        + llm.stats().num_computed_tokens
        - stats.num_computed_tokens,
        "prefix_cache_hits": new["prompt_tokens_cached"],
        "stop": 0,
        "length": 7,
        "abort": 0,
        "error": 0,
        "repetition": 0,
    }
    assert new["prefix_cache_queries"] >= 44
    lengths = after["request_generation_tokens"]
    assert lengths.count - before["request_generation_tokens"].count == 7
    assert lengths.sum - before["request_generation_tokens"].sum == 22
    for name, value in after.items():
        if isinstance(value, Histogram):
            limits = [*map(float, value.buckets)]
            assert limits == sorted(limits) and [*value.buckets.values()] == sorted(value.buckets.values())
            assert value.count == value.buckets["+Inf"] and name.endswith(("_tokens", "_seconds"))
            assert name == "request_generation_tokens" or value.count - before[name].count == 4
    waits = after["e2e_request_latency_seconds"].sum - before["e2e_request_latency_seconds"].sum
    times = [out.metrics for out in [*outputs, parts[-1]] if out.metrics is not None]
    assert waits == pytest.approx(sum(each.finished_time - each.arrival_time for each in times))  # type: ignore[operator, misc]


def test_metrics_of_requests_that_run_or_are_aborted(model: Path) -> None:
    with make_tiny(model, enable_prefix_caching=False, max_num_seqs=2) as llm:
        ids = [llm.add_request([5] * 9, GREEDY) for _ in range(3)]
        llm.step()
        now = found(llm)
        assert (now["num_requests_running"], now["num_requests_waiting"]) == (2.0, 1.0)
        assert 0 < now["kv_cache_usage_perc"] < 1 and now["prefix_cache_queries"] == 0
        llm.abort(ids[0])
        llm.wait_for_completion(use_tqdm=False)
        stream = llm.stream([[5], [6]], GREEDY, deltas=True)
        next(stream)
        stream.close()
        now = found(llm)
        assert (now["abort"], now["length"]) == (1, 2), "a stream that is left gives no outputs"
        llm.embed([[5, 6]], use_tqdm=False)
        now = found(llm)
        assert now["request_prompt_tokens"].count == 4 and now["length"] == 3
        assert now["request_time_per_output_token_seconds"].count == 2


def test_many_values_and_edges_of_buckets() -> None:
    times = RequestTimes()
    moments = RequestMetrics(0.0, 0.3, 0.5, 4.5, 4.5, 0.3)
    noted = ("0", True, moments, 10, [(0, "stop", 5)])
    for _ in range(10_000):
        times.count(noted)
    got = {each.name: each for each in times.metrics({}, 50) if isinstance(each, Histogram)}
    assert [*got["vllm:request_prompt_tokens"].buckets.items()] == [
        *(("1.0", 0), ("2.0", 0), ("5.0", 0), ("10.0", 10_000), ("20.0", 10_000), ("50.0", 10_000)),
        ("+Inf", 10_000),
    ]
    queue, per_token = (
        got[f"vllm:request_{name}_seconds"] for name in ("queue_time", "time_per_output_token")
    )
    assert queue.buckets["0.3"] == 10_000 and queue.sum == pytest.approx(3_000)
    assert per_token.buckets["0.75"] == 0 and per_token.buckets["1.0"] == per_token.count == 10_000
    assert "7680.0" in queue.buckets, "only tokens end at the longest sequence"
