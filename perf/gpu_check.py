"""Everything of device maps that needs a CUDA device, in one command on a machine with one: whether
it works, and how long it takes beside torch's own ways.

    python -m perf.gpu_check [--quick]

Two processes on one device (cuda:0 to cuda:0), or on two where there are two (cuda:0 to cuda:1).
A time is that of a call with one float32 tensor, acknowledged: when it returns, the receiver has
the tensor on its device, complete. Medians after a warm-up; the first call stands beside them.

    prpc, shared        the receiver opens our device memory (CUDA IPC)
    prpc, by the host   what peers do who cannot: another host, a container
    prpc, GPUDirect     the same over verbs, read from one device into the other; where there is an
                        RDMA device that can
    torch rpc           torch.distributed.rpc with the same device map, synchronised as ours is
    torch queue         torch.multiprocessing: the tensor by CUDA IPC, the answer by a queue
    copied twice        two copies on the device and their waits: nothing moves less

Needs torch with CUDA; CuPy and JAX are looked at where they are installed. Exit code 1: a check
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prpc_engine import remote as rpc
from prpc_engine.cuda.direct import direct_refusal, direct_support
from shard import verbs_refusal

from . import published

torch: Any = importlib.import_module("torch")
WARM, START_S_MAX = 5, 30.0
WAY_S_MAX = 60.0  # for one way, all sizes
SIZES = ("1.25 KB", "20 KB", "1.25 MB", "10 MB", "40 MB", "640 MB", "1.25 GB")
HERE, THERE = "here", "there"


# -- what runs at the other side -------------------------------------------------------------------


def take(value: Any) -> None:
    """Acknowledge it."""


def give_back(value: Any) -> Any:
    """The same."""
    return value


def looked_at(value: Any) -> tuple[str, str, tuple[int, ...], str]:
    """Where it is, its dtype, its shape, and its numbers as text."""
    on = str(getattr(value, "device", "host"))
    return on, str(value.dtype), tuple(value.shape), str(value.tolist())


def made_of(size: int, device: str) -> Any:
    """A tensor that is made here."""
    return torch.arange(size, dtype=torch.float32, device=device)


def worker_statistics() -> dict[str, int]:
    """Of the other side."""
    return rpc.statistics()


def import_it(name: str) -> None:
    """So that its arrays arrive as such."""
    importlib.import_module(name)


class Net(torch.nn.Module):  # type: ignore[misc]
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(256, 256)
        self.second = torch.nn.Linear(256, 256)
        self.second.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        """Its output."""
        return self.second(self.first(x))


# -- the pair --------------------------------------------------------------------------------------


def devices() -> tuple[int, int]:
    """Ours, and that of the other side."""
    return 0, torch.cuda.device_count() - 1 and 1


def serve(meeting: str, ends: Any, direct: bool) -> None:
    """The other side, until the pipe ends: an Event would hang who sets it, once this is killed."""
    rpc.init_rpc(THERE, 1, 2, meeting, rpc.Options(gpu_direct=direct))
    with contextlib.suppress(EOFError):
        ends.recv()
    rpc.shutdown(graceful=False)


@contextlib.contextmanager
def joined(device_map: dict[Any, Any], shares: bool = True, direct: bool = False) -> Iterator[Any]:
    """This process as a worker, and its peer: the process."""
    context = torch.multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder, 'meet')}"
        process = context.Process(target=serve, args=(meeting, theirs, direct), daemon=True)
        process.start()
        theirs.close()
        options = rpc.Options(share_devices=shares, gpu_direct=direct)
        if device_map:
            options.set_device_map(THERE, device_map)
        try:
            rpc.init_rpc(HERE, 0, 2, meeting, options)
            yield process
        finally:
            ours.close()
            process.join(10)
            rpc.shutdown(graceful=False)
            process.kill()
            process.join()


def wait_until_it_opens(tensor: Any) -> None:
    """The first calls go by the host; after a moment the pool is open."""
    give_up_at = time.monotonic() + START_S_MAX
    while not rpc.statistics()["peers_that_open"]:
        rpc.rpc_sync(THERE, take, args=(tensor,))
        if time.monotonic() > give_up_at:
            raise SystemExit("the other side cannot open this one's device memory: CUDA IPC fails")


# -- checks ----------------------------------------------------------------------------------------

failures: list[str] = []


def check(name: str, found: Any, expected: Any) -> None:
    """Print it; a difference is a failure."""
    if found == expected:
        print(f"  ok      {name}")
        return
    failures.append(name)
    print(f"  FAILED  {name}: {str(found)[:300]} instead of {str(expected)[:300]}")


def check_tensors(ours: int, theirs: int) -> None:
    """Every way of a tensor, with the pool open."""
    there, here = f"cuda:{theirs}", f"cuda:{ours}"

    def ask(value: Any) -> Any:
        return rpc.rpc_sync(THERE, looked_at, args=(value,))

    for dtype in ("float32", "float16", "bfloat16", "float64", "int64", "uint8", "bool"):
        value = torch.arange(64, device=here).reshape(8, 8).to(getattr(torch, dtype))
        check(f"{dtype}", ask(value), (there, str(value.dtype), (8, 8), str(value.tolist())))
    big = torch.arange(1 << 16, dtype=torch.float32, device=here)
    large = big.reshape(256, 256)
    for name, value in {
        "not contiguous": large.T[::2],
        "empty": large[:0],
        "of no dimension": large.sum(),
        "with gradient": large.clone().requires_grad_(),
        "large": large,
    }.items():
        expected = (there, "torch.float32", tuple(value.shape), str(value.tolist()))
        check(name, ask(value), expected)
    back = rpc.rpc_sync(THERE, give_back, args=({"a": [large], "b": (large.T,)},))
    check(
        "in containers, and back",
        [str(back["a"][0].device), bool((back["b"][0] == large.T).all())],
        [here, True],
    )
    made = rpc.rpc_sync(THERE, made_of, args=(100_000, there))
    check(
        "made there",
        [str(made.device), float(made[-1])],
        [here, 99_999.0],
    )
    rref = rpc.remote(THERE, made_of, args=(100_000, there))
    check("of an RRef", str(rref.to_here().device), here)
    net = Net().to(here)
    copied = rpc.rpc_sync(THERE, give_back, args=(net,))
    x = torch.ones(256, device=here)
    check(
        "a module",
        [str(copied.first.weight.device), bool(torch.equal(copied(x), net(x)))],
        [here, True],
    )
    check("its weight is one", copied.first.weight.data_ptr(), copied.second.weight.data_ptr())
    futures = [rpc.rpc_async(THERE, give_back, args=(large + index,)) for index in range(64)]
    check(
        "64 in flight",
        [bool((each.result() == large + index).all()) for index, each in enumerate(futures)],
        [True] * 64,
    )
    kernel = torch.cuda.Stream(here)
    with torch.cuda.stream(kernel):
        slow = large
        for _ in range(50):
            slow = slow @ large * 1e-7
        got = rpc.rpc_sync(THERE, give_back, args=(slow,))
        check("behind the work of its stream", bool(torch.equal(got, slow)), True)
    del futures, back, made, copied
    rpc.rpc_sync(THERE, take, args=(None,))
    check("every block came back", _settled(lambda: rpc.statistics()["device_taken"]), 0)
    check("and there", _settled(lambda: rpc.rpc_sync(THERE, worker_statistics)["device_taken"]), 0)


def _settled(read: Callable[[], int]) -> int:
    give_up_at = time.monotonic() + 10
    while (found := read()) and time.monotonic() < give_up_at:
        rpc.rpc_sync(THERE, take, args=(None,))
    return found


def check_libraries(ours: int, theirs: int) -> None:
    """CuPy's and JAX's arrays."""
    for name in ("cupy", "jax"):
        try:
            library: Any = importlib.import_module(name)
        except ImportError:
            print(f"  -       {name} is not installed")
            continue
        rpc.rpc_sync(THERE, import_it, args=(name,))
        numbers: Any = library if name == "cupy" else library.numpy
        for size in (100, 100_000):
            value = numbers.arange(size, dtype="float32")
            back = rpc.rpc_sync(THERE, give_back, args=(value,))
            check(
                f"{name}, {size} items",
                [type(back) is type(value), bool((back == value).all()), str(back.device)],
                [True, True, str(value.device)],
            )


def check_maps(ours: int, theirs: int) -> None:
    """CPU to device, and no map."""
    with joined({"cpu": f"cuda:{theirs}"}):
        found = rpc.rpc_sync(THERE, looked_at, args=(torch.ones(3),))
        check("from the CPU to a device", found[0], f"cuda:{theirs}")
        check(
            "and back to the CPU",
            str(rpc.rpc_sync(THERE, give_back, args=(torch.ones(3),)).device),
            "cpu",
        )
    with joined({}), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = torch.ones(100_000, device=f"cuda:{ours}")
        for _ in range(3):
            found = rpc.rpc_sync(THERE, looked_at, args=(value,))
        check("without a map", found[0], "cpu")
        check("warned once", len([each for each in caught if each.category is RuntimeWarning]), 1)
        back = rpc.rpc_sync(THERE, give_back, args=(Net().to(f"cuda:{ours}"),))
        check("a module without a map", str(back.first.weight.device), "cpu")
    with joined({f"cuda:{ours}": "cuda:99"}):
        try:
            rpc.rpc_sync(THERE, looked_at, args=(torch.ones(3, device=f"cuda:{ours}"),))
            text = "no error"
        except Exception as error:
            text = str(error)
        check("a device that is not there is named", "cuda:99" in text, True)


def check_killed(ours: int, theirs: int) -> None:
    """The receiver dies in the middle: our blocks come back, and the call ends."""
    with joined({ours: theirs}) as process:
        value = torch.ones(10 << 20, device=f"cuda:{ours}")
        wait_until_it_opens(value)
        futures = [rpc.rpc_async(THERE, give_back, args=(value,)) for _ in range(8)]
        os.kill(process.pid, signal.SIGKILL)
        ended = 0
        for each in futures:
            with contextlib.suppress(RuntimeError):
                each.result(30)
            ended += each.done()
        check("killed: every call ended", ended, 8)
        give_up_at = time.monotonic() + 20
        while rpc.statistics()["device_taken"] and time.monotonic() < give_up_at:
            pass
        check("killed: every block came back", rpc.statistics()["device_taken"], 0)


@contextlib.contextmanager
def direct_pair(ours: int, theirs: int) -> Iterator[Any]:
    """joined(), whose tensors go past the host's memory where they can."""
    before = os.environ.get("PRPC_TRANSPORTS")
    os.environ["PRPC_TRANSPORTS"] = "verbs,tcp"
    try:
        with joined({ours: theirs}, shares=False, direct=True) as process:
            yield process
    finally:
        os.environ.pop("PRPC_TRANSPORTS")
        if before is not None:
            os.environ["PRPC_TRANSPORTS"] = before


def why_not_direct(ours: int) -> str | None:
    """Why RDMA devices cannot have this device's memory; None: the drivers say that they could."""
    return verbs_refusal() or direct_refusal(direct_support()[ours : ours + 1], None, True)


def check_direct(ours: int, theirs: int) -> None:
    """Past the host's memory, there and back: the same bytes, and none of them staged."""
    why = why_not_direct(ours)
    if why is not None:
        print(f"  -       GPUDirect: {why}")
        return
    with direct_pair(ours, theirs):
        generator = torch.Generator(f"cuda:{ours}").manual_seed(1)
        same = []
        for count in (10_000, 100_000, 1 << 18, 1 << 20, 1 << 22) * 20:
            value = torch.rand(count, generator=generator, device=f"cuda:{ours}")
            same.append(bool(torch.equal(rpc.rpc_sync(THERE, give_back, args=(value,)), value)))
        check("GPUDirect: the same bytes come back, 100 times", same, [True] * 100)
        told = rpc.statistics()
        check("GPUDirect: none is staged", told.get("direct_staged"), 0)
        check("GPUDirect: answers come into the device", told.get("direct_received", 0) > 0, True)


# -- times -----------------------------------------------------------------------------------------


def timed(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """The first call's time and the median of later ones, in ms."""
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < WARM + 3 or (time.perf_counter() - begun < seconds and len(times) < 2000):
        at = time.perf_counter()
        call()
        times.append((time.perf_counter() - at) * 1e3)
    return times[0], statistics.median(times[WARM:])


def tensor_of(label: str, device: int) -> Any:
    """Of that many bytes."""
    return torch.ones(published.SIZES_BYTES[label] // 4, device=f"cuda:{device}")


Times = dict[str, tuple[float, float]]
Told = Iterator[tuple[str, tuple[float, float]]]


def time_shared(ours: int, theirs: int, sizes: Sequence[str], seconds: float) -> Told:
    """By the pool."""
    with joined({ours: theirs}):
        wait_until_it_opens(tensor_of("20 KB", ours))
        for label in sizes:
            yield label, timed(_call(tensor_of(label, ours)), seconds)


def time_by_host(ours: int, theirs: int, sizes: Sequence[str], seconds: float) -> Told:
    """As for a peer that cannot open the pool."""
    with joined({ours: theirs}, shares=False):
        for label in sizes:
            yield label, timed(_call(tensor_of(label, ours)), seconds)


def time_direct(ours: int, theirs: int, sizes: Sequence[str], seconds: float) -> Told:
    """Over verbs, by memory of devices alone; nothing where that cannot be."""
    if why_not_direct(ours) is None:
        with direct_pair(ours, theirs):
            for label in sizes:
                yield label, timed(_call(tensor_of(label, ours)), seconds)


def _call(value: Any) -> Callable[[], object]:
    return lambda: rpc.rpc_sync(THERE, take, args=(value,))


def take_synchronised(value: Any) -> None:
    """torch's own: it is complete when its stream is."""
    torch.cuda.current_stream(value.device).synchronize()


def serve_torch(meeting: str, ours: int, theirs: int) -> None:
    """torch's other side."""
    torch_rpc = importlib.import_module("torch.distributed.rpc")
    torch_rpc.init_rpc(THERE, rank=1, world_size=2, rpc_backend_options=_torch_options(meeting, {}))
    torch_rpc.shutdown()


def _torch_options(meeting: str, device_map: dict[int, int]) -> Any:
    torch_rpc = importlib.import_module("torch.distributed.rpc")
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=meeting)
    if device_map:
        options.set_device_map(THERE, device_map)
    return options


def time_torch_rpc(ours: int, theirs: int, sizes: Sequence[str], seconds: float) -> Told:
    """torch.distributed.rpc."""
    torch_rpc = importlib.import_module("torch.distributed.rpc")
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder, 'meet')}"
        process = context.Process(target=serve_torch, args=(meeting, ours, theirs), daemon=True)
        process.start()
        options = _torch_options(meeting, {ours: theirs})
        torch_rpc.init_rpc(HERE, rank=0, world_size=2, rpc_backend_options=options)
        for label in sizes:
            value = tensor_of(label, ours)
            torch.cuda.synchronize()
            yield (
                label,
                timed(
                    lambda value=value: torch_rpc.rpc_sync(THERE, take_synchronised, args=(value,)),  # type: ignore[misc]
                    seconds,
                ),
            )
        torch_rpc.shutdown()
        process.join(30)


def serve_queue(asked: Any, answered: Any, theirs: int) -> None:
    """torch.multiprocessing's other side: a copy of its own, as all others make."""
    while (value := asked.get()) is not None:
        copied = value.to(f"cuda:{theirs}", copy=True)
        torch.cuda.current_stream(copied.device).synchronize()
        del value, copied
        answered.put(None)


def time_queue(ours: int, theirs: int, sizes: Sequence[str], seconds: float) -> Told:
    """torch.multiprocessing."""
    context = torch.multiprocessing.get_context("spawn")
    asked, answered = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=serve_queue, args=(asked, answered, theirs), daemon=True)
    process.start()
    for label in sizes:
        value = tensor_of(label, ours)
        torch.cuda.synchronize()

        def call(value: Any = value) -> None:
            asked.put(value)
            answered.get()

        yield label, timed(call, seconds)
    asked.put(None)
    process.join(30)


def time_copies(ours: int, theirs: int, sizes: Sequence[str], seconds: float) -> Told:
    """The floor."""
    for label in sizes:
        value = tensor_of(label, ours)
        room, last = torch.empty_like(value), torch.empty_like(value, device=f"cuda:{theirs}")

        def call(value: Any = value, room: Any = room, last: Any = last) -> None:
            room.copy_(value)
            torch.cuda.synchronize(ours)
            last.copy_(room)
            torch.cuda.synchronize(theirs)

        yield label, timed(call, seconds)


WAYS: dict[str, Callable[[int, int, Sequence[str], float], Told]] = {
    "prpc, shared": time_shared,
    "prpc, by the host": time_by_host,
    "prpc, GPUDirect": time_direct,
    "torch queue": time_queue,
    "torch rpc": time_torch_rpc,
    "copied twice": time_copies,
}


def time_apart(way: str, quick: bool) -> Times:
    """In a process of its own, which is killed, with what it started, when it takes too long: then
    what it has told by then.
    """
    command = [sys.executable, "-m", "perf.gpu_check", "--way", way]
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(
            command + ["--quick"] * quick, stdout=told, start_new_session=True
        )
        try:
            code: int | str = process.wait(WAY_S_MAX)
        except subprocess.TimeoutExpired:
            code = f"it took over {WAY_S_MAX:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        told.seek(0)
        found: Times = {}
        for line in told:
            with contextlib.suppress(ValueError):
                label, first, median = json.loads(line)
                found[label] = (first, median)
    if code:
        print(f"  {way}: {code}; it told {len(found)} sizes")
        if way.startswith("prpc"):
            failures.append(way)
    return found


def tell(way: str, sizes: Sequence[str], seconds: float) -> None:
    """The process of time_apart()."""
    faulthandler.dump_traceback_later(WAY_S_MAX - 5)
    for label, (first, median) in WAYS[way](*devices(), sizes, seconds):
        print(json.dumps([label, first, median]), flush=True)


def show(found: dict[str, Times], sizes: Sequence[str]) -> None:
    """As RESULTS.md has it: median (first call), in ms."""
    print("\n| ms, median (first call) | " + " | ".join(sizes) + " |")
    print("|---|" + "---|" * len(sizes))
    for name, times in found.items():
        cells = [
            f"{times[label][1]:.3f} ({times[label][0]:.1f})" if label in times else "-"
            for label in sizes
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    ours = found["prpc, shared"]
    for name in ("torch rpc", "torch queue", "copied twice"):
        if name in found:
            both = found[name].keys() & ours.keys()
            cells = [
                f"{found[name][label][1] / ours[label][1]:.2f} x" if label in both else "-"
                for label in sizes
            ]
            print(f"| {name} / prpc, shared | " + " | ".join(cells) + " |")
    names = list(published.SIZES_BYTES)
    for column, figures in published.TIMES_MS.items():
        cells = [f"{figures[names.index(label)]:.3f}" for label in sizes]
        print(f"| {published.name_of(column)} | " + " | ".join(cells) + " |")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu_check", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, shorter repeats")
    parser.add_argument("--way", choices=WAYS, help="time that one alone, as lines of JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: torch.cuda.is_available() is False", file=sys.stderr)
        return 1
    ours, theirs = devices()
    sizes, seconds = (SIZES[:5], 0.2) if options.quick else (SIZES, 1.0)
    if options.way:
        tell(options.way, sizes, seconds)
        return 0
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name(ours)}, "
        f"cuda:{ours} -> cuda:{theirs}"
    )
    with joined({ours: theirs}):
        wait_until_it_opens(torch.ones(100_000, device=f"cuda:{ours}"))
        check_tensors(ours, theirs)
        check_libraries(ours, theirs)
    check_maps(ours, theirs)
    check_direct(ours, theirs)
    check_killed(ours, theirs)
    found = {way: time_apart(way, options.quick) for way in WAYS}
    show(found, sizes)
    print(f"\n{len(failures)} checks failed" if failures else "\nall checks passed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
