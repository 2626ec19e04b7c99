"""Bare decoders and embedding models: what has no LM head, and what sentence-transformers' files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from checked_llm import make_tiny
from head_models import PLAIN
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, write_tiny_model
from transformers import AutoModel

from nanovllm import LLM, BeamSearchParams, ModelLoadError, PoolingParams, SamplingParams
from nanovllm.extras.embedding import EmbeddingDefaults, embedding_defaults
from nanovllm.models.registry import load_model_config, open_checkpoint, resolve_model_path
from nanovllm.models.weights import find_head
from tools.write_int4 import write_int4

PROMPTS = [[5, 9, 17, 3, 44, 8, 61, 2, 90, 13, 7, 7], [21, 35, 1]]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def write_bare(folder: Path, family: str, **settings: Any) -> Path:
    """What transformers writes of a model without its LM head."""
    whole = write_tiny_model(folder / "whole", family, **settings)
    AutoModel.from_pretrained(whole).save_pretrained(folder / "bare")
    return folder / "bare"


def flatten(folder: Path) -> Path:
    """Take the LM head and "model." before names out of a folder's tensors, not out of its config.json."""
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("model."): each for name, each in load_file(path).items()}
    tensors.pop("lm_head.weight", None)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def hidden_states(folder: Path, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        model = AutoModel.from_pretrained(folder, attn_implementation="eager").float().eval()
        return model(torch.tensor([prompt])).last_hidden_state[0]


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("qwen3", "Qwen3Model"),
        ("mistral", "MistralModel"),
        ("phi3", "Phi3Model"),
        ("gemma3", "Gemma3TextModel"),
        ("qwen3_moe", "Qwen3MoeModel"),
    ],
)
def test_a_bare_decoder_embeds(tmp_path: Path, family: str, architecture: str) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}} if family == "phi3" else {}
    folder = write_bare(tmp_path, family, **rope)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [architecture]
    with make_tiny(folder) as llm:
        assert llm.model_config.has_head == llm.model_config.tie_word_embeddings
        for prompt, output in zip(PROMPTS, llm.embed(PROMPTS, use_tqdm=False, normalize=False), strict=True):
            wanted = hidden_states(folder, prompt)[-1].numpy()
            assert np.allclose(output.outputs.embedding, wanted, atol=1e-4 * abs(wanted).max())


@pytest.mark.parametrize("tied", [True, False])
def test_names_without_model(tmp_path: Path, tied: bool) -> None:
    """A tied head is the embedding, which such files have."""
    whole = write_tiny_model(tmp_path / "whole", tie_word_embeddings=tied)
    folder = flatten(write_tiny_model(tmp_path / "flat", tie_word_embeddings=tied))
    with make_tiny(whole) as llm:
        embeddings = [each.outputs.embedding for each in llm.embed(PROMPTS, use_tqdm=False)]
        answers = [each["token_ids"] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        state = {name: tensor * 1.5 for name, tensor in load_file(folder / "model.safetensors").items()}
        llm.update_weights(state)  # the names of such a file
        changed = [each.outputs.embedding for each in llm.embed(PROMPTS, use_tqdm=False)]
    with make_tiny(folder) as llm:
        assert [each.outputs.embedding for each in llm.embed(PROMPTS, use_tqdm=False)] == embeddings
        if tied:
            assert [each["token_ids"] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == answers
        llm.update_weights(state)
        assert [each.outputs.embedding for each in llm.embed(PROMPTS, use_tqdm=False)] == changed
        assert changed != embeddings


def test_what_needs_a_head_is_refused(tmp_path: Path) -> None:
    folder = flatten(write_tiny_model(tmp_path))
    no_head = r"prompts\[0\]: this model has no LM head .*embed\(\) makes embeddings"
    with make_tiny(folder) as llm:
        for call in (
            lambda: llm.generate(PROMPTS, GREEDY, use_tqdm=False),
            lambda: next(llm.stream(PROMPTS, GREEDY)),
            lambda: llm.enqueue(PROMPTS, GREEDY),
            lambda: llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=2)),
        ):
            with pytest.raises(ValueError, match=no_head):
                call()
        for call in (lambda: llm.add_request(PROMPTS[0], GREEDY), lambda: llm.score(PROMPTS[0], [[3]])):
            with pytest.raises(ValueError, match="this model has no LM head"):
                call()
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, on_error="return")
        assert all("no LM head" in str(output.error) for output in outputs)
        assert llm.is_finished() and len(llm.embed(PROMPTS, use_tqdm=False)) == 2


@pytest.mark.full
def test_two_ranks_without_a_head(tmp_path: Path) -> None:
    folder = flatten(write_tiny_model(tmp_path))
    with make_tiny(folder) as llm:
        wanted = [each.outputs.embedding for each in llm.embed(PROMPTS, use_tqdm=False)]
    with make_tiny(folder, tensor_parallel_size=2) as llm:
        found = [each.outputs.embedding for each in llm.embed(PROMPTS, use_tqdm=False)]
    assert np.allclose(found, wanted, atol=1e-5)


def test_a_head_that_is_missing_elsewhere_is_an_error(tmp_path: Path) -> None:
    """Names with "model." are those of a language model, whose head got lost."""
    folder = write_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 missing: lm_head\.weight"):
        LLM(folder, device="cpu", skip_tokenizer_init=True)


def test_quantised_files_without_a_head(tmp_path: Path) -> None:
    """A head of another name than lm_head.weight is one."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 104}
    whole = write_tiny_model(tmp_path / "whole", "qwen2", **sizes)
    for head in (True, False):
        folder = write_int4(whole, tmp_path / f"int4-{head}", "gptq", head=head, group=32)
        assert find_head(load_model_config(folder), folder).has_head
    assert not find_head(load_model_config(flatten(folder)), folder).has_head


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"norm.weight": torch.ones(32)}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight, of which the files have another tensor"):
        LLM(folder, device="cpu", skip_tokenizer_init=True)


# -- sentence-transformers' files ---------------------------------------------------------------------------


OLD, NEW = "sentence_transformers.models.", "sentence_transformers.base.modules."


def describe(folder: Path, pooling: dict[str, Any] | None, *kinds: str) -> Path:
    """Write modules.json: a decoder, a pooling with these settings, and modules of these types."""
    folder.mkdir(exist_ok=True)
    modules = [("", f"{OLD}Transformer", None)]
    modules += [] if pooling is None else [("1_Pooling", f"{OLD}Pooling", pooling)]
    modules += [(f"{index}_{kind.rpartition('.')[2]}", kind, {}) for index, kind in enumerate(kinds, 2)]
    for path, _, settings in modules:
        if settings:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(settings))
    stated = [
        {"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind, _) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(stated))
    return folder


def older(mode: str) -> dict[str, bool]:
    names = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
    return {f"pooling_mode_{name}": name == mode for name in names}


STATED: dict[str, tuple[Any, EmbeddingDefaults]] = {
    "Qwen3-Embedding": (
        (older("lasttoken") | {"include_prompt": True}, f"{OLD}Normalize"),
        EmbeddingDefaults("last", True),
    ),
    "mean, not normalised": ((older("mean_tokens"),), EmbeddingDefaults("mean", False)),
    "no keys: mean": (({"word_embedding_dimension": 32},), EmbeddingDefaults("mean", False)),
    "version 6": (({"pooling_mode": "lasttoken"}, f"{NEW}normalize.Normalize"), EmbeddingDefaults()),
    "a list": (({"pooling_mode": ["mean"]}, f"{OLD}Dropout"), EmbeddingDefaults("mean", False)),
}


def test_without_such_files_the_last_token_is_normalised(tmp_path: Path) -> None:
    """As sentence-transformers 6 and vLLM pool a decoder."""
    assert embedding_defaults(tmp_path) == EmbeddingDefaults("last", True)


@pytest.mark.parametrize(("written", "wanted"), STATED.values(), ids=STATED)
def test_what_the_files_state(tmp_path: Path, written: Any, wanted: EmbeddingDefaults) -> None:
    assert embedding_defaults(describe(tmp_path, *written)) == wanted


def test_embeddings_are_those_that_the_files_state(tmp_path: Path) -> None:
    folder = flatten(write_tiny_model(tmp_path))
    before = open_checkpoint(folder).fingerprint()
    describe(folder, older("mean_tokens"))
    assert open_checkpoint(folder).fingerprint() != before
    with make_tiny(folder) as llm:
        wanted = transformers_model_hidden(folder)
        found = llm.embed(PROMPTS, use_tqdm=False)
        for one, all_ in zip(found, wanted, strict=True):
            assert np.allclose(one.outputs.embedding, all_.mean(0), atol=1e-4)
        scaled = llm.embed(PROMPTS, use_tqdm=False, pooling_params=PoolingParams(normalize=True))
        last = llm.embed(PROMPTS, use_tqdm=False, pooling="last", normalize=True)
        for one, other, all_ in zip(scaled, last, wanted, strict=True):
            mean = all_.mean(0)
            assert np.allclose(one.outputs.embedding, mean / mean.norm(), atol=1e-5)
            assert np.allclose(other.outputs.embedding, all_[-1] / all_[-1].norm(), atol=1e-5)


def test_means_of_long_texts_are_summed_in_float32(tmp_path: Path) -> None:
    """Of a decoder in bfloat16, where a sum no longer grows once it is 256 times what is added."""
    prompt = [*range(2, 42)] * 10
    with make_tiny(flatten(write_tiny_model(tmp_path)), dtype="bfloat16", max_model_len=512) as llm:
        [each] = llm.encode([prompt], PLAIN, use_tqdm=False, pooling_task="token_embed")
        [whole] = llm.embed([prompt], use_tqdm=False, pooling="mean", normalize=False)
    assert torch.equal(each.outputs.data, each.outputs.data.bfloat16().float())
    assert np.allclose(whole.outputs.embedding, each.outputs.data.mean(0), atol=1e-5)


def transformers_model_hidden(folder: Path) -> list[torch.Tensor]:
    return [hidden_states(folder, prompt) for prompt in PROMPTS]


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "the first token": ((older("cls_token"),), r"1_Pooling.config\.json: pooling_mode \['cls'\] is not supp"),
    "two": ((older("lasttoken") | {"pooling_mode_mean_tokens": True},), r"\['mean', 'lasttoken'\] is not"),
    "of version 6": (({"pooling_mode": "weightedmean"},), "'weightedmean' is not supported; .*'lasttoken'"),
    "a projection": (
        (older("lasttoken"), f"{OLD}Dense", f"{OLD}Normalize"),
        r"modules\.json: a module of type 'Dense' is not supported",
    ),
    "no pooling": ((None,), "has no module of type 'Pooling'"),
}


@pytest.mark.parametrize(("written", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, written: Any, message: str) -> None:
    """A model without a head is refused at the start, another one where it embeds."""
    bare = describe(flatten(write_tiny_model(tmp_path / "bare")), *written)
    with pytest.raises(ValueError, match=f"{message}.*so it only makes embeddings"):
        LLM(bare, device="cpu", skip_tokenizer_init=True)
    with make_tiny(describe(write_tiny_model(tmp_path / "whole"), *written)) as llm:
        assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match=f"{message}.*pass pooling='last' or 'mean'"):
            llm.embed(PROMPTS, use_tqdm=False)
        assert len(llm.embed(PROMPTS, use_tqdm=False, pooling="last")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "must hold a JSON array, not dict"),
        (
            '[{"type": "a.Pooling", "path": "../other"}]',
            r"must be a folder within the model's, not '\.\./other",
        ),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelLoadError, match=rf"modules\.json.* {message}"):
        embedding_defaults(tmp_path)


def test_a_prompt_before_every_text_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = describe(flatten(write_tiny_model(tmp_path)), older("lasttoken"))
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps({"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": None}))
    with make_tiny(folder):
        assert "default_prompt_name" not in caplog.text
    edit_json(path, default_prompt_name="query")
    with make_tiny(folder):
        assert "default_prompt_name 'query'" in caplog.text and "'Find: '" in caplog.text


@pytest.mark.parametrize(
    ("name", "key"),
    [("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")],
)
def test_texts_that_sentence_transformers_cuts_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, key: str
) -> None:
    """They are used whole, and the start says so."""
    folder = describe(flatten(write_tiny_model(tmp_path)), older("lasttoken"))
    for length, is_cut in ((512, False), (10**30, False), (8, True)):
        caplog.clear()
        (folder / name).write_text(json.dumps({key: length}))
        with make_tiny(folder) as llm:
            assert ("cut texts off after 8 tokens" in caplog.text) == is_cut
            [output] = llm.embed([PROMPTS[0]], use_tqdm=False, normalize=False)
            wanted = hidden_states(folder, PROMPTS[0])[-1]
            assert np.allclose(output.outputs.embedding, wanted, atol=1e-4)
    if key == "max_seq_length":
        edit_json(folder / name, do_lower_case=True)
        with pytest.raises(ValueError, match=r"sentence_bert_config\.json: do_lower_case is not supported"):
            make_tiny(folder)


def test_the_hub_delivers_the_folders_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str], **options: Any) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model_path("org/model")
    assert len(asked) == 1
    describe(tmp_path, older("lasttoken"))
    assert resolve_model_path("org/model") == tmp_path
    assert asked[2] == ["*_*/config.json"]
