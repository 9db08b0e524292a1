"""broadcast_parameters: all workers start with one worker's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx

from bpsx.errors import ConfigError
from bpsx.mxnet.ops import behind_engine, check_array, overwrite
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_root
from bpsx.session.refusals import counted_together
from bpsx.system.tracebacks import public

PREFIX = "Parameter."


@public
@counted_together(PREFIX)
@behind_engine
def broadcast_parameters(params: Mapping[str, Any], root_rank: int = 0) -> None:
    """Overwrite all values of ``params`` with worker ``root_rank``'s, and wait until that is done.

    ``params``: a mapping from names to NDArrays of any dtype (each of the two that
    ``Module.get_params()`` returns), or to gluon's Parameters (the result of ``collect_params()``).
    :class:`DistributedTrainer` broadcasts the latter by itself. Names, shapes and dtypes must be
    the same on all workers. Raises :class:`~bpsx.errors.ConfigError`, :class:`UnsupportedTensor`,
    :class:`mxnet.MXNetError`.
    """
    verb = "broadcast_parameters"
    if not isinstance(params, (Mapping, mx.gluon.ParameterDict)):
        raise ConfigError(
            f"{verb}: params is a {type(params).__name__}; expected a mapping from names to"
            " NDArrays or Parameters"
        )
    unnamed = [name for name in params if not isinstance(name, str)]
    if unnamed:
        raise ConfigError(
            f"{verb}: params has the key {unnamed[0]!r}; keys must be names, which are strings"
        )
    root = checked_root(root_rank, verb, adapter.session().size)
    arrays = {name: copies_of(value, f"{verb}: {name!r}") for name, value in params.items()}
    for name in sorted(arrays):
        overwrite(arrays[name], PREFIX + name, root=root)
    for copies in arrays.values():
        for array in copies:
            array.wait_to_read()


def copies_of(value: Any, what: str) -> list[Any]:
    """Return the arrays that hold ``value``; a Parameter has one on each of its devices."""
    if not isinstance(value, mx.gluon.Parameter):
        check_array(value, what)
        return [value]
    try:
        return list(value.list_data())
    except mx.gluon.parameter.DeferredInitializationError:
        raise ConfigError(
            f"{what} has no shape yet. Run the network once first, or let DistributedTrainer"
            " broadcast it when it has a shape"
        ) from None
