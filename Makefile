# make train        train a small GPT on real text over 8 simulated devices: 2 to 3 minutes on 2 cores
# make test         the suite, without its longest tests: 24 minutes on 2 cores, with nothing compiled before
# make test-slice   a part of the slow tests, but those of make soak: SLICE=3/20 is the fourth twentieth
# make test-all     all slow tests, then the suite on the newest Python there is: more than an hour on 2 cores
# make mutants      break the parallel code in 270 places, one at a time; each must be noticed. Hours
# make test-browser reports in Chromium, half a minute; INSTALL=1 installs Debian's package, where it can
# make test-slurm   launch/ on a SLURM of its own, and mpirun: 3 minutes. INSTALL=1 installs them, where it can
# make predictions  memory and bytes of random runs beside absent hardware's compilers: RUNS=3, 2 minutes. SEED=0x1f
# make notebooks    run notebooks/ from top to bottom: 13 minutes. PART=0/12 runs the first of the 12 alone
# make soak         kill a run 50 times at random, and compare what it ends with: SOAK_KILLS=50, 8 minutes on 2 cores
# make bench-gpu    train steps beside PyTorch's on a GPU, or tiny ones on the CPU: SIZES=gpt2-124m
# make lint         format, lint, types: nothing is changed
# make check        make lint, then the suite
# make format       mend what can be mended
# make clean        remove environments and caches; runs stay
# make help         these lines
#
# PYTHON=python3.12 picks another Python; a virtual environment made by a different one is made anew. EXTRAS=dev,hf
# installs torch and transformers too, with which imported models are compared.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
EXTRAS ?= dev
SLICE ?= 0/20
RUNS ?= 3
SEED ?= 0
PART ?= 0/1

BIN := $(VENV)/bin
MADE := $(VENV)/.made-by$(subst /,-,$(PYTHON))
# uv takes a third of pip's time. It does not read pip's configuration: where that alone names the index, pip installs.
# Neither compiles modules: Python compiles those it imports, a tenth of what is installed.
PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --only-binary :all: \
	-c constraints.txt
UV_INSTALL = $(BIN)/uv pip install -q --python $(BIN)/python --only-binary :all: --no-binary spmd-lm -c constraints.txt
EDITABLE = $(UV_INSTALL) --editable $(1) || { echo "uv cannot, so pip installs"; $(PIP_INSTALL) --editable $(1); }
COMMA := ,
# A worker runs neighbouring tests, which share what they compile.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# Where this is set, each process of a test compiles jax to bytecode again: 4 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-slice test-browser test-slurm test-all test-latest smoke-latest notebooks mutants soak
.PHONY: predictions bench-gpu lint check format clean help

train: $(VENV)/.runtime
	@$(BIN)/spmd-lm train configs/quickstart.yaml
	@echo "loss curve: runs/quickstart/loss.png    samples: runs/quickstart/samples.txt, which ends:"
	@echo; tail -n 12 runs/quickstart/samples.txt

test: $(VENV)/.dev
	$(PYTEST) -m "not slow and not gpu and not browser" $(TESTS)

test-slice: $(VENV)/.dev
	$(PYTEST) -m "slow and not gpu and not slurm" --slice $(SLICE) --ignore tests/reliability/test_soak.py

test-all: $(VENV)/.dev
	$(PYTEST) -m "slow and not gpu and not slurm" || test $$? = 5  # 5: no test is slow
	$(MAKE) test-latest

test-browser: $(VENV)/.dev
	@$(call INSTALL_DEBIAN,chromium,command -v chromium)
	@$(call EDITABLE,'.[$(EXTRAS)$(COMMA)browser]')
	$(BIN)/python -m pytest -m browser -rs

test-slurm: $(VENV)/.dev
	@$(call INSTALL_DEBIAN,slurm-wlm openmpi-bin shellcheck,which slurmctld mpirun shellcheck)
	$(BIN)/python -m pytest tests/launch -m "slurm or not slow" -rs

# With INSTALL=1, Debian's packages $(1), unless $(2) finds them; where that fails, tests that need them are skipped.
APT := DEBIAN_FRONTEND=noninteractive timeout 120 apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10
GET = $(APT) install -y --no-install-recommends $(1) >/dev/null
INSTALL_DEBIAN = [ -z "$(INSTALL)" ] || { $(2); } >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && { $(GET) 2>&1 || { $(APT) update && $(GET); }; }; } || \
	echo "$(1) cannot be installed here, which takes root and a network: the tests that need it are skipped"

soak: $(VENV)/.dev
	SOAK_KILLS=$(or $(SOAK_KILLS),50) $(BIN)/python -m pytest tests/reliability/test_soak.py -m slow -q

test-latest:
	$(ON_LATEST)

# One file of each kind: steps against the reference, pipelines, checkpoints, generation, the command line.
SMOKE := $(addprefix tests/,step/test_train_step.py step/test_pipeline.py checkpoints generation test_cli.py)
smoke-latest:
	$(call ON_LATEST,TESTS="$(SMOKE)")

ON_LATEST = @latest="$(NEWEST)"; \
	if [ -n "$$latest" ]; then \
	echo "newest Python here: $$latest"; $(MAKE) test PYTHON="$$latest" VENV=.venv-latest $(1); \
	else echo "no Python >= 3.12 on this machine: the newest jax is not tested"; fi

# In an environment of their own, with what the package requires and no more, as their readers have it.
notebooks:
	@$(MAKE) -s .venv-notebooks/.notebooks VENV=.venv-notebooks
	.venv-notebooks/bin/python -m tests.run_notebooks --workers $(WORKERS) --part $(PART)

predictions: $(VENV)/.dev
	$(BIN)/python benchmarks/predictions.py --runs $(RUNS) --seed $(SEED)

mutants: $(VENV)/.dev
	$(BIN)/python tests/mutants.py --workers $(WORKERS)

# PyTorch brings CUDA's libraries; jax's plugin comes with them where there is a GPU to run on.
bench-gpu: $(VENV)/.dev
	@$(call EDITABLE,'.[$(EXTRAS)$(COMMA)hf$(if $(wildcard /dev/nvidiactl),$(COMMA)gpu)]')
	$(BIN)/python benchmarks/gpu_step.py $(SIZES)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

check: lint
	$(MAKE) test

format: $(VENV)/.dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv .venv-latest .venv-notebooks .cache .hypothesis build dist

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

$(MADE):
	$(PYTHON) -m venv --clear $(VENV)
	@$(PIP_INSTALL) uv
	@touch $@

$(VENV)/.runtime: $(MADE) pyproject.toml constraints.txt
	@echo "installing spmd-lm into $(VENV) ..."
	@$(call EDITABLE,.)
	@touch $@

$(VENV)/.dev: $(MADE) pyproject.toml constraints.txt
	@echo "installing spmd-lm and what the tests need into $(VENV) ..."
	@$(call EDITABLE,'.[$(EXTRAS)]')
	@touch $(VENV)/.runtime $@

$(VENV)/.notebooks: $(MADE) pyproject.toml constraints.txt
	@echo "installing spmd-lm and what runs notebooks into $(VENV) ..."
	@$(call EDITABLE,'.[notebooks]')
	@touch $@

# Released Pythons of 3.12 and later, on the path or under pyenv; the newest one's own name for itself.
ABOUT := import sys; v = sys.version_info; v.releaselevel == "final" and print("%d.%d.%d" % v[:3], sys.executable)
NEWEST = $(shell for dir in $$(echo "$$PATH" | tr : ' ') $$HOME/.pyenv/versions/*/bin; do \
	for python in $$dir/python3.1[2-9] $$dir/python3.[2-9][0-9]; do \
	if [ -x $$python ]; then $$python -c '$(ABOUT)' 2>/dev/null; fi; done; done | sort -V | tail -n 1 | cut -d ' ' -f 2)
