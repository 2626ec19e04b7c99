"""A step runs the tensor operations that tests/data/op_gate holds: those of each family on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import inside
import op_gate
import pytest
from tiny_models import write_tiny_model

from nanovllm import LLM
from nanovllm.cpu import isa
from nanovllm.cuda_graphs.graphs import Rehearsal
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
    assert launches[1].startswith("triton._decode_chunk_kernel(bf16[3,6,16], bf16[32,128,2,16], ")
    assert ", grid=(2, 3, 1), HEADS=(6, 2, 16, 16, 128, 1), " in launches[1]
    shapes = "bf16[3,64] in (32, 32), bf16[160,64] in (64, 32), None, None, bf16[3,160]"
    assert launches[0].startswith(f"triton._linear_kernel({shapes}, 3, 160, 64, grid=(3), ")


_WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]


@pytest.mark.parametrize(
    ("family", "config", "num_run"),
    [
        ("qwen3", {"num_hidden_layers": 6}, 2),
        ("gemma3", {"num_hidden_layers": 12, "layer_types": _WINDOWS * 2}, 5),
        ("gpt_oss", {"num_hidden_layers": 6, "layer_types": [_WINDOWS[0], _WINDOWS[-1]] * 3}, 3),
        ("qwen3_moe", {"num_hidden_layers": 8, "mlp_only_layers": [0, 1, 2, 5]}, 6),
        ("smollm3", {"num_hidden_layers": 9, "no_rope_layers": [1, 1, 0] * 3}, 4),
    ],
)
def test_a_rehearsal_runs_few_layers_and_every_operation(
    family: str, config: dict[str, Any], num_run: int, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path, family, **config)
    options = {"max_model_len": 64, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    with isa.compiling_for("torch"), LLM(folder, device="cpu", **options) as llm:
        model, found = inside.model(llm), []
        for rehearsing in (nullcontext, Rehearsal(model.model), nullcontext):
            recorder = op_gate.Recorder()
            with rehearsing():
                num_layers = len(model.model.layers)
                with recorder.step("generate"):
                    llm.generate([[5, 6, 7], [8, 9]], op_gate.GREEDY, use_tqdm=False)
            found.append((num_layers, recorder.lines))
    if family in ("gpt_oss", "qwen3_moe"):  # on a CPU the shapes depend on the chosen experts
        found = [(num_layers, [line.split("(")[0] for line in lines]) for num_layers, lines in found]
    whole, rehearsed, again = found
    assert (whole[0], rehearsed[0]) == (config["num_hidden_layers"], num_run)
    assert len(rehearsed[1]) < len(whole[1]) and set(rehearsed[1]) == set(whole[1]) and again == whole
