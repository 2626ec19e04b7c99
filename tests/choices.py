"""Choices by kind in source code, found with `ast`: what code does with a kind that no branch names.

A kind is a string, a member of an enum or a dtype; in Triton kernels also the constant KIND. A choice
compares one expression with kinds: an `if` with its `elif`s, `if`s in a row whose bodies leave, or a ternary.
It is closed if an unknown kind ends in an error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class Choice(NamedTuple):
    line: int
    subject: str  # what is compared with kinds
    branches: int
    closed: bool


def choices(tree: ast.AST) -> Iterator[Choice]:
    """All choices by kind."""
    seen: set[ast.stmt] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and (subject := _subject(node.test)):
            yield Choice(node.lineno, subject, 1, False)
        if isinstance(node, ast.Call) and _has_default(node):
            yield Choice(node.lineno, ast.unparse(node.args[0]), 1, False)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            for place, each in enumerate(block if isinstance(block, list) else []):
                if each not in seen and isinstance(each, ast.If) and (subject := _subject(each.test)):
                    yield _choice(block[place:], subject, seen)


def _choice(rest: list[ast.stmt], subject: str, seen: set[ast.stmt]) -> Choice:
    """The choice that begins with the first of these statements."""
    line, branches, ends, refuses = rest[0].lineno, 0, False, False
    while rest and isinstance(rest[0], ast.If) and _subject(rest[0].test) == subject:
        branch = rest[0]
        seen.add(branch)
        branches += 1
        refuses = refuses or _is_error(branch.body)
        ends = bool(branch.orelse) or isinstance(branch.body[-1], _LEAVES)
        rest = branch.orelse or (rest[1:] if ends else [])
    alone = branches == 1 and not ends  # one kind has something more, and nothing is chosen
    return Choice(line, subject, branches, alone or refuses or _is_error(rest) or _looks_up(rest, subject))


def _has_default(call: ast.Call) -> bool:
    """Whether it is `{...}.get(kind, default)`."""
    table = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "get" else None
    return isinstance(table, ast.Dict) and len(call.args) == 2


def _subject(test: ast.expr) -> str:
    """What a test compares with a kind; "" if it compares nothing with one."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        sides = test.left, test.comparators[0]
        for one, other in (sides, sides[::-1]):
            if _is_kind(other) or ast.unparse(one) == "KIND":
                return ast.unparse(one)
    return ""


def _is_kind(node: ast.expr) -> bool:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(map(_is_kind, node.elts))
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value).split(".")[-1]
        return owner in ("torch", "tl") or (owner[:1].isupper() and node.attr.isupper())
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_error(block: list[ast.stmt]) -> bool:
    first = block[0] if block else None
    return isinstance(first, (ast.Raise, ast.Assert)) or (
        first is not None and ast.unparse(first).startswith("tl.static_assert(False")
    )


def _looks_up(block: list[ast.stmt], subject: str) -> bool:
    """Whether a table is asked for the kind, which raises for an unknown one."""
    nodes = (node for each in block for node in ast.walk(each))
    return any(isinstance(node, ast.Subscript) and ast.unparse(node.slice) == subject for node in nodes)
