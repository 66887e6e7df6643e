# `make` alone lists the targets. Everything is installed into .venv; nothing needs root, a GPU or torch
# (the tests alone use torch, as the reference to compare with).
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SEED   ?= 0
DTYPE  ?= float32
SHARDS ?= 1
# The release that the GPU kernels were measured with. Apart from the test extra, since a torch that is built
# for CUDA asks for the one of its own.
KERNEL_LANGUAGE := triton==3.6.0
# In place of onnxruntime: both are one package. What it needs of CUDA is an extra in pyproject.toml.
ONNXRUNTIME_GPU := onnxruntime-gpu==1.31.1
PRECISION ?= fp32
TARGET ?= onnxruntime
PROVIDER ?=
DRAFT ?=
METHOD ?= awq
GROUP ?= 128
SYMMETRIC ?= 0
# Not taken from the environment: some shells set HOST to the machine's name, and ARCH to its processor's.
HOST := 127.0.0.1
ARCH :=
CONFIG :=
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
GATEWAY_PORT ?= 8080
# Recipes read what the user gave from the environment, where no quote or space can break them.
export OUT CHECKPOINT ENGINE PRECISION TARGET PROVIDER DRAFT INT4_ACCURACY METHOD GROUP SYMMETRIC CALIBRATION TEXT REFERENCE ARCH CONFIG DTYPE SHARDS SEED HOST HTTP_PORT GRPC_PORT METRICS_PORT GATEWAY_PORT TRITON API_KEYS

.PHONY: help setup setup-test setup-onnxruntime-gpu demo checkpoint engine quantize evaluate serve gateway up check test perf-smoke clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-21s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A stamp per dependency set: pip runs again only when pyproject.toml changes.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 10) <= v[:2] <= (3, 12) else f"Python 3.10 to 3.12 is needed, this is {v[0]}.{v[1]}: make setup PYTHON=/path/to/python3.12")'
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian and Ubuntu, apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }

$(VENV)/.setup: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) (about half a minute) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.setup-test: pyproject.toml | $(VENV)/bin/python
	@echo "installing the test tools, torch included, into $(VENV) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(KERNEL_LANGUAGE)
	@touch $(VENV)/.setup $@

setup: $(VENV)/.setup ## install everything that serving needs into .venv

setup-test: $(VENV)/.setup-test ## install what the tests need as well

setup-onnxruntime-gpu: setup ## replace ONNX Runtime in .venv by its release with CUDA (1 GB), for PROVIDER=cuda
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[onnxruntime-gpu]'
	@$(BIN)/pip uninstall --quiet --disable-pip-version-check --yes onnxruntime onnxruntime-gpu
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(ONNXRUNTIME_GPU)

demo: setup ## [ARCH=v2-lite|v2|v3|llama|coder|qwen2|moe]: build an engine, serve it, stream one completion over gRPC and HTTP
	@$(BIN)/python build_scripts/demo.py --arch "$$ARCH"

checkpoint: setup ## OUT=dir [ARCH=v2-lite|v2|v3|llama|coder|qwen2|moe or CONFIG=config.json] [DTYPE=float32|float16|bfloat16] [SHARDS=1] [SEED=0]: write a random checkpoint, small or as large as CONFIG says
	@$(BIN)/python build_scripts/make_checkpoint.py --out "$$OUT" --arch "$$ARCH" --config "$$CONFIG" --dtype "$$DTYPE" --shards "$$SHARDS" --seed "$$SEED"

engine: setup ## CHECKPOINT=dir ENGINE=dir [PRECISION=fp32] [TARGET=onnxruntime] [PROVIDER=cpu|cuda] [DRAFT=mtp] [INT4_ACCURACY=4|0]: build an engine directory (more: docs/tensorrt.md, docs/tensorrt-llm.md)
	@$(BIN)/python build_scripts/build_engine.py --checkpoint "$$CHECKPOINT" --engine "$$ENGINE" --precision "$$PRECISION" --target "$$TARGET" --provider "$$PROVIDER" --draft "$$DRAFT" --int4-accuracy "$$INT4_ACCURACY" \
		--max-batch "$$MAX_BATCH" --max-prefill "$$MAX_PREFILL" --max-chunk "$$MAX_CHUNK" --max-context "$$MAX_CONTEXT" \
		--tp "$$TP" --pp "$$PP" --ep "$$EP" --sm "$$SM" --timing-cache "$$TIMING_CACHE"

quantize: setup ## CHECKPOINT=dir OUT=dir [METHOD=awq|rtn] [GROUP=32|64|128] [SYMMETRIC=0|1] [CALIBRATION=text]: write an INT4 checkpoint
	@$(BIN)/python build_scripts/quantize.py --checkpoint "$$CHECKPOINT" --out "$$OUT" --method "$$METHOD" --group "$$GROUP" --symmetric "$$SYMMETRIC" --calibration "$$CALIBRATION"

evaluate: setup ## ENGINE=dir [TEXT=file, folder or wheel] [REFERENCE=engine dir]: perplexity and greedy agreement
	@$(BIN)/python build_scripts/evaluate.py --engine "$$ENGINE" --text "$$TEXT" --reference "$$REFERENCE"

serve: setup ## ENGINE=dir or CHECKPOINT=dir [HOST=127.0.0.1] [HTTP_PORT=8000] [GRPC_PORT=8001] [METRICS_PORT=8002]: serve in the foreground
	@exec $(BIN)/python -m deepseek_triton.server --engine "$$ENGINE" --checkpoint "$$CHECKPOINT" \
		--http-port "$$HTTP_PORT" --grpc-port "$$GRPC_PORT" --metrics-port "$$METRICS_PORT" --host "$$HOST"

gateway: setup ## ENGINE=dir [TRITON=host:port,…] [GATEWAY_PORT=8080] [API_KEYS=file]: OpenAI's HTTP API in front of running servers
	@exec $(BIN)/python -m deepseek_triton.gateway --engine "$$ENGINE" --triton "$${TRITON:-127.0.0.1:$$GRPC_PORT}" \
		--gateway-host "$$HOST" --gateway-port "$$GATEWAY_PORT" --api-keys "$$API_KEYS"

up: setup ## ENGINE=dir or CHECKPOINT=dir [as serve and gateway]: server and gateway in one
	@exec $(BIN)/python -m deepseek_triton.server --gateway --engine "$$ENGINE" --checkpoint "$$CHECKPOINT" \
		--http-port "$$HTTP_PORT" --grpc-port "$$GRPC_PORT" --metrics-port "$$METRICS_PORT" \
		--gateway-host "$$HOST" --gateway-port "$$GATEWAY_PORT" --api-keys "$$API_KEYS"

check: setup-test ## lint, types and unit tests but those of the GPU kernels
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
# Plugins of packages that only other tests use cost each worker seconds.
	@$(BIN)/pytest -q -n auto --dist loadfile -p no:langsmith_plugin -p no:schemathesis tests/unit tests/contract --ignore=tests/unit/kernels

test: setup-test ## every test, with real servers on free ports
	@$(BIN)/pytest

perf-smoke: setup-test ## a short perf_analyzer run against a real server
	@$(BIN)/python perf/perf_smoke.py

clean: ## remove .venv, caches and what demo built
	@rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
