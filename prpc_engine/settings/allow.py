"""Who may call which methods of which services: rules, and one question. No I/O here.

A rule gives; nothing takes away. A service that no rule names may be called by everyone who got
through the handshake; one that some rule names, only by whom a rule lets, and only those methods.
In the file that PRPC_CONFIG names:

    [[allow]]
    service = "kv"                            or a pattern: "kv-*"
    methods = ["pull", "push*"]               patterns; left out: all
    who = ["tls:worker-*", "user:same"]       one of them is enough

    who          is
    any          everyone who got through the handshake
    secret:job   who proved the job's secret
    secret:user  who proved the secret of this user on this host, where the node was given none
                 (user_secret.py)
    user:same    a process of the same user on this host (shared memory), as the kernel says; or
                 this very process
    tls:PATTERN  who showed a certificate, signed by our CA, with such a common name, DNS name or
                 URI

Patterns are those of the shell (*, ?, [a-z]), and case counts. Everybody who holds a secret looks
the same: to tell nodes apart, give them certificates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

from prpc_engine.errors import ConfigError

ALLOWED_WHO = "any, secret:job, secret:user, user:same and tls:PATTERN"
RULES_MAX = 1024  # each decision looks at all of them, once
# Decisions remembered: some hundred methods asked by some hundred nodes. When it is full, all are
# made anew.
DECISIONS_MAX = 65536


class Identity(Protocol):
    """What a peer has proved; that of a connection of shard (connection.peer_identity) is one.
    Hashable.
    """

    @property
    def subjects(self) -> tuple[str, ...]:
        """Names in its certificate."""

    @property
    def secret(self) -> str:
        """The name of the secret it holds, or ""."""

    @property
    def same_user(self) -> bool:
        """Whether it runs under our user id, on this host."""


@dataclass(frozen=True)
class Rule:
    """Lets those in `who` call some methods of some services: one [[allow]] of the configuration.

    service  a name or a pattern, as are `methods`
    who      any of the words at the file's head, one of which is enough

    Raises ConfigError for what is empty, and for a `who` that is none.
    """

    service: str
    who: tuple[str, ...]
    methods: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        if not self.service or not self.who or not self.methods:
            raise ConfigError(
                f"{self}: a service, who, and methods are expected, none of them empty"
            )
        for who in self.who:
            kind, _, name = who.partition(":")
            if who not in ("any", "secret:job", "secret:user", "user:same") and not (
                kind == "tls" and name
            ):
                raise ConfigError(
                    f"who = {who!r} in the rule for service {self.service!r}: "
                    f"allowed are {ALLOWED_WHO}"
                )

    def lets(self, identity: Identity, service: str, method: str) -> bool:
        """Whether this rule lets it call that."""
        return (
            fnmatchcase(service, self.service)
            and any(fnmatchcase(method, pattern) for pattern in self.methods)
            and any(_is(identity, who) for who in self.who)
        )


def _is(identity: Identity, who: str) -> bool:
    kind, _, name = who.partition(":")
    if kind == "tls":
        return any(fnmatchcase(subject, name) for subject in identity.subjects)
    if kind == "secret":
        return identity.secret == name
    return kind == "any" or identity.same_user


class AllowList:
    """All rules of a node. Not thread-safe: asked in the reactor's thread."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        if len(rules) > RULES_MAX:
            raise ConfigError(f"{len(rules)} rules, at most {RULES_MAX} allowed")
        self.rules = tuple(rules)
        self._decisions: dict[tuple[Identity, str, str], str | None] = {}

    def guards(self, service: str) -> bool:
        """Whether any rule names it: refusal() need not be asked about a service that none does."""
        return any(fnmatchcase(service, rule.service) for rule in self.rules)

    def refusal(self, identity: Identity, service: str, method: str) -> str | None:
        """None: it may. Else what to answer: who it is taken for, and what to do; not what others
        may.
        """
        if not self.rules:
            return None
        asked = (identity, service, method)
        try:
            return self._decisions[asked]
        except KeyError:
            if len(self._decisions) >= DECISIONS_MAX:
                self._decisions.clear()
            answer = self._decisions[asked] = self._decide(identity, service, method)
            return answer

    def _decide(self, identity: Identity, service: str, method: str) -> str | None:
        if not self.guards(service) or any(
            rule.lets(identity, service, method) for rule in self.rules
        ):
            return None
        return (
            f"the allow list of {service!r} does not let this caller ({identity}) "
            f"call {method!r}: show a certificate that it "
            "lets, or add an [[allow]] to the server's PRPC_CONFIG"
        )


def permitted(
    allow: AllowList | None, identity: Identity, service: str, methods: Sequence[str]
) -> list[str]:
    """Of these the ones that it may call: nobody is told of others."""
    return [
        method
        for method in methods
        if allow is None or allow.refusal(identity, service, method) is None
    ]


def rules_from(tables: object, where: str) -> AllowList:
    """The rules of parsed TOML. Raises ConfigError, which begins with `where`, for anything that is
    no rule.
    """
    if not isinstance(tables, list):
        raise ConfigError(f"{where}: allow = {tables!r}: tables are expected, each under [[allow]]")
    return AllowList(
        [
            _rule(table, f"{where}: [[allow]] number {number}")
            for number, table in enumerate(tables, 1)
        ]
    )


def _rule(table: object, where: str) -> Rule:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: {table!r} is no table")
    unknown = sorted(table.keys() - {"service", "who", "methods"})
    if unknown:
        raise ConfigError(
            f"{where}: unknown {unknown[0]} = {table[unknown[0]]!r}: service, "
            "who and methods are allowed"
        )
    service = table.get("service", "")
    if not isinstance(service, str):
        raise ConfigError(f"{where}: service = {service!r}: a name or pattern is expected")
    try:
        return Rule(
            service,
            _texts(table, "who", where),
            _texts(table, "methods", where) if "methods" in table else ("*",),
        )
    except ConfigError as error:
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from error


def _texts(table: Mapping[Any, Any], name: str, where: str) -> tuple[str, ...]:
    texts = table.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{where}: {name} = {texts!r}: a list of texts is expected")
    return tuple(texts)
