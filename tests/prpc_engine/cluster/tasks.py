"""Tasks of a cluster in processes of their own, for tests: told what to do line by line, killed.

    python -m tests.prpc_engine.cluster.tasks CLUSTER JOB INDEX [NAME=VALUE of ServerConfig ...]

serves that task, and does what the lines of its standard input say: a JSON list [method, keywords]
each, answered by a JSON line, {"value": ...} or {"error": [type, text]}. The end of the input,
which the death of the test brings about too, stops it.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from prpc_engine import Server, ServerConfig
from tests.program import Program

CONTROL_PORT, DATA_PORT = 2222, 3333  # below what the kernel gives to others


def fresh_host(seed: int) -> str:
    """A loopback address that nobody else uses: all of its ports are free."""
    # tests that run at the same time may have been told one seed
    source = random.Random(f"{seed} {os.getpid()}")
    return f"127.{source.randint(1, 254)}.{source.randint(0, 255)}.{source.randint(1, 254)}"


def cluster_at(host: str, **jobs: int) -> dict[str, list[str]]:
    """So many tasks of each job, at that host."""
    ports = iter(range(CONTROL_PORT, DATA_PORT))
    return {job: [f"{host}:{next(ports)}" for _ in range(count)] for job, count in jobs.items()}


def rule_environment(rule: str, cluster: dict[str, list[str]], folder: Path) -> dict[str, str]:
    """What makes tasks find each other's data by that rule."""
    if rule == "offset":
        return {"PRPC_DATA_PORT_OFFSET": "1000"}
    if rule == "exchange":
        return {}
    controls = [address for addresses in cluster.values() for address in addresses]
    lines = [
        f"{control}={control.partition(':')[0]}:{DATA_PORT + index}\n"
        for index, control in enumerate(controls)
    ]
    (folder / ".endpoint_map").write_text("".join(lines))
    return {"PRPC_ENDPOINT_MAP": str(folder)}


class TaskProcess(Program):
    """One such process."""

    def __init__(
        self, cluster: dict[str, list[str]], job: str, index: int, env: dict[str, str] | None = None
    ) -> None:
        super().__init__(
            "tests.prpc_engine.cluster.tasks", json.dumps(cluster), job, str(index), env=env
        )

    def begin(self, method: str, **keywords: Any) -> None:
        """Tell it to do something; answer() waits for it."""
        self.write_line(json.dumps([method, keywords]))

    def answer(self) -> Any:
        """What came of it; an error as [type, text]."""
        content = json.loads(self.read_line())
        return content.get("value", content.get("error"))

    def do(self, method: str, **keywords: Any) -> Any:
        """Both."""
        self.begin(method, **keywords)
        return self.answer()


def main(cluster: str, job: str, index: str) -> None:
    """What the process runs."""
    with Server(json.loads(cluster), job, int(index), config=ServerConfig()) as server:
        for line in sys.stdin:
            method, keywords = json.loads(line)
            try:
                answer = {"value": _do(server, method, keywords)}
            except Exception as error:
                answer = {"error": [type(error).__name__, str(error)]}  # type: ignore[dict-item]
            print(json.dumps(answer), flush=True)


def _do(server: Server, method: str, keywords: dict[str, Any]) -> Any:
    if method == "send":
        server.send(keywords.pop("key"), np.array(keywords.pop("value")), **keywords)
        return None
    if method == "statistics":
        statistics = server.statistics()
        return {
            "rule": statistics.rule,
            "waiting": statistics.waiting,
            "transports": sorted({link.transport for link in statistics.links.values()}),
        }
    value = getattr(server, method)(**keywords)
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [one.tolist() for one in value] if method == "recv_many" else value


if __name__ == "__main__":
    main(*sys.argv[1:])
