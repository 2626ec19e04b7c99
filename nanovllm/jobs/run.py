"""`nanovllm run`: from arguments to a whole output and an exit code.

The order of things: refuse, lock, take up the journal, load the model, run, finish. Knows no row.
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.startup import find_model, overridden, read_generation_config, recommended_params
from nanovllm.engine.stats import StepStats
from nanovllm.errors import NanoVLLMError
from nanovllm.jobs import errors
from nanovllm.jobs.errors import (
    JobFailedError,
    JobRefusedError,
    Signals,
    caught_signals,
    refusing,
)
from nanovllm.jobs.extend import extend, files_of, has_grown
from nanovllm.jobs.formats import export, is_lines
from nanovllm.jobs.job import (
    COPIED,
    check_output,
    default_params,
    describe,
    engine_options,
    input_files,
    make_format,
    open_job,
    output_name,
    rows_path,
    standard_output,
)
from nanovllm.jobs.journal import Journal, hash_file, locked
from nanovllm.jobs.labels import check_arguments
from nanovllm.jobs.output import COLUMNS, PARSED, Output, put_in_order
from nanovllm.jobs.parsed import how_it_ended
from nanovllm.jobs.progress import History, JobProgress, summary_of
from nanovllm.jobs.runner import JobRunner
from nanovllm.jobs.tasks import Renderer, RowFormat
from nanovllm.llm import LLM
from nanovllm.models.registry import open_checkpoint
from nanovllm.params import SamplingParams
from nanovllm.report import Answers, GPUMonitor, Sample, check_path, write_report
from nanovllm.stats.summary import counted

_RESUMES = "; the same command resumes"
_SHOWN_FILES = 10


def run(args: argparse.Namespace, make_llm: Callable[..., Any] = LLM) -> int:
    """Run a job; return its exit code. JobRefusedError if it cannot run."""
    with standard_output(args):
        return _run_job(args, make_llm)


def _run_job(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    options = engine_options(args)
    with refusing():
        config = Config.from_kwargs(args.model, **options)
    check_arguments(args.choice, args.sampling, options)
    check_output(args)
    if args.report is not None:
        with refusing(f"--report {args.report}: "):
            check_path(args.report)
    path = rows_path(args.output)
    with caught_signals() as signals, locked(args.output), input_files(args) as paths:
        source, is_batch = open_job(args, paths)
        if is_batch and not is_lines(args.output):
            raise JobRefusedError(
                f"-o {args.output}: an OpenAI batch is answered in a .jsonl file; choose one"
            )
        try:
            folder = find_model(config)
            defaults, model_hash = (
                _defaults(config, folder, is_batch),
                open_checkpoint(folder).fingerprint(),
            )
        except (NanoVLLMError, OSError, ValueError) as error:
            raise JobRefusedError(str(error)) from None
        journal = Journal(args.output, path)
        try:
            before = journal.begin(
                describe(args, source, is_batch, config, model_hash),
                defaults,
                lambda old_input: extend(args, source, old_input, path),
            )
            answers, prompts = Answers(), dict[int, str]()  # prompts: that the model read, by row

            def add_sample(row: int, record: dict[str, Any]) -> None:
                answers.add(sample_of(row, record, prompts.pop(row, None)))

            output = Output(
                path,
                source.span,
                args.output,
                drop_errors=args.retry_errors,
                echo=args.echo,
                each=None if args.report is None else add_sample,
            )
        except OSError as error:
            raise JobRefusedError(f"{args.output} cannot be written: {error.strerror or error}") from None
        if before is not None and (others := _other_versions(before, journal.state)):
            _say(f"the job began with other versions, and answers may differ: {', '.join(others)}")
        with closing(output):
            runner = JobRunner(args, source, output, signals)
            runner.answers, runner.prompts = answers, None if args.report is None else prompts
            make = partial(make_format, args, is_batch, seed=config.seed)
            return _run(runner, journal, lambda: _answer(runner, journal, make, make_llm))


def _other_versions(before: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """What differs between the versions of two journals."""
    then, now = before.get("versions", {}), state["versions"]
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{name} {then.get(name, 'unknown')} (here {now.get(name, 'unknown')})" for name in names]


def _run(runner: JobRunner, journal: Journal, answer: Callable[[], None]) -> int:
    """Run the remaining rows of a job; return its exit code."""
    output, args, progress, signals = runner.output, runner.args, runner.progress, runner.signals
    if output.finished or output.num_dropped:
        _say(f"{args.output}: resumes after {counted(len(output.finished), 'row')}{_dropped(output, args)}")
    error: BaseException | None = None
    try:
        answer()
        signals.hold()
    except (KeyboardInterrupt, Exception) as caught:
        signals.hold()
        error = caught
    code, state = _end(error, signals, progress)
    if args.echo is not None:
        state = state.replace(_RESUMES, "; an output to standard output cannot be resumed, so run it again")
    progress.close()
    with suppress(OSError):  # on a full disk the journal still says that the job runs
        finished, failed = len(output.finished), output.num_errors
        journal.update(state=state, pid=None, rows=finished, error_rows=failed)
    if isinstance(error, JobRefusedError) and not signals.seen:
        raise error
    _say(f"{output_name(args)}: {state}. {summary_of(progress, runner.num_rows, runner.labels)}")
    if note := runner.labels.note():
        _say(note)
    return code


def _end(error: BaseException | None, signals: Signals, progress: JobProgress) -> tuple[int, str]:
    """The exit code and the state of a job that ended with this error."""
    if error is None:
        return errors.ERROR_ROWS if progress.errors else errors.ANSWERED, "finished"
    if isinstance(error, JobFailedError):
        return error.code, f"{'failed' if error.code == errors.FAILED else 'stopped'}: {error}"
    if isinstance(error, BrokenPipeError):
        return errors.READER_LEFT, "stopped, because the reader of standard output left"
    # A signal may give another error: of a worker, or of a library in C that it interrupts.
    if signals.seen or isinstance(error, KeyboardInterrupt):
        code, name = signals.end
        return code, f"stopped by {name}{_RESUMES}"
    if isinstance(error, JobRefusedError):
        return errors.REFUSED, "refused"
    if not isinstance(error, NanoVLLMError):  # its message is complete
        with suppress(OSError):
            traceback.print_exception(error)
    return errors.FAILED, f"failed: {type(error).__name__}: {error}{_RESUMES}"


def _answer(
    runner: JobRunner, journal: Journal, make: Callable[..., RowFormat], make_llm: Callable[..., Any]
) -> None:
    """Answer the rows that have no line. make: of their format, with the model's sampling parameters."""
    args, progress, signals = runner.args, runner.progress, runner.signals
    signals.check()
    runner.check_errors()
    if next(runner.pending(), None) is not None:
        _say(f"loading {args.model}")
        with refusing():
            llm = make_llm(args.model, **engine_options(args))
        with closing(llm):
            _keep_length(journal, runner, llm.model_config.max_model_len)
            signals.check()
            by_rows = None if args.choice is None else lambda: runner.rows_left
            history = History(journal, runner.output, by_rows=by_rows)

            def on_step(step: StepStats) -> None:
                signals.check()
                progress.step(step)
                history.save_when_due(llm.stats)

            llm.on_step = on_step
            row_format = make(recommended=llm.get_default_sampling_params())
            all_chats = args.chat or args.messages_column is not None
            renderer = Renderer(llm.tokenizer, args.chat_template_kwargs, all_chats)
            with signals.between_steps(), _reported(runner, llm, history, row_format.params):
                gc.freeze()  # a full collection would visit all of torch, for 0.1 s every 10,000 rows
                try:
                    runner.run(llm, row_format, renderer)
                finally:
                    gc.unfreeze()
                    history.save(llm.stats())
    elif args.report is not None:
        _say(f"{args.report} is not written, because no row was left to run")
    signals.check()  # in the close of the engine it may have been dropped
    _check_input(runner, journal.state["input"])
    signals.check()
    _finish(runner)


def _keep_length(journal: Journal, runner: JobRunner, length: int) -> None:
    """Note the longest sequence of the engine; JobRefusedError if the answers that are there had another:
    a shorter one cuts answers and refuses rows, a longer one does neither where those did."""
    before = journal.state.get("max_model_len")
    if before not in (None, length) and runner.output.finished:
        options = " ".join(f"{key}={value}" for key, value in journal.began_with.items()) or "none"
        raise JobRefusedError(
            f"{runner.args.output}: its answers had room for max_model_len={before} tokens, prompt and "
            f"answer together, and here the KV cache has room for {length}, which would change the other "
            f"answers; give the cache the room that it had, {before} tokens (num_kvcache_blocks * "
            f"kvcache_block_size; options of the first run: {options}), or choose another -o, which keeps "
            "these answers"
        )
    journal.update(max_model_len=length)


def _check_input(runner: JobRunner, before: Mapping[str, Any]) -> None:
    """JobFailedError if the input has changed since the job began; before: what the journal says of it."""
    for part, old in zip(runner.source.parts, files_of(before), strict=True):
        try:
            is_changed = part.was_written() and hash_file(part.path) != old["xxh3_128"]
            is_longer = is_changed and has_grown(part.path, old)
        except OSError as error:
            raise JobFailedError(
                f"{part.path} can no longer be read: {error.strerror}; restore it and run the same command "
                "again"
            ) from error
        if is_longer:
            raise JobFailedError(
                f"{part.path} has grown while the job ran; run the same command with --extend, which keeps "
                "the answers to the rows that it had, and answers the new rows"
            )
        if is_changed:
            raise JobFailedError(
                f"{part.path} was changed while the job ran, so some answers in {runner.args.output} may be "
                "of changed rows; run the job with another -o, which keeps these answers"
            )


@contextmanager
def _reported(runner: JobRunner, llm: Any, history: History, params: SamplingParams) -> Iterator[None]:
    """Write the report at the end of the block, however it ends, if one is requested."""
    path = runner.args.report
    if path is None:
        yield
        return
    with GPUMonitor(llm) as gpu:
        try:
            yield
        finally:
            output, marks = runner.output, history.marks
            facts = {
                "Input": ", ".join(str(part.path) for part in runner.source.parts[:_SHOWN_FILES]),
                "Output": output_name(runner.args),
                "Rows": runner.rows(),
                "Error rows": output.num_errors,
            }
            if runner.args.choice is not None:
                facts["Requests"] = (
                    "a request is a row, whose prompt is read once, and from the prefix cache again for each "
                    "further token of a choice"
                )
            if marks:
                facts["Resumed"] = f"after {', '.join(f'{mark:,.1f} s' for mark in marks)} of running"
            try:
                write_report(
                    path,
                    llm,
                    errors=sorted(output.first_errors),
                    num_errors=output.num_errors,
                    gpu=gpu,
                    facts=facts,
                    stats=history.whole(llm.stats()),
                    marks=marks,
                    answers=runner.answers,
                    parameters=_shown_params(runner.args, params),
                )
            except (OSError, ValueError) as error:
                _say(f"{path} could not be written: {error}")


def sample_of(index: int, record: dict[str, Any], rendered: str | None = None) -> Sample:
    """The answer that a line has. rendered: the prompt that the model read; if it is unknown, as in an
    earlier run, it is the column `prompt`, or all columns that the line repeats."""
    error = record.get("error")
    if error is not None:
        error = str(error["message"] if isinstance(error, dict) else error)
    columns = {name: value for name, value in record.items() if name not in COLUMNS + PARSED}
    reasons = record.get("finish_reasons") or [record.get("finish_reason")]
    text, row_id, usage = record.get("text"), record.get("id"), record
    if "custom_id" in record:  # an OpenAI batch
        body = (record["response"] or {}).get("body") or {}
        choices, row_id, columns = body.get("choices") or [{}], record["custom_id"], {}
        text = choices[0].get("text", choices[0].get("message", {}).get("content"))
        reasons = [each.get("finish_reason", "embedding") for each in choices]
        usage = body.get("usage", {})
    if len(reasons) == 1 and "custom_id" not in record:
        reasons = [how_it_ended(reasons[0], text, record.get("reasoning"), record.get("tool_calls"))]
    read, drawn = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    prompt = columns.get("prompt", columns or "") if rendered is None else rendered
    scores = record.get("choice_scores")
    return Sample(
        index, row_id, prompt, text or "", tuple(map(str, reasons)), read, drawn, error, scores=scores
    )


def _shown_params(args: argparse.Namespace, params: SamplingParams) -> dict[str, object]:
    """The parameters of rows without their own, and how prompts are made."""
    names = ("template", "chat", "system", "chat_template_kwargs", "limit", "shard")
    given = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names if getattr(args, name)}
    if args.choice is not None:  # nothing is drawn
        return {"--choice": ", ".join(args.choice)} | given
    return {name: value for name, value in vars(params).items() if value not in (None, [], {})} | given


def _finish(runner: JobRunner) -> None:
    """Sort the lines, and export them to the output."""
    output, path, num_rows = runner.output, runner.args.output, runner.num_rows
    assert num_rows is not None
    surplus = len(output.finished) - num_rows
    assert surplus >= 0, "every row has a line"
    if surplus:
        raise JobFailedError(
            f"{output.path} was changed: it has {counted(surplus, 'line')} for rows that are not in the "
            f"input; move all with an index above {num_rows - 1} to another file, which keeps them, and run "
            "the same command again"
        )
    if num_rows == 0:
        _say(f"{runner.source.path} has no rows")
    try:
        output.sync()
        rows = range(runner.source.first, runner.source.first + num_rows)
        if not output.is_ordered:
            put_in_order(output.path, rows)
        if output.path != path:
            export(output.path, path, rows, runner.args.csv_safe)
    except OSError as error:
        raise JobFailedError(
            f"all rows are answered, in {output.path}, and {path} could not be finished: {error.strerror}; "
            "repair that and run the same command again"
        ) from error


def _defaults(config: Config, model_folder: Path, is_batch: bool) -> dict[str, dict[str, Any]]:
    """The values of a journal entry that a command line need not give. JobRefusedError if the
    model's generation_config.json is wrong."""
    with refusing():
        generation = read_generation_config(config.generation_config, model_folder)
        changes = config.override_generation_config or {}
        recommended = recommended_params(overridden(generation, config.generation_config, changes))
    return {
        "options": {each.name: each.default for each in fields(Config)},
        "sampling": {**vars(recommended), **default_params(is_batch)},
        "prompt": {"columns": COPIED},
    }


def _say(text: str) -> None:
    """Print a line on standard error, if it is still open."""
    with suppress(OSError):
        print(f"nanovllm: {text}", file=sys.stderr, flush=True)


def _dropped(output: Output, args: argparse.Namespace) -> str:
    if not output.num_dropped:
        return ""
    why = "damaged lines or error rows" if args.retry_errors else "damaged lines"
    return f", and runs {counted(output.num_dropped, 'row')} again ({why})"
