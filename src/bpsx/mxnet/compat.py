"""Imports MXNet 1.9.1, which was written for Python and NumPy of 2021, with current releases.

MXNet's modules see NumPy through a :class:`Facade` that has the names which NumPy has dropped
since. They also see a ``distutils.version``, which Python has dropped. NumPy itself is unchanged:
no other code sees these names. Modules that MXNet imports later are treated in the same way.
"""

from __future__ import annotations

import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import re
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from bpsx.plugin import adapter

log = logging.getLogger("bpsx.mxnet")
#: Names of NumPy 1.19, with their equivalents of today.
_NAMES: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "object": object,
    "str": str,
    "Inf": np.inf,
    "PINF": np.inf,
    "NINF": -np.inf,
    "NAN": np.nan,
    "NaN": np.nan,
    "PZERO": 0.0,
    "NZERO": -0.0,
    "alltrue": np.all,
    "sometrue": np.any,
    "product": np.prod,
    "round_": np.round,
    "in1d": np.isin,
    "trapz": getattr(np, "trapezoid", None),
    "msort": lambda a: np.sort(a, axis=0),
}
#: Financial functions, which left NumPy for a package of their own. MXNet re-exports them; no
#: script is known to call them.
_GONE = ("mirr", "npv", "pmt", "ppmt", "pv", "rate")
NAME = "mxnet"


def _gone(name: str) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"mxnet.numpy.{name}: NumPy has had no {name} since 1.20; use the package"
            " numpy-financial"
        )

    function.__name__ = name
    return function


def missing() -> dict[str, Any]:
    """Return the names that the installed NumPy lacks, with their replacements."""
    known = vars(np)
    return {
        name: value
        for name, value in {**_NAMES, **{name: _gone(name) for name in _GONE}}.items()
        if name not in known
    }


class Facade(types.ModuleType):
    """A view of a module with a few more names, for reading only."""

    def __init__(self, module: types.ModuleType, names: dict[str, Any]) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(
            {
                key: value
                for key, value in vars(module).items()
                if key.startswith("__") and key != "__getattr__"
            }
        )
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._module), *self.__dict__})


def _of_scipy(scipy: types.ModuleType) -> Facade:
    """Return SciPy with ``scipy.sparse.csr.csr_matrix``, which SciPy deprecates and will drop."""
    return Facade(scipy, {"sparse": Facade(scipy.sparse, {"csr": scipy.sparse})})


@functools.total_ordering
class _Version:
    """Version number with which MXNet compares NumPy's: the numbers in the text."""

    def __init__(self, text: str) -> None:
        self._numbers = [int(number) for number in re.findall(r"\d+", text)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and self._numbers == other._numbers

    def __lt__(self, other: _Version) -> bool:
        return self._numbers < other._numbers

    __hash__ = None  # type: ignore[assignment]


def _distutils() -> types.ModuleType:
    """Return a module for ``from distutils.version import LooseVersion``, as in Python 3.9."""
    made = types.ModuleType("distutils.version")
    made.__dict__.update(LooseVersion=_Version, StrictVersion=_Version)
    return made


class _Loader(importlib.abc.Loader):
    """Executes a module of MXNet's, for which ``import numpy`` gives the facade.

    Python's deprecation and syntax warnings about MXNet's old code are suppressed.
    """

    def __init__(self, loader: Any, numpy: Facade) -> None:
        self._loader, self._numpy = loader, numpy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        real, numpy, versions = builtins.__import__, self._numpy, _distutils()

        def import_(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == "distutils.version":
                return versions
            found = real(name, *args, **kwargs)
            if name == "scipy.sparse":
                return _of_scipy(found)
            return numpy if found is np else found

        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", SyntaxWarning)
            self._loader.exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds MXNet's modules in their usual places, and has :class:`_Loader` execute them."""

    def __init__(self, numpy: Facade) -> None:
        self._numpy = numpy

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != NAME and not fullname.startswith(NAME + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._numpy)
        return spec


def prepare() -> None:
    """Make ``import mxnet`` work with this Python and NumPy, from now on.

    Logs its changes at level INFO.
    """
    if NAME in sys.modules:
        return
    names = missing()
    sys.meta_path.insert(0, _Finder(Facade(np, names)))
    adapter.log_from_import(
        log,
        "MXNet's modules, and no others, get a distutils.version and these names that NumPy %s no"
        " longer has: %s",
        np.__version__,
        ", ".join(names) or "none",
    )
