"""The tokenizer that a folder's files describe, and what makes another one give its ids.

transformers 5 builds many classes from vocabulary and merges alone, with the splitting of the class. A text
may then get other ids than those with which the model was trained, without an error. So a probe is compared
with tokenizer.json, or with SentencePiece where a folder has only its model.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import ModelLoadError
from nanovllm.formats.tokenizer_json.bpe import (
    CONTROL,
    QWEN2,
    UNKNOWN,
    USER_DEFINED,
    added_token,
    escaped,
    sentencepiece_steps,
    special_around,
    split_steps,
)
from nanovllm.inputs import show

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger("nanovllm")

# Each comes before and after each other one: whatever a class splits in another way shows in some pair.
_FRAGMENTS = (
    *[" ", "  ", "     ", "\n", "\n\n", "\n\n\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b"],
    *["3", "42", "2023", "650841823", "\uff11\uff12", "\u0663", "\u00bd", "x2", "1,000.50"],
    *[
        "Hello",
        "hello",
        "HELLO",
        "HTTPServer",
        "camelCase",
        "\u00c9t\u00e9",
        "e\u0301",
        "\u00dfs",
        "\u0421\u043b\u043e\u0432\u043e",
    ],
    *["'s", "'LL", "don't", "I'VE", "\u017f'\u017f", "\u2019re"],
    *[
        "\u65e5\u672c\u8a9e",
        "\u4e2d\u6587",
        "\ud55c\uad6d\uc5b4",
        "\u0e44\u0e17\u0e22",
        "\u0928\u092e\u0938\u094d\u0924\u0947",
        "\u0627\u0644",
        "\u3002",
        "\u4e00",
    ],
    *[
        "def f(x):",
        "    return x**2",
        "#include <a>",
        "//",
        "!=",
        "...",
        '"',
        "_",
        "--",
        "/",
        "$",
        "{}",
        "\u2014",
        "\u20ac",
    ],
    *["\U0001f980", "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "\ufffd", "\x00", "\x7f"],
)
_LONGEST_PROBE = 64  # tokens with texts of their own that are tried
# The classes that put SentencePiece's first token before a text unless tokenizer_config.json says otherwise.
_START_WITH_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


def _add_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Give the tokenizer the chat template of `chat_template.json`, where processors of transformers have it,
    if it has no other. ValueError if the file has none."""
    file = folder / "chat_template.json"
    if tokenizer.chat_template is not None or not file.is_file():
        return
    content = json.loads(file.read_text("utf-8"))
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        raise ValueError(f"{file.name} must have a string as its 'chat_template', not {show(template)}")
    tokenizer.chat_template = template


def match_files(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Change `tokenizer`, which transformers loaded from `folder`, so that it gives the ids of the files and
    has their chat template.

    A tokenizer of other code than transformers', or one without `tokenizers`, stays as it is. ModelLoadError
    for a SentencePiece model that neither transformers nor this module reproduces.
    """
    from tokenizers import Tokenizer

    _add_template(tokenizer, folder)
    own = getattr(tokenizer, "_tokenizer", None)
    if not isinstance(own, Tokenizer) or not type(tokenizer).__module__.startswith("transformers."):
        return
    file, model = folder / "tokenizer.json", _sentencepiece_file(folder)
    if file.is_file():
        wanted = _of_json(file, folder)
    elif model is not None:
        found = _of_sentencepiece(tokenizer, model, folder)
        if found is None:
            return
        wanted = found
    else:
        return
    wanted.no_truncation()
    wanted.no_padding()
    wanted.encode_special_tokens = own.encode_special_tokens
    if file.is_file():
        wanted.post_processor = own.post_processor
    texts = _probe(wanted)
    is_same = _ids(tokenizer, texts) == _ids_of(wanted, texts)
    if is_same and tokenizer("a", verbose=False)["input_ids"] == wanted.encode("a").ids:
        return
    _add_tokens(wanted, own)
    tokenizer._tokenizer = wanted
    _logger.info(
        "the tokenizer is that of %s; transformers' %s gives other ids", folder, type(tokenizer).__name__
    )


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    # One text at a time: batches start threads, of which tokenizers warns when the process forks later.
    return [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]


def _ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@cache
def _plain_probe() -> tuple[str, ...]:
    """Texts without special tokens."""
    pairs = ["".join(f"{each}{other}" for other in _FRAGMENTS) for each in _FRAGMENTS]
    return (*_FRAGMENTS, *pairs, *(f"{each} {each}" for each in _FRAGMENTS))


def _probe(tokenizer: Tokenizer) -> list[str]:
    """Texts with and without added tokens."""
    added = [str(each.content) for each in tokenizer.get_added_tokens_decoder().values()]
    step = max(1, len(added) // _LONGEST_PROBE)
    return [*_plain_probe(), *(f"a{each}b {each} c\n{each}\n" for each in added[::step]), "".join(added[:9])]


def _add_tokens(wanted: Tokenizer, own: Tokenizer) -> None:
    """Add the tokens that transformers knows besides, such as those of tokenizer_config.json; those that it
    hides from texts are hidden."""
    present = {str(each.content): each for each in wanted.get_added_tokens_decoder().values()}
    for _, token in sorted(own.get_added_tokens_decoder().items()):
        known = present.get(str(token.content))
        if known is None:
            wanted.add_tokens([token])
        elif token.special and not known.special:
            known.special = True
            wanted.add_special_tokens([known])


def _of_json(file: Path, folder: Path) -> Tokenizer:
    """The tokenizer of tokenizer.json, with Qwen2's splitting where the file's is known to be wrong: that of
    DeepSeek-R1-Distill-Qwen."""
    from tokenizers import Tokenizer

    wanted = Tokenizer.from_file(str(file))
    if (
        wanted.token_to_id("<\uff5cUser\uff5c>") == 151644
        and _json(folder / "config.json").get("model_type") == "qwen2"
    ):
        content = json.loads(wanted.to_str())
        content |= {"normalizer": {"type": "NFC"}, "pre_tokenizer": split_steps(QWEN2)}
        wanted = Tokenizer.from_str(json.dumps(content))
    return wanted


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# -- SentencePiece ------------------------------------------------------------------------------------------


def _sentencepiece_file(folder: Path) -> Path | None:
    """The only file of the folder that may be a model of SentencePiece."""
    files = [path for path in folder.glob("*.model") if path.is_file()]
    return files[0] if len(files) == 1 else None


def _of_sentencepiece(tokenizer: PreTrainedTokenizerBase, file: Path, folder: Path) -> Tokenizer | None:
    """The tokenizer of a model of SentencePiece; None if the file is none, as Llama 3's, or if the tokenizer
    gives its ids already and begins texts as it should."""
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
        from tokenizers import Tokenizer

        reference = sentencepiece.SentencePieceProcessor(str(file))
        model: Any = sentencepiece_model_pb2
        model = model.ModelProto.FromString(file.read_bytes())
    except Exception:  # it raises many kinds for another file
        return None
    texts = list(_plain_probe())
    theirs = [list(each) for each in reference.encode(texts)]
    config = _json(folder / "tokenizer_config.json")
    if (content := _content(model, config)) is not None:
        wanted = Tokenizer.from_str(json.dumps(content))
        name = str(config.get("tokenizer_class") or type(tokenizer).__name__).removesuffix("Fast")
        if name not in _START_WITH_BOS:
            wanted.post_processor = tokenizer._tokenizer.post_processor
        if _ids_of(wanted, texts) == theirs:
            return wanted
    if _ids(tokenizer, texts) == theirs:
        return None
    raise ModelLoadError(
        f"the ids that transformers' {type(tokenizer).__name__} gives texts are not those of SentencePiece "
        f"with {file}; put the model's tokenizer.json beside it, or pass a folder with one as tokenizer"
    )


def _content(model: Any, config: dict[str, Any]) -> dict[str, Any] | None:
    """The content of tokenizer.json for byte pairs of SentencePiece; None for its other kinds."""
    normal, trained = model.normalizer_spec, model.trainer_spec
    if trained.model_type != trained.BPE or not trained.byte_fallback or trained.treat_whitespace_as_suffix:
        return None
    if normal.precompiled_charsmap or normal.remove_extra_whitespaces or not normal.escape_whitespaces:
        return None
    pieces, kinds = [each.piece for each in model.pieces], [each.type for each in model.pieces]
    once = config.get("legacy") is False  # a space comes before the text alone, not after each control token
    added, free = [], []
    for index, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
        if kind in (CONTROL, UNKNOWN):
            added.append(added_token(index, piece, special=True, normalized=once))
            free += [escaped(piece)] if once else []
        elif kind == USER_DEFINED:
            added.append(added_token(index, piece, special=False, normalized=True))
            free.append(rf"(?:{escaped(piece)})\z")
    scores = [each.score for each in model.pieces]
    return {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": added},
        **sentencepiece_steps(pieces, kinds, scores, normal.add_dummy_prefix, free),
        "post_processor": special_around(_around(model, config)),
    }


def _around(model: Any, config: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """The tokens around a text: by default the first of a text."""
    around: dict[str, tuple[str, int]] = {}
    for end, default in {"bos": True, "eos": False}.items():
        index, stated = getattr(model.trainer_spec, f"{end}_id"), config.get(f"add_{end}_token")
        if index >= 0 and (default if stated is None else stated is True):
            around[end] = model.pieces[index].piece, index
    return around
