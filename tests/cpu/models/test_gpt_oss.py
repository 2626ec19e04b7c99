"""gpt-oss: MXFP4 experts are bit for bit those of the dequantised checkpoint, also on two ranks; new weights,
sleep, refusals, harmony's chat template. `test_families.py` compares the family with transformers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import inside
import moe_cases
import pytest
import torch
from checked_llm import make_tiny
from digests import make_digest
from engine_cases import make_prompts
from moe_cases import SWAPPED, WIDE, Sizes
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensors import BF16, F32
from test_models import PROMPT, check_against_transformers, forward, load
from test_texts import TOKENIZERS
from tiny_models import (
    edit_json,
    transformers_greedy,
    transformers_logits,
    transformers_model,
    write_tiny_model,
)

from nanovllm import LLM, ModelLoadError, SamplingParams
from nanovllm.chat.templates import TemplateProcess
from nanovllm.formats.mxfp4.kernels.values import VALUES, dequantise_mxfp4
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import get_family, load_model_config
from nanovllm.moe.kernels.grouped_matmul import choose_experts
from tools.write_mxfp4 import quantise_mxfp4, write_mxfp4, write_rounded

# Widths of a group and of several; half of an expert's width is no whole number of groups.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("floats"), "gpt_oss", **SIZES)


@pytest.fixture(scope="module")
def mxfp4(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mxfp4(floats, tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture(scope="module")
def rounded(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rounded(floats, tmp_path_factory.mktemp("rounded"))


# -- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_code_and_scale(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(255, dtype=torch.uint8)
    found = dequantise_mxfp4(codes.expand(255, 16, 16), scales[:, None].expand(255, 16), dtype)
    for scale in (0, 1, 100, 127, 254):
        wanted = [
            VALUES[code] * 2.0 ** (scale - 127) for byte in range(256) for code in (byte % 16, byte // 16)
        ]
        assert torch.equal(found[scale], torch.tensor(wanted, dtype=torch.float64).float().to(dtype))
    assert dequantise_mxfp4(codes, torch.full((16,), 255, dtype=torch.uint8)).isnan().all()


def test_rounding_to_the_nearest_value() -> None:
    every = torch.tensor(VALUES).repeat(2)
    powers = torch.exp2(torch.arange(-20.0, 20.0))[:, None]
    assert torch.equal(dequantise_mxfp4(*quantise_mxfp4(every * powers)), every * powers)
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 5.1, -0.3, *[0.0] * 21])
    wanted = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0, 6.0, -0.5]
    assert dequantise_mxfp4(*quantise_mxfp4(ties))[:11].tolist() == wanted
    assert not dequantise_mxfp4(*quantise_mxfp4(torch.zeros(64))).any()


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases")
@pytest.mark.parametrize(
    "choice",
    [choose_experts(1, 10, F32, torch.device("cpu")), SWAPPED, WIDE],
    ids=["plain", "swapped", "wide"],
)
@pytest.mark.parametrize(("rows", "dtype"), [(1, F32), (2, BF16), (21, F32)])
def test_experts_with_biases(rows: int, dtype: torch.dtype, choice: Any) -> None:
    """And the clamped SwiGLU."""
    moe_cases.check_experts(rows, Sizes(clamped=True), dtype, "cpu", choice)


# -- checkpoints --------------------------------------------------------------------------------------------


def test_the_dequantised_checkpoint_bit_for_bit(mxfp4: Path, rounded: Path) -> None:
    check_against_transformers(rounded)
    assert torch.equal(forward(load(mxfp4), PROMPT), forward(load(rounded), PROMPT))


def test_transformers_reads_the_same_file(mxfp4: Path) -> None:
    pytest.importorskip("accelerate")
    expected = transformers_logits(mxfp4, PROMPT)
    torch.testing.assert_close(forward(load(mxfp4), PROMPT), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_load_the_same(mxfp4: Path, rounded: Path, ranks: int) -> None:
    """Two ranks share a group of 32 inputs of `down`."""
    digests = []
    for folder in (mxfp4, rounded):
        with make_digest(folder, tensor_parallel_size=ranks) as llm:
            digests.append(llm.on_ranks("digest"))
    assert digests[0] == digests[1]


def test_the_engine_on_two_ranks(mxfp4: Path, rounded: Path) -> None:
    prompts = make_prompts()
    options = {"tensor_parallel_size": 2, "max_num_batched_tokens": 9, "num_kvcache_blocks": 9}
    with make_tiny(mxfp4, **options) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [each["token_ids"] for each in outputs] == [transformers_greedy(rounded, p, 6) for p in prompts]


def test_experts_that_are_not_converted(floats: Path, rounded: Path, tmp_path: Path) -> None:
    """As transformers reads the list."""
    folder = write_rounded(floats, tmp_path)
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.experts"]}
    edit_json(folder / "config.json", quantization_config=stated)
    assert torch.equal(forward(load(folder), PROMPT), forward(load(rounded), PROMPT))


@pytest.mark.parametrize("part", [slice(0, 3), slice(2, 7)])
def test_a_file_is_read_in_parts(floats: Path, part: slice) -> None:
    config = load_model_config(floats)
    rows = config.quant.packed_rows
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = load_file(floats / "model.safetensors")
    with safe_open(floats / "model.safetensors", framework="pt") as opened:
        for key in (name, f"{name}_bias", name.replace("gate_up", "down")):
            wanted = dict(config.names.tensors(key, whole[key], rows))
            found = dict(config.names.tensors(key, opened.get_slice(key), rows))
            assert wanted.keys() == found.keys()
            for each, tensor in wanted.items():
                assert found[each].get_shape() == list(tensor.shape)
                assert torch.equal(found[each][part], tensor[part])
                assert torch.equal(found[each][...], tensor)
                if tensor.dim() > 1:
                    assert torch.equal(found[each][:, part], tensor[:, part])


def test_dummy_weights(mxfp4: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "num_kvcache_blocks": 9}
    with LLM(mxfp4, load_format="dummy", dtype="float32", max_model_len=40, **options) as llm:
        weight = inside.model(llm).model.layers[0].mlp.experts.gate_up
        assert 0.015 < float(weight.std()) < 0.03
        assert len(llm.generate([PROMPT], PARAMS, use_tqdm=False)[0]["token_ids"]) == 6


def test_the_note_and_the_dtype(mxfp4: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with make_tiny(mxfp4):
        pass
    assert "experts in MXFP4 are dequantised as they are loaded" in caplog.text
    raw = json.loads((mxfp4 / "config.json").read_text())
    family = get_family("GptOssForCausalLM")
    assert family.model_config("X", raw).dtype == "float32"
    assert family.model_config("X", {key: raw[key] for key in raw if key != "dtype"}).dtype == "bfloat16"


# -- new weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_state_dict_of_transformers_updates(floats: Path, tmp_path: Path, ranks: int) -> None:
    second = write_tiny_model(tmp_path, "gpt_oss", seed=5, **SIZES)
    with make_digest(second, tensor_parallel_size=ranks) as llm:
        expected = llm.on_ranks("digest")
    with make_digest(floats, tensor_parallel_size=ranks) as llm:
        assert llm.on_ranks("digest") != expected
        llm.update_weights(transformers_model(second).state_dict())
        assert llm.on_ranks("digest") == expected


def test_new_blocks_and_scales(mxfp4: Path, tmp_path: Path) -> None:
    second = write_mxfp4(write_tiny_model(tmp_path / "a", "gpt_oss", seed=5, **SIZES), tmp_path / "b")
    tensors = load_file(second / "model.safetensors")
    with make_digest(second, tensor_parallel_size=2) as llm:
        expected = llm.on_ranks("digest")
    with make_digest(mxfp4, tensor_parallel_size=2) as llm:
        llm.update_weights(tensors)
        assert llm.on_ranks("digest") == expected
    with make_tiny(mxfp4) as llm:
        with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.blocks came without scales; pass both"):
            llm.update_weights({BLOCKS: tensors[BLOCKS]})
        with pytest.raises(
            ValueError, match=r"no tensor 'model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weig"
        ):
            llm.update_weights({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(10, 64, 192)})


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(mxfp4: Path, level: int) -> None:
    with make_tiny(mxfp4) as llm:
        before = llm.generate([PROMPT], PARAMS, use_tqdm=False)[0]["token_ids"]
        llm.sleep(level)
        llm.wake_up()
        assert llm.generate([PROMPT], PARAMS, use_tqdm=False)[0]["token_ids"] == before


# -- refusals -----------------------------------------------------------------------------------------------


def changed(source: Path, folder: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of `source` with some tensors changed, or left out."""
    write_rounded(source, folder)
    found: dict[str, Any] = load_file(source / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_broken_files(mxfp4: Path, tmp_path: Path) -> None:
    tensors = load_file(mxfp4 / "model.safetensors")
    scales = BLOCKS.replace("blocks", "scales")
    wrong = tensors[scales].clone()
    wrong[3, 5, 1] = 255
    cases: list[tuple[dict[str, Any], str]] = [
        ({scales: wrong}, r"experts\.3\.down_proj\.scales: a scale is 255, which means NaN"),
        ({scales: None}, r"missing: model\.layers\.1\.mlp\.experts\.0\.down_proj\.scales"),
        ({BLOCKS: tensors[BLOCKS].float()}, "dtype that does not fit its quantization_config"),
        ({BLOCKS: tensors[BLOCKS][:, :, :1].contiguous()}, r"down_proj\.blocks is \(64, 1, 16\), but the"),
        ({BLOCKS: tensors[BLOCKS][:9].contiguous()}, r"missing: .*experts\.9\.down_proj\.blocks"),
        ({BLOCKS: tensors[BLOCKS].repeat(2, 1, 1, 1)}, rf"unexpected: {BLOCKS}"),
    ]
    for index, (tensor, message) in enumerate(cases):
        with pytest.raises(ModelLoadError, match=message):
            make_tiny(changed(mxfp4, tmp_path / str(index), **tensor))


@pytest.mark.parametrize("sizes", [{"hidden_size": 40}, {"intermediate_size": 40}], ids=str)
def test_sizes_without_whole_groups(mxfp4: Path, tmp_path: Path, sizes: dict[str, int]) -> None:
    folder = changed(mxfp4, tmp_path)
    edit_json(folder / "config.json", **sizes)
    with pytest.raises(ValueError, match=r"MXFP4 need a hidden_size and an .* multiples of 32, not 40"):
        make_tiny(folder)


def test_fp8_is_refused(floats: Path) -> None:
    with pytest.raises(ValueError, match="quantization 'fp8' is not supported in GptOssForCausalLM"):
        make_tiny(floats, quantization="fp8")


def test_a_malformed_list_of_modules(mxfp4: Path, tmp_path: Path) -> None:
    folder = changed(mxfp4, tmp_path)
    edit_json(
        folder / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": "x"}
    )
    with pytest.raises(ValueError, match="modules_to_not_convert must be a list of names, not 'x'"):
        load_model_config(folder)


# -- the chat template --------------------------------------------------------------------------------------

# With the features of harmony's template, in short: macros, a namespace, the date, tools and builtin tools.
HARMONY = """
{%- macro type_of(spec) -%}
    {%- if spec.type == 'array' -%}{{ type_of(spec['items']) }}[]
    {%- elif spec.enum is defined -%}{{ spec.enum | map('tojson') | join(' | ') }}
    {%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join(' | ') }}
    {%- else -%}{{ spec.type }}{%- endif -%}
{%- endmacro -%}
{%- macro tool_list(tools) -%}
    {%- for tool in tools %}{%- set tool = tool.function %}
        {{- '// ' + tool.description + '\n' }}{{- 'type ' ~ tool.name ~ ' = (_: {\n' }}
        {%- for name, spec in tool.parameters.properties.items() %}
            {{- name }}{{- '?' if name not in tool.parameters.required | default([]) }}: {{ type_of(spec) -}}
            {{ ',\n' }}
        {%- endfor %}{{- '}) => any;\n' }}
    {%- endfor %}
{%- endmacro -%}
{%- set effort = reasoning_effort | default('medium') -%}
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\nReasoning: ' + effort + '\n' }}
{%- if builtin_tools is defined %}{{- '# Tools\n' }}
    {%- if 'browser' in builtin_tools %}{{- 'namespace browser {}\n' }}{%- endif %}
    {%- if 'python' in builtin_tools %}{{- '## python\n' }}{%- endif %}
{%- endif %}{{- '<|end|>' }}
{%- if messages[0].role in ['developer', 'system'] %}
    {%- set instructions = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set instructions = '' %}{%- set loop_messages = messages %}{%- endif %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' + instructions }}{%- if tools %}{{- tool_list(tools) }}{%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(tool=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}{%- set last.tool = call.name %}
        {{- '<|start|>assistant<|channel|>commentary to=functions.' ~ call.name ~ '<|message|>' }}
        {{- call.arguments | tojson }}{{- '<|call|>' }}
    {%- elif message.role == 'tool' %}
        {%- if last.tool is none %}{{- raise_exception('a tool that was not called') }}{%- endif %}
        {{- '<|start|>functions.' ~ last.tool ~ ' to=assistant<|message|>' }}
        {{- message.content | tojson ~ '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' ~ message.content }}
        {{- '<|return|>' if loop.last else '<|end|>' }}
    {%- else %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif -%}
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "unit": {"enum": ["C", "F"], "type": "string"}},
            "required": ["place"],
        },
    },
}


def test_a_template_like_harmonys() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Ulm"}}}
    conversation = [
        {"role": "developer", "content": "Be brief.\n"},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": {"rain": True}},
    ]
    process = TemplateProcess()
    options = {
        **{"tools": [TOOL], "add_generation_prompt": True},
        **{"builtin_tools": ["browser", "python"], "reasoning_effort": "high"},
    }
    try:
        found, wrong = process.render(HARMONY, {}, [conversation, conversation[-1:]], options)
    finally:
        process.close()
    today = re.search(r"Current date: (\d{4}-\d\d-\d\d)\n", str(found))
    assert today is not None
    assert str(found) == (
        f"<|start|>system<|message|>Current date: {today[1]}\nReasoning: high\n# Tools\n"
        "namespace browser {}\n## python\n<|end|><|start|>developer<|message|>Be brief.\n"
        "// Of a place.\ntype weather = (_: {\n"
        'place: string,\nunit?: "C" | "F",\n}) => any;\n<|end|><|start|>user<|message|>Rain?<|end|>'
        '<|start|>assistant<|channel|>commentary to=functions.weather<|message|>{"place": "Ulm"}<|call|>'
        '<|start|>functions.weather to=assistant<|message|>{"rain": true}<|end|><|start|>assistant'
    )
    assert "a tool that was not called" in str(wrong)


def test_the_template_of_the_folder(tmp_path: Path) -> None:
    """`chat` takes the template from the model's file chat_template.jinja."""
    tokenizer = TOKENIZERS["byte_level"]
    folder = write_tiny_model(tmp_path, "gpt_oss", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(HARMONY)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(str(folder), device="cpu", num_kvcache_blocks=90, max_model_len=400) as llm:
        [output] = llm.chat([{"role": "user", "content": "Rain?"}], params, tools=[TOOL], use_tqdm=False)
    text = tokenizer.decode(output.prompt_token_ids)
    assert "Reasoning: medium" in text and "type weather = (_: {" in text
    assert text.endswith("<|start|>user<|message|>Rain?<|end|><|start|>assistant")
