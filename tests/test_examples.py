"""The scripts of `examples/` run, each as it stands, and print what they promise."""

from __future__ import annotations

import json
import re
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inside
import pytest
import torch

from nanovllm.answers import CompletionOutput

EXAMPLES = Path(__file__).parent.parent / "examples"
Run = Callable[[str], str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script in this process, with its defaults; returns what it prints."""

    def printed(name: str) -> str:
        path = EXAMPLES / f"{name}.py"
        monkeypatch.setattr("sys.argv", [str(path)])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return printed


def test_the_scripts_are_these_and_short() -> None:
    paths = sorted(EXAMPLES.iterdir())
    names = ["chat", "job", "labels", "own_family", "several_gpus", "tools", "training_loop"]
    assert [path.name for path in paths if path.is_file()] == [f"{name}.py" for name in names]
    assert all(len(path.read_text().splitlines()) <= 50 for path in paths if path.is_file())
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert all(f"`examples/{name}.py`" in readme for name in names)


def test_chat(run: Run) -> None:
    text = run("chat")
    assert "Answer: 42\n" in text and "Answer: SLEVEL\n" in text
    assert text.endswith("67 63 59\n")


class CallingLLM:
    """Calls `add` in each answer until it has a result, and then says it; one conversation calls wrongly."""

    def chat(self, conversations: Any, params: object, tools: Any) -> Any:
        return [SimpleNamespace(outputs=[self._answer(each)]) for each in conversations]

    def _answer(self, conversation: Any) -> CompletionOutput:
        question, last = conversation[0]["content"], conversation[-1]
        if last["role"] == "tool":
            return CompletionOutput(0, f"It is {last['content']}.", [], reasoning="", tool_calls=[])
        arguments = json.dumps({"a": int(question)} if question == "9" else {"a": int(question), "b": 1})
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return CompletionOutput(0, "", [], reasoning="hm", tool_calls=[call])


def test_tools(run: Run) -> None:
    assert "> What is 5 + 35?" in run("tools")
    converse = runpy.run_path(str(EXAMPLES / "tools.py"))["converse"]
    conversations = [[{"role": "user", "content": str(number)}] for number in (1, 2, 9)]
    converse(CallingLLM(), conversations, None)
    assert [each[-1]["content"] for each in conversations[:2]] == ["It is 2.", "It is 3."]
    assert conversations[2][-1]["content"].startswith("It is TypeError: ")
    assert [message["role"] for message in conversations[0]] == ["user", "assistant", "tool", "assistant"]


def test_labels(run: Run) -> None:
    *lines, counts = run("labels").splitlines()
    assert [re.sub("even|odd", "LABEL", line) for line in lines] == [
        f"{number}: LABEL" for number in (17, 20, 35, 42, 56, 63)
    ]
    assert counts == str(dict(Counter(line.split()[1] for line in lines)))


def test_job(run: Run) -> None:
    text = run("job")
    assert text.startswith("exit code 0; again: 0,")
    assert "2 NOTEBOOK: Answer: KOOBETON\n" in text and len(text.splitlines()) == 5


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two replicas need two GPUs, or a CPU")
def test_several_gpus(run: Run) -> None:
    text = run("several_gpus")
    sums = re.findall(r"^What is (\d+) \+ (\d+)\? Answer: (\d+)$", text, re.M)
    assert len(sums) == 20 and all(int(x) + int(y) == int(total) for x, y, total in sums)
    assert "requests: 20, 20 finished" in text


def test_training_loop(run: Run) -> None:
    """The engine samples with the trainer's weights: the rewarded answers, short ones, become likelier."""
    lengths = [float(each) for each in re.findall(r"step \d: ([\d.]+) tokens", run("training_loop"))]
    assert len(lengths) == 3 and lengths[2] < lengths[0] / 2


def test_own_family(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.keep_families(monkeypatch)
    text = run("own_family")
    assert text.splitlines()[-2] == "Answer: 20 45 67 92"
    assert re.fullmatch(r"log-probability of the answer: -\d\.\d+", text.splitlines()[-1])
