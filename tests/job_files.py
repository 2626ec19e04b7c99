"""Files of rows, drawn from a seed: JSON Lines, tables, Parquet and OpenAI batches, most of them damaged.
`tools/fuzz_job_files.py` tries many.
"""

from __future__ import annotations

import csv
import json
import random
import resource
import shutil
import struct
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from jobs import FakeLLM, read_rows, run
from model_folders import NESTED, within

from nanovllm.jobs import main as program
from nanovllm.jobs.errors import ANSWERED, ERROR_ROWS, REFUSED
from nanovllm.jobs.packed import PACKINGS, packed
from nanovllm.jobs.parquet import import_pyarrow
from nanovllm.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams

KINDS = ("jsonl", "csv", "tsv", "parquet", "json", "openai")
LIMIT = 60  # seconds for a file
MEMORY = 2**20  # KiB that a file may add to the largest size of this process
KEYS = ("id", "prompt", "messages", "sampling_params", "custom_id", "url", "body", "method", "x")
CHAT = [{"role": "user", "content": "Hi"}]
VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**400, 1e308, "", "a", "\0", "\ud800", "=cmd()", "x" * 10**5, "\u2028", '"'),
    *([], [1, 2], [2**31], [1, "a"], [True], {}, {"a": {}}, CHAT, [{"role": 1}], [CHAT], NESTED),
    *(
        {"top_p": 2},
        {"seed": 2**70},
        {"n": 10**9},
        {"stop": ["a"] * 9},
        {"structured_outputs": {"json": "{"}},
    ),
    *({"temperature": 1e999}, {"logit_bias": {"a": 1}}, {"max_tokens": [1]}, {"bad_words": [""]}, {"": 0}),
    *({"prompt": "a"}, {"messages": CHAT}, {"input": ["a", "b"]}, {"input": []}, {"prompt": [5], "n": 2}),
    *(
        "/v1/completions",
        "/v1/embeddings",
        "/v1/chat/completions",
        "POST",
        '[{"role": "user", "content": "a"}]',
    ),
]
PIECES = [
    *(
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"\r",
        b"\n",
        b"\r\n",
        b'"',
        b'""',
        b",",
        b"\t",
        b"[" * 10**5,
    ),
    *(
        b'{"a":' * 10**4,
        b"9" * 10**4,
        b'{"prompt": "a", "prompt": 5}\n',
        b"{}\n",
        b"NaN",
        b"\\ud800",
        b"PAR1",
    ),
    *(b"\xc3", b"\x1b[31m", b"=1+1", b"1e999999", b"-", b'{"prompt": 1' + b"0" * 5000 + b"}\n"),
]


class AnsweringLLM(FakeLLM):
    """Embeds too, and takes token ids."""

    def answer(self, index: int, prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        return super().answer(index, {"prompt": prompt.get("prompt", "ids")}, params)

    def embed(self, prompts: list[Any], use_tqdm: bool, on_error: str) -> list[Any]:
        return [
            EmbeddingRequestOutput(str(number), EmbeddingOutput([0.5]), [1], True)
            for number, _ in enumerate(prompts)
        ]


def write_file(folder: Path, seed: int) -> Path:
    """Write the file of a seed."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    path = folder / f"in.{'jsonl' if kind == 'openai' else kind}"
    rows = [good_row(kind, index) for index in range(rng.randrange(8))]
    for row in rows:
        for _ in range(rng.choice([0, 0, 1, 3])):
            row[rng.choice(KEYS)] = rng.choice(VALUES)
    if kind == "parquet":
        write_parquet(path, rows, rng)
    elif kind in ("csv", "tsv"):
        write_table(path, rows, rng)
    else:
        path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    if rng.random() < 0.7:
        path.write_bytes(damaged(path.read_bytes(), rng, kind == "parquet"))
    return compressed(path, random.Random(-seed))


def compressed(path: Path, rng: random.Random) -> Path:
    """One file of ten compressed, and one of three of these damaged."""
    if rng.random() > 0.1:
        return path
    target = path.with_name(path.name + rng.choice([*PACKINGS]))
    with target.open("wb") as file, packed(file, PACKINGS[target.suffix]) as packing:
        packing.write(path.read_bytes())
    if rng.random() < 0.33:
        target.write_bytes(damaged(target.read_bytes(), rng, is_parquet=True))
    return target


def good_row(kind: str, index: int) -> dict[str, Any]:
    if kind == "openai":
        return {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    return {"id": f"r{index}", "prompt": f"prompt {index}"}


def write_table(path: Path, rows: list[dict[str, Any]], rng: random.Random) -> None:
    names = list(dict.fromkeys(["id", "prompt", *(name for row in rows for name in row)]))
    with path.open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
        writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
        writer.writerow(names)
        for row in rows:
            cells = [row.get(name, "") for name in names]
            writer.writerow([each if isinstance(each, str) else shown(each) for each in cells])


def write_parquet(path: Path, rows: list[dict[str, Any]], rng: random.Random) -> None:
    """Columns of many types; what has no type becomes JSON."""
    pyarrow = import_pyarrow()
    table = {}
    for name in ["id", "prompt", *rng.sample(KEYS, 2)]:
        column = [row.get(name) for row in rows]
        try:
            table[name] = pyarrow.array(column)
        except (pyarrow.ArrowException, OverflowError, TypeError, ValueError):
            table[name] = pyarrow.array([shown(each) for each in column])
        if rng.random() < 0.1:
            table[name] = pyarrow.array(
                range(len(rows)), rng.choice([pyarrow.timestamp("ns"), pyarrow.date32()])
            )
        elif rng.random() < 0.1:
            text = pyarrow.array([b"\xff"] * len(rows), pyarrow.binary())
            table[name] = text.view(pyarrow.string())
    options: dict[str, Any] = {
        "compression": rng.choice(["snappy", "gzip", "brotli", "zstd", "lz4", "none"]),
        "use_dictionary": rng.random() < 0.5,
        "data_page_version": rng.choice(["1.0", "2.0"]),
        "row_group_size": rng.choice([1, 3, 100]),
    }
    try:
        pyarrow.parquet.write_table(pyarrow.table(table), path, **options)
    except pyarrow.ArrowException:  # a type that Parquet has not
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * len(rows)}), path, **options)


def shown(value: Any) -> str:
    return json.dumps(value).encode(errors="replace").decode()


def damaged(content: bytes, rng: random.Random, is_parquet: bool) -> bytes:
    """The content cut, with changed bytes, with pieces put in, or in another encoding."""
    how = rng.choice(["cut", "bytes", "bytes", "pieces", "pieces", "utf-16", "latin-1"])
    at = rng.randrange(len(content) + 1)
    if how == "cut":
        return content[:at]
    if how == "bytes" or is_parquet:
        changed = bytearray(content)
        first = 0
        if is_parquet and rng.random() < 0.7 and len(content) > 12:  # the footer, which describes the rest
            first = max(0, len(content) - 8 - struct.unpack("<I", content[-8:-4])[0])
        for _ in range(rng.choice([1, 2, 8]) if content else 0):
            changed[rng.randrange(first, len(changed))] = rng.randrange(256)
        return bytes(changed)
    if how == "pieces":
        for _ in range(rng.choice([1, 2, 5])):
            at = rng.randrange(len(content) + 1)
            content = content[:at] + rng.choice(PIECES) + content[at:]
        return content
    return content.decode(errors="replace").encode(how, errors="replace")


def try_file(work: Path, seed: int) -> str:
    """Run and check the file of a seed: "answered" or "refused"; AssertionError if it is neither."""
    work.mkdir()
    try:
        return _try(work, write_file(work, seed), random.Random(seed))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise AssertionError(
            f"seed {seed}, {KINDS[seed % len(KINDS)]}: {type(error).__name__}: {error}"
        ) from error
    finally:
        shutil.rmtree(work)


def _try(work: Path, source: Path, rng: random.Random) -> str:
    out = work / f"out.{rng.choice(['jsonl', 'jsonl', 'csv', 'parquet'])}"
    more = rng.choice([[], [], ["--prompt-column", "prompt"], ["--template", "{prompt}"], ["--ordered"]])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with within(LIMIT), redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        code = run(source, "-o", out, *more, make_llm=AnsweringLLM)
        checked = program.main(["check", str(source), *(each for each in more if each != "--ordered")])
    text = printed.getvalue()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY, "it takes much memory"
    assert "Traceback" not in text, text[-2000:]
    assert code in (ANSWERED, ERROR_ROWS, REFUSED), f"exit code {code}: {text[-2000:]}"
    assert checked in (ANSWERED, ERROR_ROWS, REFUSED), f"exit code {checked} of check: {text[-2000:]}"
    if code == REFUSED:
        assert "refused: " in text and not out.exists(), text[-2000:]
        return "refused"
    lines = out if out.suffix == ".jsonl" else out.with_name(out.name + ".rows.jsonl")
    rows = read_rows(lines)
    num_rows = int(text.split(": finished. ")[1].split(" row")[0].split(" of ")[-1].replace(",", ""))
    assert len(rows) == num_rows, f"{num_rows} rows, and {len(rows)} lines"
    if num_rows and "row" in text.splitlines()[-1] and checked != REFUSED:
        assert f": {num_rows:,} row" in text.splitlines()[-1], text[-500:]
    return "answered"
