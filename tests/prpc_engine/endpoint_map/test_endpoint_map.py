"""`.endpoint_map`: the grammar, its errors, and the three rules for where data goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prpc_engine.errors import ConfigError
from prpc_engine.settings.address import Address
from prpc_engine.settings.cluster_spec import ClusterSpec, Task
from prpc_engine.settings.endpoint_map import EndpointMap, data_endpoints, render
from tests.prpc_engine.endpoint_map.goldens import golden_lines

FILE = "/job/.endpoint_map"
CLUSTER = ClusterSpec({"ps": ["ps0:2222"], "worker": ["10.0.0.1:2222", "[fd00::1]:2222"]})
GOOD = "ps0:2222=ps0:3333\n10.0.0.1:2222=10.1.0.1:3333\n[fd00::1]:2222=[fd00::1]:3333\n"


def parsed(text: str) -> list[str]:
    return [
        f"{entry.control}={entry.data}" for entry in EndpointMap.parse(text, FILE).entries.values()
    ]


# The grammar of GRPC++, and what is more


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a:1=b:2", ["a:1=b:2"]),
        ("a:1=b:2\n", ["a:1=b:2"]),
        ("a:1=10.0.0.1:2\nb:1=b:65535\n", ["a:1=10.0.0.1:2", "b:1=b:65535"]),
        ("a:1=localhost:3333", ["a:1=localhost:3333"]),  # names are looked up where they are used
        ("", []),
        ("a:1=b:2\n\n\nc:1=d:2\n\n", ["a:1=b:2", "c:1=d:2"]),
        ("# ours\na:1=b:2  # of task 0\n  #\n", ["a:1=b:2"]),
        (" \ta:1 = b:2\t \n", ["a:1=b:2"]),
        ("a:1=b:2\r\nc:1=d:2\r\n", ["a:1=b:2", "c:1=d:2"]),
        ("\ufeffa:1=b:2\n", ["a:1=b:2"]),  # as editors on other systems begin a file
        ("[::1]:1=[fe80::1%eth0]:2\n", ["[::1]:1=[fe80::1%eth0]:2"]),
        ("a:1=b:2\na:1=b:2\n", ["a:1=b:2"]),
        ("A:1=b:02\na:1=B:2\n", ["a:1=b:2"]),  # one address, written in two ways
    ],
)
def test_a_map_is_read(text: str, entries: list[str]) -> None:
    assert parsed(text) == entries


BAD = {
    "no '='": "a:1=b:2\nps0:2222",
    "two '='": "a:1=b:2=c:3",
    "no key": "=b:2",
    "no value": "a:1=",
    "key without port": "a=b:2",
    "value without port": "a:1=b",
    "port is no number": "a:1=b:http",
    "port of other digits": "a:1=b:٣",
    "port 0": "a:1=b:0",
    "negative port": "a:1=b:-3",
    "port too large": "a:1=b:65536",
    "huge port": "a:1=b:99999999999",
    "no host": "a:1=:2",
    "scheme": "a:1=grpc://b:2",
    "slash in host": "b/c:1=a:2",
    "space within": "a :1=b:2",
    "unprinted character": "a:1=b\x0b:2",
    "mistyped IPv4": "a:1=10.0.0.256:2",
    "short IPv4": "a:1=10.0.1:2",
    "host is a number": "3333=a:2",
    "number for a host": "a:1=3333:4444",
    "IPv6 without brackets": "a:1=fd00::1:2",
    "bad IPv6": "a:1=[fd00:::1]:2",
    "bad scope": "a:1=[fe80::1%\x00]:2",
    "IPv4 in brackets": "a:1=[10.0.0.1]:2",
    "duplicate": "\na:1=b:2\n# again\nA:1=b:3",
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_with_what_is_allowed(case: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EndpointMap.parse(BAD[case], FILE)
    assert str(caught.value) == golden_lines("parse_errors.txt")[case]


def test_every_golden_error_has_its_case() -> None:
    assert list(golden_lines("parse_errors.txt")) == list(BAD)


@given(st.text(alphabet="ab1:=.#[]- \t\r\n\x00é", max_size=40))
def test_any_text_is_a_map_or_a_config_error(text: str) -> None:
    said = ""
    try:
        EndpointMap.parse(text, FILE)
    except ConfigError as error:
        said = str(error)
    assert not said or said.startswith(f"{FILE}:")


# Rule "file"


def test_every_task_goes_where_the_file_says() -> None:
    endpoints = data_endpoints(CLUSTER, EndpointMap.parse(GOOD, FILE))
    assert endpoints.rule == "file"
    assert {str(task): str(data) for task, data in endpoints.addresses.items()} == {
        "ps 0": "ps0:3333",
        "worker 0": "10.1.0.1:3333",
        "worker 1": "[fd00::1]:3333",
    }
    assert not endpoints.unused


def test_keys_of_no_task_are_passed_over_and_listed() -> None:
    endpoints = data_endpoints(CLUSTER, EndpointMap.parse(f"old:2222=ps0:3333\n{GOOD}", FILE))
    assert [(str(entry.control), entry.line) for entry in endpoints.unused] == [("old:2222", 1)]
    assert len(endpoints.addresses) == 3


def test_a_key_matches_however_an_address_is_written() -> None:
    text = GOOD.replace("ps0:2222", "PS0:2222").replace("[fd00::1]:2222", "[FD00:0::1]:2222")
    assert len(data_endpoints(CLUSTER, EndpointMap.parse(text, FILE)).addresses) == 3


BAD_FOR_CLUSTER = {
    "one missing": GOOD.replace("ps0:2222", "ps1:2222"),
    "all missing": "",
    "one data address for two": GOOD.replace("10.1.0.1:3333", "ps0:3333"),
    "data at its own control": GOOD.replace("ps0:3333", "ps0:2222"),
    "data at another's control": GOOD.replace("ps0:3333", "10.0.0.1:2222"),
}


@pytest.mark.parametrize("case", BAD_FOR_CLUSTER)
def test_a_map_that_does_not_fit_the_cluster_names_the_tasks(case: str) -> None:
    with pytest.raises(ConfigError) as caught:
        data_endpoints(CLUSTER, EndpointMap.parse(BAD_FOR_CLUSTER[case], FILE))
    assert str(caught.value) == golden_lines("cluster_errors.txt")[case]


def test_of_many_missing_tasks_a_few_are_named() -> None:
    cluster = ClusterSpec({"worker": [f"w{index}:1" for index in range(100)]})
    with pytest.raises(ConfigError, match=r"worker 7 \(w7:1\) and 92 more: every"):
        data_endpoints(cluster, EndpointMap.parse("", FILE))


# Rules "offset" and "exchange"


def test_an_offset_moves_each_port() -> None:
    endpoints = data_endpoints(CLUSTER, None, 1111)
    assert endpoints.rule == "offset"
    assert render(CLUSTER, endpoints.addresses) == GOOD.replace("10.1.0.1", "10.0.0.1")


@pytest.mark.parametrize(
    ("offset", "said"),
    [
        (1, "port offset 1: data of worker 0 goes to h:2, the control address of worker 1"),
        (
            65535,
            "port offset 65535: data of worker 0: h:1 moved by 65535 is port 65536: "
            "ports are 1 to 65535",
        ),
        (-1, "port offset -1: data of worker 0: h:1 moved by -1 is port 0"),
    ],
)
def test_an_offset_without_room_is_refused(offset: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        data_endpoints(ClusterSpec({"worker": ["h:1", "h:2"]}), None, offset)
    assert str(caught.value).startswith(said)


def test_a_port_that_is_not_known_cannot_be_moved() -> None:
    with pytest.raises(
        ConfigError,
        match="port offset 5: data of local 0: localhost:0 moved by 5: port 0 is any free one",
    ):
        data_endpoints(ClusterSpec({"local": ["localhost:0"]}), None, 5)


def test_without_file_and_offset_the_tasks_tell_each_other() -> None:
    endpoints = data_endpoints(CLUSTER, None)
    assert (endpoints.rule, dict(endpoints.addresses), endpoints.unused) == ("exchange", {}, ())


def test_a_file_and_an_offset_are_one_too_many() -> None:
    with pytest.raises(
        ConfigError, match=rf"{FILE} and a port offset of 5: one of the two is allowed"
    ):
        data_endpoints(CLUSTER, EndpointMap.parse(GOOD, FILE), 5)


def test_what_is_written_has_the_keys_of_the_cluster_letter_by_letter() -> None:
    cluster = ClusterSpec({"ps": ["PS0.Example:2222"]})
    text = render(cluster, data_endpoints(cluster, None, 1).addresses)
    assert text == "PS0.Example:2222=ps0.example:2223\n"
    assert data_endpoints(cluster, EndpointMap.parse(text, FILE)).addresses == {
        Task("ps", 0): Address("ps0.example", 2223)
    }
