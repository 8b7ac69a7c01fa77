# One environment for everything: the generated project's, and the template's own on top.

PROJECT := {{cookiecutter.project_slug}}
DEMO := build/demo/image-classifier
VENV ?= .venv

override VENV := $(patsubst ~/%,$(HOME)/%,$(VENV))
ifneq ($(words $(VENV)),1)
$(error VENV='$(VENV)' is not one path without spaces)
endif

# A relative VENV stays one: make takes a folder with a space for two.
under = $(if $(filter /%,$(VENV)),,$(1))$(VENV)
BIN := $(call under,$(CURDIR)/)/bin
INSTALLED := $(VENV)/.pretuned
UV := PATH="$$PATH:$(BIN)" uv

# Users get the template folder: nothing that runs here may leave a cache in it.
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
# Container images set it, and every process then compiles torch anew: 5 s each.
unexport PYTHONDONTWRITEBYTECODE
export RUFF_NO_CACHE := true

.DEFAULT_GOAL := help
.PHONY: help demo test docs faults measure figures notebook format dist environment clean

help:
	@echo 'make demo      make a project in $(DEMO) and train it'
	@echo 'make test      run ruff, the import contract, pyrefly, and all tests'
	@echo 'make docs      build the site of all pages in build/site; a broken link is an error'
	@echo 'make faults    inject every fault of docs/faults.md; about an hour on 2 cores'
	@echo 'make measure   measure again what README.md and docs/ show: up to an hour, nothing beside'
	@echo 'make figures   write the figures of README.md and docs/ from benchmarks/results/'
	@echo 'make notebook  execute docs/first_project.ipynb, and keep its outputs; needs chromium'
	@echo 'make format    let ruff fix and format the code'
	@echo 'make dist      build what PyPI gets, check it, and make a project with the wheel; needs uv'
	@echo 'make clean     remove what was built; VENV stays'
	@echo
	@echo 'VENV=PATH                            environment to use or to create ($(VENV))'
	@echo 'UV_TORCH_BACKEND=cpu|cu130|auto|...  build of torch to install; default: as on PyPI'

# A demo that started to train is resumed, not replaced.
demo: $(INSTALLED)
	@[ -d $(DEMO)/runs ] || { rm -rf $(DEMO) \
	    && '$(BIN)/pretuned' --no-input --output-dir $(dir $(DEMO)); }
	$(MAKE) -C $(DEMO) train VENV=$(call under,../../../)

test: $(INSTALLED)
	'$(BIN)/ruff' check
	'$(BIN)/ruff' format --check
	cd '$(PROJECT)' && PYTHONPATH=src '$(BIN)/lint-imports' --no-cache
	'$(BIN)/pyrefly' check --python-interpreter-path '$(BIN)/python' --min-severity error
	'$(BIN)/python' -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	    --ignore tests/test_renders.py  # or the longest files, of one test each, come last
	'$(BIN)/python' -m pytest tests/test_renders.py  # starts as many processes by itself

docs: $(INSTALLED)
	'$(BIN)/python' docs/website.py

faults: $(INSTALLED)
	'$(BIN)/python' -m faults
	'$(BIN)/python' benchmarks/figures.py

# WORDS='--flowers FOLDER --trash FOLDER' for all of it, WORDS=--help for more.
measure: $(INSTALLED)
	PATH="$(BIN):$$PATH" '$(BIN)/python' benchmarks/measure.py $(WORDS)

figures: $(INSTALLED)
	'$(BIN)/python' benchmarks/figures.py

notebook: $(INSTALLED)
	'$(BIN)/python' docs/first_project.py

format: $(INSTALLED)
	'$(BIN)/ruff' check --fix
	'$(BIN)/ruff' format

# In an environment of its own, as users have it.
dist:
	rm -rf dist build/dist
	$(UV) build
	$(UV) tool run twine check --strict dist/*
	$(UV) venv build/dist
	$(UV) pip install --python build/dist/bin/python dist/*.whl
	build/dist/bin/pretuned --no-input --output-dir build/dist

environment: $(INSTALLED)

$(INSTALLED): pyproject.toml $(PROJECT)/pyproject.toml
	$(MAKE) -C '$(PROJECT)' environment VENV=$(call under,../)
	$(UV) pip install --python '$(BIN)/python' --editable . --group dev
	@touch $@

clean:
	rm -rf build dist .import_linter_cache .pytest_cache .ruff_cache
