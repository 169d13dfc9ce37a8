"""Lists of nodes and of tasks, as Slurm writes them."""

from __future__ import annotations

import pytest

from prpc_engine.errors import ConfigError
from prpc_engine.settings.nodelist import NODES_MAX, expand_counts, expand_nodes


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node1", ["node1"]),
        ("a,b.example,c-1", ["a", "b.example", "c-1"]),
        ("node[01-03,7],other", ["node01", "node02", "node03", "node7", "other"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[5]", ["n5"]),
        ("rack[0-1]n[1-2]-ib", ["rack0n1-ib", "rack0n2-ib", "rack1n1-ib", "rack1n2-ib"]),
        ("[1-2]", ["1", "2"]),
        ("a,[fd00::1],[fe80::1%eth0],n[1-2]", ["a", "[fd00::1]", "[fe80::1%eth0]", "n1", "n2"]),
    ],
)
def test_nodes_are_written_out_in_order(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a name is expected at ''"),
        ("a,,b", "a name is expected at ',b'"),
        ("a,", "a name is expected at ''"),
        ("a b", "',' or its end is expected at ' b'"),
        ("n[1-2", "',' or its end is expected at '[1-2'"),
        ("n]", "',' or its end is expected at ']'"),
        ("n[]", "'' is no range"),
        ("n[1-]", "'1-' is no range"),
        ("n[2-1]", "'2-1' is no range"),
        ("n[1-2-3]", "'1-2-3' is no range"),
        ("n[a-b]", "',' or its end is expected at '[a-b]'"),
        ("n[0-999999999]", f"more than {NODES_MAX} nodes"),
        ("n[0-999][0-999]", f"more than {NODES_MAX} nodes"),
        ("n[0-40000],m[0-40000]", f"more than {NODES_MAX} nodes"),
    ],
)
def test_what_is_no_list_of_nodes_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_nodes(text)
    assert (
        str(caught.value)
        == f"{text!r} is no list of nodes: {said}; one such as node[01-03,7],other is expected"
    )


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2", [1, 2])]
)
def test_counts_are_written_out(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", ""),
        ("0", "0"),
        ("2(x0)", "2(x0)"),
        ("2x3", "2x3"),
        ("1,-1", "-1"),
        ("1(x99999)", "1(x99999)"),
    ],
)
def test_what_is_no_count_is_named(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_counts(text)
    assert str(caught.value).startswith(
        f"{text!r}: {part!r} is no count of tasks; counts such as 2(x3),1 are expected"
    )
