"""Where `.endpoint_map` is looked for, and that it is read once."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from prpc_engine.errors import ConfigError
from prpc_engine.settings.cluster_spec import ClusterSpec
from prpc_engine.settings.endpoint_map_file import (
    FILE_BYTES_MAX,
    EndpointMapFile,
    load_data_endpoints,
)
from prpc_engine.settings.network import FoundValue
from prpc_engine.settings.node_config import network_of_process

CLUSTER = ClusterSpec({"worker": ["h:1"]})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, an empty one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, data: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / ".endpoint_map"
    file.write_text(f"h:1={data}\n")
    return file


def found(**environ: str) -> str:
    said = network_of_process(environ)
    endpoints, _ = load_data_endpoints(
        CLUSTER, said["endpoint_map_folder"], said["data_port_offset"].value
    )
    return f"{endpoints.rule} {','.join(map(str, endpoints.addresses.values()))}"


def test_it_is_looked_for_in_the_working_directory_or_where_a_variable_says(here: Path) -> None:
    write(here / "theirs", "theirs:2")
    write(here / "ours", "ours:2")
    assert found() == "exchange "
    assert found(TF_SEASTAR_ENDPOINT_MAP_PATH="theirs") == "file theirs:2"
    assert found(TF_SEASTAR_ENDPOINT_MAP_PATH=str(here / "theirs")) == "file theirs:2"
    assert found(PRPC_ENDPOINT_MAP="ours") == "file ours:2"
    assert found(PRPC_ENDPOINT_MAP="ours", TF_SEASTAR_ENDPOINT_MAP_PATH="ours") == "file ours:2"
    write(here, "here:2")
    assert found() == found(TF_SEASTAR_ENDPOINT_MAP_PATH="") == "file here:2"
    with pytest.raises(
        ConfigError,
        match="PRPC_ENDPOINT_MAP='ours' and TF_SEASTAR_ENDPOINT_MAP_PATH='theirs': "
        "they are one setting",
    ):
        found(PRPC_ENDPOINT_MAP="ours", TF_SEASTAR_ENDPOINT_MAP_PATH="theirs")


def test_the_settings_file_says_it_below_the_variables_and_relative_to_itself(here: Path) -> None:
    settings = here / "settings" / "own.toml"
    settings.parent.mkdir()
    settings.write_text('[network]\nendpoint_map_folder = "maps"\n')
    with pytest.raises(ConfigError, match=rf"^{settings}: \[network\]: .*maps is no folder"):
        found(PRPC_CONFIG=str(settings))
    write(settings.parent / "maps", "maps:2")
    assert found(PRPC_CONFIG=str(settings)) == "file maps:2"
    write(here / "ours", "ours:2")
    assert found(PRPC_CONFIG=str(settings), PRPC_ENDPOINT_MAP="ours") == "file ours:2"
    settings.write_text("[network]\ndata_port_offset = 5\n")
    assert found(PRPC_CONFIG=str(settings)) == "offset h:6"
    assert found(PRPC_CONFIG=str(settings), PRPC_DATA_PORT_OFFSET="7") == "offset h:8"


def test_an_offset_holds_where_there_is_no_file(here: Path) -> None:
    assert found(PRPC_DATA_PORT_OFFSET="5") == "offset h:6"
    file = write(here, "here:2")
    with pytest.raises(
        ConfigError, match=f"^{file} and a port offset of 5: one of the two is allowed"
    ):
        found(PRPC_DATA_PORT_OFFSET="5")


def test_a_file_that_was_asked_for_must_be_there(here: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=f"^PRPC_ENDPOINT_MAP='.': {here}/.endpoint_map is not there; make one with",
    ):
        found(PRPC_ENDPOINT_MAP=".")
    for named in ("nowhere", str(write(here, "here:2"))):
        with pytest.raises(
            ConfigError,
            match=rf"^TF_SEASTAR_ENDPOINT_MAP_PATH='{named}': .* is no folder; the one that holds",
        ):
            found(TF_SEASTAR_ENDPOINT_MAP_PATH=named)


def test_what_cannot_be_read_is_named(here: Path) -> None:
    file = here / ".endpoint_map"
    file.symlink_to("elsewhere")
    with pytest.raises(
        ConfigError, match=f"{file} cannot be read: it is a link to elsewhere, which is not there"
    ):
        found()
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=f"{file} cannot be read: Is a directory"):
        found()
    file.rmdir()
    file.write_bytes(b"h:1=h:2\nh:3=\xff:4\n")
    with pytest.raises(ConfigError, match=f"{file}:2: byte 0xff is no UTF-8 text"):
        found()
    file.touch()
    os.truncate(file, FILE_BYTES_MAX + 1)
    with pytest.raises(ConfigError, match=f"{file} has more than {FILE_BYTES_MAX} bytes"):
        found()
    file.write_text("h:1\n")
    with pytest.raises(ConfigError, match=f"^{file}:1: 'h:1' is no entry"):
        found()


def test_a_link_to_nowhere_that_goes_as_it_is_read_is_none(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, readlink = here / ".endpoint_map", os.readlink

    def late(path: str) -> str:
        file.unlink()
        return readlink(path)

    file.symlink_to("elsewhere")
    monkeypatch.setattr(os, "readlink", late)
    assert EndpointMapFile.read(FoundValue("", "default")).text is None


def test_a_pipe_is_no_map_and_nobody_waits_for_its_writer(here: Path) -> None:
    os.mkfifo(here / ".endpoint_map")
    with pytest.raises(ConfigError, match="cannot be read: it is no file"):
        found()


def test_it_is_not_read_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(here, "here:2")
    loaded = EndpointMapFile.read(FoundValue("", "default"))
    monkeypatch.chdir("/")
    loaded.check_unchanged()
    os.utime(file, (0, 0))
    loaded.check_unchanged()
    for text, said in (
        ("h:1=there:2\n", "has changed in line 1"),
        ("h:1=here:2\nh:2=here:3\n", "has changed in line 2"),
        ("h:1=here:2", "has changed in line 2"),
        ("\n", "has changed in line 1"),
    ):
        file.write_text(text)
        with pytest.raises(
            ConfigError,
            match=re.escape(
                f"hot reload refused: {file} {said} since this task started; the job goes"
            ),
        ):
            loaded.check_unchanged()
    file.unlink()
    with pytest.raises(ConfigError, match=f"hot reload refused: {file} has gone since"):
        loaded.check_unchanged()


def test_one_that_appears_later_is_not_read_either(here: Path) -> None:
    loaded = EndpointMapFile.read(FoundValue("", "default"))
    loaded.check_unchanged()
    write(here, "here:2")
    with pytest.raises(ConfigError, match="has appeared since this task started; the job goes on"):
        loaded.check_unchanged()
