"""Transitions that no scenario takes, and why: of each table by its title, (state, event) -> one
line, which names a test that takes it where there is one.
"""

from __future__ import annotations

ARGUED: dict[str, dict[tuple[str, str], str]] = {}
