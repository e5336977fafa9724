# `make` says what there is; what needs .venv sets it up first.
PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
export PYTHONWARNINGS := ignore::FutureWarning
unexport PYTHONDONTWRITEBYTECODE # or each process compiles whatever it imports, for eight seconds
# no network, and no data that lie on this machine: what passes here passes anywhere;
# small networks gain little from two threads
TESTING := SELBACK_OFFLINE=1 OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1)
STUDIES := experiments
RECIPES := recipes
TEST_NOTEBOOKS = $(TESTING) $(BIN)/nbdev-test --n-workers 2
PYTEST = $(TESTING) $(BIN)/python -m pytest -n 2 --dist worksteal $(COVERAGE)
PAGES := cifar10, imagenette, label_noise, multi_label, an_image, an_equation, without_a_look, where_it_pays, race, \
	forum, noise_cifar10, shortcuts or pretrained
REGIMES := near_duplicates, long_tail, hidden_groups, noise_9, noise_40, files, segmentation, little_time or proxy
COVERAGE ?=

.PHONY: help setup demo test test-all check faults goldens gpu test-studies test-recipes test-release bench experiment \
	regime comparisons notebooks docs readme publish-as clean

help:
	@sed -n 's/^## //p' Makefile

## make setup         .venv, with all that the rest needs
setup: $(BIN)/.installed

## make demo          wrong labels, colours that mislead, a photograph: three minutes, one page, runs/demo.html
# small networks lose much from two threads beside other work
demo: export OMP_NUM_THREADS = 1
demo: $(BIN)/.installed
	$(BIN)/python -m studies.demo

## make test          laws by each path of items, values, the package's notebooks, offline: 3 to 8 minutes
test: $(BIN)/.installed
	$(TEST_NOTEBOOKS) --skip-folder-re '^[_.]|^(bench|clean|experiments|methods|recipes|start|tutorials|views)$$' \
		--skip-file-re '^[_.]|^index'
	$(PYTEST) -m 'not slow'

## make test-all      all else that holds it: tasks, processes, pages, the site, studies, recipes, the wheel
test-all: $(BIN)/.installed docs
	$(TEST_NOTEBOOKS) --skip-folder-re '^[_.]|^(core|callback|$(RECIPES)|$(STUDIES))$$' --skip-file-re '^[_.]|^00_all'
	$(PYTEST) -m slow
	SELBACK_EXAMPLES=200 $(PYTEST) tests/test_fuzz.py
	$(MAKE) test-studies test-recipes test-release

## make check         forms: cards, pages, links, names, lines, types: a minute
check: $(BIN)/.checks
	$(BIN)/ruff check --quiet
	$(BIN)/pyright --warnings
	$(TESTING) $(BIN)/python -m pytest checks

## make faults        does `make test` catch each of seventy hand-made faults? name=NAME for one
faults: $(BIN)/.installed
	$(TESTING) $(BIN)/python tests/faults.py $(name)

## make goldens       does training do, step by step, what it did there? from=COMMIT
goldens: $(BIN)/.installed
	$(TESTING) $(BIN)/python tests/goldens.py $(from)

## make gpu           what only a GPU shows, into results/gpu: eight minutes
gpu: $(BIN)/.installed
	$(BIN)/python benchmarks/gpu.py

## make test-studies  the workbench, at a tiny scale
test-studies: $(BIN)/.installed
	$(TEST_NOTEBOOKS) nbs/$(STUDIES)
	$(TESTING) $(BIN)/python -m pytest -n 2 studies/tests

## make test-recipes  the recipes, with Lightning and Hugging Face, which it installs
test-recipes: $(BIN)/.recipes
	$(TEST_NOTEBOOKS) nbs/$(RECIPES)
	$(TESTING) $(BIN)/python -m pytest $(RECIPES)

## make test-release  the wheel, in an empty folder; needs the index
test-release: $(BIN)/.installed
	$(BIN)/python -m pytest release

## make bench         what selecting costs, as ratios, into results/benchmarks
bench: $(BIN)/.installed
	set -e; for b in steps memory overhead looks loading imports lean epochs ahead neighbours; do \
		$(BIN)/python benchmarks/$$b.py; done

## make experiment    run a page of nbs/experiments again: name=cifar10
experiment: $(BIN)/.studies # on one core, as what is stored: two studies fit beside each other
	OMP_NUM_THREADS=1 $(BIN)/python nbs/_run.py nbs/$(STUDIES)/$(or $(name),$(error which? name=$(PAGES))).ipynb
	$(MAKE) comparisons

## make regime        run a part of where_it_pays again: name=long_tail
regime: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.regimes $(or $(name),$(error which? name=$(REGIMES)))

## make comparisons   what all runs amount to, for cards, guide and README
comparisons: $(BIN)/.installed
	$(BIN)/python -m studies.measured

## make notebooks     export, and execute the notebooks whose code has changed
notebooks: $(BIN)/.installed
	$(BIN)/python nbs/_run.py

## make docs          the site, in _docs: two minutes
docs: $(BIN)/.docs
	$(BIN)/python nbs/_docs.py

## make readme        README.md, of nbs/index.ipynb
readme: $(BIN)/.installed
	$(BIN)/python nbs/_readme.py

## make publish-as    put the owner of the repository into all addresses: owner=NAME
publish-as:
	$(PYTHON) release/publish_as.py '$(or $(owner),$(error whose? owner=NAME))'

## make clean         remove .venv, runs and what was built
clean:
	rm -rf .venv runs _proc _docs build *.egg-info

# PyTorch for the GPU that is there, or without one 200 MB in place of 6 GB, from an index of its own; where nothing
# reaches that, PyTorch as the package index has it
TORCH_INDEX = https://download.pytorch.org/whl/
TORCH = `$(BIN)/python -c "from urllib.request import urlopen; urlopen('$(TORCH_INDEX)', timeout=5)" 2>/dev/null \
	&& echo --torch-backend=auto`

# The folders of the checkout on the path of its Python, for the studies and what notebooks read,
# and `_offline` where a process asks for it
$(BIN)/.installed: pyproject.toml setup.py Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv && $(BIN)/uv pip install --quiet --python $(BIN)/python $(TORCH) -e '.[dev]' \
		|| $(BIN)/pip install --quiet -e '.[dev]'
	printf '%s\n' '$(CURDIR)' '$(CURDIR)/nbs' 'import os; os.environ.get("SELBACK_OFFLINE") and __import__("_offline")' \
		> `$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'`/selback-checkout.pth
	touch $@

# what a study, a recipe, the site or the checks need beside the package, such as pretrained weights
$(BIN)/.studies $(BIN)/.recipes $(BIN)/.docs $(BIN)/.checks: $(BIN)/.%: $(BIN)/.installed
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[$*]' || $(BIN)/pip install --quiet -e '.[$*]'
	touch $@
