"""The only place where tests reach behind the public names of the package.

A change of the inside changes these functions, and no test that uses them; `test_inside.py` checks that no
other file reads a private name. Imports nothing of the package before a function needs it, because tests of
`plan/` run without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    import threading

    import pytest
    import torch

    from nanovllm import LLM
    from nanovllm.cuda_graphs.graphs import CUDAGraphs
    from nanovllm.engine.requests import Requests
    from nanovllm.engine.stats import Noted
    from nanovllm.jobs.output import Output
    from nanovllm.models.decoder import DecoderForCausalLM
    from nanovllm.parallel.channel import Channel
    from nanovllm.parallel.group import TPGroup
    from nanovllm.parallel.peer_memory import PeerCopies
    from nanovllm.parallel.ranks import Ranks
    from nanovllm.parallel.replicas.pool import Pool
    from nanovllm.parallel.replicas.router import Router
    from nanovllm.parallel.watch import Failure, Watch
    from nanovllm.plan.block_manager import BlockManager
    from nanovllm.plan.scheduler import Scheduler
    from nanovllm.residency.runner import ResidentModelRunner
    from nanovllm.runner.inputs import Staging
    from nanovllm.text.detokenizer import Detokenizer
    from nanovllm.text.processor import Processor


# -- one engine ---------------------------------------------------------------------------------------------


def runner(llm: LLM) -> ResidentModelRunner:
    """Rank 0's runner."""
    return llm._executor.runner  # type: ignore[attr-defined]


def model(llm: LLM) -> DecoderForCausalLM:
    """Rank 0's part of the model."""
    return runner(llm).model


def workers(llm: LLM) -> Ranks:
    """All ranks."""
    return llm._executor.ranks  # type: ignore[attr-defined]


def scheduler(llm: LLM) -> Scheduler:
    return llm._executor.scheduler  # type: ignore[attr-defined]


def block_manager(llm: LLM) -> BlockManager:
    """The blocks of the KV cache."""
    return scheduler(llm).block_manager


def renew_scheduler(llm: LLM) -> None:
    """Give an idle engine a new scheduler, whose prefix cache is empty."""
    llm._executor.clear(failed=True)


def requests(llm: LLM) -> Requests:
    """The unfinished requests."""
    return llm._executor.requests  # type: ignore[attr-defined]


def next_id(llm: LLM, number: int | None = None) -> int:
    """The id of the next request, which is set to `number`, if there is one."""
    llm._next_id = llm._next_id if number is None else number
    return llm._next_id


def processor(owner: LLM | Requests) -> Processor:
    """What makes requests of prompts, and answers of tokens."""
    return getattr(owner, "processor", None) or owner._processor


def grammars(llm: LLM) -> Any:
    """The compiler of constraints."""
    return processor(llm).extras.grammars


def stop_searches(owner: LLM | Requests) -> dict[int, Any]:
    """The searches for stop strings, and what streams yielded, by the ids of unfinished sequences."""
    own = owner if hasattr(owner, "_stops") else requests(owner)
    return own._stops | (own.parts._streams if own.parts else {})


def swap_visits(llm: LLM, visits: Any) -> Any:
    """Replace the queue of what other threads want between two steps; return the old one."""
    llm._lifecycle._visits, old = visits, llm._lifecycle._visits
    return old


class AroundSteps:
    """A base class before `LLM`: `around_step` gets each step as a function, `finished` what was read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        core, this = self._executor, ref(self)  # type: ignore[attr-defined]
        core.step = lambda step=core.step: this().around_step(step)
        core._answers = lambda inner=core._answers: this().finished(inner.__self__._read) or inner()

    def around_step(self, step: Callable[[], Any]) -> Any:
        return step()


# -- expressions for scripts that tests run in other processes ----------------------------------------------


def worker_pids(llm: str = "llm") -> str:
    """The process ids of the other ranks."""
    return f"[p.pid for p in getattr(getattr({llm}._executor.ranks, 'watch', None), 'processes', ())]"


KV_CACHE_BYTES = "llm._executor.runner.kv_cache.nbytes"


# -- replicas -----------------------------------------------------------------------------------------------


def replicas(llm: LLM) -> Pool:
    """The pool of replicas."""
    return llm._executor.pool  # type: ignore[attr-defined]


def members(llm: LLM) -> list[Any]:
    """The processes of the replicas, with their requests."""
    return replicas(llm)._members


def receive(llm: LLM) -> None:
    """Take in what the replicas have sent; wait for something."""
    replicas(llm)._receive()


def arrivals(llm: LLM) -> Iterable[Any]:
    """What came from replicas and was not given to the caller."""
    return replicas(llm)._arrivals


def replica_settings(llm: LLM) -> dict[Any, object]:
    """What a replica that restarts is told."""
    return replicas(llm)._settings


def residency(llm: LLM) -> Any:
    """Sleep and new weights, without the checks of `LLM`."""
    return llm._executor


def set_last_stats(patch: pytest.MonkeyPatch, llm: LLM, stats: Any) -> None:
    """Replace each replica's last `StepStats`, by number."""
    patch.setattr(llm._executor, "_last_stats", stats)


def held_prefixes(router: Router) -> list[Any]:
    """What the router expects in each replica's prefix cache."""
    return router._held


def waiting_hashes(router: Router) -> dict[int, Any]:
    """The hashes of prompts that wait in the router."""
    return router._by_hash


# -- plan ---------------------------------------------------------------------------------------------------


def scheduler_state(scheduler: Scheduler) -> Any:
    """The free slots, the unfinished sequences by id, and the block tables of each slot."""
    tables, unfinished = scheduler._tables, dict(scheduler._unfinished)
    return SimpleNamespace(free_slots=scheduler._free_slots, unfinished=unfinished, tables=tables)


def block_state(manager: BlockManager) -> Any:
    """Each block's count and content, what is free, cached and pinned. offsets: of groups, then their end."""
    pool, tree = manager.pool, manager._tree
    groups = {"free_parts": [{}], "offsets": [0, pool.num_blocks], "twins": [{}]} | vars(manager) | vars(pool)
    free = {name: groups[name] for name in ("free", "free_parts", "offsets", "twins")}
    refs = {"ref_counts": pool.ref_counts, "content": pool.content, "free_partial": pool._free_partial}
    found = {"by_key": tree._by_key, "children": tree._children, "pinned": manager._pinned}
    return SimpleNamespace(**free, **refs, **found, tree=tree)


# -- one rank -----------------------------------------------------------------------------------------------


def token_counts(llm: LLM) -> torch.Tensor | None:
    """The counts of penalties, if there are any."""
    return getattr(runner(llm).ending.extras, "counts", None)


def limit_logit_rows(llm: LLM, rows: int) -> None:
    """Let the end of a step compute at most `rows` rows of logits at once. Before the first with extras."""
    runner(llm).ending.max_rows = rows


def captured(graphs: CUDAGraphs) -> dict[int, Any]:
    """The captured graphs, by size."""
    return graphs._graphs


def input_buffers(staging: Staging) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The buffers of a step's inputs: on the device, and on the host."""
    return staging._buffer, staging._inputs


def peer_memory(tp: TPGroup) -> Any:
    """The memory that all ranks share, if they share any."""
    return tp._peer_memory


def set_peer_memory(tp: TPGroup, memory: Any) -> None:
    tp._peer_memory = memory


def num_copied_sums(copies: PeerCopies) -> int:
    """The number of the last sum."""
    return copies._call


def set_copied_sums(copies: PeerCopies, call: int | None, flags: int) -> None:
    """Set the number of the last sum, unless it is None, and the one up to which all ranks have come."""
    copies._call = copies._call if call is None else call
    copies._flags[copies._rank].fill_(flags)


def aborted(copies: PeerCopies) -> torch.Tensor:
    """What ends all waits of copied sums, if it is 1."""
    return copies._aborted


# -- workers ------------------------------------------------------------------------------------------------


def channel(llm: LLM) -> Channel | None:
    """Where the workers read their calls."""
    return workers(llm)._channel


def num_slots(channel: Channel) -> int:
    """The number of pieces that a channel holds."""
    return channel._num_slots


def next_piece(channel: Channel) -> int:
    """The number of pieces that were sent."""
    return channel._next_piece


def segment_name(channel: Channel) -> str:
    """The name of the shared memory."""
    return channel._segment.name


def semaphores(channel: Channel) -> list[Any]:
    """What writer and readers wait for: first of each reader that a piece was written, then that one was
    read."""
    return [*channel._written, *channel._emptied]


def encode_call(call: Callable[..., object], args: tuple[Any, ...]) -> Any:
    """The bytes of a call in a channel."""
    from nanovllm.parallel import channel

    return channel._encode(call, args)


def stalled(watch: Watch, seconds: float) -> Failure | None:
    """Count seconds of waiting; return the failure if they are too many."""
    return watch._stalled(seconds)


# -- kernels and products -----------------------------------------------------------------------------------


def matmul_tiles() -> tuple[Any, ...]:
    """All tiles of `kernels/matmul.py`."""
    from nanovllm.kernels import matmul

    return tuple(matmul._TILES)


def decode_chunk(*args: Any) -> int:
    """The length of the chunks of a decode step."""
    from nanovllm.kernels import decode_attention

    return decode_attention._chunk(*args)


def limit_partial_results(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let the partial results of decode attention have at most `size` elements."""
    from nanovllm.kernels import decode_attention

    patch.setattr(decode_attention, "_MAX_PARTIAL", size)


def replace_onednn(
    patch: pytest.MonkeyPatch,
    make: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor] | None],
) -> None:
    """Replace oneDNN's product by `make` of it; None is a torch without it."""
    from nanovllm.cpu import dense

    assert dense._onednn_linear is not None, "this torch has oneDNN"
    patch.setattr(dense, "_onednn_linear", make(dense._onednn_linear))


def look_for_flash_attn_again(patch: pytest.MonkeyPatch) -> None:
    """Look for the package at each question instead of once."""
    from nanovllm.flash_attn import backend

    patch.setattr(backend, "_package", getattr(backend._package, "__wrapped__", backend._package))


def keep_families(patch: pytest.MonkeyPatch) -> None:
    """Forget the families that are registered from here on."""
    from nanovllm.models import registry

    patch.setattr(registry, "_FAMILIES", {**registry._FAMILIES})


# -- text and parameters ------------------------------------------------------------------------------------


def wrap_decode(
    patch: pytest.MonkeyPatch, detokenizer: Detokenizer, wrap: Callable[[Callable[..., str]], Any]
) -> None:
    """Replace the tokenizer's own decoding by `wrap` of it."""
    patch.setattr(detokenizer, "_decode_ids", wrap(detokenizer._decode_ids))


def count_checks(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each check of a `SamplingParams`."""
    from nanovllm import checks, params

    calls, of = list[int](), checks.checked_params
    for module in (checks, params):
        patch.setattr(module, "checked_params", lambda each: calls.append(1) or of(each))
    return calls


# -- statistics, jobs and other programs --------------------------------------------------------------------


def waiting(noted: Noted) -> int:
    """How many entries wait to be counted."""
    return len(noted._waiting)


def display(progress: Any) -> Any:
    """The bar or the lines that show the progress."""
    return progress._display


def flushing(output: Output) -> Any:
    """What flushes the output's file in a thread."""
    return output._sync


def end_flushing(output: Output, event: Any) -> threading.Thread:
    """Let `event` end the flushing; return the thread that flushes."""
    flushing(output)._closed = event
    return flushing(output)._thread


def num_kept_samples(monitor: Any) -> int:
    """The number of samples that a running `GPUMonitor` holds."""
    return len(monitor._samples)


def run_monitor(patch: pytest.MonkeyPatch, monitor: Any, wait: Callable[[float], bool]) -> None:
    """Sample in this thread until `wait` is true."""
    patch.setattr(monitor, "_end", SimpleNamespace(wait=wait))
    monitor._run()


def parsed_lighteval_model(text: str) -> tuple[str, dict[str, Any], Any]:
    """The model, options and generation parameters of lighteval's command line."""
    from nanovllm.integrations import lighteval

    return lighteval._parse(text)


def set_end_of_thoughts(patch: pytest.MonkeyPatch, model: Any, end: str | int) -> None:
    """Set the text or token that ends the thoughts of a model of lm_eval."""
    patch.setattr(model, "_think_end", end)
