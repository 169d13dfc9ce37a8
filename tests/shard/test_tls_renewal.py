"""Certificates are renewed while nodes run: changed files are taken from the next connection on, or
named and left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shard import AuthenticationError, ShardError
from tests.certificates import Authority, Files
from tests.shard.test_tls import authority, good, listening_log, new_world, refusal, transport_of
from tests.transport_contract import World

__all__ = ["authority", "good", "new_world"]  # fixtures


def put(files: Files, there: Files) -> None:
    """In the place of what is there, one file after the other, as those who renew
    certificates do.
    """
    for new, old in zip(files, there, strict=True):
        if new != old:
            Path(old + ".new").write_bytes(Path(new).read_bytes())
            Path(old + ".new").chmod(0o600)
            Path(old + ".new").rename(old)


@pytest.fixture
def renewed(authority: Authority, tmp_path: Path) -> Files:
    """Of a node whose certificate is about to end; in files of its own."""
    there = Files(*(str(tmp_path / name) for name in Files._fields))
    put(authority.issue("worker-9"), there)
    return there


def test_the_names_in_a_certificate_are_not_compared_with_the_address(
    new_world: Callable[..., World], authority: Authority
) -> None:
    world = new_world(authority.issue("elsewhere", address="192.0.2.1"))
    one, _ = world.connect(
        transport_of(authority.issue("anywhere", address="192.0.2.2"), world.slabs[1])
    )
    assert one.connection.peer_identity.subjects[0] == "elsewhere"  # type: ignore[attr-defined]
    one.connection.close()


def test_files_that_are_replaced_are_used_from_the_next_connection_on_by_both_sides(
    new_world: Callable[..., World],
    authority: Authority,
    renewed: Files,
    good: Files,
    tmp_path: Path,
) -> None:
    world = new_world(renewed)
    calling = transport_of(renewed, world.slabs[1])
    first, _ = world.connect(calling)
    put(authority.issue("worker-10"), renewed)
    second, accepted = world.connect(calling)
    for names in (
        second.connection.peer_identity.subjects,
        accepted.connection.peer_identity.subjects,
    ):  # type: ignore[attr-defined]
        assert names[0] == "worker-10"
    first.connection.send(b"goes on", ())
    world.turn_until(
        lambda: b"goes on" in [body for side in world.accepted for body in side.bodies]
    )
    put(Authority(tmp_path / "new", "the same job, with a new CA").issue("worker-11"), renewed)
    third, _ = world.connect(calling)
    assert third.connection.peer_identity.subjects[0] == "worker-11"  # type: ignore[attr-defined]
    for side in (first, second, third):
        side.connection.close()
    error, _ = refusal_of(world, good)
    assert isinstance(error, AuthenticationError), "the old CA is none any more"


def refusal_of(world: World, files: Files) -> tuple[ShardError, str]:
    """As refusal(), once others are connected."""
    world.accepted.clear()
    return refusal(world, files)


@pytest.mark.parametrize("bad", ["key of another", "cut short", "gone", "open to others"])
def test_changed_files_that_cannot_be_used_are_told_once_and_those_before_go_on(
    new_world: Callable[..., World], authority: Authority, renewed: Files, bad: str
) -> None:
    world = new_world(renewed)
    calling = transport_of(authority.issue("trainer"), world.slabs[1])
    if bad == "key of another":
        put(renewed._replace(key=authority.issue("another").key), renewed)
    elif bad == "cut short":
        Path(renewed.cert).write_bytes(Path(renewed.cert).read_bytes()[:100])
    elif bad == "gone":
        Path(renewed.ca).unlink()
    else:
        Path(renewed.key).chmod(0o644)
    with listening_log() as records:
        sides = [world.connect(calling)[0] for _ in range(2)]
    assert [side.connection.peer_identity.subjects[0] for side in sides] == ["worker-9"] * 2  # type: ignore[attr-defined]
    assert [
        line
        for line in records
        if line.startswith("changed TLS files cannot be used, those loaded before stay: ")
    ] == records
    assert len(records) == 1
    put(authority.issue("worker-10"), renewed)
    sides.append(world.connect(calling)[0])
    assert sides[-1].connection.peer_identity.subjects[0] == "worker-10"  # type: ignore[attr-defined]
    for side in sides:
        side.connection.close()
