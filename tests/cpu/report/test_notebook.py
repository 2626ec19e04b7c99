"""In a notebook kernel: engines of one and two ranks, the stop button, a second engine, an error."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inside
import pytest
from jupyter_client.manager import start_new_kernel
from tiny_models import transformers_greedy, write_tiny_model

PROMPT = [5, 6, 7]
SECONDS = 120


class Notebook:
    """A kernel that runs cells in order.

    Cells are sent with `stop_on_error=False`; otherwise, after an error, a kernel drops the next cells.
    """

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, code: str, stream: str = "stdout") -> tuple[dict[str, Any], str]:
        """Run a cell; return the kernel's reply and what the cell printed."""
        printed: list[str] = []

        def collect(message: dict[str, Any]) -> None:
            if message["content"].get("name") == stream:
                printed.append(message["content"]["text"])

        reply = self.client.execute_interactive(
            code, stop_on_error=False, timeout=SECONDS, output_hook=collect
        )
        return reply["content"], "".join(printed)

    def value(self, expression: str) -> Any:
        """The value of a cell that must not fail."""
        reply, printed = self.run(f"print(repr({expression}))")
        assert reply["status"] == "ok", reply
        return ast.literal_eval(printed.splitlines()[-1])

    def stop_button(self, code: str, marker: Path) -> dict[str, Any]:
        """Run a cell that creates the file `marker`; then press the stop button; return the reply."""
        request = self.client.execute(code, stop_on_error=False)
        deadline = time.monotonic() + SECONDS
        while not marker.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        self.manager.interrupt_kernel()
        while True:
            reply = self.client.get_shell_msg(timeout=SECONDS)
            if reply["parent_header"]["msg_id"] == request:
                return reply["content"]


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    yield notebook
    notebook.client.stop_channels()
    notebook.manager.shutdown_kernel()


def test_a_bar_is_one_line_of_text_and_no_warning(notebook: Notebook) -> None:
    """As a saved notebook shows it, also without its kernel; on a clock of its own."""
    reply, printed = notebook.run(
        "import os\n"
        "os.environ.pop('TQDM_DISABLE', None)\n"
        "import tqdm.std\n"
        "now = 0.0\n"
        "tqdm.std.time = lambda: now\n"
        "from nanovllm.batch import StepKind\n"
        "from nanovllm.engine.stats import progress_of\n"
        "from nanovllm.engine.stats import StepStats\n"
        "with progress_of(30, True) as progress:\n"
        "    for _ in range(30):\n"
        "        now += 0.15\n"
        "        progress.update(StepStats(StepKind.PREFILL, 0, 0, 0, 0.15, 0, 0, 1, 0, 0, 0.0))",
        "stderr",
    )
    assert reply["status"] == "ok", reply
    assert printed.endswith("\n") and printed.count("\n") == 1, printed
    states = re.split(r"\r+", printed.strip())
    done = [state.rsplit("| ")[-1].split()[0] for state in states]
    assert done[0] == "0/30" and done[-1] == "30/30" and len(done) <= 12, "a saved notebook keeps each redraw"
    assert all(len(state) <= 80 for state in states)


@pytest.mark.parametrize("size", [1, 2])
def test_notebook(notebook: Notebook, size: int, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", eos_token_id=1)
    expected = transformers_greedy(model, PROMPT, 8)
    answer = f"generate([{PROMPT}], greedy)[0]['token_ids']"
    reply, _ = notebook.run(
        "from nanovllm import LLM, SamplingParams\n"
        "greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)\n"
        "options = dict(device='cpu', skip_tokenizer_init=True, max_model_len=64)\n"
        f"options |= dict(tensor_parallel_size={size})\n"
        f"llm = LLM({str(model)!r}, **options)"
    )
    assert reply["status"] == "ok", reply
    assert notebook.value(f"llm.{answer}") == expected
    assert notebook.run(f"llm.generate([{PROMPT}], greedy)", "stderr")[1] == ""  # no bar for a single prompt

    reply, _ = notebook.run("llm.generate([[5], [1000]], greedy)")
    assert reply["ename"] == "ValueError" and "1000" in reply["evalue"]

    marker = tmp_path / "running"
    endless = (
        f"open({str(marker)!r}, 'w').close()\nwhile True: llm.generate([[5]] * 4, greedy, use_tqdm=False)"
    )
    assert notebook.stop_button(endless, marker)["ename"] == "KeyboardInterrupt"
    assert notebook.value("llm.is_finished()") is True
    assert notebook.value(f"llm.{answer}") == expected

    assert notebook.run(f"second = LLM({str(model)!r}, **options)")[0]["status"] == "ok"
    assert notebook.value(f"second.{answer}") == notebook.value(f"llm.{answer}") == expected
    pids = notebook.value(f"{inside.worker_pids('llm')} + {inside.worker_pids('second')}")
    assert len(pids) == 2 * (size - 1) and all(Path("/proc", str(pid)).exists() for pid in pids)
    notebook.run("llm.close()")
    assert notebook.value(f"second.{answer}") == expected
    notebook.client.shutdown()  # while the second engine is open
    deadline = time.monotonic() + SECONDS
    while any(Path("/proc", str(pid)).exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
