"""Setup of all tests. Without a CUDA device, Triton kernels run in Triton's interpreter and `gpu` tests are
skipped.

`-n auto` runs test files in parallel, but not on GPUs, because an engine takes a GPU's whole memory.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import Generator

import pytest
from full_cells import draw_fewer_examples, left_to_full
from shared_rewriting import rewrite_a_part
from triton_interpreter import speed_up

HAS_GPU = shutil.which("nvidia-smi") is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
if not HAS_GPU:
    # Triton reads it when a kernel is defined, so set it before nanovllm is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # fastest for small models in parallel processes
os.environ.setdefault("TQDM_DISABLE", "1")
# A run starts hundreds of processes, and each would compile the package again; workers rewrite asserts once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
MAX_WORKERS = 8  # each holds about 1 GiB; the longest file takes an eighth of the total time
# A shell's background jobs ignore SIGINT; without this, the tests of Ctrl-C would never end.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so would the jobs of tests
atexit.register(gc.unfreeze)  # not before: pytest looks for garbage at the end of a session, again and again


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, because a sixth of the time tests wait for processes that start or end."""
    return 0 if HAS_GPU else min((os.cpu_count() or 1) + 1, MAX_WORKERS)


def pytest_configure(config: pytest.Config) -> None:
    # xdist would leave files of few tests to the end. Some of these take long, and a worker would
    # wait for the others; in the order of names the last ones take a second or two.
    config.option.loadscopereorder = False
    rewrite_a_part(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: no garbage is looked for in it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _imports_are_no_garbage() -> None:
    """Each engine that closes collects garbage; without this it would visit a million objects of imports."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _triton_is_interpreted_quickly() -> None:
    speed_up()


@pytest.fixture(autouse=True)
def _warnings_are_heard() -> None:
    """Other packages' set-up of logging turns off the loggers that exist, and gives the root logger a handler
    and a lower level, for all tests that follow in the process."""
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    root.handlers = [each for each in root.handlers if type(each).__module__.startswith("_pytest")]
    logging.disable(logging.NOTSET)
    logging.getLogger("nanovllm").disabled = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # With --lf only tests that failed are collected.
    whole = not any("::" in each for each in config.args) and not config.getoption("lf", default=False)
    for item in left_to_full(items, whole):
        item.add_marker("full")
    if "full" not in config.option.markexpr:
        draw_fewer_examples(items)
    for item in items:
        if item.get_closest_marker("full") and "full" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="a cell of the whole matrix; -m full runs it"))
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))
