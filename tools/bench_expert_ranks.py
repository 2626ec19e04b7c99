"""Experts on several GPUs, split by width and whole by rank, in turn: bench.py on 2 and 4 ranks.

    python -m tools.bench expert-ranks                        # the 30B-A3B shape on 2 and 4 GPUs
    python -m tools.bench expert-ranks --ranks 2 --shape gpt-oss-20b
    python -m tools.bench expert-ranks --num-seqs 16 64 256 1024

Each figure comes from a separate run of bench.py. For each number of ranks and sequences one line says the
output tokens/s of both, and the ratio. Weights are random: a real model's experts may be less equally
likely.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tools.bench_replicas import output_tokens_per_s

BY_RANK = "--enable-expert-parallel"


def runs(args: argparse.Namespace, ranks: int, num_seqs: int) -> tuple[list[str], list[str]]:
    """The options of bench.py for both ways, by width first."""
    common = ["--workload", "headline", "--shape", args.shape, "--tensor-parallel-size", str(ranks)]
    common += ["--num-seqs", str(num_seqs), "--repeat", str(args.repeat)]
    return common, [*common, BY_RANK]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--repeat", type=int, default=2, help="timed runs of each; the result is the median")
    args = parser.parse_args(argv)
    for ranks in args.ranks:
        for num_seqs in args.num_seqs:
            width, rank = (output_tokens_per_s(each) for each in runs(args, ranks, num_seqs))
            print(
                f"{ranks} ranks, {num_seqs} sequences: {width:,.0f} by width, {rank:,.0f} by rank, "
                f"{rank / width:.2f} times"
            )


if __name__ == "__main__":
    main()
