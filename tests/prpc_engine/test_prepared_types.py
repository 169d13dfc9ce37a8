"""Two threads may be the first to read settings, or a manifest of a checkpoint, at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.imports import ROOT

# As many fresh types, each met by so many threads at once: unprepared, the first some kill the
# process.
ROUNDS, THREADS = 200, 4
PROGRAM = """
import importlib, sys, threading
import msgspec
{imports}

sys.setswitchinterval(1e-6)
for _ in range({rounds}):
    {reload}
    together = threading.Barrier({threads})

    def convert():
        together.wait()
        for kind, values in {kinds}:
            try:
                msgspec.convert(values, kind)
            except msgspec.ValidationError:
                pass

    threads = [threading.Thread(target=convert) for _ in range({threads})]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("alive")
"""
MANIFEST = {
    "imports": "from prpc_engine.kv.checkpoint import manifest",
    "reload": "importlib.reload(manifest)",
    "kinds": '[(manifest.Manifest, {"format": 1, "step": 1, "parts": [], "base": None})]',
}
SETTINGS = {
    "imports": "from prpc_engine.settings import node_config, sections",
    "reload": "importlib.reload(sections); importlib.reload(node_config)",
    "kinds": "[(kind, dict.fromkeys(kind.__struct_fields__, 1))"
    " for kind in node_config.SECTIONS.values()]",
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [MANIFEST, SETTINGS], ids=["manifest", "settings"])
def test_threads_may_convert_to_a_type_that_nobody_has_used_before(names: dict[str, str]) -> None:
    program = PROGRAM.format(rounds=ROUNDS, threads=THREADS, **names)
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "alive\n"), ran.stderr
