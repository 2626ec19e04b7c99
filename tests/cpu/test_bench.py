"""bench.py: its workloads' exact totals, the floor against hand-made numbers, and what it prints and writes.

No test looks at how fast anything was.
"""

from __future__ import annotations

import ast
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bench
import nanovllm
from nanovllm.batch import StepKind
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.loader import load_model_config
from tools import measure_device
from tools.benchmark import roofline
from tools.benchmark.engines import row_sampling
from tools.benchmark.kernels import busy_time, costliest, group_replays, read_trace, replay_times
from tools.benchmark.roofline import Cost, Speed, broken_floor, device_speed, floor_of
from tools.benchmark.steps import Step, StepRecorder, phases, step_times
from tools.benchmark.workloads import (
    QWEN3,
    SYNTHETIC,
    Workload,
    from_jsonl,
    headline,
    samples,
    shared_prefix,
    write_shape,
)

# -- workloads ---------------------------------------------------------------------------------------------


def test_the_headline_has_nano_vllms_totals() -> None:
    work = headline(256)
    assert (work.tokens_in, work.tokens_out) == (142_827, 133_966)
    assert (len(work.prompts[0]), max(work.output_lens), work.common) == (964, 1024, 0)


def test_the_other_synthetic_workloads_have_their_totals() -> None:
    def totals(name: str) -> tuple[str, int, int, int]:
        size, draw = SYNTHETIC[name]
        work = draw(size)
        return work.name, len(work.prompts), work.tokens_in, work.tokens_out

    assert totals("single") == ("single", 1, 964, 724)
    assert totals("queue") == ("queue", 2048, 1_150_273, 1_128_906)


@pytest.mark.parametrize(
    ("name", "size", "ids_in", "tokens_out"),
    [
        ("few", 16, (100, 1024), (512, 512)),
        ("chat", 2048, (20, 200), (20, 300)),
        ("classify", 4096, (200, 600), (4, 4)),
        ("long", 48, (8000, 28000), (200, 200)),
        ("samples", 1024, (300, 900), (100, 600)),
    ],
)
def test_drawn_workloads_are_of_their_sizes_and_the_same_each_time(
    name: str, size: int, ids_in: tuple[int, int], tokens_out: tuple[int, int]
) -> None:
    default, draw = SYNTHETIC[name]
    work = draw(default)
    assert (default, len(work.prompts), work.name, work.common) == (size, size, name, 0)
    for sizes, (least, most) in ((list(map(len, work.prompts)), ids_in), (work.output_lens, tokens_out)):
        spread = (most - least) / 8
        assert least <= min(sizes) <= least + spread and most - spread <= max(sizes) <= most
    assert min(map(min, work.prompts)) >= 0 and max(map(max, work.prompts)) <= 10_000
    assert draw(default) == work


def test_every_workload_is_in_the_list_of_commands() -> None:
    listed = (Path(bench.__file__).parent / "docs" / "benchmarks.md").read_text().split("\n## ")[1]
    for name, (size, draw) in SYNTHETIC.items():
        work = draw(size)
        [row] = [line for line in listed.splitlines() if line.startswith(f"| `{name}`")]
        assert all(f"| {count:,} |" in row for count in (size, work.tokens_in, work.tokens_out)), row


def test_the_samples_workload_asks_each_prompt_sixteen_times() -> None:
    work = samples(1024)
    assert len(set(map(tuple, work.prompts))) == 64
    assert all(work.prompts[row] == work.prompts[row // 16 * 16] for row in range(1024))
    assert len(set(work.output_lens[:16])) > 8  # each with a length of its own
    few = samples(20)
    assert few.prompts[:16] == [few.prompts[0]] * 16 and few.prompts[16:] == [few.prompts[16]] * 4
    sharing = work.sharing()
    assert sharing.tokens.tolist() == [len(work.prompts[row]) for row in range(0, 1024, 16)]
    # Rows 0 and 15 are of one prompt, row 16 of another.
    assert sharing.saved(np.array([0, 15, 16])) == len(work.prompts[0])


def test_the_prefix_workload_shares_its_first_4096_tokens_and_no_more() -> None:
    work = shared_prefix(256)
    assert work.common == 4096
    own = [len(prompt) - 4096 for prompt in work.prompts]
    assert min(own) >= 64 and max(own) <= 256
    assert min(work.output_lens) >= 128 and max(work.output_lens) <= 256
    assert len({tuple(prompt[4096:4100]) for prompt in work.prompts}) == 256
    assert work.longest > bench.LEAST_MODEL_LEN  # so bench.py must ask vLLM for more


def test_a_shifted_workload_shares_as_much_and_nothing_with_the_one_before() -> None:
    work = shared_prefix(4)
    shifted = work.shifted(1, vocab_size=151936)
    assert shifted.common == work.common and shifted.output_lens == work.output_lens
    assert all(a != b for p, q in zip(work.prompts, shifted.prompts, strict=True) for a, b in zip(p, q))  # noqa: B905
    assert Workload("w", [[0, 9]], [1]).shifted(1, vocab_size=10).prompts == [[1, 0]]


@pytest.mark.parametrize(
    ("prompts", "common"),
    [
        ([[1, 2, 3]], 0),
        ([[1, 2, 3], [1, 2]], 2),
        ([[1, 2], [1, 3], [2, 2]], 0),
        ([[5, 1], [5, 9], [5, 4]], 1),
    ],
)
def test_common(prompts: list[list[int]], common: int) -> None:
    assert Workload("w", prompts, [1] * len(prompts)).common == common


def test_longest_counts_prompt_and_output() -> None:
    assert Workload("w", [[1] * 5, [1] * 3], [1, 9]).longest == 12


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--engine", "nanovllm"], None),
        (["--engine", "nanovllm", "--max-model-len", "77"], 77),
        (["--engine", "vllm"], 4096),
        (["--engine", "vllm", "--max-model-len", "77"], 77),
    ],
)
def test_which_length_an_engine_is_told(
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


# -- rows of a file ----------------------------------------------------------------------------------------


def _read(folder: Path, text: str, tokenize: Any = None, num_seqs: int | None = None) -> Workload:
    path = folder / "rows.jsonl"
    path.write_text(text)
    return from_jsonl(path, tokenize, vocab_size=100, default_max_tokens=64, num_seqs=num_seqs)


def test_rows_are_texts_or_ids_in_their_order(tmp_path: Path) -> None:
    lines = ['{"prompt": "ab"}', "", '{"prompt_token_ids": [7, 99], "max_tokens": 3}']
    text = "\n".join([*lines, '{"prompt": "c", "max_tokens": 5}', ""])
    work = _read(tmp_path, text, lambda texts: [[len(t), 1] for t in texts])
    assert work == Workload("rows.jsonl", [[2, 1], [7, 99], [1, 1]], [64, 3, 5])
    assert len(_read(tmp_path, text, lambda texts: [[1] for _ in texts], num_seqs=2).prompts) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 'a'}", "not JSON .* write one object a line"),
        ("[1, 2]", "write an object with 'prompt' or 'prompt_token_ids', not \\[1, 2\\]"),
        ("{}", "give either 'prompt' or 'prompt_token_ids'"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "give either 'prompt' or 'prompt_token_ids'"),
        ('{"prompt": "a", "temperature": 1}', "unknown key 'temperature'; remove it"),
        ('{"prompt": ""}', "'prompt' must be a text that is not empty, not ''"),
        ('{"prompt": 5}', "'prompt' must be a text that is not empty, not 5"),
        ('{"prompt_token_ids": []}', "must be a list of at least one integer, not \\[\\]"),
        ('{"prompt_token_ids": [1, 100]}', "token id 100 is outside the vocabulary; use 0 to 99"),
        ('{"prompt_token_ids": [true]}', "token id True is outside"),
        (
            '{"prompt_token_ids": [1], "max_tokens": 0}',
            "'max_tokens' must be an integer of at least 1, not 0",
        ),
        ('{"prompt": "a"}', "'prompt' is a text, and a dummy shape has no tokenizer: pass --model"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"rows.jsonl, line 3: .*{message}"):
        _read(tmp_path, f'{{"prompt_token_ids": [1]}}\n\n{line}\n')


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no rows: write one JSON object a line"):
        _read(tmp_path, "\n")


# -- the floor ---------------------------------------------------------------------------------------------

# 2 layers, hidden 4, intermediate 6, 2 heads and 1 KV head of 3, vocabulary 10. Matrices of a layer:
# q, k, v (2 + 1 + 1) * 3 * 4 = 48; o 2 * 3 * 4 = 24; gate, up, down 3 * 4 * 6 = 72: 144. Head: 40.
TINY: Any = SimpleNamespace(
    num_layers=2, hidden_size=4, intermediate_size=6, num_heads=2, num_kv_heads=1, head_dim=3, vocab_size=10
)
# Two prompts of 3 and 5 tokens, 2 and 4 out: decode reads contexts of 4; and of 6, 7, 8.
WORK = Workload("w", [[1, 2, 3], [1, 2, 4, 5, 6]], [2, 4])


def test_cost_of_a_small_config() -> None:
    cost = Cost.of(TINY, itemsize=2, kv_itemsize=1)
    assert cost == Cost(layer_params=288, head_params=40, kv_bytes=12, pair_flops=48, itemsize=2)
    # 2 tokens behind 4 known ones see 5 and 6 tokens.
    assert cost.prefill_flops(np.array([2]), np.array([6])) == 2 * 288 * 2 + 2 * 40 + 48 * 11
    assert cost.decode_bytes(3, 25) == 3 * 328 * 2 + 25 * 12


def test_floor_of_a_small_workload() -> None:
    cost = Cost.of(TINY, itemsize=2, kv_itemsize=2)
    prefill = 2 * 288 * 8 + 2 * 40 * 2 + 48 * (6 + 15)
    floor = floor_of(cost, WORK, Speed(bytes_per_s=10.0, flops_per_s=100.0))
    assert floor.prefill == pytest.approx(prefill / 100)
    # 3 steps read the weights (197 s), which takes longer than 4 tokens' products (26 s); 25 contexts.
    assert floor.decode == pytest.approx(3 * 328 * 2 / 10 + 25 * 24 / 10)
    assert floor.total == floor.prefill + floor.decode
    slow = floor_of(cost, WORK, Speed(bytes_per_s=10.0, flops_per_s=1.0))
    assert slow.decode == pytest.approx(4 * 2 * 328 / 1 + 25 * 24 / 10)
    two = floor_of(cost, WORK, Speed(bytes_per_s=20.0, flops_per_s=200.0))
    assert two.total == pytest.approx(floor.total / 2)


def test_an_unknown_device_is_measured_and_a_known_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "measure_speed", lambda device: (10.0, 100.0))
    assert device_speed(torch.device("cpu"), 2) == Speed(20.0, 200.0)
    monkeypatch.setitem(roofline.KNOWN_DEVICES, "cpu", (3.0, 5.0))
    assert device_speed(torch.device("cpu"), 1) == Speed(3.0, 5.0)


def test_measuring_ends_in_a_line_for_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = iter([(3.0121e12, 640.2e12), (2.9e12, 654.9e12)])
    monkeypatch.setattr(measure_device, "measure_speed", lambda device: next(figures))
    monkeypatch.setattr("sys.argv", ["measure_device.py", "--device", "cpu", "--times", "2"])
    measure_device.main()
    line = capsys.readouterr().out.splitlines()[-1]
    assert ast.literal_eval("{" + line + "}") == {"cpu": (3.02e12, 655e12)}  # the best of each, rounded up


def test_a_device_is_measured_by_what_it_reads_and_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.5, 0.25, 2.0, 4.0])  # of each way
    monkeypatch.setattr(measure_device, "CPU_BYTES", 2**20)
    monkeypatch.setattr(measure_device, "CPU_SIDE", 8)
    monkeypatch.setattr(measure_device, "best_seconds", lambda work, device, tries: next(seconds))
    assert measure_device.measure_speed(torch.device("cpu")) == (2**20 / 0.25, 2 * 8**3 / 2.0)


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; python tools/measure_device.py runs it")
@pytest.mark.parametrize("programs", [1, 3, 8, 20])
def test_the_read_kernel_reads_every_value_once(programs: int) -> None:
    data = torch.randint(-9, 9, (16 * 64,)).float()
    sums = measure_device.read_triton(data, block=64, warps=4, programs=programs)
    assert len(sums) == programs and sums.sum() == data.sum()


def test_shares_above_1_break_the_floor() -> None:
    fine = {"share_of_peak": 0.4, "share_of_floor": 1.0}
    result = {"share_of_floor": 0.5, "phases": {"prefill": fine, "decode": fine}}
    assert broken_floor(result) == []
    result["phases"] = {"prefill": fine | {"share_of_peak": 1.31}, "decode": fine}
    assert broken_floor(result) == ["prefill is at 131.0% of the device's speed"]
    assert broken_floor({"share_of_floor": 1.001}) == ["the whole is at 100.1% of the floor"]


def test_a_shared_beginning_is_computed_once_and_read_once_a_step() -> None:
    cost = Cost.of(TINY, itemsize=2, kv_itemsize=2)
    floor = floor_of(cost, WORK, Speed(10.0, 100.0), WORK.sharing())
    # The second prompt computes its 3 own tokens, which see 3, 4 and 5.
    assert floor.prefill == pytest.approx((2 * 288 * 6 + 2 * 40 * 2 + 48 * (6 + 12)) / 100)
    # Own contexts 2; and 4, 5, 6; the two shared tokens in each of 3 steps.
    assert floor.decode == pytest.approx(3 * 328 * 2 / 10 + (17 + 6) * 24 / 10)


def test_prompts_that_are_the_same_are_computed_once_and_read_once_a_step() -> None:
    cost = Cost.of(TINY, itemsize=2, kv_itemsize=2)
    work = Workload("w", [[1, 2, 3], [1, 2, 3], [4, 5]], [2, 4, 3])
    floor = floor_of(cost, work, Speed(10.0, 100.0), work.sharing())
    # 3 + 2 tokens, which see 1 to 3 and 1 to 2; each row has logits.
    assert floor.prefill == pytest.approx((2 * 288 * 5 + 2 * 40 * 3 + 48 * (6 + 3)) / 100)
    # Own contexts 1; 1, 2, 3; and 3, 4; the three shared tokens in each of 3 steps.
    assert floor.decode == pytest.approx(3 * 328 * 2 / 10 + (1 + 6 + 7 + 9) * 24 / 10)
    steps = [
        Step(1.0, StepKind.DECODE, np.ones(3, np.int32), np.array([4, 4, 3]), np.array([1, 0, 2])),
        Step(1.0, StepKind.DECODE, np.ones(2, np.int32), np.array([5, 4]), np.array([1, 2])),
        Step(1.0, StepKind.DECODE, np.ones(1, np.int32), np.array([6]), np.array([1])),
    ]
    speed = Speed(10.0, 1e30)
    floor = floor_of(cost, work, speed, work.sharing())
    found = phases(steps, cost, speed, floor, work.sharing())["decode"]
    assert found["share_of_peak"] == pytest.approx(found["share_of_floor"])


def test_the_headlines_floor_on_an_h200(tmp_path: Path) -> None:
    config = load_model_config(write_shape("qwen3-0.6b", tmp_path))
    floor = floor_of(Cost.of(config, 2, 2), headline(256), Speed(4.58e12, 720e12))
    assert 133_966 / floor.total == pytest.approx(38_500, rel=0.005)
    fp8 = floor_of(Cost.of(config, 2, 1), headline(256), Speed(4.58e12, 720e12))
    assert 133_966 / fp8.total == pytest.approx(68_000, rel=0.01)


@pytest.mark.parametrize("name", QWEN3)
def test_every_shape_is_one_the_loader_reads(tmp_path: Path, name: str) -> None:
    config = load_model_config(write_shape(name, tmp_path))
    assert (config.num_layers, config.num_kv_heads) == (QWEN3[name][0], 8)


# -- steps and kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [False, True])
def test_recorded_steps_count_what_the_floor_counts(run_ahead: bool) -> None:
    work = Workload("w", [[5] * 3, [6] * 9, [7] * 20], [4, 1, 6])
    with nanovllm.LLM(
        nanovllm.demo_model_path(), skip_tokenizer_init=True, device="cpu", async_scheduling=run_ahead
    ) as llm:
        params = [nanovllm.SamplingParams(max_tokens=n, ignore_eos=True) for n in work.output_lens]
        llm.stats = recorder = StepRecorder()
        llm.generate([[1, 2]], params[0], use_tqdm=False)
        recorder.take()
        llm.generate(work.prompts, params, use_tqdm=False)
        steps = recorder.take()
        cost = Cost.of(llm.model_config, 4, 4)
    assert recorder.take() == []
    assert steps[0].rows.tolist() == [0, 1, 2] and sorted(steps[1].rows.tolist()) == [0, 2]
    assert [step.kind for step in steps] == [StepKind.PREFILL] + 5 * [StepKind.DECODE]
    assert [len(step.query_lens) for step in steps] == [3, 2, 2, 2, 1, 1]
    assert all(step.seconds > 0 for step in steps)
    speed = Speed(1e9, 1e30)  # so fast at products that weights are read, not waited for
    found = phases(steps, cost, speed, floor_of(cost, work, speed), None)
    for phase in found.values():  # in this run the least steps were taken: peak and floor are the same
        assert phase["share_of_peak"] == pytest.approx(phase["share_of_floor"])
    assert found["prefill"]["tokens"] == work.tokens_in
    assert found["decode"]["tokens"] == work.tokens_out - 3


def test_step_times_take_batches_of_nearly_the_size() -> None:
    def step(size: int, seconds: float, context: int = 10) -> Step:
        ones = np.ones(size, np.int32)
        return Step(seconds, StepKind.DECODE, ones, context * ones, np.arange(size))

    steps = [step(300, 9.0), step(256, 1.0), step(250, 2.0, 30), step(244, 3.0), step(9, 4.0), step(1, 0.5)]
    steps.append(Step(50.0, StepKind.PREFILL, *[np.ones(256, np.int32)] * 3))
    assert step_times(steps) == {
        "300": {"ms": 9000.0, "steps": 1, "mean_context": 10.0},
        "256": {"ms": 2000.0, "steps": 3, "mean_context": pytest.approx(50 / 3)},
        "1": {"ms": 500.0, "steps": 1, "mean_context": 10.0},
    }


def test_a_trace_gives_kernel_time_and_the_gaps_between_replays(tmp_path: Path) -> None:
    def kernel(name: str, start: float, length: float, correlation: int) -> dict[str, Any]:
        return {
            "cat": "kernel",
            "name": name,
            "ts": start,
            "dur": length,
            "args": {"correlation": correlation},
        }

    events = [
        {"name": "process_name", "ph": "M", "args": {"name": "python"}},
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 5, "args": {"correlation": 7}},
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 60, "dur": 5, "args": {"correlation": 8}},
        kernel("prefill", 1, 2, 3),
        kernel("attention", 10, 20, 7),
        kernel("norm", 31, 4, 7),
        kernel("sample", 40, 10, 5),  # between two replays
        kernel("attention", 70, 21, 8),
    ]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    kernels, graph_calls = read_trace(tmp_path / "trace.json.gz")
    assert [k.name for k in kernels] == ["prefill", "attention", "norm", "sample", "attention"]
    replays = group_replays(kernels, graph_calls)
    assert [[k.name for k in replay] for replay in replays] == [["attention", "norm"], ["attention"]]
    # 35 to 70 less the 10 of sampling.
    assert replay_times(kernels, replays) == {"count": 2, "step_us": 60.0, "kernel_us": 34.0, "gap_us": 25.0}
    assert busy_time([kernels[1], kernels[1], kernels[2]]) == 24.0  # what overlaps counts once


def test_exposed_host_time_is_of_the_same_steps() -> None:
    ones = np.ones(3, np.int32)
    kinds = [StepKind.PREFILL, *[StepKind.DECODE] * 4]
    seconds = [9.0, 7.0, 1e-3, 1e-3, 1e-3]
    steps = [Step(s, kind, ones, ones, ones) for s, kind in zip(seconds, kinds, strict=True)]
    found = bench.host_exposed(steps, {"step_us": 1200.0, "kernel_us": 900.0, "gap_us": 20.0})
    assert found["batch"] == 3 and found["step_us"] == pytest.approx(1000)
    assert found["exposed_us"] == pytest.approx(100) and found["exposed_share"] == pytest.approx(0.1)
    assert found["profiled_exposed_share"] == 0.25 and found["replay_gap_us"] == 20


def test_the_costliest_come_first_and_their_shares_are_of_everything() -> None:
    rows = costliest([("a", 1, 10.0), ("b", 3, 30.0), ("c", 2, 60.0)], count=2)
    assert [(row["name"], row["calls"], row["share"]) for row in rows] == [("c", 2, 0.6), ("b", 3, 0.3)]


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


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares measuring the machine's."""
    monkeypatch.setattr(bench, "device_speed", lambda device, num_devices: Speed(1e10 * num_devices, 1e12))


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
    # No earlier run had these ids; the second long one finds 37 blocks of 16 tokens that the first computes.
    assert result["phases"]["prefill"]["tokens"] == result["tokens_in"] - 592


@pytest.mark.parametrize("broken", [True, False])
def test_a_broken_floor_is_reported(
    broken: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = Speed(1e3, 1e3) if broken else Speed(1e15, 1e15)
    monkeypatch.setattr(bench, "device_speed", lambda device, num_devices: speed)
    bench.main(["--workload", "demo", "--num-seqs", "2", "--device", "cpu", "--repeat", "1"])
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["floor_broken"] is broken
    assert ("the floor is broken: the whole is at" in printed) == broken
    assert ("tools/measure_device.py" in printed and "KNOWN_DEVICES" in printed) == broken


@pytest.mark.usefixtures("known_speed")
def test_transformers_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    result = _bench(capsys, "--engine", "transformers", "--workload", "demo", "--num-seqs", "2")
    assert result["engine"] == "transformers" and "phases" not in result


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--workload", "fast"],
            "none of headline, queue, single, few, chat, classify, long, prefix, samples",
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
            "--engine transformers samples all rows alike",
        ),
        (["--shape", "qwen3-8b", "--model", "x"], "--shape is for dummy weights"),
        (["--shape", "qwen3-8b", "--workload", "demo"], "needs a tokenizer"),
        (["--workload", "single", "--num-seqs", "2"], "is one sequence"),
        (["--repeat", "0"], "--repeat must be at least 1"),
        (["--engine", "vllm", "--profile"], "--engine nanovllm only"),
        (["--engine", "transformers", "--tensor-parallel-size", "2"], "has no tensor_parallel_size"),
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
    args = bench.parse_args(
        ["--kv-cache-dtype", "fp8", "--tensor-parallel-size", "2", "--deterministic", "--device", "cpu"]
    )
    assert args.options == {"kv_cache_dtype": "fp8", "tensor_parallel_size": 2, "deterministic": True}
    assert bench.parse_args(["--workload", "prefix"]).prefix_caching is True
    assert bench.parse_args(["--workload", "samples"]).prefix_caching is True
    assert bench.parse_args(["--workload", "queue"]).prefix_caching is False


def test_sampling_is_parsed_into_fields() -> None:
    def parsed(text: str, engine: str = "nanovllm") -> dict[str, Any]:
        return bench.parse_args(["--device", "cpu", "--engine", engine, "--sampling", text]).sampling

    assert parsed("") == {"temperature": 0.6}
    assert parsed("temperature=0") == {"temperature": 0}
    assert parsed("top_p=0.95, top_k=20") == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert parsed("seed=7,min_p=1e-1") == {"temperature": 0.6, "seed": 7, "min_p": 0.1}
    assert parsed("flag=true,word=x", "vllm") == {
        "temperature": 0.6,
        "flag": True,
        "word": "x",
    }  # its to judge
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
