"""`LLM` on a Ray cluster: `LLMPredictor` for `ray.data.Dataset.map_batches`, and `generate` in one call.

Each replica is an actor on the GPUs of one node. Ray Data reads, writes, applies backpressure, and restarts
actors that died, with their batches. Knows nothing of files, and keeps no row.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import xxhash

from nanovllm.answers import RequestOutput
from nanovllm.config import Config
from nanovllm.integrations.ray_batches import Column, open_batch
from nanovllm.llm import LLM
from nanovllm.params import SamplingParams

try:
    import ray
    from ray.data import ActorPoolStrategy, Dataset
    from ray.data.checkpoint import CheckpointConfig
except ImportError as error:
    raise ImportError(
        f"nanovllm.integrations.ray needs Ray Data; install it with: pip install 'nanovllm[ray]' ({error})"
    ) from error

OUTPUT_COLUMNS = (
    "generated_text",
    "generated_tokens",
    "num_input_tokens",
    "num_generated_tokens",
    "finish_reason",
    "error",
)


class LLMPredictor:
    """A replica: a class for `Dataset.map_batches`, which answers a column of prompts.

    Every row keeps its columns and gets those of `OUTPUT_COLUMNS`: the text, the token ids (with `n` above 1
    lists of both), numbers of tokens, `finish_reason`, and `error`: why the row has no answer, or "".

    With `batch_format="pyarrow"` all columns keep their types, values and nulls. With NumPy, the default of
    `map_batches`, they do not: integers beside a null become floats, dates become times, zones are lost.
    """

    def __init__(
        self,
        model: str,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_column: str = "prompt",
        messages_column: str | None = None,
        id_column: str | None = None,
        **options: Any,
    ) -> None:
        """Load the model.

        model: a folder that every node has, or a Hugging Face hub id.
        sampling_params: for every row; None takes `get_default_sampling_params()`.
        prompt_column: the column of strings, or lists of token ids. messages_column: the column of
        conversations, instead of prompts.
        id_column: the column of row ids. Without a `seed` in `sampling_params`, a row's seed derives from the
        value of its id, so that its answer does not depend on the replica, the batch, its format or retries.
        Without ids each replica has its own seed, unless `seed` is among the options.
        options: those of `LLM`.

        Raises the errors of `LLM`, and TypeError for wrong sampling parameters.
        """
        _check_params(sampling_params)
        self._prompts = prompt_column
        self._messages = messages_column
        self._ids = id_column
        self.llm = LLM(model, **{"seed": secrets.randbits(31)} | options)
        given = sampling_params or self.llm.get_default_sampling_params()
        self._params = given.clone()

    def __call__(self, batch: Any) -> Any:
        """Answer a dictionary of NumPy arrays, a pandas DataFrame or an Arrow table; return the same kind.

        ValueError for a column that is missing or would be lost, and for ids that the batch may have rounded.
        """
        opened = open_batch(batch)
        asked = self._prompts if self._messages is None else self._messages
        for name in filter(None, (asked, self._ids)):
            if name not in opened.names:
                raise ValueError(f"there is no column {name!r}; the columns are {', '.join(opened.names)}")
        lost = [name for name in OUTPUT_COLUMNS if name in opened.names]
        if lost:
            raise ValueError(f"the dataset has a column {lost[0]!r}, which the answers need; rename it")
        params = self._params if self._ids is None else [self._seeded(each) for each in opened.ids(self._ids)]
        rows = [self._row(value) for value in opened.values(asked)]
        answer = self.llm.generate if self._messages is None else self.llm.chat
        outputs = answer(rows, params, use_tqdm=False, on_error="return") if rows else []
        return opened.extended(self._columns(outputs))

    def _row(self, value: Any) -> Any:
        """A value in a form that is one prompt or conversation, even at the start of a batch."""
        if self._messages is not None:
            return [value] if isinstance(value, Mapping) else value
        is_one = value is None or isinstance(value, (str, bytes, list, Mapping))
        return value if is_one else {"prompt_token_ids": value}

    def _seeded(self, row_id: str) -> SamplingParams:
        if self._params.seed is not None:
            return self._params
        params = self._params.clone()
        params.seed = xxhash.xxh3_64_intdigest(row_id.encode(errors="surrogatepass")) >> 1
        return params

    def _columns(self, outputs: list[RequestOutput]) -> dict[str, Column]:
        several = int(self._params.n > 1)

        def of_completions(name: str, kind: str, depth: int = 0) -> Column:
            rows = [[getattr(each, name) for each in output.outputs] for output in outputs]
            return Column(rows if several else [row[0] for row in rows], kind, depth + several)

        num_tokens = [sum(len(each.token_ids) for each in output.outputs) for output in outputs]
        return {
            "generated_text": of_completions("text", "string"),
            "generated_tokens": of_completions("token_ids", "int64", 1),
            "num_input_tokens": Column([len(output.prompt_token_ids) for output in outputs], "int64"),
            "num_generated_tokens": Column(num_tokens, "int64"),
            "finish_reason": of_completions("finish_reason", "string"),
            "error": Column([output.error or "" for output in outputs], "string"),
        }


def generate(
    dataset: Dataset,
    model: str,
    sampling_params: SamplingParams | None = None,
    *,
    replicas: int | tuple[int, int] = 1,
    batch_size: int = 1024,
    checkpoint_path: str | None = None,
    ray_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Return the dataset with an answer to each row; nothing runs before it is read or written.

    replicas: the number of replicas, or the minimum and maximum that Ray may start. Each replica uses
    `tensor_parallel_size` * `data_parallel_size` GPUs of one node, or none with `device="cpu"`.
    batch_size: the rows of a call. Larger batches use a replica better, but if a replica dies, its whole
    batch runs again.
    checkpoint_path: a folder that all nodes share, or a path in an object store. There Ray Data records the
    ids of rows that `write_parquet` or a similar call has written; a second run of the same pipeline skips
    them, even after a complete run; delete the folder to answer all rows again. Needs `id_column`, and a
    dataset that begins with a `read_...` of files.
    ray_args: further arguments of `Dataset.map_batches`. `num_cpus` is what a replica takes of Ray's CPUs: 1
    by default, or less if the two CPUs that Ray needs beside it for a checkpoint would not be left.
    options: those of `LLMPredictor` and `LLM`.

    The arguments stay as they are, and later changes to them have no effect. TypeError or ValueError for
    wrong options, and for a `num_cpus` that leaves too few CPUs for the checkpoint, before anything runs.
    """
    _check_params(sampling_params)
    own = ("prompt_column", "messages_column", "id_column")
    config = Config.from_kwargs(model, **{name: options[name] for name in options if name not in own})
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer of at least 1, not {batch_size!r}")
    id_column = options.get("id_column")
    if checkpoint_path is not None and id_column is None:
        raise ValueError(f"checkpoint_path={checkpoint_path!r} needs id_column, the column of row ids")
    least, most = replicas if isinstance(replicas, tuple) else (replicas, replicas)
    num_gpus = 0 if config.device == "cpu" else config.tensor_parallel_size * config.data_parallel_size
    compute = ActorPoolStrategy(min_size=least, max_size=most)
    # Arrow alone keeps types and nulls: NumPy makes integers beside a null floats, for example.
    given: dict[str, Any] = {"num_gpus": num_gpus, "batch_format": "pyarrow"} | dict(ray_args or {})
    if checkpoint_path is not None:
        given["num_cpus"] = _cpus_of_replica(least, given.get("num_cpus"))
    answered = dataset.map_batches(
        LLMPredictor,
        fn_constructor_args=(model, deepcopy(sampling_params)),
        fn_constructor_kwargs=deepcopy(options),
        batch_size=batch_size,
        compute=compute,
        udf_modifying_row_count=False,
        **given,
    )
    if checkpoint_path is not None:
        # Datasets share the context of the one that they come from; this one gets its own.
        answered = Dataset.copy(answered, _deep_copy=True)
        # By default Ray deletes it after a complete run, and the next run writes all rows once more.
        checkpoint = CheckpointConfig(id_column, checkpoint_path, delete_checkpoint_on_success=False)
        answered.context.checkpoint_config = checkpoint
    return answered


def _cpus_of_replica(replicas: int, asked: float | None) -> float:
    """The share of Ray's CPUs that a replica of a pipeline with a checkpoint takes; None asks for at most 1.

    Replicas keep their CPUs to the end. If they leave fewer than two, one to read rows and one for Ray's
    actor that skips the rows of the checkpoint, the pipeline never starts: ValueError.
    """
    total = ray.cluster_resources().get("CPU", 0.0) if ray.is_initialized() else 0.0
    if not total:  # not known yet
        return 1 if asked is None else asked
    cpus = max(0.0, min(1.0, (total - 2) / replicas)) if asked is None else asked
    if (needed := replicas * cpus + 2) > total:
        raise ValueError(
            f"the cluster has {total:g} CPUs, and a pipeline with checkpoint_path needs {needed:g}: one to "
            f"read rows, one to skip answered rows, and num_cpus={cpus:g} for each of {replicas} replicas; "
            + ("give Ray more CPUs" if asked is None else "leave num_cpus out of ray_args")
        )
    return cpus


def _check_params(params: object) -> None:
    if params is not None and not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be one SamplingParams for every row, or None, not {params!r}")
