"""TableCalls: `map`, which answers each row of a table of another library. Reads no table itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nanovllm.answers import RequestOutput
from nanovllm.chat.calls import ChatCalls
from nanovllm.inputs import calls_of_llm
from nanovllm.params import SamplingParams
from nanovllm.tables.tables import answer_columns, open_table, read_prompts


@calls_of_llm
class TableCalls(ChatCalls):
    """An engine that answers tables."""

    def map(
        self,
        table: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        prompt: str | None = None,
        messages: str | None = None,
        template: str | None = None,
        chat: bool = False,
        system: str | None = None,
        into: str = "answer",
    ) -> Any:
        """Answer every row of a table; return the same kind of table with the columns of the answers.

        table: a pandas or polars DataFrame, an Arrow table, a Hugging Face Dataset or a list of dictionaries.
        prompt: its column of texts or token ids; messages: its column of conversations; template: a text that
        names columns in braces, such as "Translate: {text}". One of the three.
        chat: make a conversation of each text; system: with this system message.
        into: the column of the answers. Beside it come the columns `{into}_finish_reason` and `{into}_error`:
        a row that cannot be answered has an error, and all others are answered. With `n` above 1, answers and
        reasons are lists.
        """
        opened = open_table(table)
        answer_columns([], into, opened.names)
        rows, are_chats = read_prompts(opened, prompt, messages, template, chat, system)
        good = [index for index, row in enumerate(rows) if not isinstance(row, Exception)]
        if isinstance(sampling_params, Sequence) and len(sampling_params) == len(rows):
            sampling_params = [sampling_params[index] for index in good]
        if good:
            answer: Callable[..., list[RequestOutput]] = self.chat if are_chats else self.generate
            prompts = [rows[index] for index in good]
            outputs = answer(prompts, sampling_params, use_tqdm, on_error="return")
            for index, output in zip(good, outputs, strict=True):
                rows[index] = output
        return opened.extended(answer_columns(rows, into, opened.names))
