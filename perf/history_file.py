"""The files of perf/history/: one `<bench>.jsonl` each, extended by `prpc bench <bench> --record`.

A line is a JSON object with the fields of change.Line; the newest stands last. Lines are added and
never changed, so two branches that both record merge by keeping both. The wheel has the files too:
an installed `prpc bench --compare` reads them. Only a checkout of the sources is written to.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prpc_engine.errors import ConfigError
from prpc_engine.release import VERSION

from .change import BadLine, Line, line_of, line_record, lines_of

FOLDER = Path(__file__).resolve().parent / "history"
COMMIT_LENGTH = 12
COMMITS_TOLD = 8  # in an error: the last ones
FILE_BYTES_MAX = 64 << 20  # a line has some 600 bytes: a hundred thousand figures
MEND = "a line is one JSON object: begin a new line where `}{` stands, else remove that line"
GIT_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Stamp:
    """What was measured, and when."""

    commit: str
    date: str


def stamp(now: datetime.datetime | None = None) -> Stamp:
    """Of a run that starts now."""
    moment = now or datetime.datetime.now(datetime.timezone.utc)
    return Stamp(commit_of(checkout()), moment.strftime("%Y-%m-%dT%H:%M:%SZ"))


def checkout(folder: Path = FOLDER) -> Path | None:
    """The checkout that holds the folder of histories; None where the package was installed."""
    root = folder.parent.parent
    return root if (root / "pyproject.toml").is_file() else None


def commit_of(root: Path | None) -> str:
    """The commit of a checkout, and "+" where files differ from it; "v<version>" without git."""
    if root is None:
        return f"v{VERSION}"
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", f"--short={COMMIT_LENGTH}", "HEAD")
    if (
        not commit or not top or Path(top) != root
    ):  # no git, no commit, or inside another repository
        return f"v{VERSION}"
    measured = (".", ":!perf/history")  # what --record writes is no change of what is measured
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *measured)
    return commit + ("+" if changed else "")


def file_of(bench: str, folder: Path = FOLDER) -> Path:
    """Where the lines of a benchmark are."""
    return folder / f"{bench}.jsonl"


def read(path: Path) -> list[Line]:
    """The lines of a history, oldest first; none where there is no file. Raises ConfigError."""
    if not path.exists():
        return []
    lines = []
    for number, text in _lines(path):
        try:
            lines.append(line_of(text))
        except BadLine as error:
            raise ConfigError(f"{path}:{number}: {error}; {MEND}") from error
    return lines


def past(bench: str, asked: str, folder: Path = FOLDER) -> tuple[list[Line], str | None]:
    """The lines to compare with, and the only commit to look at, if one was asked for.

    `asked` is a file (a run that --json printed, or a history), a commit of the benchmark's
    history, or "" for all of that history. Raises ConfigError, where there is none too.
    """
    if asked and Path(asked).exists():
        if not any("kind" in record for record in _records(Path(asked))):
            return _of(bench, read(Path(asked)), Path(asked)), None
        return lines_of(read_run(Path(asked), bench)), None
    path = file_of(bench, folder)
    lines = read(path)
    if not asked:
        return _of(bench, lines, path), None
    if not any(line.commit.startswith(asked) for line in lines):
        known = ", ".join(commits(lines)[-COMMITS_TOLD:]) or "none yet: --record makes the first"
        raise ConfigError(
            f"--compare {asked}: no such file, and no line of that commit in "
            f"{path}; the last there: {known}"
        )
    return _of(bench, lines, path), asked


def _of(bench: str, lines: list[Line], path: Path) -> list[Line]:
    """The lines, some of them of that benchmark. Raises ConfigError where none is."""
    if any(line.bench == bench for line in lines):
        return lines
    others = ", ".join(sorted({line.bench for line in lines}))
    raise ConfigError(
        f"--compare: {path} has no figure of {bench}"
        + (f", only of {others}" if others else "")
        + f"; `prpc bench {bench} --record` makes a history, `--json > FILE` a run to compare with"
    )


def read_run(path: Path, bench: str) -> list[dict[str, Any]]:
    """The records of a finished run of a benchmark, as `--json` printed them.

    Raises ConfigError.
    """
    if not path.exists():
        raise ConfigError(f"no file {path}: `prpc bench <subject> --json > {path}` makes one")
    records = _records(path)
    if not any(record.get("kind") == "result" for record in records):
        raise ConfigError(f"{path} has no results: `prpc bench <subject> --json` prints some")
    others = {str(record.get("bench")) for record in records} - {bench}
    if others:
        raise ConfigError(f"{path} is of {', '.join(sorted(others))}, and {bench} was asked for")
    try:
        lines_of(records)
    except BadLine as error:
        raise ConfigError(f"{path}: {error}") from error
    return records


def append(lines: Iterable[Line], bench: str, folder: Path = FOLDER) -> Path:
    """Add lines to a benchmark's history; which file. Raises ConfigError, OSError."""
    check_writable(folder)
    folder.mkdir(exist_ok=True)
    path = file_of(bench, folder)
    text = "".join(json.dumps(line_record(line)) + "\n" for line in lines)
    with path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # an editor or a merge took it
                text = "\n" + text
        file.write(text.encode())
    return path


def check_new(lines: Iterable[Line], past: Iterable[Line], path: Path) -> None:
    """Raise ConfigError where a run's line is in the history already."""
    for line in set(lines) & set(past):
        raise ConfigError(
            f"--record: the run of commit {line.commit} at {line.date} is in {path} already"
        )


def check_writable(folder: Path = FOLDER) -> None:
    """Raise ConfigError unless histories are kept there, and can be."""
    if checkout(folder) is None:
        raise ConfigError(
            f"--record: {folder} belongs to an installed package; the history is kept in a "
            "checkout of the sources: run `prpc bench` there, or keep a run with --json > FILE"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--record: {folder} is no folder: move it away, and a folder is made")
    asked = folder if folder.exists() else folder.parent
    if not os.access(asked, os.W_OK | os.X_OK):
        raise ConfigError(f"--record: this user may not write to {asked}")


def commits(lines: Sequence[Line]) -> list[str]:
    """The commits of a history, oldest first."""
    return list(dict.fromkeys(line.commit for line in lines))


def _lines(path: Path) -> list[tuple[int, bytes]]:
    """Line number and text of each line that is not empty. Raises ConfigError."""
    if not path.is_file():  # a device may never end
        raise ConfigError(f"{path} is no regular file: a file of JSON lines expected")
    if (size_bytes := path.stat().st_size) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} has {size_bytes} bytes, at most {FILE_BYTES_MAX} are read")
    texts = enumerate(path.read_bytes().split(b"\n"), start=1)
    return [(number, text) for number, text in texts if text.strip()]


def _records(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    found = []
    for number, text in _lines(path):
        try:
            found.append(msgspec.json.decode(text, type=dict[str, Any]))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: {error}; {MEND}") from error
    return found


def _git(root: Path, *arguments: str) -> str:
    """What git says about a checkout; "" where there is no git, or no repository."""
    try:
        ran = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""
