"""Parts of chat templates: turns, switches, earlier thinking, and calls as each family writes them."""

from __future__ import annotations

import json


def say(text: str) -> str:
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}"


def past(start: str, end: str, name: str = "reasoning_content") -> str:
    """An earlier answer's thinking."""
    return f"{{% if m.{name} %}}{say(start)}{{{{ m.{name} }}}}{say(end)}{{% endif %}}"


def template(
    user: str,
    close: str,
    assistant: str,
    opening: str,
    calls: str,
    thought: str = "",
    head: str = "",
    **more: str,
) -> str:
    """user, assistant: what begins a turn; ROLE is the role's place. close: what ends one. opening: what
    follows the last `assistant`. head: the beginning. more: how a tool's result begins, and ends."""
    before, _, behind = user.partition("ROLE")
    result, close_result = (
        more.get("result", say(before) + "{{ m.role }}" + say(behind)),
        more.get("end", say(close)),
    )
    turn = more.get("turn", say(assistant))
    return (
        f"{head}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{turn}{thought}"
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% set n = c.function.name %}"
        f"{{% set a = c.function.arguments %}}{calls}{{% endfor %}}{say(close)}{{% elif m.role == 'tool' %}}"
        f"{result}{{{{ m.content }}}}{close_result}{{% else %}}{say(before)}{{{{ m.role }}}}{say(behind)}"
        f"{{{{ m.content }}}}{say(close)}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{say(assistant)}{opening}{{% endif %}}"
    )


def switched(on: str, off: str, name: str = "enable_thinking", default: bool = True) -> str:
    value = str(default).lower()
    return f"{{% if {name} | default({value}) %}}{say(on)}{{% else %}}{say(off)}{{% endif %}}"


def each(item: str) -> str:
    """For each argument k with the text of its value v; a string in place of an object fails."""
    return "{% for k, w in a.items() %}{% set v = w if w is string else w | tojson %}" + item + "{% endfor %}"


HERMES = (
    say('<tool_call>\n{"name": "')
    + "{{ n }}"
    + say('", "arguments": ')
    + "{{ a if a is string else a | tojson }}"
    + say("}\n</tool_call>")
)
FUNCTION = (
    say("<tool_call>\n<function=")
    + "{{ n }}"
    + say(">\n")
    + each(say("<parameter=") + "{{ k }}" + say(">\n") + "{{ v }}" + say("\n</parameter>\n"))
    + say("</function>\n</tool_call>")
)
DEEPSEEK = (
    say("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>")
    + "{{ n }}"
    + say("\n```json\n")
    + "{{ '' + a }}"
    + say("\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
)
DEEPSEEK_V31 = (
    say("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>")
    + "{{ n }}"
    + say("<｜tool▁sep｜>")
    + "{{ '' + a }}"
    + say("<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
)
HARMONY = (
    say("<|channel|>commentary to=functions.")
    + "{{ n }}"
    + say(" <|constrain|>json<|message|>")
    + "{{ a | tojson }}"
    + say("<|call|>")
)
GLM = (
    say("<tool_call>")
    + "{{ n }}"
    + say("\n")
    + each(say("<arg_key>") + "{{ k }}" + say("</arg_key>\n<arg_value>") + "{{ v }}" + say("</arg_value>\n"))
    + say("</tool_call>")
)
GLM_47 = (
    say("<tool_call>")
    + "{{ n }}"
    + each(say("<arg_key>") + "{{ k }}" + say("</arg_key><arg_value>") + "{{ v }}" + say("</arg_value>"))
    + say("</tool_call>")
)
MINIMAX = (
    say('<minimax:tool_call>\n<invoke name="')
    + "{{ n }}"
    + say('">\n')
    + "{% if a is mapping %}"
    + each(say('<parameter name="') + "{{ k }}" + say('">') + "{{ v }}" + say("</parameter>\n"))
    + "{% endif %}"
    + say("</invoke>\n</minimax:tool_call>")
)
MUSE = (
    say("<|start|>assistant to=")
    + "{{ n }}"
    + say('<|message|><atem:function_calls>\n<atem:invoke name="')
    + "{{ n }}"
    + say('">\n')
    + each(say('<atem:parameter name="') + "{{ k }}" + say('">') + "{{ v }}" + say("</atem:parameter>\n"))
    + say("</atem:invoke>\n</atem:function_calls>")
    + "{% if not loop.last %}"
    + say("<|eom|>")
    + "{% endif %}"
)
GEMMA = (
    say("<|tool_call>call:")
    + "{{ n }}"
    + say("{")
    + "{% for k, v in a.items() %}{{ k }}:"
    + "{% if v is string %}"
    + say('<|"|>')
    + "{{ v }}"
    + say('<|"|>')
    + "{% else %}{{ v | tojson }}{% endif %}"
    + "{{ ',' if not loop.last }}{% endfor %}"
    + say("}<tool_call|>")
)
