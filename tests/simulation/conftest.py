"""The option by which a seed is replayed."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=None,
        help="run scenarios of the simulation with this seed alone",
    )
