# make serve   from nothing to a server on http://127.0.0.1:8000
# make test    environment, linters and the tests that CI runs
# make spec-bench   the answers to Spec-Bench's 480 questions with and without speculative decoding
# make gpu-compile-test   the GPU kernels, compiled for an H100 without one, in an environment of its own
# make sanitize   the tests of the native kernels, built with sanitizers
# make wheel-test   the wheel of what is committed, installed into an empty environment and used there
# The environment is made once, and again only when pyproject.toml changes; nothing else needs the network.

ENV := .venv
GPU_ENV := .venv-gpu
PORT ?= 8000
HOST ?= 127.0.0.1
MODEL ?= smollm2-135m-instruct
ARTIFACT ?= artifacts/$(notdir $(MODEL))
COMPILE_FLAGS ?=
SERVE_FLAGS ?=
PYTEST_FLAGS ?=

# Stamps carry a checksum of pyproject.toml, so that a checkout which only touches it installs nothing.
VERSION := $(shell cksum < pyproject.toml | tr ' ' '-')
INSTALLED := $(ENV)/.installed-$(VERSION)
INSTALLED_TEST := $(ENV)/.installed-test-$(VERSION)

export PYTHON

.PHONY: serve test pytest slow spec-bench gpu-compile-test sanitize wheel-test lint env clean distclean

serve: $(ARTIFACT)/manifest.json
	$(ENV)/bin/jaxserve serve $(ARTIFACT) --host $(HOST) --port $(PORT) $(SERVE_FLAGS)

$(ARTIFACT)/manifest.json: | $(INSTALLED)
	$(ENV)/bin/jaxserve compile $(MODEL) -o $(ARTIFACT) $(COMPILE_FLAGS)

test: lint pytest

pytest: $(INSTALLED_TEST)
	$(ENV)/bin/python -m pytest -m "not slow and not peer and not gpu" $(PYTEST_FLAGS)

slow: $(INSTALLED_TEST)
	$(ENV)/bin/python -m pytest -m "slow and not peer and not gpu" $(PYTEST_FLAGS)

spec-bench: $(INSTALLED_TEST)
	$(ENV)/bin/python -m pytest tests/e2e/test_spec_bench.py $(PYTEST_FLAGS)

sanitize: $(INSTALLED_TEST)
	PYTHON=$(ENV)/bin/python tools/sanitize.sh

wheel-test: $(INSTALLED_TEST)
	$(ENV)/bin/python tools/wheel_test.py

# Of CUDA only what compiles: XLA's plugin and ptxas.
gpu-compile-test: $(GPU_ENV)/.installed-$(VERSION)
	$(GPU_ENV)/bin/python -m jaxserve.gpu_report
	$(GPU_ENV)/bin/python -m jaxserve.gpu_report --steps --layers 2

$(GPU_ENV)/.installed-$(VERSION):
	tools/make_env.sh $(GPU_ENV) .
	jax=$$($(GPU_ENV)/bin/python -c "import jax; print(jax.__version__)") && $(GPU_ENV)/bin/python -m pip install --quiet --no-deps \
	    jax-cuda12-plugin==$$jax jax-cuda12-pjrt==$$jax nvidia-cuda-nvcc-cu12==12.9.86
	@touch $@

lint: $(INSTALLED_TEST)
	$(ENV)/bin/ruff check .
	$(ENV)/bin/ruff format --check .
	$(ENV)/bin/pyright

env: $(INSTALLED_TEST)

$(INSTALLED):
	tools/make_env.sh $(ENV) .
	@rm -f $(ENV)/.installed-*
	@touch $@

$(INSTALLED_TEST):
	tools/make_env.sh $(ENV) ".[test]"
	@rm -f $(ENV)/.installed-*
	@touch $(INSTALLED) $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(ENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(ENV) $(GPU_ENV) artifacts jaxserve.egg-info
