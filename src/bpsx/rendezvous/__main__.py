"""``python -m bpsx.rendezvous``: the scheduler role."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from bpsx.config import Config
from bpsx.errors import BpsxError
from bpsx.logs import configure
from bpsx.rendezvous.hub import Hub, Interrupted


def main() -> int:
    """Run a job's scheduler; returns the exit status."""
    try:
        config = Config(role="scheduler")
        configure(config, "scheduler")
        config.check()
        hub = Hub(config)
    except BpsxError as e:
        print(f"bpsx scheduler: {e}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    hub.announce()
    return hub.run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A second signal ends at once.
    signal.signal(number, signal.SIG_DFL)
    raise Interrupted(signal.Signals(number).name)


if __name__ == "__main__":
    sys.exit(main())
