"""Scripts for vLLM run when `vllm` in their imports becomes `nanovllm`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm_scripts import MORE

import nanovllm

# Only the name of the model differs from vLLM's own examples.
MODEL = nanovllm.demo_model_path()

SCRIPTS = {
    "quick start": """
from vllm import LLM, SamplingParams

prompts = ["What is 2 + 3?", "Sort: d b a", "Count from 3 to 6:", "Spell: cat"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model=MODEL)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
assert [output.prompt for output in outputs] == prompts
assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]
""",
    "defaults": """
from vllm import LLM

llm = LLM(
    model=MODEL,
    tokenizer=MODEL,
    tokenizer_mode="auto",
    trust_remote_code=False,
    dtype="float32",
    seed=0,
    gpu_memory_utilization=0.5,
    swap_space=0,
    max_model_len=256,
    max_logprobs=5,
    disable_log_stats=True,
    limit_mm_per_prompt={},
    hf_overrides={},
    enforce_eager=True,
    generation_config="auto",
    override_generation_config={"max_new_tokens": 9},
)
sampling_params = llm.get_default_sampling_params()
sampling_params.temperature = 0.0
outputs = llm.generate("What is 2 + 3?", sampling_params)
assert len(outputs) == 1 and len(outputs[0].outputs[0].token_ids) <= 9
assert llm.llm_engine.model_config.max_model_len == 256
""",
    "chat": """
from vllm import LLM

llm = LLM(model=MODEL)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 24
sampling_params.top_p = 0.9
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Sort: c a b"},
]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
assert len(outputs) == 1 and outputs[0].outputs[0].text is not None
conversations = [conversation for _ in range(10)]
outputs = llm.chat(conversations, sampling_params, use_tqdm=True)
assert len(outputs) == 10
template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\\n{% endfor %}"
outputs = llm.chat(
    conversations,
    sampling_params,
    use_tqdm=False,
    chat_template=template,
    chat_template_content_format="auto",
)
assert outputs[0].prompt.startswith("system: You are a helpful assistant\\nuser: Hello")
""",
    "several answers": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
params = SamplingParams(n=4, temperature=0.8, top_p=0.95, seed=42, max_tokens=12)
for request in llm.generate(["What is 2 + 3?", "Sort: d b a"], params, use_tqdm=False):
    assert request.finished
    assert [sample.index for sample in request.outputs] == [0, 1, 2, 3]
    for sample in request.outputs:
        assert sample.finished() and sample.finish_reason in ("stop", "length")
""",
    "stop strings": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
params = SamplingParams(temperature=0, max_tokens=32)
text = llm.generate("Count from 3 to 9:", params, use_tqdm=False)[0].outputs[0].text
stop = text[5:8]
for include in (False, True):
    params = SamplingParams(temperature=0, max_tokens=32, stop=[stop], include_stop_str_in_output=include)
    completion = llm.generate("Count from 3 to 9:", params, use_tqdm=False)[0].outputs[0]
    assert completion.text == text[: text.index(stop)] + (stop if include else "")
    assert completion.stop_reason == stop and completion.finish_reason == "stop"
""",
    "tokens": """
from vllm import LLM, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt

llm = LLM(model=MODEL, skip_tokenizer_init=False)
tokenizer = llm.get_tokenizer()
ids = tokenizer.encode("What is 2 + 3?")
params = SamplingParams(temperature=0.0, max_tokens=8, detokenize=True)
outputs = llm.generate(
    [TokensPrompt(prompt_token_ids=ids), TextPrompt(prompt="What is 2 + 3?"), {"prompt_token_ids": ids}],
    sampling_params=params,
    use_tqdm=False,
    lora_request=None,
)
assert len({output.outputs[0].text for output in outputs}) == 1
completion = outputs[0].outputs[0]
assert tokenizer.decode(completion.token_ids, skip_special_tokens=True) == completion.text
""",
    "logprobs": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, max_logprobs=10)
params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
[output] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
completion = output.outputs[0]
assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
total = 0.0
for token_id, logprobs in zip(completion.token_ids, completion.logprobs):
    assert logprobs[token_id].rank == 1
    best = max(logprobs.values(), key=lambda each: each.logprob)
    assert best.logprob == logprobs[token_id].logprob <= 0 and isinstance(best.decoded_token, str)
    total += logprobs[token_id].logprob
assert abs(total - completion.cumulative_logprob) < 1e-4
""",
    "penalties": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, enable_prefix_caching=True, block_size=16, num_gpu_blocks_override=64)
params = SamplingParams(
    presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, min_tokens=4, max_tokens=12,
    temperature=0.7, top_k=40, min_p=0.05, logit_bias={5: -100.0}, bad_words=["seven"], best_of=None,
)
for output in llm.generate(["What is 2 + 3?"] * 3, params):
    assert 4 <= len(output.outputs[0].token_ids) <= 12
    assert output.metrics.first_token_time >= output.metrics.arrival_time
""",
    "structured outputs": """
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model=MODEL)
constraint = StructuredOutputsParams(choice=["Positive", "Negative"])
params = SamplingParams(structured_outputs=constraint)
outputs = llm.generate(prompts="Classify this sentiment: vLLM is wonderful!", sampling_params=params)
assert outputs[0].outputs[0].text in ("Positive", "Negative")
constraint = StructuredOutputsParams(regex=r"\\w+@\\w+\\.com\\n")
params = SamplingParams(structured_outputs=constraint, stop=["\\n"], max_tokens=50)
text = llm.generate(prompts="Generate an email address", sampling_params=params)[0].outputs[0].text
assert text
""",
    "structured outputs: structural tag": """
import json
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
structures = [{"begin": "<f=a>", "schema": schema, "end": "</f>"}]
tag = json.dumps({"type": "structural_tag", "structures": structures, "triggers": ["<f="]})
llm = LLM(model=MODEL)
begin = llm.get_tokenizer().encode("<f=", add_special_tokens=False)
params = SamplingParams(
    max_tokens=60, seed=0, logit_bias={token: 9.0 for token in begin},
    structured_outputs=StructuredOutputsParams(structural_tag=tag),
)
[output] = llm.generate("Call f:", params, use_tqdm=False)
for part in output.outputs[0].text.split("<f=a>")[1:]:
    if "</f>" in part:
        assert json.loads(part.partition("</f>")[0])["a"] in (1, 2)
""",
    "structured outputs: grammar": """
import re
from vllm import LLM, SamplingParams, StructuredOutputsParams

grammar = '''
root ::= select_statement
select_statement ::= "SELECT " column " from " table
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
'''
llm = LLM(model=MODEL)
params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar), max_tokens=50)
outputs = llm.generate("Generate an SQL query for a username", sampling_params=params)
assert re.fullmatch("SELECT col_[12] from table_[12]", outputs[0].outputs[0].text)
""",
    "profile": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, max_num_seqs=2)
llm.start_profile(FOLDER)
llm.generate(["Sort: d b a"] * 3, SamplingParams(max_tokens=4), use_tqdm=False)
llm.stop_profile()
assert llm.reset_prefix_cache()
""",
}


@pytest.mark.parametrize("name", SCRIPTS | MORE)
def test_script(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = (SCRIPTS | MORE)[name]
    assert "\nfrom vllm" in script
    code = script.replace("\nfrom vllm", "\nfrom nanovllm")
    names: dict[str, object] = {"MODEL": MODEL, "FOLDER": str(tmp_path_factory.mktemp("profile"))}
    exec(compile(code, name, "exec", dont_inherit=True), names)  # a script without future imports
    close: Callable[[], None] = names["llm"].close  # type: ignore[attr-defined]
    close()
