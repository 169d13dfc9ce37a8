"""A path that a user names may lead to anything: what is no regular file of a usual size is refused
by name, unread.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prpc_engine.cli.checks.host import Host
from prpc_engine.cli.checks.limits import secret
from prpc_engine.regular_file import read_regular_file

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0  # of a program that reads for ever, or waits for a writer

# With so little memory nothing harms the machine, whatever is read.
PROGRAM = """
import os, resource, sys
from pathlib import Path
from prpc_engine.accumulator import snapshot_file
from prpc_engine.settings.config import TlsSettings, check_tls, secret_from
from prpc_engine.settings.config_file import ConfigFile
from prpc_engine.errors import ConfigError
from prpc_engine.kv.checkpoint.manifest import CheckpointError
from prpc_engine.kv.checkpoint.read import read_manifest

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
path, folder = sys.argv[1:]
os.environ["PRPC_SECRET_FILE"] = path
for read in (
    lambda: secret_from(None),
    lambda: secret_from(None, path),
    lambda: ConfigFile.read(path),
    lambda: check_tls(TlsSettings(cert=path, key=path), b"secret", "tls="),
    lambda: snapshot_file.load(Path(path)),
    lambda: read_manifest(Path(folder)),
):
    try:
        read()
    except (ConfigError, CheckpointError) as error:
        print(error)
    else:
        print("it was taken")
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("/dev/zero", "cannot be read: it is a device, and a regular file is expected"),
        ("pipe", "cannot be read: it is a pipe, and a regular file is expected"),
        ("folder", "cannot be read: it is a folder, and a regular file is expected"),
    ],
)
def test_what_is_no_regular_file_is_refused_by_name_wherever_one_is_named(
    tmp_path: Path, kind: str, said: str
) -> None:
    path, folder = tmp_path / "named", tmp_path / "checkpoint"
    folder.mkdir()
    for place in (path, folder / "manifest.json"):
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "folder":
            place.mkdir()
        else:
            place.symlink_to(kind)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == 6, ran.stderr
    # devices are made by root alone; what a checkpoint is made of are no links either
    if kind == "/dev/zero":
        assert "is a link, and those are not followed" in lines.pop()
    for line in lines:
        assert said in line


def test_a_file_that_is_far_too_large_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "named"
    with path.open("wb") as file:
        file.truncate(10 << 30)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    lines = ran.stdout.splitlines()
    assert len(lines) >= 4, ran.stderr
    for line, allowed in zip(lines, (4096, 4096, 1 << 20, 4 << 20), strict=False):
        assert f"cannot be read: it has {10 << 30} bytes, and at most {allowed} are allowed" in line


def test_the_doctor_sees_a_secret_file_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes(4097))
    for path in ("/dev/zero", str(large), str(tmp_path)):
        monkeypatch.setenv("PRPC_SECRET_FILE", path)
        (finding,) = secret(Host())
        assert (finding.verdict, "a regular file of at most 4096 bytes" in finding.advice) == (
            "bad",
            True,
        )


def test_what_a_path_leads_to_is_said(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
    with pytest.raises(OSError, match="No such device or address"):  # the kernel opens no socket
        read_regular_file(tmp_path / "socket")
    with pytest.raises(OSError, match="null byte"):
        read_regular_file("a\0b")
    (tmp_path / "file").write_bytes(b"12345")
    assert (
        read_regular_file(tmp_path / "file") == read_regular_file(tmp_path / "file", 5) == b"12345"
    )
    with pytest.raises(OSError, match="it has 5 bytes, and at most 4 are allowed"):
        read_regular_file(tmp_path / "file", 4)
