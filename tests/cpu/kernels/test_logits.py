"""Penalties, masks and logprobs: interpreted kernels and torch references, against definitions."""

from __future__ import annotations

import logits_cases as cases
import pytest
import torch
from tensors import BF16, F16, F32

from nanovllm.kernels.compat import INTERPRET

pytestmark = [
    pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, about NaN and infinities
]

CPU = "cpu"


@pytest.mark.parametrize(("rows", "vocab", "dtype"), [(1, 33, F32), (3, 2100, BF16), (17, 97, F16)])
def test_process_logits(rows: int, vocab: int, dtype: torch.dtype) -> None:
    cases.check_process_logits(rows, vocab, dtype, CPU)


def test_process_logits_as_transformers() -> None:
    cases.check_process_logits_as_transformers(2100, CPU)


def test_counts() -> None:
    cases.check_counts(97, CPU)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 2), (3, 5003), (97, 300)])
def test_token_logprobs(rows: int, vocab: int, dtype: torch.dtype) -> None:
    cases.check_token_logprobs(rows, vocab, dtype, CPU)


def test_logprobs_rows_are_independent() -> None:
    cases.check_logprobs_rows_are_independent(6, 700, CPU)
