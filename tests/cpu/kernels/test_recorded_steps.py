"""Recorded decode steps on a CPU: they give the tokens of eager ones, and nothing is recorded that computes
without kernels.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import inside
import pytest
import torch
from checked_llm import make_tiny
from sampling_cases import filters_at, make_filters, make_rows
from tensors import randn
from tiny_models import VOCAB_SIZE, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.cpu import isa
from nanovllm.cpu.kernels.checking import CHECKED
from nanovllm.cpu.recorded import RecordedSteps
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.last_tokens import keep_tokens, take_tokens
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.sampling import draw

pytestmark = pytest.mark.skipif(not isa.has_kernels(), reason="no kernels for CPUs here")
WIDTH, SLOTS = 320, 80


class Steps:
    """Steps of any number of rows, which read one set of buffers: as those of a model, but small."""

    def __init__(self, seed: int = 0) -> None:
        self.weight = 1.0 + 0.1 * randn(WIDTH, seed=seed)
        self.x = randn(SLOTS, 2 * WIDTH, seed=seed)
        self.last = torch.zeros(SLOTS, dtype=torch.int64)
        self.ids, self.slots = torch.full((SLOTS,), -1), torch.arange(SLOTS)
        self.columns = make_rows(SLOTS, "cpu"), make_filters(SLOTS, "cpu")
        self.recorded = RecordedSteps()
        self.calls = 0

    def make(self, rows: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        def step() -> tuple[torch.Tensor, torch.Tensor]:
            self.calls += 1
            known = take_tokens(self.ids[:rows], self.slots[:rows], self.last, WIDTH)
            logits = rms_norm(silu_and_mul(self.x[:rows]), self.weight, 1e-6)[:, : WIDTH - 7]
            every, filters = self.columns
            whole = slice(0, rows)
            tokens = draw(logits, *every.pick(whole, filters_at(filters, whole)))
            keep_tokens(tokens, self.slots[:rows], self.last)
            return known, tokens

        return step

    def check(self, rows: int, seed: int) -> None:
        """A recorded step gives what an eager one gives from the same inputs."""
        self.x.copy_(randn(SLOTS, 2 * WIDTH, seed=seed))
        before = self.last.clone()
        found = self.recorded.run(rows, lambda: self.make(rows))
        known, tokens = (each.clone() for each in found)
        after = self.last.clone()
        self.last.copy_(before)
        expected = self.make(rows)()
        assert torch.equal(known, expected[0]) and torch.equal(tokens, expected[1])
        assert torch.equal(after, self.last)
        assert torch.equal(after[:rows], tokens)


def test_replays_compute_from_new_inputs() -> None:
    steps = Steps()
    for seed, rows in enumerate([5, 5, 7, 5, 1, 7, 64, 1, 64, 5]):
        steps.check(rows, seed)
    assert len(steps.recorded) == 4
    assert steps.calls == 10 + 2 * 4  # eager ones, and each size to rehearse and to record it


def test_the_number_of_recordings_is_bounded() -> None:
    steps = Steps()
    for rows in range(1, 67):
        steps.check(rows, rows)
        steps.check(1, rows)
    assert len(steps.recorded) == 64
    calls = steps.calls
    steps.check(1, 0)  # used all the time, so it is still there
    assert steps.calls == calls + 1
    steps.check(2, 0)  # the first one that went
    assert steps.calls == calls + 4


def test_recordings_are_forgotten() -> None:
    steps = Steps()
    steps.check(3, 0)
    steps.recorded.clear()
    assert len(steps.recorded) == 0
    steps.weight = 3 * steps.weight  # a new address
    steps.check(3, 1)


def test_another_number_of_threads() -> None:
    steps, threads = Steps(), torch.get_num_threads()
    try:
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            for seed in range(3):
                steps.check(40, seed)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: x + 1, "add"),
        (lambda x: x.copy_(x.clone()), "clone"),
        (lambda x: x[:, ::2].contiguous(), "contiguous"),
        (lambda x: x[:, :3].reshape(-1), "reshape"),
        (lambda x: x.to(torch.float64), "to"),
        (lambda x: x[0, 0].item(), "item"),
        (lambda x: torch.zeros(3), "zeros"),
    ],
)
def test_a_step_with_operations_of_torch_is_not_recorded(
    operation: Callable[[torch.Tensor], object], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight = randn(4, 64), torch.ones(64)
    recorded = RecordedSteps()

    def step() -> object:
        operation(rms_norm(x, weight, 1e-6))
        return "the end"

    with torch.inference_mode(), caplog.at_level(logging.INFO, "nanovllm"):
        assert recorded.run(4, lambda: step) is None
    assert name in recorded.reason and not recorded.usable and len(recorded) == 0
    assert f"torch's {recorded.reason}" in caplog.text


def test_a_step_that_cannot_be_recorded_has_run_nothing() -> None:
    """What it moved, such as a state, would be moved again by the eager step."""
    last, tokens, slots = torch.zeros(4, dtype=torch.int64), torch.arange(1, 4), torch.arange(3)

    def step() -> object:
        keep_tokens(tokens, slots, last)
        return tokens + 1

    assert RecordedSteps().run(3, lambda: step) is None
    assert not last.any()


@pytest.mark.skipif(CHECKED, reason="nothing is recorded while addresses are checked")
@pytest.mark.parametrize(
    ("family", "records"),
    [("qwen3_5", True), ("qwen3_next", False), ("lfm2", True), ("lfm2_moe", False)],
)
def test_models_with_states(tmp_path: Path, family: str, records: bool) -> None:
    """Steps of experts call torch, behind layers whose states have moved."""
    folder = write_tiny_model(tmp_path, family)
    with make_tiny(folder, enforce_eager=True) as llm:
        expected = answers(llm)
    with make_tiny(folder) as llm:
        assert answers(llm) == expected == answers(llm)
        recorded = inside.runner(llm).recorded
        assert recorded is not None and recorded.usable == records == (len(recorded) > 0)


def test_views_and_new_memory_can_be_recorded() -> None:
    x, weight = randn(4, 64), torch.ones(64)

    def step() -> torch.Tensor:
        parts = x.split([32, 32], dim=-1)
        y = rms_norm(parts[0], weight[:32], 1e-6).contiguous().reshape(2, -1).view(4, 32)
        assert torch.empty_like(y).shape == y.shape
        return rms_norm(y.to(torch.float32).unflatten(-1, (2, 16)).flatten(1)[:, :16], weight[:16], 1e-6)

    recorded = RecordedSteps()
    with torch.inference_mode():
        for seed in range(3):
            x.copy_(randn(4, 64, seed=seed))
            assert torch.equal(recorded.run(4, lambda: step), step())
    assert len(recorded) == 1


def test_recording_imports_no_compiler_of_torch() -> None:
    """It takes seconds to import."""
    code = (
        "import sys, torch\n"
        "from nanovllm.cpu.recorded import RecordedSteps\n"
        "recorded = RecordedSteps()\n"
        "recorded.run(1, lambda: lambda: torch.empty(3)[:2])\n"
        "assert len(recorded) == 1\n"
        "recorded.run(2, lambda: lambda: torch.empty(3) + 1)\n"
        "assert recorded.reason.startswith('add'), recorded.reason\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_of_a_step_are_raised() -> None:
    def step() -> None:
        raise RuntimeError("out of tokens")

    recorded = RecordedSteps()
    with pytest.raises(RuntimeError, match="out of tokens"):
        recorded.run(1, lambda: step)
    assert recorded.usable and len(recorded) == 0


def test_two_threads() -> None:
    """Each with steps of its own, on one team of threads."""
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            steps = Steps(seed)
            for each in range(30):
                steps.check(1 + (7 * each + seed) % 40, each)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# -- whole models -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def answers(llm: LLM, count: int = 9) -> list[list[int]]:
    """Of prompts whose answers end one by one, greedy ones and drawn ones."""
    prompts = [[2 + (i + 5 * j) % (VOCAB_SIZE - 2) for j in range(1 + 3 * i)] for i in range(count)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.9)[i % 2],
            top_k=(0, 20)[i % 2],
            top_p=(1.0, 0.8)[i % 4 == 3],
            seed=i,
            max_tokens=4 + 3 * i,
            ignore_eos=True,
        )
        for i in range(count)
    ]
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.skipif(CHECKED, reason="nothing is recorded while addresses are checked")
@pytest.mark.parametrize("options", [{}, {"num_kvcache_blocks": 14}, {"async_scheduling": False}])
def test_recorded_tokens_are_eager_ones(tiny: Path, options: dict[str, object]) -> None:
    """The batch grows and shrinks; with few blocks sequences are preempted."""
    with make_tiny(tiny, enforce_eager=True, **options) as llm:
        expected = answers(llm)
        assert inside.runner(llm).recorded is None
    with make_tiny(tiny, **options) as llm:
        for _ in range(2):
            assert answers(llm) == expected
        recorded = inside.runner(llm).recorded
        assert recorded is not None and recorded.usable and len(recorded) > 0


@pytest.mark.skipif(CHECKED, reason="nothing is recorded while addresses are checked")
def test_two_engines_and_steps_with_logprobs(tiny: Path) -> None:
    logprobs = SamplingParams(temperature=0.7, seed=1, max_tokens=6, logprobs=2, ignore_eos=True)
    with make_tiny(tiny) as one, make_tiny(tiny, enforce_eager=True) as two:
        expected = answers(two)
        [scored] = two.generate([[5, 6, 7]], logprobs, use_tqdm=False)
        for _ in range(2):
            assert answers(one, 5) == expected[:5]
            [found] = one.generate([[5, 6, 7]], logprobs, use_tqdm=False)
            assert found["token_ids"] == scored["token_ids"]
            assert answers(two, 3) == expected[:3]


@pytest.mark.skipif(CHECKED, reason="nothing is recorded while addresses are checked")
def test_sleep_and_new_weights(tiny: Path) -> None:
    with make_tiny(tiny) as llm:
        expected = answers(llm, 4)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm, 4) == expected
        state = {name: 1.5 * tensor for name, tensor in _tensors(tiny).items()}
        llm.update_weights(state.items())
        changed = answers(llm, 4)
        assert changed != expected
        llm.update_weights(_tensors(tiny).items())
        assert answers(llm, 4) == expected


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")
