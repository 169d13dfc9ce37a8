"""The configs for one role each: loadable, complete, and alike where both sides of a connection
must be.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shard import DEFAULT_LIMITS, Limits
from tests.prpc_engine.settings_of import load_limits

FOLDER = Path(__file__).parents[2] / "configs"
ROLES = ("ps", "worker", "loopback")


@pytest.mark.parametrize("role", ROLES)
def test_every_limit_stands_in_the_file_with_a_reason_above_it(role: str) -> None:
    file = FOLDER / f"{role}.toml"
    load_limits(str(file))
    lines = file.read_text().splitlines()
    at = [number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert [lines[number].partition(" =")[0] for number in at] == list(Limits.__dataclass_fields__)
    assert all(lines[number - 1].startswith("# ") for number in at)


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_nobody_sends_what_the_other_side_would_cut_the_connection_for(role: str) -> None:
    limits = load_limits(str(FOLDER / f"{role}.toml"))
    for name in ("body_bytes_max", "blocks_bytes_max", "blocks_max"):
        assert getattr(limits, name) == getattr(DEFAULT_LIMITS, name)


def test_one_connection_of_a_ps_holds_less_than_one_of_a_worker() -> None:
    ps, worker = (load_limits(str(FOLDER / f"{role}.toml")) for role in ("ps", "worker"))
    assert ps.outbox_bytes_max < worker.outbox_bytes_max
    assert ps.ring_bytes < worker.ring_bytes
    assert ps.connections_max > worker.connections_max
