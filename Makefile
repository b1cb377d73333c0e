PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
WORKERS ?= 2
# Real data for the tests that use it; they skip with a reason where it is absent.
export FEDCOMPOSITE_DATA ?= $(wildcard $(abspath ../shared/data))

.PHONY: demo docs test test-slow test-federation test-site test-wheel test-oldest lint clean install bench-peers

demo: $(VENV)/.core
	$(BIN)/fedcomposite compare demo --out runs/demo --overwrite

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/pytest --timeout 300 -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not processes and not site and not slow"

# Studies that take longer than one waits for: 100 cases of the fuzz, laws over many rounds, killed commands, whole reports, benchmarks. CI runs them.
test-slow: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/pytest --timeout 900 -n $(WORKERS) --dist worksteal -m "slow and not processes and not site" tests

# Real engines and real sites, killed, cut off and attacked: a part of its own, as it takes minutes and depends on clocks and sockets. What
# fails beside other work is tried once more alone: a defect fails again.
PROCESSES := OMP_NUM_THREADS=1 $(BIN)/pytest --timeout 600 -m processes tests
test-federation: $(VENV)/.test
	$(PROCESSES) -n $(WORKERS) --dist loadfile --no-loadscope-reorder || $(PROCESSES) --last-failed --last-failed-no-failures none

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing_public.py

# The site, built and opened in a browser: a part of its own, as the gallery's examples are run for it.
test-site: $(VENV)/.test $(VENV)/.docs
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/test_site.py

# What a stranger does: sdist and wheel of the last commit, installed out of sight of the repository.
test-wheel: $(VENV)/.test
	.ci/wheel $(BIN)/python

# The core with the oldest releases that pyproject.toml allows. Old releases warn about newer neighbours, so warnings are no errors here.
# Two oracles need newer releases: L-BFGS-B of SciPy 1.11 stops 2e-5 above the least objective at the last strength of a path, and scikit-learn's imputer takes
# None, which pandas 2 has for a missing text, for a level.
OLDEST := .venv-oldest
OLDEST_TESTS := arrays cli_models cli_solve contract estimators export inference lazy losses metrics path plots problems quality reading recipe regularizers reports rng \
  sheets simulator tables
OLDEST_NOT := --deselect tests/test_path.py::test_path_is_the_pooled_one --deselect tests/test_recipe.py::test_a_whole_recipe_equals_scikit_learn
test-oldest: $(OLDEST)/.done
	OMP_NUM_THREADS=1 $(OLDEST)/bin/pytest -n $(WORKERS) --dist worksteal -o filterwarnings=ignore $(OLDEST_NOT) $(addprefix tests/test_,$(addsuffix .py,$(OLDEST_TESTS)))

$(OLDEST)/.done: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --constraint constraints-oldest.txt --editable . cvxpy hypothesis pytest pytest-xdist skglm
	@touch $@

# The site, in build/site: index.html opens as it is. Building needs no network, the first installation does. Not with --quiet, which
# keeps warnings from --strict; other packages' deprecations are not ours.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 PYTHONWARNINGS=ignore::DeprecationWarning $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

install: $(VENV)/.core

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(BIN)/pip pyproject.toml constraints.txt
	@echo "installing fedcomposite into $(VENV) (a few minutes the first time)"
	$(PIP) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	@echo "installing the test extras"
	$(PIP) --editable '.[test,lint]'
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	@echo "installing the docs extra"
	$(PIP) --editable '.[docs]'
	@touch $@

# Other frameworks for python -m benchmarks, each in an environment of its own. torch comes first, by its exact version.
PEERS := benchmarks/.peers
bench-peers: $(PEERS)/flower/.done $(PEERS)/pfl/.done $(PEERS)/fluke/.done

$(PEERS)/%/.done: benchmarks/peers/requirements-%.txt benchmarks/peers/constraints.txt
	@echo "installing $* into $(@D)"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement benchmarks/peers/constraints.txt
	$(@D)/bin/pip install --quiet --constraint benchmarks/peers/constraints.txt --requirement $<
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(PEERS) runs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
