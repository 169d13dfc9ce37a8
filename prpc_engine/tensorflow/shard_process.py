"""A shard of a task: a process beside the task's own, with a runtime, a reactor, connections and a
slab, that runs the stages which other tasks register with it.

    the task's process                        a shard
    starts it; its settings go to stdin       imports TensorFlow, listens at any ports
    waits for its line                        writes its control port to stdout, and serves
    closes its stdin; or ends, however        ends; at once, where it has not within END_TIMEOUT_S
    sees that it has ended, within LOOK_S

Not by fork: TensorFlow has threads. Not by multiprocessing's spawn: that would import the user's
script, which is a ps with a server of its own. Logs go to stderr, as those of the task do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorflow.core.protobuf import config_pb2

from prpc_engine import errors
from prpc_engine.cluster.endpoint import Endpoint, Place
from prpc_engine.tensorflow.runtime import Runtime
from prpc_engine.tensorflow.stages import Stages, end_stages
from shard import Task, control_loop, run_blocking, runtime, sleep

START_TIMEOUT_S = 120.0  # to import TensorFlow on a host that starts many
END_TIMEOUT_S = 5.0  # for a shard to end by itself; then it is killed
LOOK_S = 0.5  # between two looks of each at the other

logger = logging.getLogger("prpc")


@dataclass(frozen=True)
class ShardSettings:
    """Where a shard listens, and how; config: the ConfigProto of its runtime, serialized."""

    place: Place
    config: bytes
    parent: int  # the pid of the task's process


def divided(config: Any, count: int) -> Any:
    """The ConfigProto of one of so many processes on this host: each has its part of the threads
    for kernels, where the user does not say how many.
    """
    part = config_pb2.ConfigProto()
    part.CopyFrom(config)
    if not part.intra_op_parallelism_threads:
        part.intra_op_parallelism_threads = max(1, len(os.sched_getaffinity(0)) // count)
    return part


class ShardProcesses:
    """The shards of one task, on the side of the task's process: one for each of the places.

    on_lost  told the name of the first that ended by itself, and how, in a thread that may block
    python   runs them

    Owned by the task's server, which closes it. They serve when this returns. Raises RpcError when
    one does not start, within `START_TIMEOUT_S` seconds.
    """

    def __init__(
        self,
        places: Sequence[Place],
        config: Any,
        on_lost: Callable[[str, str], object],
        python: str = sys.executable,
    ) -> None:
        self._on_lost = on_lost
        self._names = [place.task for place in places]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watching: Task | None = None
        try:
            for place in places:
                self._processes.append(_started(python, place, config))
            until = runtime.monotonic() + START_TIMEOUT_S
            self.ports = [
                _port_of(place.task, process, until)
                for place, process in zip(places, self._processes, strict=True)
            ]
        except BaseException:  # Ctrl-C, too
            self.close()
            raise
        self._watching = control_loop().spawn(self._watch())

    @property
    def pids(self) -> list[int]:
        """Of the shards, in order."""
        return [process.pid for process in self._processes]

    async def _watch(self) -> None:
        """In the control loop."""
        while True:
            await sleep(LOOK_S)
            for name, process in zip(self._names, self._processes, strict=True):
                if process.poll() is not None:
                    await run_blocking(self._on_lost, name, _how(process))
                    return

    def close(self) -> None:
        """End them, and wait until they have. Again: does nothing."""
        if self._watching is not None:
            self._watching.cancel()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the shard has ended before
                process.stdin.close()
        for name, process in zip(self._names, self._processes, strict=False):
            _wait_for(name, process)
            assert process.stdout is not None
            process.stdout.close()


def _started(python: str, place: Place, config: Any) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(each for each in sys.path if each)
    process = subprocess.Popen(
        [python, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    settings = ShardSettings(place, config.SerializeToString(), os.getpid())
    with contextlib.suppress(BrokenPipeError):  # the shard has ended: _port_of() says so
        pickle.dump(settings, process.stdin)
        process.stdin.flush()
    return process


def _port_of(name: str, process: subprocess.Popen[bytes], until: float) -> int:
    """What a shard writes once it serves. Raises RpcError."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    left_s = max(0.0, until - runtime.monotonic())
    what = f"it does not serve after {START_TIMEOUT_S:.0f} s"
    if poll.poll(left_s * 1000):
        line = process.stdout.readline()  # it writes all of it, or has ended
        if line.strip().isdigit():
            return int(line)
        _wait_for(name, process)
        what = f"its process {_how(process)}; its log says why"
    raise errors.RpcError(f"{name} did not start: {what} (NETWORK_PS_CORE_NUMBER asks for it)")


def _wait_for(name: str, process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.warning("%s did not end by itself, and is killed", name)
        process.kill()
        process.wait()


def _how(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


# -- in a shard ------------------------------------------------------------------------------------


def main() -> None:
    """Serve until stdin ends, or the task's process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the task's process ends us
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints here is no port
    settings: ShardSettings = pickle.load(sys.stdin.buffer)
    stages = Stages(
        Runtime(config_pb2.ConfigProto.FromString(settings.config)),
        lambda handles, is_all: None,
        lambda incarnation: endpoint.is_connected(incarnation),
    )
    endpoint = Endpoint(settings.place, stages.verbs, stages.peer_lost)
    try:
        endpoint.serve()
        control_loop().spawn(_end_with(settings.parent, endpoint.driver.stop_running))
        print(endpoint.address.port, file=told, flush=True)
        endpoint.run(None)
    finally:
        # first, and without answers: workers are to find that this process is gone, as they find it
        # of the task's, and go on once it was started again; CancelledError would end them
        end_stages(runtime.monotonic() + END_TIMEOUT_S)
        endpoint.close()
        stages.close()


async def _end_with(parent: int, end: Callable[[], object]) -> None:
    """End with the task's process: also when one that it has forked keeps our stdin open, and when
    a kernel keeps our main thread.
    """
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    while os.getppid() == parent and not (poll.poll(0) and not os.read(sys.stdin.fileno(), 4096)):
        await sleep(LOOK_S)
    end()
    await sleep(END_TIMEOUT_S)
    os._exit(1)


if __name__ == "__main__":
    main()
