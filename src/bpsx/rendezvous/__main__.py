"""``python -m bpsx.rendezvous``: the scheduler role."""

from __future__ import annotations

import sys

from bpsx.config import Config
from bpsx.errors import BpsxError
from bpsx.logs import configure
from bpsx.rendezvous.hub import Hub


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
    hub.announce()
    return hub.run()


if __name__ == "__main__":
    sys.exit(main())
