"""A file imports only from layers below its own. The table is ARCHITECTURE.md's tree."""

from __future__ import annotations

import pytest

from source.places import ROOT, files, imports, module_of

# Most specific first; a smaller number is a higher layer. The leaves, from 8 on, may be imported by all.
LAYERS = [
    ("bpsx.torch", 1), ("bpsx.keras", 0.9), ("bpsx.tensorflow", 1), ("bpsx.mxnet", 1), ("bpsx.choices", 1.4),
    ("bpsx.horovod", 1.4), ("bpsx.objects", 1.4), ("bpsx.encoding", 1.4),
    ("bpsx.owners", 1.4), ("bpsx.startup_check", 1.4), ("bpsx.casting", 1.4),
    ("bpsx.momentum", 1.4), ("bpsx.archive", 1.4), ("bpsx.keeping", 1.4), ("bpsx._calls", 1.44), ("bpsx.calls", 1.47), ("bpsx._adapter", 1.5),
    ("bpsx.torchrun", 1.8), ("bpsx.api", 2), ("bpsx.arrays", 2.2), ("bpsx.session", 2.5), ("bpsx.joining", 2.7), ("bpsx.compressing", 2.65),
    ("bpsx.declaring", 2.55), ("bpsx.devices", 2.68), ("bpsx.coding", 2.67), ("bpsx.gpu_kernels", 2.66), ("bpsx.saving", 2.8),
    ("bpsx.lane_contact", 2.7), ("bpsx.declarations", 2.52), ("bpsx.speed", 9),
    ("bpsx.compression", 3), ("bpsx._exit", 4),
    ("bpsx.partitioner", 3.1), ("bpsx.placement", 3), ("bpsx.cards", 3), ("bpsx.pipeline", 3),
    ("bpsx.reporting", 2.7), ("bpsx.neighbourhood", 2.7), ("bpsx.timeline", 2.8),
    ("bpsx._watch", 4), ("bpsx._core", 4), ("bpsx._handle", 4.1), ("bpsx._tensor", 4.2), ("bpsx.core", 4.5),
    ("bpsx.local._cuda", 4.4), ("bpsx.local.cuda", 4.45), ("bpsx.local.topology", 8), ("bpsx.local", 3.5),
    ("bpsx.companions", 7), ("bpsx.transports.abi", 6), ("bpsx.transports", 5), ("bpsx.kernels.abi", 6), ("bpsx.kernels", 5),
    ("bpsx.launch", 0), ("bpsx.server", 2), ("bpsx.rendezvous.__main__", 2), ("bpsx.rendezvous", 2.6),
    ("bpsx.staged", 9), ("bpsx.counting", 9), ("bpsx.resizing", 9), ("bpsx.tracebacks", 9.5),
    ("bpsx.errors", 11), ("bpsx.secret", 10.5), ("bpsx.config", 10), ("bpsx.dtypes", 10), ("bpsx.logs", 9),
    ("bpsx.arguments", 10), ("bpsx.clock", 9), ("bpsx.forking", 9), ("bpsx.host", 8), ("bpsx.process_exit", 9), ("bpsx.host_arrays", 2.2),
    ("bpsx.spawned", 9), ("bpsx.__main__", -1), ("bpsx.asking", 9), ("bpsx", 0.5),
]
# Crossings that are meant, with their reason.
ALLOWED = {
    ("bpsx.host", "bpsx.transports.address"),           # which address is ours: functions on addresses only
    ("bpsx.transports.zeromq", "bpsx.core.sync"),       # atomics and clock: no state of the core
    ("bpsx.transports.loopback", "bpsx.core.sync"),
    ("bpsx.transports.tcp", "bpsx.core.sync"), ("bpsx.transports.connection", "bpsx.core.sync"), ("bpsx.transports.incoming", "bpsx.core.sync"),
    *((f"bpsx.transports.{module}", "bpsx.core.sync") for module in ("shared", "neighbour", "peers", "gated", "rdma", "queue_pair", "written",
                                                                     "arrived", "driven")),
}


def layer(module: str) -> float:
    return next(number for name, number in LAYERS if module == name or module.startswith(name + "."))


def group(module: str) -> str:
    return next(name for name, _ in LAYERS if module == name or module.startswith(name + "."))


@pytest.mark.parametrize("path", files("src"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    module = module_of(path)
    if module == "bpsx":
        return      # the face: re-exports the verbs, lazily
    for imported in imports(path):
        if imported == "bpsx.__version__" or group(imported) == group(module) or (module, imported) in ALLOWED:
            continue
        assert layer(imported) > layer(module), f"{module} (layer {layer(module)}) imports {imported} (layer {layer(imported)})"


def test_the_adapter_is_a_plugins_only_way_in():
    engine = ("bpsx._calls", "bpsx.calls", "bpsx.momentum", "bpsx.archive", "bpsx.keeping")
    for plugin, more in (("torch", ()), ("tensorflow", engine), ("mxnet", engine), ("keras", ("bpsx.tensorflow",))):
        for path in files(f"src/bpsx/{plugin}"):
            for imported in imports(path):
                allowed = (f"bpsx.{plugin}", "bpsx._adapter", "bpsx.choices", "bpsx.horovod", "bpsx.objects", "bpsx.encoding",
                           "bpsx.owners", "bpsx.startup_check", "bpsx.casting", "bpsx.api",
                           "bpsx.errors", "bpsx.staged", "bpsx.counting", "bpsx.tracebacks", "bpsx.dtypes", "bpsx._core",
                           "bpsx.core.sync", *more)
                assert imported.startswith(allowed), (path, imported)


def test_the_tree_in_the_architecture_page_is_there():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in (ROOT / "src" / "bpsx").iterdir():
        if path.suffix in (".py", ".pyx") and not path.name.startswith("__") or path.is_dir() and path.name != "__pycache__":
            assert path.name in text, f"ARCHITECTURE.md does not mention {path.name}"
