# Every target installs what it needs into .venv first, once. Another Python: make test PYTHON=python3.13
PYTHON ?= python3
SHELL := bash
BIN := .venv/bin
INSTALLED := .venv/installed
AXE := .venv/axe/node_modules/axe-core/axe.min.js

export HF_HUB_DISABLE_TELEMETRY := 1
export DO_NOT_TRACK := 1

ALONGSIDE := $(MAKE) --no-print-directory --jobs=3

.PHONY: help install demo check test unit-tests all-tests deploy-test page-test fuzz schedules docs lint format types bench bench-peers board clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

install: $(INSTALLED) ## make .venv with FedStrata and everything it needs, at pinned versions

demo: $(INSTALLED) ## six hospitals train one model on one machine
	$(BIN)/fedstrata demo

check: $(INSTALLED) ## the loop of a minute: lint, layers, types and unit tests
	@$(ALONGSIDE) lint types unit-tests

test: $(INSTALLED) ## lint, layers, types and all tests but those of deploy-test, as CI runs them
	@$(ALONGSIDE) lint types all-tests

unit-tests: $(INSTALLED)
	$(BIN)/pytest -n auto -m 'not deploy and not run'

all-tests: $(INSTALLED)
	$(BIN)/pytest -n auto --dist worksteal

deploy-test: $(INSTALLED) ## sites with TLS and keys: killed, refused, resumed, attacked; about 20 minutes
	$(BIN)/pytest -m '' tests/sites/test_flower.py tests/sites/test_deployment.py \
		tests/sites/test_two_machines.py tests/sites/test_mishaps.py tests/sites/test_hostile_programs.py

page-test: $(INSTALLED) $(AXE) ## reports in Chromium: phone and desk, light and dark, screen readers; needs Chromium and npm
	FEDSTRATA_PAGE_TEST=1 $(BIN)/pytest tests/reports/test_browser.py

$(AXE):
	npm install --no-save --no-audit --no-fund --prefix .venv/axe axe-core@4.10.3

docs: $(INSTALLED) ## the documents as a site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fuzz: $(INSTALLED) ## 1,000,000 changed messages of every kind; a minute
	$(BIN)/python tests/fuzz.py --messages 1000000

schedules: $(INSTALLED) ## 500 runs over a network that loses, delays, doubles and reorders; some minutes
	PYTHONPATH=tests:tests/sites $(BIN)/python tests/schedules.py --runs 500

lint: $(INSTALLED) ## check style, format and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: $(INSTALLED) ## put the code into its format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(INSTALLED) ## check types
	$(BIN)/mypy --strict src

bench: $(INSTALLED) ## time a client's step, epochs over a frozen encoder, split steps, rounds between sites, whole runs
	$(BIN)/python benchmarks/client_step.py
	$(BIN)/python benchmarks/frozen.py
	$(BIN)/python benchmarks/split.py
	$(BIN)/python benchmarks/sites.py
	$(BIN)/python benchmarks/profile_run.py
	$(BIN)/python benchmarks/speed.py

bench-peers: $(INSTALLED) ## time whole runs beside a plain loop, the Trainer, pfl-research, Flower and NVFlare
	$(BIN)/python benchmarks/peers.py

board: $(INSTALLED) ## score against megabytes, docs/board.md: make board DATA=FOLDER MODEL=FOLDER
	$(BIN)/python benchmarks/board.py $(if $(DATA),--data "$(DATA)") $(if $(MODEL),--model "$(MODEL)") \
		$(if $(SLICES),--slices "$(SLICES)")

clean: ## remove .venv, caches and build files; runs/ stays
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "FedStrata needs Python 3.11 or later; name one: make PYTHON=python3.11"; exit 1; } >&2
	@echo "installing into .venv; the first time this takes some minutes"
	@$(PYTHON) -m venv .venv
	@set -o pipefail; $(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[demo,dev]' \
		| grep --line-buffered -E '^ *(Collecting|Downloading|Installing) '
	@touch $@
