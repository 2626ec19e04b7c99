"""HeadConfig: what config.json says of the head of a model that classifies, and what its values become.

Reads plain dicts, and checks all that would change a label. Opens no file, knows no prompt, needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanovllm.doors import find
from nanovllm.pooling_heads.tokens import token_labels

Activation = Literal["softmax", "sigmoid", "none"]
Layers = Literal["linear", "biased", "mlp"]  # "biased": linear with a bias
_MODULE = "pooling_heads.layers:make_score"  # imported on use, because it needs torch

# The head by the end of an architecture's name: whether it judges each token; its layers; and what
# config.json says where it leaves labels out.
_SEQUENCE, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
_REWARD, _PROCESS = "Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"
_ENDS = re.compile(f"({_SEQUENCE}|{_TOKENS}|^{_REWARD}|^{_PROCESS})$")
_STEP_TAG = 151651  # `<extra_0>`, after which Qwen's process reward models judge a step
_PROBLEMS: dict[str | None, Activation | None] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    None: None,
}
_FUNCTIONS: dict[str, Activation | None] = {  # None: as without a function
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Sigmoid": None,
    "torch.nn.modules.activation.Softmax": None,
}
# transformers' own padding token where config.json leaves it out, by the beginning of an architecture.
_PADS = {"Gemma": 0, "Ministral3": 11, "Olmo": 1, "Phi3": 32000, "SmolLM3": 128004}
_PADS |= dict.fromkeys(("GlmFor", "Glm4For"), 151329)


@dataclass(frozen=True)
class HeadConfig:
    """The head `score` after a decoder, which makes a row of values, one for each label. A value.

    each_token: whether the head was trained on each token, or on the last one that is no padding.
    activation: what makes probabilities of a row. layers: "linear", "biased" (linear with a bias) or "mlp".
    """

    architecture: str
    labels: tuple[str, ...]  # by index, as `id2label` has them
    activation: Activation
    each_token: bool
    layers: Layers
    pad_token_id: int | None = None
    step_tag_id: int | None = None  # judges only these tokens; None: all
    tokens: tuple[str, ...] = ()  # whose logits are the values, in place of a head; see `tokens.py`
    is_reward: bool = False  # its values are rewards: no probabilities unless they are asked for

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    def __bool__(self) -> bool:
        """Whether a head is in place of the LM head."""
        return not self.tokens

    def layer(self, hidden_size: int) -> Any:
        """The head as a module of torch: hidden [n, hidden_size] -> values [n, num_labels] float32. None: it
        has no weights of its own."""
        return None if self.tokens else find(_MODULE)(self.layers, hidden_size, self.num_labels)

    def __str__(self) -> str:
        """What a model has in place of an LM head, and the calls that use it, for errors."""
        calls = "encode() with 'token_classify'" if self.each_token else "classify() or reward()"
        return f"{self.architecture} has a head of {self.num_labels} label(s), for {calls}"

    def judged(self, ids: Any) -> int:
        """How many leading tokens of a prompt count: all up to the last one that is no padding."""
        count = len(ids)
        while self.pad_token_id is not None and count > 1 and ids[count - 1] == self.pad_token_id:
            count -= 1
        return count


def read_head(architecture: str, raw: Mapping[str, Any]) -> HeadConfig | None:
    """The head of an architecture; None if its name states none. raw: config.json, with overrides.

    ValueError names the key and the value that are wrong or not supported.
    """
    match = _ENDS.search(architecture)
    if match is None:
        return None
    kind = match[0]
    found = token_labels(raw) if kind == _SEQUENCE else None
    if found is not None:
        activation = _activation(raw, len(found[1]))
        return HeadConfig(architecture, found[1], activation, False, "linear", tokens=found[0])
    is_reward = kind in (_REWARD, _PROCESS)
    default = {_REWARD: 1, _PROCESS: 2}.get(kind, 2)
    labels = _labels(raw, default, is_reward)
    biased = raw.get("token_classification_bias", True)
    if not isinstance(biased, bool):
        raise ValueError(f"config.json: token_classification_bias must be true or false, not {biased!r}")
    layers: Layers = "mlp" if is_reward else "linear"
    return HeadConfig(
        architecture,
        labels,
        _activation(raw, len(labels)),
        each_token=kind in (_TOKENS, _PROCESS),
        layers="biased" if kind == _TOKENS and biased else layers,
        pad_token_id=None if kind in (_TOKENS, _PROCESS) else _pad_token_id(architecture, raw),
        step_tag_id=_STEP_TAG if kind == _PROCESS else None,
        is_reward=kind == _REWARD,
    )


def _labels(raw: Mapping[str, Any], default: int, is_fixed: bool) -> tuple[str, ...]:
    """The names of all labels, by index. is_fixed: there are `default` of them, whatever config.json says."""
    number, names = raw.get("num_labels"), raw.get("id2label")
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise ValueError(f"config.json: num_labels must be a positive integer, not {number!r}")
    if is_fixed or names is None:
        return tuple(f"LABEL_{index}" for index in range(default if is_fixed else number or default))
    if not isinstance(names, Mapping) or not names:
        raise ValueError(f"config.json: id2label must map 0, 1, ... to names of labels, not {names!r}")
    if number is not None and number != len(names):
        raise ValueError(
            f"config.json: num_labels is {number}, and id2label has {len(names)} labels; make them agree, as "
            'with hf_overrides={"num_labels": ..., "id2label": {...}}'
        )
    by_number = {str(key): str(name) for key, name in names.items()}
    wanted = [str(index) for index in range(len(names))]
    if by_number.keys() != set(wanted):
        raise ValueError(
            f"config.json: the keys of id2label must be 0 to {len(names) - 1}, not {sorted(by_number)[:40]}"
        )
    return tuple(by_number[key] for key in wanted)


def _activation(raw: Mapping[str, Any], num_labels: int) -> Activation:
    """What vLLM makes of `problem_type`, else of the function that sentence-transformers writes; else the
    softmax of several labels, the sigmoid of one."""
    problem, plain = raw.get("problem_type"), "sigmoid" if num_labels == 1 else "softmax"
    if not isinstance(problem, (str, type(None))) or problem not in _PROBLEMS:
        raise ValueError(
            f"config.json: problem_type {problem!r} is not supported; supported: "
            f"{', '.join(repr(each) for each in _PROBLEMS if each)}, or none. "
            'hf_overrides={"problem_type": ...} sets it'
        )
    chosen = _PROBLEMS[problem]
    if problem is None:
        own = raw.get("sentence_transformers")
        function = own.get("activation_fn") if isinstance(own, Mapping) else None
        function = raw.get("sbert_ce_default_activation_function") if function is None else function
        if function is not None and function not in _FUNCTIONS:
            raise ValueError(
                f"config.json: the activation function {function!r} is not supported; supported: "
                f"{', '.join(_FUNCTIONS)}"
            )
        chosen = None if function is None else _FUNCTIONS[function]
    found = plain if chosen is None or (chosen == "softmax" and num_labels == 1) else chosen
    assert found in ("softmax", "sigmoid", "none")
    return found  # type: ignore[return-value]


def _pad_token_id(architecture: str, raw: Mapping[str, Any]) -> int | None:
    """The padding token of the decoder, which transformers skips at the end of a text."""
    inner = raw.get("text_config")
    text = inner if isinstance(inner, Mapping) else raw
    own = next((pad for start, pad in _PADS.items() if architecture.startswith(start)), None)
    found = text.get("pad_token_id", own)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int)):
        raise ValueError(f"config.json: pad_token_id must be an integer or null, not {found!r}")
    return found
