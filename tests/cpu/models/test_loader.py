"""Checkpoints that are complete, truncated, wrong or missing: loaded exactly, or refused with the names of
all errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, edit_json, write_tiny_model

from nanovllm.attention.reference import ReferenceBackend
from nanovllm.errors import ModelLoadError
from nanovllm.formats.dummy import init_dummy_weights
from nanovllm.layers.weights import allocate, finish_loading, weight_slots
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import load_weights
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.shards import WeightOptions

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")


def build(folder: Path, tp: TPGroup | None = None, dtype: torch.dtype = torch.float32) -> DecoderForCausalLM:
    """The model in `folder`, or a rank's part of it. A whole model starts with NaN in every weight."""
    config = load_model_config(folder)
    model = DecoderForCausalLM(config, tp or TPGroup(), ReferenceBackend(), 32)
    allocate(model, WeightOptions(dtype, CPU), config.quant)
    # The padding of a rank's vocabulary stays zero.
    for parameter in model.parameters() if tp is None else ():
        parameter.data.fill_(torch.nan)
    return model


def weights(model: DecoderForCausalLM) -> Tensors:
    """Every parameter by name, in the dtype in which it is stored; a packed weight as it was loaded."""
    found: Tensors = dict(model.named_parameters())
    for path, layer in model.named_modules():
        if f"{path}.weight" in found and hasattr(layer, "method"):
            found[f"{path}.weight"] = layer.method.dense()
    return found


def edit_weights(folder: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def refused(folder: Path, message: str) -> str:
    """Check that loading is refused and leaves the model unchanged; return the message."""
    model = build(folder)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_weights(model, folder)
    assert all(parameter.isnan().all() for parameter in model.parameters())
    return str(caught.value)


# -- what loads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_loaded(tmp_path: Path, tied: bool) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=tied)
    model = build(folder)
    load_weights(model, folder)
    stored = load_file(folder / "model.safetensors")
    found = weights(model).values()
    assert sum(weight.numel() for weight in found) == sum(tensor.numel() for tensor in stored.values())
    assert not any(weight.isnan().any() for weight in found)
    attention = model.model.layers[1].self_attn
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(attention.qkv_proj.method.dense(), torch.cat([stored[name] for name in names]))
    head, embedding = model.lm_head.method.weight, model.model.embed_tokens.method.weight
    assert (head.data_ptr() == embedding.data_ptr()) == tied
    if not tied:
        assert torch.equal(model.lm_head.method.dense(), stored["lm_head.weight"])


def test_weights_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    model = build(folder, dtype=torch.bfloat16)
    load_weights(model, folder)
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(model.lm_head.method.dense(), stored.bfloat16())


def same_weights(model: DecoderForCausalLM, other: DecoderForCausalLM) -> bool:
    one, two = weights(model), weights(other)
    assert one.keys() == two.keys()
    return all(each.dtype == two[name].dtype and torch.equal(each, two[name]) for name, each in one.items())


def two_checkpoints(tmp_path: Path) -> list[Path]:
    return [write_tiny_model(tmp_path / str(seed), "llama", seed=seed) for seed in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_load_gives_a_fresh_model(tmp_path: Path, dtype: torch.dtype) -> None:
    folders = two_checkpoints(tmp_path)
    fresh = [build(folder, dtype=dtype) for folder in folders]
    for model, folder in zip(fresh, folders, strict=True):
        load_weights(model, folder)
    assert not same_weights(*fresh)
    model = build(folders[0], dtype=dtype)
    for index in (0, 1, 1, 0):
        load_weights(model, folders[index])
        assert same_weights(model, fresh[index])


def test_a_load_of_another_dtype_gives_a_fresh_model(tmp_path: Path) -> None:
    """Also where a model in float32 stores weights in the dtype of their tensors."""
    folders = []
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        folders.append(write_tiny_model(tmp_path / str(seed), "llama", seed=seed))
        edit_weights(folders[-1], lambda t, dtype=dtype: t.update({k: v.to(dtype) for k, v in t.items()}))
    fresh = [build(folder) for folder in folders]
    for model, folder in zip(fresh, folders, strict=True):
        load_weights(model, folder)
        stored = load_file(folder / "model.safetensors")["lm_head.weight"]
        assert torch.equal(model.lm_head.method.dense().float(), stored.float())
    model = build(folders[0])
    for index in (0, 1, 2, 0, 2, 1, 0):
        load_weights(model, folders[index])
        assert same_weights(model, fresh[index])


@pytest.mark.parametrize("seed", range(5))
def test_tensors_may_come_in_any_order_and_alone(tmp_path: Path, seed: int) -> None:
    """Then some tensors are loaded again from another checkpoint."""
    folders = two_checkpoints(tmp_path)
    fresh, model = build(folders[0]), build(folders[0])
    load_weights(fresh, folders[0])
    slots = weight_slots(model)

    def load(names: list[str], index: int) -> None:
        tensors = load_file(folders[index] / "model.safetensors")
        for name in names:
            layer, shard = slots[name]
            layer.load(shard, tensors[name])

    order = [
        list(slots)[i] for i in torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))
    ]
    load(order, 0)
    finish_loading(model)
    assert same_weights(model, fresh)
    layer = "model.layers.1"
    names = [f"{layer}.self_attn.q_proj.weight", f"{layer}.input_layernorm.weight"]
    load(names, 1)
    finish_loading(model)
    assert not same_weights(model, fresh)
    load(names, 0)
    finish_loading(model)
    finish_loading(model)
    assert same_weights(model, fresh)
    load(names, 1)
    finish_loading(model)
    load(order, 0)
    finish_loading(model)
    assert same_weights(model, fresh)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_the_whole_model_between_them(tmp_path: Path, ranks: int) -> None:
    folder = write_tiny_model(tmp_path, "llama", attention_bias=True, max_shard_size="8KB")
    whole = build(folder)
    load_weights(whole, folder)
    shards = []
    for rank in range(ranks):
        shards.append(build(folder, TPGroup(rank, ranks)))
        load_weights(shards[-1], folder)
        for name, parameter in shards[-1].named_parameters():
            if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
                assert torch.equal(parameter, whole.get_parameter(name)), name
    rows = shards[0].model.embed_tokens.rows
    tables = [shard.model.embed_tokens.method.dense() for shard in shards]
    table = torch.cat([part[:rows] for part in tables])
    assert torch.equal(table[:VOCAB_SIZE], whole.model.embed_tokens.method.dense())
    assert (table[VOCAB_SIZE:] == 0).all()
    for part in tables:
        assert len(part) == rows + (ranks > 1)
        assert (part[rows:] == 0).all()
    down = torch.cat([shard.model.layers[0].mlp.down_proj.method.dense() for shard in shards], dim=1)
    assert torch.equal(down, whole.model.layers[0].mlp.down_proj.method.dense())
    gate = torch.cat([shard.model.layers[0].mlp.gate_up_proj.method.dense().chunk(2)[0] for shard in shards])
    assert torch.equal(gate, whole.model.layers[0].mlp.gate_up_proj.method.dense().chunk(2)[0])


def test_a_size_that_cannot_be_split_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3 .*sizes that do: 1, 2, 4"):
        build(folder, TPGroup(0, 3))


def test_harmless_extra_tensors_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=True)
    edit_weights(
        folder,
        lambda t: t.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
            }
        ),
    )
    model = build(folder)
    load_weights(model, folder)
    assert not any(weight.isnan().any() for weight in weights(model).values())


def test_weights_of_another_format_beside_the_index_are_not_read(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, max_shard_size="10KB")
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    load_weights(build(folder), folder)


def test_files_without_an_index_are_read_together(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, max_shard_size="10KB")
    (folder / "model.safetensors.index.json").unlink()
    load_weights(build(folder), folder)


# -- what does not ------------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_reported_at_once_by_name(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)

    def spoil(tensors: Tensors) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(2, 2)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(32, 47)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(48, 32, dtype=torch.int8)

    edit_weights(folder, spoil)
    text = refused(folder, "do not match config.json")
    assert "2 missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight" in text
    assert "1 unexpected: model.layers.7.mlp.up_proj.weight" in text
    assert "model.layers.0.mlp.down_proj.weight is (32, 47), but the model needs (32, 48)" in text
    assert "1 of a dtype that does not fit its quantization_config" in text
    assert "model.layers.0.mlp.up_proj.weight is I8" in text


DIFFERS = r"lm_head\.weight differs from model\.embed_tokens\.weight.*tie_word_embeddings"


@pytest.mark.parametrize(
    ("written", "stated", "message"),
    [
        ({}, {"num_hidden_layers": 8}, "says num_hidden_layers=8, and the weights have 2 layers; use the"),
        (
            {"num_hidden_layers": 6},
            {"num_hidden_layers": 2},
            r"44 unexpected: .*model\.layers\.2\..* and 4 more",
        ),
        ({"attention_bias": True}, {"attention_bias": False}, r"8 unexpected: .*q_proj\.bias"),
        ({}, {"tie_word_embeddings": True}, DIFFERS),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, "1 missing: lm_head.weight"),
    ],
    ids=["too few layers", "a long list, which is cut", "a bias", "a head that differs", "no head"],
)
def test_weights_of_another_config_are_refused(
    tmp_path: Path, written: dict[str, Any], stated: dict[str, Any], message: str
) -> None:
    folder = write_tiny_model(tmp_path, **written)
    edit_json(folder / "config.json", **stated)
    refused(folder, message)


@pytest.mark.parametrize("keep", [0, 4, 100, -1000])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    folder = write_tiny_model(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, r"model\.safetensors cannot be read, is it complete\?")


def test_a_corrupt_or_absent_file_among_several_is_found_before_any_is_copied(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, max_shard_size="10KB")
    last = sorted(folder.glob("model-*.safetensors"))[-1]
    last.write_bytes(b"not safetensors at all")
    refused(folder, f"{last.name} cannot be read")
    last.unlink()
    refused(folder, f"names files that do not exist: {last.name}")


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, max_shard_size="10KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    last = folder / sorted(index["weight_map"].values())[-1]
    tensors = load_file(last)
    name, _ = tensors.popitem()
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, last)
    refused(folder, f"1 missing: {name}")
    edit_json(path, weight_map={})
    refused(folder, "has no weight_map")
    path.write_text("{")
    refused(folder, r"model\.safetensors\.index\.json cannot be read as JSON")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, max_shard_size="10KB")
    (folder / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": torch.ones(32)}, folder / "zzz.safetensors")
    refused(folder, r"zzz\.safetensors has tensors that model-.* has too: model\.norm\.weight")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    assert ".bin" not in refused(folder, r"holds no \*\.safetensors weights")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(
        folder, r"holds no \*\.safetensors weights; it has pytorch_model\.bin, which is not read: convert"
    )


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'.*nowhere' does not exist"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(
        ModelLoadError, match=r"no config\.json.* has adapter_config\.json, .* merge the adapter"
    ):
        load_model_config(tmp_path)
    for name in ("model.Q4_K_M.gguf", "model.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=r"no config\.json.* has model\.Q4_K_M\.gguf, which is not read"):
        load_model_config(tmp_path)
    for content in ("", '{"hidden_size": 3', "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(
            ModelLoadError, match=r"config\.json (cannot be read as JSON|must hold a JSON object)"
        ):
            load_model_config(tmp_path)


# -- dummy weights ------------------------------------------------------------------------------------------


def test_dummy_weights_depend_only_on_the_seed(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, hidden_size=64, vocab_size=500)
    (folder / "model.safetensors").unlink()
    models = [build(folder) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        init_dummy_weights(model, seed)
    states = [weights(model) for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    embedding = states[0]["model.embed_tokens.weight"]
    assert not torch.equal(embedding, states[2]["model.embed_tokens.weight"])
    assert abs(embedding.mean()) < 1e-3
    assert embedding.std() == pytest.approx(0.02, rel=0.02)
    assert (states[0]["model.norm.weight"] == 1).all()
    assert not torch.equal(
        states[0]["model.layers.0.mlp.down_proj.weight"], states[0]["model.layers.1.mlp.down_proj.weight"]
    )


def test_dummy_weights_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    whole, shards = build(folder), [build(folder, TPGroup(rank, 2)) for rank in range(2)]
    for model in (whole, *shards):
        init_dummy_weights(model, 7)
    down = torch.cat([shard.model.layers[1].mlp.down_proj.method.dense() for shard in shards], dim=1)
    assert torch.equal(down, whole.model.layers[1].mlp.down_proj.method.dense())
