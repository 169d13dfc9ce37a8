"""PyPI's Ray: actors that return tensors by tensor_transport="prpc". One program does it all, as a
cluster takes ten seconds to start; each test looks at what its part has printed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.program import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or importlib.util.find_spec("torch") is None,
    reason="Ray and torch are not installed: pip install 'prpc-engine[ray,torch]'",
)
LIMIT_S = 250  # four starts of Python with Ray and torch, beside other stages of .ci/run
HEAD = """
import os

import numpy as np
import ray
import torch

import prpc_engine.ray

prpc_engine.ray.register()
prpc_engine.ray.register("prpc_numpy", np.ndarray)
ray.init(
    num_cpus=3,
    include_dashboard=False,
    _temp_dir=os.environ["RAY_FOLDER"],
    logging_level="ERROR",
    log_to_driver=False,
)


def held(actor, name="PRPC"):
    def names(self):
        from ray.experimental.rdt.util import get_tensor_transport_manager

        return get_tensor_transport_manager(name).held.names

    return ray.get(actor.__ray_call__.remote(names))


@ray.remote(enable_tensor_transport=True)
class Learner:
    def __init__(self, items=1_000_000):
        self.state = torch.arange(items, dtype=torch.float32)

    @ray.method(tensor_transport="prpc")
    def weights(self):
        return {"w": self.state, "step": 7, "b": torch.ones(3, dtype=torch.bfloat16)}

    @ray.method(tensor_transport="prpc")
    def odd(self):
        rows = torch.arange(12).reshape(3, 4)
        return [torch.empty(0, 4), torch.tensor(5), rows.T, torch.tensor([True, False])]

    @ray.method(tensor_transport="prpc")
    def sparse(self):
        return torch.eye(3).to_sparse()

    @ray.method(tensor_transport="prpc_numpy")
    def arrays(self):
        return [np.arange(1_000_000), np.zeros((2, 0)), np.array(["x", "yz"])]

    def change(self):
        self.state += 1

    def die(self):
        os._exit(1)


@ray.remote(enable_tensor_transport=True)
class Actor:
    def total(self, weights):
        w = weights["w"]
        w += 0  # it is this actor's own
        return float(w.double().sum()), weights["step"], str(weights["b"].dtype)

    def shapes(self, tensors):
        return [(tuple(one.shape), one.tolist()) for one in tensors]

    def look(self, arrays):
        seen = [(one.shape, one.dtype.str, one.flags.writeable) for one in arrays]
        return seen, int(arrays[0].sum())

    def pid(self):
        return os.getpid()


SUM = 499999500000.0
"""


TRAVEL = """
learner, actors = Learner.remote(), [Actor.remote() for _ in range(2)]
ref = learner.weights.remote()
for actor in actors:
    assert ray.get(actor.total.remote(ref)) == (SUM, 7, "torch.bfloat16")
ray.get(learner.change.remote())  # in place: what was returned before stays
assert ray.get(actors[0].total.remote(ref))[0] == SUM
assert len(held(learner)) == 1
del ref
while held(learner):
    pass
print(ray.get(actors[0].shapes.remote(learner.odd.remote())))
print(ray.get(actors[0].look.remote(learner.arrays.remote())))
print(float(ray.get(learner.weights.remote())["w"].sum()) > 0)  # into the driver
"""
DEATH = """
from ray.exceptions import RayError

learner, actor = Learner.remote(), Actor.remote()
pid = ray.get(actor.pid.remote())
ref = learner.weights.remote()
ray.wait([ref])
assert ray.get(actor.total.remote(ref))[0] == SUM
later = learner.weights.remote()
ray.wait([later])
try:
    ray.get(learner.die.remote())
except RayError:
    pass
try:
    ray.get(actor.total.remote(later), timeout=120)
except RayError as error:
    print("could not be fetched from process" in str(error) or type(error).__name__)
print(ray.get(actor.pid.remote(), timeout=120) == pid)
again = Learner.remote()
print(ray.get(actor.total.remote(again.weights.remote()), timeout=120)[0] == SUM)
"""
REFUSALS = """
from ray.exceptions import RayError

learner, actor = Learner.remote(), Actor.remote()
try:
    ray.get(actor.shapes.remote(learner.sparse.remote()), timeout=120)
except RayError as error:
    print("send value.to_dense()" in str(error))
for arguments in (("prpc", np.ndarray), ("other", list), ("nixl", np.ndarray)):
    try:
        prpc_engine.ray.register(*arguments)
    except prpc_engine.errors.ConfigError as error:
        print(error)
prpc_engine.ray.register()
"""
TARGETS = """
from ray.experimental import set_target_for_ref

learner = Learner.remote(1000)
ref = ray.put([torch.arange(1000, dtype=torch.float32)], _tensor_transport="prpc")


@ray.remote(enable_tensor_transport=True)
class Filled:
    def fill(self, refs):
        prpc_engine.ray.register()  # before Ray has told it
        room = torch.zeros(1000)
        set_target_for_ref(refs[0], [room])
        (got,) = ray.get(refs[0])
        return got is room or got.data_ptr() == room.data_ptr(), float(room.sum())


print(ray.get(Filled.remote().fill.remote([ref]), timeout=120))
"""
FAR = """
far = Learner.options(runtime_env={"env_vars": {"PRPC_TRANSPORTS": "tcp"}}).remote()
actor = Actor.remote()
print(ray.get(actor.total.remote(far.weights.remote()))[0] == SUM)
print(ray.get(actor.look.remote(far.arrays.remote()))[1])


def where(self):
    from ray.experimental.rdt.util import get_tensor_transport_manager

    return get_tensor_transport_manager("PRPC").held.holder.addresses


(address,) = ray.get(far.__ray_call__.remote(where))
print(address.rpartition(":")[0] == f"tcp://{ray.util.get_node_ip_address()}")
"""
PARTS = (TRAVEL, FAR, TARGETS, REFUSALS, DEATH)
END = "== the end of a part"


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What each part printed. The program has to end by itself."""
    # Ray's own folder: its path leaves room for the names of sockets
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        environment = {
            **os.environ,
            "RAY_FOLDER": folder,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HOME": folder,
            "PYTHONPATH": str(ROOT),
        }
        secret = Path(folder) / "secret"  # of the job: it listens at an address for other hosts
        secret.touch(0o600)
        secret.write_text("a" * 64)
        environment["PRPC_SECRET_FILE"] = str(secret)
        path = Path(folder) / "program.py"
        parts = [f"{part}\nprint({END!r}, flush=True)\n" for part in PARTS]
        path.write_text(HEAD + "".join(parts) + "\nray.shutdown()\n")
        ran = subprocess.run(
            [sys.executable, str(path)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    printed = ran.stdout.split(END + "\n")
    return {part: text.splitlines() for part, text in zip(PARTS, printed, strict=False)}


def test_tensors_and_arrays_go_from_actor_to_actor_and_are_held_no_longer_than_referred_to(
    said: dict[str, list[str]],
) -> None:
    assert said[TRAVEL] == [
        "[((0, 4), []), ((), 5), ((4, 3), [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]), "
        "((2,), [True, False])]",
        "([((1000000,), '<i8', False), ((2, 0), '<f8', False), ((2,), '<U2', False)], "
        "499999500000)",
        "True",
    ]


def test_with_a_secret_of_the_job_others_reach_it_by_tcp(said: dict[str, list[str]]) -> None:
    assert said[FAR] == ["True", "499999500000", "True"]


def test_a_target_is_filled_in_place(said: dict[str, list[str]]) -> None:
    assert said[TARGETS] == ["(True, 499500.0)"]


def test_what_cannot_travel_so_says_why(said: dict[str, list[str]]) -> None:
    lines = said[REFUSALS]
    assert lines[0] == "True"
    assert "Ray has a transport 'PRPC' already" in lines[1]
    assert "torch.Tensor and numpy.ndarray are allowed" in lines[2]
    assert "Ray has a transport 'NIXL' already" in lines[3]


def test_a_dead_learner_is_named_and_its_receivers_live_on(said: dict[str, list[str]]) -> None:
    lines = [line for line in said[DEATH] if "(raylet)" not in line]  # it says so, too
    assert lines == ["True"] * 3
