"""The packages of shard/ and prpc_engine/, from the ground up, and the drawing of ARCHITECTURE.md
that is made from the imports.

python -m tests.packages            print the drawing
python -m tests.packages --write    put it into ARCHITECTURE.md
"""

from __future__ import annotations

import sys
from functools import cache

from tests.imports import ROOT, Module, modules_of, targets

DOCUMENT = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- made by python -m tests.packages --write -->\n```\n", "```\n<!-- end -->"

# A package sees itself and those before it. "shard" and "prpc_engine" are the faces: what their
# __init__.py exports; "kv" is that of the tables. A name in brackets stands for the files beside a
# face, which have no package of their own.
ORDER = (
    "[shard]",
    "shard.memory",
    "shard.loop",
    "shard.transport",
    "shard.group",
    "shard",
    "[prpc_engine]",
    "simulation",
    "cuda",
    "archive",
    "settings",
    "support",
    "rpc",
    "node",
    "master",
    "client",
    "service",
    "cluster",
    "prpc_engine",
    "remote",
    "topics",
    "vllm",
    "ding",
    "ray",
    "metrics",
    "tensorflow",
    "accumulator",
    "kv.table",
    "kv.consistency",
    "kv.schema",
    "kv.checkpoint",
    "kv.client",
    "kv.server",
    "kv.replication",
    "kv.torch",
    "kv.jax",
    "pslite",
    "kv",
    "demo",
    "cli",
)
SHIMS = {"prpc_engine.kv.pslite": "kv"}  # the names of pslite, where tables have theirs
# public modules that are a package's worth
ALONE = {"prpc_engine.metrics", "prpc_engine.kv.torch", "prpc_engine.kv.jax"}


def package_of(name: str) -> str:
    """The package that a module is in, as ORDER names it."""
    if name in SHIMS:
        return SHIMS[name]
    top, *rest = name.split(".")
    if not rest:
        return top
    if name in ALONE:
        return ".".join(rest)
    if top == "shard":
        return f"shard.{rest[0]}" if f"shard.{rest[0]}" in ORDER else "[shard]"
    if rest[0] == "kv":
        return ".".join(rest[:2])
    return rest[0] if rest[0] in ORDER else "[prpc_engine]"


@cache
def arrows() -> dict[str, frozenset[str]]:
    """By package the others that its modules import, for types and in functions too."""
    modules = modules_of("shard", "prpc_engine")
    known = {module.name for module in modules}
    found: dict[str, set[str]] = {package: set() for package in ORDER}
    for module in modules:
        for target in seen_by(module, known):
            found[package_of(module.name)].add(package_of(target))
    return {package: frozenset(seen - {package}) for package, seen in found.items()}


def seen_by(module: Module, known: set[str]) -> set[str]:
    """The modules of ours that one imports."""
    return {
        target
        for imported in module.imports
        for target in targets(imported, known)
        if target in known
    } - {module.name}


def drawing() -> str:
    """Each package on the lowest floor that is above all it imports; arrows that follow from others
    are left out.
    """
    below = arrows()
    floors: dict[str, int] = {}
    reach: dict[str, frozenset[str]] = {}
    for package in ORDER:
        floors[package] = 1 + max((floors[seen] for seen in below[package]), default=-1)
        reach[package] = below[package].union(*(reach[seen] for seen in below[package]))
    lines = []
    for package in sorted(ORDER, key=lambda package: (-floors[package], package)):
        direct = {
            seen
            for seen in below[package]
            if not any(seen in reach[other] for other in below[package])
        }
        lines.append(
            f"{floors[package]:2}  "
            f"{package:16}{'-> ' + ', '.join(sorted(direct)) if direct else ''}".rstrip()
        )
    return "\n".join(lines) + "\n"


def drawn(document: str) -> str:
    """The drawing that a document has. Raises ValueError when it has none."""
    begin = document.index(BEGIN) + len(BEGIN)
    return document[begin : document.index(END, begin)]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        text = DOCUMENT.read_text()
        DOCUMENT.write_text(text.replace(BEGIN + drawn(text) + END, BEGIN + drawing() + END))
    else:
        print(drawing(), end="")
