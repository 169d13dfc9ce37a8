"""The role of a replica of a partition, as a table that runs. No I/O and no clock: Replica does the
actions.
"""

from __future__ import annotations

from enum import Enum

from shard import StateTable


class ReplicaRole(Enum):
    """What one server's copy of a partition is for, by the placement that the server knows."""

    UNPLACED = "loaded or filled; the placement has not been looked at"
    REPLICA = "does what the primary has done, in the order of its numbers"
    PRIMARY = "answers workers, applies pushes and forwards them to each stream"
    HANDING_OVER = "pulls are answered, pushes wait until every replica has everything"
    HANDED = "as handing over; every replica has everything, and the heir may be primary already"
    GONE = "this server does not hold the partition any more"


class RoleEvent(Enum):
    """What changes it."""

    NAMED_REPLICA = "a placement of a new epoch names this server, and another one as primary"
    NAMED_PRIMARY = "a placement of a new epoch names this server as primary"
    HAND_OVER_ASKED = "the reconciler asks whether the heir may take over now"
    REPLICAS_HAVE_ALL = "every stream to a replica is live and answered, the heir's among them"
    KEPT = "the reconciler: it stays here, or the placement has said already where it goes"
    LEFT = "the placement does not name this server, or the server closes"


class RoleAction(Enum):
    """What the Replica does then."""

    REFUSE_WAITING = "all that waits is answered with Moved, and all streams end"
    FOLLOW = "take back what pulls have left since the primary told last; forward nothing"
    SERVE = "forward each change; open a stream to each replica by the placement"
    TELL_NEWS = "forward what pulls have left"
    LOOK = "find out whether the replicas have everything"
    ANSWER_YES = "the heir may take over"
    ANSWER_NO = "it may not"
    SEND_BACK = "pushes that waited are told to come again"


_S, _E, _A = ReplicaRole, RoleEvent, RoleAction
# A primary that the next epoch names again had its tables replaced by a checkpoint's: all that
# waits was for the tables before. Who holds it no longer may still be asked to hand it over, or to
# keep it: the reconciler, in another thread, hears of the placement later than the replica.
REPLICA_ROLES = StateTable(
    "A replica of a partition",
    _S.UNPLACED,
    {
        (_S.UNPLACED, _E.NAMED_REPLICA): (_S.REPLICA, (_A.FOLLOW,)),
        (_S.UNPLACED, _E.NAMED_PRIMARY): (_S.PRIMARY, (_A.SERVE,)),
        (_S.REPLICA, _E.NAMED_REPLICA): (_S.REPLICA, (_A.REFUSE_WAITING, _A.FOLLOW)),
        (_S.REPLICA, _E.NAMED_PRIMARY): (_S.PRIMARY, (_A.REFUSE_WAITING, _A.SERVE)),
        (_S.REPLICA, _E.HAND_OVER_ASKED): (_S.REPLICA, (_A.ANSWER_NO,)),
        (_S.REPLICA, _E.KEPT): (_S.REPLICA, ()),
        (_S.REPLICA, _E.LEFT): (_S.GONE, (_A.REFUSE_WAITING,)),
        (_S.PRIMARY, _E.NAMED_REPLICA): (_S.REPLICA, (_A.REFUSE_WAITING, _A.FOLLOW)),
        (_S.PRIMARY, _E.NAMED_PRIMARY): (_S.PRIMARY, (_A.REFUSE_WAITING, _A.SERVE)),
        (_S.PRIMARY, _E.HAND_OVER_ASKED): (_S.HANDING_OVER, (_A.TELL_NEWS, _A.LOOK)),
        (_S.PRIMARY, _E.KEPT): (_S.PRIMARY, ()),
        (_S.PRIMARY, _E.LEFT): (_S.GONE, (_A.REFUSE_WAITING,)),
        (_S.HANDING_OVER, _E.NAMED_REPLICA): (
            _S.REPLICA,
            (_A.ANSWER_NO, _A.REFUSE_WAITING, _A.FOLLOW),
        ),
        (_S.HANDING_OVER, _E.NAMED_PRIMARY): (
            _S.PRIMARY,
            (_A.ANSWER_NO, _A.REFUSE_WAITING, _A.SERVE),
        ),
        (_S.HANDING_OVER, _E.HAND_OVER_ASKED): (_S.HANDING_OVER, (_A.LOOK,)),
        (_S.HANDING_OVER, _E.REPLICAS_HAVE_ALL): (_S.HANDED, (_A.ANSWER_YES,)),
        (_S.HANDING_OVER, _E.KEPT): (_S.PRIMARY, (_A.ANSWER_NO, _A.SEND_BACK)),
        (_S.HANDING_OVER, _E.LEFT): (_S.GONE, (_A.ANSWER_NO, _A.REFUSE_WAITING)),
        (_S.HANDED, _E.NAMED_REPLICA): (_S.REPLICA, (_A.REFUSE_WAITING, _A.FOLLOW)),
        (_S.HANDED, _E.NAMED_PRIMARY): (_S.PRIMARY, (_A.REFUSE_WAITING, _A.SERVE)),
        (_S.HANDED, _E.HAND_OVER_ASKED): (_S.HANDING_OVER, (_A.LOOK,)),
        (_S.HANDED, _E.KEPT): (_S.PRIMARY, (_A.SEND_BACK,)),
        (_S.HANDED, _E.LEFT): (_S.GONE, (_A.REFUSE_WAITING,)),
        (_S.GONE, _E.HAND_OVER_ASKED): (_S.GONE, (_A.ANSWER_NO,)),
        (_S.GONE, _E.KEPT): (_S.GONE, ()),
    },
)
# identity is compared first: no member is hashed
PRIMARIES = (ReplicaRole.PRIMARY, ReplicaRole.HANDING_OVER, ReplicaRole.HANDED)
HOLDS_PUSHES = (ReplicaRole.HANDING_OVER, ReplicaRole.HANDED)
