"""OpenAI's batch format: lines with `custom_id`, `url` and `body`, and the lines that answer them.

Reads bodies of chat completions, completions and embeddings. An unsupported key is an error that names it.
Runs nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanovllm.answers import CompletionOutput, Logprob, RequestOutput
from nanovllm.extras.outputs import EmbeddingRequestOutput
from nanovllm.inputs import show
from nanovllm.jobs.parsed import message_of
from nanovllm.jobs.sources import SourceRow, Values
from nanovllm.jobs.tasks import RowFormat, Task, conversation, logprob_number, prompt_of
from nanovllm.params import SamplingParams
from nanovllm.vllm.arguments import SAMPLING, elsewhere

_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_PROMPTS = {_CHAT: "messages", _COMPLETIONS: "prompt", _EMBEDDINGS: "input"}  # by URL: the key of the prompt
# Keys without effect on the answer.
_IGNORED_KEYS = {
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
}
# Keys that are accepted only with these neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False, None),
    "stream_options": (None,),
    "echo": (False, None),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "tool_choice": ("auto", "none", None),
    "parallel_tool_calls": (True, False, None),
    "modalities": (None, ["text"]),
    "encoding_format": ("float", None),
    "dimensions": (None,),
}
_TEMPLATE = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_THINKING = ("reasoning_effort",)


class OpenAIFormat(RowFormat):
    """model: the name of the model in answers whose body has none."""

    default_params = MappingProxyType({"max_tokens": None})  # OpenAI's default
    params_of_several = MappingProxyType({"temperature": 1.0})  # OpenAI's, where the model's is greedy

    def __init__(self, params: SamplingParams, seed: int, model: str, given: Container[str] = ()) -> None:
        super().__init__(params, seed, given)
        self._model = model

    def row_id(self, values: Values) -> Any:
        return values.get("custom_id")

    def task(self, row: SourceRow, values: Values) -> Task:
        if not isinstance(values.get("custom_id"), str):
            raise TypeError(f"custom_id must be a string, not {show(values.get('custom_id'))}")
        url, body = values.get("url"), values.get("body")
        if not isinstance(url, str) or url not in _PROMPTS:
            raise ValueError(f"url must be one of {', '.join(_PROMPTS)}, not {show(url)}")
        if values.get("method", "POST") != "POST":
            raise ValueError(f"method must be 'POST', not {show(values['method'])}")
        if not isinstance(body, dict):
            raise TypeError(f"body must be an object {{...}}, not {show(body)}")
        own, template = read_body(url, body)
        params = self.params_of(row.index, own)
        task = Task(row.index, values["custom_id"], None, params, template=template, place=row.place)
        task.num_bytes = row.num_bytes
        task.request = {"url": url, "model": body.get("model") or self._model}
        if url == _CHAT:
            task.prompt, task.is_chat = conversation(body.get("messages"), "messages"), True
        elif url == _COMPLETIONS:
            task.prompt = _one_prompt(body.get("prompt"))
        else:
            task.prompt, task.kind = _inputs(body.get("input")), "embed"
        return task

    def answer(self, task: Task, output: RequestOutput) -> dict[str, Any]:
        is_chat = task.is_chat
        choices = []
        for each in output.outputs:
            logprobs = (_chat_logprobs if is_chat else _completion_logprobs)(each, task.params.logprobs or 0)
            text: dict[str, Any] = {"text": each.text}
            if is_chat:
                text = {"message": message_of(each)}
            reason = "tool_calls" if is_chat and each.tool_calls else each.finish_reason
            choices.append({"index": each.index, **text, "logprobs": logprobs, "finish_reason": reason})
        prompt_tokens = len(output.prompt_token_ids)
        output_tokens = sum(len(each.token_ids) for each in output.outputs)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        }
        if output.outputs[0].reasoning is not None:
            thoughts = sum(each.num_reasoning_tokens for each in output.outputs)
            usage["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return self._response(
            task,
            {
                "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{task.index}",
                "object": "chat.completion" if is_chat else "text_completion",
                "created": 0,
                "model": task.request["model"],
                "choices": choices,
                "usage": usage,
            },
        )

    def embeddings(self, task: Task, outputs: Sequence[EmbeddingRequestOutput]) -> dict[str, Any]:
        tokens = sum(len(each.prompt_token_ids) for each in outputs)
        data = [
            {"object": "embedding", "index": place, "embedding": each.outputs.embedding}
            for place, each in enumerate(outputs)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        body = {"object": "list", "data": data, "model": task.request["model"], "usage": usage}
        return self._response(task, body)

    def error(self, index: int, row_id: Any, message: str) -> dict[str, Any]:
        return {
            "id": f"batch_req_{index}",
            "custom_id": row_id,
            "response": None,
            "error": {"code": "invalid_request", "message": message},
        }

    def _response(self, task: Task, body: dict[str, Any]) -> dict[str, Any]:
        response = {"status_code": 200, "request_id": f"req_{task.index}", "body": body}
        return {"id": f"batch_req_{task.index}", "custom_id": task.id, "response": response, "error": None}


def looks_like_batch(values: Mapping[str, Any]) -> bool:
    """Whether a row is one of an OpenAI batch file."""
    return {"custom_id", "url", "body"} <= values.keys()


def read_body(url: str, body: Values) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of a body, and the arguments of the chat template. ValueError for unsupported keys."""
    own: dict[str, Any] = {}
    template: dict[str, Any] = {}
    for name, value in body.items():
        if name in _IGNORED_KEYS or name == _PROMPTS[url]:
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise ValueError(f"{name}={show(value)} in the body is not supported; leave it out")
        elif value is None:
            continue
        elif name == "max_completion_tokens":
            own["max_tokens"] = value
        elif name == "response_format":
            own |= _structured(value)
        elif url == _CHAT and name in ("logprobs", "top_logprobs"):
            continue
        elif url == _CHAT and name in _TEMPLATE + _THINKING:
            template[name] = value
        elif url != _EMBEDDINGS and (name in SamplingParams.__dataclass_fields__ or name in SAMPLING):
            own[name] = value
        else:
            fix = elsewhere(name) or "leave it out"
            raise ValueError(f"{name!r} in the body is not known for {url}; {fix}")
    if url == _CHAT and body.get("logprobs"):
        own["logprobs"] = body.get("top_logprobs") or 0
    elif url == _CHAT and body.get("top_logprobs"):
        raise ValueError("top_logprobs in the body needs logprobs=true")
    return own, template


def _structured(response_format: Any) -> dict[str, Any]:
    """Convert a `response_format` to sampling parameters."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    schema = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise ValueError(
            "response_format must have the type 'text', 'json_object', or 'json_schema' with a "
            f"json_schema.schema, not {show(response_format)}"
        )
    return {"structured_outputs": {"json": schema["schema"]}}


def _one_prompt(value: Any) -> str | array[int]:
    """The prompt of a completion: a string or token ids, alone or in a list of one."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > 1:
            raise ValueError(f"prompt has {len(value)} prompts; write one for each row")
        value = value[0]
    return prompt_of(value, "prompt")


def _inputs(value: Any) -> list[str | array[int]]:
    """The inputs of an embedding, as a list."""
    several = isinstance(value, list) and value and not isinstance(value[0], int)
    return [prompt_of(each, "input") for each in (value if several else [value])]


def _chat_logprobs(output: CompletionOutput, num_top: int) -> dict[str, Any] | None:
    """`logprobs` of a choice of a chat completion, with `num_top` likeliest tokens."""
    if output.logprobs is None:
        return None
    content = []
    for token_id, row in zip(output.token_ids, output.logprobs, strict=True):
        top = [_chat_entry(each) for each in _likeliest(row, num_top)]
        content.append({**_chat_entry(row[token_id]), "top_logprobs": top})
    return {"content": content}


def _completion_logprobs(output: CompletionOutput, num_top: int) -> dict[str, Any] | None:
    """`logprobs` of a choice of a completion, with `num_top` likeliest tokens."""
    if output.logprobs is None:
        return None
    tokens = [row[token_id] for token_id, row in zip(output.token_ids, output.logprobs, strict=True)]
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token.decoded_token or "")
    return {
        "tokens": [token.decoded_token for token in tokens],
        "token_logprobs": [logprob_number(token) for token in tokens],
        "top_logprobs": [
            {each.decoded_token: logprob_number(each) for each in _likeliest(row, num_top)}
            for row in output.logprobs
        ],
        "text_offset": offsets,
    }


def _likeliest(row: dict[int, Logprob], count: int) -> list[Logprob]:
    """The `count` likeliest entries, the likeliest first."""
    return sorted(row.values(), key=lambda each: -each.logprob)[:count]


def _chat_entry(token: Logprob) -> dict[str, Any]:
    text = token.decoded_token or ""
    return {"token": text, "logprob": logprob_number(token), "bytes": list(text.encode(errors="replace"))}
