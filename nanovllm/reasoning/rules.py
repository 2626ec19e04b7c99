"""ThinkingRules: what a request with a budget or a constraint knows of thinking, as plain values for its
rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nanovllm.reasoning.budget import BudgetMarks, ThinkingBudget, budget_marks
from nanovllm.reasoning.gate import GateArguments, ThinkingGate, gate_of
from nanovllm.reasoning.marks import Channels, Thinking
from nanovllm.reasoning.prompts import Vocabulary, begin


class ThinkingRules(NamedTuple):
    """Of one request; its sequences make their own rules of it.

    marks: None without a budget. is_open: whether the prompt ends inside the thinking. gate: the arguments of
    the `ThinkingGate`; None without a constraint.
    """

    marks: BudgetMarks | None
    is_open: bool
    gate: GateArguments | None

    def new_budget(self, budget: int) -> ThinkingBudget:
        """The rule of one sequence."""
        assert self.marks is not None
        marks = self.marks
        if self.gate is not None:  # the constraint begins directly behind the end mark
            first = next(at for at, token_id in enumerate(marks.closing) if token_id in marks.ends)
            is_last = len(self.gate[0]) > 1  # of a header, such as harmony's
            marks = marks._replace(closing=marks.closing if is_last else marks.closing[: first + 1])
        return ThinkingBudget(marks, budget, self.is_open)

    def new_gate(self) -> ThinkingGate | None:
        """What lets the constraint of one sequence sleep."""
        return None if self.gate is None else ThinkingGate(*self.gate)


def thinking_rules(
    family: Thinking | Channels,
    vocabulary: Vocabulary,
    prompt_ids: Sequence[int],
    has_budget: bool,
    has_constraint: bool,
) -> ThinkingRules:
    """What is known for the answers to a prompt. ValueError if the family's marks are no tokens here."""
    return ThinkingRules(
        budget_marks(family, vocabulary) if has_budget else None,
        begin(family, vocabulary, prompt_ids).is_open,
        gate_of(family, vocabulary, prompt_ids) if has_constraint else None,
    )
