"""bench.py as a program: its options, output and files. No test measures time."""

from __future__ import annotations

import gzip
import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import write_tiny_model

import bench
import nanovllm
from nanovllm.models.registry import load_model_config
from tools import bench_expert_ranks, bench_sampling
from tools.benchmark import engines
from tools.benchmark.engines import RoundRobin, row_sampling
from tools.benchmark.options import parse_args
from tools.benchmark.roofline import Speed
from tools.benchmark.workloads import demo


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--engine", "nanovllm"], None),
        (["--engine", "nanovllm", "--max-model-len", "77"], 77),
        (["--engine", "vllm"], 4096),
        (["--engine", "vllm", "--max-model-len", "77"], 77),
    ],
)
def test_the_max_model_len_of_an_engine(
    argv: list[str], expected: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = {}

    def load(args: object, model: Path, dummy: bool, options: dict[str, object]) -> object:
        seen.update(options)
        raise InterruptedError

    monkeypatch.setattr(bench, "ENGINES", {"nanovllm": load, "vllm": load})
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: None)
    args = bench.parse_args([*argv, "--workload", "single", "--device", "cpu"])
    with pytest.raises(InterruptedError):
        bench.measure(args, str(tmp_path))
    assert seen.get("max_model_len") == expected


# -- the program -------------------------------------------------------------------------------------------


def _bench(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    bench.main([*argv, "--device", "cpu", "--repeat", "1"])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_demo_workload_ends_in_a_line_of_json_and_writes_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PROFILE_TOKENS", 3)
    folder = tmp_path / "new" / "profile"
    result = _bench(capsys, "--workload", "demo", "--num-seqs", "3", "--profile", str(folder))
    assert result["num_seqs"] == 3 and len(result["seconds"]) == 2
    assert result["phases"]["decode"]["tokens"] == result["tokens_out"] - 3
    assert {"share_of_floor", "startup_s", "import_s", "steps", "other_s", "kernels"} <= result.keys()
    table = (folder / "kernels.txt").read_text()
    assert len(result["kernels"]["all steps"]) == 10
    assert all(row["name"] in table for row in result["kernels"]["all steps"])
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        assert json.load(file)["traceEvents"]


@pytest.mark.full
def test_what_sampling_settings_cost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_sampling, "demo", lambda num_seqs, model: demo(5, model))
    asked = ["logprobs=5", "stop", "json", "n=16"]
    bench_sampling.main(["--cpu", "--repeat", "2", *(f"--only={name}" for name in asked)])
    *table, last = capsys.readouterr().out.splitlines()
    speeds = json.loads(last)["output_tokens_per_s"]
    assert list(speeds) == ["temperature=0.6", "logprobs=5", "stop", "json", "16 equal prompts", "n=16"]
    assert all(len(found) == 2 for found in speeds.values())
    assert [line.split("  ")[0] for line in table] == list(speeds)
    assert table[-1].endswith("of 16 equal prompts") and table[1].endswith("of temperature=0.6")
    with pytest.raises(SystemExit):
        bench_sampling.main(["--cpu", "--only", "top_q=1"])
    assert "--only top_q=1 is none of temperature=0.6; " in capsys.readouterr().err


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed device speed instead of a measurement."""
    monkeypatch.setattr(
        bench, "device_speed", lambda device, num_devices, dtype: Speed(1e10 * num_devices, 1e12)
    )


@pytest.mark.usefixtures("known_speed")
def test_a_file_and_a_prefix_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"prompt": "Hello", "max_tokens": 2})
        + "\n"
        + "\n".join(json.dumps({"prompt_token_ids": [9] * 600 + [i], "max_tokens": 3}) for i in (1, 2))
    )
    result = _bench(capsys, "--workload", str(path), "--prefix-caching")
    assert (result["num_seqs"], result["tokens_out"], result["tokens_shared"]) == (3, 8, 0)
    # The cache starts empty. The second long prompt is computed from the token on where it parts.
    assert result["phases"]["prefill"]["tokens"] == result["tokens_in"] - 600


@pytest.mark.parametrize("broken", [True, False])
def test_a_broken_floor_is_reported(
    broken: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = Speed(1e3, 1e3) if broken else Speed(1e15, 1e15)
    monkeypatch.setattr(bench, "device_speed", lambda device, num_devices, dtype: speed)
    bench.main(["--workload", "demo", "--num-seqs", "2", "--device", "cpu", "--repeat", "1"])
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["floor_broken"] is broken
    assert ("the floor is broken: the whole is at" in printed) == broken
    assert ("tools/measure_device.py" in printed and "KNOWN_DEVICES" in printed) == broken


@pytest.mark.usefixtures("known_speed")
def test_the_dtype_counts_for_the_engine_and_for_the_floor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    loaded = engines.LLM
    monkeypatch.setattr(engines, "LLM", lambda *a, **kw: seen.append(kw["dtype"]) or loaded(*a, **kw))
    argv = ["--workload", "demo", "--num-seqs", "1"]
    slow, fast = (_bench(capsys, *argv, *more) for more in ([], ["--dtype", "bfloat16"]))
    assert seen == ["auto", "bfloat16"]
    decode = [result["phases"]["decode"] for result in (slow, fast)]
    floors = [phase["share_of_floor"] * phase["seconds"] for phase in decode]  # the least seconds
    assert floors[0] == pytest.approx(2 * floors[1], rel=1e-3)  # half the bytes


@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize(("states", "itemsize"), [("auto", 4), ("float32", 4), ("bfloat16", 2)])
def test_the_floor_counts_states_as_they_are_stored(tmp_path: Path, states: str, itemsize: int) -> None:
    argv = ["--device", "cpu", "--mamba-ssm-cache-dtype", states]
    config = load_model_config(write_tiny_model(tmp_path, "qwen3_5"))
    cost, _ = bench.least(parse_args(argv, None), config)
    specs = [spec.state for spec in map(config.spec, range(config.num_layers)) if spec.state is not None]
    inputs = [4 * (each.kernel - 1) * (2 * each.keys + each.values) for each in specs]
    values = [itemsize * each.values * each.k_dim for each in specs]
    assert cost.state_bytes == 2 * (sum(inputs) + sum(values)) > 0


@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bench_also_runs_transformers(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = _bench(
        capsys, "--engine", "transformers", "--workload", "demo", "--num-seqs", "2", "--dtype", dtype
    )
    assert result["engine"] == "transformers" and "phases" not in result


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--workload", "fast"],
            "none of headline, queue, single, few, chat, classify, long, prefix, prefixes, samples",
        ),
        (["--sampling", "topp=0.9"], "unknown argument 'topp'; did you mean 'top_p'"),
        (["--sampling", "top_p=1.5"], "top_p must be in (0, 1]; 1 keeps all tokens, not 1.5"),
        (["--sampling", "top_k=many"], "top_k must be a positive integer, or 0 or -1"),
        (["--sampling", "top_p"], "write name=value, not 'top_p'"),
        (["--sampling", "max_tokens=5"], "max_tokens is the workload's to say"),
        (["--sampling", "stop_token_ids=5"], "stop_token_ids is the workload's to say"),
        (["--sampling", "seed=5", "--engine", "transformers"], "--engine transformers has no seed"),
        (["--sampling-share", "0.5"], "--sampling-share must be above 0 and at most 1, and needs --sampling"),
        (["--sampling", "top_k=5", "--sampling-share", "0"], "--sampling-share must be above 0"),
        (
            ["--sampling", "top_k=5", "--sampling-share", "0.5", "--engine", "transformers"],
            "--engine transformers samples all rows in the same way",
        ),
        (["--shape", "qwen3-8b", "--model", "x"], "--shape is for dummy weights"),
        (["--shape", "qwen3-8b", "--workload", "demo"], "needs a tokenizer"),
        (["--workload", "single", "--num-seqs", "2"], "is one sequence"),
        (["--repeat", "0"], "--repeat must be at least 1"),
        (["--engine", "vllm", "--profile"], "only with --engine nanovllm"),
        (["--engine", "transformers", "--tensor-parallel-size", "2"], "has no tensor_parallel_size"),
        (["--round-robin"], "--round-robin needs --data-parallel-size"),
        (["--share-gpu"], "--share-gpu needs --data-parallel-size"),
        (["--data-parallel-size", "2", "--profile"], "--profile covers one process"),
    ],
)
def test_contradictions_are_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args(["--device", "cpu", *argv])
    assert message in capsys.readouterr().err


def test_a_bad_file_ends_in_a_message(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt_token_ids": [1], "max_tokens": 100000}')
    with pytest.raises(
        SystemExit, match="the longest sequence has 100001 tokens and the model reads at most"
    ):
        bench.main(["--workload", str(path), "--device", "cpu"])
    with pytest.raises(SystemExit, match=r"No such file"):
        bench.main(["--workload", str(tmp_path / "none.jsonl"), "--device", "cpu"])


def test_options_reach_the_engine_only_if_given() -> None:
    assert bench.parse_args(["--device", "cpu"]).options == {}
    texts = {"--kv-cache-dtype": "fp8", "--tensor-parallel-size": "2", "--quantization": "int8"}
    args = bench.parse_args([*chain(*texts.items()), "--deterministic", "--device", "cpu"])
    assert args.options == {
        **{"kv_cache_dtype": "fp8", "tensor_parallel_size": 2, "quantization": "int8"},
        "deterministic": True,
    }
    assert bench.parse_args(["--workload", "prefix"]).prefix_caching is True
    assert bench.parse_args(["--workload", "samples"]).prefix_caching is True
    assert bench.parse_args(["--workload", "queue"]).prefix_caching is False


def test_experts_by_rank_and_by_width_are_runs_of_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """bench.py accepts the options of each run; one of two passes the option on."""
    seen: list[dict[str, Any]] = []

    def run(options: list[str]) -> float:
        args = parse_args(options)
        assert args.shape == "qwen3-30b-a3b" and args.num_seqs in (16, 256)
        seen.append(args.options)
        return 300.0 if "enable_expert_parallel" in args.options else 200.0

    monkeypatch.setattr(bench_expert_ranks, "output_tokens_per_s", run)
    bench_expert_ranks.main(["--num-seqs", "16", "256"])
    ranks = [{"tensor_parallel_size": size} for size in (2, 2, 4, 4)]
    assert seen == [each for one in ranks for each in (one, one | {"enable_expert_parallel": True})]
    assert "4 ranks, 256 sequences: 200 by width, 300 by rank, 1.50 times" in capsys.readouterr().out


def test_sampling_is_parsed_into_fields() -> None:
    def parsed(text: str, engine: str = "nanovllm") -> dict[str, Any]:
        return bench.parse_args(["--device", "cpu", "--engine", engine, "--sampling", text]).sampling

    assert parsed("") == {"temperature": 0.6}
    assert parsed("temperature=0") == {"temperature": 0}
    assert parsed("top_p=0.95, top_k=20") == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert parsed("seed=7,min_p=1e-1") == {"temperature": 0.6, "seed": 7, "min_p": 0.1}
    others = {"flag": True, "word": "x"}  # vLLM checks it
    assert parsed("flag=true,word=x", "vllm") == {"temperature": 0.6} | others
    assert type(parsed("top_k=20")["top_k"]) is int


def test_a_share_of_the_rows_has_the_sampling_parameters() -> None:
    asked, greedy, plain = {"temperature": 0.6, "top_k": 5}, {"temperature": 0.0}, {"temperature": 0.6}
    assert row_sampling(asked, 1.0, 3) == [asked] * 3
    assert row_sampling(asked, 0.25, 9) == [greedy, plain, greedy, asked, plain, greedy, plain, asked, greedy]
    assert row_sampling(asked, 0.5, 5) == [greedy, asked, plain, asked, greedy]


@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize("share", ["1", "0.25"])
def test_rows_are_sampled_as_asked(
    share: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[nanovllm.SamplingParams] = []
    generate = nanovllm.LLM.generate

    def record(self: Any, prompts: Any, params: Any, use_tqdm: bool) -> Any:
        seen[:] = params
        return generate(self, prompts, params, use_tqdm)

    monkeypatch.setattr(nanovllm.LLM, "generate", record)
    asked = ("--sampling", "top_p=0.95,top_k=20", "--sampling-share", share)
    result = _bench(capsys, "--workload", "demo", "--num-seqs", "8", *asked)
    assert result["sampling"] == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert result["sampling_share"] == float(share)
    filtered = [(params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 20) for params in seen]
    assert filtered == ([True] * 8 if share == "1" else [False, False, False, True] * 2)
    assert {params.temperature for params in seen} == ({0.6} if share == "1" else {0.0, 0.6})


@pytest.mark.usefixtures("known_speed")
def test_transformers_samples_as_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationMixin

    seen: list[dict[str, Any]] = []
    generate = GenerationMixin.generate

    def record(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(options)
        return generate(self, *args, **options)

    monkeypatch.setattr(GenerationMixin, "generate", record)
    for text, draws in (("temperature=0", False), ("min_p=0.1", True)):
        _bench(
            capsys, "--engine", "transformers", "--workload", "demo", "--num-seqs", "2", "--sampling", text
        )
        assert seen[-1]["do_sample"] is draws
        sampling = {"temperature": 0.6, "min_p": 0.1, "top_k": 0} if draws else {}
        assert {name: seen[-1].get(name) for name in sampling} == sampling
        assert draws or "temperature" not in seen[-1]


# -- replicas ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_replicas_run_a_workload_by_turns(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--workload", "demo", "--num-seqs", "6", "--data-parallel-size", "2", "--round-robin"]
    result = _bench(capsys, *argv, "--max-num-seqs", "2")
    assert result["round_robin"] and result["device"].startswith("2 x ") and result["num_seqs"] == 6
    assert result["output_tokens_per_s"] > 0 and "phases" not in result


def test_round_robin_gives_each_replica_its_own() -> None:
    router = RoundRobin(2)
    for number in range(6):
        router.add(number, b"prompt")
    assert router.remove(2)
    assert [router.take(1), router.take(0), router.take(0), router.take(0)] == [1, 0, 4, None]
    assert len(router) == 2 and router.take(1) == 3


# -- what sampling costs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only", "base"),
    [("n=16", "16 equal prompts"), ("logprobs=5", "temperature=0.6"), ("json", "temperature=0.6")],
)
def test_a_setting_is_compared_with_its_baseline(
    only: str, base: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(vocab_size=512))
    monkeypatch.setattr(bench_sampling, "LLM", lambda *args, **options: SimpleNamespace(llm_engine=config))
    speeds = {base: [4.0], only: [3.0]}
    monkeypatch.setattr(
        bench_sampling, "timed", lambda llm, runs, repeat: {name: speeds[name] for name in runs}
    )
    bench_sampling.main(["--cpu", "--only", only])
    *_, line, totals = capsys.readouterr().out.splitlines()
    assert line.split()[0] == only and line.endswith(f"75.0% of {base}")
    assert json.loads(totals) == {"output_tokens_per_s": speeds}
