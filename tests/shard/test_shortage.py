"""What is said where no file descriptor is left: it is found in any chain of errors."""

from __future__ import annotations

import errno
import itertools

from shard.shortage import shortage_in, shortage_of


def chained(*errors: BaseException) -> BaseException:
    """The first, raised from the second, and so on."""
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def test_a_shortage_is_found_behind_other_errors() -> None:
    shortage = OSError(errno.EMFILE, "Too many open files")
    assert shortage_of(chained(RuntimeError(), ValueError(), shortage)) is shortage
    text = shortage_in("a client", chained(RuntimeError(), shortage))
    assert text is not None
    assert text.startswith("this process has no file descriptors left for a client")
    of_the_host = shortage_in("a client", OSError(errno.ENFILE, "Too many open files in system"))
    assert of_the_host is not None
    assert of_the_host.startswith("this host has no")


def test_other_errors_are_none() -> None:
    assert shortage_of(chained(RuntimeError(), OSError(errno.ENOENT, "No such file"))) is None


def test_a_chain_that_comes_back_to_itself_has_an_end() -> None:
    one, two, three = RuntimeError(1), RuntimeError(2), RuntimeError(3)
    assert shortage_of(chained(one, two, three, two)) is None
