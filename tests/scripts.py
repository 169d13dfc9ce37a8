"""The scripts of .ci/ as modules: a folder with a dot is no package."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.imports import ROOT


def script(name: str) -> ModuleType:
    """.ci/<name>.py, executed as a module that is not `__main__`."""
    path = ROOT / ".ci" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"ci_{name}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
