"""Small doors: names that are not served, lists that nobody is told, lines that nobody forges,
files that are no settings.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import prpc_engine
import shard
from prpc_engine import Master, RpcService, errors
from prpc_engine.rpc.message import method_key
from prpc_engine.rpc.server import ServedObject
from prpc_engine.settings.allow import AllowList, Rule
from prpc_engine.settings.config import TlsSettings
from shard.one_line import Lines, escaped
from tests.certificates import Authority
from tests.prpc_engine.peers import TARGET, Pair, Route
from tests.prpc_engine.settings_of import load_limits, tls_of

FORGED = "x\nWARNING:root:all is well\r\x1b[2K\u2028\u202e"


def ping() -> int:
    return 1


@pytest.mark.parametrize("name", ["_private", "__call__", "_"])
def test_functions_of_a_dict_whose_names_begin_with_an_underscore_are_not_served(name: str) -> None:
    with pytest.raises(
        errors.ConfigError, match=f"'{name}' begins with an underscore: such names are not served"
    ):
        ServedObject("test", 0, TARGET, {"ping": ping, name: ping})


@pytest.mark.parametrize(
    ("methods", "told"), [(("ping",), "ping"), (("nothing",), ""), (("*",), "ping, pong")]
)
def test_an_unknown_method_lists_only_what_its_caller_may_call(
    methods: tuple[str, ...], told: str
) -> None:
    server = ServedObject(
        "test",
        0,
        TARGET,
        {"ping": ping, "pong": ping},
        allow=AllowList([Rule("test", ("any",), methods)]),
    )
    pair = Pair(server)
    call = pair.ask("pnig")
    pair.turn()
    error = call.error()
    pair.close()
    assert isinstance(error, errors.UnknownMethod)
    assert [name for name in ("ping", "pong") if name in str(error)] == [
        name for name in told.split(", ") if name
    ]


@pytest.mark.parametrize("name", ["shard", "prpc"])
@pytest.mark.parametrize(
    "write",
    [
        lambda logger: logger.warning("refused %s: %s", "a peer", FORGED),
        lambda logger: logger.warning(f"refused {FORGED}"),
        lambda logger: logger.warning("refused %(who)s", {"who": FORGED}),
        lambda logger: logger.warning("refused %s", ValueError(FORGED)),
    ],
    ids=["an argument", "a text", "a mapping", "an error"],
)
def test_a_text_of_a_peer_begins_no_line_of_the_log(
    name: str, write: Callable[[logging.Logger], None], caplog: pytest.LogCaptureFixture
) -> None:
    write(logging.getLogger(name))
    (said,) = caplog.messages
    assert said.startswith("refused") and "all is well\\r\\x1b[2K\\u2028\\u202e" in said
    assert said.isprintable()


def test_all_of_the_engine_writes_to_the_two_loggers_that_keep_lines() -> None:
    sources = [
        path for package in (shard, prpc_engine) for path in Path(package.__path__[0]).rglob("*.py")
    ]
    found = {
        name for path in sources for name in re.findall(r"getLogger\((.*?)\)", path.read_text())
    }
    assert found == {'"shard"', '"prpc"'}


def test_a_traceback_still_has_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("prpc").exception("it failed")
    assert caplog.messages == ["it failed"]
    assert "Traceback" in caplog.text and caplog.text.count("\n") > 3


def test_a_stack_of_calls_still_has_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("shard").warning(Lines("a handler has held the reactor\n  File x"))
    assert caplog.messages == ["a handler has held the reactor\n  File x"]


def test_ordinary_texts_stay_as_they_are() -> None:
    text = "größe 'ok' \t 日本 \\n"
    assert escaped(text) == text


def test_a_notification_that_fails_with_a_forged_line_is_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise ValueError(FORGED)

    pair = Pair(ServedObject("test", 0, TARGET, {"fail": fail}))
    pair.client.notify(Route(), "fail", method_key("fail"), ())
    pair.turn()
    pair.close()
    assert [message for message in caplog.messages if "failed" in message]
    assert all(message.isprintable() for message in caplog.messages)


def test_a_service_whose_name_forges_lines_is_one_line_in_the_log_of_slow_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Master() as master, RpcService(master.address, slow_call_s=1e-9) as service:
        service.create_server("a\nb", {"ping": ping})
        assert service.create_client("a\nb").call("ping") == 1
    assert [
        message
        for message in caplog.messages
        if message.startswith("slow call: ") and "a\\nb" in message
    ]
    assert all(message.isprintable() for message in caplog.messages)


@pytest.mark.parametrize(
    "bomb",
    ["a = " + "[" * 100_000, "a = " + "{b = " * 100_000, "[" + "a." * 3 + "b]\nc = " + "[" * 5000],
)
def test_a_toml_that_nests_without_end_is_no_setting(tmp_path: Path, bomb: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(bomb)
    with pytest.raises(errors.ConfigError, match=r"own\.toml: "):
        load_limits(str(file))


@pytest.mark.parametrize("mode", [0o604, 0o606, 0o644, 0o660, 0o666, 0o641, 0o650])
def test_a_tls_key_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    files = Authority(tmp_path).issue("node")
    Path(files.key).chmod(mode)
    with pytest.raises(
        errors.ConfigError, match=f"has mode {mode:04o}: others may read or change it; chmod 600"
    ):
        tls_of(TlsSettings(*files))


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_a_tls_key_for_its_owner_and_a_group_of_readers_is_taken(tmp_path: Path, mode: int) -> None:
    files = Authority(tmp_path).issue("node")
    Path(files.key).chmod(mode)
    assert tls_of(TlsSettings(*files)) == TlsSettings(*files)


@pytest.mark.parametrize(
    "module",
    ["shard", "prpc_engine", "prpc_engine.kv", "prpc_engine.accumulator", "prpc_engine.cluster"],
)
def test_what_brings_dill_is_not_imported_before_there_are_shards(module: str) -> None:
    code = (
        f"import sys, {module}; print([name for name in sys.modules if name.partition('.')[0] in "
        "('dill', 'multiprocess')])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
