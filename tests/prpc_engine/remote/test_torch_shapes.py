"""Programs of torch.distributed.rpc: what the scenarios of torch_shapes.py come to here, and by
torch itself where that is installed. What differs stands in the guide's table, and in BY_TORCH.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.program import ROOT, UNTIL_S
from tests.prpc_engine.remote import torch_shapes

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
ARRIVES = [["no error", True], ["no error", True]]  # there, and back
KINDS = [
    "transposed",
    "strided",
    "row",
    "zero-dim",
    "empty",
    "expanded",
    "bfloat16",
    "bool",
    "complex",
    "conjugated",
    "sparse",
    "compressed",
    "quantized",
    "int64",
]
HERE: dict[str, Any] = {
    "call_itself": [3, 3, 3, "worker0", "worker0", 5],
    "call_by_worker_info": ["worker1", "worker1", "worker1"],
    "call_nested": [2, 2, 5, 2, 2, [2, 3], 2],
    "call_methods_and_constructors": [7, 8, ["Held", 1], 2, 2, 2, 8],
    "object_of_a_class_of_the_script": ["RuntimeError", 7],
    "call_many_at_once": 5050,
    "call_what_is_no_function": ["RuntimeError", ["no error", 1], "RuntimeError"],
    "worker_info": ["worker1", 1, True, False, True, True, True],
    "errors_of_users": [
        "OwnError",
        "OwnError",
        "OwnError",
        "ValueError",
        "ValueError",
        "OwnError",
        "OwnError",
        "OwnError",
        "AttributeError",
        "TypeError",
        "OwnError",
        "RuntimeError",
    ],
    "error_that_cannot_be_made_from_a_text": "RuntimeError",
    "errors_at_each_to_here": ["ValueError", "ValueError", "ValueError"],
    "errors_of_a_callback": ["ValueError", "OwnError", ["no error", 5], "OwnError"],
    "futures_chained": [40, [[True, 3, 3]], True, 3, 3],
    "futures_collected": [[1, 2, 3], [1, 2, 3], []],
    "futures_by_hand": [[False, "RuntimeError"], 2, "ValueError", "ValueError", True],
    "future_set_twice": [["no error", False], 1],
    "asynchronous_functions": [2, 12, 24, 2, 2, 2, 3, 2, 3, 2, 4, 2],
    "asynchronous_functions_that_fail": ["OwnError", "OwnError", "ValueError", "OwnError"],
    "asynchronous_function_without_a_future": ["no error", 5],
    "rref_of_another": [
        [5, 5],
        False,
        True,
        "worker1",
        True,
        "RuntimeError",
        [True, "worker1", "worker1"],
    ],
    "rref_of_itself": [
        True,
        True,
        "worker0",
        True,
        True,
        [1],
        [5, True, 5],
        [False, "worker0", "worker0"],
        "RuntimeError",
    ],
    "rref_in_arguments": [2, [2, 3, 9], 9, True, 4, "worker1"],
    "rref_changed_at_its_owner": [1, 2],
    "rref_methods": [1, 7, 8, 10, "worker1", 10, 4, 3],
    "rref_with_a_timeout": ["RuntimeError", "RuntimeError", "RuntimeError", True, True],
    "rref_pickled_by_hand": ["no error", "bytes"],
    "timeouts_of_calls": ["RuntimeError", "RuntimeError", True],
    "timeout_by_default": [60.0, 0.2, "RuntimeError", "RuntimeError", True, True, 0.0],
    "init_rpc_twice": ["ValueError", "worker1"],
    "names_of_the_module": [True, True, "TENSORPIPE", True],
    "options_of_the_backend": [3, 8, "tcp://127.0.0.1:1"],
    "pending_at_shutdown": True,
    "call_after_shutdown": "RuntimeError",
    "shutdown_again": ["no error", "NoneType"],
}
HERE_OF_TENSORS: dict[str, Any] = {
    "tensors_inside_of_values": [
        [1.0, 1.0],
        [0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1.0],
        [2.0, 2.0],
        [[0], [1]],
        [2.0, 2.0],
        4.0,
        [2.0, 2.0],
    ],
    "tensors_that_share_memory": [False, False, [0.0, 0.0, 0.0, 0.0]],
    "tensors_that_require_a_gradient": [False, False, False, False],
    "tensors_of_a_result_of_a_graph": ["no error", [2]],
    "module_behind_an_rref": [True, 2, ["bias", "weight"]],
    "function_of_torch_script": "RuntimeError",
}
HERE_OF_TENSORS["tensors_of_all_kinds"] = dict.fromkeys(KINDS, ARRIVES)
# Where torch comes to something else.
BY_TORCH: dict[str, Any] = {
    "object_of_a_class_of_the_script": [["no error", 7], 7],
    "call_what_is_no_function": ["RuntimeError", "AttributeError", "RuntimeError"],
    "errors_of_users": [
        "RuntimeError",
        "RuntimeError",
        "OwnError",
        "ValueError",
        "ValueError",
        "RuntimeError",
        "RuntimeError",
        "OwnError",
        "AttributeError",
        "TypeError",
        "RuntimeError",
        "RuntimeError",
    ],
    "errors_of_a_callback": ["RuntimeError", "RuntimeError", ["no error", 5], "RuntimeError"],
    "future_set_twice": ["RuntimeError", 1],
    "asynchronous_functions_that_fail": [
        "RuntimeError",
        "RuntimeError",
        "RuntimeError",
        "OwnError",
    ],
    "asynchronous_function_without_a_future": "RuntimeError",
    "rref_pickled_by_hand": "RuntimeError",
    "tensors_that_share_memory": [True, True, [0.0, 0.0, 0.0, 0.0]],
    "tensors_that_require_a_gradient": [True, False, True, True],
    "shutdown_again": "RuntimeError",
}
# its own way to send a compressed tensor has no way back
BY_TORCH["tensors_of_all_kinds"] = {
    **dict.fromkeys(KINDS, ARRIVES),
    "compressed": [ARRIVES[0], "RuntimeError"],
}


def run(module: str, folder: Path) -> dict[str, Any]:
    """What the scenarios come to between two processes."""
    command = [sys.executable, "-W", "ignore", "-m", torch_shapes.__name__]
    where, environment = f"file://{folder}/meet", {**os.environ, "REMOTE_OF": module}
    workers = [
        subprocess.Popen(
            [*command, str(rank), "2", where], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said, heard = workers[0].communicate(timeout=UNTIL_S)
        workers[1].communicate(timeout=UNTIL_S)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert [worker.returncode for worker in workers] == [0, 0], heard
    seen: dict[str, Any] = json.loads(said.splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By this engine."""
    return run("prpc", tmp_path_factory.mktemp("prpc"))


@pytest.fixture(scope="module")
def seen_by_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By torch."""
    return run("torch", tmp_path_factory.mktemp("torch"))


@pytest.mark.parametrize("name", HERE)
def test_a_shape_comes_to_what_is_stated(seen: dict[str, Any], name: str) -> None:
    assert seen[name] == HERE[name]


@needs_torch
@pytest.mark.parametrize("name", HERE_OF_TENSORS)
def test_a_shape_of_tensors_comes_to_what_is_stated(seen: dict[str, Any], name: str) -> None:
    assert seen[name] == HERE_OF_TENSORS[name]


@needs_torch
@pytest.mark.parametrize("name", {**HERE, **HERE_OF_TENSORS})
def test_torch_comes_to_the_same_or_to_what_the_guide_says(
    seen_by_torch: dict[str, Any], name: str
) -> None:
    assert seen_by_torch[name] == BY_TORCH.get(name, {**HERE, **HERE_OF_TENSORS}[name])


def test_no_scenario_is_left_out() -> None:
    at_the_end = {"pending_at_shutdown", "call_after_shutdown", "shutdown_again"}
    assert HERE.keys() == torch_shapes.SCENARIOS.keys() | at_the_end
    assert HERE_OF_TENSORS.keys() == torch_shapes.OF_TENSORS.keys()
