"""Scripts as vLLM's users write them; `MODEL` and `FOLDER` are names that the tests define.

Each ends with assertions that hold for vLLM too, given a model that follows the same instructions.
"""

from __future__ import annotations

MORE: dict[str, str] = {
    "argument parser": """
from vllm import LLM, EngineArgs, FlexibleArgumentParser

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.set_defaults(model=MODEL)
sampling_group = parser.add_argument_group("Sampling parameters")
sampling_group.add_argument("--max-tokens", type=int)
sampling_group.add_argument("--temperature", type=float)
args = vars(parser.parse_args(["--max-tokens", "5", "--temperature=0", "--max_model_len", "128", "-tp", "1"]))
max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
llm = LLM(**args)
sampling_params = llm.get_default_sampling_params()
if max_tokens is not None:
    sampling_params.max_tokens = max_tokens
if temperature is not None:
    sampling_params.temperature = temperature
outputs = llm.generate(["What is 2 + 3?", "Sort: d b a"], sampling_params)
assert all(len(output.outputs[0].token_ids) <= 5 for output in outputs)
""",
    "engine args": """
from dataclasses import asdict
from vllm import LLM, EngineArgs

engine_args = EngineArgs(model=MODEL, max_model_len=128, max_num_seqs=4, limit_mm_per_prompt={"image": 0})
llm = LLM(**(asdict(engine_args) | {"seed": 3}))
assert llm.llm_engine.model_config.max_model_len == 128
again = LLM.from_engine_args(engine_args)
assert again.get_world_size() == 1
again.shutdown()
""",
    "engine step by step": """
from vllm import EngineArgs, LLMEngine, SamplingParams

engine = llm = LLMEngine.from_engine_args(EngineArgs(model=MODEL, disable_log_stats=True))
test_prompts = [
    ("Count from 3 to 6:", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
    ("What is 2 + 3?", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
    ("Sort: d b a", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
]
request_id, finished = 0, {}
while test_prompts or engine.has_unfinished_requests():
    if test_prompts:
        prompt, sampling_params = test_prompts.pop(0)
        engine.add_request(f"my-{request_id}", prompt, sampling_params)
        request_id += 1
    for request_output in engine.step():
        if request_output.finished:
            finished[request_output.request_id] = request_output
assert set(finished) == {"my-0", "my-1", "my-2"} and len(finished["my-2"].outputs) == 2
assert engine.get_num_unfinished_requests() == 0
""",
    "queue": """
from vllm import LLM, RequestOutput, SamplingParams

llm = LLM(model=MODEL)
params = SamplingParams(temperature=0, max_tokens=8)
first = llm.enqueue(["What is 2 + 3?", "Sort: d b a"], params)
second = llm.enqueue("Spell: cat", params, use_tqdm=False)
assert llm.llm_engine.get_num_unfinished_requests() == 3
outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
assert [output.request_id for output in outputs] == first + second
assert [output.prompt for output in outputs] == ["What is 2 + 3?", "Sort: d b a", "Spell: cat"]
""",
    "queue of conversations": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
params = SamplingParams(temperature=0, max_tokens=8)
conversations = [[{"role": "user", "content": text}] for text in ("What is 2 + 3?", "Sort: d b a")]
ids = llm.enqueue_chat(conversations, params, use_tqdm=False, chat_template_kwargs={"x": 1})
outputs = llm.wait_for_completion(use_tqdm=False)
assert [output.request_id for output in outputs] == ids
assert [output.outputs[0].text for output in outputs] == [
    output.outputs[0].text for output in llm.chat(conversations, params, use_tqdm=False)
]
""",
    "prefix caching": """
from vllm import LLM, SamplingParams

prefix = "You sort letters. Here is an example. Sort: c b a. Answer: a b c. " * 4
prompts = [prefix + question for question in ("Sort: d b a", "Sort: e a c")]
params = SamplingParams(temperature=0.0, max_tokens=12)
plain = LLM(model=MODEL, enable_prefix_caching=False, block_size=16)
expected = [output.outputs[0].text for output in plain.generate(prompts, params, use_tqdm=False)]
del plain
llm = LLM(model=MODEL, enable_prefix_caching=True, block_size=16, gpu_memory_utilization=0.4)
llm.generate(prompts[0], params, use_tqdm=False)
outputs = llm.generate(prompts, params, use_tqdm=False)
assert [output.outputs[0].text for output in outputs] == expected
assert outputs[0].num_cached_tokens > 0
""",
    "structured outputs: JSON schema": """
import json
from enum import Enum
from typing import Literal
from pydantic import BaseModel
from vllm import LLM, SamplingParams, StructuredOutputsParams

class CarType(str, Enum):
    sedan = "sedan"
    suv = "SUV"

class CarDescription(BaseModel, extra="forbid"):
    brand: Literal["Audi", "BMW"]
    car_type: CarType

llm = LLM(model=MODEL, structured_outputs_config={"backend": "xgrammar"})
schema = CarDescription.model_json_schema()
params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), max_tokens=100, seed=0)
outputs = llm.generate("Generate a JSON with the brand and the type of a car", sampling_params=params)
assert CarDescription(**json.loads(outputs[0].outputs[0].text))
""",
    "structured outputs: any JSON": """
import json
from vllm import LLM, SamplingParams, StructuredOutputsParams

llm = LLM(model=MODEL)
params = SamplingParams(
    temperature=1.0, max_tokens=120, n=2, seed=1, structured_outputs=StructuredOutputsParams(json_object=True)
)
for completion in llm.generate("A JSON object:", params, use_tqdm=False)[0].outputs:
    assert completion.text.startswith("{")
    if completion.finish_reason == "stop":
        assert isinstance(json.loads(completion.text), dict)
""",
    "beam search": """
from vllm import LLM, TextPrompt
from vllm.sampling_params import BeamSearchParams

llm = LLM(model=MODEL, max_logprobs=16)
params = BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=1.0)
prompts = [TextPrompt(prompt="What is 2 + 3?"), TextPrompt(prompt="Sort: d b a")]
for output, prompt in zip(llm.beam_search(prompts, params), prompts):
    assert len(output.sequences) == 4
    scores = [beam.cum_logprob / len(beam.logprobs) for beam in output.sequences]
    assert scores == sorted(scores, reverse=True)
    assert all(prompt["prompt"] in beam.text for beam in output.sequences)
""",
    "embeddings": """
from vllm import LLM

llm = LLM(model=MODEL, runner="pooling", enforce_eager=True)
prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
outputs = llm.embed(prompts)
for prompt, output in zip(prompts, outputs):
    embeds = output.outputs.embedding
    assert len(embeds) == output.outputs.hidden_size
    assert abs(sum(value * value for value in embeds) - 1) < 1e-3
""",
    "embeddings with parameters": """
from vllm import LLM
from vllm.pooling_params import PoolingParams

llm = LLM(model=MODEL, runner="pooling")
[output] = llm.embed(["Follow the white rabbit."], pooling_params=PoolingParams(dimensions=32))
assert output.outputs.hidden_size == 32
assert abs(sum(value * value for value in output.outputs.embedding) - 1) < 1e-3
""",
    "classification by logprobs": """
import math
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
tokenizer = llm.get_tokenizer()
labels = {label: tokenizer.encode(label, add_special_tokens=False)[0] for label in ("5", "6", "7")}
params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=list(labels.values()))
for output in llm.generate(["What is 2 + 3?", "What is 3 + 4?"], params, use_tqdm=False):
    [row] = output.outputs[0].logprobs
    weights = {label: math.exp(row[token_id].logprob) for label, token_id in labels.items()}
    assert 0 < sum(weights.values()) <= 1.0001
    assert max(row, key=lambda token_id: row[token_id].logprob) == output.outputs[0].token_ids[0]
""",
    "scoring": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
texts = ["Sort: d b a", "q zz q zz q"]
perplexities = []
for output in llm.generate(texts, params, use_tqdm=False):
    pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs))[1:]
    perplexities.append(-sum(row[token_id].logprob for token_id, row in pairs) / len(pairs))
assert perplexities[0] < perplexities[1]
""",
    "tensor parallel": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, tensor_parallel_size=2, distributed_executor_backend="mp", max_num_seqs=4)
outputs = llm.generate(["What is 2 + 3?", "Sort: d b a"], SamplingParams(temperature=0, max_tokens=8))
assert len(outputs) == 2 and llm.get_world_size() == 2
assert len(llm.collective_rpc(print, args=("hello",))) == 2
""",
    "data parallel": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, data_parallel_size=2, data_parallel_backend="mp", max_num_seqs=4)
params = [SamplingParams(temperature=0.8, seed=index, max_tokens=4 + index % 3) for index in range(8)]
outputs = llm.generate(["What is 2 + 3?"] * 8, params)
assert [len(output.outputs[0].token_ids) <= 6 for output in outputs] == [True] * 8
assert llm.get_world_size(include_dp=False) == 1
""",
    "batch file": """
import json
from pathlib import Path
from vllm import LLM, SamplingParams

requests = [
    {"custom_id": f"{index}", "body": {"messages": [{"role": "user", "content": text}], "max_tokens": 9}}
    for index, text in enumerate(["What is 2 + 3?", "Sort: d b a", "Spell: cat"])
]
source, target = Path(FOLDER) / "in.jsonl", Path(FOLDER) / "out.jsonl"
source.write_text("\\n".join(map(json.dumps, requests)))
rows = [json.loads(line) for line in source.read_text().splitlines()]
llm = LLM(model=MODEL)
params = [SamplingParams(temperature=0, max_tokens=row["body"]["max_tokens"]) for row in rows]
outputs = llm.chat([row["body"]["messages"] for row in rows], params, use_tqdm=False)
with target.open("w") as file:
    for row, output in zip(rows, outputs):
        file.write(json.dumps({"custom_id": row["custom_id"], "text": output.outputs[0].text}) + "\\n")
assert [json.loads(line)["custom_id"] for line in target.open()] == [row["custom_id"] for row in rows]
""",
    "sleep": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, enable_sleep_mode=True)
params = SamplingParams(temperature=0, max_tokens=8)
[before] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
llm.sleep(level=1, mode="abort")
assert llm.llm_engine.is_sleeping()
assert llm.wake_up(tags=["weights"]) is False
assert llm.wake_up(tags=["kv_cache"]) is True
[after] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
assert after.outputs[0].text == before.outputs[0].text
""",
    "the model's weights": """
import torch
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, enforce_eager=True)
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
[before] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
[count] = llm.apply_model(lambda model: sum(each.numel() for each in model.parameters()))
assert count > 10_000

@torch.inference_mode()
def zero(model):
    for parameter in model.parameters():
        parameter.mul_(0)

def device_of(worker, name):
    return name, str(worker.device), worker.rank, next(worker.get_model().parameters()).sum().item()

[kept] = llm.apply_model(lambda model: {name: each.clone() for name, each in model.state_dict().items()})
llm.apply_model(zero)
[(name, device, rank, total)] = llm.collective_rpc(device_of, args=("rank",))
assert (name, rank, total) == ("rank", 0, 0.0)
[after] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
assert after.outputs[0].token_ids != before.outputs[0].token_ids
llm.apply_model(lambda model: model.load_state_dict(kept) and None)
[again] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
assert again.outputs[0].token_ids == before.outputs[0].token_ids
""",
    "logits processors and masks": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
five = llm.get_tokenizer().encode("5", add_special_tokens=False)[0]
params = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[five], ignore_eos=True)
[output] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
assert output.outputs[0].token_ids == [five] * 4
params = SamplingParams(temperature=0, max_tokens=4, logit_bias={five: 100.0}, min_tokens=4)
[output] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
assert output.outputs[0].token_ids == [five] * 4
params = SamplingParams(temperature=0, max_tokens=4, stop_token_ids=[five, five], logit_bias={five: 100.0})
[output] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
assert output.outputs[0].stop_reason == five and output.outputs[0].token_ids == [five]

def only_five(output_token_ids, logits):
    logits[five] += 1000.0 if len(output_token_ids) < 2 else 0.0
    return logits

params = SamplingParams(temperature=0, max_tokens=4, logits_processors=[only_five], ignore_eos=True)
[output] = llm.generate("What is 2 + 3?", params, use_tqdm=False)
assert output.outputs[0].token_ids[:2] == [five] * 2
""",
    "seeds": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, seed=0)
prompts = ["Tell a story.", "Count from 3 to 9:", "What is 2 + 3?"]
params = SamplingParams(temperature=1.5, seed=42, max_tokens=16, ignore_eos=True)
together = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
assert together == alone
other = SamplingParams(temperature=1.5, seed=43, max_tokens=16, ignore_eos=True)
assert llm.generate(prompts[0], other, use_tqdm=False)[0].outputs[0].token_ids != together[0]
""",
    "profiling": """
import os
from vllm import LLM, SamplingParams

profiler_config = {"profiler": "torch", "torch_profiler_dir": FOLDER}
llm = LLM(model=MODEL, tensor_parallel_size=1, profiler_config=profiler_config)
llm.start_profile()
outputs = llm.generate(["Sort: d b a"] * 2, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=3))
llm.stop_profile()
assert any(name.endswith((".json", ".json.gz")) for name in os.listdir(FOLDER))
""",
    "metrics of requests": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, disable_log_stats=False)
for output in llm.generate(["What is 2 + 3?", "Sort: d b a"], SamplingParams(max_tokens=4), use_tqdm=False):
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time
    assert output.lora_request is None and output.encoder_prompt is None
    assert output.outputs[0].lora_request is None
""",
    "metrics": """
from vllm import Counter, Gauge, Histogram, LLM, SamplingParams, Vector

llm = LLM(model=MODEL, disable_log_stats=False)
outputs = llm.generate(["What is 2 + 3?", "Sort: d b a"], SamplingParams(temperature=0.8, top_p=0.95))
for metric in llm.get_metrics():
    if isinstance(metric, Gauge):
        print(f"{metric.name} (gauge) = {metric.value}")
    elif isinstance(metric, Counter):
        print(f"{metric.name} (counter) = {metric.value}")
    elif isinstance(metric, Vector):
        print(f"{metric.name} (vector) = {metric.values}")
    elif isinstance(metric, Histogram):
        print(f"{metric.name} (histogram): sum = {metric.sum}, count = {metric.count}")
        for limit, value in metric.buckets.items():
            print(f"    {limit} = {value}")
by_name = {metric.name: metric for metric in llm.get_metrics()}
assert by_name["vllm:generation_tokens"].value == sum(len(each.outputs[0].token_ids) for each in outputs)
""",
    "long prompts": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, enable_chunked_prefill=True, max_num_batched_tokens=64, max_num_seqs=2)
ids = llm.get_tokenizer().encode("Count from 3 to 9: 3 4 5 6 7 8 9. " * 12)[-240:]
params = SamplingParams(temperature=0, max_tokens=4)
[output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
assert output.prompt_token_ids == ids and output.prompt is None
""",
    "chat: continue and tools": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
messages = [{"role": "user", "content": "Count from 3 to 9:"}, {"role": "assistant", "content": "3 4 5"}]
params = SamplingParams(temperature=0, max_tokens=8)
[output] = llm.chat(messages, params, False, add_generation_prompt=False, continue_final_message=True)
assert output.prompt.endswith("3 4 5")
template = "{{ tools | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
parts = [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]}]
[output] = llm.chat(parts, params, use_tqdm=False, chat_template=template, tools=tools)
assert output.prompt == "1What is 2 + 3?"
""",
    "no text": """
from vllm import LLM, SamplingParams, TokensPrompt

llm = LLM(model=MODEL, skip_tokenizer_init=True)
params = SamplingParams(temperature=0, max_tokens=5, detokenize=False, ignore_eos=True)
outputs = llm.generate([TokensPrompt(prompt_token_ids=[5, 6, 7]), {"prompt_token_ids": [8]}], params)
assert [output.outputs[0].text for output in outputs] == ["", ""]
assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]
""",
    "the last output only": """
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

llm = LLM(model=MODEL, generation_config="vllm", max_model_len=64, hf_overrides={})
params = SamplingParams(max_tokens=None, temperature=0, output_kind=RequestOutputKind.FINAL_ONLY)
[output] = llm.generate("Count from 3 to 9:", params, use_tqdm=False, priority=[3])
assert output.finished and len(output.prompt_token_ids) + len(output.outputs[0].token_ids) <= 64
""",
}
