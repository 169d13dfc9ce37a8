"""Errors of the engine and of other tasks as those of TensorFlow, and how a typed one gets through
an op.

    the engine's                      TensorFlow's            what its sessions do
    TaskLost, TaskAbsent, NotSent,    UnavailableError        a recoverable session is made again
      MaybeExecuted, Closed
    TaskRestarted                     AbortedError            the same
    StepAborted                       CancelledError          another task's error ended the step
    DeadlineExceeded                  DeadlineExceededError   as operation_timeout_in_ms promises
    TaskUnreachable                   DeadlineExceededError   end with it: the task had the whole
                                                              connection timeout to come up in
    Cancelled                         CancelledError          the session was closed
    ShmFull, Backpressure             ResourceExhaustedError
    AuthenticationFailed, NotAllowed  PermissionDeniedError
    ConfigError, BadArguments         InvalidArgumentError
    anything else                     InternalError

An op of the own graph that raises ends the step with one code, whatever it raises. So it leaves the
error here, and its number in the text; who ran the step takes it from here.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from tensorflow.python.framework import errors_impl as tf_errors

from prpc_engine import errors
from prpc_engine.cluster.errors import StepAborted, TaskAbsent, TaskRestarted, TaskUnreachable
from shard import ShardError

# the last ones: of an op that failed when its step had ended already, nobody takes the error
KEPT_MAX = 4096
# in front of every node's name, where its part of the graph was added
_OURS = re.compile(r"prpc_[gh]\d+/")
_NUMBER = re.compile(r"prpc-error-(\d+)\b")
_numbers = itertools.count(1)
_kept: dict[int, BaseException] = {}

_CODES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], Any], ...] = (
    # In this order: the first that fits.
    (TaskAbsent, tf_errors.UnavailableError),
    ((errors.DeadlineExceeded, TaskUnreachable), tf_errors.DeadlineExceededError),
    (errors.Cancelled, tf_errors.CancelledError),
    (TaskRestarted, tf_errors.AbortedError),
    (StepAborted, tf_errors.CancelledError),
    ((errors.ShmFull, errors.Backpressure), tf_errors.ResourceExhaustedError),
    ((errors.AuthenticationFailed, errors.NotAllowed), tf_errors.PermissionDeniedError),
    ((errors.ConfigError, errors.BadArguments), tf_errors.InvalidArgumentError),
    ((errors.RemoteError, errors.UnknownMethod), tf_errors.InternalError),
    ((errors.RpcError, ShardError), tf_errors.UnavailableError),  # it is gone, or not there yet
    (Exception, tf_errors.InternalError),
)


def clean(text: str) -> str:
    """With the names of the user's nodes."""
    return _OURS.sub("", text)


def told(error: Exception) -> tuple[int, str]:
    """Code and text of what an op or session raised here, for the task that asked."""
    if isinstance(error, tf_errors.OpError):
        return error.error_code, clean(error.message)
    return tf_errors.UNKNOWN, f"{type(error).__name__}: {error}"


def read(code: int, text: str) -> Exception:
    """What another task told."""
    kind = tf_errors.exception_type_from_error_code(code)
    error: Exception = kind(None, None, text)
    return error


def from_engine(error: Exception) -> Exception:
    """What a call of the engine raised."""
    kind = next(kind for kinds, kind in _CODES if isinstance(error, kinds))
    typed: Exception = kind(None, None, f"prpc: {error}")
    return typed


class KeptError(StopIteration):
    """Stands for an error that was left here. TensorFlow logs a warning with a traceback for what a
    PyFunc raises, but for a StopIteration, which is how its own generators end."""


def keep(error: BaseException) -> KeptError:
    """What to raise in an op for what was raised in it, which its step is to end with, as an error
    of TensorFlow when it is the engine's. Of a KeyboardInterrupt TensorFlow would make an error
    like any other, which a script that tries again takes for one of the cluster.
    """
    if isinstance(error, KeptError):
        return error
    if isinstance(error, (errors.RpcError, ShardError)):
        error = from_engine(error)
    number = next(_numbers)
    _kept[number] = error
    _kept.pop(number - KEPT_MAX, None)
    return KeptError(f"prpc-error-{number}")


def of_step(error: BaseException) -> BaseException:
    """What a step that ended with `error` of TensorFlow is to raise."""
    text = error.message if isinstance(error, tf_errors.OpError) else str(error)
    found = [_kept.pop(int(number), None) for number in _NUMBER.findall(text)]
    typed = next((one for one in found if one is not None), None)
    if typed is not None:
        return typed
    if isinstance(error, tf_errors.OpError):
        error._message = clean(text)
    return error


def for_others(error: BaseException) -> Exception:
    """What ends whatever else belongs to a step that ended with `error`."""
    if isinstance(error, Exception):
        return error
    interrupted: Exception = tf_errors.CancelledError(
        None, None, f"the step was interrupted by {type(error).__name__}"
    )
    return interrupted
