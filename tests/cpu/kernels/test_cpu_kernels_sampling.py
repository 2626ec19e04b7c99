"""Drawing tokens on a CPU: the same tokens as plain torch, and the distribution that they come from."""

from __future__ import annotations

import pytest
import torch
from filter_cases import adversarial_logits, check_filters_keep_all_that_they_should
from sampling_cases import ALL, FILTERS, filters_at, filters_of, make_filters, make_rows
from tensors import randn

from nanovllm.batch import NOT_FINITE
from nanovllm.cpu import isa
from nanovllm.kernels.sampling import draw, sample_reference

pytestmark = pytest.mark.skipif(not isa.has_kernels(), reason="no kernels for CPUs here")
ROWS = 70
VOCABS = [1, 5, 97, 256, 257, 2048, 5000]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_those_of_plain_torch(dtype: torch.dtype, vocab: int) -> None:
    """With every filter and without; rows are a part of a wider tensor, which has larger values elsewhere."""
    rows, filters = make_rows(ROWS, "cpu"), make_filters(ROWS, "cpu")
    for spread in (0.0, 0.7, 5.0):
        logits = (spread * randn(ROWS, vocab + 3)).to(dtype)
        logits[:, vocab:] = 1e4
        for own in (filters, None):
            columns = rows.pick(ALL, own)
            part = logits[:, :vocab]
            assert torch.equal(draw(part, *columns), sample_reference(part, *columns))


@pytest.mark.parametrize("vocab", [97, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_masked_tokens(dtype: torch.dtype, vocab: int) -> None:
    rows, filters = make_rows(ROWS, "cpu", (0.6, 1.0, 0.0, 3.0, 0.05)), make_filters(ROWS, "cpu")
    for base in adversarial_logits(vocab, "cpu"):
        logits = base.to(dtype).expand(ROWS, -1).contiguous()
        columns = rows.pick(ALL, filters)
        assert torch.equal(draw(logits, *columns), sample_reference(logits, *columns)), base


def test_every_top_k() -> None:
    """From one token to all of them, with many equal logits: more than there are groups of 16, too."""
    vocab = 700
    logits = (2 * randn(vocab, vocab)).round()
    rows, top_k = make_rows(vocab, "cpu", (1.0,)), list(range(1, vocab + 1))
    columns = rows.pick(ALL, filters_of(vocab, "cpu", top_k=top_k))
    found = draw(logits, *columns)
    assert torch.equal(found, sample_reference(logits, *columns))
    order = logits.sort(dim=1, descending=True, stable=True)[1]
    places = (order == found[:, None]).byte().argmax(1)
    assert (places < torch.tensor(top_k)).all()


@pytest.mark.parametrize("vocab", [40, 2100])
def test_the_distribution(vocab: int) -> None:
    check_filters_keep_all_that_they_should(draw, vocab, 400, "cpu")


def test_rows_that_are_not_finite_change_no_other_row() -> None:
    logits = randn(12, 3000)
    rows = make_rows(12, "cpu", (0.0, 1.0))
    expected = draw(logits, *rows.pick(ALL))
    bad = {1: float("nan"), 2: float("nan"), 5: float("inf"), 6: float("inf")}
    for row, value in bad.items():
        logits[row, 7 * row] = value
    logits[8:10] = -float("inf")
    logits[10, 1:] = -float("inf")
    found = draw(logits, *rows.pick(ALL))
    for row in (1, 2, 5, 6, 8, 9):
        assert found[row] == NOT_FINITE
    assert found[10] == 0
    for row in (0, 3, 4, 7, 11):
        assert found[row] == expected[row]
    logits[3] = 3.3e38
    logits[3, 5] = -3.3e38  # finite, but their difference is not
    assert 0 <= int(draw(logits, *rows.pick(ALL))[3]) < 3000


def test_a_row_depends_neither_on_others_nor_on_threads() -> None:
    logits, count = randn(9, 5000), 9
    rows, filters = make_rows(count, "cpu", (0.8,)), make_filters(count, "cpu")
    found = draw(logits, *rows.pick(ALL, filters))
    threads = torch.get_num_threads()
    try:
        for other in (1, 2, 3):
            torch.set_num_threads(other)
            assert torch.equal(draw(logits, *rows.pick(ALL, filters)), found)
    finally:
        torch.set_num_threads(threads)
    for row in range(count):
        mine = torch.tensor([row])
        assert draw(logits[mine], *rows.pick(mine, filters_at(filters, mine))) == found[row], FILTERS[row]


def test_no_rows() -> None:
    assert draw(torch.empty(0, 50), *make_rows(0, "cpu").pick(ALL)).shape == (0,)
