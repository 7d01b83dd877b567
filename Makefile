# Every target does all it needs, on a fresh Debian machine with Python 3.11.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export RAY_USAGE_STATS_ENABLED = 0
export DO_NOT_TRACK = 1

.PHONY: setup setup-dev quickstart test test-slow slow-part lint bench bench-peers bench-small chaos chaos-part soak

setup:
	@PYTHON=$(PYTHON) ./requirements/install.sh cpu

setup-dev:
	@PYTHON=$(PYTHON) ./requirements/install.sh cpu dev

quickstart: setup
	$(BIN)/callsheet train quickstart

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright -p tests

# Everything that takes seconds, and the whole flow on real Ray and Prefect in a process of its own.
test: setup-dev
	$(BIN)/python -m pytest tests -m "not gpu and not chaos and not slow"
	$(BIN)/python -m pytest tests/flows/test_ppo.py

# The slow ones, a file a process: each starts and ends clusters and servers of its own.
test-slow: setup-dev
	$(BIN)/python -m tests.slow

# What of them fits into eight minutes, chosen by the commit's hash.
slow-part: setup-dev
	$(BIN)/python -m tests.slow --seconds 480 $(if $(SEED),--seed $(SEED))

bench: setup-dev
	$(BIN)/python -m benchmarks.all

# Ratios against benchmarks/recorded.json, in three to four minutes; fails when one is more than a quarter worse.
bench-small: setup-dev
	$(BIN)/python -m benchmarks.small

# TRL and verl, each in an environment of its own (.venv-peers); about half an hour on two cores.
bench-peers: setup-dev
	@PYTHON=$(PYTHON) ./requirements/install_peers.sh
	$(BIN)/python -m benchmarks.peers

chaos: setup-dev
	$(BIN)/python -m pytest tests/chaos -m chaos $(if $(SEED),--chaos-seed=$(SEED))

# A part of it chosen by the commit's hash, within 8 minutes on 2 cores; it prints its seed.
chaos-part: setup-dev
	$(BIN)/python -m pytest tests/chaos -m chaos --chaos-part $(if $(SEED),--chaos-seed=$(SEED))

soak: setup-dev
	$(BIN)/python -m tests.chaos.soak $(if $(SEED),--seed=$(SEED))
