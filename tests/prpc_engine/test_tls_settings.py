"""TLS is switched on by settings alone, in every part of a job; settings that would not protect it
are refused by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prpc_engine import Master, RpcService, errors
from prpc_engine.errors import ConfigError
from prpc_engine.settings.allow import Rule
from prpc_engine.settings.config import (
    TlsSettings,
    check_environment,
)
from prpc_engine.settings.node_config import NodeConfig
from shard import DEFAULT_LIMITS
from tests.certificates import Authority, Files
from tests.program import PATIENCE_S, ROOT
from tests.prpc_engine.handlers import Plain
from tests.prpc_engine.settings_of import load_limits, tls_of

SECRET = b"a secret of this test"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "PRPC_CONFIG",
        "PRPC_SECRET",
        "PRPC_SECRET_FILE",
        "PRPC_TLS_CERT",
        "PRPC_TLS_KEY",
        "PRPC_TLS_CA",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Authority(tmp_path / "job").issue("node-1")


@pytest.fixture
def set_tls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Files], None]:
    def put(files: Files) -> None:
        for name, value in files._asdict().items():
            if value:  # an empty variable is refused
                monkeypatch.setenv(f"PRPC_TLS_{name.upper()}", value)

    return put


def test_the_argument_goes_before_the_variables_and_these_before_the_file(
    files: Files, set_tls: Callable[[Files], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tls_of() is None
    (tmp_path / "own.toml").write_text(
        '[tls]\ncert = "job/1.pem"\nkey = "job/1.key"\nca = "job/ca.pem"\n'
    )
    monkeypatch.setenv("PRPC_CONFIG", str(tmp_path / "own.toml"))
    from_file = tls_of()
    assert from_file == TlsSettings(*files), "relative to the file's folder"
    set_tls(files._replace(ca=""))
    assert tls_of(None, SECRET) == TlsSettings(files.cert, files.key, "")
    assert tls_of(from_file) is from_file
    assert load_limits(str(tmp_path / "own.toml")) == DEFAULT_LIMITS


def test_settings_that_would_not_protect_are_refused(files: Files, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="key='': TLS needs a certificate and its key at every node"
    ):
        tls_of(TlsSettings(files.cert, "", files.ca), SECRET)
    with pytest.raises(ConfigError, match="without a CA a secret is needed"):
        tls_of(TlsSettings(files.cert, files.key))
    with pytest.raises(ConfigError, match=r"tls=: ca='.*nothing' cannot be read: No such file"):
        tls_of(TlsSettings(files.cert, files.key, str(tmp_path / "nothing")), SECRET)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, said in (
        (str(tmp_path / "pipe"), "it is a pipe"),
        ("/dev/zero", "it is a device"),
        ("a\0b", "null"),
    ):
        with pytest.raises(ConfigError, match=f"tls=: key=.* cannot be read: .*{said}"):
            tls_of(TlsSettings(files.cert, path, files.ca), SECRET)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tls]\ncert = 5", r"\[tls\] cert = 5: paths are allowed for cert, key, ca"),
        ("[tls]\ncertificate = 'a'", "certificate = 'a': unknown; allowed are cert, key, ca"),
        ("[tls]\nca = ''", "ca = '': paths"),
        ("tls = 'on'", "tls = 'on': a table is expected"),
        ("[tls]\nca = 'ca.pem'", "cert='', key=''"),
    ],
)
def test_a_bad_section_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / "own.toml").write_text(text)
    monkeypatch.setenv("PRPC_CONFIG", str(tmp_path / "own.toml"))
    with pytest.raises(ConfigError, match=said):
        tls_of(None, SECRET)


def test_the_allow_list_comes_from_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NodeConfig.load().allow.rules == ()
    (tmp_path / "own.toml").write_text('[[allow]]\nservice = "kv"\nwho = ["any"]\n')
    monkeypatch.setenv("PRPC_CONFIG", str(tmp_path / "own.toml"))
    assert NodeConfig.load().allow.rules == (Rule("kv", ("any",)),)
    (tmp_path / "own.toml").write_text('[[allow]]\nservice = "kv"\nwho = ["root"]\n')
    with pytest.raises(ConfigError, match=r"own\.toml: \[\[allow\]\] number 1: who = 'root'"):
        NodeConfig.load()


@pytest.mark.parametrize(
    "variable", ["PRPC_HUGE_PAGES", "PRPC_DEBUG_LEASES", "PRPC_ENABLE_POLLING"]
)
def test_a_bad_variable_of_the_engine_is_a_setting_that_is_not_allowed(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_environment()
    monkeypatch.setenv(variable, "perhaps")
    for refuses in (check_environment, Master):
        with pytest.raises(ConfigError, match=f"{variable}='perhaps'"):
            refuses()


@pytest.mark.parametrize("variable", ["PRPC_HUGE_PAGES", "PRPC_DEBUG_LEASES"])
def test_a_bad_variable_of_memory_is_so_for_a_first_array_too(variable: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import prpc_engine; prpc_engine.empty(5)"],
        cwd=ROOT,
        env={**os.environ, variable: "perhaps"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert f"\nprpc_engine.errors.ConfigError: {variable}='perhaps': " in done.stderr


def test_a_job_whose_nodes_all_have_tls_works_and_who_has_none_is_kept_out(
    files: Files, set_tls: Callable[[Files], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tls(files)
    with (
        Master(secret=SECRET) as master,
        RpcService(master=master.address, transports=["tcp"], secret=SECRET) as server,
        RpcService(master=master.address, transports=["tcp"], secret=SECRET) as client,
    ):
        server.create_server("plain", Plain())
        assert client.create_client("plain").call("echo", "through TLS") == "through TLS"
        for name in ("PRPC_TLS_CERT", "PRPC_TLS_KEY", "PRPC_TLS_CA"):
            monkeypatch.delenv(name)
        with pytest.raises(
            errors.AuthenticationFailed,
            match="the peer speaks TLS, this side does not: set PRPC_TLS_CERT",
        ):
            RpcService(master=master.address, transports=["tcp"], secret=SECRET)


def test_certificates_that_do_not_fit_are_named_at_the_start(
    files: Files, tmp_path: Path, set_tls: Callable[[Files], None]
) -> None:
    set_tls(files._replace(key=Authority(tmp_path / "other").issue("x").key))
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        Master(secret=SECRET)
