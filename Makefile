# make setup   .venv with Crius and torch          make train       train the debug Llama on this machine
# make test    everything that CI runs              make clean       remove .venv
# make bench-cpu   Crius against plain PyTorch and Hugging Face's Trainer on this CPU, about 10 minutes
#
# A GPU machine overrides one variable, for example
#   make setup CRIUS_TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"
CRIUS_TORCH ?= torch==2.13.0
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell printf '%s' '$(CRIUS_TORCH)' | cksum | cut -d' ' -f1)
TEST_STAMP := $(STAMP)-test
BENCH_STAMP := $(STAMP)-bench
BENCH_OUT := benchmarks/results/$(shell date +%Y-%m-%d)-cpu/peers.json

# uv is many times faster; it does not read pip's settings, so the wheels at hand are named to it
UV := $(shell command -v uv 2>/dev/null)
ifdef UV
MAKE_VENV = $(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV)
INSTALL = UV_FIND_LINKS="$(PIP_FIND_LINKS)" $(UV) pip install --quiet --python $(BIN)/python
else
MAKE_VENV = $(PYTHON) -m venv $(VENV)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
endif

.PHONY: setup train test lint bench-cpu clean
setup: $(STAMP)

$(STAMP): pyproject.toml
	$(MAKE_VENV)
	$(INSTALL) $(CRIUS_TORCH)
	$(INSTALL) -e '.[standard]'
	rm -f $(VENV)/.setup-*
	touch $@

$(TEST_STAMP): $(STAMP)
	$(INSTALL) -e '.[test]'
	touch $@

$(BENCH_STAMP): $(STAMP)
	$(INSTALL) -e '.[bench]'
	touch $@

train: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/crius train

lint: $(TEST_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# two at a time, the distributed ones by file; those that measure time, count processes or need a GPU run by themselves
SHORT = tests/unit tests/docs tests/golden
ALONE = $(addprefix tests/distributed/test_,launcher.py loopback.py supervision.py watchdog.py wrong_inputs.py) tests/gpu
test: lint
	$(BIN)/pytest -n 2 $(SHORT)
	$(BIN)/pytest -n 2 --dist loadfile tests $(addprefix --ignore=,$(SHORT) $(ALONE))
	$(BIN)/pytest $(ALONE)

bench-cpu: $(BENCH_STAMP)
	$(BIN)/python benchmarks/bench_cpu.py --out $(BENCH_OUT)

clean:
	rm -rf $(VENV)
