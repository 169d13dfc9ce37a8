# Each target is a stage of .ci/run, which makes what it needs by itself.

STAGES := tests lint types pythons tensors tensorflow perf demo

.PHONY: help all nightly $(STAGES)

help:
	@echo "make all | nightly | $(STAGES)"

all:
	bash .ci/run

nightly:
	bash .ci/nightly

$(STAGES):
	bash .ci/run $@
