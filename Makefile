# Two commands do all the set-up: `make demo` and `make test`. `make` alone shows this help.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SET_UP := $(VENV)/.set-up
DEMO_SET_UP := $(VENV)/.set-up-demo
SHORT_TESTS := tests/kernel tests/engines tests/cli tests/web tests/testing tests/promises/test_agent_survives.py \
  tests/jobs/test_agent.py tests/jobs/test_bridge.py tests/jobs/test_zygote.py tests/jobs/test_bisect.py \
  tests/fetch/test_decoding.py tests/fetch/test_download.py tests/fetch/test_dns.py tests/views/test_views_counting.py \
  tests/feed/test_feed_pages.py tests/media/test_node_processes.py tests/media/test_media_serving.py
COMPILE := pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate
PEERS_SET_UP := .venv-bench/.set-up

# A misspelled variable would be ignored.
VARIABLES := PYTHON VENV SECONDS PORT FOLDER CHURN_S ROOM SEED CPU_S FUZZ_S FUZZ_SEED ONLY FAULT RUNS MINUTES HOURS \
  QUICK HARNESS CELLS SYSTEMS SHORT GALLERY BIN SET_UP DEMO_SET_UP SHELL
SPACE := $() $()
UNKNOWN := $(filter-out $(addsuffix =%,$(VARIABLES)),$(subst \$(SPACE),_,$(MAKEOVERRIDES)))
$(if $(UNKNOWN),$(error unknown variable $(UNKNOWN): `make` shows the variables of each target))

.DEFAULT_GOAL := help
.PHONY: help demo test short check format lint types layers soak fuzz planted torture simulate endurance bench outside lock reference docs screenshots gallery clean

help: ## Show this help
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(DEMO_SET_UP) ## Run the demo site until Ctrl-C (SECONDS=20: end by itself, with a summary; PORT=9000: first of three ports; FOLDER=other-data: its data folder)
	@# In a process group of its own on a terminal: Ctrl-C ends the demo in order, and not make.
	@if [ -t 0 ]; then set -m; trap '' TSTP; fi; \
	DEMO_OPTIONS=make $(BIN)/python -m examples.bazaar.demo $(if $(filter command,$(firstword $(origin SECONDS))),--seconds $(SECONDS)) $(addprefix --port ,$(PORT)) $(if $(FOLDER),--folder '$(FOLDER)'); exit $$?

test: $(SET_UP) ## Run the tests on real engines
	$(BIN)/python -m pytest

short: $(SET_UP) ## Run a short suite, for another Python (PYTHON=python3.13 VENV=.venv-short)
	$(BIN)/python -m pytest $(SHORT_TESTS)

check: lint types layers test ## Format, lint, types, layers and tests: what must be green before a commit

lint: $(SET_UP) ## Check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(SET_UP) ## Check types, strictly
	$(BIN)/mypy

layers: $(SET_UP) ## Check the layers of imports
	$(BIN)/lint-imports

soak: $(SET_UP) ## Run all tests as this user (root too), the slower fault tests, three times ten minutes of churn (CHURN_S=60: shorter)
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest -m soak --timeout 3600
	$(BIN)/python -m tools.planted
	$(BIN)/python -m bench jobs --only churn --churn-s $(or $(CHURN_S),600)
	$(BIN)/python -m verification.simulation jobs --cpu-s 1200

simulate: $(SET_UP) ## Simulate a room from seeds in virtual time (ROOM=jobs SEED=7: one seed; CPU_S=600: for so much processor time)
	$(BIN)/python -m verification.simulation $(or $(ROOM),jobs) $(if $(SEED),--seed $(SEED),--cpu-s $(or $(CPU_S),60))

fuzz: $(SET_UP) ## Try new bad input at every interface (FUZZ_S=600: seconds per interface; FUZZ_SEED=7: repeat a round)
	FUZZ_S=$(or $(FUZZ_S),600) $(BIN)/python -m pytest -n 2 --dist loadfile --timeout 0 tests/fuzz

planted: $(SET_UP) ## Switch off each security control and require that its test fails (ONLY="tokens paths": some)
	$(BIN)/python -m tools.planted $(ONLY)

torture: $(SET_UP) ## Run every fault against every room; FAULT=kill-postgres ROOM=jobs RUNS=20: one cell; MINUTES=30: all in turns (docs/reference/torture.md)
	$(BIN)/python -m verification.torture $(addprefix --fault ,$(FAULT)) $(addprefix --room ,$(ROOM)) $(addprefix --runs ,$(RUNS)) $(addprefix --minutes ,$(MINUTES))

endurance: $(SET_UP) ## Run the demo for HOURS=8 with a fault every minute, and require that nothing grows (docs/reference/endurance.md)
	$(BIN)/python -m verification.endurance --hours $(or $(HOURS),8)

bench: $(SET_UP) $(PEERS_SET_UP) ## Measure against peers (ROOM=media ONLY=ranges; QUICK=1: three minutes a room, no record)
	$(BIN)/python -m bench $(ROOM) $(if $(QUICK),--quick) $(addprefix --only ,$(ONLY)) $(if $(CHURN_S),--churn-s $(CHURN_S))

outside: $(SET_UP) ## Run another project's chaos and bloat cells (HARNESS=folder CELLS=chaos SYSTEMS=headrace SHORT=1; docs/reference/outside-harness.md)
	$(BIN)/python -m bench.outside $(addprefix --harness ,$(HARNESS)) $(addprefix --cells ,$(CELLS)) $(addprefix --systems ,$(SYSTEMS)) $(if $(SHORT),--short)

format: $(SET_UP) ## Format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(SET_UP) ## Build the documentation as a site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

screenshots: $(SET_UP) ## Take the documentation's pictures of the console, by its own tests
	SCREENSHOTS=$(CURDIR)/docs/screenshots $(BIN)/python -m pytest -n 0 tests/console/test_console_pictures.py

gallery: $(SET_UP) ## Take every screen of the console in every state, to judge its look (GALLERY=folder)
	GALLERY=$(or $(GALLERY),$(CURDIR)/gallery) $(BIN)/python -m pytest -n 0 tests/console/test_console_pictures.py -k every_screen_is

reference: $(SET_UP) ## Write docs/reference from the code
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.dashboard
	$(BIN)/python -m tools.diagrams

lock: ## Resolve both lock files again (hashes, no index in them)
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv==0.13.9
	.venv-lock/bin/uv $(COMPILE) --all-extras --upgrade pyproject.toml -o requirements.lock
	.venv-lock/bin/uv $(COMPILE) --extra demo --group build -c requirements.lock pyproject.toml -o requirements-demo.lock

clean: ## Remove the environment, the caches and the demo's data folder
	rm -rf .venv .venv-lock .venv-bench .venv-short .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build demo-data

# The demo needs neither the tools of tests and documentation nor linters.
$(DEMO_SET_UP): requirements-demo.lock pyproject.toml
	@$(PYTHON) tools/set_up.py $(VENV) requirements-demo.lock
	@touch $(DEMO_SET_UP)

$(SET_UP): requirements.lock pyproject.toml
	@$(PYTHON) tools/set_up.py $(VENV) requirements.lock
	@touch $(DEMO_SET_UP) $(SET_UP)

$(PEERS_SET_UP): bench/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --disable-pip-version-check --quiet -r bench/requirements.txt
	touch $(PEERS_SET_UP)
