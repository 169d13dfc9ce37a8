"""Where the workers of a group meet: init_method, rank and world size -> the master of the group.

    init_method                    the group's master          who serves it
    env://                         MASTER_ADDR:MASTER_PORT     rank 0
      under torchrun               at a port that the agent's  rank 0, which says it there
                                   store says (agent_store.py)
    tcp://host:port                host:port                   rank 0
    file:///path                   at a port that the file     rank 0, which writes the file, and
                                   says                        removes it when all have come, or at
                                                               its end
    prpc://host:port[/group]       host:port                   nobody here: `prpc master` runs there

`?rank=1&world_size=4` may follow any of them, as with torch.distributed. RANK and WORLD_SIZE of the
environment count where neither the arguments nor the URL say. parse() does no I/O.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, SupportsIndex
from urllib.parse import parse_qsl, unquote, urlsplit

from prpc_engine import errors
from prpc_engine.errors import ConfigError
from prpc_engine.settings.address import Address
from shard import runtime

ALLOWED = (
    '"env://", "tcp://host:port", "file:///path" and "prpc://host:port" (a running `prpc master`) '
    "are allowed"
)
RANK_MAX = 1 << 20
LOOK_S = 0.01  # between two looks whether rank 0 has written the file


class GroupAddress(NamedTuple):
    """Where a worker joins its group.

    address     of the master; None: a file says
    file        that file, or None
    store       of torchrun's agent, which says the master's port then; or None
    rank        of this worker; None: the smallest free one
    world_size  how many workers there are; None: they come and go
    serves      whether this worker serves the master
    root        whose tree at the master
    is_apart    whether the master is in a process of its own, and may be started again there; else
                it is in rank 0's, and gone with that
    """

    address: Address | None
    file: Path | None
    rank: int | None
    world_size: int | None
    serves: bool
    root: str = "root"
    is_apart: bool = False
    store: Address | None = None

    @property
    def named(self) -> str:
        """For errors."""
        if self.store is not None:
            return f"env:// (by torchrun's store at {self.store})"
        return f"file://{self.file}" if self.file is not None else str(self.address)


def parse(
    init_method: str,
    rank: int | None,
    world_size: int | None,
    environment: Mapping[str, str],
) -> GroupAddress:
    """Arguments go before the URL's own, those before the environment. Raises ConfigError, which
    names what is wrong and what is allowed.
    """
    if not isinstance(init_method, str) or "://" not in init_method:
        raise ConfigError(f"init_method={init_method!r}: {ALLOWED}")
    url = urlsplit(init_method)
    asked = dict(parse_qsl(url.query, keep_blank_values=True))
    unknown = asked.keys() - {"rank", "world_size"}
    if unknown:
        raise ConfigError(
            f"init_method={init_method!r}: {sorted(unknown)} are unknown; rank and world_size may "
            "follow the ?"
        )
    rank = _number("rank", rank, asked, environment, 0)
    world_size = _number("world_size", world_size, asked, environment, 1)
    if rank is not None and world_size is not None and rank >= world_size:
        raise ConfigError(f"rank {rank} of {world_size} workers: 0 to {world_size - 1} are allowed")
    address, file, root, store = None, None, "root", None
    if url.scheme == "env":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        if missing:
            raise ConfigError(
                f"init_method={init_method!r}: {' and '.join(missing)} of the environment say "
                f"where rank 0 is, and are not set; or pass init_method: {ALLOWED}"
            )
        host = environment["MASTER_ADDR"]
        if ":" in host and not host.startswith("["):  # torch has IPv6 without brackets
            host = f"[{host}]"
        try:
            address = Address.parse(f"{host}:{environment['MASTER_PORT']}")
        except ConfigError as error:
            raise ConfigError(f"MASTER_ADDR:MASTER_PORT of the environment: {error}") from error
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            address, store = _of_agent(address, environment), address
            if world_size is None:
                raise ConfigError(
                    f"init_method={init_method!r} under torchrun needs a world size: pass "
                    "world_size=, or set WORLD_SIZE"
                )
    elif url.scheme == "file":
        if url.netloc or len(url.path) < 2:
            raise ConfigError(f"init_method={init_method!r}: file:///path with three / is expected")
        file = Path(unquote(url.path))
    elif url.scheme in ("tcp", "prpc"):
        address = Address.parse(url.netloc)
        root = url.path.strip("/") or root
        if url.scheme == "tcp" and url.path.strip("/"):
            raise ConfigError(f"init_method={init_method!r}: tcp://host:port without a path is it")
    else:
        raise ConfigError(f"init_method={init_method!r}: {ALLOWED}")
    if rank is None and url.scheme != "prpc":
        raise ConfigError(
            f"init_method={init_method!r} needs a rank: pass rank=, or set RANK; rank 0 serves the "
            "group's master. With prpc://host:port, of a running `prpc master`, ranks are given"
        )
    is_apart = url.scheme == "prpc"
    serves = rank == 0 and not is_apart
    return GroupAddress(address, file, rank, world_size, serves, root, is_apart, store)


def _of_agent(store: Address, environment: Mapping[str, str]) -> Address:
    """Where rank 0 serves the master where torchrun's own store has MASTER_PORT: at any free port,
    of loopback where torchrun runs on this host alone, which needs no secret of the job.
    """
    is_one_host = environment.get("GROUP_WORLD_SIZE") == "1"
    return Address("127.0.0.1" if is_one_host else store.host, 0)


def _number(
    name: str,
    given: int | None,
    asked: Mapping[str, str],
    environment: Mapping[str, str],
    least: int,
) -> int | None:
    where = name
    value: int | str | None = None if given == -1 else given  # torch's "not given"
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        value = operator.index(value)  # numpy's integers
    if value is None and name in asked:
        where, value = f"init_method's {name}", _whole(asked[name])
    if value is None and environment.get(name.upper()):
        where, value = name.upper(), _whole(environment[name.upper()])
    if value is None:
        return None
    if type(value) is not int or not least <= value <= RANK_MAX:
        raise ConfigError(
            f"{where}={value!r:.100}: a whole number from {least} to {RANK_MAX} is allowed"
        )
    return value


def _whole(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text


class AddressFile:
    """The file of rank 0 that tells the others of a file:///path the address. Made by writing it;
    in the place of what a run before has left there. Raises ConfigError.
    """

    def __init__(self, path: Path, address: str) -> None:
        self._path, self._address = path, address
        self._was_there = path.exists()
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            part.write_text(address)
            part.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise ConfigError(
                f"rank 0 cannot write {path}, by which the others find it: "
                f"{error.strerror or error}; init_method=file:///path names a file that is not "
                "there yet, in a directory that is"
            ) from error

    @property
    def _is_ours(self) -> bool:
        try:
            return self._path.read_text() == self._address
        except (OSError, ValueError):
            return False

    def doubt(self) -> str:
        """Why the others may not have come, for the end of a sentence; "": nothing says so."""
        if not self._is_ours:
            return f"; {self._path} was written by another rank 0, or removed, since this one did"
        if self._was_there:
            return f"; {self._path} was there before: of a run before, or of another rank 0"
        return ""

    def remove(self) -> None:
        """Unless it is another one's by now."""
        if self._is_ours:
            self._path.unlink(missing_ok=True)


def _without_waiting(path: str, flags: int) -> int:
    """For open(): a FIFO would wait for who writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_address(file: Path, give_up_at: float) -> str:
    """What rank 0 has written, as soon as it has; `give_up_at`: of the monotonic clock. Raises
    MasterUnreachable.
    """
    while True:
        try:
            with open(file, encoding="utf-8", opener=_without_waiting) as opened:
                text = opened.read()
            if text:
                return str(Address.parse(text))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(
                f"{file}, which rank 0 writes, cannot be read: {error.strerror or error}"
            ) from error
        except ValueError as error:  # neither text, nor an address
            raise ConfigError(
                f"{file} has no address in it, as rank 0 writes it there: {error}; "
                "init_method=file:///path names a file that is not there yet"
            ) from error
        if runtime.monotonic() >= give_up_at:
            raise errors.MasterUnreachable(
                f"rank 0 has not written {file}: it writes there where the others find it, once it "
                "has called init_rpc() with the same init_method"
            )
        runtime.sleep(LOOK_S)
