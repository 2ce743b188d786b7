# The front door. Every target sets up what it needs; `make` alone lists them.
#
# Third-party packages live in one environment outside the work tree, shared by all clones and named
# by the hash of what it was made from; the clone's own .venv only points at it and at the sources.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: without compiled modules each of them would compile ours anew.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
HOLDFAST_CACHE ?= $(HOME)/.cache/holdfast
PYTEST_WORKERS ?= 2
REGISTRY ?=
TAG ?=
BUILDER ?=
ARGS ?=
NAME ?=
PYTHON312 ?= $(PYTHON)
# What `make prepare` installs for the targets test-<stack>.
STACKS ?= torchtitan deepspeed megatron py312

BIN := .venv/bin
STAMP := .venv/installed
SOURCES := $(shell sed -n 's/^where = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
CHECKED := $(wildcard $(SOURCES) charts tests benchmarks examples gpu)
STUBS := protos/holdfast_protos
PROTOC := 1.62.3
# Without test_receiving: it sends 256 MiB, for which old grpcio takes longer than its limits.
OLDEST := $(addprefix tests/unit/,protos daemon/transport daemon/trainers daemon/csi sdk/daemon \
	sdk/copying sdk/test_session.py) tests/contract/test_control_stream.py \
	--ignore=tests/unit/daemon/trainers/test_receiving.py
# What has rows marked `exhaustive` that no other target runs.
FAULTS := tests/local tests/combinations tests/gpu/test_compiled_steps.py \
	$(addprefix tests/unit/sdk/,agree/test_mirroring.py capture/test_routers.py \
	capture/test_spread_processes.py copying/test_device_hashes.py elastic/test_step_checks.py \
	elastic/test_work_samples.py integrations/test_policies.py launch/test_launch.py \
	launch/test_node_checks.py)
CLUSTER := $(BIN)/python tests/cluster/helpers/cli.py
CRD := crds/holdfast.dev_moetrainingjobs.yaml
SETTINGS := trainer_sdk/holdfast/_job_settings.py

# The stamp holds the path of the shared environment; when that was deleted, install again.
DEPS := $(file <$(STAMP))
ifeq ($(wildcard $(DEPS)/pyvenv.cfg),)
.PHONY: $(STAMP)
endif

comma := ,
# Another target may be installing something.
WAIT := -o DPkg::Lock::Timeout=600

# Requirements of the extras that the selection in $(1), a Python condition on `extra`, lets through.
requirements = $(PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*p["dependencies"], *(r for extra, rs in p["optional-dependencies"].items() if $(1) \
	for r in rs if not r.startswith("holdfast[")), sep="\n")'

# Prints where the Python before it has its packages.
site = -c 'import site; print(site.getsitepackages()[0])'

# Makes the environment $(2) empty, on top of the packages of the environment $(1).
chain = "$(1)/bin/python" -m venv --without-pip "$(2)"; \
	"$(1)/bin/python" $(site) > "$$("$(2)/bin/python" $(site))/deps.pth"

# Makes, once, the folder $$overlay: an environment with the extra $(1) on top of the shared one. The
# package $(2), if given, may be of another version than the shared one's.
define overlay
mkdir -p build
	$(call requirements,extra == "$(1)") > build/$(1)-requirements.txt
	grep -v "^$(or $(2),#)==" constraints.txt > build/$(1)-constraints.txt
	deps=$$(<$(STAMP))
	key=$$({ echo "$$deps"; cat build/$(1)-requirements.txt; } | sha256sum | cut -c1-16)
	overlay="$(HOLDFAST_CACHE)/$(1)-$$key"
	if [ ! -d "$$overlay" ]; then
	  exec 9>"$$overlay.lock"; flock 9
	  if [ ! -d "$$overlay" ]; then
	    rm -rf "$$overlay.new"
	    $(call chain,$$deps,$$overlay.new)
	    "$$overlay.new/bin/python" -m pip install --quiet --no-warn-script-location \
	      -c build/$(1)-constraints.txt -r build/$(1)-requirements.txt
	    mv -T "$$overlay.new" "$$overlay"
	  fi
	  exec 9>&-
	fi
endef

# Makes the bundle; its wheels stay in the cache, which other clones use at the same time.
bundle = flock "$(HOLDFAST_CACHE)/lock" $(BIN)/python -m gpu.bundle --cache "$(HOLDFAST_CACHE)" $(1)

# Makes, once, the environment $$machine: Python 3.12 with the packages that gpu/machine.toml
# finds installed, and nothing else.
define machine
for python in "$(PYTHON312)" python3.12 "$$HOME"/.pyenv/versions/3.12.*/bin/python; do
	  "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && break
	  python=
	done
	[ -n "$$python" ] || {
	  echo "This needs Python 3.12: install it, or name it with PYTHON312=/path/to/python." >&2
	  exit 1
	}
	"$$python" -c 'import tomllib; found = tomllib.load(open("gpu/machine.toml", "rb"))["installed"]; \
		print(*(f"{name}=={version}" for name, version in found.items()), sep="\n")' \
		> build/machine-requirements.txt
	key=$$({ "$$python" -VV; uname -m; cat build/machine-requirements.txt; } | sha256sum | cut -c1-16)
	machine="$(HOLDFAST_CACHE)/machine-$$key"
	if [ ! -d "$$machine" ]; then
	  exec 9>"$$machine.lock"; flock 9
	  if [ ! -d "$$machine" ]; then
	    echo "Installing torch for Python 3.12 into $$machine, once (several GB) ..."
	    rm -rf "$$machine.new"
	    "$$python" -m venv "$$machine.new"
	    "$$machine.new/bin/python" -m pip install --quiet --no-compile -r build/machine-requirements.txt
	    mv -T "$$machine.new" "$$machine"
	  fi
	  exec 9>&-
	fi
endef

##@ Everyday

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## "; print "make TARGET [ARGS=...]" } \
		/^##@/ { print "\n" substr($$0, 5) } \
		/^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

.PHONY: install
install: $(STAMP) ## Set up .venv (all other targets do this themselves)
	@echo "Ready: .venv, with the packages in $$(<$(STAMP))"

.PHONY: demo
demo: $(STAMP) ## Watch a training job lose trainers, a daemon and two nodes, and finish byte for byte
	@mkdir -p build/demo
	$(BIN)/holdfast demo --report build/demo/report.json $(ARGS)

.PHONY: test
test: $(STAMP) redis versitygw prometheus ## Run the tests but slow ones; ARGS="tests/unit -k raim5" narrows them
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --without-slow $(ARGS)

.PHONY: test-all
test-all: $(STAMP) redis versitygw prometheus ## Run the tests, slow ones too
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(ARGS)

# In an environment where what the distribution asks for is of the oldest version that it allows.
.PHONY: test-oldest
test-oldest: $(STAMP) ## Run tests with the oldest grpcio, protobuf, numpy, ... that are allowed
	@oldest=$$($(PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
		print(*(r.replace(">=", "==") for r in p["project"]["dependencies"]))')
	rm -rf build/oldest
	$(BIN)/python -m venv --without-pip build/oldest
	echo "import site; site.addsitedir('$$($(BIN)/python $(site))')" \
	  > "$$(build/oldest/bin/python $(site))/deps.pth"
	build/oldest/bin/python -m pip install --quiet --no-deps $$oldest
	build/oldest/bin/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(or $(ARGS),$(OLDEST))

.PHONY: check
check: $(STAMP) ## Format, lint, types, import contracts, generated files
	@echo "== format"; $(BIN)/python -m ruff format --check .
	echo "== lint"; $(BIN)/python -m ruff check .
	echo "== import contracts"; $(BIN)/lint-imports --no-logo
	echo "== generated stubs"; drift=$$(mktemp -d); trap 'rm -rf "$$drift"' EXIT
	$(call generate,$$drift)
	for stub in "$$drift"/holdfast_protos/* $(STUBS)/*_pb2*; do  # both ways: missing, left over
	  name=$${stub##*/}
	  cmp "$$drift/holdfast_protos/$$name" "$(STUBS)/$$name" \
	    || { echo "$$name is not what its .proto says: run 'make protos'" >&2; exit 1; }
	done
	echo "== generated resource and reference"; $(BIN)/python -m holdfast_operator.crd > "$$drift/crd"
	$(BIN)/python -m holdfast_operator.crd --reference docs/job.md > "$$drift/reference"
	$(BIN)/python -m holdfast_operator.crd --settings > "$$drift/settings"
	cmp "$$drift/crd" $(CRD) && cmp "$$drift/reference" docs/job.md \
	  && cmp "$$drift/settings" $(SETTINGS) \
	  || { echo "not what the job's types say: run 'make crds'" >&2; exit 1; }
	echo "== generated files of the chart"; $(BIN)/python charts/chart_files.py --check
	echo "== types"; $(BIN)/python -m mypy $(CHECKED)

# No link is checked outside the site, and nothing is fetched.
.PHONY: docs
docs: $(STAMP) ## Build the documents as a site into build/site; a link or page that is missing is an error
	@$(call overlay,docs)
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 "$$overlay/bin/python" -m mkdocs build \
	  --strict --config-file docs/site/mkdocs.yml
	echo "build/site/index.html; with search: python3 -m http.server --bind 127.0.0.1 --directory build/site"

# The network, the compiler and what else CI does meanwhile are busy at the same time.
.PHONY: prepare
prepare: $(STAMP) redis prometheus ## Install and compile what the targets that CI calls need, beside other work
	@$(CLUSTER) build &
	compiling=$$!
	$(call bundle)
	$(if $(filter torchtitan,$(STACKS)),$(call overlay,torchtitan,fsspec))
	$(if $(filter deepspeed,$(STACKS)),$(call overlay,deepspeed))
	$(if $(filter megatron,$(STACKS)),$(call overlay,megatron))
	$(if $(filter py312,$(STACKS)),$(machine))
	wait $$compiling

.PHONY: mutants
mutants: $(STAMP) ## Plant bugs and see the simulation find them (long); ARGS="block change"
	@$(BIN)/python tests/simulation/helpers/mutants.py $(ARGS)

.PHONY: simulate
simulate: $(STAMP) ## Run seeded schedules of the simulation by hand; ARGS="--first SEED --log"
	@PYTHONPATH=tests/simulation/helpers $(BIN)/python -m simulation $(ARGS)

.PHONY: test-faults
test-faults: $(STAMP) redis ## Run every fault test for every policy and redundancy, and train what works together (long)
	@$(BIN)/python -m pytest $(FAULTS) -n $(PYTEST_WORKERS) --dist worksteal \
	  --every-combination $(ARGS)

# Azurite alone has hundreds of MB: no other target needs it. The variable keeps gcsfs from
# asking over gRPC what kind of bucket it has, which the emulator does not answer.
.PHONY: test-stores
test-stores: $(STAMP) ## Run the tests of durable storage on emulators of Google's and Azure's; needs npm and Go
	@$(call overlay,stores)
	HOLDFAST_CACHE="$(HOLDFAST_CACHE)" $(BIN)/python \
	  tests/contract/storage/helpers/emulators.py >/dev/null
	HOLDFAST_CACHE="$(HOLDFAST_CACHE)" PYTHONPATH="$$("$$overlay/bin/python" $(site))" \
	  GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false $(BIN)/python -m pytest tests/contract/storage \
	  -k "[gs or [abfs" --every-combination $(ARGS)

# torchtitan allows only versions of datasets that allow only an older fsspec than ours.
.PHONY: test-torchtitan
test-torchtitan: $(STAMP) ## Run the tests that train with torchtitan, which has an environment of its own
	@$(call overlay,torchtitan,fsspec)
	PYTHONPATH="$$("$$overlay/bin/python" $(site))" $(BIN)/python -m pytest -n $(PYTEST_WORKERS) \
	  --dist worksteal tests/unit/sdk/integrations/test_torchtitan.py \
	  tests/local/frameworks/test_torchtitan.py tests/unit/sdk/launch/test_forking.py $(ARGS)

.PHONY: test-deepspeed
test-deepspeed: $(STAMP) ## Run the tests that train with DeepSpeed, which has an environment of its own
	@$(call overlay,deepspeed)
	PYTHONPATH="$$("$$overlay/bin/python" $(site))" $(BIN)/python -m pytest -n $(PYTEST_WORKERS) \
	  --dist worksteal tests/unit/sdk/integrations/test_deepspeed.py $(ARGS)

.PHONY: test-megatron
test-megatron: $(STAMP) ## Run the tests that train with Megatron-Core, which has an environment of its own
	@$(call overlay,megatron)
	PYTHONPATH="$$("$$overlay/bin/python" $(site))" $(BIN)/python -m pytest -n $(PYTEST_WORKERS) \
	  --dist worksteal tests/unit/sdk/integrations/test_megatron.py \
	  tests/unit/sdk/elastic/test_staying_parallelism.py $(ARGS)

.PHONY: test-optimizers
test-optimizers: $(STAMP) ## Run the tests of torchao's, pytorch_optimizer's and peft's classes, in an environment of their own
	@$(call overlay,optimizers)
	PYTHONPATH="$$("$$overlay/bin/python" $(site))" $(BIN)/python -m pytest -n $(PYTEST_WORKERS) \
	  --dist worksteal tests/unit/sdk/state/test_published.py \
	  tests/unit/sdk/integrations/test_huggingface.py $(ARGS)

# A schedule of real sessions takes as long as a dozen others, so their share of --schedules is small.
.PHONY: test-schedules
test-schedules: $(STAMP) ## Run ten thousand schedules of the simulation, and more of its models (long)
	@$(BIN)/python -m pytest $(addprefix tests/simulation/test_,schedules.py worlds.py windows.py \
	  persisting.py two_losses.py votes.py) -n $(PYTEST_WORKERS) --dist worksteal \
	  --schedules 10000 --every-combination $(ARGS)
	$(BIN)/python -m pytest tests/simulation/test_stages.py tests/simulation/test_reshaping.py \
	  -n $(PYTEST_WORKERS) --dist worksteal --schedules 100000 --every-combination $(ARGS)

# Not with -m: each daemon that is forked would import the main module anew, pictures and all.
.PHONY: chaos
chaos: $(STAMP) redis versitygw ## Break real processes at random for 30 minutes; ARGS="--minutes 3 --seed 1"
	@HOLDFAST_CACHE="$(HOLDFAST_CACHE)" GRPC_VERBOSITY=NONE \
	  PYTHONPATH=tests/local/chaos:tests/local/helpers:tests/contract/storage/helpers \
	  $(BIN)/python -c 'import sys, chaos; sys.exit(chaos.main())' $(ARGS)

.PHONY: format
format: $(STAMP) ## Rewrite the sources in the house format
	@$(BIN)/python -m ruff check --fix-only --quiet .
	$(BIN)/python -m ruff format .

##@ For a cluster of your own (needs docker, podman or buildah)

PUBLISH := $(BIN)/python charts/publish.py
NAMES = --registry "$(REGISTRY)" --tag "$(TAG)" --builder "$(BUILDER)"

.PHONY: images
images: $(STAMP) ## Build our images; REGISTRY=registry.example/team TAG=1 name them
	@$(PUBLISH) build $(NAMES) -- $(ARGS)

.PHONY: push
push: images ## Build and push them, and write values and a job that use them; REGISTRY=...
	@$(PUBLISH) push $(NAMES)

##@ On a real Kubernetes (needs root and Go)

# It needs no package of others: CI runs it beside `install`.
.PHONY: kubernetes
kubernetes: ## Compile Kubernetes, once (the other targets here do this themselves)
	@HOLDFAST_CACHE="$(HOLDFAST_CACHE)" PYTHONPATH=core $(PYTHON) tests/cluster/helpers/binaries.py

.PHONY: cluster-demo
cluster-demo: $(STAMP) ## The same on a real Kubernetes: a rank, a pod, a daemon, a node, the operator
	@$(CLUSTER) build
	HOLDFAST_CACHE="$(HOLDFAST_CACHE)" PYTHONPATH=tests/cluster/helpers \
	  $(BIN)/python tests/cluster/helpers/cluster_demo.py --report build/cluster-demo/report.json $(ARGS)

.PHONY: cluster
cluster: $(STAMP) ## Start Kubernetes on this machine, with our images; ARGS="--nodes 3"
	@$(CLUSTER) up $(ARGS)

.PHONY: cluster-down
cluster-down: $(STAMP) ## End it
	@$(CLUSTER) down

.PHONY: test-cluster
test-cluster: $(STAMP) ## Run the cluster tests on a cluster of their own
	@$(CLUSTER) build
	$(BIN)/python -m pytest tests/cluster $(ARGS)

##@ On a machine with CUDA

.PHONY: gpu-bundle
gpu-bundle: $(STAMP) ## Make the folder to bring to one that has no network
	@$(call bundle,$(ARGS))

.PHONY: test-py312
test-py312: $(STAMP) ## Run that folder here, with the Python and torch of such a machine
	@$(call bundle)
	$(machine)
	PYTHON="$$machine/bin/python" build/gpu-bundle/gpu/run.sh \
	  --out build/gpu-session --small --deadline-s 1200 $(ARGS)

##@ Now and then

# Some compare with packages of others, which have an environment of their own.
.PHONY: bench
bench: $(STAMP) ## Measure snapshots beside other packages; NAME=list shows what else can be measured
	@name="$(or $(NAME),snapshot)" paths= sites=
	case "$$name" in
	operator) paths=tests/cluster/helpers ;;
	snapshot | dependencies | s3)
	  $(call overlay,bench)
	  paths=$$("$$overlay/bin/python" $(site)) ;;
	recovery)
	  if [[ "$(ARGS)" == *--stacks* ]]; then
	    $(call overlay,torchtitan,fsspec)
	    sites="--site torchtitan $$("$$overlay/bin/python" $(site))"
	    $(call overlay,bench)
	    sites="$$sites --site torchft $$("$$overlay/bin/python" $(site))"
	  fi ;;
	esac
	if [ "$$name" = s3 ]; then
	  $(MAKE) versitygw
	  paths="$$paths:tests/contract/storage/helpers"
	fi
	HOLDFAST_CACHE="$(HOLDFAST_CACHE)" PYTHONPATH="$$paths" $(BIN)/python -m benchmarks "$$name" $(ARGS) $$sites

.PHONY: fuzz
fuzz: $(STAMP) ## Give damaged bytes to every parser; ARGS="--minutes 10 --only manifest"
	@site=""
	if ( set -e; $(call overlay,fuzz) ); then
	  $(call overlay,fuzz)
	  site=:$$("$$overlay/bin/python" $(site))
	else
	  echo "atheris cannot be installed here: the damage is random, not led by what it reaches." >&2
	fi
	PYTHONPATH="tests/fuzz$$site" $(BIN)/python tests/fuzz/fuzz.py $(ARGS)

.PHONY: dist
dist: $(STAMP) ## Make the source distribution, the wheel and the chart of this commit in build/dist
	@$(call overlay,release)
	PYTHON="$$overlay/bin/python" .ci/release --dist

.PHONY: release
release: $(STAMP) ## The same, if the commit is fit for a release; says how to upload it
	@$(call overlay,release)
	PYTHON="$$overlay/bin/python" .ci/release

.PHONY: protos
protos: $(STAMP) ## Generate the stubs from the .proto files
	@$(call generate,protos)

.PHONY: crds
crds: $(STAMP) ## Generate the custom resource, its reference and the SDK's settings from the job's types
	@$(BIN)/python -m holdfast_operator.crd > $(CRD).new && mv $(CRD).new $(CRD)
	$(BIN)/python -m holdfast_operator.crd --reference docs/job.md > docs/job.md.new
	mv docs/job.md.new docs/job.md
	$(BIN)/python -m holdfast_operator.crd --settings > $(SETTINGS).new
	mv $(SETTINGS).new $(SETTINGS)

.PHONY: chart
chart: $(STAMP) ## Generate the chart's schema, dashboard and copy of the custom resource
	@$(BIN)/python charts/chart_files.py

.PHONY: clean
clean: ## Delete everything that can be made again (the shared environment stays)
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find $(CHECKED) -name __pycache__ -prune -exec rm -rf {} +

# Writes the stubs of every .proto below the folder $(1). The compiler is an old one, so that what it
# writes works with old versions of protobuf and grpcio, too; it needs no other package (0007).
define generate
protoc="$(HOLDFAST_CACHE)/protoc-$(PROTOC)-$$(basename "$$(<$(STAMP))")"
	if [ ! -d "$$protoc" ]; then
	  tree=$$(mktemp -d "$$protoc.XXXX")
	  $(BIN)/python -m pip install --quiet --no-deps --target "$$tree" grpcio-tools==$(PROTOC)
	  mv -T "$$tree" "$$protoc" 2>/dev/null || rm -rf "$$tree"  # another clone was faster
	fi
	PYTHONPATH="$$protoc" $(BIN)/python -m grpc_tools.protoc -I protos \
	--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
	$(STUBS)/*.proto
endef

# The tests start their own redis-server on a free port.
.PHONY: redis
redis:
	@if ! command -v redis-server >/dev/null; then
	  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	    echo "The tests need redis-server: install it (Debian: apt-get install redis-server)." >&2
	    exit 1
	  fi
	  apt-get $(WAIT) update -qq
	  DEBIAN_FRONTEND=noninteractive apt-get $(WAIT) install -y -qq --no-install-recommends redis-server \
	    >/dev/null
	fi

# They have Prometheus' own tool read and evaluate alerts and dashboard.
.PHONY: prometheus
prometheus:
	@if ! command -v promtool >/dev/null; then
	  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	    echo "The tests need promtool: install it (Debian: apt-get install prometheus)." >&2
	    exit 1
	  fi
	  apt-get $(WAIT) update -qq
	  DEBIAN_FRONTEND=noninteractive apt-get $(WAIT) install -y -qq --no-install-recommends prometheus \
	    >/dev/null
	fi

# And their own S3-compatible server, built once into the cache with Go.
.PHONY: versitygw
versitygw: $(STAMP)
	@HOLDFAST_CACHE="$(HOLDFAST_CACHE)" $(BIN)/python \
	  tests/contract/storage/helpers/versitygw.py >/dev/null

$(STAMP): constraints.txt pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
	  found=$$($(PYTHON) --version 2>&1) || found="not there"
	  echo "Holdfast needs Python 3.11 or newer; $(PYTHON) is $$found." \
	    "Say which to use: make PYTHON=python3.11 ..." >&2
	  exit 1
	}
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || {
	  echo "$(PYTHON) cannot make environments: install its venv package" \
	    "(Debian: apt-get install python3-venv)." >&2
	  exit 1
	}
	mkdir -p build "$(HOLDFAST_CACHE)"
	$(call requirements,extra not in {"bench"$(comma) "deepspeed"$(comma) "docs"$(comma) "fuzz"$(comma) "megatron"$(comma) "optimizers"$(comma) "release"$(comma) "stores"$(comma) "torchtitan"}) > build/requirements.txt
	key=$$({ $(PYTHON) -VV; uname -m; cat build/requirements.txt constraints.txt; } \
	  | sha256sum | cut -c1-16)
	deps="$(HOLDFAST_CACHE)/deps-$$key"
	if [ ! -d "$$deps" ]; then
	  exec 9>"$(HOLDFAST_CACHE)/lock"; flock 9  # another clone may be making the same one
	  if [ ! -d "$$deps" ]; then
	    echo "Installing third-party packages into $$deps, once (several GB, some minutes) ..."
	    rm -rf "$$deps.new"
	    $(PYTHON) -m venv "$$deps.new"
	    "$$deps.new/bin/python" -m pip install --quiet -c constraints.txt -r build/requirements.txt
	    mv -T "$$deps.new" "$$deps"
	  fi
	  exec 9>&-
	fi
	rm -rf .venv
	$(call chain,$$deps,.venv)
	for root in $(SOURCES); do echo "$(CURDIR)/$$root"; done > "$$($(BIN)/python $(site))/sources.pth"
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	for tool in "$$deps"/bin/*; do  # the shared tools, run by this clone's interpreter
	  own="$(BIN)/$${tool##*/}"
	  if [ -e "$$own" ] || [ ! -f "$$tool" ]; then continue; fi
	  if [ "$$(head -c 2 "$$tool")" = "#!" ]; then
	    sed "1s|.*|#!$(CURDIR)/$(BIN)/python|" "$$tool" > "$$own"; chmod +x "$$own"
	  else
	    ln -s "$$tool" "$$own"
	  fi
	done
	echo "$$deps" > $(STAMP)
