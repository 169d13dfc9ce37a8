"""asyncio is imported for the first time in the process while tasks run: in a step, in what that
calls, in a turn, in another thread. Each in a process of its own, which had not imported it.
"""

from __future__ import annotations

import subprocess
import sys

from tests.program import PATIENCE_S, ROOT

BEGIN = """
import sys, threading, time
import shard

assert "asyncio" not in sys.modules
reactor = shard.Reactor(time.monotonic)

def end_of(coroutine):
    task = reactor.spawn(coroutine)
    while not task.done():
        reactor.poll(time.monotonic())
    return task.result()

def halted_import(name):
    '''A thread that imports asyncio, halted where that imports `name`; what has it go on.'''
    reached, goes_on = threading.Event(), threading.Event()
    class Halt:
        def find_spec(self, wanted, path=None, target=None):
            if wanted == name and threading.current_thread() is thread:
                reached.set()
                goes_on.wait()
    def first_import():
        import asyncio
    sys.meta_path.insert(0, Halt())
    thread = threading.Thread(target=first_import, daemon=True)
    thread.start()
    reached.wait()
    return thread, goes_on
"""


def said_by(code: str) -> list[str]:
    """The lines of a process that runs that, after BEGIN; it has to end well, and silently."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BEGIN + code + "\nreactor.close()\n"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def test_a_step_that_imports_asyncio_has_its_loop_on_the_next_line() -> None:
    code = """
def helper():
    import asyncio.subprocess
    return sys.modules["asyncio"]

async def work():
    await shard.yield_now()
    asyncio = helper()
    loop = asyncio.get_running_loop()
    in_thread = await asyncio.to_thread(threading.get_ident)
    try:
        await asyncio.wait_for(asyncio.sleep(3600), 0.001)
    except asyncio.TimeoutError:
        await asyncio.sleep(0)
    await shard.yield_now()
    return loop is reactor.guest, in_thread != threading.get_ident()

print(*end_of(work()))
import asyncio
print(asyncio._get_running_loop(), type(asyncio.__loader__).__name__)
"""
    assert said_by(code) == ["True True", "None SourceFileLoader"]


def test_a_task_that_ends_in_that_very_step_leaves_the_loop() -> None:
    code = """
async def ends():
    import asyncio
    return asyncio.current_task() is not None

print(end_of(ends()), sys.modules["asyncio"]._get_running_loop())
"""
    assert said_by(code) == ["True None"]


def test_a_plain_function_that_a_step_calls_may_import_it_and_run_a_loop() -> None:
    code = """
def plain():
    import asyncio
    return asyncio.run(asyncio.sleep(0.001, "its own"))

async def work():
    return shard.call_outside_asyncio(plain)

print(end_of(work()))
"""
    assert said_by(code) == ["its own"]


def test_what_a_turn_calls_may_import_it_and_run_a_loop() -> None:
    code = """
def plain():
    import asyncio
    print(asyncio.run(asyncio.sleep(0.001, "its own")))

async def work():
    reactor.call_soon(plain)
    reactor.poll(time.monotonic())  # as a handler that waits may
    return "end"

print(end_of(work()))
"""
    assert said_by(code) == ["its own", "end"]


def test_half_imported_by_another_thread_it_is_not_there() -> None:
    code = """
thread, goes_on = halted_import("asyncio.base_events")
print("asyncio" in sys.modules, shard.call_outside_asyncio(str, "called"))
goes_on.set()
thread.join()
"""
    assert said_by(code) == ["True called"]


def test_a_step_that_begins_meanwhile_has_the_loop_once_the_import_is_over() -> None:
    code = """
thread, goes_on = halted_import("asyncio.unix_events")
main = threading.get_ident()

def go_on_once_main_waits():
    while True:
        frame = sys._current_frames()[main]
        while frame is not None:
            if "importlib._bootstrap" in frame.f_code.co_filename:
                goes_on.set()
                return
            frame = frame.f_back

threading.Thread(target=go_on_once_main_waits, daemon=True).start()

async def work():
    import asyncio
    await asyncio.sleep(0.001)
    return "slept"

print(end_of(work()))
thread.join()
"""
    assert said_by(code) == ["slept"]
