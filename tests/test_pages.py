"""The pages for newcomers say what the code does: coming from vLLM, exactness, the environment, the API."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_docs import links, section

import nanovllm
from nanovllm import LLM, SamplingParams, StructuredOutputsParams, demo_model_path
from nanovllm.config import Config
from tools.site_docstrings import as_markdown
from tools.site_pages import PAGES, linked

ROOT = Path(__file__).parent.parent
VLLM = (ROOT / "docs/coming-from-vllm.md").read_text()
EXACTNESS = (ROOT / "docs/exactness.md").read_text()
ENVIRONMENT = (ROOT / "docs/environment.md").read_text()
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo_model_path(), device="cpu", kv_cache_memory_bytes=2**24) as llm:
        yield llm


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """The cells of the only table under a heading, by their first one."""
    lines = [line for line in section(text, heading).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]
    assert len({each[0] for each in cells}) == len(cells) > 0
    return {each[0]: each[1:] for each in cells}


def code_of(text: str) -> str:
    [code] = re.findall(r"```python\n(.*?)```", text, re.S)
    return code


# -- coming from vLLM ----------------------------------------------------------------------------------------


def test_a_script_of_vllm_runs_with_other_imports(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(code_of(VLLM).replace("path/to/Qwen3-0.6B", demo_model_path()), names)
    names["llm"].close()
    assert capsys.readouterr().out.startswith("Hello, my name is ")


def test_names_that_are_the_same_exist(llm: LLM) -> None:
    table = rows(VLLM, "The same")
    names = {kind: re.findall(r"`(\w+)`", cells[0]) for kind, cells in table.items()}
    [output] = llm.generate(["12 + 3 ="], GREEDY)
    owners = {
        "calls of `LLM`": llm,
        "the engine by hand": llm,
        "what is imported": nanovllm,
        "fields of `RequestOutput`": output,
        "fields of `CompletionOutput`": output.outputs[0],
    }
    assert set(names) == set(owners)
    for kind, owner in owners.items():
        assert [name for name in names[kind] if not hasattr(owner, name) and name != "LLMEngine"] == []
    assert nanovllm.LLMEngine is LLM


def default_length(llm: LLM) -> None:
    assert SamplingParams().max_tokens == 64


def unknown_names(llm: LLM) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        SamplingParams(max_tokns=3)
    with pytest.raises(TypeError, match="max_tokens"):
        SamplingParams(max_new_tokens=3)


def a_cpu(llm: LLM) -> None:
    assert llm.config.device == "cpu"


def replicas(llm: LLM) -> None:  # test_data_parallel.py runs them
    assert Config("model", data_parallel_size=2).data_parallel_size == 2


def bad_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="empty"):
        llm.generate(["12 + 3 =", ""], GREEDY)
    good, bad = llm.generate(["12 + 3 =", ""], GREEDY, on_error="return")
    assert good["text"] and "empty" in (bad.error or "")


def stream(llm: LLM) -> None:
    whole = [output["text"] for output in llm.stream(["12 + 3 ="], GREEDY)]
    parts = [output["text"] for output in llm.stream(["12 + 3 ="], GREEDY, deltas=True)]
    assert len(parts) > 1 and ["".join(parts)] == whole


def json_answers(llm: LLM) -> None:
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=30,
            structured_outputs=StructuredOutputsParams(json={"const": {"a": 1}}, **options),
        )
        for options in ({}, {"disable_any_whitespace": True}, {"disable_any_whitespace": False})
    ]
    texts = [output["text"] for output in llm.generate(["12"] * 3, params)]
    assert texts[0] == texts[1] == '{"a":1}' != texts[2]


def logits_processors(llm: LLM) -> None:
    def only(token: int) -> Callable[[Any, Any], Any]:
        def keep(ids: Any, logits: Any) -> Any:
            kept = logits[token].clone()
            logits[:] = float("-inf")
            logits[token] = kept
            return logits

        return keep

    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logits_processors=[only(9)])
    assert list(llm.generate(["12"], params)[0]["token_ids"]) == [9, 9, 9]


def sleep(llm: LLM) -> None:
    llm.sleep()
    assert llm.is_sleeping()
    llm.wake_up()


def score(llm: LLM) -> None:
    [one, other] = llm.score("12 + 3 =", [" 15", " 16"])
    assert one.logprob < 0 > other.logprob and len(one.token_ids) == len(one.logprobs)


def update_weights(llm: LLM) -> None:
    assert "state_dict" in (inspect.getdoc(LLM.update_weights) or "") or callable(llm.update_weights)
    with pytest.raises(ValueError, match="no_such_tensor"):
        llm.update_weights({"no_such_tensor": __import__("torch").zeros(1)})


def deterministic(llm: LLM) -> None:
    assert "deterministic" in {field.name for field in fields(Config)}


def random_numbers(llm: LLM) -> None:  # tests/cpu/kernels/test_random_bits.py; here that they are ours
    params = SamplingParams(temperature=2.0, max_tokens=8, seed=7)
    [one], [other] = llm.generate("Hello", params), llm.generate("Hello", params)
    assert one["token_ids"] == other["token_ids"]


def a_dictionary(llm: LLM) -> None:
    [output] = llm.generate(["12 + 3 ="], GREEDY)
    assert output["text"] == output.outputs[0].text and output["finish_reason"] in ("stop", "length")
    assert list(output["token_ids"]) == list(output.outputs[0].token_ids)


DIFFERENCES: dict[str, Callable[[LLM], None]] = {
    "default `max_tokens`": default_length,
    "unknown argument": unknown_names,
    "a CPU": a_cpu,
    "replicas": replicas,
    "bad prompts": bad_prompts,
    "`stream`": stream,
    "JSON answers": json_answers,
    "logits processors": logits_processors,
    "`sleep`": sleep,
    "`score`": score,
    "`update_weights`": update_weights,
    "`deterministic=True`": deterministic,
    "random numbers": random_numbers,
    "dictionary": a_dictionary,
}


def test_each_difference_is_tried() -> None:
    assert list(rows(VLLM, "What differs")) == list(DIFFERENCES)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_what_differs(llm: LLM, what: str) -> None:
    DIFFERENCES[what](llm)


def test_what_is_not_there_is_refused(llm: LLM) -> None:
    absent = rows(VLLM, "What is not there")
    assert {cells[0] for cells in absent.values()} == {"an error"}
    with pytest.raises(ImportError, match="stream"):
        nanovllm.AsyncLLMEngine  # noqa: B018
    with pytest.raises(ValueError, match="needs a model with a head"):
        llm.classify(["12"])
    for options in (
        {"enable_lora": True},
        {"speculative_config": {"method": "ngram"}},
        {"pipeline_parallel_size": 2},
    ):
        assert any(next(iter(options)) in what for what in absent)
        with pytest.raises(ValueError, match=next(iter(options))):
            LLM(demo_model_path(), **options)
    with pytest.raises(ValueError, match="lora_request"):
        llm.generate(["12"], GREEDY, lora_request=object())
    with pytest.raises(ValueError, match="multi_modal_data"):
        llm.generate([{"prompt": "12", "multi_modal_data": {"image": object()}}], GREEDY)


# -- exactness -----------------------------------------------------------------------------------------------


def test_each_claim_of_exactness_names_a_test_that_exists() -> None:
    tables = [line for line in EXACTNESS.splitlines() if line.startswith("| ") and "shown by" not in line]
    assert len(tables) > 20
    for line in tables:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", line.rsplit(" | ", 1)[1])
        assert named, line
        for file, test in named:
            text = (ROOT / file).read_text()
            assert not test or re.search(rf"^def {test}\(", text, re.M), (file, test)


def test_the_most_exact_engine_is_made() -> None:
    names: dict[str, Any] = {"LLM": LLM, "demo_model_path": demo_model_path}
    exec(code_of(EXACTNESS), names)
    with names["llm"] as llm:
        assert llm.config.dtype == "float32"


# -- environment ---------------------------------------------------------------------------------------------


LIBRARIES = r"(?:NANOVLLM|NCCL|TRANSFORMERS|TRITON|HF|OMP|CUDA|TORCH)_[A-Z0-9_]+"


def variables(text: str) -> set[str]:
    """The environment variables that a file reads: by `os.environ.get(NAME)`, or in a dictionary for it."""
    if "environ" not in text and "getenv" not in text:
        return set()
    found, named = set(), {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            named |= {ast.unparse(target): node.value.value for target in node.targets}
        if isinstance(node, ast.Constant) and re.fullmatch(LIBRARIES, str(node.value)):
            found.add(node.value)
    for name in re.findall(r"(?:environ\.get\(|environ\[|getenv\()([\w\"]+)", text):
        if name != "name":  # a loop over such a dictionary
            found.add(name.strip('"') if name[0] == '"' else named[name])
    return found


def test_variables_are_those_that_the_code_reads() -> None:
    read = {name for path in (ROOT / "nanovllm").rglob("*.py") for name in variables(path.read_text())}
    table = {
        name
        for cell in rows(ENVIRONMENT, "Variables that nanovllm reads")
        for name in re.findall(r"`(\w+)`", cell)
    }
    are_set = set(re.findall(r"`(\w+)` for itself", ENVIRONMENT))  # and not read
    assert are_set == {"TRANSFORMERS_VERBOSITY", "CUDA_VISIBLE_DEVICES"} and read == table | are_set
    package = (ROOT / "nanovllm").rglob("*.py")
    reads = r"(?:environ\.get\(|getenv\(|environ\[)\W*CUDA_VISIBLE_DEVICES"
    assert not any(re.search(reads, path.read_text()) for path in package)
    assert "`TRANSFORMERS_VERBOSITY` for itself" in ENVIRONMENT


def test_levels_of_logging() -> None:
    logger = logging.getLogger("nanovllm")
    level = logger.level
    try:
        exec(code_of(ENVIRONMENT))
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(level)
    loggers = [path.read_text() for path in (ROOT / "nanovllm").rglob("*.py")]
    named = {name for text in loggers for name in re.findall(r"getLogger\((.*?)\)", text)}
    assert named == {'"nanovllm"'} and not any(
        "addHandler" in text or "basicConfig" in text for text in loggers
    )


# -- the release ---------------------------------------------------------------------------------------------


def test_the_release_has_its_text_and_only_measured_figures() -> None:
    assert f"\n## {nanovllm.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    text = (ROOT / f"docs/releases/{nanovllm.__version__}.md").read_text()
    assert text.startswith(f"# nanovllm {nanovllm.__version__}\n")
    measured = set(re.findall(r"[\d,]+", (ROOT / "docs/benchmarks.md").read_text()))
    table = [line for line in text.splitlines() if line.startswith("| ")][1:]
    figures = {figure for line in table for figure in re.findall(r"\d+(?:,\d{3})*", line.split("|", 2)[2])}
    assert len(figures) >= 16 and figures <= measured
    for target in links(text):
        assert (ROOT / "docs/releases" / target).exists(), target


# -- the site ------------------------------------------------------------------------------------------------


def test_the_api_is_what_can_be_imported() -> None:
    text = (ROOT / "docs/api.md").read_text()
    shown = set(re.findall(r"^::: nanovllm\.(\w+)$", text, re.M)) - {"report"}
    assert shown | {"LLMEngine"} == set(nanovllm.__all__)


def test_every_page_is_in_the_site() -> None:
    def pages(nav: Any) -> Iterator[str]:
        for each in nav if isinstance(nav, list) else nav.values():
            yield from [each] if isinstance(each, str) else pages(each)

    # The notebooks' and mkdocstrings' entries are plain YAML.
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    found = list(pages(settings["nav"]))
    written = [f"{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").rglob("*.md")]
    shown = [page for page in written if not page.startswith("log/2")]
    made = [page for page in PAGES if not page.startswith("doors/")]
    assert sorted(found) == sorted([*shown, "tutorial.ipynb", *made])
    assert all((ROOT / source).exists() for source in PAGES.values())


def test_links_of_the_site() -> None:
    pages = {"options.md", "design.md", "log/README.md", "releases/0.1.0.md"}
    assert (
        linked("See `docs/options.md`, `x.py`.", "index.md", pages)
        == "See [`docs/options.md`](options.md), `x.py`."
    )
    assert linked("`README.md`", "log/README.md", pages) == "[`README.md`](../index.md)"
    assert linked("[a](../nanovllm/cpu/README.md)", "design.md", pages) == "[a](doors/cpu.md)"
    assert linked("[a](e8m0-drops-signs.sh)", "findings.md", pages) == "a"  # no page
    assert linked("[a](lost.md)", "design.md", pages) == "[a](lost.md)"  # mkdocs refuses it
    for text in (
        "[a](options.md#jobs)",
        "[a](#here)",
        "[a](https://example.org/x.md)",
        "[`docs/options.md`](x)",
    ):
        assert list(links(linked(text, "design.md", pages))) == list(links(text))


def test_docstrings_become_markdown() -> None:
    text = as_markdown(
        "A call.\n\nprompts, others: what it takes,\nin order.\nseed: 7\n\nErrors: none.\n\n>>> f()\n1"
    )
    assert text == (
        "A call.\n\n- `prompts, others`: what it takes,\n    in order.\n- `seed`: 7\n\n"
        "Errors: none.\n\n```python\n>>> f()\n1\n```"
    )
    listed = as_markdown(inspect.getdoc(SamplingParams) or "")
    assert len(re.findall(r"^- `\w+`: ", listed, re.M)) == len(fields(SamplingParams))
