"""The order window: reorders the rows of a job.

Groups rows with a common prefix within a bounded number of rows, long outputs first. Also takes rows in
portions of bounded size. Drops and adds no rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import pairwise
from sys import getsizeof
from typing import TypeAlias, TypeVar

from nanovllm.jobs.tasks import Task

WINDOW_ROWS = 8192
WINDOW_BYTES = 64 * 2**20  # of rows in memory, approximately; a window has at least one row
PORTION_BYTES = 2**22  # of rows that are rendered or tokenised at once; at least one row
SHARED_CHARS = 128  # minimum common prefix of a group; about two blocks of 16 tokens
NO_IDS = array("i")
Key: TypeAlias = "tuple[str, str, array[int]]"  # the kind of a task, its text, its token ids
Item = TypeVar("Item")
UNBOUNDED = 2**40  # tokens of an output without a limit


def portions(items: Iterator[Item], rows: int) -> Iterator[list[Item]]:
    """Tasks, and what may be among them, in lists of up to `rows`, and of about PORTION_BYTES."""
    some: list[Item] = []
    size = 0
    for item in items:
        some.append(item)
        size += _size(item) if isinstance(item, Task) else 0
        if len(some) == rows or size >= PORTION_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def reordered(tasks: Iterator[Task], rows: int = WINDOW_ROWS) -> Iterator[Task]:
    """Yield all tasks, each window of `rows` in the order that runs fastest.

    For each task that is yielded, one task of the next window is read, so that reading never takes long.
    """
    present = _fill([], 0, tasks, rows)
    while present:
        coming: list[Task] = []
        size = 0
        for task in grouped_by_prefix(present):
            if size < WINDOW_BYTES and (read := next(tasks, None)) is not None:
                coming.append(read)
                size += _size(read)
            yield task
        present = _fill(coming, size, tasks, rows)


def grouped_by_prefix(tasks: list[Task]) -> list[Task]:
    """Return the tasks in groups with a common prefix. Groups with the longest outputs come first, and so do
    the longest outputs in each group. Embeddings, which run separately, come last."""
    keyed = sorted(((sort_key(task), task) for task in tasks), key=lambda each: (each[0], each[1].index))
    groups: list[list[Task]] = [[task] for _, task in keyed[:1]]
    for (before, _), (key, task) in pairwise(keyed):
        if is_shared(before, key):
            groups[-1].append(task)
        else:
            groups.append([task])
    for group in groups:
        group.sort(key=lambda task: -output_limit(task))
    groups.sort(key=lambda group: (group[0].kind == "embed", -output_limit(group[0])))
    return [task for group in groups for task in group]


def sort_key(task: Task) -> Key:
    """A key by which tasks with a common prefix are neighbours: their kind, and their text or ids."""
    if task.kind == "embed":
        return "embed", "", NO_IDS
    if task.is_chat:
        return "chat", "\0".join(str(message["content"]) for message in task.prompt), NO_IDS
    if isinstance(task.prompt, str):
        return "text", task.prompt, NO_IDS
    return "ids", "", task.prompt


def is_shared(one: Key, other: Key) -> bool:
    """Whether two keys have a common prefix: SHARED_CHARS characters, or a quarter as many ids, but at least
    half of the shorter prompt."""
    chars = max(SHARED_CHARS, min(len(one[1]), len(other[1])) // 2)
    ids = max(SHARED_CHARS // 4, min(len(one[2]), len(other[2])) // 2)
    return one[0] == other[0] and one[1][:chars] == other[1][:chars] and one[2][:ids] == other[2][:ids]


def output_limit(task: Task) -> int:
    limit = task.params.max_tokens
    return (UNBOUNDED if limit is None else limit) * task.params.n


def _fill(tasks: list[Task], size: int, more: Iterator[Task], rows: int) -> list[Task]:
    """Add tasks to `tasks` until the window is full."""
    while len(tasks) < rows and (size < WINDOW_BYTES or not tasks):
        task = next(more, None)
        if task is None:
            break
        tasks.append(task)
        size += _size(task)
    return tasks


def _size(task: Task) -> int:
    """The bytes of a task in memory: its row's, or its prompt's, if they are more."""
    parts = task.prompt if task.kind == "embed" else [task.prompt]
    if task.is_chat:
        parts = [message["content"] for message in task.prompt]
    return max(task.num_bytes, sum(map(getsizeof, parts)))
