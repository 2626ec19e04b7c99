"""Scripts that end in different ways while their engine is open, each run as a process.

Tests on CPU and GPU use them: each must end with its own exit code and leave no process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

START = """
import os, sys, threading
from nanovllm import LLM, SamplingParams
rng = __import__("random").Random(0)
prompts = [[rng.randrange(2, 90) for _ in range({prompt_len})] for _ in range(16)]
params = SamplingParams(temperature=0.6, max_tokens={max_tokens}, ignore_eos=True)
llm = LLM({model!r}, skip_tokenizer_init=True, device={device!r}, tensor_parallel_size={size}, **{options!r})
owner = getattr(llm._executor, "pool", None) or getattr(llm._executor.ranks, "watch", None)
print(*(process.pid for process in getattr(owner, "processes", ())), flush=True)
"""
TWICE = "llm.generate(prompts, params, use_tqdm=False); llm.generate(prompts, params, use_tqdm=False)"
STEPS = "[llm.add_request(p, params) for p in prompts]; [llm.step() for _ in range(5)]"

# The code, its expected exit code, and what it must print on stderr.
ENDINGS: dict[str, tuple[str, int, str]] = {
    "at_once": ("", 0, ""),
    "after_generate": (TWICE, 0, ""),
    "after_close": (f"{TWICE}; llm.close()", 0, ""),
    "after_del": (f"{TWICE}; del llm", 0, ""),
    "between_steps": (STEPS, 0, ""),
    "within_a_stream": ("parts = llm.stream(prompts, params); next(parts)", 0, ""),
    "after_an_exception": (f"{TWICE}\n1 / 0", 1, "ZeroDivisionError"),
    "an_exception_between_steps": (f"{STEPS}\n1 / 0", 1, "ZeroDivisionError"),
    "in_a_wrong_call": ("llm.generate([[-1]])", 1, "ValueError"),
    "sys_exit": (f"{TWICE}; sys.exit(3)", 3, ""),
    "in_a_cycle": (f"{TWICE}\nclass Holder: pass\nh = Holder(); h.llm, h.me = llm, h; del llm, h", 0, ""),
    "in_a_function": (
        f"def main():\n    global llm; own = llm; del llm; {TWICE.replace('llm', 'own')}\nmain()",
        0,
        "",
    ),
    "in_a_module": (f"import json; json.llm = llm; del llm; llm = json.llm; {TWICE}", 0, ""),
    "in_an_exit_handler": (
        "import atexit; atexit.register(lambda: llm.generate(prompts, params, use_tqdm=False))",
        0,
        "",
    ),
    "in_a_thread": (
        "threading.Thread(target=lambda: llm.generate(prompts, params, use_tqdm=False)).start()",
        0,
        "",
    ),
    "beside_a_daemon_thread": (  # it does not print, because Python aborts if it holds the lock of stdout
        "started = threading.Event()\n"
        "def forever():\n"
        "    while True:\n"
        "        started.set(); llm.generate(prompts, params, use_tqdm=False)\n"
        "def run():\n"
        "    try: forever()\n"
        "    except BaseException as error: os.write(1, type(error).__name__.encode())\n"
        "threading.Thread(target=run, daemon=True).start(); started.wait(); __import__('time').sleep(0.05)",
        0,
        "",
    ),
    "with_two_engines": (
        "other = LLM({model!r}, skip_tokenizer_init=True, device={device!r}, **{second!r})\n"
        f"{TWICE}; other.generate(prompts, params, use_tqdm=False)",
        0,
        "",
    ),
    "forked": (
        f"{TWICE}\npid = os.fork()\nif pid == 0: sys.exit(0)\nassert os.waitpid(pid, 0)[1] == 0; {TWICE}",
        0,
        "",
    ),
}


def check(
    name: str,
    model: Path,
    device: str,
    size: int,
    prompt_len: int = 20,
    max_tokens: int = 30,
    second: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run ENDINGS[name] with an engine of `options` and another of `second`; check how it ends."""
    code, exit_code, error = ENDINGS[name]
    values = {
        "model": str(model),
        "device": device,
        "size": size,
        "options": options,
        "second": options if second is None else second,
        "prompt_len": prompt_len,
        "max_tokens": max_tokens,
    }
    script = START.format(**values) + (code.format(**values) if name == "with_two_engines" else code)
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"TQDM_DISABLE": "1"},
    )
    assert result.returncode == exit_code, (name, result)
    assert error in result.stderr, (name, result)
    if not error:
        assert result.stderr == "", (name, result)
    pids = result.stdout.splitlines()[0].split()
    assert len(pids) == options.get("data_parallel_size", size - 1)
    assert not [pid for pid in pids if Path("/proc", pid).exists()], (name, result)
