# Every target makes .venv when it is missing. PYTHON=python3.12 picks another interpreter for it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
ORACLES := .venv-oracles
QUICK := not slow and not gpu and not multigpu and not oracles

.PHONY: setup demo serve check test test-slow test-oracles test-gpu bench results-gpu docs clean

setup: $(VENV)/.dev

demo: $(VENV)/.runtime  ## from a bare clone to text: installs what serving needs and no more
	$(BIN)/benthic generate --model minnow --prompt "Once upon a time" --max-tokens 110 --temperature 0.7 --top-p 0.9 --seed 3

serve:  ## says so until there is a server
	@echo "Benthic has no HTTP server yet; .venv/bin/benthic chat talks to the model on the command line" >&2; exit 1

check: $(VENV)/.dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/generate.py --check

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 8 --dist loadfile -m "$(QUICK)"

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "slow and not gpu and not multigpu and not oracles"

# Public implementations of the same blocks, in an environment of their own: two of them declare needs that their CPU
# paths do not have, so they come without.
test-oracles: $(ORACLES)/.done
	$(ORACLES)/bin/python -m pytest -q -m oracles tests/oracles_public

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -q -rs -m gpu

bench: $(VENV)/.runtime
	$(BIN)/benthic bench step --model minnow --device cpu --json

# All of results/<GPU>/: ARGS="--data FILE --texts DIR", and "--only ... --limit-seconds S --resume" to take it in pieces.
results-gpu: $(VENV)/.dev
	$(BIN)/benthic bench all --device cuda --out results $(ARGS)

docs: $(VENV)/.runtime
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# One lock for both: it constrains every version, and each step takes from it only what it needs. The build backend
# comes from the lock too, so nothing is fetched behind its back.
$(VENV)/.runtime: pyproject.toml requirements.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Benthic needs Python 3.11 or newer; run make PYTHON=python3.11")'
	$(PIP) install --constraint requirements.lock hatchling editables
	$(PIP) install --constraint requirements.lock --no-build-isolation --editable .
	@touch $@

$(ORACLES)/.done: tests/oracles_public/requirements.txt
	@test -x $(ORACLES)/bin/python || $(PYTHON) -m venv $(ORACLES)
	$(ORACLES)/bin/python -m pip --quiet install --requirement tests/oracles_public/requirements.txt
	$(ORACLES)/bin/python -m pip --quiet install --no-deps --ignore-requires-python tile-kernels==2.1.0 ftllm==1.9.0
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) install --constraint requirements.lock --no-build-isolation --editable '.[dev]'
	@touch $@
