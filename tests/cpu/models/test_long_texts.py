"""Texts that cannot fit are refused by their length: the bound is never wrong, and nothing of them is
tokenised."""

from __future__ import annotations

import ctypes
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread, main_thread
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jobs import Lent, read_rows, run
from test_real_texts import PIECES, REAL, folder_of, tokenizer_of
from test_texts import KINDS, TOKENIZERS
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.extras.least_tokens import LeastTokens
from nanovllm.jobs.runner import PORTION_BYTES, portions
from nanovllm.jobs.sources import MAX_ROW_BYTES
from nanovllm.jobs.tasks import Task
from nanovllm.jobs.window import WINDOW_BYTES, Window
from nanovllm.text import processor
from nanovllm.text.processor import ENCODED_BYTES, encode

SHORT = SamplingParams(temperature=0, max_tokens=2)
HUGE = MAX_ROW_BYTES - 2**17


def changed(kind: str, change: Callable[[Tokenizer], object]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_str(TOKENIZERS[kind].backend_tokenizer.to_str())
    change(tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def normalized(kind: str, *steps: Any) -> PreTrainedTokenizerFast:
    return changed(kind, lambda each: setattr(each, "normalizer", normalizers.Sequence(list(steps))))


def with_added(kind: str, *tokens: AddedToken) -> PreTrainedTokenizerFast:
    return changed(kind, lambda each: each.add_tokens(list(tokens)))


def unigram(byte_fallback: bool) -> PreTrainedTokenizerFast:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "ing", "▁▁▁▁", "日本語"]
    vocab = [(piece, -float(index)) for index, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def split(behavior: str) -> PreTrainedTokenizerFast:
    first = pre_tokenizers.Split(Regex(r"\s+"), behavior)
    steps = pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return changed("byte_level", lambda each: setattr(each, "pre_tokenizer", steps))


MASK = AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)
PROVEN = {
    "NFC": normalized("byte_level", normalizers.NFC()),
    "NFKD, lower case": normalized("byte_level", normalizers.NFKD(), normalizers.Lowercase()),
    "NFKC": normalized("llama", normalizers.NFKC()),
    "Llama": normalized("llama", normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")),
    "takes spaces": with_added("byte_level", MASK),
    "long": with_added("metaspace", AddedToken("<" + "one two\u0301 " * 9 + ">", normalized=True)),
    "unigram": unigram(byte_fallback=True),
    "split": split("isolated"),
}
UNPROVEN = {
    "unknown is one token": unigram(byte_fallback=False),
    "spaces are removed": split("removed"),
    "Strip": normalized("byte_level", normalizers.Strip()),
    "Replace": normalized("byte_level", normalizers.Replace(Regex(" {2,}"), " ")),
    "accents are removed": normalized("byte_level", normalizers.NFD(), normalizers.StripAccents()),
    "bytes are missing": changed("byte_level", lambda each: setattr(each, "model", models.BPE({"a": 0}, []))),
    "word": PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))),
}
FOUND: dict[str, tuple[Any, LeastTokens, list[str]]] = {}


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    import test_real_texts

    for name in REAL:
        test_real_texts.FOLDERS[name] = tmp_path_factory.mktemp(name)
    assert folder_of


def found(name: str) -> tuple[Any, LeastTokens, list[str]]:
    """A tokenizer, its bound, and its longest tokens as text."""
    if name not in FOUND:
        tokenizer = PROVEN.get(name) or UNPROVEN.get(name) or tokenizer_of(name)
        ids = sorted(tokenizer.get_vocab().values())
        texts = sorted((tokenizer.decode([each]) for each in ids), key=len)[-40:]
        FOUND[name] = tokenizer, LeastTokens(tokenizer), [*texts, "<mask>", "x"]
    return FOUND[name]


SPACES = [
    " ",
    "\u3000",
    "\n",
    "\t\t",
    "\u2000",
    "\x1c",
    "▁",
    "  ▁",
    "\u0338",
    "\u037e",
    "\u1f82",
    "\u212a",
    "İ",
]
PARTS = st.lists(
    st.tuples(st.sampled_from([*PIECES, *SPACES, *range(42)]), st.integers(1, 40)), min_size=1, max_size=9
)


@pytest.mark.parametrize("name", [*KINDS, "demo", *REAL, *PROVEN, *UNPROVEN])
@settings(max_examples=60, deadline=None)
@given(parts=PARTS)
@example(parts=[(41, 1), (" ", 40), (40, 40), ("\u3000", 40), (40, 40)])
@example(parts=[(39, 40), (38, 40)])
@example(parts=[(40, 1), (" ", 4000), (40, 1), ("\u3000 ", 4000)])
@example(parts=[("e\u0301", 40), ("\u1f82", 40), ("A\u030a", 40)])
def test_no_text_has_fewer_tokens(name: str, parts: list[tuple[str | int, int]]) -> None:
    tokenizer, least, tokens = found(name)
    text = "".join(
        count * (tokens[each % len(tokens)] if isinstance(each, int) else each) for each, count in parts
    )
    assert least.of(text, 2**62) <= len(encode(tokenizer, [text], add_special_tokens=False)[0])


@pytest.mark.parametrize("name", [*KINDS, "demo", *REAL, *PROVEN])
def test_it_is_a_bound_of_use(name: str) -> None:
    _, least, _ = found(name)
    assert least.of("the word of it " * 1000, 2**62) > 150
    if name != "takes spaces":
        assert least.of("x" * 20_000, 2**62) > 90 and least.of("日本" * 10_000, 90) > 20


@pytest.mark.parametrize("name", UNPROVEN)
def test_where_nothing_can_be_proven_there_is_no_bound(name: str) -> None:
    assert found(name)[1].of("the word of it " * 1000, 2**62) == 0


# -- in an engine and in jobs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo_model_path(), device="cpu") as llm:
        yield llm


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All texts that reach the tokenizer of an engine."""
    seen: list[str] = []

    def watched(tokenizer: Any, texts: list[str], **options: Any) -> list[list[int]]:
        seen.extend(texts)
        return encode(tokenizer, texts, **options)

    monkeypatch.setattr(processor, "encode", watched)
    return seen


def test_huge_prompts_are_refused_and_the_others_answered(llm: LLM, tokenised: list[str]) -> None:
    longest = llm.model_config.max_model_len
    message = rf"2,000,000 bytes, which are at least \d[\d,]* tokens, and max_model_len={longest}; shorten it"
    huge = "the end " * 250_000
    with pytest.raises(ValueError, match=rf"prompts\[1\] has {message}"):
        llm.generate(["Hi", huge], SHORT)
    outputs = llm.generate(["Hi", huge, "Ho"], SHORT, on_error="return")
    assert [output.error is None for output in outputs] == [True, False, True]
    with pytest.raises(ValueError, match="conversation 0 has 2,000,0"):
        llm.chat([{"role": "user", "content": huge}])
    with pytest.raises(ValueError, match=message):
        llm.score("the", huge)
    with pytest.raises(ValueError, match=message):
        llm.score([5], huge)
    with pytest.raises(ValueError, match=message):
        llm.add_request(huge)
    assert max(map(len, tokenised)) < 100
    with pytest.raises(ValueError, match=r"has \d+ tokens, and at most"):  # too short for the bound
        llm.generate("the end " * 1000, SHORT)


def test_what_fits_exactly_runs(llm: LLM, tokenised: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bound at work on every text."""
    monkeypatch.setattr(processor, "LONG_TEXT", 0)
    longest = llm.model_config.max_model_len
    one = max((llm.tokenizer.decode([each]) for each in range(3, 500)), key=len)
    assert len(llm.tokenizer(one * 50)["input_ids"]) == 50
    assert llm.generate(one * (longest - 1), SHORT)[0].error is None
    assert llm.score(one, one * longest)[0].token_ids


@pytest.mark.parametrize("before", range(4))
def test_words_are_counted_across_parts_of_a_text(before: int) -> None:
    least = found("split")[1]
    words = -(-len(("to  be" * 3).split()) // least.of("to  be" * 3, 0))  # of one token, at most
    for text in (" " * before + "to  be" * 50_000, "x" * before + "y" * 300_000, "to\u3000be\u2581" * 60_000):
        count = len(text.replace("\u2581", " ").split())
        assert least.of(text, 0) == -(-count // words)


def huge_rows(count: int) -> Iterator[dict[str, Any]]:
    for index in range(count):
        text = "日本" * (HUGE // 6) if index % 3 == 1 else "to be " * (HUGE // 6)
        yield (
            {"id": index, "messages": [{"role": "user", "content": text}]} if index % 3 else {"prompt": text}
        )
        yield {"id": f"good {index}", "prompt": "Hi"}


def start_of_peak() -> int:
    """Forget the peak of resident memory; return what is resident, without what malloc keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    [kilobytes] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 2**10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_huge_rows_of_a_job(tmp_path: Path, llm: LLM, tokenised: list[str]) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in huge_rows(12))
    small = tmp_path / "small.jsonl"
    small.write_text('{"prompt": "Hi"}\n')
    options = "--sampling", "max_tokens=2"
    assert run(small, "-o", tmp_path / "s.jsonl", *options, make_llm=Lent(llm)) == 0  # what it imports stays
    tokenised.clear()
    before = start_of_peak()
    assert run(path, "-o", tmp_path / "o.jsonl", "--sampling", "max_tokens=2", make_llm=Lent(llm)) == 1
    assert peak() - before < 400 * 2**20
    rows = read_rows(tmp_path / "o.jsonl")
    assert [row["error"] is None for row in rows] == [False, True] * 12
    for index, row in enumerate(rows[::2]):
        assert row["error"].startswith(f"in.jsonl: line {2 * index + 1}: the ")
        assert f"max_model_len={llm.model_config.max_model_len}; shorten it" in row["error"]
    assert tokenised == ["Hi"] * 12


def test_windows_and_portions_count_bytes() -> None:
    """Of rows in memory: characters beyond Latin-1 take up to four bytes, and other columns count too."""
    text = "\U0001f600" * 2**20
    made: list[int] = []

    def tasks(**more: Any) -> Iterator[Task]:
        for index in range(100):
            made.append(index)
            yield Task(index, None, text, SHORT, **more)

    next(iter(Window(tasks(), 8)))
    assert len(made) <= WINDOW_BYTES // 2**22 + 1
    chats = (Task(index, None, [{"content": text}], SHORT, is_chat=True) for index in range(100))
    assert [len(some) for some in portions(chats, 64)] == [1] * 100
    wide = (Task(index, None, "Hi", SHORT, num_bytes=PORTION_BYTES // 2) for index in range(5))
    assert [len(some) for some in portions(wide, 64)] == [2, 2, 1]


def test_strings_are_tokenised_in_portions() -> None:
    sizes: list[int] = []

    def tokenizer(texts: list[str], **options: object) -> dict[str, list[list[int]]]:
        sizes.append(sum(len(text.encode()) for text in texts))
        return {"input_ids": [[len(text)] for text in texts]}

    texts = ["é" * 2**12] * 300 + ["x" * (ENCODED_BYTES + 1)] + ["y"] * 3
    assert encode(tokenizer, texts) == [[len(text)] for text in texts]  # type: ignore[arg-type]
    assert max(sizes[:-2]) <= ENCODED_BYTES and sizes[-2:] == [ENCODED_BYTES + 1, 3]


def test_signals_act_while_a_long_string_is_tokenised() -> None:
    """One call of a tokenizer lasts as long as it does; Ctrl-C does not wait for it, whenever it comes."""
    entered, end = Event(), Event()
    waited_for: list[bool] = []  # has an entry once the call has ended

    def tokenizer(texts: list[str], **options: object) -> dict[str, list[list[int]]]:
        entered.set()
        waited_for.append(not end.wait(60))
        return {"input_ids": [[1]]}

    def interrupt() -> None:
        entered.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    main = main_thread().ident
    assert main is not None
    thread = Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            encode(tokenizer, ["x" * (ENCODED_BYTES + 1)])  # type: ignore[arg-type]
        assert not waited_for, "Ctrl-C waited for the tokenizer"
    finally:
        end.set()
        thread.join()
