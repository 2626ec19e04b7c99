"""The gain of replicas: bench.py on one GPU and on several, and prefix routing compared with round robin.

    python -m tools.bench replicas              # two GPUs; --data-parallel-size 4 for more
    python -m tools.bench replicas --share-gpu  # prefix routing alone, with both replicas on one GPU
    python -m tools.bench replicas --cpu        # all with the demo model, as a test

Each figure comes from a separate run of bench.py. Prints output tokens/s, and the ratios.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench.py"
GPU = {
    "queue": ["--workload", "queue", "--num-seqs", "4096"],
    "prefixes": ["--workload", "prefixes", "--max-num-seqs", "128"],
}
CPU = {
    "queue": ["--workload", "demo", "--num-seqs", "64"],
    "prefixes": ["--workload", "demo", "--num-seqs", "64", "--prefix-caching"],
}


def output_tokens_per_s(options: list[str]) -> float:
    """Run bench.py with `options`."""
    command = [sys.executable, str(BENCH), *options]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr}")
    speed = float(json.loads(result.stdout.splitlines()[-1])["output_tokens_per_s"])
    print(f"{speed:10,.0f} output tokens/s   python bench.py {' '.join(options)}", flush=True)
    return speed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-parallel-size", type=int, default=2, metavar="N")
    parser.add_argument("--repeat", type=int, default=2, help="timed runs of each; the result is the median")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--share-gpu", action="store_true", help="only prefix routing, on a single GPU")
    args = parser.parse_args()
    lists, common = (CPU, ["--device", "cpu"]) if args.cpu else (GPU, [])
    common += ["--repeat", str(args.repeat)]
    several = [*common, "--data-parallel-size", str(args.data_parallel_size)]
    if args.share_gpu:
        several.append("--share-gpu")
    else:
        one = output_tokens_per_s(lists["queue"] + common)
        all_of_them = output_tokens_per_s(lists["queue"] + several)
        print(f"{args.data_parallel_size} replicas give {all_of_them / one:.2f} times one replica's tokens/s")
    in_turn = output_tokens_per_s([*lists["prefixes"], *several, "--round-robin"])
    routed = output_tokens_per_s(lists["prefixes"] + several)
    print(f"prefix routing gives {routed / in_turn:.2f} times round robin's tokens/s")


if __name__ == "__main__":
    main()
