"""What a peer has proved about itself before its first message: the facts that permissions are
given to. No I/O here.
"""

from __future__ import annotations

from dataclasses import dataclass

# names of the one secret that a node has: given to a job, or a user's own on this host
JOB_SECRET, USER_SECRET = "job", "user"


@dataclass(frozen=True)
class PeerIdentity:
    """One peer's proofs; hashable, so that decisions about it can be remembered.

    subjects   names in its certificate, which our CA vouches for: the common name, then DNS and URI
               names; () without a CA
    secret     the name of the secret that it proved to hold; "" when this node has none
    same_user  whether the kernel says that it runs under our user id (shm, unix), or it is this
               very process
    """

    subjects: tuple[str, ...] = ()
    secret: str = ""
    same_user: bool = False

    def __str__(self) -> str:
        proofs = [f"certificate {self.subjects[0]}"] if self.subjects else []
        proofs += [f"secret {self.secret}"] if self.secret else []
        proofs += ["the same user"] if self.same_user else []
        return ", ".join(proofs) or "nobody in particular"
