# make demo: wrong labels found, and plain training beside two methods, on digits whose colours mislead and on a
#   photograph; one page.
# make test: what anyone runs: each law by each path that items take, values, oracles, the package's own notebooks;
#   without a network and without data.
# make test-all: what make test leaves out of what holds the product: all methods with all tasks, workers, two
#   processes, pages, the site in a browser, the workbench; test-studies (at a tiny scale), test-recipes (for Lightning
#   and Hugging Face too, which it installs) and test-release (the wheel, in an empty folder); it needs the index.
# make check: forms: cards, pages, links, names, lines, types.
# make faults: is each of some seventy hand-made faults caught by `make test`?
# make gpu: what only a GPU shows, in eight minutes: no step waits for it, mixed precision, draws and states on a
#   device, costs there; each part has a time limit, and results/gpu what each has written so far.
# make goldens from=COMMIT: does training do, step by step, what it did there?
# make bench: costs, as ratios. make experiment name=cifar10: run a notebook of nbs/experiments again.
# make regime name=long_tail: a part of where_it_pays.
# make comparisons: what all runs amount to, for cards, guide and README.
# make notebooks: export, and execute the notebooks whose code has changed. make docs: the site, in _docs. All set up
#   .venv first, as make setup does.
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

.PHONY: setup demo test test-all test-studies test-recipes test-release check faults goldens gpu bench experiment regime \
	comparisons notebooks docs readme clean

setup: $(BIN)/.installed

# small networks lose much from two threads beside other work
demo: export OMP_NUM_THREADS = 1
demo: $(BIN)/.installed
	$(BIN)/python -m studies.demo

test: $(BIN)/.installed
	$(TEST_NOTEBOOKS) --skip-folder-re '^[_.]|^(bench|clean|experiments|methods|recipes|start|tutorials|views)$$' \
		--skip-file-re '^[_.]|^index'
	$(PYTEST) -m 'not slow'

test-all: $(BIN)/.installed docs
	$(TEST_NOTEBOOKS) --skip-folder-re '^[_.]|^(core|callback|$(RECIPES)|$(STUDIES))$$' --skip-file-re '^[_.]|^00_all'
	$(PYTEST) -m slow
	SELBACK_EXAMPLES=200 $(PYTEST) tests/test_fuzz.py
	$(MAKE) test-studies test-recipes test-release

check: $(BIN)/.checks
	$(BIN)/ruff check --quiet
	$(BIN)/pyright --warnings
	$(TESTING) $(BIN)/python -m pytest checks

faults: $(BIN)/.installed
	$(TESTING) $(BIN)/python tests/faults.py $(name)

goldens: $(BIN)/.installed
	$(TESTING) $(BIN)/python tests/goldens.py $(from)

gpu: $(BIN)/.installed
	$(BIN)/python benchmarks/gpu.py

test-studies: $(BIN)/.installed
	$(TEST_NOTEBOOKS) nbs/$(STUDIES)
	$(TESTING) $(BIN)/python -m pytest -n 2 studies/tests

test-recipes: $(BIN)/.recipes
	$(TEST_NOTEBOOKS) nbs/$(RECIPES)
	$(TESTING) $(BIN)/python -m pytest $(RECIPES)

test-release: $(BIN)/.installed
	$(BIN)/python -m pytest release

bench: $(BIN)/.installed
	set -e; for b in steps memory overhead looks loading imports lean epochs ahead neighbours; do \
		$(BIN)/python benchmarks/$$b.py; done

experiment: $(BIN)/.studies # on one core, as what is stored: two studies fit beside each other
	OMP_NUM_THREADS=1 $(BIN)/python nbs/_run.py nbs/$(STUDIES)/$(or $(name),$(error which? name=$(PAGES))).ipynb
	$(MAKE) comparisons

regime: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.regimes $(or $(name),$(error which? name=$(REGIMES)))

comparisons: $(BIN)/.installed
	$(BIN)/python -m studies.measured

notebooks: $(BIN)/.installed
	$(BIN)/python nbs/_run.py

docs: $(BIN)/.docs
	$(BIN)/python nbs/_docs.py

readme: $(BIN)/.installed
	$(BIN)/python nbs/_readme.py

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
