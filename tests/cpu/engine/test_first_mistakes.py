"""The mistakes that newcomers make, each with its whole message: what is wrong, and what to do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_models import write_tiny_model

from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, demo_model_path
from nanovllm.device import Device
from nanovllm.extras.structured_outputs import StructuredOutputsParams as Structured
from nanovllm.runner.model_runner import ModelRunner

DEMO = demo_model_path()
SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 8, "kvcache_block_size": 16}
Mistake = Callable[[LLM, Path], object]  # of an engine of the demo model, and of a folder with a tiny model


def made(**options: Any) -> Mistake:
    """`LLM` of the demo model with these options."""
    return lambda llm, folder: LLM(DEMO, **{**SMALL, **options})


def generate(*args: Any, **options: Any) -> Mistake:
    return lambda llm, folder: llm.generate(*args, **options, use_tqdm=False)


def chat(*args: Any, **options: Any) -> Mistake:
    return lambda llm, folder: llm.chat(*args, **options, use_tqdm=False)


def without(name: str) -> Mistake:
    """A model of whose folder a file is missing."""

    def start(llm: LLM, folder: Path) -> object:
        (folder / name).unlink(missing_ok=True)
        return LLM(folder, device="cpu", num_kvcache_blocks=8, skip_tokenizer_init=name != "tokenizer.json")

    return start


def base_model(llm: LLM, folder: Path) -> object:
    tokenizer = llm.get_tokenizer()
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        return llm.chat([{"role": "user", "content": "Hello"}], use_tqdm=False)
    finally:
        tokenizer.chat_template = template


def made_with(free: int, **options: Any) -> Mistake:
    """`LLM` of the demo model on a device with so many free bytes."""

    def start(llm: LLM, folder: Path) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Device, "memory", lambda self: (free, 2**30))
            return LLM(DEMO, device="cpu", dtype="float32", **options)

    return start


def more_gpus(llm: LLM, folder: Path) -> object:
    """More GPUs than there are; a model that would be downloaded is not looked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        return LLM("some/model", device="cuda:0", tensor_parallel_size=2, data_parallel_size=2)


def full_while_it_starts(llm: LLM, folder: Path) -> object:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanovllm.runner.start.PAUSE_SECONDS", (0.0, 0.0))
        patch.setattr(ModelRunner, "warmup_model", Mock(side_effect=error, __name__="warmup_model"))
        return LLM(DEMO, **SMALL)


def asleep(llm: LLM, folder: Path) -> object:
    llm.sleep()
    try:
        return llm.generate("Hello", use_tqdm=False)
    finally:
        llm.wake_up()


def closed(llm: LLM, folder: Path) -> object:
    with LLM(folder, device="cpu", num_kvcache_blocks=8, skip_tokenizer_init=True) as other:
        pass
    return other.generate([5])


def half_done(llm: LLM, folder: Path) -> object:
    request_id = llm.add_request("Hello", SamplingParams(max_tokens=2))
    try:
        return llm.generate("Hello", use_tqdm=False)
    finally:
        llm.abort(request_id)


def importing(module: str, name: str) -> Mistake:
    return lambda llm, folder: getattr(importlib.import_module(module), name)


MISTAKES: dict[str, tuple[Mistake, str]] = {
    "a wrong path": (
        lambda llm, folder: LLM(folder / "nowhere"),
        "ValueError: model folder 'FOLDER/nowhere' does not exist, and it is not a hub id "
        "(organisation/name)",
    ),
    "a file": (
        lambda llm, folder: LLM(folder / "config.json"),
        "ValueError: model 'FOLDER/config.json' is a file; pass the folder that holds "
        "config.json and the *.safetensors weights, or a .gguf file",
    ),
    "no model": (
        lambda llm, folder: LLM(),
        "TypeError: model must be a folder or a Hugging Face hub id, a str or a Path, not None",
    ),
    "an empty name": (
        lambda llm, folder: LLM(""),
        "ValueError: model must be a folder or a Hugging Face hub id, and it is empty",
    ),
    "no config.json": (
        without("config.json"),
        "ModelLoadError: FOLDER has no config.json, as a model folder in Hugging Face format has",
    ),
    "no weights": (
        without("model.safetensors"),
        "ModelLoadError: FOLDER holds no *.safetensors weights",
    ),
    "no tokenizer": (
        without("tokenizer.json"),
        "ModelLoadError: no tokenizer could be loaded from FOLDER (its vocabulary is empty); "
        "put the model's tokenizer files there, pass a folder that has them as tokenizer, or "
        "pass skip_tokenizer_init=True and token ids as prompts",
    ),
    "a dtype that does not exist": (
        made(dtype="fp16"),
        "ValueError: dtype must be one of 'auto', 'float32', 'bfloat16', 'float16', not 'fp16'",
    ),
    "a GPU where there is none": (
        made(device="cuda"),
        "ValueError: device='cuda', and torch sees no CUDA device; use device='cpu' or 'auto'",
    ),
    "a device of another kind": (
        made(device="gpu"),
        "ValueError: device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not 'gpu'; an NVIDIA GPU is 'cuda'",
    ),
    "more ranks than GPUs": (
        more_gpus,
        "ValueError: tensor_parallel_size=2 with data_parallel_size=2 needs 4 GPUs from cuda:0 on, and "
        "torch sees 1 in all; use at most 1, or check CUDA_VISIBLE_DEVICES",
    ),
    "a device that is full while the engine starts": (
        full_while_it_starts,
        "KVCacheMemoryError: cpu ran out of memory while the engine started (CUDA out of memory. Tried to "
        "allocate 2.00 GiB). Close other programs on the device, or lower gpu_memory_utilization (now 0.9), "
        "max_num_batched_tokens or max_num_seqs",
    ),
    "a number of GPUs that does not fit": (
        made(tensor_parallel_size=5),
        "ValueError: tensor_parallel_size=5 does not divide this model's 4 query heads, 2 KV "
        "heads (or is not a multiple of them) and intermediate size 640; sizes that do: 1, 2, 4",
    ),
    "a number as text": (
        made(tensor_parallel_size="2"),
        "TypeError: tensor_parallel_size must be an integer, not '2'",
    ),
    "percent": (
        made(gpu_memory_utilization=90),
        "ValueError: gpu_memory_utilization must be in (0, 1], not 90; 0.9 is 90 %",
    ),
    "a length as text": (
        made(max_model_len="long"),
        "TypeError: max_model_len must be an integer, not 'long'",
    ),
    "a sampling parameter of LLM": (
        made(temperature=0.5),
        "TypeError: LLM() got 'temperature'; pass it to generate() as SamplingParams(temperature=...)",
    ),
    "a misspelt option": (
        made(max_modellen=64),
        "TypeError: LLM() got an unknown argument 'max_modellen'; did you mean 'max_model_len'?",
    ),
    "LoRA": (
        made(enable_lora=True),
        "ValueError: LLM(): enable_lora=True is not supported; merge the adapter into the "
        "weights first (peft's merge_and_unload)",
    ),
    "a backend that cannot run": (
        made(attention_backend="flash_attn"),
        "ValueError: attention_backend='flash_attn' cannot run here: it needs a CUDA device, "
        "and the device is cpu",
    ),
    "too little memory for the weights": (
        made_with(2**20),
        "KVCacheMemoryError: the model does not fit: its weights need 0.02 GiB on cpu, and "
        "0.00 GiB may be used (0.00 of 1.00 GiB are free). Close other programs, or use "
        "dtype='bfloat16' (half of float32) or a smaller model",
    ),
    "too little memory for the cache": (
        made_with(2**28, num_kvcache_blocks=10**6, kvcache_block_size=16),
        "KVCacheMemoryError: no room for the KV cache: 1000000 block(s) of 16 tokens need "
        "93,750.0 MiB, and 128.0 MiB may be used (256 of 1,024 MiB are free, 0 MiB are kept "
        "for activations). Lower num_kvcache_blocks (now 1000000); or close other programs on "
        "the device",
    ),
    "from_pretrained": (
        lambda llm, folder: LLM.from_pretrained(DEMO),
        "TypeError: LLM.from_pretrained() does not exist; that name is from transformers; "
        "write LLM(folder_or_hub_id)",
    ),
    "calling the model": (
        lambda llm, folder: llm("Hello"),
        "TypeError: LLM is not a function; that name is from transformers; write "
        "llm.generate(prompts, params)",
    ),
    "a method of another library": (
        lambda llm, folder: llm.encode("Hello"),
        "ValueError: encode() needs pooling_task, one of 'embed', 'classify', 'token_embed', "
        "'token_classify', not None (NoneType); llm.get_tokenizer().encode(text) makes token ids",
    ),
    "no prompt": (
        generate(),
        "TypeError: LLM.generate() needs prompts: a string, token ids, or a list of these",
    ),
    "an empty prompt": (
        generate(""),
        "ValueError: the prompt is empty; a prompt needs at least one token",
    ),
    "a prompt that is None": (
        generate(["Hello", None]),
        "TypeError: prompts[1] must be a string, a list of token ids or a dictionary, not None (NoneType)",
    ),
    "a conversation for generate": (
        generate([{"role": "user", "content": "Hello"}]),
        "ValueError: prompts[0] must have the key 'prompt' or 'prompt_token_ids', not "
        "['content', 'role']; a conversation goes to chat()",
    ),
    "a prompt that is too long": (
        generate([[5] * 2000]),
        "ValueError: prompts[0]: the prompt has 2000 tokens, and at most 127 leave room for "
        "one more (the KV cache has 8 blocks of 16 tokens, and the model's own limit is 1024); "
        "shorten it",
    ),
    "a token that does not exist": (
        generate([[5, 9999]]),
        "ValueError: prompts[0]: token id 9999 at position 1 is outside the vocabulary (0 to 511)",
    ),
    "parameters of generate": (
        generate("Hello", temperature=0),
        "TypeError: LLM.generate() got 'temperature'; pass it as SamplingParams(temperature=...)",
    ),
    "transformers' name of max_tokens": (
        generate("Hello", max_new_tokens=5),
        "TypeError: LLM.generate() got an unknown argument 'max_new_tokens'; that name is from "
        "transformers; write SamplingParams(max_tokens=...)",
    ),
    "stream=True": (
        generate("Hello", stream=True),
        "TypeError: LLM.generate() got an unknown argument 'stream'; that name is from OpenAI; "
        "write llm.stream(prompts, params)",
    ),
    "parameters as a dictionary": (
        generate("Hello", {"temperature": 0}),
        "TypeError: sampling_params must be SamplingParams or a list of them, not {'temperature': 0} (dict)",
    ),
    "too few parameters": (
        generate(["a", "b", "c"], [SamplingParams()] * 2),
        "ValueError: 2 sampling_params for 3 prompts; pass one for all or one for each",
    ),
    "a text for chat": (
        chat("Hello"),
        "TypeError: messages must be a list of messages {'role': ..., 'content': ...} or a "
        "list of such lists, not 'Hello' (str)",
    ),
    "a message without a role": (
        chat([{"content": "Hello"}]),
        "ValueError: conversation 0, message 0 needs a role, such as 'role': 'user'; it has "
        "the keys ['content']",
    ),
    "an image": (
        chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        "ValueError: conversation 0, message 0, content part 0 has the type 'image_url', which "
        "is not supported; only text is supported: {'type': 'text', 'text': ...}",
    ),
    "a base model in chat": (
        base_model,
        "ValueError: this model has no chat template; put chat_template.jinja into its folder, "
        "pass chat_template, or pass whole prompts to generate()",
    ),
    "a temperature below 0": (
        lambda llm, folder: SamplingParams(temperature=-1),
        "ValueError: temperature must be 0 for greedy or a positive number, not -1",
    ),
    "top_p of 0": (
        lambda llm, folder: SamplingParams(top_p=0),
        "ValueError: top_p must be in (0, 1]; 1 keeps all tokens, not 0",
    ),
    "parameters without names": (
        lambda llm, folder: SamplingParams(0.7, 0.9),
        "TypeError: SamplingParams() takes keyword arguments only, not (0.7, 0.9): their order "
        "differs from engine to engine. Write their names, as in SamplingParams(temperature=...)",
    ),
    "several greedy answers": (
        lambda llm, folder: SamplingParams(n=2, temperature=0),
        "ValueError: n must be 1 with temperature=0, not 2: they would all be equal; set a "
        "temperature above 0, or pass the prompt several times",
    ),
    "an empty stop string": (
        lambda llm, folder: SamplingParams(stop=""),
        "ValueError: stop must be a string or a list of strings, none of them empty, not ''",
    ),
    "a schema as a dictionary": (
        lambda llm, folder: SamplingParams(structured_outputs={"json": {"type": "object"}}),
        "TypeError: structured_outputs must be StructuredOutputsParams, such as "
        "StructuredOutputsParams(json=schema), or None, not {'json': {'type': 'object'}}",
    ),
    "two constraints": (
        lambda llm, folder: StructuredOutputsParams(regex="a", choice=["a"]),
        "ValueError: structured outputs take exactly one of json, regex, choice, grammar, "
        "json_object, structural_tag, not regex and choice",
    ),
    "a wrong schema": (
        generate("a", SamplingParams(structured_outputs=Structured(json={"type": "strin"}))),
        "ValueError: the prompt: structured_outputs: json: Invalid type: strin",
    ),
    "more logprobs than allowed": (
        generate("Hello", SamplingParams(logprobs=50)),
        "ValueError: the prompt: logprobs=50 is more than max_logprobs=20 allows; make the LLM "
        "with a larger max_logprobs (-1: no limit)",
    ),
    "more beams than logprobs": (
        lambda llm, folder: llm.beam_search("a", BeamSearchParams(20, 2)),
        "ValueError: beam_width=20 needs 40 logprobs, and max_logprobs=20; make the LLM with a "
        "larger max_logprobs (-1: no limit)",
    ),
    "a call while it sleeps": (
        asleep,
        "RuntimeError: this engine sleeps (weights and kv_cache); call wake_up() first",
    ),
    "a call after close": (
        closed,
        "EngineClosedError: this engine is closed; make a new LLM",
    ),
    "a call while requests wait": (
        half_done,
        "RuntimeError: 1 request(s) of add_request are unfinished; call step() until "
        "is_finished(), or abort() them, before generate()",
    ),
    "the text of an output": (
        lambda llm, folder: llm.generate("a", SamplingParams(max_tokens=1), False)[0].text,
        "AttributeError: RequestOutput has no attribute 'text'; that name is from "
        "CompletionOutput; write out.outputs[0].text, or out['text']",
    ),
    "a class of vLLM": (
        importing("nanovllm", "AsyncEngineArgs"),
        "ImportError: module 'nanovllm' has no attribute 'AsyncEngineArgs'; that name is from "
        "vLLM; write LLM(model, ...) with the same options",
    ),
    "weights of another model": (
        lambda llm, folder: llm.update_weights({"embed": torch.zeros(1)}),
        "ValueError: this model has no tensor 'embed'; names are a checkpoint's, such as "
        "'model.embed_tokens.weight'",
    ),
    "a table without the column": (
        lambda llm, folder: llm.map([{"text": "a"}], prompt="prompt"),
        "ValueError: the table has no column 'prompt'; it has 'text'",
    ),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, **SMALL) as llm:
        yield llm


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_whole_message(mistake: str, llm: LLM, tmp_path: Path) -> None:
    make, message = MISTAKES[mistake]
    if mistake == "a GPU where there is none" and torch.cuda.is_available():
        pytest.skip("the mistake is to ask for a GPU on a machine without one, and this machine has one")
    folder = write_tiny_model(tmp_path)
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the message is checked)
        make(llm, folder)
    kind = type(caught.value).__name__
    assert f"{kind}: {caught.value}".replace(str(folder), "FOLDER") == message


def test_there_are_forty() -> None:
    assert len(MISTAKES) >= 40
