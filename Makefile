# make train          train on the embedded digits over RANKS ranks
# make test           on one rank, two tests at a time; what ranks do together, on 4        ARGS=, TESTS=: of pytest
# make test-long      also what takes long, and on 3 ranks; CI takes it in turns: .ci/run
# make test-all       with whole grids of parameters, and on 4 ranks also what needs but one; longer
# make test-cluster   what needs a cluster, both MPIs: emulated hosts, a real Slurm, made here; root on Debian, installs
# make soak           random operations, pipelines, runs, also such as act; thousands of bad inputs; three quarters of an hour
# make faults         a hundred jobs, each struck by a fault; fuzzers, thousands of new cases    ARGS="500 2": jobs, seed
# make docs           the site, in build/site; no warning, no dead link, no request to other hosts
# make dist           wheel and sdist, in dist; installed in an empty environment, where README's commands run
# make lint           ruff, its format, and mypy                                  make clean   take away what make made
# MPI=mpich (default) or openmpi: from the registry, into a .venv; MPI=site: the mpiexec on the PATH, mpi4py built for it
MPI    ?= mpich
RANKS  ?= 4
PYTHON ?= python3
ARGS   ?=
TESTS  ?= tests

comma  := ,
VENV   := $(if $(filter mpich,$(MPI)),.venv,.venv-$(MPI))
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRA  := $(if $(filter mpich,$(MPI)),mpi$(comma),$(if $(filter openmpi,$(MPI)),openmpi$(comma)))
MPIEXEC := $(if $(filter site,$(MPI)),mpiexec,$(BIN)/mpiexec)

SHOW := -q --color=no --durations=5
# What ends a job of several ranks is said on the stderr that the launcher reads, not into a file of pytest's; Open MPI
# would fill it with hundreds of lines about windows (osc_ucx_component.c).
SHOW_RANKS := $(SHOW) $(if $(filter openmpi,$(MPI)),,--capture=sys)

# Each rank that a test starts would compile hpcdl's modules anew.
unexport PYTHONDONTWRITEBYTECODE

# Open MPI refuses root and more ranks than cores unless it is told; harmless elsewhere.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :OVERSUBSCRIBE
export OMPI_MCA_mpi_yield_when_idle = 1

.PHONY: train test test-one test-four test-long test-three test-all test-cluster test-hosts install-cluster test-slurm-mpich test-slurm-openmpi soak faults lint docs dist install print-bin clean

train: $(STAMP)
	$(MPIEXEC) -n $(RANKS) $(BIN)/hpcdl train-allreduce --data digits --allreduce ring $(ARGS)

test: test-one
	$(MAKE) --no-print-directory test-four

test-one: $(STAMP)
	$(BIN)/python -m pytest $(SHOW) --numprocesses=2 --dist=loadfile $(TESTS) $(ARGS)

test-four: $(STAMP)
	HPCDL_CHECK=1 $(MPIEXEC) -n 4 $(BIN)/python -m pytest $(SHOW_RANKS) $(TESTS) $(ARGS)

test-long:
	$(MAKE) --no-print-directory test test-three ARGS="--long $(ARGS)"

test-all:
	$(MAKE) --no-print-directory test test-three ARGS="--all $(ARGS)"

test-three: $(STAMP)
	HPCDL_CHECK=1 $(MPIEXEC) -n 3 $(BIN)/python -m pytest $(SHOW_RANKS) --without-groups $(TESTS) $(ARGS)

test-cluster:
	$(MAKE) --no-print-directory install MPI=mpich
	$(MAKE) --no-print-directory --jobs=2 --output-sync test-hosts install-cluster
	$(MAKE) --no-print-directory --jobs=2 --output-sync test-slurm-mpich test-slurm-openmpi

# Two at a time, for each waits for Slurm half of its time.
test-slurm-mpich:
	.venv/bin/python -m pytest $(SHOW) -rs tests/cluster/test_slurm.py -k "not openmpi"

test-slurm-openmpi:
	.venv/bin/python -m pytest $(SHOW) -rs tests/cluster/test_slurm.py -k openmpi
	.venv-openmpi/bin/python -m pytest $(SHOW) -rs tests/cluster/test_hosts.py -k "hosts_are_found or left_out and another or vanishes"

test-hosts:
	.venv/bin/python -m pytest $(SHOW) -rs tests/cluster/test_hosts.py

install-cluster:
	$(MAKE) --no-print-directory install MPI=openmpi
	.venv/bin/python tests/cluster/slurm.py

soak: $(STAMP)
	$(BIN)/python tests/soak/soak.py $(ARGS)

faults: $(STAMP)
	$(BIN)/python tests/faults/matrix.py $(ARGS)
	$(BIN)/python tests/faults/fuzzers.py

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf build/typed && mkdir -p build/typed/hpcdl && ln -s $(CURDIR)/hpcdl/* $(CURDIR)/kernels $(CURDIR)/scripts build/typed/hpcdl/
	cd build/typed && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml

# The pages link each other and README as on a Git host: so they lie to each other here, too.
docs: $(VENV)/.docs
	rm -rf build/pages && mkdir -p build/pages && ln -s $(CURDIR)/*.md $(CURDIR)/docs build/pages/
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m mkdocs build --config-file docs/mkdocs.yml
	! grep -rlE '<(script|link|img)[^>]* (src|href)="?(https?:)?//' build/site --include='*.html'

# Of what git tracks alone. The wheel is made of the sdist; both are installed, the wheel with README's extras.
EMPTY := build/dist/empty
dist: $(STAMP)
	rm -rf dist build/dist && mkdir -p build/dist/source
	git ls-files -z | xargs -0 cp --parents --target-directory=build/dist/source
	$(BIN)/python -m build build/dist/source --outdir dist > build/dist/log 2>&1 || { cat build/dist/log; false; }
	HPCDL_DIST=dist $(BIN)/python -m pytest $(SHOW) tests/test_distribution.py
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet -c constraints.txt "$$(echo dist/*.whl)[mpi,report]"
	{ echo hpcdl doctor; sed -n '/^## Two commands/,/^## /s/^    //p' README.md; echo hpcdl report runs/a runs/c; } > build/dist/commands
	cd build/dist && PATH="$(CURDIR)/$(EMPTY)/bin:$$PATH" HPCDL_LOAD=ignore sh -ex commands
	$(EMPTY)/bin/python -m pip install --quiet --force-reinstall --no-deps dist/*.tar.gz
	cd build/dist && PATH="$(CURDIR)/$(EMPTY)/bin:$$PATH" sh -ex -c "$$(sed '2q;d' commands) --force"

install: $(STAMP)

print-bin:
	@echo $(BIN)

$(STAMP): setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(filter site,$(MPI)),--no-binary mpi4py) \
	  --editable ".[$(EXTRA)test]"
	touch $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[docs]"
	touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
