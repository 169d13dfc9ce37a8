"""Who may call what: a rule gives, nothing takes away, and a service without rules is open to all
who got in.
"""

from __future__ import annotations

from typing import Any

import pytest

from prpc_engine.errors import ConfigError
from prpc_engine.settings.allow import DECISIONS_MAX, RULES_MAX, AllowList, Rule, rules_from
from shard.transport.identity import PeerIdentity

NOBODY = PeerIdentity()
HOLDER = PeerIdentity(secret="job")
USER = PeerIdentity(secret="user")
LOCAL = PeerIdentity(secret="job", same_user=True)
WORKER = PeerIdentity(
    subjects=("worker-3", "worker-3.example", "spiffe://example/worker-3"), secret="job"
)


def may(
    allow: AllowList, identity: PeerIdentity, service: str = "kv", method: str = "pull"
) -> bool:
    return allow.refusal(identity, service, method) is None


def test_without_rules_everyone_who_got_in_may_call_everything() -> None:
    assert may(AllowList(), NOBODY)


@pytest.mark.parametrize(
    ("who", "lets"),
    [
        ("any", [NOBODY, HOLDER, USER, LOCAL, WORKER]),
        ("secret:job", [HOLDER, LOCAL, WORKER]),
        ("secret:user", [USER]),
        ("user:same", [LOCAL]),
        ("tls:worker-3", [WORKER]),
        ("tls:worker-*", [WORKER]),
        ("tls:*.example", [WORKER]),
        ("tls:spiffe://example/*", [WORKER]),
        ("tls:*", [WORKER]),
        ("tls:Worker-3", []),
        ("tls:worker", []),
        ("tls:worker-3?", []),
    ],
)
def test_a_rule_lets_those_it_names_and_nobody_else(who: str, lets: list[PeerIdentity]) -> None:
    allow = AllowList([Rule("kv", (who,))])
    assert [one for one in (NOBODY, HOLDER, USER, LOCAL, WORKER) if may(allow, one)] == lets


def test_a_rule_speaks_of_its_methods_only() -> None:
    allow = AllowList([Rule("kv", ("tls:worker-*",), ("pull", "push*"))])
    asked = ["pull", "push", "push_pull", "pull_all", "drop", "Pull", ""]
    assert [method for method in asked if may(allow, WORKER, "kv", method)] == [
        "pull",
        "push",
        "push_pull",
    ]


def test_rules_add_up() -> None:
    allow = AllowList(
        [Rule("kv", ("any",), ("pull",)), Rule("k*", ("user:same",)), Rule("other", ("any",))]
    )
    assert may(allow, NOBODY, "kv", "pull")
    assert not may(allow, NOBODY, "kv", "push")
    assert may(allow, LOCAL, "kv", "push")


def test_a_service_that_no_rule_names_stays_open_and_one_that_a_pattern_names_does_not() -> None:
    allow = AllowList([Rule("kv-*", ("tls:worker-*",))])
    assert [allow.guards(name) for name in ("echo", "kv-7", "kv")] == [False, True, False]
    assert may(allow, NOBODY, "echo")
    assert not may(allow, NOBODY, "kv-7")
    assert may(allow, WORKER, "kv-7")


def test_a_refusal_says_who_was_taken_for_whom_and_not_who_may() -> None:
    allow = AllowList([Rule("kv", ("tls:the-trainer",), ("push",))])
    text = allow.refusal(HOLDER, "kv", "push")
    assert text is not None
    assert "'kv' does not let this caller (secret job) call 'push'" in text
    assert "the-trainer" not in text
    assert "(certificate worker-3, secret job)" in str(allow.refusal(WORKER, "kv", "push"))
    assert "(nobody in particular)" in str(allow.refusal(NOBODY, "kv", "push"))


def test_what_is_remembered_is_bounded_and_stays_right() -> None:
    allow = AllowList([Rule("kv", ("any",), ("m1*",))])
    for number in range(DECISIONS_MAX + 10):
        assert may(allow, HOLDER, "kv", f"m{number}") == str(number).startswith("1")
    assert len(allow._decisions) == 10
    assert may(allow, HOLDER, "kv", "m1")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"service": "kv"}, "under [[allow]]"),
        (["kv"], "number 1: 'kv' is no table"),
        (
            [{"service": "kv", "who": ["any"], "method": ["a"]}],
            "unknown method = ['a']: service, who and methods are allowed",
        ),
        (
            [{"service": "kv", "who": ["any"]}, {"service": 3, "who": ["any"]}],
            "number 2: service = 3: a name or pattern",
        ),
        ([{"service": "kv", "who": "any"}], "who = 'any': a list of texts is expected"),
        ([{"service": "kv", "who": ["any"], "methods": [1]}], "methods = [1]: a list of texts"),
        (
            [{"service": "kv", "who": ["root"]}],
            "who = 'root' in the rule for service 'kv': allowed are any, secret:job, secret:user, "
            "user:same",
        ),
        ([{"service": "kv", "who": ["tls:"]}], "who = 'tls:'"),
        ([{"service": "kv", "who": ["secret:other"]}], "who = 'secret:other'"),
        ([{"service": "kv"}], "none of them empty"),
        ([{"who": ["any"]}], "none of them empty"),
        ([{"service": "kv", "who": ["any"], "methods": []}], "none of them empty"),
        ([{"service": "kv", "who": ["any"]}] * (RULES_MAX + 1), f"at most {RULES_MAX} allowed"),
    ],
)
def test_what_is_no_rule_is_named(tables: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rules_from(tables, "own.toml")
    assert said in str(caught.value)


def test_rules_come_from_tables() -> None:
    allow = rules_from(
        [
            {"service": "kv", "who": ["any"], "methods": ["pull"]},
            {"service": "b", "who": ["user:same"]},
        ],
        "x",
    )
    assert allow.rules == (Rule("kv", ("any",), ("pull",)), Rule("b", ("user:same",), ("*",)))
