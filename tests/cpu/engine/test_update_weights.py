"""update_weights gives the same bits as a fresh load of the new tensors; a refused update changes nothing."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import BLOCK, logits_of
from digests import Digest, DigestLLM, digest, make_digest
from safetensors.torch import load_file, save_file
from test_loader import build
from tiny_models import FAMILIES, VOCAB_SIZE, write_tiny_model

from nanovllm import EngineClosedError, SamplingParams, WorkerError
from nanovllm.models.weights import load_weights
from nanovllm.parallel.group import TPGroup
from nanovllm.residency import shared_tensors

Tensors = dict[str, torch.Tensor]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[random.Random(n).randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (3 * BLOCK + 2, BLOCK, 5)]
NORM = "model.layers.1.post_attention_layernorm.weight"
PRODUCTS = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def checkpoints(tmp_path: Path, family: str, **settings: Any) -> tuple[Path, Path]:
    first, second = (write_tiny_model(tmp_path / str(i), family, seed=i, **settings) for i in range(2))
    return first, second


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def fresh(folder: Path, tensors: Tensors, ranks: int = 1) -> list[Digest]:
    """The weights of every rank after a fresh load of the checkpoint in `folder` with `tensors`."""
    save_file(tensors, folder / "model.safetensors")
    digests = []
    for rank in range(ranks):
        model = build(folder, TPGroup(rank, ranks))
        load_weights(model, folder)
        digests.append(digest(model))
    return digests


def answers(llm: DigestLLM) -> tuple[torch.Tensor, list[list[int]]]:
    llm.reset_prefix_cache()
    logits, _ = logits_of(llm, PROMPTS, [GREEDY] * len(PROMPTS), 0)
    return logits, [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


# -- what is loaded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in every accepted form, and in dtypes that need conversion."""
    tied = family in ("qwen3", "llama")
    first, second = checkpoints(tmp_path, family, tie_word_embeddings=tied)
    old, new = tensors_of(first), tensors_of(second)
    wanted = {"old": fresh(first, old, ranks), "new": fresh(second, new, ranks)}
    low = {name: tensor.bfloat16() for name, tensor in new.items()}
    wanted["low"] = fresh(second, low, ranks)
    with make_digest(second) as llm:
        expected = answers(llm)
    monkeypatch.setattr(shared_tensors, "BUFFER_BYTES", 5000)  # several in one, some exceed it
    with make_digest(first, tensor_parallel_size=ranks) as llm:
        before = answers(llm)
        ways = (
            ("low", low),
            ("new", [(name, tensor.double()) for name, tensor in new.items()]),
            ("old", ((name, tensor.clone().requires_grad_()) for name, tensor in reversed(old.items()))),
            ("low", (pair for pair in low.items())),
            ("old", old.items()),
        )
        for name, tensors in ways:
            llm.update_weights(tensors)
            assert llm.on_ranks("digest") == wanted[name]
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
        again = answers(llm)
        assert torch.equal(again[0], before[0]) and again[1] == before[1]
        if ranks == 1:
            llm.update_weights(low)
            updated = answers(llm)
            assert torch.equal(updated[0], expected[0]) and updated[1] == expected[1] != before[1]


def test_any_of_the_tensors_any_number_of_times(tmp_path: Path) -> None:
    first, second = checkpoints(tmp_path, "qwen3")
    sources = [tensors_of(first), tensors_of(second)]
    rng = random.Random(11)
    with make_digest(first) as llm:
        now = dict(sources[0])
        for _ in range(40):
            names = rng.sample(sorted(now), rng.choice([1, 2, 3, 10, len(now)]))
            tensors = {name: sources[rng.randrange(2)][name] for name in names}
            llm.update_weights(tensors if rng.randrange(2) else iter(tensors.items()))
            now |= tensors
            if rng.randrange(8) == 0:
                llm.sleep(2)
                llm.wake_up()
                now = dict(sources[0])
            assert llm.on_ranks("digest") == fresh(second, now)


@pytest.mark.parametrize("blocks", [2, 100])
def test_scales_of_an_fp8_cache_are_a_fresh_loads(tmp_path: Path, blocks: int) -> None:
    """With a KV cache that fits the calibration, one that does not, and one that sleeps."""
    first, second = checkpoints(tmp_path, "qwen3")
    options = {"kv_cache_dtype": "fp8", "num_kvcache_blocks": blocks, "max_model_len": BLOCK * 5}
    options["max_model_len"] = min(BLOCK * 5, BLOCK * blocks)
    prompt = PROMPTS[1]
    with make_digest(second, **options) as llm:
        wanted, logits = llm.on_ranks("digest"), logits_of(llm, [prompt], [GREEDY], 0)[0]
    with make_digest(first, **options) as llm:
        addresses = [layer.cache.k_scale.data_ptr() for layer in inside.model(llm).attention_layers]
        cache = inside.runner(llm).kv_cache.data_ptr()
        before = llm.on_ranks("digest")
        llm.update_weights(tensors_of(second))
        assert llm.on_ranks("digest") == wanted
        assert torch.equal(logits_of(llm, [prompt], [GREEDY], 0)[0], logits)
        assert [layer.cache.k_scale.data_ptr() for layer in inside.model(llm).attention_layers] == addresses
        assert inside.runner(llm).kv_cache.data_ptr() == cache
        llm.sleep(2)
        llm.wake_up(["weights"])
        assert llm.on_ranks("digest") == before
        llm.update_weights(tensors_of(second))
        llm.wake_up()
        assert llm.on_ranks("digest") == wanted
        assert torch.equal(logits_of(llm, [prompt], [GREEDY], 0)[0], logits)


def test_weights_stay_where_cuda_graphs_look_for_them(tmp_path: Path) -> None:
    first, second = checkpoints(tmp_path, "qwen2")
    with make_digest(first) as llm:
        addresses = [parameter.data_ptr() for parameter in inside.model(llm).parameters()]
        llm.update_weights(tensors_of(second))
        assert [parameter.data_ptr() for parameter in inside.model(llm).parameters()] == addresses


# -- what is refused ----------------------------------------------------------------------------------------


class Sharded(torch.Tensor):
    """Like a DTensor: only a part of the tensor is here."""

    def full_tensor(self) -> torch.Tensor:
        return torch.ones(32)


@pytest.fixture(scope="module", params=[1, 2])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DigestLLM]:
    """An LLM of a model with a tied head."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)
    with make_digest(folder, tensor_parallel_size=request.param) as llm:
        yield llm


FINAL = "model.norm.weight"
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown": (
        {"model.layers.7.mlp.up_proj.weight": torch.ones(48, 32)},
        ValueError,
        "no tensor 'model.layers.7",
    ),
    "near": ({"model.norms.weight": torch.ones(32)}, ValueError, "did you mean 'model.norm.weight'"),
    "packed": ({"model.layers.0.mlp.gate_up_proj.weight": torch.ones(96, 32)}, ValueError, "no tensor"),
    "shape": ({FINAL: torch.ones(33)}, ValueError, r"model.norm.weight has shape \(33,\), .* needs \(32,\)"),
    "transposed": ({PRODUCTS[0]: torch.ones(32, 48)}, ValueError, r"shape \(32, 48\), .* needs \(48, 32\)"),
    "integers": (
        {FINAL: torch.ones(32, dtype=torch.int32)},
        ValueError,
        "norm.weight is torch.int32; pass it as",
    ),
    "quantized": (
        {FINAL: torch.quantize_per_tensor(torch.ones(32), 1.0, 0, torch.qint8)},
        ValueError,
        "norm.weight is torch.qint8; pass it as bfloat16, float16, float32 or float64",
    ),
    "float8": ({FINAL: torch.ones(32).to(torch.float8_e4m3fn)}, ValueError, "float8_e4m3fn; pass it as"),
    "meta": ({FINAL: torch.ones(32, device="meta")}, ValueError, "on meta; pass a whole, dense"),
    "sparse": (
        {FINAL: torch.ones(32).to_sparse()},
        ValueError,
        "torch.sparse_coo on cpu; pass a whole, dense",
    ),
    "sharded": ({FINAL: torch.ones(32).as_subclass(Sharded)}, ValueError, r"a Sharded of .* full_tensor\(\)"),
    "twice": ([(FINAL, torch.ones(32)), (FINAL, torch.ones(32))], ValueError, "comes twice"),
    "no tensor": ({FINAL: [1.0] * 32}, TypeError, "model.norm.weight must be a torch.Tensor, not list"),
    "no pairs": ([torch.ones(32)], TypeError, r"element 0 .* must be \(name, tensor\), not Tensor"),
    "names": (["ab"], TypeError, r"element 0 .* must be \(name, tensor\), not str"),
    "no name": ([(3, torch.ones(32))], TypeError, r"element 0 .* must be \(name, tensor\), not tuple"),
    "nothing": (None, TypeError, "must be a dict or pairs .*, not NoneType"),
    "tied": (
        {EMBEDDING: torch.ones(97, 32), HEAD: torch.zeros(97, 32)},
        ValueError,
        "lm_head.* differs from",
    ),
    "head alone": (
        {HEAD: torch.ones(97, 32)},
        ValueError,
        "lm_head.weight is model.embed_tokens.weight in this",
    ),
    "head's shape": ({HEAD: torch.ones(97, 31)}, ValueError, r"lm_head.weight has shape \(97, 31\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_tensor_changes_nothing(llm: DigestLLM, name: str) -> None:
    tensors, error, message = BAD[name]
    before = llm.on_ranks("digest")
    good = {"model.layers.0.input_layernorm.weight": torch.full((32,), 3.0)}
    if isinstance(tensors, dict):
        tensors = good | tensors
    elif tensors is not None:
        tensors = [*good.items(), *tensors]
        message = message.replace("element 0", "element 1")
    with pytest.raises(error, match=message):
        llm.update_weights(tensors)
    assert llm.on_ranks("digest") == before
    assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == len(PROMPTS)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_tensors_before_an_error_of_the_iterable_are_loaded(
    llm: DigestLLM, error: type[BaseException]
) -> None:
    random_values = torch.Generator().manual_seed(len(error.__name__))
    product, norm = torch.randn(48, 32, generator=random_values), torch.randn(32, generator=random_values)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield PRODUCTS[0], product
        yield FINAL, norm
        if error is KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)
        yield PRODUCTS[1], torch.ones(1)

    with pytest.raises(error):
        llm.update_weights(broken())
    before = llm.on_ranks("digest")
    llm.update_weights({PRODUCTS[0]: product, FINAL: norm})
    assert llm.on_ranks("digest") == before
    assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == len(PROMPTS)


def test_head_and_embedding_may_both_be_updated(llm: DigestLLM) -> None:
    """As in `state_dict`, in either order."""
    both = torch.randn(97, 32)
    for names in ((EMBEDDING, HEAD), (HEAD, EMBEDDING)):
        llm.update_weights((name, both.clone()) for name in names)
        assert torch.equal(inside.model(llm).lm_head.method.dense()[:48], both[:48])
        both = both + 1
    # A checkpoint load ignores it too.
    llm.update_weights({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})


def test_an_update_is_refused_while_weights_sleep(llm: DigestLLM) -> None:
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up(["kv_cache"])
        with pytest.raises(
            RuntimeError, match=r"sleeps \(weights\); call wake_up\(\) first.* tags=\['weights'\]"
        ):
            llm.update_weights({FINAL: torch.ones(32)})
        llm.wake_up()
    llm.update_weights({FINAL: torch.ones(32)})


def test_a_worker_that_dies_ends_the_engine(tmp_path: Path) -> None:
    llm = make_digest(write_tiny_model(tmp_path), tensor_parallel_size=2)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield FINAL, torch.ones(32)
        pid = inside.workers(llm).watch.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        yield PRODUCTS[0], torch.ones(48, 32)

    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        llm.update_weights(tensors())
    with pytest.raises(EngineClosedError):
        llm.is_finished()
