"""``python -m bpsx.scheduler``: the scheduler role."""

from __future__ import annotations

import signal
import sys

from bpsx.config import Config
from bpsx.errors import BpsxError
from bpsx.scheduler.hub import Hub
from bpsx.scheduler.waiting import introduce
from bpsx.system.address import join_host_port
from bpsx.system.host import allow_descriptors, heed_signals, hold, require_descriptors
from bpsx.system.logs import configure


def main() -> int:
    """Run a job's scheduler; returns the exit status."""
    try:
        config = Config(role="scheduler")
        configure(config, "scheduler")
        config.check()
        allow_descriptors()
        require_descriptors("scheduler")
        hub = Hub(config)
    except BpsxError as e:
        print(f"bpsx scheduler: {e}", file=sys.stderr)
        return 2

    def interrupt(number: signal.Signals) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        hub.interrupt(number.name)

    heed_signals("scheduler", interrupt, lambda: hub.serving, config.term_grace)
    if config.lifeline_fd >= 0:
        hold(config.lifeline_fd, hub.orphaned)
    hub.announce()
    introduce(config, join_host_port(config.root_uri, hub.port))
    return hub.run()


if __name__ == "__main__":
    sys.exit(main())
