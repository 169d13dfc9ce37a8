"""The RDMA port by which messages would go."""

from __future__ import annotations

from pathlib import Path

from shard import VerbsPort, verbs_rails


def chosen_port(wanted: str | None = None, root: Path = Path("/")) -> VerbsPort:
    """The first usable one, or the one that is named; of this machine, or of one that is files
    under a folder. Raises NoVerbs.
    """
    (first, *_), _ = verbs_rails(wanted, root)
    return first
