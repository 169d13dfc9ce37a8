# Each of STAGES is a stage of .ci/run, which makes what it needs by itself. The others use .venv,
# which `python3 -m venv .venv && .venv/bin/pip install -e '.[test]'` makes.

STAGES := tests pythons ding tensors demo perf lint types tensorflow rdma
PYTHON := .venv/bin/python

.PHONY: help all nightly coverage changelog $(STAGES)

help:
	@echo "make all | nightly | $(STAGES)"
	@echo "make coverage     what the unit tests of the deciders reach, beside what is stated"
	@echo "make changelog    what the next release would say"

all:
	bash .ci/run

nightly:
	bash .ci/nightly

coverage:
	$(PYTHON) .ci/check_coverage.py

changelog:
	$(PYTHON) .ci/changelog.py show

$(STAGES):
	bash .ci/run $@
