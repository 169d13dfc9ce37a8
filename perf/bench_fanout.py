"""One array to several readers of this host, each of which touches it and answers.

Readers look at one element of each page, so that what is measured is the way to them: who reads
40 MB whole takes 4 ms of a core for it, whoever sent it.

Expected, 40 MB:
    slab array          some 15 us a reader, and what it takes to touch 10,000 pages: 0.1 ms a
                        reader, on the cores that there are.
    ordinary array      the same after one copy, 2 ms, however many readers.
    a call each         the same with a copy for each reader: what broadcast() did before.
    multiprocessing     a Pipe for each: two copies by the kernel for each reader.
    pynng               a socket for each, three copies for each.
    torch               rpc_async to each: two copies for each.
    Ray                 into its object store, one copy, and a call to each with the reference; a
                        compiled graph does without the calls; by our transport one copy into the
                        slab. Their actors are pinned nowhere.
    vLLM                its MessageQueue out, and one back from each reader, as its executor has
                        them: 40 MB are more than a chunk, so a socket with two copies for each;
                        a small item is copied once and picked up by readers that spin.
    prpc, MessageQueue  the same program over ours: one copy, as above; a small item is a message to
                        each, and each answers by a queue of its own.
With readers pinned to the one core that a server has here, they touch it one after the other.

    python -m perf.bench_fanout [--json] [--quick] [--case "4 readers"]
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.connection
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import prpc_engine

from .child import STOP_LOOK_S, Announce, NotOffered, StopRequest
from .harness import Candidate, Place, Result, compare
from .peers import ray
from .peers.face import ITEM, WAIT_S_MAX, as_bytes
from .peers.prpc import serve_master
from .targets import Target
from .timing import FULL, TINY, Effort, Sample, time_each

NAME = "fanout"
PAGE_ITEMS = 4096 // ITEM.itemsize
SERVICE = "fanout"
Fan = Callable[[NDArray[np.float32]], list[float]]


@dataclass(frozen=True, slots=True)
class ToReaders:
    """float32[items] to so many readers."""

    readers: int
    items: int

    @property
    def size_bytes(self) -> int:
        return self.items * ITEM.itemsize

    def __str__(self) -> str:
        size = f"{self.size_bytes / 1e6:g} MB" if self.items > 1000 else f"{self.size_bytes} B"
        return f"{self.readers} readers, {size}"


SMALL = [ToReaders(readers, 312) for readers in (1, 4)]  # 1.25 KB: what a scheduler tells workers
CASES = [*(ToReaders(readers, 10_000_000) for readers in (1, 2, 4, 8)), *SMALL]
ORDINARY, SLAB, EACH = "prpc, ordinary array", "prpc, slab array", "prpc, a call each"
RAY_STORE, RAY_GRAPH = "Ray, object store", "Ray, compiled graph"
RAY_PRPC = 'Ray, tensor_transport="prpc"'
PIPES, NNG, TORCH = "multiprocessing.Pipe", "pynng ipc", "torch.distributed.rpc"
QUEUE, VLLM = "prpc, MessageQueue", "vLLM MessageQueue"
QUEUE_MODULES = {
    QUEUE: "prpc_engine.vllm",
    VLLM: "vllm.distributed.device_communicators.shm_broadcast",
}
_FOUR = str(CASES[2])
TARGETS = [
    Target(_FOUR, ORDINARY, "p50_ns", "at most", 1 / 2, against=EACH),
    Target(_FOUR, ORDINARY, "p50_ns", "at most", 1 / 5, against=PIPES),
    Target(_FOUR, ORDINARY, "p50_ns", "at most", 1 / 10, against=NNG),
    Target(_FOUR, ORDINARY, "p50_ns", "at most", 1 / 5, against=TORCH),
    Target(_FOUR, QUEUE, "p50_ns", "at most", 1 / 5, against=VLLM),
]


def touch(array: NDArray[np.float32]) -> float:
    """One element of each page."""
    return float(array[::PAGE_ITEMS].sum())


# -- this engine -----------------------------------------------------------------------------------


def serve_prpc(announce: Announce, master: str) -> None:
    """A reader, until SIGTERM."""
    stop = StopRequest()
    with prpc_engine.RpcService(master) as service:
        service.create_server(SERVICE, {"touch": touch})
        announce(service.rank)
        while not stop.asked:
            service.serve_forever(timeout_s=STOP_LOOK_S)


def fan_prpc(place: Place, readers: int, exits: contextlib.ExitStack, each: bool = False) -> Fan:
    """broadcast(), or a call for each."""
    _, master = exits.enter_context(place.serve_aside(serve_master))
    for _ in range(readers):
        exits.enter_context(place.serve(serve_prpc, master))
    service = exits.enter_context(prpc_engine.RpcService(master))
    client = service.create_client(SERVICE, readers)

    def broadcast(array: NDArray[np.float32]) -> list[float]:
        return client.broadcast("touch", array)

    def call_each(array: NDArray[np.float32]) -> list[float]:
        calls = [client.submit_to(number, "touch", array) for number in client.server_ids]
        return [call.result() for call in calls]

    return call_each if each else broadcast


# -- peers -----------------------------------------------------------------------------------------


def serve_pipe(announce: Announce, address: str) -> None:
    """A reader, until its pipe is closed."""
    with multiprocessing.connection.Listener(address, "AF_UNIX") as listener:
        announce(address)
        with listener.accept() as connection, contextlib.suppress(EOFError):
            while True:
                connection.send(touch(np.frombuffer(connection.recv_bytes(), ITEM)))


def fan_pipes(place: Place, readers: int, exits: contextlib.ExitStack) -> Fan:
    """send_bytes() to each, then their answers."""
    pipes = []
    for number in range(readers):
        address = str(Path(place.folder, f"pipe{number}"))
        exits.enter_context(place.serve(serve_pipe, address))
        pipes.append(exits.enter_context(multiprocessing.connection.Client(address, "AF_UNIX")))

    def fan(array: NDArray[np.float32]) -> list[float]:
        for pipe in pipes:
            pipe.send_bytes(as_bytes(array))
        return [pipe.recv() for pipe in pipes]

    return fan


def serve_nng(announce: Announce, address: str) -> None:
    """A reader, until killed."""
    pynng: Any = importlib.import_module("pynng")
    with pynng.Pair0(listen=address, recv_max_size=0) as socket:
        announce(address)
        while True:
            socket.send(np.float64(touch(np.frombuffer(socket.recv(), ITEM))).tobytes())


def fan_nng(place: Place, readers: int, exits: contextlib.ExitStack) -> Fan:
    """A pair of sockets for each: a bus would lose some."""
    pynng: Any = importlib.import_module("pynng")
    sockets = []
    for number in range(readers):
        address = f"ipc://{Path(place.folder, f'nng{number}')}"
        exits.enter_context(place.serve(serve_nng, address))
        wait_ms = int(WAIT_S_MAX * 1e3)
        sockets.append(
            exits.enter_context(
                pynng.Pair0(dial=address, send_timeout=wait_ms, recv_timeout=wait_ms)
            )
        )

    def fan(array: NDArray[np.float32]) -> list[float]:
        data = bytes(as_bytes(array))
        for socket in sockets:
            socket.send(data)
        return [float(np.frombuffer(socket.recv(), np.float64)[0]) for socket in sockets]

    return fan


def touch_tensor(tensor: Any) -> float:
    """As touch(), of a tensor."""
    return float(tensor[::PAGE_ITEMS].sum())


def serve_torch(announce: Announce, meeting: str, rank: int, world_size: int) -> None:
    """A reader, until killed."""
    announce(meeting)
    _join_torch(meeting, rank, world_size)
    while True:
        time.sleep(WAIT_S_MAX)


def _join_torch(meeting: str, rank: int, world_size: int) -> Any:
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    if not rpc.is_available():
        raise NotOffered("this build of torch has no torch.distributed.rpc")
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{meeting}", rpc_timeout=WAIT_S_MAX
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    return rpc


def fan_torch(place: Place, readers: int, exits: contextlib.ExitStack) -> Fan:
    """rpc_async() to each."""
    torch: Any = importlib.import_module("torch")
    meeting = str(Path(place.folder, "torch"))
    for number in range(readers):
        exits.enter_context(place.serve(serve_torch, meeting, number + 1, readers + 1))
    rpc = _join_torch(meeting, 0, readers + 1)
    exits.callback(rpc.shutdown, graceful=False)

    def fan(array: NDArray[np.float32]) -> list[float]:
        tensor = torch.from_numpy(array)
        futures = [
            rpc.rpc_async(f"worker{number + 1}", touch_tensor, args=(tensor,))
            for number in range(readers)
        ]
        return [future.wait() for future in futures]

    return fan


def fan_ray(
    place: Place,
    readers: int,
    exits: contextlib.ExitStack,
    make: Callable[[Callable[[NDArray[Any]], float], int, contextlib.ExitStack], Fan],
) -> Fan:
    """By one of perf/peers/ray.py; its actors are not ours to place."""
    return make(touch, readers, exits)


def serve_queue(announce: Announce, module: str, handle: bytes, rank: int) -> None:
    """A reader, until it is told to end: one queue from the writer, one back."""
    queue_class: Any = importlib.import_module(module).MessageQueue
    queue = queue_class.create_from_handle(pickle.loads(handle), rank)
    back = queue_class(1, 1)
    announce(pickle.dumps(back.export_handle()))
    queue.wait_until_ready()
    back.wait_until_ready()
    while (array := queue.dequeue(indefinite=True)) is not None:
        back.enqueue(touch(array))
    queue.shutdown()
    back.shutdown()


def fan_queue(place: Place, readers: int, exits: contextlib.ExitStack, name: str) -> Fan:
    """enqueue() once, dequeue() from each."""
    queue_class: Any = importlib.import_module(QUEUE_MODULES[name]).MessageQueue
    queue = queue_class(readers, readers)
    exits.callback(queue.shutdown)
    handle = pickle.dumps(queue.export_handle())
    backs = []
    for rank in range(readers):
        _, answers = exits.enter_context(
            place.serve(serve_queue, QUEUE_MODULES[name], handle, rank)
        )
        backs.append(queue_class.create_from_handle(pickle.loads(answers), 0))
        exits.callback(backs[-1].shutdown)
    queue.wait_until_ready()
    for back in backs:
        back.wait_until_ready()
    exits.callback(queue.enqueue, None)  # before the readers are ended

    def fan(array: NDArray[np.float32]) -> list[float]:
        queue.enqueue(array, timeout=WAIT_S_MAX)
        return [back.dequeue(timeout=WAIT_S_MAX) for back in backs]

    return fan


# -- measuring -------------------------------------------------------------------------------------


def run(
    case: ToReaders,
    effort: Effort = FULL,
    progress: Callable[[str], None] | None = None,
    pinned: bool = True,
) -> list[Result]:
    """Measure one case with all candidates."""
    candidates = [
        Candidate(ORDINARY, "ours", partial(measure, case=case, make=fan_prpc)),
        Candidate(SLAB, "ours", partial(measure, case=case, make=fan_prpc, in_slab=True)),
        Candidate(EACH, "ours", partial(measure, case=case, make=partial(fan_prpc, each=True))),
        Candidate(PIPES, "peer", partial(measure, case=case, make=fan_pipes)),
        Candidate(NNG, "peer", partial(measure, case=case, make=fan_nng), "pynng", "pynng"),
        Candidate(TORCH, "peer", partial(measure, case=case, make=fan_torch), "torch", "torch"),
        *(
            Candidate(
                name,
                "peer",
                partial(measure, case=case, make=partial(fan_ray, make=make)),
                "ray",
                "ray",
            )
            for name, make in (
                (RAY_STORE, ray.fan_store),
                (RAY_GRAPH, partial(ray.fan_graph, nbytes=case.size_bytes)),
                (RAY_PRPC, ray.fan_transport),
            )
        ),
        Candidate(QUEUE, "ours", partial(measure, case=case, make=partial(fan_queue, name=QUEUE))),
        Candidate(
            VLLM,
            "peer",
            partial(measure, case=case, make=partial(fan_queue, name=VLLM)),
            "vllm",
            "vllm",
        ),
    ]
    return compare(
        NAME,
        str(case),
        candidates,
        effort,
        bytes_per_op=case.size_bytes,
        pinned=pinned,
        progress=progress,
    )


def measure(
    place: Place,
    effort: Effort,
    case: ToReaders,
    make: Callable[[Place, int, contextlib.ExitStack], Fan],
    in_slab: bool = False,
) -> Sample:
    """Time from the send to the last answer. It is written once, before."""
    with contextlib.ExitStack() as exits:
        fan = make(place, case.readers, exits)
        array = prpc_engine.empty(case.items, ITEM) if in_slab else np.empty(case.items, ITEM)
        array[:] = 1.0
        sample = time_each(partial(fan, array), effort)
        right = sum(answer == touch(array) for answer in fan(array))
        return sample.with_work(answers_right=right)


def test_every_reader_of_every_candidate_sees_the_array() -> None:
    for result in run(ToReaders(2, 20_000), TINY):
        assert result.state in ("ok", "not installed", "not offered"), result.note
        if result.state == "ok":
            assert result.work == {"answers_right": 2}


def test_every_target_has_something_to_judge() -> None:
    names = {ORDINARY, SLAB, EACH, PIPES, NNG, TORCH, QUEUE, VLLM}
    for target in TARGETS:
        assert target.case in map(str, CASES)
        assert {name for name in (target.candidate, target.against) if name} <= names


if __name__ == "__main__":
    from . import cli_bench

    raise SystemExit(cli_bench.command_line(NAME))
