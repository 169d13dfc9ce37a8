"""Settings dataclasses refuse what is no number where they are made, by the name of the field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from prpc_engine import HedgePolicy, RetryPolicy
from prpc_engine.rpc.backoff import Backoff
from prpc_engine.rpc.server import Bounds
from prpc_engine.rpc.timing import Timing
from shard import Limits, RestartPolicy, TaskClass

SETTINGS: dict[type, dict[str, Any]] = {
    Backoff: {"first_s": 0.1, "max_s": 1.0},
    Bounds: {},
    HedgePolicy: {},
    Limits: {},
    RestartPolicy: {},
    RetryPolicy: {},
    TaskClass: {"name": "a", "shares": 5},
    Timing: {},
}
NO_NUMBERS = (math.nan, math.inf, -math.inf, True, False, -1, "5", [])
FIELDS = [
    (kind, field.name, str(field.type)) for kind in SETTINGS for field in dataclasses.fields(kind)
]
NUMBERS = [(kind, name, of) for kind, name, of in FIELDS if of.startswith(("int", "float"))]


@pytest.mark.parametrize(
    ("kind", "name", "of"), NUMBERS, ids=[f"{kind.__name__}.{name}" for kind, name, _ in NUMBERS]
)
def test_a_number_in_settings_is_a_number(kind: type, name: str, of: str) -> None:
    for value in (*NO_NUMBERS, *((1.5,) if of == "int" else ())):
        with pytest.raises(ValueError, match=name if kind is not TaskClass else "shares"):
            kind(**{**SETTINGS[kind], name: value})
