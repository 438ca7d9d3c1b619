# make run     everything a first run needs, then that run       (make run NAME=monday ARGS="--set steps=20")
# make vllm    what the preset tiny-vllm-cpu needs besides: vLLM for CPUs, on Linux and x86-64
# make test    what developers need besides, vLLM where it runs, then all tests      (make test ARGS="tests/unit/test_loop.py")
# make check   the quick part of the tests: formatter, linter, and unit tests that take no second each
# make lab     JupyterLab on the workbench, with its settings kept in this folder
# make export  modules from notebooks: those in nbs/, and your own in mine/   (make export MINE=~/my_rl)
# make readme  README.md from nbs/index.ipynb, data/guide from nbs/guide, and nbs/map.ipynb from the tree
# make docs    guide, notebooks and API as one searchable site, in build/docs
# make clean   everything that was installed or built here; runs/ stays

SHELL := /bin/bash -o pipefail
# Python code takes a fifth longer in a Python that was compiled without --enable-optimizations, as pyenv's is unless asked.
# Where the first on PATH was, and the system's is of the same version, .venv is made with the system's.
OPTIMIZED := import sysconfig; raise SystemExit("--enable-optimizations" not in sysconfig.get_config_var("CONFIG_ARGS"))
SAME := import ensurepip, sys, venv; raise SystemExit(sys.version_info[:2] != tuple(map(int, sys.argv[1:])))
PYTHON ?= $(shell { python3 -c '$(OPTIMIZED)' || \
	! /usr/bin/python3 -c '$(SAME)' $$(python3 -c 'import sys; print(*sys.version_info[:2])'); } 2>/dev/null && echo python3 || echo /usr/bin/python3)
PRESET ?= tiny
NAME ?=
ARGS ?=
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-deps
# one line per package as it comes; everything, if it fails
LOG := .venv/install.log
BRIEF := tee $(LOG) | sed -un -e 's/^Collecting \([^ ]*\).*/  \1/p' -e 's/^Processing .*\/\([^-]*-[^-]*\)-.*/  \1/p' -e 's/^Installing .*/  unpacking/p' || { tail -n 40 $(LOG); exit 1; }
export PIP_REQUIRE_VIRTUALENV := 1
# what JupyterLab would write into the user's home, and the notebooks it shows
STATE ?= $(CURDIR)/.jupyter
NOTEBOOKS ?= nbs
# a folder of notebooks of one's own
MINE ?= mine
export JUPYTER_CONFIG_DIR := $(STATE)/config
export JUPYTER_DATA_DIR := $(STATE)/data
export JUPYTER_RUNTIME_DIR := $(STATE)/runtime
export JUPYTERLAB_SETTINGS_DIR := $(STATE)/settings
export JUPYTERLAB_WORKSPACES_DIR := $(STATE)/workspaces
export IPYTHONDIR := $(STATE)/ipython

.PHONY: help run test check vllm browser sandbox hosts lab export readme docs clean
help:
	@sed -n 's/^# make/make/p' Makefile

run: .venv/.run
	@$(BIN)/rlbench run $(PRESET) $(if $(NAME),--set name=$(NAME)) $(ARGS)

# vLLM's CPU build needs AVX-512 or AVX2; elsewhere the tests of it are skipped and say so
VLLM := $(if $(shell grep -m1 -o -w -e avx512f -e avx2 /proc/cpuinfo 2>/dev/null),.venv/.vllm)

test: $(if $(ARGS),,browser sandbox hosts) .venv/.dev $(if $(ARGS),,$(VLLM))
	@mkdir -p $(STATE)
	@$(BIN)/python -m compileall -q rlbench  # once for the many processes that the tests start
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q $(or $(ARGS),-n 4 --no-loadscope-reorder tests)  # what pytest makes of the tests is kept, too

check: .venv/.dev
	@mkdir -p $(STATE)
	@$(BIN)/ruff format --check -q . && $(BIN)/ruff check -q .
	@$(BIN)/python -m pytest -q -n 2 -m "not slow" $(or $(ARGS),tests/unit)

# the tests drive a Chromium; Debian's, where there is none
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "the tests need a browser: install Debian's package chromium, or put google-chrome on PATH" >&2; exit 1; }; \
	echo "installing chromium (once)"; export DEBIAN_FRONTEND=noninteractive; \
	apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null

# the tests of the sandbox lock programs in with bubblewrap, and make its filter of system calls anew with libseccomp
sandbox:
	@command -v bwrap >/dev/null && ldconfig -p | grep 'libseccomp\.so\.2' >/dev/null && exit 0; \
	[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "the tests need a jail: install Debian's packages bubblewrap and libseccomp2" >&2; exit 1; }; \
	echo "installing bubblewrap and libseccomp2 (once)"; export DEBIAN_FRONTEND=noninteractive; \
	apt-get update -qq && apt-get install -qq -y --no-install-recommends bubblewrap libseccomp2 >/dev/null

# the tests of runs over several hosts make hosts of network namespaces, with the programs ip and tc
hosts:
	@PATH="$$PATH:/usr/sbin:/sbin"; command -v ip >/dev/null && command -v tc >/dev/null && exit 0; \
	[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "the tests need hosts of their own: install Debian's package iproute2" >&2; exit 1; }; \
	echo "installing iproute2 (once)"; export DEBIAN_FRONTEND=noninteractive; \
	apt-get update -qq && apt-get install -qq -y --no-install-recommends iproute2 >/dev/null

QUIET := $(STATE)/settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings
$(QUIET):
	@mkdir -p $(@D)
	@echo '{"fetchNews": "false", "checkForUpdates": false}' > $@

# trusted: what these notebooks keep of an earlier execution is shown whole, widgets and pictures too
# the folder for runs is made beforehand, so that notebooks and `make run` find the same one
lab: .venv/.dev $(QUIET)
	@mkdir -p runs
	@find $(NOTEBOOKS) -name "*.ipynb" -not -path "*/.*" -print0 | xargs -0 $(BIN)/jupyter trust >/dev/null
	@$(BIN)/jupyter lab --notebook-dir=$(NOTEBOOKS) --LabApp.default_url=/lab/tree/$(notdir $(firstword $(wildcard $(NOTEBOOKS)/workbench.ipynb $(NOTEBOOKS)/index.ipynb))) \
	--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate --LanguageServerManager.autodetect=False $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

# nbdev alone: Quarto, which its documentation needs, is not asked for
export: .venv/.dev
	@$(BIN)/python -c 'from nbdev.doclinks import nbdev_export; nbdev_export()'
	@for notebook in $(wildcard $(MINE)/*.ipynb); do $(BIN)/rlbench export "$$notebook" || exit 1; done

readme: .venv/.dev
	@$(BIN)/python tests/readme.py

# the notebooks are shown as they are stored: nothing is executed
docs: .venv/.docs
	@$(BIN)/python tests/docs.py build/docs-source
	@$(BIN)/python -m sphinx -W --keep-going -q -j auto build/docs-source build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .jupyter
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("rlbench needs Python 3.11 or newer: make ... PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "making .venv"
	@$(PYTHON) -m venv .venv

# of every start, a tenth is compiling the package where Python keeps no bytecode (PYTHONDONTWRITEBYTECODE)
COMPILE = $(BIN)/python -m compileall -q rlbench

# a stamp each: the second call finds nothing to do; what developers need includes what a run needs
.venv/.run: requirements-run.lock setup.py settings.ini | $(BIN)/python
	@echo "installing $$(grep -c == $<) packages into .venv (once; most of the time is torch)"
	@$(INSTALL) -r $< 2>&1 | $(BRIEF)
	@$(INSTALL) --quiet --no-build-isolation --use-pep517 -e .
	@$(COMPILE)
	@$(call torch,$<)
	@touch $@

.venv/.dev: requirements-dev.lock requirements-run.lock setup.py settings.ini | $(BIN)/python
	@echo "installing $$(grep -c == $<) packages into .venv (once; most of the time is torch)"
	@$(INSTALL) -r $< 2>&1 | $(BRIEF)
	@$(INSTALL) --quiet --no-build-isolation --use-pep517 -e .
	@$(COMPILE)
	@$(call torch,$<)
	@touch $@ .venv/.run

.venv/.vllm: requirements-vllm.lock .venv/.dev
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { \
	[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "vLLM needs libnuma.so.1: install Debian's package libnuma1" >&2; exit 1; }; \
	echo "installing libnuma1 (once)"; export DEBIAN_FRONTEND=noninteractive; apt-get update -qq && apt-get install -qq -y --no-install-recommends libnuma1 >/dev/null; }
	@echo "installing $$(grep -c == $<) packages for vLLM into .venv (once)"
	@$(INSTALL) -r $< 2>&1 | $(BRIEF)
	@touch $@

vllm: .venv/.vllm

# the site needs neither torch nor the package itself
.venv/.docs: requirements-docs.lock | $(BIN)/python
	@echo "installing $$(grep -c == $<) packages for the site into .venv (once)"
	@$(INSTALL) -r $< 2>&1 | $(BRIEF)
	@touch $@

# a build of torch for GPUs brings libraries of its own, which the lock does not name
torch = $(BIN)/python -c 'import torch' 2>/dev/null || { echo "completing torch"; $(BIN)/python -m pip install -c $(1) torch==2.13.0; $(BIN)/python -c 'import torch'; }
