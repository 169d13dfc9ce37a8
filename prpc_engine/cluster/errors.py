"""What can go wrong between the tasks of a cluster, beside the errors of every call
(prpc_engine/errors.py).

RpcError
├── StepAborted          a task gave the step up             → its text says who and why; begin
│   │                                                          another step
│   └── TaskRestarted    a task of the step was started anew → what it held is lost; begin another
│                                                              step
├── TaskLost             the task died or hung up            → begin the step again when it is back
├── NotSent
│   └── TaskUnreachable  it did not come up in time          → start it, or allow more with
│       │                                                      NETWORK_MAX_CONNECTION_TIMEOUT
│       └── TaskAbsent   it is not there now                 → begin the step again when it is back
└── Rejected
    └── Duplicate        one key of one step, twice          → another key or step; a key's tensor
                                                               is sent once and taken once
"""

from __future__ import annotations

from prpc_engine.errors import Backpressure, NotSent, Rejected, RemoteError, RpcError


class StepAborted(RpcError):
    """The step was aborted, by this task or another one. Its sends and receives fail; begin another
    step.
    """


class TaskRestarted(StepAborted):
    """A task that took part in the step was started again, so that its tensors are lost. Begin
    another step.
    """


class TaskLost(RpcError):
    """The task died, or the connection to it broke, while it was asked."""


class TaskUnreachable(NotSent):
    """The task did not answer at its address within the connection timeout."""


class TaskAbsent(TaskUnreachable):
    """The task does not answer at its address now, and the request was one that does not wait for
    it.
    """


class Duplicate(Rejected):
    """A key of a step was sent, or received, a second time. A key is used once a step."""


_TYPED = {kind.__name__: kind for kind in (StepAborted, TaskRestarted, Duplicate, Backpressure)}


def typed(error: RemoteError) -> RpcError:
    """What another task raised for this one to know;
    the error itself when that is none of these.
    """
    kind = _TYPED.get(error.type_name.rpartition(".")[2])
    return error if kind is None else kind(error.remote_message)
