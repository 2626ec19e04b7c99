# `make fast` before each commit; `make ci` before a merge. PYTHON is an environment with the extra `test`.
PYTHON ?= python

.PHONY: fast style types quick format test ci site

fast:  ## what finds most mistakes: at most a minute on two cores
	@$(MAKE) --no-print-directory -j2 --output-sync=target types quick style

style:  ## format and lint
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

quick:  ## plans, the rules of the code, the documents
	$(PYTHON) -m pytest -q -n 2 --dist loadfile tests/plan tests/test_architecture.py tests/test_docs.py

format:  ## change files to the style
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

test:  ## the README's test command
	$(PYTHON) -m pytest -n auto --dist loadfile

ci:  ## all of it, in a new environment
	.ci/run

site:  ## the documents as a static site in site/; needs the extra `docs`
	$(PYTHON) -m mkdocs build --strict
