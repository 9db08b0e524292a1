"""The loopback transport, copied under another name and built, passes the same suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.compiling import build
from support.places import ROOT

_FOLDER = ROOT / "src" / "bpsx" / "transports" / "loopback"
#: Runs the suite: pytest in a process where the copy is a module of bpsx.transports.
_RUN = """
import sys, pytest
import bpsx.transports
bpsx.transports.__path__.append(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
"""


def test_a_copy_of_loopback_under_another_name_is_a_transport(tmp_path: Path) -> None:
    copy = tmp_path / "copied"
    shutil.copytree(_FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (copy / "endpoint.pyx", copy / "endpoint.pyi"):
        path.write_text(
            path.read_text().replace("Loopback", "Copied").replace("loopback", "copied")
        )
    build(copy / "endpoint.pyx")
    names = ["test_transports.py", "test_drop.py", "test_known_workers.py"]
    suite = [str(Path(__file__).with_name(name)) for name in names]
    chosen = "other and not loopback"
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(tmp_path), "-q", "-p", "no:cacheprovider", "-k", chosen]
        + suite,
        cwd=ROOT,
        env={**os.environ, "CONFORMANCE_OF": "bpsx.transports.copied.endpoint:CopiedEndpoint"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert " passed" in done.stdout and "failed" not in done.stdout, done.stdout
