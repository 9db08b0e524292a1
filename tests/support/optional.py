"""Installs packages that some tests need and that have no wheel for every Python. `make test` runs
it.

``python tests/support/optional.py``: if a package cannot be installed, the tests that need
it are skipped, with pip's last line as the reason; see ``conftest.py``.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

#: A NumPy below 2, outside the environment's packages, for the test of MXNet with both versions.
OLD_NUMPY = Path(sys.prefix) / "numpy1"
#: Module that the tests import -> requirement given to pip.
OPTIONAL = {
    "tensorflow": ["tensorflow-cpu>=2.21"],
    # MXNet requires a NumPy below 2; bpsx.mxnet makes it work with a newer one.
    "mxnet": ["--no-deps", "mxnet>=1.9.1,<2"],
    # SciPy, which MXNet imports if it is there: 1.18 needs NumPy 2.
    "numpy1": ["--no-deps", "--target", str(OLD_NUMPY), "numpy>=1.26,<2", "scipy>=1.11,<1.18"],
}
_REASONS = Path(sys.prefix) / "left-out.json"
_PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def install() -> dict[str, str]:
    """Install packages with a wheel for this Python; return the others with the reasons."""
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
    """Return why tests that import ``module`` cannot run here; None if it is installed."""
    found = importlib.util.find_spec(module) is not None
    return None if found else f"{module} {why_left_out(module)}"


def why_left_out(module: str) -> str:
    """Return why a package of OPTIONAL is not installed, as the reason of a skipped test."""
    reasons = json.loads(_REASONS.read_text()) if _REASONS.exists() else {}
    return f"is not installed: {reasons.get(module, '`make test` installs it')}"


if __name__ == "__main__":
    for _module, _reason in install().items():
        print(f"left out, and its tests will be skipped: {_module} ({_reason})")
