"""What a worker refuses that was meant for another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prpc_engine.remote.functions import ValueGone
from prpc_engine.remote.members import Members, UnknownWorker
from prpc_engine.remote.outcomes import Raised
from prpc_engine.remote.running import Runner
from prpc_engine.remote.served import Served

BEFORE, NOW, CREATOR = 1, 2, 9


def served(only_exposed: bool = False) -> Served:
    """Of a worker that has the rank which another one had."""
    members: Any = Members("now", NOW, SimpleNamespace(), print, print)  # type: ignore[arg-type]
    sections = SimpleNamespace(enter=lambda: None, leave=lambda section: False)
    driver: Any = SimpleNamespace(sections=sections, reactor=None)
    runner = Runner(driver, 1)
    nothing: Any = None
    return Served(members, nothing, runner, nothing, only_exposed)


def raised(answer: Any, may_pickle: bool = True) -> BaseException:
    assert type(answer) is Raised
    return answer.error("there", may_pickle)


@pytest.mark.parametrize(
    "answer",
    [
        lambda ours: ours.create(BEFORE, CREATOR, 1, CREATOR, 1, "builtins:len", None, "four"),
        lambda ours: ours.create_by_method(
            BEFORE, CREATOR, 1, "upper", CREATOR, 2, CREATOR, 2, None
        ),
    ],
)
def test_a_value_is_not_made_by_the_next_worker_of_its_owners_rank(answer: Any) -> None:
    """It would have the number of a value that its creator has this one make."""
    assert isinstance(raised(answer(served())), ValueGone)


@pytest.mark.parametrize("only_exposed", [False, True])
def test_a_function_is_not_run_by_the_next_worker_of_a_rank(only_exposed: bool) -> None:
    answer = served(only_exposed).run("before", "builtins:len", None, "four")
    refused = raised(answer, not only_exposed)
    assert isinstance(refused, UnknownWorker)
    assert "'now' has its rank" in str(refused)


def test_a_function_is_run_by_the_worker_of_that_name_or_whoever_has_the_rank() -> None:
    assert served().run("now", "builtins:len", None, "four") == 4
    assert served().run("", "builtins:len", None, "four") == 4
