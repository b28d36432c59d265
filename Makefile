# Penstock: `make run` starts everything, `make test` checks everything. Both set up what they need.
SHELL := /bin/bash
.DEFAULT_GOAL := help
ARGS ?=
# The distribution's own interpreter where it is new enough and has what a virtual environment needs: those are built with
# profile-guided optimisation, which is worth 5 to 25 % of a call. Another: make PYTHON=python3.13
PYTHON ?= $(shell for p in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
PY := .venv/bin/python
DEVNET := config/devnet
CHAIN := $(DEVNET)/node_modules/.installed-$(shell uname -m)
BUNDLER := $(DEVNET)/bundler/node_modules/.installed-$(shell uname -m)
CLIENTS := tests/clients
LIBRARIES := $(CLIENTS)/node_modules/.installed-$(shell uname -m)
BROWSER := tests/browser

.PHONY: help run test lint unit source browser compile bench lock clean

help:
	@echo "make run      the whole service on this machine (make run ARGS='--port 9000 --fresh')"
	@echo "make test     lint, types and every test"
	@echo "make lint     ruff and mypy only"
	@echo "make compile  the hot path as machine code, where there is a C compiler; test and bench do so too"
	@echo "make bench    the load tests; report and plot are kept in bench/"
	@echo "make lock     renew the pinned requirements from setup.cfg"
	@echo "make clean    remove what the other targets installed"

run: .venv/.run $(CHAIN) $(BUNDLER)
	@exec $(PY) -m proxy dev $(ARGS)

test: lint unit source

lint: .venv/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

unit: .venv/.test $(CHAIN) $(BUNDLER) $(LIBRARIES) browser
	@$(PY) -m proxy compile || true
	$(PY) -m pytest $(ARGS)

# What is compiled, once more as it is written.
source: .venv/.test
	PENSTOCK_SOURCE=1 $(PY) -m pytest tests/core tests/store/test_windows.py tests/wire tests/web tests/flows/test_upstream_*.py \
		tests/flows/test_cache.py tests/flows/test_logs_filters.py tests/flows/test_short_batches.py

compile: .venv/.test
	@$(PY) -m proxy compile

bench: .venv/.test $(CHAIN) $(LIBRARIES)
	@$(PY) -m proxy compile || true
	$(PY) -m bench $(ARGS)

.venv/.made:
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11 or newer with venv (on Debian: apt-get install python3-venv): none found on PATH"; exit 1; }
	@"$(PYTHON)" -m venv .venv
	@touch $@

.venv/.run: requirements/run.txt | .venv/.made
	@echo "installing Python packages (run) ..."
	@$(PY) -m pip install -q --disable-pip-version-check --require-hashes -r requirements/run.txt
	@touch $@

.venv/.test: requirements/test.txt | .venv/.made
	@echo "installing Python packages (test) ..."
	@$(PY) -m pip install -q --disable-pip-version-check --require-hashes -r requirements/test.txt
	@touch $@ .venv/.run

$(CHAIN): $(DEVNET)/package.json $(DEVNET)/package-lock.json
	@command -v npm >/dev/null || { echo "Penstock's dev chain needs Node 20 or newer with npm: not found on PATH"; exit 1; }
	@echo "installing npm packages (dev chain) ..."
	@cd $(DEVNET) && npm ci --ignore-scripts --include=optional --engine-strict=false --prefer-offline --no-audit --no-fund \
		--no-update-notifier --loglevel=error
	@cd $(DEVNET) && node_modules/node-linux-*/bin/node -e 'require("@nomicfoundation/edr")'  # npm forgives a missing native part
	@touch $@

$(BUNDLER): $(DEVNET)/bundler/package.json $(DEVNET)/bundler/package-lock.json | $(CHAIN)
	@echo "installing npm packages (bundler) ..."
	@cd $(DEVNET)/bundler && npm ci --ignore-scripts --legacy-peer-deps --prefer-offline --no-audit --no-fund --no-update-notifier \
		--loglevel=error && touch "$(CURDIR)/$@" || echo "the dev chain runs without a bundler until npm can install it"

$(LIBRARIES): $(CLIENTS)/package.json $(CLIENTS)/package-lock.json
	@command -v npm >/dev/null || { echo "the tests need Node 20 or newer with npm: not found on PATH"; exit 1; }
	@echo "installing npm packages (client libraries) ..."
	@cd $(CLIENTS) && npm ci --ignore-scripts --legacy-peer-deps --prefer-offline --no-audit --no-fund --no-update-notifier \
		--loglevel=error
	@touch $@

# Chromium for the browser tests: one on PATH, else npm's build of it (x86-64), else, where nobody else has one, Debian's (as root).
browser: .venv/.test
	@$(PY) -m tests.browser.chromium

lock: .venv/.test
	$(PY) -m pip install -q uv
	$(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url \
		--extra dev setup.cfg -o requirements/run.txt
	$(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url \
		--extra test setup.cfg -o requirements/test.txt

clean:
	rm -rf .venv .penstock $(DEVNET)/node_modules $(DEVNET)/*/node_modules $(CLIENTS)/node_modules $(BROWSER)/node_modules .mypy_cache .ruff_cache .pytest_cache
