"""Rerankers that answer with a token: its logits in place of a head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from head_models import PLAIN
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import LLM, SamplingParams, demo_model_path

QUERY, DOCUMENTS = "What is 2 + 3?", ["5", "The answer is 5.", "Spell NOTE."]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 2**24}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}!"


def overrides(**others: Any) -> dict[str, Any]:
    plain = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["1", "2"]}
    return plain | others


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo_model_path(), hf_overrides=overrides(is_original_qwen3_reranker=True), **OPTIONS) as llm:
        yield llm


@torch.inference_mode()
def logits(text: str) -> torch.Tensor:
    """Of the two tokens after a text."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    model = AutoModelForCausalLM.from_pretrained(demo_model_path()).float().eval()
    ids = tokenizer.convert_tokens_to_ids(["1", "2"])
    assert len(set(ids)) == 2 and tokenizer.unk_token_id not in ids
    return model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1, ids]


def test_a_score_is_the_share_of_the_second_token(llm: LLM) -> None:
    for template, write in ((None, "{}{}"), (TEMPLATE, "<query>{}<document>{}!")):
        wanted = [logits(write.format(QUERY, document)).softmax(-1)[1].item() for document in DOCUMENTS]
        assert max(wanted) - min(wanted) > 0.01
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False, chat_template=template)
        assert [each.outputs.score for each in found] == pytest.approx(wanted, abs=1e-4)
    [plain] = llm.classify(QUERY, use_tqdm=False, pooling_params=PLAIN)
    difference = logits(QUERY)[1] - logits(QUERY)[0]
    assert plain.outputs.probs == pytest.approx([difference.item()], abs=1e-3)
    assert plain.outputs.label == "2"


@pytest.mark.parametrize("names", [["1", "2"], ["2"]], ids=["two", "one"])
def test_tokens_without_further_processing(names: list[str]) -> None:
    """These need logits, which differ from logprobs: one label has a sigmoid."""
    given = overrides(method="no_post_processing", classifier_from_token=names)
    wanted = logits(QUERY)[-len(names) :]
    with LLM(demo_model_path(), hf_overrides=given, logprobs_mode="raw_logits", **OPTIONS) as llm:
        [output] = llm.classify([QUERY], use_tqdm=False, pooling_params=PLAIN)
        assert output.outputs.probs == pytest.approx(wanted.tolist(), abs=1e-3)
        assert output.outputs.labels == tuple(names)
        [output] = llm.classify([QUERY], use_tqdm=False)
        shares = wanted.sigmoid() if len(names) == 1 else wanted.softmax(-1)
        assert output.outputs.probs == pytest.approx(shares.tolist(), abs=1e-4)
    with (
        LLM(demo_model_path(), hf_overrides=given, **OPTIONS) as llm,
        pytest.raises(ValueError, match="needs logits, and logprobs_mode='raw_logprobs' returns others"),
    ):
        llm.classify([QUERY], use_tqdm=False)


def test_such_a_model_generates_as_before(llm: LLM) -> None:
    few = SamplingParams(temperature=0, max_tokens=4)
    with LLM(demo_model_path(), **OPTIONS) as plain:
        wanted = plain.generate([QUERY], few, use_tqdm=False)[0]["token_ids"]
    assert llm.generate([QUERY], few, use_tqdm=False)[0]["token_ids"] == wanted
    good, bad = llm.classify([QUERY, ""], use_tqdm=False, on_error="return")
    assert good.error is None and bad.outputs.probs == [] and "empty" in str(bad.error)
    with pytest.raises(ValueError, match="needs a head of layers"):
        llm.encode([QUERY], use_tqdm=False, pooling_task="token_classify")


TWO, EACH = {"method": "from_2_way_softmax"}, {"method": "no_post_processing"}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no method": ({}, "method must be 'from_2_way_softmax' or 'no_post_processing'"),
    "one token": ({"classifier_from_token": ["1"]} | TWO, "needs two different tokens"),
    "no list": ({"classifier_from_token": "yes"} | EACH, "must be a list of tokens"),
    "equal": ({"classifier_from_token": ["1", "1"]} | EACH, "needs different tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_config_json_may_not_say_of_tokens(case: str) -> None:
    given, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        LLM(demo_model_path(), hf_overrides=overrides(**given), **OPTIONS)


def test_tokens_that_do_not_exist() -> None:
    given = overrides(**EACH, classifier_from_token=["1", "no such token"])
    with (
        LLM(demo_model_path(), hf_overrides=given, **OPTIONS) as llm,
        pytest.raises(ValueError, match="'no such token' is no token of this tokenizer"),
    ):
        llm.classify([QUERY], use_tqdm=False)
