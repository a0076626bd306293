# Everything that a reader or a machine runs, by name. Each target sets up .venv by itself when it
# is missing, or when what it is made from has changed. Works with GNU make 3.81 and later.

PY := .venv/bin/python
# A stamp knows which build of torch it was made with, so that a new GPU or driver sets up anew.
STAMP := .venv/.installed-$(shell tools/setup/venv.sh build)-
# The tests of a file stay together, because they share what they set up. Files start in their
# order: by default those with few tests start last, and some of those are the longest.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

# Two targets may need to install into the same .venv, so they take turns, also under `make -j`.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo serve start test fast-test check lint types doors diffs format propagate mutants \
	lab notebooks site bench clean clean-all

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

# --- set-up ---------------------------------------------------------------------------------
# A stamp is touched only after everything went well: an interrupted set-up never counts as done.
# The interpreter is a dependency since a .venv may outlive it (the link then points nowhere).

$(PY):
	@tools/setup/venv.sh create

$(STAMP)base $(STAMP)serve $(STAMP)test $(STAMP)docs $(STAMP)notebooks $(STAMP)lab $(STAMP)mutants: $(STAMP)%: \
		pyproject.toml constraints.txt tools/setup/venv.sh $(PY)
	@tools/setup/venv.sh $*
	@touch $(STAMP)base $@

# --- for readers ----------------------------------------------------------------------------

demo: $(STAMP)base ## a real model answers several chats at once, streamed in the terminal
	@$(PY) -m shared.demo $(ARGS)

serve: $(STAMP)serve ## an OpenAI server, each stage a model, at http://127.0.0.1:8000 (ARGS="--port 8001")
	@$(PY) -m shared.serve $(ARGS)

.PHONY: start-usage
start-usage: # what is missing is told before anything is installed
	@test -n "$(STAGE)" && test -n "$(DIR)" || \
		{ echo "usage: make start STAGE=04 DIR=my_stage" >&2; exit 2; }

start: start-usage $(STAMP)test ## a folder of your own to build a stage in (STAGE=04 DIR=my_stage); FAULT=3: a broken engine
	@$(PY) -m tools.setup.start "$(STAGE)" "$(DIR)" $(FAULT)

test: $(STAMP)test ## the whole suite (ARGS="-k word"; ARGS=--cov: with coverage, twice as long)
	@$(PY) -m pytest $(PARALLEL) $(ARGS)

fast-test: $(STAMP)test ## the tests that need neither much time nor the model's weights
	@$(PY) -m pytest -m "not slow and not model" $(PARALLEL) $(ARGS)

bench: $(STAMP)base ## ladder, stall and their pictures in small, measured on this machine (ARGS="stall")
	@$(PY) -m shared.bench $(or $(ARGS),quick)

lab: $(STAMP)lab ## the notebooks in JupyterLab, on a copy of your own in my_notebooks/
	@$(PY) -m tools.setup.lab $(ARGS)

notebooks: $(STAMP)notebooks ## run all notebooks; the executed copies go to build/notebooks
	@$(PY) -m nbconvert --to notebook --execute --ExecutePreprocessor.record_timing=False \
		--ExecutePreprocessor.store_widget_state=False \
		--output-dir build/notebooks notebooks/*.ipynb

site: $(STAMP)docs ## the site, built into site/; any warning is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# --- for those who change something ---------------------------------------------------------

check: lint types doors diffs ## lint, format, types, doors between the rooms, size of the stages

lint: $(STAMP)test
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: $(STAMP)test
	@$(PY) -m mypy

doors: $(STAMP)test
	@$(PY) -m tools.check.doors

diffs: $(STAMP)test
	@$(PY) -m tools.check.stage_diff

format: $(STAMP)test ## let ruff sort imports and lay out the code
	@$(PY) -m ruff check --select I --fix .
	@$(PY) -m ruff format .

propagate: $(STAMP)base ## carry uncommitted changes of one stage into the later ones (FROM=01)
	@$(PY) -m tools.check.propagate "$(FROM)"

mutants: $(STAMP)test $(STAMP)mutants ## plant faults and count those that the tests notice; takes an hour (ARGS="scheduler")
	@$(PY) -m tools.check.mutants $(ARGS)

clean: ## remove what tools and tests left behind
	rm -rf build site .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## the same, and .venv
	rm -rf .venv
