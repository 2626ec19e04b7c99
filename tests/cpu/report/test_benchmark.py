"""What bench.py computes: the roofline floor against hand-computed numbers, steps, and kernels of a trace.

No test measures time.
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
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.batch import StepKind
from nanovllm.cpu import isa
from nanovllm.formats.fp8.loading import Stored
from nanovllm.formats.fp8.method import Fp8Config
from nanovllm.formats.mxfp4.method import Mxfp4Config
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import load_model_config
from nanovllm.moe.layers import MoESpec
from nanovllm.quantization.config import QuantConfig
from tools import measure_device
from tools.benchmark import roofline
from tools.benchmark.kernels import (
    busy_time,
    costliest,
    group_replays,
    idle_times,
    read_trace,
    replay_times,
)
from tools.benchmark.roofline import Cost, Speed, broken_floor, device_speed, floor_of, prefill_flops
from tools.benchmark.shapes import QWEN3, QWEN3_MOE, write_shape
from tools.benchmark.steps import Step, StepRecorder, phases, step_times
from tools.benchmark.workloads import Workload, headline

# -- the floor ---------------------------------------------------------------------------------------------

# 2 layers, hidden 4, intermediate 6, 2 heads and 1 KV head of 3, vocabulary 10. Matrices of a layer:
# q, k, v (2 + 1 + 1) * 3 * 4 = 48; o 2 * 3 * 4 = 24; gate, up, down 3 * 4 * 6 = 72: 144. Head: 40.
TINY: Any = SimpleNamespace(
    num_layers=2,
    hidden_size=4,
    intermediate_size=6,
    num_heads=2,
    num_kv_heads=1,
    head_dim=3,
    vocab_size=10,
    moe=None,
    quant=QuantConfig(),
    spec=lambda layer: AttentionSpec(2, 1, 3),
)
COST = Cost.of(TINY, itemsize=2, kv_itemsize=2)
# Two prompts of 3 and 5 tokens, 2 and 4 out: decode reads contexts of 4; and of 6, 7, 8.
WORK = Workload("w", [[1, 2, 3], [1, 2, 4, 5, 6]], [2, 4])


def test_cost_of_a_small_config() -> None:
    cost = Cost.of(TINY, itemsize=2, kv_itemsize=1)
    assert cost == Cost(layer_params=288, head_params=40, kv_bytes=12, pair_flops=48, itemsize=2)
    # 2 tokens behind 4 known ones see 5 and 6 tokens.
    assert prefill_flops(cost, np.array([2]), np.array([6])) == 2 * 288 * 2 + 2 * 40 + 48 * 11
    assert cost.decode_bytes(3, 25) == 3 * 328 * 2 + 25 * 12


def test_cost_of_weights_in_fp8() -> None:
    """Half the bytes and twice the speed in the layers, if there are products in FP8; not in the LM head."""
    quant = Fp8Config(Stored.ROWS)
    for products in (False, True):
        config = SimpleNamespace(**vars(TINY) | {"quant": quant.on((9, 0) if products else (8, 0))})
        cost, size, speed = Cost.of(config, itemsize=2, kv_itemsize=2), 2 - products, 1 + products
        assert cost.decode_bytes(3, 25) == 3 * (288 * size + 40 * 2) + 25 * 24
        assert cost.decode_flops(5) == 5 * 2 * (288 / speed + 40)
        assert prefill_flops(cost, np.array([2]), np.array([2])) == 2 * 288 / speed * 2 + 2 * 40 + 48 * 3


def test_cost_of_experts() -> None:
    """4 experts of width 5 in the second layer, 2 for each token, and a shared one of width 7."""
    spec = MoESpec(4, 2, 5, shared_width=7, step=2)
    cost = Cost.of(SimpleNamespace(**vars(TINY) | {"moe": spec}), itemsize=2, kv_itemsize=2)
    expert, router, shared = 3 * 4 * 5, 4 * 4, 3 * 4 * 7 + 4
    assert cost.layer_params == 288 - 72 + router + shared + 2 * expert
    assert cost.decode_bytes(1, 0) == 2 * (288 - 72 + router + shared + 40)
    assert cost.decode_flops(3) == 2 * 3 * (cost.layer_params + 40)
    assert [*cost.expert_bytes(np.array([0, 1, 2, 1000]))] == pytest.approx(
        [2 * n * expert for n in (0, 2, 3, 4)]
    )
    floor = floor_of(cost, WORK, Speed(bytes_per_s=10.0, flops_per_s=1e9))
    rows = (2, 1, 1)
    read = 3 * cost.decode_bytes(1, 0) + sum(float(cost.expert_bytes(np.array(n))) for n in rows) + 25 * 24
    assert floor.decode == pytest.approx(read / 10)


def test_cost_of_experts_in_mxfp4() -> None:
    """4.25 bits for each of their weights; the other weights are in the model's dtype."""
    quant, spec = Mxfp4Config(), MoESpec(4, 2, 5, step=1)
    for packs in (False, True):
        own = {"moe": spec, "quant": quant.on((9, 0) if packs else (0, 0))}
        cost = Cost.of(SimpleNamespace(**vars(TINY) | own), itemsize=2, kv_itemsize=2)
        size = 4.25 / 8 if packs else 2
        assert float(cost.expert_bytes(np.array(1000))) == pytest.approx(size * 4 * 2 * 3 * 4 * 5)
        assert cost.decode_bytes(1, 0) == 2 * (288 - 2 * 72 + 2 * 4 * 4 + 40)


def test_cost_of_windows() -> None:
    """The second layer sees 4 tokens: the new one and 3 before it."""
    config = SimpleNamespace(**vars(TINY))
    config.spec = lambda layer: AttentionSpec(2, 1, 3, window=(None, 4)[layer])
    cost = Cost.of(config, itemsize=2, kv_itemsize=2)
    assert cost.windows == ((4, 0.5),)
    assert cost.read_tokens(np.array([3, 4, 9])) == (3 + 4 + 9) / 2 + (3 + 4 + 4) / 2
    pairs = {(2, 6): 11 - (1 + 2) / 2, (3, 3): 6, (7, 7): 28 - (1 + 2 + 3) / 2, (1, 9): 9 - 5 / 2}
    for (query, context), seen in pairs.items():
        flops = prefill_flops(cost, np.array([query]), np.array([context]))
        assert flops == 2 * 288 * query + 2 * 40 + 48 * seen
    full, floor = (floor_of(each, WORK, Speed(10.0, 1e9)) for each in (COST, cost))
    assert full.decode - floor.decode == pytest.approx((2 + 3 + 4) / 2 * 24 / 10)  # of contexts of 6, 7, 8
    point = SimpleNamespace(num_computed_tokens=0, num_attention_pairs=0, num_decode_steps=1)
    point.num_decode_rows, point.num_context_tokens = 2, 20
    assert cost.floor(point, Speed(10.0, 1e9)) == pytest.approx((328 * 2 + 24 * (10 + 4)) / 10)  # type: ignore[arg-type]


def test_floor_of_a_small_workload() -> None:
    prefill = 2 * 288 * 8 + 2 * 40 * 2 + 48 * (6 + 15)
    floor = floor_of(COST, WORK, Speed(bytes_per_s=10.0, flops_per_s=100.0))
    assert floor.prefill == pytest.approx(prefill / 100)
    # 3 steps read the weights (197 s), which takes longer than 4 tokens' products (26 s); 25 contexts.
    assert floor.decode == pytest.approx(3 * 328 * 2 / 10 + 25 * 24 / 10)
    assert floor.total == floor.prefill + floor.decode
    slow = floor_of(COST, WORK, Speed(bytes_per_s=10.0, flops_per_s=1.0))
    assert slow.decode == pytest.approx(4 * 2 * 328 / 1 + 25 * 24 / 10)
    two = floor_of(COST, WORK, Speed(bytes_per_s=20.0, flops_per_s=200.0))
    assert two.total == pytest.approx(floor.total / 2)


def test_an_unknown_device_is_measured_and_a_known_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "measure_speed", lambda device, dtype: (10.0, 2e2 / dtype.itemsize))
    cpu = torch.device("cpu")
    assert device_speed(cpu, 2, torch.bfloat16) == Speed(20.0, 200.0)
    monkeypatch.setitem(roofline.KNOWN_DEVICES, "cpu", (3.0, 5.0))
    assert device_speed(cpu, 1, torch.bfloat16) == Speed(3.0, 5.0)
    assert device_speed(cpu, 1, torch.float32) == Speed(10.0, 50.0)  # known are products in bfloat16


def test_measuring_ends_in_a_line_for_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = iter([(3.0121e12, 640.2e12), (2.9e12, 654.9e12)])
    monkeypatch.setattr(measure_device, "measure_speed", lambda device, dtype: next(figures))
    monkeypatch.setattr("sys.argv", ["measure_device.py", "--device", "cpu", "--times", "2"])
    measure_device.main()
    line = capsys.readouterr().out.splitlines()[-1]
    # The best measurement of each, rounded up.
    assert ast.literal_eval("{" + line + "}") == {"cpu": (3.02e12, 655e12)}


def test_a_device_is_measured_by_what_it_reads_and_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = [0.5, 0.25, 0.3] if isa.has_kernels() else [0.5, 0.25]
    seconds = iter([*reads, 4.0, 3.0, 2.0])  # in each way
    monkeypatch.setattr(measure_device, "CPU_BYTES", 2**20)
    monkeypatch.setattr(measure_device, "CPU_SIDE", 8)
    monkeypatch.setattr(measure_device, "best_seconds", lambda work, device, tries: next(seconds))
    assert measure_device.measure_speed(torch.device("cpu"), torch.float32) == (2**20 / 0.25, 2 * 8**3 / 2.0)


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


def test_a_shared_prefix_is_computed_once_and_read_once_a_step() -> None:
    floor = floor_of(COST, WORK, Speed(10.0, 100.0), WORK.sharing())
    # The second prompt computes its own 3 tokens, which attend to 3, 4 and 5 tokens.
    assert floor.prefill == pytest.approx((2 * 288 * 6 + 2 * 40 * 2 + 48 * (6 + 12)) / 100)
    # Own contexts: 2; and 4, 5, 6. The two shared tokens are read in each of 3 steps.
    assert floor.decode == pytest.approx(3 * 328 * 2 / 10 + (17 + 6) * 24 / 10)


def test_equal_prompts_are_computed_once_and_read_once_a_step() -> None:
    work = Workload("w", [[1, 2, 3], [1, 2, 3], [4, 5]], [2, 4, 3])
    floor = floor_of(COST, work, Speed(10.0, 100.0), work.sharing())
    # 3 + 2 tokens, which attend to 1 to 3 and 1 to 2 tokens; each row has logits.
    assert floor.prefill == pytest.approx((2 * 288 * 5 + 2 * 40 * 3 + 48 * (6 + 3)) / 100)
    # Own contexts: 1; 1, 2, 3; and 3, 4. The three shared tokens are read in each of 3 steps.
    assert floor.decode == pytest.approx(3 * 328 * 2 / 10 + (1 + 6 + 7 + 9) * 24 / 10)
    steps = [
        Step(1.0, StepKind.DECODE, np.ones(3, np.int32), np.array([4, 4, 3]), np.array([1, 0, 2])),
        Step(1.0, StepKind.DECODE, np.ones(2, np.int32), np.array([5, 4]), np.array([1, 2])),
        Step(1.0, StepKind.DECODE, np.ones(1, np.int32), np.array([6]), np.array([1])),
    ]
    speed = Speed(10.0, 1e30)
    floor = floor_of(COST, work, speed, work.sharing())
    found = phases(steps, COST, speed, floor, work.sharing())["decode"]
    assert found["share_of_peak"] == pytest.approx(found["share_of_floor"])


def test_the_headlines_floor_on_an_h200(tmp_path: Path) -> None:
    config = load_model_config(write_shape("qwen3-0.6b", tmp_path))
    floor = floor_of(Cost.of(config, 2, 2), headline(256), Speed(4.58e12, 720e12))
    assert 133_966 / floor.total == pytest.approx(38_500, rel=0.005)
    fp8 = floor_of(Cost.of(config, 2, 1), headline(256), Speed(4.58e12, 720e12))
    assert 133_966 / fp8.total == pytest.approx(68_000, rel=0.01)


def test_the_shape_of_gemma(tmp_path: Path) -> None:
    config = load_model_config(write_shape("gemma3-4b", tmp_path))
    assert [config.spec(layer).window for layer in (0, 4, 5, 33)] == [1024, 1024, None, 1024]
    assert (config.num_layers, config.head_dim, config.longest) == (34, 256, 131_072)


@pytest.mark.parametrize(
    ("name", "layers", "experts", "total"), [("20b", 24, 32, 20.9e9), ("120b", 36, 128, 117e9)]
)
def test_the_shape_of_gpt_oss(tmp_path: Path, name: str, layers: int, experts: int, total: float) -> None:
    config = load_model_config(write_shape(f"gpt-oss-{name}", tmp_path))
    assert [config.spec(layer).window for layer in range(layers)] == layers // 2 * [128, None]
    moe, quant = config.moe, type(config.quant).__name__
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.width, quant) == (experts, 4, 2880, "Mxfp4Config")
    outside = (experts - 4) * layers * 3 * 2880 * 2880 + 2 * config.vocab_size * 2880
    assert Cost.of(config, 2, 2).layer_params + outside == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize("name", QWEN3)
def test_every_shape_is_one_the_loader_reads(tmp_path: Path, name: str) -> None:
    config = load_model_config(write_shape(name, tmp_path))
    kv_heads = QWEN3_MOE.get(name, {}).get("num_key_value_heads", 8)
    assert (config.num_layers, config.num_kv_heads, config.longest) == (QWEN3[name][0], kv_heads, 40_960)
    assert load_model_config(write_shape(name, tmp_path, 131_072)).longest == 131_072


# -- steps and kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [False, True])
def test_recorded_steps_count_what_the_floor_counts(run_ahead: bool) -> None:
    work = Workload("w", [[5] * 3, [6] * 9, [7] * 20], [4, 1, 6])
    with nanovllm.LLM(
        nanovllm.demo_model_path(), skip_tokenizer_init=True, device="cpu", async_scheduling=run_ahead
    ) as llm:
        params = [nanovllm.SamplingParams(max_tokens=n, ignore_eos=True) for n in work.output_lens]
        recorder = StepRecorder(llm)
        llm.generate([[1, 2]], params[0], use_tqdm=False)
        recorder.take()
        llm.generate(work.prompts, params, use_tqdm=False)
        steps = recorder.take()
        cost = Cost.of(llm.model_config, 4, 4)
    assert recorder.take() == []
    assert sorted(steps[0].rows.tolist()) == [0, 1, 2] and sorted(steps[1].rows.tolist()) == [0, 2]
    assert [step.kind for step in steps] == [StepKind.PREFILL] + 5 * [StepKind.DECODE]
    assert [len(step.query_lens) for step in steps] == [3, 2, 2, 2, 1, 1]
    assert all(step.seconds > 0 for step in steps)
    speed = Speed(1e9, 1e30)  # with compute this fast, only reading the weights counts
    found = phases(steps, cost, speed, floor_of(cost, work, speed), None)
    for phase in found.values():  # this run takes the fewest possible steps, so peak and floor are equal
        assert phase["share_of_peak"] == pytest.approx(phase["share_of_floor"])
    assert found["prefill"]["tokens"] == work.tokens_in
    assert found["decode"]["tokens"] == work.tokens_out - 3


def test_step_times_group_batches_of_similar_size() -> None:
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
        args = {"correlation": correlation}
        return {"cat": "kernel", "name": name, "ts": start, "dur": length, "args": args}

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
    # 35 to 70, minus the 10 of sampling
    assert replay_times(kernels, replays) == {"count": 2, "step_us": 60.0, "kernel_us": 34.0, "gap_us": 25.0}
    assert busy_time([kernels[1], kernels[1], kernels[2]]) == 24.0  # overlapping kernels count once


def test_idle_time_is_of_the_innermost_range_of_the_host(tmp_path: Path) -> None:
    def event(cat: str, name: str, start: float, length: float) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": start, "dur": length}

    events = [
        event("kernel", "a", 10, 10),
        event("kernel", "b", 15, 15),  # up to 30, over the end of the first
        event("kernel", "c", 50, 10),
        event("kernel", "d", 60, 1),
        event("kernel", "e", 71, 1),
        event("user_annotation", "step", 0, 48),
        event("user_annotation", "plan", 35, 5),
        event("user_annotation", "plan", 52, 3),  # a kernel runs
        event("gpu_user_annotation", "step", 30, 20),
    ]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert idle_times(tmp_path / "trace.json.gz") == {"step": 13.0, "plan": 5.0, "": 12.0}


def test_exposed_host_time_is_of_the_same_steps() -> None:
    ones = np.ones(3, np.int32)
    kinds = [StepKind.PREFILL, *[StepKind.DECODE] * 4]
    seconds = [9.0, 7.0, 1e-3, 1e-3, 1e-3]
    steps = [Step(s, kind, ones, ones, ones) for s, kind in zip(seconds, kinds, strict=True)]
    found = bench.host_exposed(steps, {"step_us": 1200.0, "kernel_us": 900.0, "gap_us": 20.0})
    assert found["batch"] == 3 and found["step_us"] == pytest.approx(1000)
    assert found["exposed_us"] == pytest.approx(100) and found["exposed_share"] == pytest.approx(0.1)
    assert found["profiled_exposed_share"] == 0.25 and found["replay_gap_us"] == 20


def test_kernels_are_sorted_by_time_with_shares_of_the_total() -> None:
    rows = costliest([(str(number), number, 10.0 * number) for number in range(12)])
    found = [(row["name"], row["calls"], row["share"]) for row in rows]
    assert found == [(str(number), number, round(number / 66, 4)) for number in range(11, 1, -1)]
