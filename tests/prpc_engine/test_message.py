"""The fixed header of every message."""

from __future__ import annotations

import pytest

from prpc_engine.rpc.message import (
    CANCEL,
    CREDIT,
    END,
    FAILURE,
    HEADER,
    ITEM,
    NOTIFY,
    OPEN,
    REPEAT,
    REPLY,
    REQUEST,
    STATUS_SHIFT,
    TIMEOUT_S_MAX,
    Status,
    method_key,
)


def test_the_header_is_as_its_table_says() -> None:
    packed = HEADER.pack(
        REQUEST | 0x0203 << STATUS_SHIFT, 0x04050607, 0x08090A0B0C0D0E0F, 0x10111213, 0x14151617
    )
    assert (
        packed.hex()
        == "01" + "00" + "0302" + "07060504" + "0f0e0d0c0b0a0908" + "13121110" + "17161514"
    )


def test_kinds_and_statuses_are_part_of_the_protocol_and_never_change() -> None:
    assert (REQUEST, NOTIFY, REPLY, FAILURE, CANCEL, OPEN, ITEM, CREDIT, END, REPEAT) == (
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
    )
    assert {status.name: status.value for status in Status} == {
        "UNKNOWN_SERVICE": 1,
        "UNKNOWN_METHOD": 2,
        "BAD_ARGUMENTS": 3,
        "BACKPRESSURE": 4,
        "HANDLER_RAISED": 5,
        "BAD_RESULT": 6,
        "DEADLINE": 7,
        "STOPPING": 8,
        "CANCELLED": 9,
        "NOT_ALLOWED": 10,
        "FORGOTTEN": 11,
    }


@pytest.mark.parametrize(
    ("name", "key"), [("echo", 0x17043032), ("", 0), ("größe", method_key("größe"))]
)
def test_a_method_goes_by_the_crc_32_of_its_name(name: str, key: int) -> None:
    assert method_key(name) == key
    assert 0 <= method_key(name) < 1 << 32


def test_the_longest_timeout_fits_its_field() -> None:
    HEADER.pack(REQUEST, 0, 1, 0, int(TIMEOUT_S_MAX * 1000) + 1)
