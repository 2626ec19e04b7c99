"""What an import loads: no heavy module before it is needed. No test measures time."""

from __future__ import annotations

import os
import subprocess
import sys

# Importing one of these takes a tenth of torch's time or more.
HEAVY = ["transformers", "tokenizers", "huggingface_hub", "flash_attn", "IPython", "ipywidgets"]
BARS = ["tqdm.auto", "tqdm.notebook"]  # torch itself imports tqdm
TRITON = "([] if torch.backends.cuda.is_built() else ['triton'])"  # kernels are defined during the import


def loaded_by(code: str, modules: str) -> str:
    """Run `code` in a new process without the Triton interpreter; return which of `modules` it imported."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code += f"\nimport sys\nprint([name for name in {modules} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def test_an_llm_is_imported_with_torch_and_little_else() -> None:
    code = "from nanovllm import LLM\nimport torch, nanovllm.llm"
    assert loaded_by(code, f"{HEAVY + BARS} + {TRITON}") == "[]"


def test_the_package_alone_is_imported_without_torch() -> None:
    assert loaded_by("import nanovllm\nfrom nanovllm import SamplingParams", f"{['torch', *HEAVY]}") == "[]"


def test_rows_are_checked_without_torch() -> None:
    """Half a second, of which torch would take two."""
    code = (
        "import sys, tempfile, pathlib\n"
        "from nanovllm.jobs.main import main\n"
        "path = pathlib.Path(tempfile.mkdtemp(), 'rows.jsonl')\n"
        'path.write_text(\'{"prompt": "a"}\\n{\')\n'
        "assert main(['check', str(path)]) == 1"
    )
    assert loaded_by(code, f"{['torch', 'pyarrow', *HEAVY]}") == "[]"


def test_everything_is_imported_without_triton() -> None:
    """As with torch for CPUs and no extra; the tests of this project have it."""
    code = (
        "import sys, importlib, pkgutil, torch\n"
        "sys.modules['triton'] = None\n"
        "torch.backends.cuda.is_built = lambda: True\n"
        "import nanovllm\n"
        "others = ('flash_attn', 'integrations', 'cpu.kernels')  # they need other packages\n"
        "skipped = tuple(f'nanovllm.{each}' for each in others)\n"
        "for each in pkgutil.walk_packages(nanovllm.__path__, 'nanovllm.'):\n"
        "    each.name.startswith(skipped) or importlib.import_module(each.name)\n"
        "from nanovllm.kernels.compat import HAS_TRITON\n"
        "assert not HAS_TRITON"
    )
    assert loaded_by(code, "['triton.language']") == "[]"


def test_no_compiler_is_imported_with_all_kernels() -> None:
    """Those of CPUs too: a start that finds its kernels on the disk needs none."""
    code = (
        "import nanovllm, pkgutil, importlib\n"
        "import nanovllm.cpu.kernels as cpu\n"
        "import nanovllm.kernels as kernels\n"
        "compiling = ['vectors', 'emitting', 'vector_math', 'tiles', 'attention_tiles']\n"
        "compiling += ['int_vectors', 'int_numbers', 'matrices']\n"
        "names = [each.name for each in pkgutil.iter_modules(cpu.__path__)]\n"
        "for name in names:\n"
        "    name in compiling or importlib.import_module(f'nanovllm.cpu.kernels.{name}')\n"
        "for each in pkgutil.iter_modules(kernels.__path__):\n"
        "    importlib.import_module(f'nanovllm.kernels.{each.name}')\n"
        "assert {'rms_norm', 'team', *compiling} <= set(names)"
    )
    assert loaded_by(code, "['numba', 'llvmlite']") == "[]"


def test_a_bar_is_imported_where_one_is_shown() -> None:
    assert loaded_by("import nanovllm.stats.progress", "['tqdm']") == "[]"


def test_an_engine_of_token_ids_needs_no_tokenizers_and_no_bar() -> None:
    code = (
        "import nanovllm, torch\n"
        "options = dict(device='cpu', skip_tokenizer_init=True, num_kvcache_blocks=8)\n"
        "with nanovllm.LLM(nanovllm.demo_model_path(), **options) as llm:\n"
        "    llm.generate([[5], [6]], nanovllm.SamplingParams(max_tokens=2), use_tqdm=False)"
    )
    assert loaded_by(code, f"{HEAVY + BARS} + {TRITON}") == "[]"


def test_a_plain_prompt_needs_no_extras() -> None:
    names = ("params", "texts", "token_rules", "structured", "stop_strings", "least_tokens")
    modules = [f"nanovllm.extras.{name}" for name in names]
    run = (
        "import nanovllm, sys\n"
        "with nanovllm.LLM(nanovllm.demo_model_path(), device='cpu', num_kvcache_blocks=8) as llm:\n"
        "    llm.generate(['1 + 1 ='], nanovllm.SamplingParams(max_tokens=2), use_tqdm=False)\n"
        f"    assert not sys.modules.keys() & set({modules}), 'a plain prompt needs them'\n"
        "    llm.generate(['1 + 1 ='], nanovllm.SamplingParams(max_tokens=2, min_tokens=1), use_tqdm=False)"
    )
    assert loaded_by(run, f"{modules}") == f"{modules}"
