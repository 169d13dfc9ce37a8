"""Checkpoints of key-value tables: a consistent cut across servers while training goes on, in files
that survive a crash.

    kv.save("/checkpoints/job7", step=1000, keep=3)
    step = kv.restore("/checkpoints/job7")            # into any number of servers
    latest("/checkpoints/job7").path, .step           # the newest that is whole
    verify("/checkpoints/job7")                       # what there is, and what is wrong with it

The walk of a save: worker -> methods (in every server) -> gate, cut -> save -> files. What is
promised: methods.py.
"""

from prpc_engine.kv.checkpoint.load import FolderFinding, latest, verify
from prpc_engine.kv.checkpoint.manifest import CheckpointError, TooLate

__all__ = ["CheckpointError", "FolderFinding", "TooLate", "latest", "verify"]
