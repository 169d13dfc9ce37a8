"""Which release this is: the number that pyproject.toml has too, and that a node tells another."""

from __future__ import annotations

VERSION = "0.1.0"
