"""What the master refuses, as its client raises it. No I/O here."""

from __future__ import annotations

from prpc_engine import errors

# By the name of the type that the master raised.
KINDS: dict[str, type[errors.RpcError]] = {
    "NoSuchNode": errors.NoSuchNode,
    "NodeExists": errors.NodeExists,
    "VersionMismatch": errors.VersionMismatch,
    "AnswerForgotten": errors.MaybeExecuted,
    "RegistryError": errors.Rejected,
    "JournalError": errors.JournalError,
}


def refusal(asked: str, after_s: float, error: errors.RemoteError) -> errors.RpcError:
    """The error for what was `asked` of the master `after_s` seconds ago; `error` itself where it
    is no refusal.
    """
    kind = error.type_name.rpartition(".")[2]
    if kind == "TimedOut":
        return errors.DeadlineExceeded(
            f"{asked}: {error.remote_message} (after {after_s:.3f} s); allow a larger timeout_s, "
            "or see to who is missing"
        )
    refused = KINDS.get(kind)
    return error if refused is None else refused(f"{asked} was refused: {error.remote_message}")
