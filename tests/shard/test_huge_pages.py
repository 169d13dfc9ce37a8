"""Huge pages: what machines made of files offer, and what segments really consist of where they are
offered.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shard import ShmFull
from shard.memory import huge_pages
from shard.memory.huge_pages import HUGE_PAGE_BYTES, NOTHING, HugePageOffer, read_huge_page_offer
from shard.memory.segment import Segment

POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
TRIES = 20  # of a program that needs reserved pages for itself
TRANSPARENT = "sys/kernel/mm/transparent_hugepage"


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


# -- what is offered -------------------------------------------------------------------------------


def test_a_machine_that_shows_nothing_offers_nothing(tmp_path: Path) -> None:
    assert read_huge_page_offer(tmp_path) == NOTHING


@pytest.mark.parametrize("of_2m", [None, "inherit"])
@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("always", True),
        ("within_size", True),
        ("advise", True),
        ("never", False),
        ("deny", False),
        ("force", True),
    ],
)
def test_shmem_enabled_says_whether_memfds_get_them(
    tmp_path: Path, word: str, of_2m: str | None, offered: bool
) -> None:
    write(
        tmp_path,
        f"{TRANSPARENT}/shmem_enabled",
        "always within_size advise never deny force".replace(word, f"[{word}]"),
    )
    if of_2m is not None:
        write(
            tmp_path,
            f"{TRANSPARENT}/hugepages-2048kB/shmem_enabled",
            f"always [{of_2m}] within_size advise never",
        )
    assert read_huge_page_offer(tmp_path).transparent == offered


@pytest.mark.parametrize(
    ("word", "of_2m", "offered"),
    [
        ("never", "advise", True),
        ("always", "never", False),
        ("deny", "always", False),
        ("force", "never", True),
    ],
)
def test_what_is_said_of_2_mib_counts_more_unless_all_is_denied_or_forced(
    tmp_path: Path, word: str, of_2m: str, offered: bool
) -> None:
    write(tmp_path, f"{TRANSPARENT}/shmem_enabled", f"[{word}]")
    write(tmp_path, f"{TRANSPARENT}/hugepages-2048kB/shmem_enabled", f"[{of_2m}]")
    assert read_huge_page_offer(tmp_path).transparent == offered


def test_reserved_pages_that_are_promised_to_others_are_not_free(tmp_path: Path) -> None:
    write(tmp_path, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "10")
    assert read_huge_page_offer(tmp_path) == HugePageOffer(
        transparent=False, reserved_free_bytes=10 * HUGE_PAGE_BYTES
    )
    write(tmp_path, "sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "7")
    assert read_huge_page_offer(tmp_path).reserved_free_bytes == 3 * HUGE_PAGE_BYTES


@pytest.mark.parametrize(
    ("size_bytes", "suits"),
    [
        (0, False),
        (4096, False),
        (HUGE_PAGE_BYTES, True),
        (HUGE_PAGE_BYTES + 4096, False),
        (8 * HUGE_PAGE_BYTES, True),
    ],
)
def test_only_segments_of_whole_huge_pages_get_them(size_bytes: int, suits: bool) -> None:
    assert huge_pages.suits(size_bytes) == suits


# -- the switch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "yes", "AUTO", "1"])
def test_a_bad_value_is_named_with_what_is_allowed(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRPC_HUGE_PAGES", text)
    with pytest.raises(
        ValueError, match=f"PRPC_HUGE_PAGES='{text}': allowed are auto, never, require"
    ):
        Segment.create(HUGE_PAGE_BYTES)


@contextmanager
def machine_offers(offer: HugePageOffer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as changed:
        changed.setattr(huge_pages, "read_huge_page_offer", lambda: offer)
        yield


@pytest.mark.parametrize("offer", [NOTHING, HugePageOffer(True, 0), HugePageOffer(False, 1 << 60)])
def test_an_offer_that_comes_to_nothing_is_no_error(
    offer: HugePageOffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those here none is kept: the kernel gives memfds no huge pages, most likely, and the pool
    has none.
    """
    monkeypatch.setattr(huge_pages, "take_reserved", lambda size_bytes, name: None)
    with machine_offers(offer, monkeypatch):
        segment = Segment.create(2 * HUGE_PAGE_BYTES)
    assert os.fstat(segment.fd).st_blocks * 512 >= 2 * HUGE_PAGE_BYTES
    segment.memory[-1] = 1
    segment.close()


def test_where_they_are_required_and_not_offered_is_shm_full_and_says_how_to_offer_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRPC_HUGE_PAGES", "require")
    words = (
        r"no huge pages for a segment of 2.0 MiB.*off, 0.0 MiB of "
        r"reserved.*shmem_enabled.*nr_hugepages"
    )
    with machine_offers(NOTHING, monkeypatch), pytest.raises(ShmFull, match=words):
        Segment.create(HUGE_PAGE_BYTES)


def test_rings_and_odd_sizes_are_made_of_small_pages_even_where_huge_ones_are_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRPC_HUGE_PAGES", "require")
    for segment in (Segment.create(HUGE_PAGE_BYTES + 4096), Segment.create(4096)):
        assert segment.page_bytes == os.sysconf("SC_PAGE_SIZE")
        segment.close()


# -- the real thing --------------------------------------------------------------------------------

REAL = """
import os
import numpy as np
from shard.memory.segment import Segment, ShmFull
MIB = 1 << 20
"""


@pytest.fixture(params=["advise", "within_size", "always"])
def transparent(request: pytest.FixtureRequest) -> Iterator[str]:
    """Memfds may get them while the test runs."""
    path = Path("/") / huge_pages.SHMEM_ENABLED
    if not os.access(path, os.W_OK):
        pytest.skip("offering transparent huge pages needs root and a kernel that has them")
    before = path.read_text().partition("[")[2].partition("]")[0]
    try:
        path.write_text(request.param)
        if not read_huge_page_offer().transparent:
            pytest.skip("this kernel says otherwise of pages of 2 MiB")
        yield request.param
    finally:
        path.write_text(before)


@pytest.mark.alone  # what this machine offers to all processes
def test_transparent_ones_are_really_huge_here_and_at_the_peer(transparent: str) -> None:
    run_program(
        """
segment = Segment.create(16 * MIB, lent=True)
assert segment.page_bytes == 2 * MIB, segment.page_bytes
assert os.fstat(segment.fd).st_blocks * 512 == 16 * MIB, "not every page is reserved"
assert not np.frombuffer(segment.memory, np.uint8).any()
peer = Segment.attach(segment.read_only_fd(), writable=False)
np.frombuffer(segment.memory, np.uint8)[:] = 7
assert np.frombuffer(peer.memory, np.uint8).min() == 7
assert peer.page_bytes == 2 * MIB, peer.page_bytes
os.environ["PRPC_HUGE_PAGES"] = "never"
if TRANSPARENT == "advise":
    assert Segment.create(4 * MIB).page_bytes == 4096
os.environ["PRPC_HUGE_PAGES"] = "require"
assert Segment.create(4 * MIB).page_bytes == 2 * MIB
""".replace("TRANSPARENT", repr(transparent))
    )


def run_program(program: str) -> None:
    ran = run(program)
    assert ran.returncode == 0, ran.stderr


def run_beside_others(program: str) -> None:
    """The pool is the machine's: a slab of another program may have pages of it meanwhile, which is
    none of this one's faults. So it has to pass once in TRIES.
    """
    for _ in range(TRIES):
        ran = run(program)
        if ran.returncode == 0:
            return
    raise AssertionError(ran.stderr)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", REAL + program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def pool_of_4() -> Iterator[None]:
    """Four reserved pages more than there were, while the test runs."""
    path = POOL / "nr_hugepages"
    if not os.access(path, os.W_OK):
        pytest.skip(
            "reserving huge pages needs root and a kernel with a pool of 2 MiB pages that it lets "
            "us change"
        )
    before = int(path.read_text())
    try:
        path.write_text(str(before + 4))
        if int(path.read_text()) != before + 4:
            pytest.skip("this machine's memory has no four huge pages left to reserve")
        yield
    finally:
        path.write_text(str(before))


@pytest.mark.alone  # a slab of a test beside it takes reserved pages, too
@pytest.mark.usefixtures("pool_of_4")
def test_reserved_ones_are_all_taken_at_creation_and_come_back_with_the_last_mapping() -> None:
    run_beside_others(f"""
from pathlib import Path
def free():
    return int(Path("{POOL}/free_hugepages").read_text())
pool = free()
segment = Segment.create(8 * MIB, lent=True)
assert segment.page_bytes == 2 * MIB, segment.page_bytes
assert free() == pool - 4, "not every page is reserved"
os.environ["PRPC_HUGE_PAGES"] = "require"
try:
    Segment.create(pool * 2 * MIB)  # more than are left now
except ShmFull as error:
    assert "no huge pages" in str(error), str(error)
else:
    raise AssertionError("no ShmFull")
os.environ["PRPC_HUGE_PAGES"] = "auto"
small = Segment.create(pool * 2 * MIB)
assert small.page_bytes == 4096, "the next best, not an error"
array = np.frombuffer(segment.memory, np.uint8)
assert not array.any()
array[:] = 7
reader = Segment.attach(segment.read_only_fd(), writable=False)
assert np.frombuffer(reader.memory, np.uint8).min() == 7
try:
    os.ftruncate(reader.fd, 0)
except OSError:
    pass
else:
    raise AssertionError("truncated")
assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
segment.close()
reader.close()
del array
assert free() == pool
""")
