"""A step runs the tensor operations that tests/data/op_gate holds: those of each family on a CPU."""

from __future__ import annotations

from pathlib import Path

import op_gate
import pytest

from nanovllm.kernels.compat import INTERPRET


@pytest.mark.parametrize("name", op_gate.CPU)
def test_operations(name: str, tmp_path: Path) -> None:
    op_gate.check(name, "cpu", tmp_path)


def test_a_text_is_kept_for_each_setting_and_no_other() -> None:
    for device in ("cpu", "cuda"):
        kept = {path.stem: path.read_text() for path in op_gate.path_of("", device).parent.glob("*.txt")}
        assert sorted(kept) == sorted(op_gate.settings(device))
        for text in kept.values():
            assert text.splitlines()[1] == f"# sha256 {op_gate.digest(text.splitlines()[2:])}"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (["## prefill", "a", "c", "b"], ["prefill", "kept   b", "found  c"]),
        (["## prefill", "a", "b"], ["prefill", "kept   c", "found  nothing"]),
        (["## prefill", "a", "b", "c", "## decode", "d"], ["decode", "kept   nothing", "found  ## decode"]),
        (["## prefill", "a", "b", "c"], []),
    ],
)
def test_the_first_difference_is_shown(found: list[str], said: list[str]) -> None:
    kept, new = (op_gate.text_of(lines, "cpu") for lines in (["## prefill", "a", "b", "c"], found))
    shown = op_gate.difference(kept, new)
    assert bool(shown) == bool(said)
    assert all(each in shown for each in said)


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu records them")
def test_launches_of_triton_are_recorded(tmp_path: Path) -> None:
    """With shapes, grids and constants; in the interpreter, whose own operations are left out."""
    config = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 1}
    options = op_gate.BF16 | {"attention_backend": "triton", "deterministic": True}
    lines = op_gate.steps_of(op_gate.Setting("qwen3", config, options), "cpu", tmp_path)
    first = lines.index("## decode of 3")
    launches = [line for line in lines[first:] if line.startswith("triton.")]
    names = ["_linear_kernel", "_decode_chunk_kernel", *4 * ["_linear_kernel"]]
    assert [line.split("(")[0] for line in launches] == [f"triton.{name}" for name in names]
    assert launches[1].startswith("triton._decode_chunk_kernel(bf16[3,6,16], bf16[32,256,2,16], ")
    assert ", grid=(2, 3, 1), HEADS=(6, 2, 16, 16, 256, 1), " in launches[1]
    shapes = "bf16[3,64] in (32, 32), bf16[160,64] in (64, 32), None, None, bf16[3,160]"
    assert launches[0].startswith(f"triton._linear_kernel({shapes}, 3, 160, 64, grid=(3), ")
