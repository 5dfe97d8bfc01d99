# One command per job; each sets up what it needs. PIP_ARGS passes options to pip (an index with the CPU build of
# torch, say, where the default index would bring a CUDA one).
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
# large buffers are reused instead of returned to the kernel: page faults would otherwise cost a third of the time
export MALLOC_MMAP_THRESHOLD_ ?= 8589934592
export MALLOC_TRIM_THRESHOLD_ ?= 17179869184
export MALLOC_TOP_PAD_ ?= 67108864
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo example test test-tl4 test-vllm lint format bench reference clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt torch
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev,figures]'
	touch $@

demo: setup
	$(BIN)/satlens suite --tokens 60000 --out reports/demo

example: setup
	$(BIN)/python reports/example.py

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python benchmarks/run_all.py
	cp "$$(ls -t runs/bench-*/bench.md | head -1)" reports/benchmarks.md

test-tl4: .venv-tl4/.ready
	.venv-tl4/bin/python -m pytest tests/test_bridge.py tests/test_sites.py

.venv-tl4/.ready: pyproject.toml tests/requirements-tl4.txt
	$(PYTHON) -m venv .venv-tl4
	.venv-tl4/bin/pip install -q $(PIP_ARGS) torch==2.13.0
	.venv-tl4/bin/pip install -q $(PIP_ARGS) -r tests/requirements-tl4.txt
	.venv-tl4/bin/pip install -q $(PIP_ARGS) --no-deps -e .
	touch $@

# a real vLLM server on CPU, in an environment of its own: a few minutes, and not part of the tests above
test-vllm: setup .venv-vllm/.ready
	SATLENS_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest tests/test_vllm_real.py

.venv-vllm/.ready: tests/vllm_environment.sh
	PYTHON=$(PYTHON) tests/vllm_environment.sh .venv-vllm $(PIP_ARGS)
	touch $@

reference: setup
	$(BIN)/python reports/reference/rebuild.py

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache
