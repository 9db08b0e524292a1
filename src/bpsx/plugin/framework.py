"""Contract between a framework and bpsx: what a framework gives, and what it gets for that.

A plugin is a package ``bpsx/<framework>/``, or a module outside of bpsx. It derives a class from
:class:`Framework` and makes one object of it, which describes tensors to the modules of this
package. It hands over memory in one of two ways:

- A :class:`~bpsx.plugin.adapter.TensorView` to ``adapter.session()``, whose ``push_pull`` and
  ``broadcast`` return a handle.
- A ``Call`` (``async_op.pxd``), for a framework with an engine that executes operations.

For that it gets the parts that optimizers and their users need, one module each:

- ``compression``, ``compression_params``: compressors, and the checks of a user's choice.
- ``exchange``: names and compression of an optimizer's gradients. ``momentum``, ``checkpoint``
  and ``archive`` belong to it.
- ``async_training``: the step of asynchronous training.
- ``names``, ``owners``: unique names, and which optimizer owns a name.
- ``startup``: the first step's comparison of names and weights among workers.
- ``objects``, ``encoding``: Python objects as messages.
- ``horovod``: Horovod's functions.

``tests/frameworks/test_plugin_contract.py`` holds each plugin to this contract.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from bpsx.dtypes import dtype_named
from bpsx.errors import BpsxError
from bpsx.plugin.startup import digest_of

Tensor = TypeVar("Tensor")


class UnsupportedTensor(BpsxError, TypeError):
    """A value is no tensor of the framework, or bpsx cannot use the tensor's memory.

    The message names the value and says what is allowed.
    """


class Framework(abc.ABC, Generic[Tensor]):
    """Description of one framework's tensors.

    The abstract methods are what the framework gives; none of them exchanges anything. The others
    are made of them. Methods are thread-safe.
    """

    #: Module that users import, such as ``bpsx.torch``; for messages.
    module: ClassVar[str]
    #: By name of a dtype that cannot be summed: what to send instead.
    instead: ClassVar[Mapping[str, str]] = {}

    @abc.abstractmethod
    def dtype_of(self, tensor: Tensor) -> str:
        """Return the name of the tensor's dtype; see ``bpsx.dtypes`` for those that bpsx sums."""

    @abc.abstractmethod
    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the tensor's shape."""

    @abc.abstractmethod
    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """Return a tensor of the same values, with elements of ``dtype``."""

    @abc.abstractmethod
    def sample(self, tensor: Tensor) -> bytes:
        """Return some elements' bytes, the same for equal tensors, in the order of ``sample_of``.

        Empty: there is nothing to compare, such as for a variable without a value.
        """

    def check_summable(self, tensor: Tensor, what: str) -> str:
        """Return the name of the tensor's dtype. ``what`` names the tensor in the error.

        Raises :class:`~bpsx.dtypes.UnsupportedDType`, which says what to send instead.
        """
        name = self.dtype_of(tensor)
        return dtype_named(name, what, self.instead.get(name, "")).name

    def is_floating(self, tensor: Tensor) -> bool:
        """Whether the tensor's elements are real numbers and no integers."""
        return self.dtype_of(tensor).startswith(("float", "bfloat"))

    def unnamed(self, verb: str, tensor: Tensor, rows: bool = False) -> str:
        """Return the name of an operation that was given none: its dtype and shape.

        ``rows``: only a row's shape, since the number of rows may differ between workers.

        Calls of one name are matched in the order in which each worker makes them. A counter would
        make a new name for each call, and names are never forgotten.
        """
        shape = self.shape_of(tensor)[1:] if rows else self.shape_of(tensor)
        return f"{verb}.noname.{self.dtype_of(tensor)}.{shape}"

    def digest_of(self, weights: Mapping[str, Any]) -> int:
        """Return the digest of a sample of each weight, for ``startup``. 0: none has a value."""
        return digest_of({label: self.sample(weight) for label, weight in weights.items()})
