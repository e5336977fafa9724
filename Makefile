# make demo: plain and selective training race twice, on an image learned pixel by pixel and on digits. make test: all tests. make bench: costs, as ratios.
# make experiment name=cifar10: run a notebook of nbs/experiments again. make notebooks: all of them. make regime name=long_tail: a part of where_it_pays.
# make docs: the site, in _docs. All set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONWARNINGS := ignore::FutureWarning

.PHONY: demo test bench experiment regime notebooks docs readme clean

# small networks gain little from two threads, and lose much beside other work
demo: export OMP_NUM_THREADS = 1
demo: $(BIN)/.installed
	$(BIN)/selback-compare --data china --bs 1024 --lr .004 --compute 1200000 --seeds 2 --out runs/china \
		--methods "none,favor_hard(beta=2),prioritized_sampling(uniform=.25),selective_backprop"
	$(BIN)/selback-compare --data digits --compute 10000 --out runs/digits

test: $(BIN)/.installed
	$(BIN)/nbdev-test --n-workers 2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term

bench: $(BIN)/.installed
	set -e; for b in steps memory overhead looks governor imports lean; do $(BIN)/python benchmarks/$$b.py; done

experiment: $(BIN)/.installed # on one core, as what is stored: two studies fit beside each other
	OMP_NUM_THREADS=1 $(BIN)/python nbs/_run.py nbs/experiments/$(or $(name),$(error which? name=cifar10, imagenette, label_noise, multi_label, an_image, without_a_look, where_it_pays, race, forum or noise_cifar10)).ipynb

regime: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m selback.regimes $(or $(name),$(error which? name=near_duplicates, long_tail, hidden_groups, noise_9, noise_40, files, segmentation, little_time or proxy))

notebooks: $(BIN)/.installed
	$(BIN)/python nbs/_run.py

docs: $(BIN)/.docs
	$(BIN)/python nbs/_docs.py

readme: $(BIN)/.installed
	$(BIN)/python nbs/_readme.py

clean:
	rm -rf .venv runs _proc _docs build *.egg-info

$(BIN)/.installed: settings.ini setup.py pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv && $(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev]' || $(BIN)/pip install --quiet -e '.[dev]'
	touch $@

$(BIN)/.docs: $(BIN)/.installed
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[docs]' || $(BIN)/pip install --quiet -e '.[docs]'
	touch $@
