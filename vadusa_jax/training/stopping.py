"""SIGTERM, the notice before a machine is taken away: the run saves and ends; the next one goes on with `--resume`."""

import signal
from types import FrameType

PREEMPTED = 128 + signal.SIGTERM  # exit code of a run that saved and ended on SIGTERM: 143


class Preempted(RuntimeError):
    """The run was asked to end, and has saved."""


class Notice:
    """While open, the first SIGTERM only raises `given`; a second one kills as ever."""

    def __init__(self):
        self.given = False

    def __enter__(self) -> "Notice":
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.given = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
