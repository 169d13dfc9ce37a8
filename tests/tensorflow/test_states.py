"""What lives in kernels and goes on from step to step means the same on the stock protocol and on
ours, bit by bit.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.tensorflow.tasks import Job
from tests.tensorflow.test_flows import check as check_in_plane

# What takes a step into TensorFlow's runtime.
ENTRANCES = (
    "TF_SessionRun_wrapper",
    "TF_SessionRunCallable",
    "TF_SessionMakeCallable",
    "TF_SessionPRun_wrapper",
    "TF_SessionPRunSetup_wrapper",
    "_call_tf_sessionrun",
    "_call_tf_sessionprun",
)
# What uses those -> the hook of BaseSession that comes first for a session of ours; None: used by
# the others alone.
BEHIND = {
    "BaseSession._call_tf_sessionrun": None,
    "BaseSession._call_tf_sessionprun": None,
    "BaseSession._do_run": "_do_run",
    "BaseSession.make_callable": "make_callable",
    "BaseSession.partial_run_setup": "partial_run_setup",
    "BaseSession._Callable": "_make_callable_from_options",
}
HOOKS = Path(__file__).parents[2] / "prpc_engine" / "tensorflow" / "hooks.py"


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
@pytest.mark.parametrize("where", ["worker", "ps"])
def test_random_kernels_go_on_whatever_a_step_fetches(job: Job, where: str, plane: str) -> None:
    check_in_plane(job, plane, "random_kernels", where=where)


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_random_kernels_go_on_in_loops_and_branches(job: Job, plane: str) -> None:
    check_in_plane(job, plane, "random_in_loop")


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_a_table_that_is_made_of_keys_keeps_what_earlier_steps_put_into_it(
    job: Job, plane: str
) -> None:
    found = check_in_plane(job, plane, "dense_table")
    assert found[:2] == [[6.0, -1.0, 10.0, 12.0, -1.0], 3]


def test_a_table_whose_keys_a_step_could_change_is_refused_by_name(job: Job) -> None:
    name, text = job.worker().do("table_of_a_fed_key", "prpc")
    assert name == "UnimplementedError"
    assert "lives longer than a step" in text and "make it of constants" in text


def test_keras_trains_over_a_session_of_the_server(job: Job) -> None:
    check_in_plane(job, "star", "keras_fit")


@pytest.mark.parametrize("plane", ["star", "sendrecv"])
def test_every_kind_of_callable_runs_on_the_plane(job: Job, plane: str) -> None:
    check_in_plane(job, plane, "callables")


def test_tensorflow_has_no_way_to_run_a_step_that_is_not_hooked() -> None:
    """Every method of TensorFlow's session that takes a step into its runtime, and whatever else of
    TensorFlow calls those.
    """
    sessions = pytest.importorskip(
        "tensorflow.python.client.session", reason="not installed: prpc-engine[tensorflow]"
    )
    source = Path(sessions.__file__)
    entered = {
        f"{owner.name}.{method.name}"
        for owner in ast.parse(source.read_text()).body
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, (ast.FunctionDef, ast.ClassDef))
        if any(
            isinstance(node, ast.Attribute) and node.attr in ENTRANCES for node in ast.walk(method)
        )
    }
    assert entered == set(BEHIND), (
        "a way to run a step of which it is not known through which hook it goes"
    )
    hooks = {hook for hook in BEHIND.values() if hook is not None}
    assert all(f'(_Session, "{hook}", ' in HOOKS.read_text() for hook in hooks)
    elsewhere = {
        path.relative_to(source.parents[2]).as_posix()
        for path in source.parents[2].rglob("*.py")
        if path != source and any(name in path.read_text(errors="replace") for name in ENTRANCES)
    }
    assert elsewhere == set()
