"""Ray Data on a local cluster of two replicas, one of which is killed; every row is answered once."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm import SamplingParams, demo_model_path

pytest.importorskip("ray.data", reason="needs Ray Data: pip install -e '.[ray]'")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
import torch
from arrow_columns import every_type
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm.integrations.ray import OUTPUT_COLUMNS, LLMPredictor, generate

CPU: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 200}
PROMPTS = [f"Spell {'KEY' * (1 + index % 3)}{chr(65 + index)}." for index in range(16)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # its sockets need a short path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the actors import this file
        options = {"object_store_memory": 2**27, "_temp_dir": folder, "_node_ip_address": "127.0.0.1"}
        ray.init(num_cpus=2, include_dashboard=False, **options)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def plain(value: Any) -> Any:
    """A value of a row that Ray returns, without NumPy."""
    if isinstance(value, (list, np.ndarray)):
        return [plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


class Killed(LLMPredictor):
    """A replica whose process is killed in the middle of a batch, the first time that the batch contains row
    5.
    """

    def __init__(self, *args: Any, marker: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._marker = Path(marker)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        answered = super().__call__(batch)
        if 5 in batch["id"] and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return answered | {"pid": [os.getpid()] * len(batch["id"])}


@pytest.mark.usefixtures("cluster")
def test_every_row_is_answered_once_although_a_replica_is_killed(tmp_path: Path) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    marker = tmp_path / "killed"
    rows = [{"id": index, "prompt": prompt} for index, prompt in enumerate(PROMPTS)]
    dataset = ray.data.from_items(rows, override_num_blocks=4).map_batches(
        Killed,
        fn_constructor_args=(demo_model_path(), params),
        fn_constructor_kwargs={"marker": str(marker), "id_column": "id", **CPU},
        batch_size=2,
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    answers = dataset.take_all()
    assert marker.exists()
    assert sorted(answer["id"] for answer in answers) == list(range(len(rows)))
    assert all(answer["prompt"] == PROMPTS[answer["id"]] and not answer["error"] for answer in answers)
    assert len({answer["pid"] for answer in answers}) >= 2
    # Seeds follow from the ids, so answers are the same without a cluster.
    alone = LLMPredictor(demo_model_path(), params, id_column="id", **CPU)
    expected = alone({"id": range(len(rows)), "prompt": PROMPTS})["generated_tokens"]  # type: ignore[dict-item]
    alone.llm.close()
    answers.sort(key=lambda answer: answer["id"])
    assert [list(answer["generated_tokens"]) for answer in answers] == list(expected)


@pytest.mark.usefixtures("cluster")
def test_the_lines_of_the_readme_answer_every_row_once_in_several_runs(tmp_path: Path) -> None:
    """Only paths, sizes and the device are others. A run answers what the input has gained, if anything.

    The cluster has 2 CPUs: one reads rows and one skips answered rows, so none is left for the replicas.
    """
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    [code] = re.findall(r"```py\n(import ray\n.*?)```", readme, re.S)
    for shown, used, times in [
        ('"s3://bucket/', f'"{tmp_path}/', 3),
        ('"path/to/Qwen3-0.6B"', repr(demo_model_path()), 1),
        ("max_tokens=256", "max_tokens=20", 1),
        ("replicas=8", 'replicas=2, batch_size=5, device="cpu", num_kvcache_blocks=200', 1),
    ]:
        assert code.count(shown) == times
        code = code.replace(shown, used)
    rows = [{"id": f"r{index:02}", "prompt": prompt, "n": index} for index, prompt in enumerate(PROMPTS)]
    rows[3]["prompt"] = ""
    (tmp_path / "prompts").mkdir()
    for some in (rows[:12], rows[12:], []):
        if some:
            pq.write_table(pa.Table.from_pylist(some), tmp_path / f"prompts/{len(some)}.parquet")
        faulthandler.dump_traceback_later(
            300, exit=True
        )  # Ray waits without end for a CPU that it never gets
        exec(code, {})
        faulthandler.cancel_dump_traceback_later()
    answers = pq.read_table(tmp_path / "answers").sort_by("id").to_pylist()
    params = SamplingParams(temperature=0.6, max_tokens=20)
    alone = LLMPredictor(demo_model_path(), params, id_column="id", **CPU)
    expected = alone({name: np.array([row[name] for row in rows], object) for name in rows[0]})
    alone.llm.close()
    assert answers == [
        {name: column[index] for name, column in expected.items()} for index in range(len(rows))
    ]
    assert [answer["n"] for answer in answers if answer["error"]] == [3]


@pytest.mark.usefixtures("cluster")
def test_columns_of_every_type_stay_as_they_are(tmp_path: Path) -> None:
    """In several blocks and batches, from memory and from Parquet files."""
    table = every_type(4).drop_columns(["string_view"])  # Ray refuses it
    ids = pa.array([None if index % 5 == 4 else 2**53 + index for index in range(12)])
    table = table.append_column("id", ids).append_column("prompt", pa.array(PROMPTS[:12]))
    table = table.append_column("number", pa.array(range(12)))
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=4)
    stored = pq.read_table(tmp_path / "in.parquet")
    params = SamplingParams(temperature=1.5, max_tokens=6, ignore_eos=True)
    options = {"id_column": "id", "batch_size": 5, **CPU}
    for dataset, given in (
        (ray.data.from_arrow([table.slice(0, 7), table.slice(7)]), table),
        (ray.data.read_parquet(str(tmp_path / "in.parquet")), stored),
    ):
        answers = generate(dataset, demo_model_path(), params, **options)
        found = pa.concat_tables(ray.get(answers.to_arrow_refs()))
        found = found.take(pc.sort_indices(found, [("number", "ascending")]))
        kept = found.select(given.schema.names)
        for field in given.schema:
            assert kept.schema.field(field.name).type == field.type
            assert kept.column(field.name).combine_chunks() == given.column(field.name).combine_chunks()
        alone = LLMPredictor(demo_model_path(), params, id_column="id", **CPU)
        for index in (0, 3, 4):  # the seed of a row is that of its own id, which no other row changes
            [tokens] = alone(table.slice(index, 1))["generated_tokens"].to_pylist()
            assert found["generated_tokens"][index].as_py() == tokens
        alone.llm.close()


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("batch_format", ["numpy", "pandas", "pyarrow"])
def test_answers_are_the_same_in_every_kind_of_batch(batch_format: str) -> None:
    rows = [{"id": index if index % 3 else None, "prompt": prompt} for index, prompt in enumerate(PROMPTS)]
    params = SamplingParams(temperature=1.5, max_tokens=8, n=2)
    answers = ray.data.from_items(rows, override_num_blocks=2).map_batches(
        LLMPredictor,
        fn_constructor_args=(demo_model_path(), params),
        fn_constructor_kwargs={"id_column": "id", **CPU},
        batch_size=3,
        batch_format=batch_format,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    found = {answer["prompt"]: answer for answer in answers.take_all()}
    alone = LLMPredictor(demo_model_path(), params, id_column="id", **CPU)
    for row in alone(pa.Table.from_pylist(rows)).to_pylist():
        answer = found[row["prompt"]]
        assert [*answer] == [*row] and answer["generated_text"] is not None
        assert all(plain(answer[name]) == row[name] for name in OUTPUT_COLUMNS)
    alone.llm.close()


@pytest.mark.usefixtures("cluster")
def test_greedy_answers_are_those_of_transformers() -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    rows = [{"id": index, "prompt": prompt} for index, prompt in enumerate(PROMPTS)]
    params = SamplingParams(temperature=0, max_tokens=20)
    options = {"id_column": "id", "replicas": 1, "batch_size": 5, "dtype": "float32", **CPU}
    answers = generate(ray.data.from_items(rows), demo_model_path(), params, **options).take_all()
    assert sorted(answer["id"] for answer in answers) == list(range(len(rows)))
    for answer in answers:
        ids = tokenizer(answer["prompt"], return_tensors="pt")
        with torch.inference_mode():
            expected = model.generate(**ids, do_sample=False, max_new_tokens=20)[0, ids.input_ids.shape[1] :]
        assert list(answer["generated_tokens"]) == expected.tolist()
        assert answer["generated_text"] == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.usefixtures("cluster")
def test_what_a_caller_hands_over_stays_as_it_is(tmp_path: Path) -> None:
    """Two pipelines on one input do not see each other, and the input can be written without either."""
    pq.write_table(
        pa.Table.from_pylist([{"id": i, "prompt": "A"} for i in range(40)]), tmp_path / "p.parquet"
    )
    dataset = ray.data.read_parquet(str(tmp_path / "p.parquet"))
    before = dataset.context
    params, ray_args, overrides = SamplingParams(stop=["a"]), {"resources": {}}, {"rope_theta": 1e5}
    pipelines = []
    for name in ("one", "other"):
        options = {"id_column": "id", "hf_overrides": overrides, "ray_args": ray_args, **CPU}
        path = str(tmp_path / name)
        pipelines.append(generate(dataset, demo_model_path(), params, checkpoint_path=path, **options))
        params.stop.append("b")  # for the next pipeline
        overrides["rope_theta"] = 1e6
    assert dataset.context is before and before.checkpoint_config is None
    assert ray.data.DataContext.get_current().checkpoint_config is None
    assert ray_args == {"resources": {}}
    paths = [each.context.checkpoint_config.checkpoint_path for each in pipelines]
    assert paths == [str(tmp_path / "one"), str(tmp_path / "other")]
    maps = [each._logical_plan.dag for each in pipelines]
    assert [each.fn_constructor_args[1].stop for each in maps] == [["a"], ["a", "b"]]
    assert [each.fn_constructor_kwargs["hf_overrides"]["rope_theta"] for each in maps] == [1e5, 1e6]
    dataset.write_parquet(str(tmp_path / "copy"))
    assert pq.read_table(tmp_path / "copy").num_rows == 40
    assert not (tmp_path / "one").exists() and not (tmp_path / "other").exists()


@pytest.mark.usefixtures("cluster")
def test_replicas_that_leave_no_cpu_for_the_checkpoint_are_refused() -> None:
    dataset = ray.data.range(1)
    options = {"id_column": "id", "checkpoint_path": "/tmp/checkpoint", **CPU}
    with pytest.raises(
        ValueError, match=r"has 2 CPUs, .* needs 3: .*num_cpus=0.5 for each of 2 replicas; leave"
    ):
        generate(dataset, demo_model_path(), replicas=2, ray_args={"num_cpus": 0.5}, **options)
    for asked, taken in (({}, 0), ({"num_cpus": 0}, 0)):
        answers = generate(dataset, demo_model_path(), ray_args=asked, **options)
        assert answers._logical_plan.dag.ray_remote_args["num_cpus"] == taken
    with pytest.raises(ValueError, match="min_size"):
        generate(dataset, demo_model_path(), replicas=0, **options)


def test_columns_without_a_cluster() -> None:
    """Conversations, token ids and several completions; missing columns and columns that already exist."""
    chats = np.empty(2, object)
    chats[:] = [np.array([{"role": "user", "content": f"Spell {word}."}]) for word in ("AB", "CDE")]
    several = SamplingParams(n=2, temperature=1.0, max_tokens=20, seed=3)
    predictor = LLMPredictor(demo_model_path(), several, messages_column="chat", id_column="id", **CPU)
    answered = predictor({"chat": chats, "id": np.arange(2)})
    assert set(answered) == {"chat", "id", *OUTPUT_COLUMNS}
    assert [list(texts) for texts in answered["generated_text"]] == [["A-B"] * 2, ["C-D-E"] * 2]
    with pytest.raises(ValueError, match="no column 'chat'; the columns are id, text"):
        predictor({"id": np.arange(1), "text": chats[:1]})
    with pytest.raises(ValueError, match="has a column 'error'"):
        predictor({"id": np.arange(1), "chat": chats[:1], "error": chats[:1]})
    message = {"role": "user", "content": "Spell AB."}
    answered = predictor({"chat": np.array([message, message]), "id": np.arange(2)})
    assert [list(texts) for texts in answered["generated_text"]] == [["A-B"] * 2] * 2
    output = predictor.llm.chat([message], several, use_tqdm=False)[0]
    assert answered["num_input_tokens"][0] == len(output.prompt_token_ids)
    assert answered["num_generated_tokens"][0] == sum(len(each.token_ids) for each in output.outputs)
    assert answered["finish_reason"][0] == [each.finish_reason for each in output.outputs]
    predictor.llm.close()
    plain = LLMPredictor(demo_model_path(), None, **CPU)
    answered = plain({"prompt": np.array([np.nan, "Spell AB."], object)})
    assert "prompts[0]" in answered["error"][0] and list(answered["error"])[1] == ""
    assert all(plain({"prompt": np.array([5, 6])})["error"]), "a number is no prompt"
    answered = plain({"prompt": np.array([[5, 6, 7], [8, 9, 10]])})
    assert [len(ids) for ids in answered["generated_tokens"]] == list(answered["num_generated_tokens"])
    plain.llm.close()


def test_wrong_options_are_found_before_anything_runs() -> None:
    for error, options, text in [
        (TypeError, {"sampling_params": {"n": 2}}, "sampling_params must be one SamplingParams"),
        (TypeError, {"max_seqs": 3}, "max_num_seqs"),
        (ValueError, {"batch_size": 0}, "batch_size must be an integer of at least 1"),
        (ValueError, {"checkpoint_path": "/x"}, "needs id_column"),
    ]:
        with pytest.raises(error, match=text):
            generate(None, demo_model_path(), **options)
