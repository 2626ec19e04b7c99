"""The workloads of bench.py: totals, shared prefixes, and rows of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench
from tools.benchmark.workloads import SYNTHETIC, Workload, from_jsonl, headline, samples, shared_prefix

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


def test_the_prefixes_are_shared_in_random_order() -> None:
    default, draw = SYNTHETIC["prefixes"]
    assert default == 4096
    work = draw(100)
    sharing = work.sharing()
    assert sharing.tokens.tolist() == [8192] * 20 and len(set(work.groups)) == 20
    first = {group: work.prompts[work.groups.index(group)] for group in work.groups}
    for group, prompt in zip(work.groups, work.prompts, strict=True):
        assert prompt[:8192] == first[group][:8192] and 32 <= len(prompt) - 8192 <= 128
    assert len({tuple(prompt[:8192]) for prompt in work.prompts}) == 20
    assert sharing.saved(np.array([work.groups.index(3), work.groups.index(4)])) == 0
    assert sharing.saved(np.flatnonzero(np.array(work.groups) == 3)) == 8192 * (work.groups.count(3) - 1)
    assert len(work.beginning(10, 5).groups) == 10
    assert draw(100) == work


def test_labels_share_their_instructions() -> None:
    for name, shared in (("label", 200), ("label-240", 240), ("label-4000", 4000)):
        work = SYNTHETIC[name][1](60)
        assert (work.name, work.common, work.sharing().tokens.tolist()) == (name, shared, [shared])
        assert all(40 <= len(prompt) - shared <= 100 for prompt in work.prompts)
    for name, shared in (("labels", 0), ("few-shot", 300)):
        work = SYNTHETIC[name][1](100)
        tokens = work.sharing().tokens
        assert work.common == shared and set(work.output_lens) == {4}
        first = {group: work.prompts[work.groups.index(group)] for group in work.groups}
        for group, prompt in zip(work.groups, work.prompts, strict=True):
            assert prompt[: tokens[group]] == first[group][: tokens[group]]
            assert 40 <= len(prompt) - tokens[group] <= 100


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
def test_random_workloads_have_their_sizes_and_are_deterministic(
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
    listed = (Path(bench.__file__).parent / "docs" / "benchmarks.md").read_text().split("\n## Workloads")[1]
    for name, (size, draw) in SYNTHETIC.items():
        work = draw(size)
        [row] = [line for line in listed.splitlines() if line.startswith(f"| `{name}`")]
        assert all(f"| {count:,} |" in row for count in (size, work.tokens_in, work.tokens_out)), row


def test_the_samples_workload_asks_each_prompt_sixteen_times() -> None:
    work = samples(1024)
    assert len(set(map(tuple, work.prompts))) == 64
    assert all(work.prompts[row] == work.prompts[row // 16 * 16] for row in range(1024))
    assert len(set(work.output_lens[:16])) > 8  # each with its own length
    few = samples(20)
    assert few.prompts[:16] == [few.prompts[0]] * 16 and few.prompts[16:] == [few.prompts[16]] * 4
    sharing = work.sharing()
    assert sharing.tokens.tolist() == [len(work.prompts[row]) for row in range(0, 1024, 16)]
    # Rows 0 and 15 have the same prompt, row 16 another one.
    assert sharing.saved(np.array([0, 15, 16])) == len(work.prompts[0])


def test_the_prefix_workload_shares_its_first_4096_tokens_and_no_more() -> None:
    work = shared_prefix(256)
    assert work.common == 4096
    own = [len(prompt) - 4096 for prompt in work.prompts]
    assert min(own) >= 64 and max(own) <= 256
    assert min(work.output_lens) >= 128 and max(work.output_lens) <= 256
    assert len({tuple(prompt[4096:4100]) for prompt in work.prompts}) == 256
    assert work.longest > bench.LEAST_MODEL_LEN  # bench.py asks vLLM for a longer one


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
        ('{"prompt": ""}', "'prompt' must be a string that is not empty, not ''"),
        ('{"prompt": 5}', "'prompt' must be a string that is not empty, not 5"),
        ('{"prompt_token_ids": []}', "must be a list of at least one integer, not \\[\\]"),
        ('{"prompt_token_ids": [1, 100]}', "token id 100 is outside the vocabulary; use 0 to 99"),
        ('{"prompt_token_ids": [true]}', "token id True is outside"),
        (
            '{"prompt_token_ids": [1], "max_tokens": 0}',
            "'max_tokens' must be an integer of at least 1, not 0",
        ),
        ('{"prompt": "a"}', "'prompt' is a string, and a dummy shape has no tokenizer: pass --model"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"rows.jsonl, line 3: .*{message}"):
        _read(tmp_path, f'{{"prompt_token_ids": [1]}}\n\n{line}\n')


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no rows: write one JSON object a line"):
        _read(tmp_path, "\n")
