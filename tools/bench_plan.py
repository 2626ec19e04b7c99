"""Time of planning on the host, without a device: schedule + postprocess of a step of decoding sequences, or
of a whole run over prompts, of which the first tokens are shared.

    python -m tools.bench plan --num-seqs 512
    python -m tools.bench plan --prompts 4096 --shared 200 --block-size 64
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array

import numpy as np

from nanovllm.batch import StepKind, StepOutput
from nanovllm.config import Config
from nanovllm.plan.scheduler import Scheduler
from nanovllm.plan.sequence import Room, Sequence
from nanovllm.sampling_params import SamplingParams


def measure_run(args: argparse.Namespace) -> None:
    """Print the processor time of planning all steps of a run, for each prompt."""
    rng = np.random.default_rng(0)
    config = Config("model", max_num_seqs=args.num_seqs, max_num_batched_tokens=16384)
    blocks = 2**20 // args.block_size * 2
    scheduler = Scheduler(config, Room(blocks, args.block_size, 4096))
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    ids = rng.integers(0, 150_000, (args.prompts, args.length), dtype=np.int32)
    ids[:, : args.shared] = ids[0, : args.shared]
    for seq_id, row in enumerate(ids):
        scheduler.add(Sequence(seq_id, array("i", row.tolist()), params, seq_id, frozenset({5})))
    drawn = np.full((args.num_seqs, 1), 7)
    computed, in_flight, start = 0, None, time.process_time()
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        if in_flight is not None:
            scheduler.postprocess(in_flight, StepOutput(drawn[: len(in_flight.slots)]))
        in_flight = batch
        if batch is not None and batch.kind is StepKind.PREFILL:
            computed += len(batch.token_ids)
    seconds = time.process_time() - start
    print(
        f"{args.prompts} prompts of {args.length} tokens, {args.shared} shared, block size "
        f"{args.block_size}: {seconds / args.prompts * 1e6:.1f} us a prompt, {computed} tokens computed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-seqs", type=int, default=512)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=0, help="measure a run of so many prompts")
    parser.add_argument("--length", type=int, default=400, help="tokens of a prompt")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--max-tokens", type=int, default=4)
    args = parser.parse_args()
    if args.prompts:
        measure_run(args)
        return

    config = Config("model", max_num_seqs=args.num_seqs, max_num_batched_tokens=10**6)
    scheduler = Scheduler(config, Room(args.num_seqs * 16, args.block_size, 4096))
    params = SamplingParams(temperature=0.6, max_tokens=3000, ignore_eos=True)
    for seq_id in range(args.num_seqs):  # different lengths, so that blocks fill at different steps
        scheduler.add(Sequence(seq_id, array("i", [1] * (100 + seq_id)), params, seq_id, frozenset({5})))
    output = StepOutput(np.full((args.num_seqs, 1), 7))
    in_flight = None
    times = {"schedule": [], "postprocess": [], "both": []}
    for _ in range(args.steps):
        start = time.perf_counter()
        batch = scheduler.schedule()
        planned = time.perf_counter()
        if in_flight is not None:
            scheduler.postprocess(in_flight, output)
        end = time.perf_counter()
        if in_flight is not None and in_flight.kind is StepKind.DECODE:
            times["schedule"].append(planned - start)
            times["postprocess"].append(end - planned)
            times["both"].append(end - start)
        in_flight = batch
    print(f"{args.num_seqs} decoding sequences, {len(times['both'])} steps, block size {args.block_size}")
    for name, values in times.items():
        values = sorted(values)
        median, p99 = statistics.median(values), values[int(0.99 * len(values))]
        print(f"{name:12} median {median * 1e6:7.0f} us   99 % below {p99 * 1e6:7.0f} us")


if __name__ == "__main__":
    main()
