"""Tasks of a TensorFlow cluster in processes of their own, for tests: each has a stock gRPC server
and one of ours, side by side.

    python -m tests.tensorflow.tasks CLUSTERS JOB INDEX

CLUSTERS is JSON, {protocol: cluster}. JOB may be "client": a process that is no task of them. A
task does what the lines of its standard input say: a JSON list [scenario, protocol, keywords] each,
a function of scenarios.py or semantics.py, answered by a JSON line, {"value": ...} or
{"error": [type, text]}. The end of the input, which the death of the test brings about too, ends
it.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from collections.abc import Iterator
from typing import Any

from tests.forked import TENSORFLOW
from tests.program import Program

# a test that waits longer has failed; importing TensorFlow takes some seconds, on a busy machine
# many
PATIENCE_S = 120.0
PORTS = range(20000, 32000)  # below what the kernel gives to others


def clusters(seed: int, **jobs: int) -> dict[str, dict[str, list[str]]]:
    """A cluster of so many tasks of each job, for each protocol."""
    source = random.Random(seed)
    ports, found = _free_ports(source), {}
    for protocol in ("grpc", "prpc"):
        host = f"127.{source.randint(1, 254)}.{source.randint(0, 255)}.{source.randint(1, 254)}"
        found[protocol] = {
            job: [f"{host}:{next(ports)}" for _ in range(count)] for job, count in jobs.items()
        }
    return found


def _free_ports(source: random.Random) -> Iterator[int]:
    """At which nobody listens at any address, as the stock server listens at all;
    no two the same.
    """
    for port in source.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        yield port


class TaskProcess(Program):
    """One such process."""

    patience_s = PATIENCE_S
    imports = TENSORFLOW

    def __init__(
        self, clusters: dict[str, Any], job: str, index: int, env: dict[str, str] | None = None
    ) -> None:
        self.name = f"/job:{job}/task:{index}"
        super().__init__("tests.tensorflow.tasks", json.dumps(clusters), job, str(index), env=env)

    def begin(self, scenario: str, protocol: str, **keywords: Any) -> None:
        """Tell it to do something; answer() waits for it."""
        self.write_line(json.dumps([scenario, protocol, keywords]))

    def answer(self) -> Any:
        """What came of it; an error as [type, text]."""
        content = json.loads(self.read_line())
        return content["value"] if "value" in content else content["error"]

    def do(self, scenario: str, protocol: str, **keywords: Any) -> Any:
        """Both."""
        self.begin(scenario, protocol, **keywords)
        return self.answer()


class Script(Program):
    """A script as `prpc run` runs it: `python -m prpc_engine.tensorflow SCRIPT ARGUMENTS`."""

    patience_s = PATIENCE_S
    imports = TENSORFLOW

    def __init__(
        self, *arguments: str, place: dict[str, Any], env: dict[str, str] | None = None
    ) -> None:
        """`place` is what TF_CONFIG says; `env`: more variables."""
        variables = {"TF_CONFIG": json.dumps(place), **(env or {})}
        super().__init__("prpc_engine.tensorflow", *arguments, env=variables)


class Job:
    """All tasks of a job's clusters, worker 0 ready for scenarios.

    A task's graph only grows, and each new step of a session takes longer for it, some 0.1 s at
    1000 ops: renew() has new tasks instead, which takes less than 1 s in all.
    """

    def __init__(self, seed: int, env: dict[str, str] | None = None, **jobs: int) -> None:
        """`env`: variables of all tasks; they serve when this returns."""
        self._source, self._jobs, self._env = random.Random(seed), jobs, env
        self._stock: dict[str, Any] = {}  # by scenario and keywords
        self._start()

    def _start(self) -> None:
        self.clusters = clusters(self._source.getrandbits(32), **self._jobs)
        self.tasks = {
            (job, index): TaskProcess(self.clusters, job, index, env=self._env)
            for job, count in self._jobs.items()
            for index in range(count)
        }
        for task in self.tasks.values() if self._env else ():
            task.do("serves", "prpc")

    def renew(self) -> None:
        """The same job in new processes, at other places."""
        self.close()
        self._start()

    def worker(self, index: int = 0) -> TaskProcess:
        """That process."""
        return self.tasks["worker", index]

    def both(self, scenario: str, **keywords: Any) -> tuple[Any, Any]:
        """What a scenario comes to at worker 0 on the stock protocol, and on ours."""
        return self.stock(scenario, **keywords), self.worker().do(scenario, "prpc", **keywords)

    def stock(self, scenario: str, **keywords: Any) -> Any:
        """The first of these: tried once, however many of our ways it is compared with."""
        asked = json.dumps([scenario, keywords])
        if asked not in self._stock:
            self._stock[asked] = self.worker().do(scenario, "grpc", **keywords)
        return self._stock[asked]

    def close(self) -> None:
        """End them; the workers first."""
        for (_, _), task in sorted(self.tasks.items(), reverse=True):
            with task:
                pass


def main(clusters: str, job: str, index: str) -> None:
    """What the process runs."""
    import prpc_engine.tensorflow as prpc_tf

    prpc_tf.install()
    from tests.tensorflow import (
        bits,
        copies,
        exchanges,
        flows,
        kills,
        mistakes,
        remotes,
        scenarios,
        semantics,
        shards,
        states,
        traces,
    )

    modules = [
        scenarios,
        semantics,
        exchanges,
        mistakes,
        copies,
        flows,
        kills,
        traces,
        states,
        shards,
        remotes,
        bits,
    ]
    known = {name: value for module in modules for name, value in vars(module).items()}
    runs = {
        protocol: scenarios.Client(protocol, cluster)
        if job == "client"
        else scenarios.Task(protocol, cluster, job, int(index))
        for protocol, cluster in json.loads(clusters).items()
    }
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what scripts print is none of our answers
    for line in sys.stdin:
        name, protocol, keywords = json.loads(line)
        try:
            answer = {"value": scenarios.plain(known[name](runs[protocol], **keywords))}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error)]}
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # a stock server cannot be stopped


if __name__ == "__main__":
    main(*sys.argv[1:])
