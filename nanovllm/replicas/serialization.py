"""Packs requests and outputs for the pipe, without what the other side has or can compute. Sends nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nanovllm.outputs import RequestOutput
from nanovllm.text.logprobs import LogprobDicts
from nanovllm.text.processor import Processor
from nanovllm.text.request import Request


def pack_request(request: Request) -> Request:
    """Remove the prompt's text, the list of its ids, and the compiled constraint."""
    return replace(request, prompt=None, prompt_token_ids=[], constraint=None)


def unpack_request(request: Request, processor: Processor) -> Request:
    """Restore the list of the prompt's ids, and compile the constraint again."""
    ids = np.frombuffer(request.prompt_bytes, np.int32).tolist()
    return replace(request, prompt_token_ids=ids, constraint=processor.constraint(request.params))


def pack_output(output: RequestOutput) -> RequestOutput:
    """Remove the prompt, and turn logprobs into (columns, number of None entries before them, the tokens
    before them)."""
    completions = [replace(each, logprobs=_pack_logprobs(each.logprobs)) for each in output.outputs]
    logprobs = _pack_logprobs(output.prompt_logprobs)
    return replace(output, prompt=None, prompt_token_ids=[], outputs=completions, prompt_logprobs=logprobs)


def unpack_output(output: RequestOutput, request: Request, processor: Processor) -> RequestOutput:
    """Restore the request's prompt, and logprobs with decoded tokens."""

    def unpacked(logprobs: Any) -> Any:
        return processor.logprob_dicts(request.params, *logprobs) if isinstance(logprobs, tuple) else logprobs

    completions = [replace(each, logprobs=unpacked(each.logprobs)) for each in output.outputs]
    return replace(
        output,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=completions,
        prompt_logprobs=unpacked(output.prompt_logprobs),
    )


def _pack_logprobs(logprobs: Any) -> Any:
    if not isinstance(logprobs, LogprobDicts):
        return logprobs
    return logprobs.columns, logprobs.num_unknown, logprobs.before
