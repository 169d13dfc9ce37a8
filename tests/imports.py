"""What our modules import, read from their sources: for the test of the architecture, and for its
drawing.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Import:
    """One imported module, and the names taken from it (none for `import module`)."""

    module: str
    names: tuple[str, ...]
    line: int
    at_import: bool  # when the importing module is imported, and not later in a function
    for_types: bool  # under `if TYPE_CHECKING`


@dataclass(frozen=True)
class Module:
    """A source file of ours."""

    name: str
    source: str
    is_package: bool = False

    @property
    def path(self) -> str:
        """Its file, from the root."""
        return "/".join([*self.name.split("."), *(["__init__"] if self.is_package else [])]) + ".py"

    @property
    def top(self) -> str:
        """The top-level package that it is in."""
        return self.name.partition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        """What the source says. Kept from the collector of garbage: to look at all trees again and
        again while they are made takes it twice as long as the parser.
        """
        gc.disable()
        try:
            return ast.parse(self.source)
        finally:
            gc.freeze()
            gc.enable()

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Those in it, wherever they stand."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """All imports, in functions too; relative ones by their full name."""
        return tuple(self._imports_in(self.tree.body, at_import=True, for_types=False))

    def _imports_in(
        self, nodes: Iterable[ast.AST], at_import: bool, for_types: bool
    ) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, (), node.lineno, at_import, for_types)
            elif isinstance(node, ast.ImportFrom):
                names = tuple(alias.name for alias in node.names)
                yield Import(self._absolute(node), names, node.lineno, at_import, for_types)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from self._imports_in(ast.iter_child_nodes(node), False, for_types)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from self._imports_in(node.body, at_import, True)
                yield from self._imports_in(node.orelse, at_import, for_types)
            else:
                yield from self._imports_in(ast.iter_child_nodes(node), at_import, for_types)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        above = package[: len(package) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])


def modules_of(*tops: str) -> list[Module]:
    """Every module in these top-level packages."""
    return [module for top in tops for module in _modules_in(top)]


@cache
def _modules_in(top: str) -> list[Module]:
    found = []
    for path in sorted((ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found.append(
            Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package)
        )
    return found


def targets(imported: Import, known: Iterable[str]) -> list[str]:
    """The modules that an import reaches: `from package import submodule` reaches the submodule.
    known: all modules of ours.
    """
    reached = [f"{imported.module}.{name}" for name in imported.names]
    below = [name for name in reached if name in known]
    if len(below) < len(reached) or not reached:
        below.append(imported.module)
    return below


def circles(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """What stands in a circle, or between two."""
    left = {name: set(reached) & arrows.keys() - {name} for name, reached in arrows.items()}
    # take away what sees nothing that is left, until nothing can be taken; then the same against
    # the arrows
    for _ in range(2):
        while free := [name for name, reached in left.items() if not reached]:
            left = {name: reached - set(free) for name, reached in left.items() if name not in free}
        left = {
            name: {other for other, reached in left.items() if name in reached} for name in left
        }
    return sorted(left)
