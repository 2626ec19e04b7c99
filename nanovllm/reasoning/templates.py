"""What a chat template reads, found in its syntax tree; and by it the names of a family and of its switches.

A template is a program of strangers: it is parsed here and never run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from nanovllm.reasoning.marks import REASONING
from nanovllm.reasoning.tool_formats import TOOL_CALLS

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # of a message, as templates name them
_SWITCHES = ("enable_thinking", "thinking")  # variables that are true or false
_FLAGS = {"low_effort": "low", "medium_effort": "medium"}  # variables that are true at one effort
_HARMONY_EFFORTS = ("low", "medium", "high")  # the model's; its template prints any word
_STRENGTHS = (*_HARMONY_EFFORTS, "xhigh")  # the same of Muse Glimmer


class Read(NamedTuple):
    """What a template reads. variables: given from outside. fields: names of attributes, items and keys.
    efforts: the words that `reasoning_effort` is compared with, in order."""

    variables: frozenset[str]
    fields: frozenset[str]
    efforts: tuple[str, ...]


@lru_cache
def read_template(template: str) -> Read:
    """Parse a template. ValueError if it is no Jinja template."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateSyntaxError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block by which templates mark what a model has written."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols])
    try:
        nodes_in_order = list(_in_order(environment.parse(template), nodes))
    except (TemplateSyntaxError, RecursionError) as error:
        raise ValueError(f"the chat template cannot be parsed ({type(error).__name__}: {error})") from None
    variables, known = set[str](), set[str]()
    fields, efforts, aliases = set[str](), dict[str, None](), {"reasoning_effort"}
    for node in nodes_in_order:
        if isinstance(node, nodes.Name):
            variables |= {node.name} - known if node.ctx == "load" else set()
            known.add(node.name)
        elif isinstance(node, nodes.Macro):
            known.add(node.name)
        elif isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            from_effort = aliases & {each.name for each in node.node.find_all(nodes.Name)}
            aliases |= {node.target.name} if from_effort else set()
        elif isinstance(node, nodes.Getattr):
            fields.add(node.attr)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            fields.add(node.value)
        elif isinstance(node, nodes.Compare) and aliases & {each.name for each in node.find_all(nodes.Name)}:
            words = (each.value for each in node.find_all(nodes.Const) if isinstance(each.value, str))
            efforts |= dict.fromkeys(words)
    return Read(frozenset(variables), frozenset(fields), tuple(efforts))


def _in_order(tree: Any, nodes: Any) -> Iterator[Any]:
    """All nodes, a value before the name that it is assigned to."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        children = list(node.iter_child_nodes())
        if isinstance(node, nodes.Assign):
            children = [node.node, node.target]
        elif isinstance(node, nodes.For):
            children = [
                node.iter,
                node.target,
                *(each for each in children if each not in (node.iter, node.target)),
            ]
        todo += reversed(children)


class _Sign(NamedTuple):
    """What a template of a family holds: all of `words`, none of `without`."""

    name: str
    words: tuple[str, ...]
    without: tuple[str, ...] = ()

    def is_in(self, template: str) -> bool:
        return all(word in template for word in self.words) and not any(
            word in template for word in self.without
        )


# The first that is in a template counts.
_REASONING_SIGNS = (
    _Sign("openai_gptoss", ("<|channel|>", "<|message|>", "analysis")),
    _Sign("muse_glimmer", ("<|message|>", "<|eom|>", "to=")),
    _Sign("gemma4", ("<|channel>", "<channel|>")),
    _Sign("seed_oss", ("<seed:think>", "</seed:think>")),
    _Sign("mistral", ("[THINK]", "[/THINK]")),
    _Sign("minimax_m2", ("<minimax:tool_call>", "</think>")),
    _Sign("deepseek_v3", ("<｜Assistant｜>", "</think>", "thinking")),
    _Sign("deepseek_r1", ("<｜Assistant｜>", "</think>")),
    _Sign("glm45", ("<arg_key>", "</think>")),
    _Sign("kimi_k2", ("<|tool_calls_section_begin|>", "</think>")),
    _Sign("smollm3", ("xml_tools", "</think>")),
    _Sign("granite", ("<|start_of_role|>", "</think>")),
    _Sign("nemotron_v3", ("<function=", "</think>", "truncate_history_thinking")),
    _Sign("qwen3", ("<|im_start|>", "<tool_call>", "</think>")),
    _Sign("exaone4", ("[|assistant|]", "</think>")),
    _Sign("think", ("<think>",)),
    _Sign("think", ("</think>",)),
)
_TOOL_SIGNS = (
    _Sign("openai", ("<|channel|>", "<|message|>", "functions.")),
    _Sign("muse_glimmer", ("<atem:invoke",)),
    _Sign("gemma4", ("<|tool_call>call:",)),
    _Sign("minimax_m2", ("<minimax:tool_call>",)),
    _Sign("seed_oss", ("<seed:tool_call>",)),
    _Sign("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    _Sign("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    _Sign("kimi_k2", ("<|tool_call_begin|>",)),
    _Sign("glm45", ("<arg_key>",)),
    _Sign("qwen3_coder", ("<tool_call>", "<function=")),
    _Sign("hermes", ("<tool_call>",)),
)


def find_reasoning(name: str, template: str | None) -> str:
    """The name of a family in `REASONING`: `name` itself, or for "auto" the one that the template shows.
    ValueError lists the names."""
    return _find("reasoning_parser", name, template, REASONING, _REASONING_SIGNS, "thinking")


def find_tool_format(name: str, template: str | None) -> str:
    """As `find_reasoning`, of `TOOL_CALLS`."""
    return _find("tool_parser", name, template, TOOL_CALLS, _TOOL_SIGNS, "tool calls")


def _find(
    option: str,
    name: str,
    template: str | None,
    table: Mapping[str, Any],
    signs: tuple[_Sign, ...],
    what: str,
) -> str:
    names = ", ".join(sorted(table))
    if name in table:
        return name
    if name != "auto":
        raise ValueError(f"{option}={name!r} is not known; pass 'auto' or one of {names}")
    if not template:
        raise ValueError(
            f"{option}='auto' reads the model's chat template, and this model has none; pass one of {names}"
        )
    found = next((sign.name for sign in signs if sign.is_in(template)), None)
    if found is None:
        raise ValueError(
            f"{option}='auto': the model's chat template shows no marks of {what} that are known; leave "
            f"{option} out if the model has none, or pass one of {names}"
        )
    return found


def thinking_variables(
    template: str, enable_thinking: bool | None = None, reasoning_effort: str | None = None
) -> dict[str, Any]:
    """The variables of a template that turn thinking on or off and set its effort; nothing for None.

    ValueError if the template has no such switch, or knows no such effort.
    """
    if enable_thinking is None and reasoning_effort is None:
        return {}
    read = read_template(template)
    found: dict[str, Any] = {}
    if enable_thinking is not None:
        names = [name for name in _SWITCHES if name in read.variables]
        if names:
            found = dict.fromkeys(names, enable_thinking)
        elif "thinking_mode" in read.variables:
            found = {"thinking_mode": "enabled" if enable_thinking else "disabled"}
        else:
            raise ValueError(
                f"enable_thinking={enable_thinking}: the chat template has no switch for thinking; leave "
                "it out"
            )
    return found | ({} if reasoning_effort is None else _effort(reasoning_effort, read, template))


def _effort(effort: str, read: Read, template: str) -> dict[str, Any]:
    flags = {word: name for name, word in _FLAGS.items() if name in read.variables}
    if "reasoning_effort" in read.variables:
        is_harmony = "<|channel|>" in template and "<|message|>" in template
        words = _HARMONY_EFFORTS if is_harmony else read.efforts
        if not words or effort in words:
            return {"reasoning_effort": effort}
    elif "reasoning_strength" in read.variables:
        words = _STRENGTHS
        if effort in words:
            return {"reasoning_strength": effort}
    elif flags:
        words = (*flags, "high")
        if effort in words:
            return {flags[effort]: True} if effort in flags else {}
    else:
        raise ValueError(
            f"reasoning_effort={effort!r}: the chat template reads no effort; leave it out, or limit the "
            "thinking by max_tokens"
        )
    raise ValueError(
        f"reasoning_effort={effort!r} is not one that the chat template knows: {', '.join(words)}"
    )


def takes_xml_tools(template: str) -> bool:
    """Whether a template reads its tools from the variable xml_tools, as SmolLM3's, and not from tools."""
    if "xml_tools" not in template:
        return False
    variables = read_template(template).variables
    return "xml_tools" in variables and "tools" not in variables


def reasoning_fields(template: str) -> list[str]:
    """The fields in which a template reads the thinking of an earlier message; none: it reads none."""
    fields = read_template(template).fields
    return [name for name in _REASONING_FIELDS if name in fields]
