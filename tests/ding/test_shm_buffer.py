"""Arrays in shared memory that processes replace and read whole: ShmBuffer, ShmBufferContainer and
the slots under them, with writers that are killed, stopped and never pause.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prpc_engine.ding import ShmBuffer, ShmBufferContainer
from prpc_engine.ding.shm_buffer import DTYPES
from prpc_engine.ding.value_slots import READ_TRIES, SLOTS, ValueSlots
from prpc_engine.errors import BadArguments
from tests.program import ROOT, halt, wait_until

JOIN_S = 60.0
KILLS = 50
SHAPES = {"image": (4, 84, 84), "state": {"position": (3,), "step": ()}}
DTYPES_OF = {"image": np.uint8, "state": {"position": np.float32, "step": np.int64}}


class Child:
    """A process forked from this one, which a test kills or waits for."""

    def __init__(self, target: Callable[..., object], *args: Any, method: str = "fork") -> None:
        self._process: Any = multiprocessing.get_context(method).Process(target=target, args=args)
        self._process.start()
        self.pid = int(self._process.pid)
        self._code: int | None = None

    def kill(self) -> None:
        self._process.kill()
        self.join()

    def join(self) -> int:
        """Its exit code."""
        if self._code is None:
            self._process.join(JOIN_S)
            self._code = int(self._process.exitcode)
            self._process.close()
        return self._code

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        if self._code is None:
            self.kill()


def only(array: Any) -> float:
    """The value that all elements have. Fails for a torn one."""
    found = set(np.unique(array).tolist())
    assert len(found) == 1, f"torn: {sorted(found)[:5]}"
    return float(found.pop())


def fill_on(buffer: ShmBuffer, count: int | None = None) -> None:
    """1, 2, 3, ... as fast as can be; None: for ever."""
    array = np.empty(buffer.shape, buffer.dtype)
    number = 0
    while count is None or number < count:
        number += 1
        array[...] = number % 251
        buffer.fill(array)


def fields_of(number: int) -> dict[str, Any]:
    return {
        "image": np.full(SHAPES["image"], number % 251, np.uint8),
        "state": {
            "position": np.full(3, number, np.float32),
            "step": np.array(number),
        },
    }


def fill_container(container: ShmBufferContainer, count: int) -> None:
    for number in range(1, count + 1):
        container.fill(fields_of(number))


def number_of(found: dict[str, Any]) -> int:
    """Of which fill() all fields are. Fails where they are of several."""
    number = int(found["state"]["step"])
    assert only(found["image"]) == number % 251
    assert only(found["state"]["position"]) == number
    return number


def segments_open() -> int:
    """Descriptors of anonymous shared memory in this process."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith("/memfd:prpc") for link in links)


# -- arrays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0,)])
def test_an_array_comes_back_as_it_was_filled_in(name: str, shape: tuple[int, ...]) -> None:
    buffer = ShmBuffer(np.dtype(name), shape)
    assert not buffer.get().any()
    array = (np.arange(int(np.prod(shape))) % 2).astype(name).reshape(shape)
    buffer.fill(array)
    got = buffer.get()
    assert (got.dtype, got.shape) == (array.dtype, shape)
    assert np.array_equal(got, array)
    assert buffer.dtype is np.dtype(name).type


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_each_start_method_share_it(method: str) -> None:
    buffer = ShmBuffer(np.float32, (1000,))
    container = ShmBufferContainer(DTYPES_OF, SHAPES)
    with Child(fill_on, buffer, 7, method=method) as one:
        assert one.join() == 0
    with Child(fill_container, container, 3, method=method) as one:
        assert one.join() == 0
    assert only(buffer.get()) == 7
    assert number_of(container.get()) == 3


FORKSERVER = """
import multiprocessing
from prpc_engine.ding import ShmBuffer
from tests.ding.test_shm_buffer import fill_on

buffer = ShmBuffer("float32", (1000,))
child = multiprocessing.get_context("forkserver").Process(target=fill_on, args=(buffer, 7))
child.start()
child.join()
print(child.exitcode, buffer.get().mean())
"""


def test_children_of_a_fork_server_share_it() -> None:  # apart: the server stays until the end
    ran = subprocess.run(
        [sys.executable, "-c", FORKSERVER], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == ["0", "7.0"], ran.stderr


def test_what_converts_within_its_kind_and_broadcasts_is_taken() -> None:
    buffer = ShmBuffer(np.float32, (2, 3))
    buffer.fill(np.array([1.0, 2.0, 3.0]))  # float64, and one row for both
    assert buffer.get().tolist() == [[1, 2, 3], [1, 2, 3]]
    buffer.fill(np.arange(12).reshape(4, 3)[::2])  # strided, whole numbers
    assert buffer.get().tolist() == [[0, 1, 2], [6, 7, 8]]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            [1.0, 2.0],
            r"a list was given to fill\(\), and a numpy array of float32 and shape \(2,\)",
        ),
        (np.zeros(3), r"shape \(3,\) was given to fill\(\), and \(2,\)"),
        (np.zeros(2, np.complex64), r"complex64 was given to fill\(\), and float32"),
        (np.array(["a", "b"]), "was given"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(given: Any, text: str) -> None:
    buffer = ShmBuffer(np.float32, (2,))
    buffer.fill(np.ones(2))
    with pytest.raises(BadArguments, match=text):
        buffer.fill(given)
    assert only(buffer.get()) == 1


@pytest.mark.parametrize(
    ("dtype", "shape", "text"),
    [
        (np.float32, None, "of shape None"),
        (np.complex128, (2,), "complex128.*bool, int8 to int64"),
        ("O", (2,), "of dtype 'O'"),
        (">f4", (2,), "of dtype '>f4'"),
        ("no such", (2,), "of dtype 'no such'"),
        (np.int8, (2, -1), r"shape \(2, -1\): sizes of 0 and more"),
        (np.int8, (2, 1.5), "sizes of 0 and more"),
    ],
)
def test_a_buffer_of_another_kind_is_refused(dtype: Any, shape: Any, text: str) -> None:
    with pytest.raises(BadArguments, match=text):
        ShmBuffer(dtype, shape)
    with pytest.raises(BadArguments, match=text):
        ShmBufferContainer({"key": dtype}, {"key": shape})


def test_a_container_names_the_key_that_is_wrong() -> None:
    container = ShmBufferContainer(DTYPES_OF, SHAPES)
    container.fill(fields_of(1))
    wrong = fields_of(2)
    wrong["state"]["position"] = np.zeros(4)
    with pytest.raises(BadArguments, match=r"\['state'\]\['position'\]: .*shape \(4,\)"):
        container.fill(wrong)
    del wrong["state"]["step"]
    with pytest.raises(BadArguments, match=r"\['state'\]\['step'\] is missing in the dict"):
        container.fill(wrong)
    assert number_of(container.get()) == 1, "no field has changed"
    with pytest.raises(BadArguments, match="the same keys"):
        ShmBufferContainer({"a": np.int8}, {"b": (1,)})


def test_a_container_of_one_array_is_a_buffer() -> None:
    container = ShmBufferContainer(np.float64, (3,))
    container.fill(np.arange(3.0))
    assert container.get().tolist() == [0, 1, 2]


def test_a_view_stays_until_the_third_fill_and_cannot_be_written() -> None:
    buffer = ShmBuffer(np.int64, (100,), copy_on_get=False)
    buffer.fill(np.full(100, 1))
    first = buffer.get()
    for number in (2, 3):
        buffer.fill(np.full(100, number))
        assert only(first) == 1
        assert only(buffer.get()) == number
    buffer.fill(np.full(100, 4))
    assert only(first) == 4
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 9
    copied = ShmBuffer(np.int64, (100,))
    copied.get()[0] = 9  # a copy is its owner's
    assert not copied.get().any()


def test_a_view_outlives_its_buffer() -> None:
    buffer = ShmBuffer(np.int64, (100,), copy_on_get=False)
    buffer.fill(np.full(100, 5))
    view = buffer.get()
    del buffer
    gc.collect()
    assert only(view) == 5


def test_only_the_start_of_a_process_takes_it_along() -> None:
    for one in (ShmBuffer(np.int8, (1,)), ShmBufferContainer({"a": np.int8}, {"a": (1,)})):
        with pytest.raises(RuntimeError, match="inheritance"):
            pickle.dumps(one)


def test_its_memory_has_no_name_and_goes_with_its_last_owner() -> None:
    names, before = os.listdir("/dev/shm"), segments_open()
    buffer = ShmBuffer(np.int8, (1 << 20,))
    buffer.fill(np.ones(1 << 20, np.int8))
    assert os.listdir("/dev/shm") == names
    assert segments_open() > before
    del buffer
    assert segments_open() == before


# -- whole values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [64, 100_000, 8 << 20])
def test_no_reader_has_halves_while_a_writer_never_pauses(nbytes: int) -> None:
    buffer = ShmBuffer(np.uint8, (nbytes,))
    seen: set[float] = set()
    with Child(fill_on, buffer):
        while len(seen) < 20:
            seen.add(only(buffer.get()))


def test_fields_of_a_container_belong_together() -> None:
    container = ShmBufferContainer(DTYPES_OF, SHAPES)
    with Child(fill_container, container, 2000) as one:
        last = 0
        while last < 2000:
            number = number_of(container.get())
            assert number >= last, "values are read in their order"
            last = number
        assert one.join() == 0


@pytest.mark.parametrize("writers", [2, 3])
def test_several_writers_take_turns(writers: int) -> None:
    container = ShmBufferContainer(DTYPES_OF, SHAPES)
    children = [Child(fill_container, container, 500) for _ in range(writers)]
    thread = threading.Thread(target=fill_container, args=(container, 500))
    thread.start()
    for _ in range(200):
        number_of(container.get())
    thread.join()
    assert [one.join() for one in children] == [0] * writers
    assert number_of(container.get()) == 500


def test_a_writer_killed_at_any_instant_is_in_nobodys_way(seed: int) -> None:
    chance = random.Random(seed)
    buffer = ShmBuffer(np.float32, (50_000,))
    for round_ in range(KILLS):
        with Child(fill_on, buffer) as writer:
            at = only(buffer.get())
            wait_until(lambda at=at: only(buffer.get()) != at)
            for _ in range(chance.randrange(20)):
                only(buffer.get())
            for _ in range(chance.randrange(2000)):
                pass
            writer.kill()
        only(buffer.get())
        buffer.fill(np.full(50_000, -round_, np.float32))
        assert only(buffer.get()) == -round_


def halves(slots: ValueSlots, do: Callable[[], object]) -> None:
    """Write the first half of a value, and then that."""

    def copy_in(slot: int) -> None:
        slots.slots[slot][: slots.nbytes // 2] = b"\xff" * (slots.nbytes // 2)
        do()

    slots.write(copy_in)


def put(slots: ValueSlots, number: int) -> None:
    def copy_in(slot: int) -> None:
        slots.slots[slot][:] = bytes([number]) * slots.nbytes

    slots.write(copy_in)


def taken(slots: ValueSlots) -> bytes:
    found = b""

    def copy_out(slot: int) -> None:
        nonlocal found
        found = bytes(slots.slots[slot])

    slots.read(copy_out)
    return found


def test_what_a_writer_killed_in_the_middle_left_is_never_seen() -> None:
    slots = ValueSlots(1000)
    for number in (1, 2, 3, 4):
        put(slots, number)
        with Child(halves, slots, lambda: os.kill(os.getpid(), signal.SIGKILL)) as one:
            assert one.join() == -signal.SIGKILL
        assert taken(slots) == bytes([number]) * 1000


def test_a_writer_stopped_in_the_middle_does_not_stop_readers() -> None:
    slots = ValueSlots(1000)
    put(slots, 1)
    with Child(halves, slots, lambda: os.kill(os.getpid(), signal.SIGSTOP)) as one:
        halt(one.pid)
        for _ in range(100):
            assert taken(slots) == b"\x01" * 1000


def test_a_value_that_cannot_be_written_leaves_the_old_one_and_the_lock() -> None:
    slots = ValueSlots(10)
    put(slots, 1)
    with pytest.raises(ZeroDivisionError):
        halves(slots, lambda: 1 // 0)
    assert taken(slots) == b"\x01" * 10
    put(slots, 2)
    assert (taken(slots), slots.number) == (b"\x02" * 10, 2)


class Interrupted:
    """A copy, byte by byte; between two of them values are replaced, and writers die, at random, in
    the first `busy` calls.
    """

    def __init__(self, slots: ValueSlots, chance: random.Random, busy: int) -> None:
        self._slots, self._chance, self._busy = slots, chance, busy
        self.calls = 0
        self.found = bytearray(slots.nbytes)

    def __call__(self, slot: int) -> None:
        self.calls += 1
        for at in range(len(self.found)):
            self.found[at] = self._slots.slots[slot][at]
            if self.calls <= self._busy and self._chance.random() < 0.5:
                if self._chance.random() < 0.2:
                    with pytest.raises(ZeroDivisionError):
                        halves(self._slots, lambda: 1 // 0)
                put(self._slots, self._chance.randrange(200))


def test_a_reader_that_is_overtaken_reads_again(seed: int) -> None:
    chance = random.Random(seed)
    slots = ValueSlots(12)
    for _ in range(500):
        copy = Interrupted(slots, chance, chance.randrange(READ_TRIES))
        slots.read(copy)
        assert len(set(copy.found)) == 1
        assert copy.calls <= READ_TRIES


def test_a_reader_that_is_always_overtaken_holds_writers_back() -> None:
    slots, tries = ValueSlots(8), 0
    writers: list[threading.Thread] = []
    numbers: list[int] = []  # of the newest value, while it reads for the last time

    def copy_out(slot: int) -> None:
        nonlocal tries
        tries += 1
        if tries <= READ_TRIES:
            for number in range(SLOTS):
                put(slots, number)
        else:  # it holds them back: these only begin when it has read
            writers.append(threading.Thread(target=put, args=(slots, 9)))
            writers[-1].start()
            numbers.append(slots.number)

    slots.read(copy_out)
    assert (tries, numbers) == (READ_TRIES + 1, [READ_TRIES * SLOTS])
    for one in writers:
        one.join()
    assert taken(slots) == b"\x09" * 8


def test_a_fork_in_the_middle_of_a_write_has_locks_of_its_own() -> None:
    slots = ValueSlots(100)
    put(slots, 1)
    began, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        go_on.wait()

    thread = threading.Thread(target=halves, args=(slots, wait))
    thread.start()
    began.wait()
    theirs, ours = os.pipe()

    def child() -> None:
        assert taken(slots) == b"\x01" * 100
        os.write(ours, b".")
        put(slots, 3)  # when the thread of its parent has written

    with Child(child) as one:
        assert os.read(theirs, 1) == b"."
        assert slots.number == 1
        go_on.set()
        thread.join()
        assert one.join() == 0
    os.close(theirs)
    os.close(ours)
    assert (taken(slots), slots.number) == (b"\x03" * 100, 3)
