"""Start engines, use them and end their processes in many ways; count crashes and wrong exit codes.

    python -m tools.soak_ends                          # 160 processes on a GPU, 8 at once
    python -m tools.soak_ends --device cpu --times 20 --jobs 1

Half of the processes load the bundled model, half the Qwen3-0.6B shape (on a CPU: all the bundled model),
both from safetensors files. Each runs with `faulthandler`, whose report is printed. Exits with status 1
unless every process ended as its way says.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm import demo_model_path
from tools.benchmark.shapes import write_shape
from tools.endings import ENDINGS, START, TWICE

HANG_SECONDS = 300
FOREVER = "while True: llm.generate(prompts, params, use_tqdm=False)"
THREADS = """
def work():
    for _ in range(3): llm.generate(prompts, params, use_tqdm=False)
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
"""
SLEEP = f"{TWICE}; llm.sleep(); llm.wake_up(); {TWICE}"
# The code, its expected exit code, what it must print on stderr, and the signals that it gets while it works.
SIGNALLED: dict[str, tuple[str, int, str, tuple[int, ...]]] = {
    "two_threads": (THREADS, 0, "", ()),
    "sleep_and_wake_up": (SLEEP, 0, "", ()),
    "ctrl_c": (FOREVER, -signal.SIGINT, "KeyboardInterrupt", (signal.SIGINT,)),
    "ctrl_c_in_two_threads": (
        f"threading.Thread(target=lambda: [{TWICE.split(';')[0]} for _ in range(3)]).start()\n{FOREVER}",
        -signal.SIGINT,
        "KeyboardInterrupt",
        (signal.SIGINT,),
    ),
    "sigterm": (FOREVER, -signal.SIGTERM, "", (signal.SIGTERM,)),
    "sigkill": (FOREVER, -signal.SIGKILL, "", (signal.SIGKILL,)),
}
WAYS = {name: (*ending, ()) for name, ending in ENDINGS.items()} | SIGNALLED


@dataclass
class Count:
    """The processes of one way."""

    times: int = 0
    problems: list[str] = field(default_factory=list)


def write_checkpoint(folder: Path) -> Path:
    """Random weights of the Qwen3-0.6B shape, as files."""
    write_shape("qwen3-0.6b", folder)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


def script_of(way: str, model: Path, device: str, options: dict[str, Any]) -> str:
    values = {"model": str(model), "device": device, "size": 1, "options": options, "second": options}
    values |= {"prompt_len": 60, "max_tokens": 40}
    code = WAYS[way][0]
    return START.format(**values) + (code.format(**values) if way == "with_two_engines" else code)


def run_once(way: str, model: Path, device: str, seed: int) -> str:
    """Run a process that ends in this way; return what went wrong, or ""."""
    _, exit_code, error, signals = WAYS[way]
    options: dict[str, Any] = {"num_kvcache_blocks": 64, "max_num_seqs": 32, "max_model_len": 1024}
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c"]
    process = subprocess.Popen(
        [*command, script_of(way, model, device, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TQDM_DISABLE": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    watchdog = threading.Timer(HANG_SECONDS, process.kill)
    watchdog.start()
    assert process.stdout is not None
    process.stdout.readline()  # it has started
    for number in signals:
        time.sleep(random.Random(seed).uniform(0.0, 2.0))
        process.send_signal(number)
    out, err = process.communicate()
    watchdog.cancel()
    fine = process.returncode == exit_code and error in err and (bool(error) or not err)
    return "" if fine else f"{way}, {model.name}: exit code {process.returncode}\n{out}{err}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--times", type=int, default=160, help="processes in all")
    parser.add_argument("--jobs", type=int, default=8, help="processes at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no process after so long")
    args = parser.parse_args()
    start, counts = time.perf_counter(), {way: Count() for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        models = [demo_model_path()]
        if args.device != "cpu":
            models.append(write_checkpoint(Path(folder)))

        def run(number: int) -> None:
            if time.perf_counter() - start > args.seconds:
                return
            way = list(WAYS)[number % len(WAYS)]
            model = models[number // len(WAYS) % len(models)]
            problem = run_once(way, model, args.device, number)
            counts[way].times += 1
            counts[way].problems += [problem] if problem else []

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(run, range(args.times)))
    print(f"{'way':32}{'processes':>10}{'problems':>10}")
    for way, count in counts.items():
        print(f"{way:32}{count.times:10}{len(count.problems):10}")
        print(*count.problems, sep="\n", end="\n" if count.problems else "")
    times = sum(count.times for count in counts.values())
    problems = sum(len(count.problems) for count in counts.values())
    print(f"{'all':32}{times:10}{problems:10}  in {time.perf_counter() - start:.0f} s")
    sys.exit(problems > 0)


if __name__ == "__main__":
    main()
