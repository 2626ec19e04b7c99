"""What the answers of a run were: samples, finish reasons, and lengths of prompts and answers, for the page.

Holds a few samples and counts, whatever the number of answers. Reads no files and asks no engine.
"""

from __future__ import annotations

import json
import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from html import escape

from nanovllm.answers import RequestOutput
from nanovllm.report.chart import BOTTOM, LEFT, RIGHT, TOP, Axis, clean, draw_path, draw_text, frame

_MAX_SHOWN = 2000  # characters of a text
_BINS = 20  # bars of a histogram, about
_KINDS = {"First answers": 3, "Longest answers": 2, "Shortest answers": 2, "First errors": 3}  # and how many
_EACH = "First of other answers"  # in place of long and short ones, where few different answers are counted
_KEPT = 7  # candidates of a kind: no row is shown twice
MOST_DIFFERENT = 30  # answers that are counted by their text
_MOST_COUNTED = 200  # characters of such a text
_SCORES = 5  # of a sample


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer, or the reason why there is none.

    index, id: of its prompt. prompt: a string, or the columns of a row by name. text: of the first
    completion. prompt_tokens, tokens: lengths; tokens are those of all completions. error: None for
    an answer. scores: of the choices that the answer was chosen from, from 0 to 1.
    """

    index: int
    id: object
    prompt: object
    text: str
    reasons: tuple[str, ...]
    prompt_tokens: int
    tokens: int
    error: str | None = None
    scores: Mapping[str, float] | None = None


class Answers:
    """Samples and lengths of all answers that are added, in any order."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.prompt_lengths: Counter[int] = Counter()
        self.lengths: Counter[int] = Counter()
        self.scores: Counter[int] = Counter()  # of the answers that were chosen, in percent
        self._choices: dict[str, None] = {}
        self._kept: dict[str, list[tuple[int, int, Sample]]] = {kind: [] for kind in _KINDS}
        self._first: dict[str, Sample] = {}  # by text, while there are few
        self._texts: Counter[str] = Counter()
        self._are_few = True

    @property
    def texts(self) -> dict[str, int]:
        """How often each answer came, the most common first; empty if more than MOST_DIFFERENT differ, if one
        is long, or if they come less than twice on average. Of choices all, also those that never came."""
        if not self._are_few or (not self._choices and self._texts.total() < 2 * len(self._texts)):
            return {}
        counts = dict.fromkeys(self._choices if len(self._choices) <= MOST_DIFFERENT else (), 0)
        return dict(sorted((counts | self._texts).items(), key=lambda each: (-each[1], each[0])))

    @property
    def samples(self) -> dict[str, list[Sample]]:
        """Samples by kind. No row is in two kinds."""
        found: dict[str, list[Sample]] = {}
        seen: set[int] = set()
        for kind, count in _KINDS.items():
            kept = [sample for _, _, sample in self._kept[kind]]
            if kind in ("Longest answers", "Shortest answers"):
                if self.texts:
                    shown = {sample.text for sample in found["First answers"]}
                    firsts = [each for text, each in self._first.items() if text not in shown]
                    firsts.sort(key=lambda each: (-self._texts[each.text], each.text))
                    found[_EACH], seen = firsts, seen | {sample.index for sample in firsts}
                    continue
                if len(self.lengths) == 1:
                    continue
            found[kind] = [sample for sample in kept if sample.index not in seen][:count]
            seen |= {sample.index for sample in found[kind]}
        return found

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> Answers:
        """The answers of `LLM.generate` or `LLM.chat`."""
        answers = cls()
        for index, output in enumerate(outputs):
            texts = [each.text for each in output.outputs]
            reasons = tuple(each.finish_reason or "" for each in output.outputs)
            tokens = sum(len(each.token_ids) for each in output.outputs)
            text, length = (texts or [""])[0], len(output.prompt_token_ids)
            answers.add(Sample(index, None, output.prompt or "", text, reasons, length, tokens, output.error))
        return answers

    def add(self, sample: Sample) -> None:
        """Count an answer, and keep it if it is one of those that are shown."""
        if sample.error is not None:
            self.reasons["error"] += 1
            self._keep("First errors", sample.index, sample)
            return
        self.reasons.update(sample.reasons)
        self.prompt_lengths[sample.prompt_tokens] += 1
        self.lengths[sample.tokens] += 1
        if sample.scores:
            self._choices |= dict.fromkeys(sample.scores)
            self.scores[round(100 * sample.scores.get(sample.text, 0.0))] += 1
        self._count_text(sample)
        for kind, rank in zip(_KINDS, (sample.index, -sample.tokens, sample.tokens), strict=False):
            self._keep(kind, rank, sample)

    def without_prompts(self) -> set[int]:
        """The rows of answers that are samples, and whose prompt is unknown."""
        kept = [sample for each in self._kept.values() for _, _, sample in each]
        samples = [*kept, *self._first.values()]
        return {sample.index for sample in samples if sample.prompt == "" and sample.error is None}

    def fill(self, index: int, prompt: object) -> None:
        """Add the prompt of a row whose samples have none."""
        for each in self._kept.values():
            each[:] = [(rank, row, _with(sample, index, prompt)) for rank, row, sample in each]
        self._first = {text: _with(sample, index, prompt) for text, sample in self._first.items()}

    def _count_text(self, sample: Sample) -> None:
        text = sample.text
        if not self._are_few:
            return
        if len(text) > _MOST_COUNTED or (text not in self._texts and len(self._texts) == MOST_DIFFERENT):
            self._are_few = False
            self._texts.clear()
            self._first.clear()
            return
        self._texts[text] += 1
        if text not in self._first or sample.index < self._first[text].index:
            self._first[text] = _cut(sample)

    def _keep(self, kind: str, rank: int, sample: Sample) -> None:
        kept = self._kept[kind]
        key = (rank, sample.index)
        if len(kept) < _KEPT or key < kept[-1][:2]:
            insort(kept, (*key, _cut(sample)), key=lambda each: each[:2])
            del kept[_KEPT:]


def _with(sample: Sample, index: int, prompt: object) -> Sample:
    """The sample, with a prompt if it is of this row."""
    return _cut(replace(sample, prompt=prompt)) if sample.index == index else sample


def _cut(sample: Sample) -> Sample:
    """The sample with texts that are cut if they are very long."""
    return replace(sample, prompt=_shown(sample.prompt), text=_shown(sample.text), id=_shown(sample.id))


def answers_section(answers: Answers) -> str:
    """The distribution of answers, finish reasons, histograms and samples, as elements of the page."""
    texts = answers.texts
    pictures = [histogram("Prompt lengths", "prompts", answers.prompt_lengths)]
    if answers.scores:
        pictures.append(histogram("Scores of the answers", "answers", answers.scores, "% of all choices"))
    elif not texts:
        pictures.append(histogram("Answer lengths", "answers", answers.lengths))
    different = f"<h3>Distribution</h3>\n{bars(texts)}" if texts else ""
    samples = "".join(
        f"<h3>{escape(kind)}</h3>\n{''.join(map(_card, kept))}"
        for kind, kept in answers.samples.items()
        if kept
    )
    reasons = f"<h3>Finish reasons</h3>\n{bars(dict(answers.reasons.most_common()))}"
    if answers.scores and answers.reasons.keys() == {"stop"}:
        reasons = ""  # what is chosen always ends
    return f'<h2>Answers</h2>\n{different}{reasons}<div class="charts">\n{"".join(pictures)}</div>\n{samples}'


def bars(counts: Mapping[str, int]) -> str:
    """A table of counts, each with a bar of its share."""
    total = sum(counts.values()) or 1
    rows = "".join(
        f'<tr><th>{escape(clean(name)) or "none"}</th><td><i style="width: {60 * count / total:.1f}%"></i>'
        f" {count:,} ({count / total:.1%})</td></tr>"
        for name, count in counts.items()
    )
    return f'<table class="bars"><tbody>{rows}</tbody></table>\n'


def _card(sample: Sample) -> str:
    """A sample: what it is, its prompt and its answer."""
    name = f"Row {sample.index:,}"
    if sample.id not in ("", "null", str(sample.index)):
        name += f", id {sample.id}"
    what = "error" if sample.error is not None else ", ".join(sample.reasons)
    about = what
    if sample.scores:
        best = sorted(sample.scores.items(), key=lambda each: -each[1])[:_SCORES]
        scores = ", ".join(f"{name} {score:.3f}" for name, score in best)
        more = f", and {len(sample.scores) - _SCORES:,} more" if len(sample.scores) > _SCORES else ""
        about = f"{sample.prompt_tokens:,} tokens in; scores: {scores}{more}"
    elif sample.error is None:
        about = f"{sample.prompt_tokens:,} tokens in, {sample.tokens:,} out, {what}"
    texts = [("prompt", sample.prompt), ("error" if sample.error else "answer", sample.error or sample.text)]
    shown = "".join(
        f'<pre class="{kind}">{escape(clean(_shown(text)))}</pre>' for kind, text in texts if text != ""
    )
    return f'<div class="sample"><p><b>{escape(clean(name))}</b> {escape(clean(about))}</p>{shown}</div>\n'


def _shown(value: object) -> str:
    """A value as text, cut if it is very long; of columns a line each, with their texts as they are."""
    if isinstance(value, Mapping):
        text = "\n".join(f"{_plain(name)}: {_plain(each)}" for name, each in value.items())
    else:
        text = _plain(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# -- histograms --------------------------------------------------------------------------------------------


def histogram(title: str, unit: str, lengths: Mapping[int, int], of: str = "tokens") -> str:
    """A picture of how many lengths are in each of about 20 equal steps; where they differ by more than a
    factor of 64, in steps that double. unit: what is counted. of: in what lengths are measured."""
    edges = bin_edges(lengths)
    heights = [0] * (len(edges) - 1)
    for length, count in lengths.items():
        heights[next(number for number in range(len(heights)) if length < edges[number + 1])] += count
    axis = Axis.of(0.0, max(heights, default=1), from_zero=True, whole=True)
    width = (RIGHT - LEFT) / max(1, len(heights))
    drawn = "".join(
        f'<rect class="bar" x="{LEFT + number * width + 0.5:.1f}" y="{axis.place(height, BOTTOM, TOP):.1f}" '
        f'width="{width - 1:.1f}" height="{BOTTOM - axis.place(height, BOTTOM, TOP):.1f}"/>'
        for number, height in enumerate(heights)
        if height
    )
    every = math.ceil(len(edges) / 7)
    ticks = "".join(
        draw_path("axis", f"M{LEFT + number * width:.1f} {BOTTOM}v4")
        + draw_text(LEFT + number * width, BOTTOM + 17, f"{edge:,}", "xtick", "middle")
        for number, edge in enumerate(edges)
        if number % every == 0
    )
    total = sum(lengths.values())
    mean = sum(length * count for length, count in lengths.items()) / (total or 1)
    note = f"{mean:,.0f} on average, {max(lengths, default=0):,} at most"
    return frame(title, unit, note, axis, drawn + ticks, of)


def bin_edges(lengths: Mapping[int, int]) -> list[int]:
    """The edges of the bars: all lengths are at least the first and below the last."""
    least, most = min(lengths, default=0), max(lengths, default=0)
    if most > 64 * max(1, least):
        doubling = [0, *(2**power for power in range(int(math.log2(most)) + 2))]
        return [edge for edge, after in zip(doubling, [*doubling[1:], 2**62], strict=True) if after > least]
    step = next(
        size * 10**power
        for power in range(20)
        for size in (1, 2, 5)
        if size * 10**power * _BINS >= most + 1 - least
    )
    first = least // step * step
    return list(range(first, most + step + 1, step))
