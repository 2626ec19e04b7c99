"""Models that score pairs of texts, and texts as they are tokenised for a head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from head_models import PLAIN, SEQUENCE, write_demo, write_head_model
from tiny_models import edit_json
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nanovllm import LLM, PoolingParams, ScoringRequestOutput
from nanovllm.jobs import main as program

QUERY, DOCUMENTS = "What is 2 + 3?", ["5", "The answer is 5, as one counts.", "Spell NOTE."]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}!"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("pairs"), 1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", dtype="float32", kv_cache_memory_bytes=2**24) as llm:
        yield llm


@torch.inference_mode()
def wanted(folder: Path, ids: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    return float(model(torch.tensor([ids])).logits.sigmoid())


def test_pairs_have_the_scores_of_transformers(folder: Path, llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    scores = [wanted(folder, tokenizer(one, other)["input_ids"]) for one, other in pairs]
    assert max(scores) - min(scores) > 0.01
    found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    assert all(isinstance(each, ScoringRequestOutput) for each in found)
    assert [each.outputs.score for each in found] == pytest.approx(scores, abs=1e-4)
    found = llm.score([QUERY] * 3, DOCUMENTS, use_tqdm=False)
    assert [each.outputs.score for each in found] == pytest.approx(scores, abs=1e-4)
    [one] = llm.score(QUERY, DOCUMENTS[1], use_tqdm=False)
    assert one.outputs.score == pytest.approx(scores[1], abs=1e-4)
    assert one.prompt_token_ids == tokenizer(*pairs[1])["input_ids"]
    [plain] = llm.score(QUERY, DOCUMENTS[1], use_tqdm=False, pooling_params=PLAIN)
    assert torch.tensor(plain.outputs.score).sigmoid() == pytest.approx(scores[1], abs=1e-4)


def test_a_template_writes_pairs(folder: Path, llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    [found] = llm.score(QUERY, DOCUMENTS[0], use_tqdm=False, chat_template=TEMPLATE)
    ids = tokenizer(f"<query>{QUERY}<document>5!")["input_ids"]
    assert found.prompt_token_ids == ids and found.outputs.score == pytest.approx(
        wanted(folder, ids), abs=1e-4
    )
    with pytest.raises(ValueError, match="the chat_template of score"):
        llm.score(QUERY, "5", chat_template="{% for %}")


def test_texts_are_tokenised_as_for_embeddings(folder: Path, llm: LLM) -> None:
    [label], [embedding] = llm.classify(QUERY, use_tqdm=False), llm.embed(QUERY, use_tqdm=False)
    ids = llm.get_tokenizer()(QUERY)["input_ids"]
    assert label.prompt_token_ids == embedding.prompt_token_ids == ids and label.prompt == QUERY
    assert label.outputs.probs == pytest.approx([wanted(folder, ids)], abs=1e-4)
    messages = [{"role": "user", "content": QUERY}]
    template = "{% for m in messages %}{{ m.content }}.{% endfor %}"
    chat = llm.get_tokenizer().apply_chat_template(messages, chat_template=template, return_dict=False)
    [reward] = llm.reward(chat, use_tqdm=False, pooling_params=PoolingParams(use_activation=True))
    assert reward.outputs.data.tolist() == pytest.approx([wanted(folder, chat)], abs=1e-4)


def test_wrong_pairs_are_refused(llm: LLM) -> None:
    for texts, error, message in (
        ((["a", "b"], ["c"] * 3), ValueError, "2 texts and 3 texts to pair with them"),
        ((["a"], []), ValueError, "data_2 is empty"),
        (("a", ["b", 5]), TypeError, r"data_2\[1\] must be a string, not 5"),
        ((5, "b"), TypeError, "data_1 must be a string or a list of strings, not 5"),
        (("\ud800", "b"), ValueError, "lone surrogate"),
        (("a", "1 " * 70_000), ValueError, "pair 0"),
    ):
        with pytest.raises(error, match=message):
            llm.score(*texts, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"LLM\.score\(\) got an unknown argument 'top_k'"):
        llm.score("a", "b", top_k=3)


def test_replicas_classify(folder: Path, llm: LLM) -> None:
    one = llm.classify([QUERY, *DOCUMENTS], use_tqdm=False)
    options = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 2**24}
    with LLM(str(folder), data_parallel_size=2, **options) as two:
        found = two.classify([QUERY, *DOCUMENTS], use_tqdm=False)
        for before, after in zip(one, found, strict=True):
            assert after.outputs.probs == pytest.approx(before.outputs.probs, abs=1e-5)
        rows = two.encode([QUERY], use_tqdm=False, pooling_task="token_classify")
        assert rows[0].outputs.data.shape == (len(one[0].prompt_token_ids), 1)


def test_the_doctor_knows_the_head(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["doctor", str(folder), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"no LM head: {SEQUENCE} has a head of 1 label(s), for classify() or reward()" in said
    assert "the labels are LABEL_0" in said
    tiny = write_head_model(tmp_path, "qwen3", SEQUENCE)
    edit_json(tiny / "config.json", problem_type="x")
    assert program.main(["doctor", str(tiny), "--device", "cpu"]) != 0
    assert "problem_type 'x' is not supported" in "".join(capsys.readouterr())
