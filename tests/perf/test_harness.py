"""What one repeat of a candidate leaves behind: nothing."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

from perf.harness import Candidate, Place, compare
from perf.machine import SHM_FOLDER
from perf.timing import TINY, Effort, Sample


def leave_and_die(place: Place, effort: Effort, told: Path) -> Sample:
    """Measures nothing: is killed with a file in shared memory, as a library may have one there."""
    left = Path(SHM_FOLDER, f"{Path(place.folder).name}_left")
    left.touch()
    told.write_text(str(left))
    os.kill(os.getpid(), signal.SIGKILL)
    return Sample()


def test_what_a_killed_candidate_left_in_shared_memory_is_removed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    candidate = Candidate("killed", "peer", partial(leave_and_die, told=told))
    (result,) = compare("harness", "killed", [candidate], TINY)
    assert result.state == "failed"
    assert told.read_text().startswith(f"{SHM_FOLDER}/prpc-bench-")
    assert not Path(told.read_text()).exists()
