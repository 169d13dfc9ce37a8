"""Where `.endpoint_map` is read: in one folder, once, when a task starts.

    folder   an argument's, else PRPC_ENDPOINT_MAP, else TF_SEASTAR_ENDPOINT_MAP_PATH, else that of
             section [network], else the working directory
    no file  in a folder that was named: an error; in the working directory: there is none, and
             another rule holds: the port offset, a number of ports, else the tasks tell each other
    changed  later: refused. Other tasks hold the addresses that they read, so this one alone cannot
             take others

What is in it, and what the rules are, stands in endpoint_map.py.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from prpc_engine.errors import ConfigError
from prpc_engine.settings.cluster_spec import ClusterSpec
from prpc_engine.settings.endpoint_map import FILE_NAME, DataEndpoints, EndpointMap, data_endpoints
from prpc_engine.settings.network import FoundValue

FILE_BYTES_MAX = 16 << 20  # what the 65,536 tasks of the largest job need, three times over


@dataclass(frozen=True)
class EndpointMapFile:
    """The file as it was read. `text` None: there was none."""

    path: str  # absolute: the working directory may change
    text: str | None

    @classmethod
    def read(cls, named: FoundValue[str]) -> EndpointMapFile:
        """Read it in that folder, "" for the working directory. Raises ConfigError: a folder that
        was named and has no such file, or a file that cannot be read."""
        folder = os.path.abspath(named.value)
        path = os.path.join(folder, FILE_NAME)
        if not os.path.isdir(folder):
            raise ConfigError(
                f"{named.origin}: {folder} is no folder; the one that holds {FILE_NAME} is expected"
            )
        text = _read(path)
        if text is None and named.value:
            raise ConfigError(
                f"{named.origin}: {path} is not there; make one with `prpc endpoint-map make`, "
                "or name another folder"
            )
        return cls(path, text)

    def parse(self) -> EndpointMap | None:
        """What the file says, None when there was none. Raises ConfigError with file:line."""
        return None if self.text is None else EndpointMap.parse(self.text, self.path)

    def check_unchanged(self) -> None:
        """Look at the file again. Raises ConfigError when it says something else than when this
        task read it.
        """
        now = _read(self.path)
        if now == self.text:
            return
        if now is None or self.text is None:
            what = "has gone" if now is None else "has appeared"
        else:
            what = f"has changed in line {_first_difference(self.text, now)}"
        raise ConfigError(
            f"hot reload refused: {self.path} {what} since this task started; "
            "the job goes on with the addresses that it "
            "started with. Restart all of its tasks to use others"
        )


def load_data_endpoints(
    cluster: ClusterSpec, folder: FoundValue[str], port_offset: int | None
) -> tuple[DataEndpoints, EndpointMapFile]:
    """Where the data of the cluster goes, and the file to ask check_unchanged() of later. Raises
    ConfigError.
    """
    file = EndpointMapFile.read(folder)
    return data_endpoints(cluster, file.parse(), port_offset), file


def _read(path: str) -> str | None:
    """The text; None when there is no such file. Raises ConfigError for one that cannot be read."""
    try:
        mode = os.stat(path).st_mode
        # a pipe: opening it would wait for who writes to it
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ConfigError(f"{path} cannot be read: it is no file")
        with Path(path).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        try:
            target = os.readlink(path)
        except OSError:
            # no link; nor is one that was there a moment ago, and may now lead elsewhere
            return None
        raise ConfigError(
            f"{path} cannot be read: it is a link to {target}, which is not there"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {FILE_BYTES_MAX} bytes: that many are allowed")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: byte {content[error.start]:#04x} is no UTF-8 text"
        ) from error


def _first_difference(before: str, after: str) -> int:
    """The number of the first line that differs, from 1 on; the texts are not equal."""
    old, new = before.split("\n"), after.split("\n")
    return 1 + next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )
