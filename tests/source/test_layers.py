"""A file imports only from layers below its own. The table is the tree in ARCHITECTURE.md."""

from __future__ import annotations

from graphlib import TopologicalSorter

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


def test_no_import_is_circular():
    known = {module_of(path) for path in files("src")}
    arrows = {
        module_of(path): {
            imported for imported in imports(path) if imported in known - {module_of(path)}
        }
        for path in files("src")
    }
    TopologicalSorter(arrows).prepare()  # raises CycleError, which names the modules


DRIVER = [
    "loop",
    "stage",
    "send",
    "receive",
    "queue",
    "notify",
    "gpu.choice",
    "gpu.collectives",
    "gpu.copies",
    "local.reduce",
]


@pytest.mark.parametrize("body", DRIVER)
def test_the_driver_is_compiled_once(body):
    """A file of bodies costs build time and a copy of its code in each module that reaches it."""
    arrows: dict[str, set[str]] = {}
    for path in files("src"):
        if path.suffix in (".pyx", ".pxd"):
            arrows.setdefault(module_of(path), set()).update(imports(path))

    def reached(module: str, seen: set[str]) -> set[str]:
        for other in arrows.get(module, set()) - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    compiled = {
        module_of(path)
        for path in files("src")
        if path.suffix == ".pyx" and f"bpsx.core.{body}" in reached(module_of(path), set())
    }
    assert compiled == {"bpsx._core"}


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
