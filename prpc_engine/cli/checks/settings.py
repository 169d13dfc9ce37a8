"""What the environment sets, and whether the engine can make sense of it; `prpc config` shows each
setting.
"""

from __future__ import annotations

from collections.abc import Iterator

from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.checks.host import Host
from prpc_engine.cli.settings import all_settings, unread
from prpc_engine.settings.network import DEFAULT

TOLD_ELSEWHERE = ("secret", "huge_pages")  # by checks of their own, which look further


def settings(host: Host) -> Iterator[Finding]:
    """Variables, and the file that PRPC_CONFIG names."""
    found = [setting for setting in all_settings() if setting.name not in TOLD_ELSEWHERE]
    wrong = [setting for setting in found if setting.error]
    for setting in wrong:
        yield Finding(
            f"setting {setting.name}",
            setting.error,
            "bad",
            "mend it, or unset it; `prpc config` shows all",
        )
    for name, text in unread().items():
        yield Finding(f"variable {name}", text, "warn", "mend its name, or unset it")
    if not wrong:
        given = sum(setting.origin != DEFAULT for setting in found)
        yield Finding("settings", f"{given} from the environment, {len(found) - given} by default")
