"""A file imports only from layers below its own. The table is the tree in ARCHITECTURE.md."""

from __future__ import annotations

import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from support.places import ROOT, files, imports, module_of

# A smaller number is a higher layer. One whole number per package, or per file of the top folder.
LAYERS = {
    "__main__": 1,
    "keras": 1,
    "torch": 2,
    "tensorflow": 2,
    "mxnet": 2,
    "plugin": 3,
    "launch": 3,
    "api": 4,
    "session": 5,
    "server": 5,
    "compression": 6,
    "local": 7,
    "_core": 8,
    "telemetry": 8,
    "core": 9,
    "scheduler": 9,
    "transports": 10,
    "kernels": 10,
    "system": 11,
    "config": 12,
    "dtypes": 13,
    "secret": 13,
    "planning": 13,
    "errors": 14,
}
#: The package's public face: it loads the verbs of ``api`` lazily.
FACE = "bpsx"
#: It also loads ``plugin.arrays_elastic``. Modules that import it see only the verbs.
FACE_LAYER = 2


def room(module: str) -> str:
    """Return the package below bpsx, or the file of the top folder, that contains a module."""
    return "api" if module == FACE else module.split(".")[1]


@pytest.mark.parametrize("path", files("src"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    module = module_of(path)
    for imported in imports(path):
        here, there = room(module), room(imported)
        layer = FACE_LAYER if module == FACE else LAYERS[here]
        if imported != "bpsx.__version__" and here != there:
            assert LAYERS[there] > layer, f"{module} ({layer}) imports {imported} ({LAYERS[there]})"


@functools.cache
def arrows(*endings: str) -> dict[str, set[str]]:
    """Module -> the modules of bpsx that its files with these endings import or cimport."""
    found: dict[str, set[str]] = {}
    for path in files("src", endings=endings):
        found.setdefault(module_of(path), set()).update(imports(path))
    return found


def test_no_import_is_circular():
    every = arrows(".py", ".pyx", ".pxd")
    TopologicalSorter(
        {module: imported & every.keys() - {module} for module, imported in every.items()}
    ).prepare()  # raises CycleError, which names the modules


#: Files of bodies that several modules compile: small ones, or what they share by its nature.
SHARED = {
    "core.busy": "one loop, which also runs while lanes come late",
    "core.late": "called by the driver, and by the thread that connects late lanes",
    "core.targets": "places of keys, also for TERM",
    "core.slab": "tasks and partitions, made and freed by all",
    "core.partition": "the structs that all see, with their one-line checks",
    "core.logs": "results that a handle and a tensor keep",
    "core.wire": "headers, of workers and lanes",
    "core.transitions": "tables of workers and lanes",
    "core.trace.recorder": "records of workers and lanes",
    "core.local.ring": "a struct that all see, with its one-line checks",
    "core.gpu.device": "a struct that all see, with its one-line checks",
    "core.gpu.pinned_pool": "the machine's setup takes the size of a slab from it",
    "core.gpu.reclaim": "handles give memory back",
    "core.codec.made": "tensors own what compression made",
    "core.codec.state": "tensors own what compression made",
    "core.codec.low_rank": "tensors own what compression made",
}


def bodies() -> list[Path]:
    """The .pxd files of the driver and of the lanes that have functions with bodies."""
    body = re.compile(r"^cdef [^\n=]*\([^)]*\)[^\n]*:$", re.MULTILINE)
    every = files("src/bpsx/core", "src/bpsx/server", endings=(".pxd",))
    return [path for path in every if body.search(path.read_text())]


@pytest.mark.parametrize("path", bodies(), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_driver_is_compiled_once(path):
    """A file of bodies costs build time and a copy of its code in each module that reaches it."""

    def reached(module: str, seen: set[str]) -> set[str]:
        for other in arrows(".pyx", ".pxd").get(module, set()) - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    body = module_of(path)
    compiled = {
        module_of(other)
        for other in files("src", endings=(".pyx",))
        if body in reached(module_of(other), set())
    }
    if body.removeprefix("bpsx.") in SHARED:
        assert len(compiled) > 1
    else:
        assert compiled == {"bpsx._core" if ".core." in body else "bpsx.server._engine"}


def test_there_are_few_packages_and_each_has_a_layer():
    rooms = {
        p.stem
        for p in (ROOT / "src" / "bpsx").iterdir()
        if p.is_dir() and any(p.glob("*.py")) or p.suffix in (".py", ".pyx")
    } - {"__init__"}
    assert rooms == set(LAYERS)
    assert len(rooms) <= 24


def test_the_plugin_package_is_a_frameworks_only_way_in():
    shared = (
        "bpsx.plugin",
        "bpsx.api.verbs",
        "bpsx.api.lifecycle",
        "bpsx.api.staged",
        "bpsx.session.refusals",
        "bpsx.system.tracebacks",
        "bpsx.system.sync",
        "bpsx.system.threads",
        "bpsx.errors",
        "bpsx.dtypes",
        "bpsx._core",
    )
    for framework, more in (
        ("torch", ()),
        ("tensorflow", ()),
        ("mxnet", ()),
        ("keras", ("bpsx.tensorflow",)),
    ):
        for path in files(f"src/bpsx/{framework}"):
            for imported in imports(path):
                assert imported.startswith((f"bpsx.{framework}", *shared, *more)), (path, imported)


def test_the_tree_in_the_architecture_page_is_there():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in (ROOT / "src" / "bpsx").iterdir():
        if (
            path.suffix in (".py", ".pyx")
            and not path.name.startswith("__")
            or path.is_dir()
            and path.name != "__pycache__"
        ):
            assert path.name in text, f"ARCHITECTURE.md does not mention {path.name}"


#: The parts that transports have in common. Each is in the file of its name, in every transport.
PARTS = {"endpoint", "connection", "send", "receive", "allocator", "handshake"}
#: Folder of transports/ -> its other files, and why it needs them.
TRANSPORTS = {
    "zeromq": {
        "auth": "libzmq asks a thread of ours (ZAP) which connections to accept",
        "libzmq": "libzmq's functions, which are looked up in the library that pyzmq has loaded",
    },
    "tcp": {},
    "shm": {},
    "rdma": {
        "adapter": "Python objects that own an adapter's resources",
        "ended": "memory of an ended connection, which the adapter may still use",
        "gid": "the choice of adapter, port and address",
        "memory_region": "memory registered with the adapter",
        "progress": "kernel events and waiting messages, which concern sending and receiving alike",
        "verbs": "libibverbs' functions",
    },
    "threaded": {
        "part": "an I/O thread with its commands: the connections are the inner endpoints'",
        "fifo": "the queue of commands and of messages",
    },
    # One file on purpose: it is there to be copied.
    "loopback": {},
    "sockets": {
        "buffers": "the size of a socket's buffers",
        "congestion": "the choice of congestion control",
        "epoll": "epoll's functions",
        "listener": "accepts connections, and dials",
        "peers": "peers by number, and losses",
    },
}
#: Those that have connections of their own.
CONNECTED = ("zeromq", "tcp", "shm", "rdma")


def parts_in(folder):
    """Return the names of the files of a transport, without endings."""
    suffixes = (".py", ".pyi", ".pyx", ".pxd")
    return {p.stem for p in folder.iterdir() if p.suffix in suffixes} - {"__init__"}


def assert_parts_fit(transport, parts):
    """Fail unless the files of a transport have the names that they should have."""
    own = set(TRANSPORTS[transport])
    assert parts <= PARTS | own, f"{transport}: {parts - PARTS - own} has no name of PARTS"
    assert own <= parts, f"{transport}: {own - parts} is gone"
    missing = {"endpoint", "connection", "send", "receive"} - parts
    assert transport not in CONNECTED or not missing, f"{transport}: {missing} is missing"


def test_every_transport_is_listed():
    folders = {p.parent.name for p in (ROOT / "src/bpsx/transports").glob("*/__init__.py")}
    assert folders == set(TRANSPORTS)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transports_name_the_same_parts_alike(transport):
    assert_parts_fit(transport, parts_in(ROOT / "src/bpsx/transports" / transport))


@pytest.mark.parametrize("transport", CONNECTED)
def test_the_data_plane_is_not_in_the_endpoint(transport):
    text = (ROOT / "src/bpsx/transports" / transport / "endpoint.pyx").read_text()
    assert "noexcept nogil:" not in text
