"""Model folders that are broken or hostile: loaded, or refused by name, before anything is built."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from checked_llm import make_tiny
from model_folders import HYBRIDS, mutate_hybrid, try_folder, within, write_base
from safetensors.torch import load_file
from tiny_models import edit_json, write_tiny_model

from nanovllm import LLM, KVCacheMemoryError, ModelLoadError, SamplingParams
from nanovllm.formats.config_json.values import MOST_LAYERS
from nanovllm.formats.json_files import MAX_DEPTH, MAX_JSON_BYTES, read_json
from nanovllm.layers.stream import Group
from nanovllm.models import registry, weights
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import Checkpoint, load_model_config, open_checkpoint
from nanovllm.models.weights import check_weights
from nanovllm.quantization.shards import WeightSource

T = TypeVar("T")
FOLDERS = 200
# Seeds whose messages once named nothing.
OF_HYBRIDS: dict[str, tuple[int, ...]] = {"awq": (45,), "gptq": (45,), "w4a16": (40, 52)}


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Closing an engine collects garbage; here without the objects of all tests before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in (1, 2))])
@pytest.mark.usefixtures("small_heap")
def test_mutated_folders_load_or_are_refused_by_name(tmp_path: Path, part: int) -> None:
    base = write_base(tmp_path / "base")
    seeds = range(part, FOLDERS, 3)
    outcomes = Counter(try_folder(base, tmp_path / "work", seed)[1] for seed in seeds)
    assert outcomes["refused"] > len(seeds) / 3 and outcomes["loaded"] > len(seeds) / 10


@pytest.mark.parametrize("hybrid", HYBRIDS)
@pytest.mark.usefixtures("small_heap")
def test_mutated_hybrids_load_or_are_refused_by_name(tmp_path: Path, hybrid: str) -> None:
    base = write_base(tmp_path / "base", hybrid)
    seeds = [*range(10), *OF_HYBRIDS.get(hybrid, ())]
    outcomes = Counter(try_folder(base, tmp_path / "work", seed, mutate_hybrid)[1] for seed in seeds)
    assert outcomes["refused"] > 3 and outcomes["loaded"] > 0


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 10**7},
        {"num_hidden_layers": 10**9, "layer_types": None},
        {"num_hidden_layers": 5000, "layer_types": None, "intermediate_size": 10**7},
    ],
)
def test_a_config_of_endless_layers_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], load_format: str
) -> None:
    folder = write_tiny_model(tmp_path)
    edit_json(folder / "config.json", **sizes)

    def build(config: ModelConfig, *args: Any) -> DecoderForCausalLM:
        assert config.num_layers <= 2, "a model is built"
        return DecoderForCausalLM(config, *args)

    monkeypatch.setattr(weights, "DecoderForCausalLM", build)
    wrong = f"says num_hidden_layers={sizes['num_hidden_layers']}, and the weights have 2 layers"
    message = wrong if load_format == "auto" else "the model does not fit: its weights need"
    if sizes["num_hidden_layers"] > MOST_LAYERS:
        message = f"num_hidden_layers must be at most {MOST_LAYERS}, not {sizes['num_hidden_layers']}"
    refused = ModelLoadError, KVCacheMemoryError, ValueError  # the last one by what config.json says alone
    with within(60), pytest.raises(refused, match=message):
        make_tiny(folder, load_format=load_format)


def test_the_size_of_the_weights_is_that_of_all_layers(tmp_path: Path) -> None:
    config = load_model_config(write_tiny_model(tmp_path, num_hidden_layers=3))
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    found = weights.weight_bytes(config, Group(), weights.torch.float32)
    assert stored - 8192 < found < stored


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "[" * 90 + "]" * 90 + "}"])
def test_files_that_are_nested_too_deeply(tmp_path: Path, name: str, text: str) -> None:
    folder = write_tiny_model(tmp_path, max_shard_size="10KB")
    (folder / name).write_text(text)
    with pytest.raises(ModelLoadError, match=rf"{name} is nested more than {MAX_DEPTH} deep"):
        make_tiny(folder)


def test_files_that_are_too_large(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelLoadError, match=r"config\.json has 33,554,433 bytes, and at most 33,554,432"):
        read_json(path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizers_files_go_through_the_same_reader(tmp_path: Path, name: str) -> None:
    folder = write_base(tmp_path)
    (folder / name).write_text('{"a":' * 100_000)
    with pytest.raises(ModelLoadError, match=f"{name} is nested more than"):
        LLM(folder, device="cpu")


# -- which files count --------------------------------------------------------------------------------------


def test_what_is_no_regular_file_does_not_count(tmp_path: Path) -> None:
    """Pipes, folders and dangling links beside the model's files change nothing: loading reads none of them,
    nor does the job's fingerprint. Nor do other files that loading does not read."""
    folder = write_base(tmp_path)
    before = open_checkpoint(folder).fingerprint()
    for name in ("x.json", "added_tokens.json", "zzz.safetensors", "chat_template.jinja", "vocab.txt"):
        os.mkfifo(folder / name)
    for name in ("sub.json", "special_tokens_map.json", "sub.safetensors", "sub.model"):
        (folder / name).mkdir()
    for name in ("dangling.json", "tokenizer_1.json", "dangling.safetensors"):
        (folder / name).symlink_to(folder / "nowhere")
    (folder / "notes.txt").write_text("not read")
    with within(60):
        assert open_checkpoint(folder).fingerprint() == before
        with LLM(folder, device="cpu", num_kvcache_blocks=4, max_num_seqs=2) as llm:
            assert len(llm.generate(["a"], use_tqdm=False)) == 1
    (folder / "tokenizer_config.json").write_text("{}")
    assert open_checkpoint(folder).fingerprint() != before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling link"])
def test_a_needed_file_that_is_none_is_missing(tmp_path: Path, name: str, kind: str) -> None:
    path = write_base(tmp_path) / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    missing = r"has no config\.json|holds no \*\.safetensors weights|no tokenizer could be loaded"
    with within(60), pytest.raises(ModelLoadError, match=missing):
        LLM(tmp_path, device="cpu")


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(2**22))
    one = checkpoint.fingerprint()
    assert one == checkpoint.fingerprint()
    weights.write_bytes(bytes(2**22 - 1) + b"1")
    assert checkpoint.fingerprint() == one  # no sample covers this place; in a checkpoint all numbers differ
    weights.write_bytes(b"1" + bytes(2**22 - 1))
    assert checkpoint.fingerprint() != one
    weights.write_bytes(bytes(2**22))
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert checkpoint.fingerprint() != one


def test_links_into_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """A snapshot holds links to `../../blobs/<hash>`."""
    written = write_tiny_model(tmp_path / "written", max_shard_size="10KB")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in written.iterdir():
        path.rename(blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    make_tiny(snapshot).close()
    assert open_checkpoint(snapshot).fingerprint()


class PickledCheckpoint(Checkpoint):
    """One file of torch.save, with everything."""

    @classmethod
    def reads(cls, path: Path) -> bool:
        return path.suffix == ".pickled" and path.is_file()

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = torch.load(self.path, weights_only=True)
        return content

    def config(self) -> dict[str, Any]:
        return json.loads(self._content()["small"]["config.json"])  # type: ignore[no-any-return]

    def generation(self) -> dict[str, Any]:
        return json.loads(self._content()["small"]["generation_config.json"])  # type: ignore[no-any-return]

    def tokenizer(self, read: Callable[[Path], T]) -> T:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in self._content()["small"].items():
                Path(folder, name).write_text(text)
            return read(Path(folder))

    @contextmanager
    def tensors(self) -> Iterator[Mapping[str, WeightSource]]:
        yield self._content()["tensors"]

    def files(self) -> tuple[list[Path], list[Path]]:
        return [], [self.path]


def test_a_format_of_weights_is_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a line in a table: config, tokenizer and tensors come from it, at a start and at a wake-up."""
    folder, file = write_base(tmp_path / "base"), tmp_path / "model.pickled"
    small = {path.name: path.read_text() for path in folder.glob("*.json")}
    torch.save({"small": small, "tensors": load_file(folder / "model.safetensors")}, file)
    with pytest.raises(ValueError, match="is a file; pass the folder that holds"):
        LLM(file, device="cpu")
    monkeypatch.setattr(registry, "FORMATS", {"pickled": PickledCheckpoint, **registry.FORMATS})
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = {"device": "cpu", "num_kvcache_blocks": 4, "max_num_seqs": 2}
    texts = []
    for model in (folder, file):
        with LLM(model, **options) as llm:
            texts.append(llm.generate(["One and"], greedy, use_tqdm=False)[0]["text"])
            llm.sleep(2)
            llm.wake_up()
            texts.append(llm.generate(["One and"], greedy, use_tqdm=False)[0]["text"])
            assert llm.get_default_sampling_params().temperature == 0.6
    assert texts == texts[:1] * 4
    before = open_checkpoint(file).fingerprint()
    file.write_bytes(b"x" + file.read_bytes())
    assert open_checkpoint(file).fingerprint() != before


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/x.safetensors",
        "sub/x.safetensors",
        "..\\x",
        "..",
        ".",
        "",
        "a\0b",
        5,
        None,
        ["x"],
    ],
)
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: Any) -> None:
    folder = write_tiny_model(tmp_path, max_shard_size="10KB")
    path = folder / "model.safetensors.index.json"
    shards = json.loads(path.read_text())["weight_map"]
    edit_json(path, weight_map=shards | {"model.norm.weight": name})
    message = (
        r"index\.json: weight_map\['model\.norm\.weight'\] must be the name of a file in the same folder"
    )
    with pytest.raises(ModelLoadError, match=message):
        check_weights(load_model_config(folder), folder)


def test_a_tensor_that_an_index_names_twice(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, max_shard_size="10KB")
    path = folder / "model.safetensors.index.json"
    text = path.read_text()
    path.write_text(text.replace('"model.norm.weight":', '"lm_head.weight": "x", "model.norm.weight":', 1))
    with pytest.raises(ModelLoadError, match=r"index\.json has the key 'lm_head\.weight' twice"):
        check_weights(load_model_config(folder), folder)
