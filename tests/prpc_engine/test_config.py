"""Settings: the argument, then the environment, then the default; a bad value is named with what is
allowed.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from prpc_engine.errors import ConfigError
from prpc_engine.master.protocol import host_and_port
from prpc_engine.settings.config import (
    SECRET_LENGTH_MIN,
    SLAB_BYTES_MAX,
    TRANSPORTS,
    check_exposure,
    check_number,
    has_secret,
    secret_from,
    slab_bytes_max,
)
from prpc_engine.settings.node_config import NodeConfig
from prpc_engine.settings.user_secret import NO_SECRET, UserSecret
from shard import DEFAULT_LIMITS, Limits


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRPC_SECRET", "PRPC_SECRET_FILE", "PRPC_SLAB_BYTES_MAX", "PRPC_TRANSPORTS"):
        monkeypatch.delenv(name, raising=False)


def test_transports_are_those_asked_for_in_that_order_or_all() -> None:
    assert NodeConfig.load().node.transports == TRANSPORTS == ("shm", "unix", "tcp")
    assert NodeConfig.load(transports=["tcp", "shm"]).node.transports == ("tcp", "shm")
    for wanted in ([], ["udp"], ["tcp", "udp"], ["tcp", "tcp"], "tcp"):
        with pytest.raises(
            ConfigError,
            match=r"^transports=.*: allowed are shm, unix, verbs, tcp, at least one, each once",
        ):
            NodeConfig.load(transports=wanted)


def test_transports_that_are_not_asked_for_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRPC_TRANSPORTS", "tcp, shm")
    assert NodeConfig.load().node.transports == ("tcp", "shm")
    assert NodeConfig.load(transports=["shm"]).node.transports == ("shm",)
    for text in ("", "tcp,", "tcp;shm", "udp"):
        monkeypatch.setenv("PRPC_TRANSPORTS", text)
        with pytest.raises(
            ConfigError, match=f"^PRPC_TRANSPORTS={text!r}: allowed are shm, unix, verbs, tcp"
        ):
            NodeConfig.load()


def test_the_secret_is_the_argument_then_the_file_then_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert isinstance(secret_from(None), UserSecret)
    monkeypatch.setenv("PRPC_SECRET", "from the variable")
    assert secret_from(None) == b"from the variable"
    path = tmp_path / "secret"
    path.write_text("from the one file\n")
    monkeypatch.setenv("PRPC_SECRET_FILE", str(path))
    assert secret_from(None) == b"from the one file", "without the newline that editors add"
    assert secret_from("große größe größen") == "große größe größen".encode()
    assert secret_from(b"\0bytes" * 3) == b"\0bytes" * 3
    assert secret_from(NO_SECRET) == b"", "none, whatever the environment says"


def test_a_secret_that_could_be_guessed_is_refused_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short = "x" * (SECRET_LENGTH_MIN - 1)
    said = (
        f"a secret of {SECRET_LENGTH_MIN - 1} bytes, at least {SECRET_LENGTH_MIN} are "
        "expected.*openssl rand"
    )
    for given in (short, short.encode()):
        with pytest.raises(ConfigError, match=f"^secret=: {said}"):
            secret_from(given)
    with pytest.raises(ConfigError, match=r"a secret of 0 bytes.*secret=NO_SECRET asks for none"):
        secret_from("")
    monkeypatch.setenv("PRPC_SECRET", short)
    with pytest.raises(ConfigError, match=f"^PRPC_SECRET: {said}") as raised:
        secret_from(None)
    assert short not in str(raised.value)
    (tmp_path / "short").write_text(short + "\n")
    with pytest.raises(ConfigError, match=f"^secret file .*short': {said}"):
        secret_from(None, str(tmp_path / "short"))
    monkeypatch.setenv("PRPC_SECRET", short + "x")
    assert secret_from(None) == (short + "x").encode()


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_secret_file_that_others_may_read_is_used_with_one_line_in_the_log(
    mode: int, is_told: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef")
    file.chmod(mode)
    for _ in range(2):
        assert secret_from(None, str(file)) == b"0123456789abcdef"
    told = f"has mode {mode:04o}: others on this host may read or change it; chmod 600 {file}"
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if told in line] == lines and len(lines) == is_told


def test_a_secret_may_be_any_bytes_a_variable_can_have_and_no_text_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRPC_SECRET", os.fsdecode(b"\xff" * 16))
    assert secret_from(None) == b"\xff" * 16
    secret = "".join(map(chr, range(97, 113)))
    with pytest.raises(
        ConfigError, match="secret=: a str that is no text of Unicode, at character 16; pass bytes"
    ) as caught:
        secret_from(f"{secret}\ud800")
    assert secret not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("PRPC_SECRET", 'a secret or "none"'),
        ("PRPC_SECRET_FILE", "a path"),
        ("PRPC_TLS_CERT", "a path"),
        ("PRPC_TLS_KEY", "a path"),
        ("PRPC_TLS_CA", "a path"),
        ("PRPC_ENABLE_POLLING", "0, false, off, 1, true and on"),
    ],
)
def test_a_variable_that_is_set_to_nothing_is_refused_as_others_are(
    name: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(ConfigError, match=f"^{name}='': {allowed} .*; unset it for the default$"):
        NodeConfig.load()


def test_a_job_of_this_host_is_not_begun_where_its_secret_is_set_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PRPC_SECRET", "PRPC_SECRET_FILE"):
        assert not has_secret()
        monkeypatch.setenv(name, "")
        with pytest.raises(ConfigError, match=f"^{name}='': "):
            has_secret()
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("path", "said"), [("/dev/zero", "it is a device"), ("a\0b", "null"), ("", "No such file")]
)
def test_a_secret_file_that_is_none_is_named(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"secret file .*{said}"):
        secret_from(None, path)


def test_a_secret_file_without_a_secret_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PRPC_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"PRPC_SECRET_FILE=.*none' cannot be read: No such file"):
        secret_from(None)
    (tmp_path / "none").write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        secret_from(None)


def test_the_bound_of_the_slab_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slab_bytes_max() == SLAB_BYTES_MAX
    monkeypatch.setenv("PRPC_SLAB_BYTES_MAX", "1048576")
    assert slab_bytes_max() == 1 << 20
    for text in ("", "8G", "-1", "1048575", "1e9", "²"):
        monkeypatch.setenv("PRPC_SLAB_BYTES_MAX", text)
        with pytest.raises(
            ConfigError, match=f"PRPC_SLAB_BYTES_MAX={text!r}: a number of bytes from 1048576"
        ):
            slab_bytes_max()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_no_secret(host: str) -> None:
    check_exposure(host, b"")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_anything_else_needs_one(host: str) -> None:
    check_exposure(host, b"s")
    with pytest.raises(
        ConfigError,
        match=f"refusing to listen at {host}, .* without a secret of the job: set PRPC_SECRET_FILE",
    ):
        check_exposure(host, b"")


def test_numbers_are_whole_and_within_bounds() -> None:
    assert [check_number("n", value, 0, 3) for value in (0, 3)] == [0, 3]
    for value in (-1, 4, 1.0, "1", None, True):
        with pytest.raises(ConfigError, match="from 0 to 3 is allowed") as caught:
            check_number("n", value, 0, 3)
        assert f"n={value!r}" in str(caught.value)


def test_limits_are_the_argument_or_the_defaults() -> None:
    assert NodeConfig.load().limits == DEFAULT_LIMITS
    own = Limits(blocks_max=3)
    assert NodeConfig.load(limits=own).limits == own


def test_addresses_are_host_and_port() -> None:
    assert host_and_port("127.0.0.1:0") == ("127.0.0.1", 0)
    assert host_and_port("[::1]:9394") == ("::1", 9394)
    assert host_and_port("host.example:65535") == ("host.example", 65535)
    for address in ("", ":1", "host", "host:", "host:65536", "host:-1", "host:1x", "host:²"):
        with pytest.raises(
            ConfigError, match=r"is no address: .*; host:port expected, such as ps0\.example:2222"
        ):
            host_and_port(address)
