"""Makes the files from which a virtual machine with a software RDMA device starts: Debian 12's
kernel, and an archive of modules and libraries.

Packages are unpacked into a cache folder, never installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import lzma
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

#: Metapackage that depends on the kernel's package. (The cloud kernel has no rdma_rxe.)
_KERNEL = "linux-image-amd64"
_LIBRARIES = ["ibverbs-providers", "libibverbs1", "libnl-3-200", "libnl-route-3-200"]
#: Modules in the order of loading; their dependencies are added. rdma_rxe requests "crc32" by name,
#: and that has no dependencies by name.
_MODULES = [
    "virtio_pci",
    "9p",
    "9pnet_virtio",
    "overlay",
    "dummy",
    "crc32_generic",
    "ib_uverbs",
    "rdma_rxe",
]
#: Module options: without them "dummy" makes a device when it loads.
_PARAMETERS = {"dummy": "numdummies=0"}
_FILES = ["kernel", "initramfs"]
_INIT = Path(__file__).with_name("init.sh")
_TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86 seabios",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "setpriv": "util-linux",
    "rdma": "iproute2",
}


def why_not() -> str:
    """Return in one line why this host cannot run such a machine; empty if it can."""
    missing = [package for tool, package in _TOOLS.items() if shutil.which(tool) is None]
    if missing:
        return (
            "no virtual machine for RDMA: apt-get install --no-install-recommends"
            f" {' '.join(missing)}"
        )
    return ""


class NoPackages(RuntimeError):
    """Debian 12's packages are not available here."""


def prepare(cache: Path) -> tuple[Path, Path]:
    """Return (kernel, initramfs) in ``cache``, made there if necessary.

    A second process that calls this waits for the first.
    """
    cache.mkdir(parents=True, exist_ok=True)
    ready = cache / f"machine-{_version()}"
    with _locked(cache / "lock"):
        if not ready.exists():
            for old in [
                *cache.glob("machine-*"),
                *cache.glob("making-*"),
            ]:  # of other versions, or of a killed process
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as making:
                _make(Path(making))
                made = Path(making) / "made"
                made.mkdir()
                for name in _FILES:
                    (Path(making) / name).rename(made / name)
                made.rename(ready)
    kernel, initramfs = (ready / name for name in _FILES)
    return kernel, initramfs


def _version() -> str:
    """Return a digest of everything that the files are made from."""
    return hashlib.sha256(_INIT.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path) -> None:
    packages, system = folder / "packages", folder / "system"
    packages.mkdir()
    try:
        _said(
            "apt-get",
            "-q",
            "-o",
            "APT::Sandbox::User=root",
            "download",
            _kernel_package(),
            *_LIBRARIES,
            cwd=packages,
        )
    except RuntimeError as e:
        raise NoPackages(f"no virtual machine for RDMA: {e}") from e
    for package in packages.iterdir():
        _said("dpkg-deb", "-x", str(package), str(system))
    kernel = next((system / "boot").glob("vmlinuz-*"))
    (folder / "kernel").write_bytes(_plain_kernel(kernel.read_bytes()))
    tree = folder / "tree"
    _fill(tree, system)
    names = "\n".join(sorted(str(p.relative_to(tree)) for p in tree.rglob("*")))
    # Not compressed: reading it costs nothing, and an emulated processor is slow at unpacking.
    with (folder / "initramfs").open("wb") as archive:
        subprocess.run(
            ["cpio", "--create", "--format=newc", "--owner=0:0", "--quiet"],
            cwd=tree,
            input=names.encode(),
            stdout=archive,
            check=True,
        )


def _said(*command: str, cwd: Path | None = None) -> str:
    """Return a command's output; if it fails, raise an error with all its output."""
    done = subprocess.run(
        command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def _kernel_package() -> str:
    found = re.search(
        r"Depends: (linux-image-6\.1\.\S+-amd64)$",
        _said("apt-cache", "depends", _KERNEL),
        re.MULTILINE,
    )
    if found is None:
        raise RuntimeError(f"{_KERNEL} is not known here, or is not Debian 12's: apt-get update?")
    return found[1]


def _plain_kernel(image: bytes) -> bytes:
    """Return the ELF file in a bzImage (Linux's Documentation/x86/boot.rst).

    QEMU starts it directly, which saves seconds of unpacking in the machine.
    """
    start = (image[0x1F1] + 1) * 512 + int.from_bytes(image[0x248:0x24C], "little")
    return lzma.LZMADecompressor().decompress(image[start:])


def _fill(tree: Path, system: Path) -> None:
    """Fill the first file system: busybox, modules in the order of loading, and ``layer``, an
    overlay over the host's files.
    """
    for name in (
        "bin",
        "dev",
        "proc",
        "sys",
        "host",
        "changes",
        "root",
        "modules",
        "layer/etc",
        "layer/usr/lib",
    ):
        (tree / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, tree / "bin")
    for applet in ("sh", "mount", "insmod", "mkdir", "chroot", "reboot"):
        (tree / "bin" / applet).symlink_to("busybox")
    shutil.copy(_INIT, tree / "init")
    (tree / "init").chmod(0o755)
    modules = list(
        _in_order(
            _MODULES, {p.stem.replace("-", "_"): p for p in (system / "lib/modules").rglob("*.ko")}
        )
    )
    for module in modules:
        shutil.copy(module, tree / "modules")
    (tree / "modules" / "order").write_text(
        "".join(f"{module.name} {_PARAMETERS.get(module.stem, '')}\n" for module in modules)
    )
    shutil.copytree(system / "etc/libibverbs.d", tree / "layer/etc/libibverbs.d")
    for libraries in (
        system / "usr/lib/x86_64-linux-gnu",
        system / "lib/x86_64-linux-gnu",
    ):  # on the host /lib is /usr/lib
        if libraries.is_dir():
            shutil.copytree(
                libraries,
                tree / "layer/usr/lib/x86_64-linux-gnu",
                symlinks=True,
                dirs_exist_ok=True,
            )


def _in_order(names: Iterable[str], have: dict[str, Path]) -> Iterator[Path]:
    """Yield the modules, each after its declared dependencies.

    Debian's packages have no modules.dep.
    """
    done: set[str] = set()

    def visit(name: str) -> Iterator[Path]:
        if name in done:
            return
        done.add(name)
        depends = re.search(rb"\0depends=([^\0]*)\0", have[name].read_bytes())
        assert depends is not None, name
        for other in filter(None, depends[1].decode().split(",")):
            yield from visit(other.replace("-", "_"))
        yield have[name]

    for name in names:
        yield from visit(name)
