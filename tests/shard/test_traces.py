"""The text of an error is that of Python's traceback module, but for the marks within lines."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable

import pytest

from shard.traces import chain_of, is_special, line_of, text_of_chain, traceback_of

MARKS = re.compile(r"^ +[~^]+ *\n", re.MULTILINE)


class OwnError(Exception):
    def __str__(self) -> str:
        return "its own text"


def deep(depth: int) -> None:
    if depth:
        deep(depth - 1)
    raise ValueError("at the bottom")


def plain() -> None:
    raise KeyError("x")


def without_text() -> None:
    raise OSError


def own() -> None:
    raise OwnError


def with_cause() -> None:
    try:
        plain()
    except KeyError as error:
        raise ValueError("from it") from error


def while_handling() -> None:
    try:
        with_cause()
    except ValueError:
        raise TypeError("meanwhile")  # noqa: B904


def suppressed() -> None:
    try:
        plain()
    except KeyError:
        raise ValueError("alone") from None


def in_a_circle() -> None:
    try:
        plain()
    except KeyError as error:
        other = ValueError("other")
        error.__cause__ = other
        raise other from error


def with_lines() -> None:
    raise ValueError("one\ntwo\n")


def without_source() -> None:
    exec(compile("def f():\n    raise ValueError('nowhere')\nf()", "<nowhere>", "exec"), {})


def recursing() -> None:
    deep(50)


def recursing_a_little() -> None:
    deep(3)


def of_syntax() -> None:
    compile("a b", "<text>", "exec")


def raised_by(function: Callable[[], None]) -> BaseException:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it raises nothing")


@pytest.mark.parametrize(
    "function",
    [
        plain,
        without_text,
        own,
        with_cause,
        while_handling,
        suppressed,
        in_a_circle,
        with_lines,
        without_source,
        recursing,
        recursing_a_little,
        of_syntax,
    ],
    ids=lambda function: function.__name__,
)
def test_it_says_what_the_traceback_module_says(function: Callable[[], None]) -> None:
    error = raised_by(function)
    of_python = "".join(traceback.format_exception(error))
    if function is not of_syntax:
        of_python = MARKS.sub("", of_python)
    assert traceback_of(error) == of_python
    assert line_of(error) == "".join(traceback.format_exception_only(error))


def test_an_error_that_was_never_raised_has_no_traceback() -> None:
    assert traceback_of(ValueError("not raised")) == "ValueError: not raised\n"


def test_one_whose_text_cannot_be_had_is_named_all_the_same() -> None:
    class BadError(Exception):
        def __str__(self) -> str:
            raise SystemExit

    assert line_of(BadError()).endswith("BadError: <exception str() failed>\n")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes and groups came with 3.11")
def test_notes_are_told_and_groups_are_left_to_the_module() -> None:
    error = ValueError("noted")
    error.add_note("a note")
    assert line_of(error) == "ValueError: noted\na note\n"
    group = ExceptionGroup("two", [ValueError(1), KeyError(2)])  # noqa: F821
    assert is_special(chain_of(group))
    assert traceback_of(group) == "".join(traceback.format_exception(group))


def test_a_chain_is_told_from_its_first_error_on() -> None:
    chain = chain_of(raised_by(while_handling))
    assert [type(error) for error, _ in chain] == [TypeError, ValueError, KeyError]
    assert text_of_chain(chain[:1]).endswith("TypeError: meanwhile\n")
