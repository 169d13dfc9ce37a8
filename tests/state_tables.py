"""The state tables of shard/ and prpc_engine/, and docs/reference/states.md that is drawn from
them.

python -m tests.state_tables            print the page
python -m tests.state_tables --write    put it into docs/reference/states.md
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from shard.state_table import StateTable
from tests.imports import ROOT, modules_of

DOCUMENT = ROOT / "docs" / "reference" / "states.md"
HEAD = """\
# States

Drawn by `python -m tests.state_tables --write` from the tables that run. An event that a state does
not list cannot come there: the owner of the state would be refused by name. Which of them a job
under faults takes: `pytest tests/simulation --transitions`
([0090](../decisions/0090-simulation.md)).
"""


def tables() -> list[tuple[str, StateTable[Any, Any, Any]]]:
    """Those that modules hold under a name of their own, each with the path of its file."""
    found: list[tuple[str, StateTable[Any, Any, Any]]] = []
    for module in modules_of("shard", "prpc_engine"):
        if "= StateTable(" in module.source:
            held = vars(importlib.import_module(module.name)).values()
            found += [
                (module.name.replace(".", "/") + ".py", each)
                for each in held
                if isinstance(each, StateTable)
            ]
    return found


def page() -> str:
    """The whole document."""
    sections = [f"{table.draw()}\n\nIn `{path}`.\n" for path, table in tables()]
    return "\n".join([HEAD, *sections])


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(page())
    else:
        print(page(), end="")
