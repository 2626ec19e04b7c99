"""How requests and outputs travel between processes: without what the other side has or can make.

Sends nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nanovllm.outputs import RequestOutput
from nanovllm.text.logprobs import LogprobDicts
from nanovllm.text.processor import Processor
from nanovllm.text.request import Request


def pack_request(request: Request) -> Request:
    """Without the prompt's text and the list of its ids, and without a compiled constraint."""
    return replace(request, prompt=None, prompt_token_ids=[], constraint=None)


def unpack_request(request: Request, processor: Processor) -> Request:
    """With the list of the prompt's ids, and the constraint compiled again."""
    ids = np.frombuffer(request.prompt_bytes, np.int32).tolist()
    return replace(request, prompt_token_ids=ids, constraint=processor.constraint(request.params))


def pack_output(output: RequestOutput) -> RequestOutput:
    """Without the prompt, and with logprobs as (columns, how many entries before them are None, tokens before
    them)."""
    completions = [replace(each, logprobs=_pack_logprobs(each.logprobs)) for each in output.outputs]
    logprobs = _pack_logprobs(output.prompt_logprobs)
    return replace(output, prompt=None, prompt_token_ids=[], outputs=completions, prompt_logprobs=logprobs)


def unpack_output(output: RequestOutput, request: Request, processor: Processor) -> RequestOutput:
    """With the request's prompt, and logprobs with the texts of their tokens."""

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
