"""The TOML file that PRPC_CONFIG names: read once, by section. What a setting may be is checked
where the layers meet (node_config.py).

A file has the sections at its top, or below [tool.prpc], as a pyproject.toml has them: what else is
in such a file belongs to others. A section in both places is refused, as one of them would not
count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from prpc_engine.errors import ConfigError
from prpc_engine.regular_file import read_regular_file

FILE_BYTES_MAX = 1 << 20  # some thousand [[allow]] rules
SECTIONS = ("node", "shards", "limits", "transport", "network", "tls", "allow")
TOOL = "tool"
NAME = "prpc"  # of our table below [tool]


@dataclass(frozen=True)
class ConfigFile:
    """One such file; read("") is that of a process for which PRPC_CONFIG names none."""

    path: str
    content: dict[str, Any] = field(default_factory=dict)
    prefix: str = ""

    @classmethod
    def read(cls, path: str) -> ConfigFile:
        """Raises ConfigError: it cannot be read, is no TOML, or has a section that is none of
        ours, or has sections in both places.
        """
        if not path:
            return cls("")
        try:
            content: dict[str, Any] = msgspec.toml.decode(
                read_regular_file(path, FILE_BYTES_MAX).decode()
            )
        except OSError as error:
            raise ConfigError(f"PRPC_CONFIG={path!r} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        except RecursionError:
            raise ConfigError(
                f"{path}: tables or lists are nested too deep: no setting of ours is, "
                "so it is another file"
            ) from None
        prefix, tools = "", content.get(TOOL)
        if isinstance(tools, dict) and isinstance(tools.get(NAME), dict):
            ours, prefix = tools[NAME], f"{TOOL}.{NAME}."
            at_top = ", ".join(f"[{one}]" for one in SECTIONS if one in content)
            if at_top:
                below = ", ".join(f"[{prefix}{one}]" for one in ours) or f"[{prefix[:-1]}]"
                raise ConfigError(
                    f"{path}: {at_top} at the top, and {below}: sections stand in one of the two "
                    "places; move all of them to the same"
                )
            content = ours
        for section in content:
            if section not in SECTIONS:
                allowed = ", ".join(f"[{one}]" for one in SECTIONS if one != "allow")
                raise ConfigError(
                    f"{path}: unknown section or value {prefix + section!r}: "
                    f"allowed are {allowed} and [[allow]]"
                )
        return cls(path, content, prefix)

    def where(self, section: str) -> str:
        """How errors and origins name a section."""
        return f"{self.path}: [{self.prefix}{section}]"

    def table(self, section: str) -> dict[str, Any]:
        """A section's settings; empty where it is not there. Raises ConfigError for what is no
        table.
        """
        table = self.content.get(section, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"{self.path}: {section} = {table!r}: a table is expected, under "
                f"[{self.prefix}{section}]"
            )
        return table
