"""Lists as Slurm writes them: SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE. No I/O here.

    nodes  = node { "," node }
    node   = text { "[" range { "," range } "]" text }  each combination, the last bracket turning
                                                        fastest
           | "[" IPv6 address "]"                       itself; Slurm has none
    range  = number [ "-" number ]                      as wide as the first number is written:
                                                        08-10 is 08, 09, 10
    counts = count { "," count }
    count  = number [ "(x" number ")" ]                 2(x3),1 is 2, 2, 2, 1

At most NODES_MAX nodes, and as many counts, are written out.
"""

from __future__ import annotations

import itertools
import math
import re

from prpc_engine.errors import ConfigError

NODES_MAX = 65536  # far above any machine; "n[0-999999999]" must not fill the memory
# what is within is checked where addresses are made of it
_IPV6 = re.compile(r"\[[0-9A-Fa-f.]*:[^\[\],\s]*\]")
_NODE = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]*\])+")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_nodes(text: str) -> list[str]:
    """The names of the nodes, in order. Raises ConfigError."""
    names: list[str] = []
    position = 0
    while True:
        literal = _IPV6.match(text, position)
        node = literal or _NODE.match(text, position)
        if node is None:
            raise _refusal(text, f"a name is expected at {text[position:]!r}")
        parts = [node[0]] if literal else re.split(r"\[(.*?)\]", node[0])  # text and ranges in turn
        choices = [
            _numbers(part, text) if index % 2 else [part] for index, part in enumerate(parts)
        ]
        if len(names) + math.prod(map(len, choices)) > NODES_MAX:
            raise _refusal(text, f"more than {NODES_MAX} nodes")
        names.extend(map("".join, itertools.product(*choices)))
        position = node.end()
        if position == len(text):
            return names
        if text[position] != ",":
            raise _refusal(text, f"',' or its end is expected at {text[position:]!r}")
        position += 1


def expand_counts(text: str) -> list[int]:
    """The numbers, each as often as it counts. Raises ConfigError."""
    counts: list[int] = []
    for part in text.split(","):
        count = _COUNT.fullmatch(part)
        repeat = int(count[2] or 1) if count else 0
        if count is None or not int(count[1]) or not repeat or len(counts) + repeat > NODES_MAX:
            raise ConfigError(
                f"{text!r}: {part!r} is no count of tasks; counts such as 2(x3),1 are expected, "
                f"for {NODES_MAX} nodes at most"
            )
        counts.extend([int(count[1])] * repeat)
    return counts


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        bounds = _RANGE.fullmatch(part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if bounds is None or first > last:
            raise _refusal(text, f"{part!r} is no range")
        if len(numbers) + last - first >= NODES_MAX:
            raise _refusal(text, f"more than {NODES_MAX} nodes")
        numbers.extend(f"{number:0{len(bounds[1])}d}" for number in range(first, last + 1))
    return numbers


def _refusal(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is no list of nodes: {why}; one such as node[01-03,7],other is expected"
    )
