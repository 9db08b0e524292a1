"""Object code of kernels in memory, linked by llvmlite.

A process without kernels does not import this module: LLVM's library takes 40 MB of memory and a
tenth of a second.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable

import llvmlite
import llvmlite.binding as llvm

#: Name of the function in each piece of object code.
SYMBOL = "bpsx_kernel"
#: Prefixes of the names of Numba's own functions.
_NUMBAS = ("numba_", "NRT_")


class Function:
    """Object code in memory: a C function at ``address`` for as long as this object lives.

    Raises :class:`ValueError` if the code needs functions that this process does not have.
    """

    def __init__(self, code: bytes) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_triple(llvm.get_process_triple())
        machine = target.create_target_machine(codemodel="jitdefault", jit=True)
        linked = llvm.ObjectFileRef.from_data(code)
        # LLVM ends the process if it cannot resolve a name.
        if missing := _missing(linked):
            raise ValueError(f"it needs {', '.join(missing)}")
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(linked)
        self._engine.finalize_object()
        self.address = int(self._engine.get_function_address(SYMBOL))
        if not self.address:
            raise ValueError(f"it does not define {SYMBOL}")


def _missing(code: llvm.ObjectFileRef) -> list[str]:
    """Return the names that object code needs and this process does not have."""
    process = ctypes.CDLL(None)
    missing = [name for name in _undefined(code) if not hasattr(process, name)]
    if any(name.startswith(_NUMBAS) for name in missing):
        # Numba compiles the raising of exceptions into some functions, which never do.
        from numba.core.registry import cpu_target

        cpu_target.target_context.refresh()
    return [name for name in missing if not llvm.address_of_symbol(name)]


def _undefined(code: llvm.ObjectFileRef) -> Iterable[str]:
    """Yield the names that object code (ELF of 64 bits) needs from elsewhere."""
    sections = {section.name(): section.data() for section in code.sections()}
    names = sections.get(b".strtab", b"")
    for name, _, _, section, _, _ in struct.iter_unpack("<IBBHQQ", sections.get(b".symtab", b"")):
        if name and not section:
            yield names[name : names.index(b"\0", name)].decode()


def version() -> str:
    """Return llvmlite's version."""
    return str(llvmlite.__version__)


def processor() -> tuple[str, str, str]:
    """Return LLVM's names of this platform, its processor, and the processor's features."""
    return (
        llvm.get_process_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
    )
