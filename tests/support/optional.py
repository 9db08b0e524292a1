"""Install packages that some tests need and that not every Python has a wheel of; `make test` runs
it.

``python tests/support/optional.py``: a package that cannot be installed is left out, with
pip's last line as the reason. The tests that need it are skipped with that reason; see
``conftest.py``.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

#: A NumPy below 2, outside of the environment's packages, for the test of MXNet with both.
OLD_NUMPY = Path(sys.prefix) / "numpy1"
#: What pip is asked for, by the module that the tests import.
OPTIONAL = {
    "tensorflow": ["tensorflow-cpu>=2.21"],
    # MXNet asks for a NumPy below 2; bpsx.mxnet makes it work with a newer one.
    "mxnet": ["--no-deps", "mxnet>=1.9.1,<2"],
    "numpy1": ["--no-deps", "--target", str(OLD_NUMPY), "numpy>=1.26,<2"],
}
_REASONS = Path(sys.prefix) / "left-out.json"
_PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def install() -> dict[str, str]:
    """Install what has a wheel for this Python; return why the others are left out."""
    left_out = {}
    for module, arguments in OPTIONAL.items():
        # Wheels only: building NumPy or TensorFlow from source takes minutes or fails late.
        done = subprocess.run(
            [*_PIP, "--only-binary=:all:", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"pip exited with {done.returncode}"]
            left_out[module] = lines[-1].removeprefix("ERROR: ")
    _REASONS.write_text(json.dumps(left_out, indent=2) + "\n")
    return left_out


def why_missing(module: str) -> str | None:
    """Why tests that import ``module`` cannot run here; None if it is installed."""
    found = importlib.util.find_spec(module) is not None
    return None if found else f"{module} {why_left_out(module)}"


def why_left_out(module: str) -> str:
    """Why a package of OPTIONAL is not there, for the reason of a skipped test."""
    reasons = json.loads(_REASONS.read_text()) if _REASONS.exists() else {}
    return f"is not installed: {reasons.get(module, '`make test` installs it')}"


if __name__ == "__main__":
    for _module, _reason in install().items():
        print(f"left out, and its tests will be skipped: {_module} ({_reason})")
