"""tools/format_cost.py: a model costs nothing against itself, and more the more its weights are changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from tests.tiny_models import write_tiny_model
from tools.format_cost import compare, record_answers

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("base"), seed=3)


def changed(model: Path, folder: Path, by: float) -> Path:
    """A copy of the model with its MLPs scaled."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    scaled = {name: each * (1 + by) if ".mlp." in name else each for name, each in tensors.items()}
    save_file(scaled, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_model_costs_nothing_against_itself_and_more_the_more_it_differs(
    model: Path, tmp_path: Path
) -> None:
    options = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64}
    with LLM(str(model), **options) as llm:
        answers = record_answers(llm, PROMPTS, 12)
        own = compare(llm, answers)
    costs = []
    for by in (0.01, 0.1):
        with LLM(str(changed(model, tmp_path / str(by), by)), **options) as llm:
            costs.append(compare(llm, answers))
    assert own.tokens == sum(len(answer.tokens) for answer in answers)
    assert own.kl == pytest.approx(0, abs=1e-5) and own.same == 1
    assert own.logprob == pytest.approx(0, abs=1e-5)
    assert own.kl < costs[0].kl < costs[1].kl and costs[1].kl_99 >= costs[1].kl
