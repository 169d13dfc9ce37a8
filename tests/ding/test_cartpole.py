"""DQN on CartPole, of DI-engine's zoo, over `--mq-type prpc`: DI-engine's own example, unmodified,
until it plays well, and a program whose processes find their roles by labels, with what each has
sent and received. DI-engine is PyPI's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ding.test_ditask import BIN, Launch, base_port
from tests.program import ROOT, wait_until

__all__ = ["base_port"]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ding") is None, reason="DI-engine is not installed"
)
RANDOM_RETURN = 22  # steps that a random policy keeps the pole up, of 200
IMPORTS_S = 200.0  # of torch and DI-engine, by three processes, beside an emulated machine
MODELS = 40  # that the learner has sent at least, with 5 updates between each
# torch's threads, in each of several processes; and its log's lines are not broken up
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
EVALUATION = re.compile(r"Train Iter\((\d+)\) Env Step\((\d+)\) Episode Return\(([\d.]+)\)")


def evaluations(launch: Launch) -> list[tuple[int, int, float]]:
    """Updates of the model, environment steps and mean return of five episodes, of each."""
    found = EVALUATION.finditer(launch.said_plainly())
    return [(int(one[1]), int(one[2]), float(one[3])) for one in found]


def test_the_example_of_di_engine_learns_to_keep_the_pole_up(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Node 0 learns, node 1 evaluates, node 2 collects: models and transitions go over the queue
    alone.
    """
    example = ("--package", ".", "--main", "ding.example.dqn.main")
    workers = "--parallel-workers 3 --topology mesh --protocol ipc --mq-type prpc"
    command = [str(BIN / "ditask"), *example, *workers.split()]
    with Launch(tmp_path, 3, *command, **ENVIRONMENT) as launch:

        def plays_well() -> bool:
            assert launch.process.poll() in (None, 0), launch.said[-5000:]
            return any(mean > 3 * RANDOM_RETURN for _, _, mean in evaluations(launch))

        wait_until(lambda: evaluations(launch), "the first evaluation", IMPORTS_S)
        wait_until(plays_well, "learning")
        found = evaluations(launch)
    assert found[0][2] < RANDOM_RETURN
    best = max(found, key=lambda one: one[2])
    tell(
        f"CartPole DQN over prpc: return {found[0][2]:g} before training, {best[2]:g} after "
        f"{best[0]} updates with {best[1]} steps"
    )


def test_models_and_transitions_of_labelled_workers_arrive(tmp_path: Path, base_port: int) -> None:
    labels = ("learner", "evaluator", "collector", "collector")
    addresses = [f"tcp://127.0.0.1:{base_port + one}" for one in range(len(labels))]

    def diary(number: int) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads(
                (tmp_path / f"{labels[number]}.{number}.json").read_text()
            )
            return found
        return {"models": [], "steps": 0, "transitions": 0, "returns": []}

    with contextlib.ExitStack() as launches:
        workers = [
            launches.enter_context(
                Launch(
                    tmp_path,
                    len(labels),
                    *(str(BIN / "ditask"), "--package", str(ROOT)),
                    *("--main", "tests.ding.cartpole.main", "--labels", label),
                    *f"--mq-type prpc --address 127.0.0.1 --ports {base_port + number}".split(),
                    *f"--node-ids {number} --topology alone".split(),
                    *(["--attach-to", ",".join(addresses[:number])] if number else []),
                    **ENVIRONMENT,
                )
            )
            for number, label in enumerate(labels)
        ]

        def all_is_exchanged() -> bool:
            assert all(worker.process.poll() is None for worker in workers), [
                worker.said[-2000:] for worker in workers
            ]
            sent = diary(0)["models"][MODELS:]
            return all(set(sent) & set(diary(number)["models"]) for number in (1, 2, 3))

        wait_until(all_is_exchanged, f"more than {MODELS} models at everybody")
        texts = [worker.said for worker in workers]
    learner = diary(0)
    sent = {checksum: at for at, checksum in enumerate(learner["models"])}
    for number in (1, 2, 3):
        own, *received = diary(number)["models"]
        assert own not in sent, "it begins with one of another seed"
        order = [sent[checksum] for checksum in received]
        assert order == sorted(set(order)), "whole models of the learner, in its order"
    assert learner["transitions"] == learner["steps"] > MODELS
    emitted = sum(diary(number)["steps"] for number in (2, 3))
    assert learner["steps"] <= emitted, "no step came twice"
    assert diary(1)["returns"], "it has evaluated"
    assert not any("Traceback" in text for text in texts), texts
