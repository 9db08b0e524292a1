"""The names of bpsx's threads, as the operating system knows them."""

from __future__ import annotations

import threading
from pathlib import Path

from bpsx.system.threads import NamedThread


def test_a_thread_has_its_name_in_the_operating_system_too():
    names = []

    def read() -> None:
        names.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    for name in ("bpsx-io-0", "bpsx-with-more-than-15-characters", "bpsx-ä"):
        thread = NamedThread(target=read, name=name)
        thread.start()
        thread.join()
    assert names == ["bpsx-io-0", "bpsx-with-more-", "bpsx-ä"]
