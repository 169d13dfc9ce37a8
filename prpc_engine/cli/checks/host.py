"""The machine as files: /proc and /sys, or a copy of them somewhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """The machine that `prpc doctor` examines, by its files. `root` is where they lie: tests show
    it a machine that is not there.
    """

    root: Path = Path("/")

    def path(self, name: str) -> Path:
        """`name` as on that machine, such as "proc/cpuinfo"."""
        return self.root / name

    def read(self, name: str) -> str | None:
        """A small file's text without the white space around it; None when it is not there or not
        ours to read.
        """
        try:
            return self.path(name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def entries(self, name: str) -> list[str]:
        """Names in a folder, sorted; none when it is not there."""
        try:
            return sorted(entry.name for entry in self.path(name).iterdir())
        except OSError:
            return []
