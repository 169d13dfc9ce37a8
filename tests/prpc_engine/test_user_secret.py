"""Without a secret given, all processes of a user on a host share one, and nobody else gets in."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prpc_engine import NO_SECRET, Master, RpcService, Server, ServerConfig, errors
from prpc_engine.accumulator import AccumulatorServer
from prpc_engine.settings.config import check_exposure, secret_from
from prpc_engine.settings.local_job import LocalJob
from prpc_engine.settings.user_secret import UserSecret, folder_of_user, user_secret
from shard import DEFAULT_LIMITS, AuthenticationError, Slab, TcpTransport
from shard import Node as Identity
from tests.connecting import connect


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PRPC_SECRET", "PRPC_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "home"
    monkeypatch.setenv("PRPC_HOME", str(folder))
    return folder


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_it_is_made_at_first_use_for_its_user_alone_whatever_the_umask(
    home: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        secret = user_secret()
    finally:
        os.umask(before)
    assert user_secret() == secret
    assert len(bytes.fromhex(secret.decode())) == 32
    assert os.listdir(home) == ["secret"]
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "secret").stat().st_mode) == 0o600


@pytest.mark.slow
def test_processes_that_begin_together_agree(home: Path) -> None:
    code = "from prpc_engine.settings.user_secret import user_secret; print(user_secret().decode())"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)
    ]
    assert len({one.communicate()[0] for one in started}) == 1
    (home / "secret").unlink()
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda _: user_secret(), range(64)))) == 1
    assert os.listdir(home) == ["secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_file_that_others_may_open_is_refused(home: Path, mode: int) -> None:
    user_secret()
    (home / "secret").chmod(mode)
    with pytest.raises(
        errors.ConfigError,
        match=f"/secret.* mode {mode:04o}, so that others may open it.*PRPC_SECRET_FILE",
    ):
        user_secret()


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_folder_that_others_may_open_is_refused(home: Path, mode: int) -> None:
    home.mkdir()
    home.chmod(mode)
    with pytest.raises(errors.ConfigError, match=f"mode {mode:04o}.*chmod 700"):
        user_secret()


def test_links_and_other_users_files_are_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(0o700)
    (tmp_path / "theirs").write_text("0" * 64)
    (tmp_path / "theirs").chmod(0o600)
    (home / "secret").symlink_to(tmp_path / "theirs")
    with pytest.raises(errors.ConfigError, match="cannot be made or read"):
        user_secret()
    (home / "secret").unlink()
    user_secret()
    monkeypatch.setattr("prpc_engine.settings.user_secret.os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(
        errors.ConfigError, match=f"belongs to user {os.getuid()}, not {os.getuid() + 1}"
    ):
        user_secret()
    monkeypatch.undo()
    home.rename(tmp_path / "moved")
    home.symlink_to(tmp_path / "moved")
    monkeypatch.setenv("PRPC_HOME", str(home))
    with pytest.raises(errors.ConfigError, match="is a link"):
        user_secret()


def test_a_disk_that_takes_half_of_it_leaves_none(home: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(errors.ConfigError, match="cannot be made or read: No space left"):
            user_secret()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(home) == []
    assert len(user_secret()) == 64


def test_a_secret_that_was_cut_short_is_named(home: Path) -> None:
    user_secret()
    (home / "secret").write_text("abc\n")
    with pytest.raises(errors.ConfigError, match="has 3 characters, 64 expected"):
        user_secret()


def test_without_a_variable_it_is_in_the_home_folder_of_the_user_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PRPC_HOME")
    where = folder_of_user()
    monkeypatch.setenv("HOME", "/nowhere")
    assert folder_of_user() == where
    monkeypatch.setattr("prpc_engine.settings.user_secret.pwd.getpwuid", lambda uid: {}[uid])
    assert folder_of_user().name == f"prpc-{os.geteuid()}"


def test_no_secret_is_there_only_when_asked_for_by_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(secret_from(None), UserSecret)
    assert secret_from(NO_SECRET) == b""
    assert repr(NO_SECRET) == "NO_SECRET"
    monkeypatch.setenv("PRPC_SECRET", "none")
    assert secret_from(None) == b""


def test_listening_to_other_hosts_takes_a_secret_of_the_job(home: Path) -> None:
    with pytest.raises(errors.ConfigError, match="without a secret of the job"):
        check_exposure("0.0.0.0", user_secret())
    with pytest.raises(errors.ConfigError, match="without a secret of the job"):
        Master("0.0.0.0:0")


def enter_without_secret(address: str) -> None:
    """As another local user would, who cannot read this user's files."""
    slab = Slab()
    try:
        transport = TcpTransport(Identity(secret=b"", incarnation=1, limits=DEFAULT_LIMITS), slab)
        connect(transport, f"tcp://{address}", 10.0).close()
    finally:
        slab.close()


def test_nobody_without_it_gets_into_a_master_a_service_or_a_cluster(home: Path) -> None:
    with Master() as master, RpcService(master.address) as service:
        AccumulatorServer(service)
        with Server({"worker": ["127.0.0.1:0"]}, "worker", 0, config=ServerConfig()) as task:
            for address in (master.address, service.address, task._at.control.address("tcp")):
                with pytest.raises(AuthenticationError, match="does not hold the same secret"):
                    enter_without_secret(address)
    with Master(secret=NO_SECRET) as master:
        enter_without_secret(master.address)


def test_a_launched_job_has_a_secret_of_its_own(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(name: str) -> list[str]:
        paths = [tmp_path / f"{name}{number}" for number in range(2)]
        with LocalJob(60.0) as job:
            for path in paths:
                code = (
                    f"import os; open({str(path)!r}, 'w').write(os.environ.get('PRPC_SECRET', ''))"
                )
                job.start(path.name, [sys.executable, "-c", code], dict(os.environ))
            assert job.run().code == 0
        return [path.read_text() for path in paths]

    first, second = told("first"), told("second")
    assert first[0] == first[1] != second[0] == second[1]
    assert len(first[0]) == 64
    assert not home.exists()
    monkeypatch.setenv("PRPC_SECRET", "one that the user has chosen")
    assert told("third") == ["one that the user has chosen"] * 2
