"""With any valid SamplingParams the likeliest token stays, and no row counts as not finite."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.batch import map_columns
from nanovllm.kernels.sampling import sample
from nanovllm.plan.sequence import SamplingTable, Sequence
from nanovllm.sampling_params import SamplingParams

TINY = float(np.finfo(np.float32).smallest_subnormal)
HUGE = float(np.finfo(np.float32).max)
LOGITS = torch.tensor([[0.5, 3.0, -1.0, 3.0, -80.0, 2.999]])


@pytest.mark.filterwarnings("error")
@given(
    temperature=st.sampled_from([0.0, TINY, 1e-38, 1e-6, 1.0, 1e6, HUGE]) | st.floats(0, HUGE),
    top_p=st.sampled_from([TINY, 1e-38, 1e-9, 0.5, 1.0]) | st.floats(TINY, 1),
    min_p=st.sampled_from([0.0, TINY, 1e-38, 0.5, 1.0]) | st.floats(TINY, 1),
    top_k=st.sampled_from([-1, 0, 1, 3, 10**400]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@example(temperature=TINY, top_p=TINY, min_p=1.0, top_k=1, seed=0)
@example(temperature=HUGE, top_p=TINY, min_p=TINY, top_k=1, seed=0)
def test_the_likeliest_token_stays(
    temperature: float, top_p: float, min_p: float, top_k: int, seed: int
) -> None:
    try:
        params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    except ValueError:  # between 0 and the smallest float32 above it
        assert 0 < temperature < TINY
        return
    table = SamplingTable(1)
    seq = Sequence(0, array("i", [5]), params, seed)
    seq.slot = 0
    table.set(seq)
    columns = table.take(np.array([0]), np.zeros(1, np.int32))
    token = sample(LOGITS, map_columns(columns, lambda _, each: torch.from_numpy(each.copy()))).item()
    assert token >= 0
    if temperature == 0 or top_k == 1 or top_p < 0.1 or min_p == 1:
        assert token in (1, 3)
