"""Options that name files to read: tokenizers, overrides, revisions; and the KV cache's size."""

from __future__ import annotations

import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import inside
import pytest
from checked_llm import CheckedLLM, make_tiny
from test_texts import TOKENIZERS
from tiny_models import edit_json, write_tiny_model
from transformers import AutoConfig

from nanovllm import LLM, KVCacheMemoryError, ModelLoadError, SamplingParams, demo_model_path
from nanovllm.models.registry import load_model_config, open_checkpoint
from nanovllm.runner import model_runner

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=400)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZERS["byte_level"].save_pretrained(folder)
    return folder


def make(model: Path | str, **options: Any) -> CheckedLLM:
    return CheckedLLM(model, device="cpu", max_model_len=64, **options)


# -- tokenizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "path", "object"])
def test_another_tokenizer(model: Path, tokenizer_folder: Path, kind: str) -> None:
    given = {"text": str, "path": Path, "object": lambda _: TOKENIZERS["byte_level"]}[kind](tokenizer_folder)
    with make(model, tokenizer=given) as llm:
        [output] = llm.generate("Hello the world", GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == TOKENIZERS["byte_level"]("Hello the world")["input_ids"]
        assert output["text"] == TOKENIZERS["byte_level"].decode(output["token_ids"])
        if kind == "object":
            assert llm.get_tokenizer() is given


def test_a_missing_tokenizer(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer could be loaded .* as tokenizer, or pass skip"):
        make(model)
    with pytest.raises(ValueError, match=r"tokenizer folder '/no/such' does not exist"):
        make(model, tokenizer="/no/such")
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ValueError, match=r"tokenizer .* is a file; pass the folder that holds its files"):
        make(model, tokenizer=tmp_path / "tokenizer.json")
    with pytest.raises(TypeError, match="tokenizer must be a folder, a Hugging Face hub id or a trans"):
        make(model, tokenizer=print)
    with pytest.raises(ValueError, match="tokenizer_revision='v1' is for a hub id, and tokenizer is an obj"):
        make(model, tokenizer=TOKENIZERS["byte_level"], tokenizer_revision="v1")


def test_code_of_a_tokenizer_runs_only_where_it_is_trusted(
    model: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    shutil.copytree(tokenizer_folder, folder)
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n"
        "    own = True\n"
    )
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]},
    )
    with make(model, tokenizer=folder, trust_remote_code=True) as llm:
        assert llm.tokenizer.own
        assert llm.generate("Hello", GREEDY, use_tqdm=False)[0]["text"]
    with pytest.raises(ModelLoadError, match="trust_remote_code=True"):
        make(model, tokenizer=folder)


def test_downloads_from_the_hub(model: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, bool]] = []

    def download(name: str, revision: str | None, allow_patterns: list[str], **options: Any) -> str:
        assert (options["cache_dir"], options["token"]) == ("/cache", "secret")
        weights = "*.safetensors" in allow_patterns
        asked.append((name, revision, weights))
        return str(model if weights else tokenizer_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    options = {"download_dir": Path("/cache"), "hf_token": "secret"}
    with make("org/model", revision="v1", tokenizer="org/words", **options) as llm:
        assert "secret" not in repr(llm.config)
    with make("org/model", revision="v1", tokenizer_revision="v2", **options):
        pass
    assert asked == [
        ("org/model", "v1", True),
        ("org/words", None, False),
        ("org/model", "v1", True),
        ("org/model", "v2", False),
    ]
    asked.clear()
    # The model's own tokenizer, which does not exist.
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        make("org/model", revision="v1", tokenizer_revision="v1", **options)
    assert asked == [("org/model", "v1", True)]
    with pytest.raises(ValueError, match="revision='v1' is for a hub id, and model"):
        make(model, revision="v1")


def test_no_worker_gets_the_token(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = []
    init = model_runner.RankSetup.__init__

    def recorded(self: model_runner.RankSetup, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        configs.append(self.config)

    monkeypatch.setattr(model_runner.RankSetup, "__init__", recorded)
    with make(model, tokenizer=TOKENIZERS["byte_level"], hf_token="secret", revision="main") as llm:
        assert [(config.hf_token, config.tokenizer) for config in configs] == [(None, None)]
        assert llm.config.hf_token == "secret"


def test_a_tokenizer_of_mistral_common_alone(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "tekken.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        ModelLoadError, match=r"has a tokenizer in tekken\.json alone.*pass skip_tokenizer_init=True"
    ):
        make(folder)


def test_a_tokenizer_of_mistral_common_beside_another(tmp_path: Path, tokenizer_folder: Path) -> None:
    """transformers takes tekken.json if mistral-common is installed, and gives a class of its own."""
    [root] = find_spec("mistral_common").submodule_search_locations
    folder = write_tiny_model(tmp_path / "model", "mistral", vocab_size=400)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    shutil.copy(Path(root, "data/tekken_240911.json"), folder / "tekken.json")
    with make(folder) as llm:
        [output] = llm.generate("Hello the world", GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == TOKENIZERS["byte_level"]("Hello the world")["input_ids"]
    assert output["text"] == TOKENIZERS["byte_level"].decode(output["token_ids"])


def test_a_template_in_chat_template_json(model: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    messages = [{"role": "user", "content": "Hello"}]
    file = folder / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "{% for m in messages %}<{{ m.content }}>{% endfor %}"}))
    with make(folder) as llm:
        assert llm.chat(messages, GREEDY, use_tqdm=False)[0].prompt == "<Hello>"
    edit_json(folder / "tokenizer_config.json", chat_template="own: {{ messages[0].content }}")
    with make(folder) as llm:
        assert llm.chat(messages, GREEDY, use_tqdm=False)[0].prompt == "own: Hello"
    edit_json(folder / "tokenizer_config.json", remove=("chat_template",))
    file.write_text('{"chat_template": 7}')
    with pytest.raises(
        ModelLoadError, match=r"chat_template\.json must have a string as its 'chat_template', not 7"
    ):
        make(folder)


# -- config.json ---------------------------------------------------------------------------------------------


def test_hf_overrides(model: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(model, tmp_path / "changed"))
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    overrides = {"rope_parameters": scaling, "rope_scaling": scaling, "eos_token_id": 7}
    edit_json(changed / "config.json", **overrides)
    prompt = [[5, 6, 7, 8] * 6]
    with make_tiny(changed) as llm:
        [expected] = llm.generate(prompt, GREEDY, use_tqdm=False)
        config = llm.model_config
    with make_tiny(model, hf_overrides=overrides) as llm:
        assert llm.model_config == config and 7 in config.eos_token_ids
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0]["token_ids"] == expected["token_ids"]
    with make_tiny(model, hf_overrides={}) as llm:
        assert llm.model_config != config
    with pytest.raises(ValueError, match=r"hidden_act 'relu' .* \(with hf_overrides=\{'hidden_act'"):
        make_tiny(model, hf_overrides={"hidden_act": "relu"})


def test_numbers_that_json_does_not_have(model: Path, tmp_path: Path) -> None:
    """As transformers 5 writes them."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "unused": math.inf}
    config.time_step_limit = [0.0, math.inf]
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert open_checkpoint(folder).config()["time_step_limit"] == [0.0, math.inf]
    assert load_model_config(folder) == load_model_config(model)
    edit_json(folder / "config.json", rms_norm_eps={"__float__": "NaN"})
    with pytest.raises(ValueError, match="rms_norm_eps must be a number between 0 and 1, not nan"):
        load_model_config(folder)
    edit_json(
        folder / "generation_config.json", temperature={"__float__": "-Infinity"}, other={"__float__": "x"}
    )
    found = open_checkpoint(folder).generation()
    assert (found["temperature"], found["other"]) == (-math.inf, {"__float__": "x"})
    wrong = pytest.raises(ValueError, match=r"generation_config\.json: temperature .*-inf")
    with make(model, skip_tokenizer_init=True, generation_config=str(folder)) as llm, wrong:
        llm.generate([[5]], use_tqdm=False)


# -- generation_config.json ----------------------------------------------------------------------------------


def test_override_generation_config(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    recommended = {"temperature": 0.5, "top_k": 9, "eos_token_id": 11}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    changes = {"top_k": 5, "max_new_tokens": 3, "temperature": None}
    with make_tiny(folder, override_generation_config=changes) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_k=5, max_tokens=3)
        assert 11 in llm.model_config.eos_token_ids
        assert len(llm.generate([[5]], use_tqdm=False)[0]["token_ids"]) <= 3
    with make_tiny(folder, override_generation_config=changes, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_k=5, max_tokens=3)
    with make_tiny(folder, override_generation_config={}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=9)
    with pytest.raises(ValueError, match="override_generation_config: 'eos_token_id' is none of temperature"):
        make_tiny(folder, override_generation_config={"eos_token_id": 5})


# -- the KV cache --------------------------------------------------------------------------------------------


def test_the_kv_cache_in_bytes_and_in_blocks() -> None:
    with LLM(demo_model_path(), device="cpu", num_kvcache_blocks=10) as llm:
        runner = inside.runner(llm)
        block, tokens = runner.kv_cache.nbytes // 10, runner.block_size
    for options in ({"kv_cache_memory_bytes": 7 * block + 1}, {"num_gpu_blocks_override": 7}):
        with LLM(demo_model_path(), device="cpu", **options) as llm:
            assert inside.block_manager(llm).num_blocks == 7
            assert llm.generate("What is 2 + 3?", GREEDY, use_tqdm=False)[0]["text"]
    with LLM(demo_model_path(), device="cpu", block_size=32, num_kvcache_blocks=10) as llm:
        assert inside.runner(llm).block_size == 32
    with pytest.raises(KVCacheMemoryError, match=rf"Change kv_cache_memory_bytes \(now {block - 1}\)"):
        LLM(demo_model_path(), device="cpu", kv_cache_memory_bytes=block - 1)
    with pytest.raises(KVCacheMemoryError, match=rf"block.s. of {tokens} tokens need"):
        LLM(demo_model_path(), device="cpu", kv_cache_memory_bytes=2**50)
