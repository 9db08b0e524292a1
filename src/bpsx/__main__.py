"""``python -m bpsx``: the same as ``bpsx-run``."""

from __future__ import annotations

import sys

from bpsx.launch.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
