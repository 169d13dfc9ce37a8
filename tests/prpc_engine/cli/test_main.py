"""main(): how errors become one line and an exit code."""

from __future__ import annotations

import pytest

from prpc_engine import cli
from prpc_engine.errors import ConfigError, MasterUnreachable, RemoteError
from shard import PeerLostError
from tests.held import at


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            ConfigError("PRPC_SLAB_BYTES_MAX='x': a number is allowed"),
            2,
            "prpc: PRPC_SLAB_BYTES_MAX='x': a number is allowed",
        ),
        (MasterUnreachable("no master answers"), 1, "prpc: no master answers"),
        (PeerLostError("the peer hung up"), 1, "prpc: the peer hung up"),
        (PeerLostError(), 1, "prpc: PeerLostError"),
        (
            RemoteError(
                "it raised ValueError\n\nTraceback ...",
                type_name="ValueError",
                remote_message="",
                remote_traceback="",
            ),
            1,
            "prpc: it raised ValueError",
        ),
        (
            PeerLostError("a peer said \x1b[2K\r that all is well"),
            1,
            "prpc: a peer said \\x1b[2K\\r that all is well",
        ),
        (
            OSError(24, "Too many open files"),
            1,
            "prpc: [Errno 24] Too many open files; the system refuses it: "
            "`prpc doctor` says what is scarce",
        ),
        (
            FileExistsError(17, "File exists", "/a/folder"),
            1,
            "prpc: [Errno 17] File exists: '/a/folder'",
        ),
        (KeyboardInterrupt(), 130, "prpc: interrupted"),
    ],
)
def test_an_error_with_a_name_is_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    with at("cli.running", fail):
        assert cli.main(["gc"]) == code
    captured = capsys.readouterr()
    assert captured.err == line + "\n"
    assert captured.out == ""


def test_a_bug_keeps_its_traceback() -> None:
    with at("cli.running", lambda: 1 // 0), pytest.raises(ZeroDivisionError):
        cli.main(["gc"])
