"""TemplateProcess: applies chat templates in a process of its own, with limits of time, memory and output.

A chat template is a program that comes with a model, so a stranger may have written it. Its sandbox keeps it
from files and from Python's inside, but not from running for ever or taking all memory. Checks within the
sandbox (of ranges, products, powers) cannot be complete: comparing two lists that hold each other often
enough never ends either, in one operation that nothing in Python interrupts. The system stops a process
whatever it does. Nothing but text comes back from it. Knows no tokenizer and no prompt.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.chat.message_forms import Forms
from nanovllm.parallel.owned import finalize
from nanovllm.text.processor import Processor
from nanovllm.text.prompts import portions

_PORTION_BYTES = 2**16  # of conversations in one message; at least one
MAX_STOPS = 3  # in a row, until a template is not tried again
_START = "import sys; sys.path[:] = sys.argv[2:]; import nanovllm.chat.templates as t; t.serve(sys.argv[1])"
_MAX_FORMS = 64  # templates whose forms are known at once
PLAIN = {"add_generation_prompt": False, "continue_final_message": False}  # options of trials
_TEXT, _ERROR, _LIMIT = b"T", b"E", b"L"  # the first byte of an answer


class Limits(NamedTuple):
    """What one conversation may take."""

    seconds: float = 5.0  # of a CPU, so a busy machine changes nothing
    memory_bytes: int = 2**29  # on Linux
    output_bytes: int = 2**26


class TemplateError(Exception):
    """What the template raised, as text; if it `was_stopped`, the limit it met, from the verb on."""

    def __init__(self, why: str, was_stopped: bool = False) -> None:
        super().__init__(why)
        self.was_stopped = was_stopped


class TemplateProcess:
    """Starts on first use, and again after a template was stopped. Any thread may use it."""

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008
        self.limits = limits
        self._worker: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._end: Callable[[], object] = lambda: None  # of the process, once
        self._lock = threading.Lock()
        self._stops: dict[str, int] = {}  # of each template, since it last ended

    def render(
        self,
        template: str,
        special_tokens: Mapping[str, Any],
        conversations: Sequence[Any],
        options: Mapping[str, Any],
    ) -> list[str | TemplateError]:
        """Return the text of each conversation, in the forms that the template takes, or why there is none.
        options: of `apply_chat_template`.

        RuntimeError if the process cannot be started.
        """
        found: list[str | TemplateError] = []
        common = pickle.dumps((template, dict(special_tokens), dict(options), self.limits))
        with self._lock:
            for portion in portions([pickle.dumps(each) for each in conversations], _PORTION_BYTES, len):
                found += self._ask(template, common, portion)
        return found

    def close(self) -> None:
        """End the process; `render` starts another one."""
        self._worker = None
        self._end()

    def _ask(self, template: str, common: bytes, portion: list[bytes]) -> list[Any]:
        """The answers to a portion. If the process ends, each conversation is tried alone."""
        if self._stops.get(template, 0) >= MAX_STOPS:
            why = f"was stopped {MAX_STOPS} times in a row and is not tried again"
            return [TemplateError(why, True)] * len(portion)
        is_new = self._worker is None
        try:
            process, connection = self._worker or self._start()
            connection.send_bytes(pickle.dumps((common, portion)))
            answers: list[Any] = []
            while len(answers) < len(portion):
                answers += _answers(connection.recv_bytes(2 * self.limits.output_bytes))
        except (EOFError, ConnectionError):
            self.close()
            code = process.returncode
            if len(portion) > 1:
                return [each for part in portion for each in self._ask(template, common, [part])]
            if not is_new and code != -signal.SIGPROF:  # it may have ended long ago
                return self._ask(template, common, portion)
            why = "ends the process that applies it"
            if code == -signal.SIGPROF:
                why = f"takes more than {self.limits.seconds:g} s of a CPU"
            self._stops[template] = self._stops.get(template, 0) + 1
            return [TemplateError(why, True)]
        except BaseException:  # Ctrl-C: what comes later would be an answer to another question
            self.close()
            raise
        self._stops.pop(template, None)
        return answers

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        own, other = Pipe()
        command = [sys.executable, "-c", _START, str(other.fileno()), *sys.path]
        with other:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
        self._worker, self._end = (process, own), finalize(self, _end, process, own)
        try:
            own.recv_bytes()
        except (EOFError, ConnectionError):
            self.close()
            raise RuntimeError(
                f"the process that applies chat templates ended at its start ({process.returncode}); try: "
                f"{sys.executable} -c 'import nanovllm.chat.templates, transformers, jinja2'"
            ) from None
        return self._worker


_MAKING = threading.Lock()


def templates_of(processor: Processor) -> TemplateProcess:
    """The process of an engine's `Processor`, which ends it; any thread may be the first to use it."""
    with _MAKING:
        if processor.templates is None:
            processor.templates = TemplateProcess()
    found: TemplateProcess = processor.templates
    return found


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """End the process, unless it has ended. A process that ended by itself keeps its code."""
    connection.close()
    with suppress(subprocess.TimeoutExpired):  # EOFError comes a moment before the process has ended
        process.wait(0 if process.poll() is not None else 0.2)
    process.kill()
    process.wait()


def _answers(message: bytes) -> Iterator[str | TemplateError]:
    """The answers in a message: of each its kind, its length in 8 bytes, and its text."""
    start = 0
    while start < len(message):
        kind, end = (
            message[start : start + 1],
            start + 9 + int.from_bytes(message[start + 1 : start + 9], "big"),
        )
        text, start = message[start + 9 : end].decode("utf-8", "surrogatepass"), end
        yield text if kind == _TEXT else TemplateError(text, kind == _LIMIT)


def plain(value: Any) -> Any:
    """A copy of what a template sees, of lists, dictionaries, strings and numbers; other objects, whose
    methods a template could call, become their type's name."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) is dict:  # nearly always, and faster
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else list(map(plain, value))
    for kind in (str, int, float):
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    for method in ("model_dump", "item"):  # of pydantic; of NumPy's and torch's numbers
        with suppress(TypeError, ValueError, RuntimeError, AttributeError):
            return plain(getattr(value, method)())
    return f"<{type(value).__name__}>"


# -- in the process ------------------------------------------------------------------------------------------


def serve(descriptor: str) -> None:
    """Answer messages until the other end of the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal, meant for the other process
        signal.signal(number, signal.SIG_IGN)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase  # before memory is limited

    class Tokenizer(PreTrainedTokenizerBase):  # type: ignore[misc,unused-ignore]
        """All that a chat template needs of one."""

        special_tokens_map: Any = None

    tokenizer, Tokenizer.special_tokens_map = Tokenizer(), {}
    tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template="a", tokenize=False)
    used, known = _used_bytes(), dict[bytes, Forms]()
    with Connection(int(descriptor)) as connection, suppress(EOFError, ConnectionError):
        connection.send_bytes(b"ready")
        while True:
            common, portion = pickle.loads(connection.recv_bytes())
            template, Tokenizer.special_tokens_map, options, limits = pickle.loads(common)
            if used is not None:
                resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory_bytes, resource.RLIM_INFINITY))
            if common not in known and len(known) == _MAX_FORMS:
                known.clear()
            options = {"chat_template": template, **options}
            apply = partial(applied, tokenizer, options)
            forms = known.setdefault(common, Forms(partial(applied, tokenizer, {**options, **PLAIN})))
            message: list[bytes] = []
            for part in portion:
                signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # then SIGPROF ends the process
                kind, text = _rendered(apply, forms, part, limits)
                signal.setitimer(signal.ITIMER_PROF, 0)
                message += [kind, len(text).to_bytes(8, "big"), text]
                if part is portion[-1] or sum(map(len, message)) > _PORTION_BYTES:
                    connection.send_bytes(b"".join(message))
                    message.clear()


def applied(tokenizer: Any, options: Mapping[str, Any], conversation: Any) -> str:
    """The text of a conversation by its tokenizer's template."""
    return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))


def _rendered(apply: Callable[..., Any], forms: Forms, part: bytes, limits: Limits) -> tuple[bytes, bytes]:
    """The kind and the text of the answer to one conversation."""
    try:
        text = apply(forms.fit(pickle.loads(part)))
        output = text.encode("utf-8", "surrogatepass")
        if len(output) > limits.output_bytes:
            return _LIMIT, f"writes more than {limits.output_bytes:,} bytes".encode()
        return _TEXT, output
    except MemoryError:
        return _LIMIT, f"takes more than {limits.memory_bytes:,} bytes of memory".encode()
    except BaseException as error:  # a template may raise anything
        return _ERROR, f"{type(error).__name__}: {error}"[:4096].encode("utf-8", "replace")


def _used_bytes() -> int | None:
    """The process's address space; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return pages * resource.getpagesize()
