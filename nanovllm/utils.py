"""The parser of flags under the name of vLLM's module. Defines none."""

from __future__ import annotations

from nanovllm.vllm.arguments import missing_in
from nanovllm.vllm.engine_args import FlexibleArgumentParser as FlexibleArgumentParser

__getattr__ = missing_in(__name__)
