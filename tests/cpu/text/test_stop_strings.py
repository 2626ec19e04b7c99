"""Stop strings: found however tokens split them, with nothing after them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import inside
import pytest
from checked_llm import CheckedLLM
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_texts import KINDS, LETTERS, SPECIAL, TOKENIZERS, encode, model_for

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.batch import TokenEvents
from nanovllm.checks import checked
from nanovllm.engine.requests import Requests
from nanovllm.extras.stop_strings import StopSearch, StopStrings, text_stream
from nanovllm.outputs import CompletionOutput
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import parse_prompts


def first_match(texts: list[str], stops: list[str]) -> tuple[int, str, int] | None:
    """By definition: the number of tokens after which the text contains a stop string, the string, and its
    position.

    texts: the texts of the first 1, 2, ... tokens.
    """
    for count, text in enumerate(texts, 1):
        ends = [(text.find(stop) + len(stop), index) for index, stop in enumerate(stops) if stop in text]
        if ends:
            stop = stops[min(ends)[1]]
            return count, stop, text.find(stop)
    return None


def search(detokenizer: Detokenizer, prompt: list[int], output: list[int], stops: list[str]) -> StopStrings:
    found = StopStrings(StopSearch(stops), text_stream(detokenizer, prompt))
    for token_id in output:
        found.append(token_id)
    return found


def check(detokenizer: Detokenizer, prompt: list[int], output: list[int], stops: list[str]) -> bool:
    """Compare with the definition; return whether a stop string was found."""
    texts = [detokenizer.text(prompt, output[:end]) for end in range(1, len(output) + 1)]
    expected, found = first_match(texts, stops), search(detokenizer, prompt, output, stops)
    if expected is None:
        assert found.found is None
        return False
    count, stop, position = expected
    text = texts[count - 1]
    assert (found.num_tokens, found.found) == (count, stop)
    assert found.text(include=False) == text[:position]
    assert found.text(include=True) == text[: position + len(stop)]
    return True


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(letters=st.lists(LETTERS, min_size=1, max_size=12), data=st.data())
@example(letters=["日", "本", "語", "日", "本"], data=None)
@example(letters=["e", "\u0301", "👨‍👩‍👧", "\ufffd", "🌍", " the"], data=None)
def test_every_part_of_a_text_is_found(kind: str, letters: list[str], data: st.DataObject | None) -> None:
    """For every split into prompt and output, and of the stop string into tokens."""
    ids = encode(kind, "x" + "".join(letters))
    detokenizer = Detokenizer(TOKENIZERS[kind])
    for start in range(1, len(ids)):
        prompt, output = ids[:start], ids[start:]
        text = detokenizer.text(prompt, output)
        parts = [text[i:j] for i in range(len(text)) for j in range(i + 1, min(i + 6, len(text) + 1))]
        stops = [[part] for part in parts]
        if data is not None and parts:
            stops = [data.draw(st.lists(st.sampled_from([*parts, "?", "xyz"]), min_size=1, max_size=4))]
        for each in stops:
            assert check(detokenizer, prompt, output, each) or set(each) <= {"?", "xyz"}


@pytest.mark.parametrize("skip", [True, False], ids=["skip_special", "keep_special"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(letters=st.lists(LETTERS, min_size=1, max_size=14))
@example(letters=["日", "本", "</s>", "<|turn|>", "<|turn|>", "<|turn|>", "<|turn|>", "<|turn|>", " the"])
def test_a_stream_gives_the_text_in_parts(kind: str, skip: bool, letters: list[str]) -> None:
    ids = encode(kind, "x" + "".join(letters))
    detokenizer = Detokenizer(TOKENIZERS[kind], skip)
    for start in range(1, len(ids)):
        stream, text = text_stream(detokenizer, ids[:start]), ""
        for end in range(start + 1, len(ids) + 1):
            text += stream.append(ids[end - 1])
            assert text == detokenizer.text(ids[:start], ids[start:end])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_ends_within_a_character(kind: str) -> None:
    """An output that does not continue it is what the tokenizer decodes: whole, in parts, when it stops."""
    tokenizer = TOKENIZERS[kind]
    detokenizer, hello = Detokenizer(tokenizer), encode(kind, "Hello the")
    for letter in ("日", "🌍"):
        whole, start = encode(kind, "x" + letter), len(encode(kind, "x"))
        for end in range(start + 1, len(whole)):
            prompt = whole[:end]
            assert detokenizer.text(prompt, whole[end:]) == letter
            for output in (hello, [*hello, whole[start]], [tokenizer.eos_token_id, *hello]):
                text = detokenizer.text(prompt, output)
                assert text.strip() == "Hello the"
                stream = text_stream(detokenizer, prompt)
                assert "".join(map(stream.append, output)) == text
                assert check(detokenizer, prompt, output, ["lo"])


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens(kind: str) -> None:
    """Also with bytes that form no character; only invalid byte fallback sequences decode differently in
    parts.
    """
    rng, detokenizer = random.Random(5), Detokenizer(TOKENIZERS[kind])
    names = TOKENIZERS[kind].convert_ids_to_tokens(range(len(TOKENIZERS[kind])))
    pool = [id_ for id_, name in enumerate(names) if kind == "byte_level" or not name.startswith("<0x")]
    prompt, num_found = encode(kind, "x"), 0
    for _ in range(300):
        output = rng.choices(pool, k=12)
        text = detokenizer.text(prompt, output)
        stops = (
            [text[i : i + rng.randint(1, 4)] for i in rng.sample(range(len(text)), 2)]
            if len(text) > 1
            else []
        )
        num_found += bool(stops) and check(detokenizer, prompt, output, stops)
    assert num_found > 250


def test_which_of_several_stop_strings_counts() -> None:
    detokenizer = Detokenizer(TOKENIZERS["byte_level"])
    prompt, output = encode("byte_level", "x"), encode("byte_level", "abcd")
    for stops, found in [
        (["bc", "abc"], "bc"),
        (["abcx", "bcx", "c", "bc"], "c"),
        (["abx", "b"], "b"),
        (["abc", "bc"], "abc"),
        (["abcd", "bc"], "bc"),
        (["d", "c"], "c"),
        (["x", "xa", "ac"], None),
    ]:
        assert search(detokenizer, prompt, output, stops).found == found


class Counted(list[int]):
    num_reads = 0

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        self.num_reads += 1
        return super().__getitem__(index)


def test_the_work_does_not_grow_with_the_number_of_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 stop strings that the text nearly contains: each character costs at most two looks, in the text
    and in what a stream holds back."""
    detokenizer, ids = Detokenizer(TOKENIZERS["byte_level"]), encode("byte_level", "the lazy dog, " * 50)
    stops = ["dog, the lazy dog, " * 3 + f"{index}" for index in range(1000)]
    searches, shorter = StopSearch(stops), Counted()
    shorter.extend(searches.shorter)
    monkeypatch.setattr(searches, "shorter", shorter)
    found, looks, taken = StopStrings(searches, text_stream(detokenizer, ids)), [], ""
    after = searches.after
    monkeypatch.setattr(searches, "after", lambda *place: looks.append(place) or after(*place))
    for token_id in ids:
        assert not found.append(token_id)
        taken += found.take()
    text = detokenizer.text(ids, ids)
    assert len(looks) == len(text) and shorter.num_reads <= len(text)
    assert text.startswith(taken) and 1 < len(text) - len(taken) < len(stops[0])


def test_equal_lists_of_stop_strings_are_read_once() -> None:
    """Each row of a job has a copy of its own."""
    tokenizer = TOKENIZERS["byte_level"]
    processor = Processor(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    params = [checked(SamplingParams(stop=["lo", "the"], n=2)) for _ in range(3)]
    made = processor.make_requests(parse_prompts(["x"] * 3), params, 0)
    assert len({id(processor.stop_strings(request).search) for request in made}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_min_tokens(kind: str) -> None:
    """A stop string counts if a token after the first `min_tokens` completes it."""
    detokenizer, prompt = Detokenizer(TOKENIZERS[kind]), encode(kind, "x")
    output = encode(kind, "ab abcab the abc")
    texts = [detokenizer.text(prompt, output[:end]) for end in range(len(output) + 1)]
    for stops in (["ab"], ["b", "abc"], ["c", "cab t"], ["abc"]):
        for min_tokens in range(len(output) + 1):
            counts = [
                count
                for count in range(min_tokens + 1, len(output) + 1)
                if any(
                    texts[count][:end].endswith(stop)
                    for stop in stops
                    for end in range(len(texts[count - 1]) + 1, len(texts[count]) + 1)
                )
            ]
            found = StopStrings(StopSearch(stops), text_stream(detokenizer, prompt), min_tokens)
            stopped = [found.append(token_id) for token_id in output]
            assert stopped[-1] == bool(counts)
            if counts:
                assert found.num_tokens == counts[0]
                assert found.text(include=True).endswith(str(found.found))


def test_it_decodes_few_tokens_however_long_the_output_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        detokenizer, lens = Detokenizer(TOKENIZERS[kind]), [0]
        decode = detokenizer.decode

        def counted(ids: list[int], lens: list[int] = lens, decode: Callable = decode) -> str:
            lens.append(len(ids))
            return decode(ids)

        monkeypatch.setattr(detokenizer, "decode", counted)
        output = encode(kind, "日本語 Hello the 🌍" * 40)
        assert search(detokenizer, encode(kind, "x"), output, ["?"]).num_tokens == len(output)
        assert max(lens) <= 4 * 5


def test_tokens_behind_the_match_in_one_step_are_dropped() -> None:
    """A step may bring several tokens of a sequence."""
    tokenizer = TOKENIZERS["byte_level"]
    requests = Requests(Processor(tokenizer, len(tokenizer), [tokenizer.eos_token_id]), seed=0)
    processor = inside.processor(requests)
    params = checked(SamplingParams(stop="lo"))
    [request] = processor.make_requests(parse_prompts("Say: "), [params], 0)
    [seq] = requests.make_sequences(request)
    requests.add(request, [seq], 0.0)
    output = [*encode("byte_level", "Hello the"), tokenizer.eos_token_id]
    for token_id in output:
        seq.append(token_id)
    seq.finish_reason = "length"
    events = TokenEvents([seq.seq_id] * len(output), output, {seq.seq_id: "length"})
    stopped = requests.find_stop_strings(events)
    [out] = requests.finish([(seq_id, 1.0) for seq_id in events.finish_reasons | stopped])
    assert (out["text"], out["finish_reason"], out.outputs[0].stop_reason) == ("Hel", "stop", "lo")
    assert tokenizer.decode(out["token_ids"]).startswith("Hello") and len(out["token_ids"]) < len(output)
    assert not inside.stop_searches(requests) and not requests


# -- through the engine --------------------------------------------------------------------------------------


def expected(llm: LLM, prompt: list[int], full: CompletionOutput, stops: list[str]) -> tuple[object, ...]:
    """The text, tokens and reasons of a completion `full` after the stop strings are applied."""
    ids = full.token_ids[:-1] if full.finish_reason == "stop" else full.token_ids
    found = search(Detokenizer(llm.tokenizer), prompt, ids, stops) if stops else None
    if found is None or found.found is None:
        return full.text, full.token_ids, full.finish_reason, full.stop_reason
    text = found.text(include=False)
    assert not any(stop in text for stop in stops)
    return text, ids[: found.num_tokens], "stop", found.found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {
            "async_scheduling": True,
            "num_kvcache_blocks": 9,
            "kvcache_block_size": 8,
            "max_num_batched_tokens": 7,
        },
    ],
    ids=["in_step", "ahead", "tight"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_through_the_engine(kind: str, options: dict[str, int], tmp_path: Path) -> None:
    """Several completions of each request, with other requests, preemption and chunked prefill."""
    rng = random.Random(1)
    path = model_for(TOKENIZERS[kind], tmp_path)
    prompts = [encode(kind, "Hello the world, the world" + "x" * index) for index in range(12)]
    with CheckedLLM(path, device="cpu", max_model_len=64, **options) as llm:
        params = [
            SamplingParams(n=1 + index % 3, temperature=3.0, seed=index, max_tokens=24) for index in range(12)
        ]
        full = llm.generate(prompts, params, use_tqdm=False)
        for index, output in enumerate(full):
            text = output.outputs[-1].text
            at = rng.randrange(max(1, len(text) - 3))
            params[index].stop = [text[at : at + rng.randint(1, 3)] or "x", "???"]
        params[5].stop = []
        free = llm.num_free_blocks
        outputs = llm.generate(prompts, params, use_tqdm=False)
        reasons = [c.stop_reason for output in outputs for c in output.outputs]
        assert sum(isinstance(reason, str) for reason in reasons) >= 10
        for before, output, param in zip(full, outputs, params, strict=True):
            for old, new in zip(before.outputs, output.outputs, strict=True):
                got = new.text, new.token_ids, new.finish_reason, new.stop_reason
                assert got == expected(llm, output.prompt_token_ids, old, param.stop)
        assert llm.num_free_blocks == free and not inside.stop_searches(llm)
        assert {seq.finish_reason for seq in llm.sequences} == {"stop", "length"}
        if "num_kvcache_blocks" in options:
            assert any(seq.num_preemptions for seq in llm.sequences)
            assert any(not batch.draws.all() for batch in llm.batches), "no prompt went in chunks"


@pytest.fixture(scope="module")
def demo() -> LLM:
    with LLM(demo_model_path(), device="cpu", num_kvcache_blocks=64) as llm:
        yield llm


def test_the_text_may_end_with_what_stopped_it(demo: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [full] = demo.generate("Count from 3 to 9:", greedy, use_tqdm=False)
    stop = full["text"][6:9]
    at = full["text"].find(stop)
    for include, text in ((False, full["text"][:at]), (True, full["text"][: at + 3])):
        greedy.stop, greedy.include_stop_str_in_output = stop, include
        [output] = demo.generate("Count from 3 to 9:", greedy, use_tqdm=False)
        assert output["text"] == text and output.outputs[0].stop_reason == stop
        assert output["token_ids"] == full["token_ids"][: len(output["token_ids"])]
    # The same for a stop token that is not a special token.
    token = full["token_ids"][3]
    end = full["token_ids"].index(token)
    greedy.stop, greedy.stop_token_ids = [], [token]
    for include in (False, True):
        greedy.include_stop_str_in_output = include
        [output] = demo.generate("Count from 3 to 9:", greedy, use_tqdm=False)
        assert output["token_ids"] == full["token_ids"][: end + 1]
        assert output["text"] == demo.tokenizer.decode(full["token_ids"][: end + include])
    # The text of a stop token is not searched, so the token is the reason.
    greedy.stop_token_ids, greedy.include_stop_str_in_output = full["token_ids"][:1], False
    greedy.stop = demo.tokenizer.decode(greedy.stop_token_ids)
    [output] = demo.generate("Count from 3 to 9:", greedy, use_tqdm=False)
    assert (output["text"], output.outputs[0].stop_reason) == ("", full["token_ids"][0])


def test_the_last_token_may_complete_it(demo: LLM) -> None:
    """Then the reason is the stop string, not the length."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [full] = demo.generate("Count from 3 to 9:", params, use_tqdm=False)
    last = demo.tokenizer.decode(full["token_ids"][-1:])
    params.stop = full["text"][-len(last) - 1 :]
    assert full["text"].index(params.stop) + len(params.stop) == len(full["text"])
    [output] = demo.generate("Count from 3 to 9:", params, use_tqdm=False)
    assert output["finish_reason"] == "stop" and output["token_ids"] == full["token_ids"]
    assert output["text"] + params.stop == full["text"]


def test_abort_and_a_failed_call_leave_nothing(demo: LLM) -> None:
    request_id = demo.add_request("Count:", SamplingParams(n=2, stop=["???"], ignore_eos=True))
    demo.step()
    assert {c.finish_reason for c in demo.abort(request_id).outputs} == {"abort"}
    assert not inside.stop_searches(demo)
    demo.add_request("Count:", SamplingParams(stop="???"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inside.scheduler(demo), "postprocess", None)
        with pytest.raises(TypeError):
            demo.step()
    assert not inside.stop_searches(demo) and demo.is_finished()


def test_without_a_tokenizer_it_is_refused(tmp_path: Path) -> None:
    path = model_for(TOKENIZERS["byte_level"], tmp_path)
    with CheckedLLM(path, device="cpu", skip_tokenizer_init=True) as llm:
        params = [SamplingParams(), SamplingParams(stop=["a"])]
        with pytest.raises(
            ValueError, match=r"prompts\[1\]: stop=\['a'\] needs a tokenizer, and skip_tokenizer_init"
        ):
            llm.generate([[5], [6]], params, use_tqdm=False)
        assert llm.is_finished()


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_go_on_behind_special_tokens_that_are_no_text(kind: str) -> None:
    tokenizer, turn = TOKENIZERS[kind], SPECIAL[2]
    ids = encode(kind, "Hello the")
    mixed = [token for token_id in ids for token in (token_id, tokenizer.convert_tokens_to_ids(turn))]
    assert search(Detokenizer(tokenizer), ids, mixed, ["lo th", turn]).found == "lo th"
    kept = search(Detokenizer(tokenizer, skip_special_tokens=False), ids, mixed, ["lo th", turn])
    assert (kept.found, kept.num_tokens) == (turn, 2)
