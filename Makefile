# make demo: wrong labels found, and plain training beside two methods, on digits whose colours mislead and on a
#   photograph; one page.
# make test: the package and its notebooks, without a network and without data.
# make test-studies: the studies, at a tiny scale.
# make test-recipes: all recipes, those for Lightning and Hugging Face too, which it installs.
# make test-release: the wheel, in an empty folder; it needs the package index.
# make bench: costs, as ratios. make experiment name=cifar10: run a notebook of nbs/experiments again.
# make regime name=long_tail: a part of where_it_pays.
# make comparisons: what all runs amount to, for cards, guide and README.
# make notebooks: execute all of them. make docs: the site, in _docs. All set up .venv first, as make setup does.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONWARNINGS := ignore::FutureWarning
unexport PYTHONDONTWRITEBYTECODE # or each process compiles whatever it imports, for eight seconds
# no network, and no data that lie on this machine: what passes here passes anywhere;
# small networks gain little from two threads
TESTING := SELBACK_OFFLINE=1 OMP_NUM_THREADS=1
STUDIES := experiments
RECIPES := recipes
WITH_EXTRAS := lightning|hugging_face
PAGES := cifar10, imagenette, label_noise, multi_label, an_image, an_equation, without_a_look, where_it_pays, race, \
	forum, noise_cifar10, shortcuts or pretrained
REGIMES := near_duplicates, long_tail, hidden_groups, noise_9, noise_40, files, segmentation, little_time or proxy
COVERAGE ?=

.PHONY: setup demo test test-studies test-recipes test-release bench experiment regime comparisons notebooks docs \
	readme clean

setup: $(BIN)/.installed

# small networks lose much from two threads beside other work
demo: export OMP_NUM_THREADS = 1
demo: $(BIN)/.installed
	$(BIN)/python -m studies.demo

test: $(BIN)/.installed
	$(TESTING) $(BIN)/nbdev-test --n-workers 2 --skip-folder-re '^[_.]|^$(STUDIES)$$' \
		--skip-file-re '^[_.]|^($(WITH_EXTRAS))\.'
	$(TESTING) $(BIN)/python -m pytest -n 2 --dist loadfile $(COVERAGE)

test-studies: $(BIN)/.installed
	$(TESTING) $(BIN)/nbdev-test nbs/$(STUDIES) --n-workers 2
	$(TESTING) $(BIN)/python -m pytest -n 2 studies/tests

test-recipes: $(BIN)/.recipes
	$(TESTING) $(BIN)/nbdev-test nbs/$(RECIPES) --n-workers 2
	$(TESTING) $(BIN)/python -m pytest $(RECIPES)

test-release: $(BIN)/.installed
	$(BIN)/python -m pytest release

bench: $(BIN)/.installed
	set -e; for b in steps memory overhead looks loading imports lean epochs ahead; do \
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
$(BIN)/.installed: settings.ini setup.py pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv && $(BIN)/uv pip install --quiet --python $(BIN)/python $(TORCH) -e '.[dev]' \
		|| $(BIN)/pip install --quiet -e '.[dev]'
	printf '%s\n' '$(CURDIR)' '$(CURDIR)/nbs' 'import os; os.environ.get("SELBACK_OFFLINE") and __import__("_offline")' \
		> `$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'`/selback-checkout.pth
	touch $@

# what a study, a recipe or the site needs beside the package, such as pretrained weights
$(BIN)/.studies $(BIN)/.recipes $(BIN)/.docs: $(BIN)/.%: $(BIN)/.installed
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[$*]' || $(BIN)/pip install --quiet -e '.[$*]'
	touch $@
