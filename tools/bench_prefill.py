"""What a prefill after a cached prefix costs beside the same new tokens without one, on one GPU.

    python -m tools.bench prefill                                  # the 0.6B shape, prefixes of 0 to 4,000
    python -m tools.bench prefill --shape qwen3-8b --shared 0 370
    python -m tools.bench prefill --rows 460 --own 140

A first call caches the prefix, a second one warms up, and each timed one computes --own new tokens of --rows
rows that follow it. Milliseconds of kernels in a call, medians of --runs: all of them, those of attention,
and the rest. `times` compares with the first prefix of --shared, which should be 0; `but keys` leaves out
what attention takes longer, as it reads the keys of the prefix.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

from nanovllm import LLM, SamplingParams
from tools.benchmark.kernels import kernels_of
from tools.benchmark.shapes import write_shape

ATTENTION = ("_prefill_kernel", "flash_fwd")  # ours, and that of the package flash-attn
PARAMS = SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True)


def kernel_ms(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Milliseconds of all kernels in a call, and of those of attention."""
    kernels = kernels_of(lambda: llm.generate(prompts, PARAMS, use_tqdm=False))
    times = [(each.end - each.start, each.name.startswith(ATTENTION)) for each in kernels]
    return sum(time for time, _ in times) / 1e3, sum(time for time, attends in times if attends) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=920)
    parser.add_argument("--own", type=int, default=70, help="new tokens of each row")
    parser.add_argument("--shared", type=int, nargs="+", default=[0, 200, 370, 1000, 4000])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_shape(args.shape, Path(folder)))
        llm = LLM(model, load_format="dummy", skip_tokenizer_init=True)
    rng, base = Random(0), (0.0, 0.0)
    for shared in args.shared:
        prefix = [rng.randint(0, 10000) for _ in range(shared)]

        def prompts(prefix: list[int] = prefix) -> list[list[int]]:
            return [prefix + [rng.randint(0, 10000) for _ in range(args.own)] for _ in range(args.rows)]

        llm.generate(prompts()[:1], PARAMS, use_tqdm=False)
        llm.generate(prompts(), PARAMS, use_tqdm=False)
        times = [kernel_ms(llm, prompts()) for _ in range(args.runs)]
        total, attention = median(each[0] for each in times), median(each[1] for each in times)
        if not base[0]:
            base = total, attention
        print(
            f"prefix of {shared:5,}: {total:8.2f} ms, attention {attention:8.2f}, the rest "
            f"{total - attention:8.2f}; {total / base[0]:5.3f} times, "
            f"but keys {(total - attention + base[1]) / base[0]:5.3f}",
            flush=True,
        )
    llm.close()


if __name__ == "__main__":
    main()
