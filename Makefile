# Every target sets itself up: .venv is made when it is missing or older than what it is made from.
PYTHON ?= python3
export OMP_NUM_THREADS ?= 1
# Containers set it, and each of some hundred processes of a test run would then compile the code anew.
unexport PYTHONDONTWRITEBYTECODE
PB := protos/protofed/protos/v1
PROTOC = .venv/bin/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy=.venv/bin/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=.venv/bin/protoc-gen-mypy_grpc

.PHONY: help demo compose-demo test test-fast docs format notebook slow faults e2e postgres check bench bench-peers leakage browser dashboards images version release wheelhouse sbom dependencies protos \
	policies compatibility pictures constraints clean
help:            ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*##/\1\t/p' Makefile

# Two of three installed modules are never imported, not even by the tests: the others are compiled when they are first.
# All of them would take a minute.
INSTALL = $(PYTHON) -m venv .venv && .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

.venv/demo: pyproject.toml constraints.txt
	@echo "setting up .venv, once: PyTorch and what the demo needs, a few minutes"
	$(INSTALL) -e '.[client,report]'
	@touch $@

# It adds to what `make demo` has installed. Where it is there, the demo needs nothing of its own.
.venv/ready: pyproject.toml constraints.txt
	@echo "setting up .venv, once: PyTorch and all that tests and documents need, a few minutes"
	$(INSTALL) -e '.[dev]'
	@touch $@

demo: $(if $(wildcard .venv/ready),.venv/ready,.venv/demo)  ## a server and five site daemons train FedNH, FedAvg and solo on the digits over gRPC
	.venv/bin/protofed demo

compose-demo:           ## a server, an evaluator and five sites in containers train on the digits; needs Docker with Compose
	deploy/docker/compose/demo.sh

test: .venv/ready       ## the whole test suite
	.venv/bin/python -m pytest -n 2 --dist worksteal

test-fast: .venv/ready  ## the tests of packages and methods only, to be run while you write
	.venv/bin/python -m pytest -n 2 --dist worksteal -x tests/common tests/client tests/server tests/methods

slow: .venv/ready       ## the long suites
	.venv/bin/python -m pytest -m slow -n 2

dashboards: .venv/ready  ## docs/assets/dashboard-*.png, of a pilot of minutes and a real Prometheus
	.venv/bin/python -m tests.support.dashboard_images

browser: .venv/ready    ## the pages in a real Chromium: mouse, keyboard, axe; apt-get install chromium
	.venv/bin/python -m pytest -m browser tests/browser -rs

faults: .venv/ready     ## the faults that take minutes each
	.venv/bin/python -m pytest -m faults tests/faults -n 2 --dist worksteal

e2e: .venv/ready        ## as root: the guide in networks of their own; wheel and tutorials; images and compose on an engine
	.venv/bin/python -m tests.e2e.hospitals
	.venv/bin/python -m tests.e2e.pilot
	.venv/bin/python -m tests.e2e.pilot --wheel --rehearsal
	.venv/bin/python -m tests.e2e.tutorials
	.venv/bin/python -m tests.e2e.engine

postgres: .venv/ready   ## the ledger's tests on PostgreSQL, too: make postgres URL=postgresql+psycopg://USER@HOST/NAME
	PROTOFED_TEST_POSTGRES=$(URL) .venv/bin/python -m pytest tests/server/storage/test_ledger.py \
		tests/server/storage/test_database.py tests/server/storage/test_database_versions.py tests/server/storage/test_takeover.py

format: .venv/ready     ## bring the code into the house's form
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

docs: .venv/ready       ## the reference, from the code; site/: the documents as pages, where a link that leads nowhere is an error
	.venv/bin/python -m docs.tables
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build

notebook: .venv/ready   ## docs/tutorials/lab.ipynb with the outputs of a new run
	.venv/bin/python -m tests.support.notebook

check: .venv/ready      ## formatter, linter, types, layers, generated code and documents, no pickles
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	tests/no_pickles.sh
	tests/proto_drift.sh
	.venv/bin/python -m docs.tables --check
	.venv/bin/python -m tests.support.sentences --quiet

bench: .venv/ready      ## measurements beside their goals: make bench BENCH="--only rounds --against FILE"
	.venv/bin/python -m tests.bench $(BENCH)

bench-peers:            ## .venv-peers/, in which `make bench` finds NVFlare and Flower and measures them, too
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/bench/peers/requirements.txt

leakage: .venv/ready    ## what a server can infer about sites from what they send: simple attacks, minutes
	.venv/bin/python -m tests.bench.leakage

IMAGE_VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
images:                 ## protofed-server and protofed-client; more options for docker build: make images BUILD="…"
	for target in server client; do docker build -f deploy/docker/Dockerfile --target $$target $(BUILD) \
		--build-arg VERSION=$(IMAGE_VERSION) --build-arg REVISION=$$(git rev-parse HEAD) \
		-t protofed-$$target:$(IMAGE_VERSION) . || exit 1; done

version: .venv/ready    ## write the version of pyproject.toml wherever an image, a wheel or the chart is named
	.venv/bin/python -m tests.support.version_names

release: .venv/ready    ## a release: versions, notes, dist/, commits and tag: make release VERSION=0.3.0, first with DRY=1
	.venv/bin/python -m tests.support.release $(VERSION) $(if $(DRY),--dry)

EXTRAS ?= postgres,report
FETCH = .venv/bin/python -m pip --quiet --disable-pip-version-check
wheelhouse: .venv/ready ## wheelhouse/: all wheels of an installation without a network: make wheelhouse EXTRAS=client,report
	rm -rf wheelhouse && $(FETCH) wheel --no-deps --wheel-dir wheelhouse .
	$(FETCH) download --only-binary=:all: -c constraints.txt -c deploy/docker/tools.txt --dest wheelhouse \
		-r deploy/docker/tools.txt "$$(ls wheelhouse/protofed-*.whl)[$(EXTRAS)]"

sbom: .venv/ready       ## sbom/*.cdx.json: what the server alone installs, and what everything does (CycloneDX)
	.venv/bin/python -m tests.support.sbom

dependencies: .venv/ready ## whether all fits together, and known vulnerabilities; needs the network
	.venv/bin/python -m pip check
	.venv/bin/python -m tests.support.vulnerabilities

protos: .venv/ready     ## generate the messages and stubs from the .proto files; stubs only of those with a service
	$(PROTOC) --python_out=protos --mypy_out=protos $(PB)/*.proto
	$(PROTOC) --grpc_python_out=protos --mypy_grpc_out=protos $$(grep -l ^service $(PB)/*.proto)

policies: .venv/ready   ## the lists of methods in deploy/policies, of all that a policy's other rules admit
	.venv/bin/python -m tests.support.shipped_policies

compatibility: .venv/ready ## tests/golden/compatibility.json, the names that a minor version keeps; says which of them are gone
	.venv/bin/python -m tests.support.public_names

pictures:        ## docs/*.svg from docs/*.dot; needs graphviz
	for name in architecture pilot update; do dot -Tsvg docs/assets/$$name.dot -o docs/assets/$$name.svg || exit 1; done

constraints: .venv/ready ## write down the versions that are installed now, and the hashes of the images' wheels
	(head -1 constraints.txt; .venv/bin/python -m pip freeze --exclude-editable) > constraints.new && mv constraints.new constraints.txt
	.venv/bin/python -m tests.gpu.requirements > tests/gpu/requirements.new && mv tests/gpu/requirements.new tests/gpu/requirements.txt
	.venv/bin/python -m tests.support.image_hashes > hashes.new && mv hashes.new deploy/docker/hashes.txt

clean:           ## remove what the targets made
	rm -rf .venv .venv-peers .mypy_cache .ruff_cache .pytest_cache .hypothesis
