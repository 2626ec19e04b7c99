"""Time of planning a step on the host: schedule + postprocess for decoding sequences, without a device.

python tools/bench_plan.py --num-seqs 512
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from nanovllm.batch import StepKind, StepOutput
from nanovllm.config import Config
from nanovllm.plan.room import Room
from nanovllm.plan.scheduler import Scheduler
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-seqs", type=int, default=512)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--block-size", type=int, default=256)
    args = parser.parse_args()

    config = Config("model", max_num_seqs=args.num_seqs, max_num_batched_tokens=10**6)
    scheduler = Scheduler(config, Room(args.num_seqs * 16, args.block_size, 4096))
    params = SamplingParams(temperature=0.6, max_tokens=3000, ignore_eos=True)
    for seq_id in range(args.num_seqs):  # different lengths, so that blocks fill at different steps
        scheduler.add(Sequence(seq_id, [1] * (100 + seq_id), params, seq_id, frozenset({5})))
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
