"""What compression keeps of gradients, as an entry of the optimizer's ``state_dict()``: tensors,
numbers and strings only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bpsx.errors import ConfigError
from bpsx.plugin import adapter

#: The entry's key.
KEY = "bpsx"
_VERSION = 1
#: An entry of a run in which nothing had been compressed yet.
NOTHING: dict[str, Any] = {"version": _VERSION, "compression": {}}


def save(wires: Mapping[str, str]) -> dict[str, Any]:
    """The entry.

    ``wires``: what each parameter's gradient is called on the wire, of those that are compressed;
    none of them may be under way.
    """
    saved = adapter.session().compressing.save(wires.values())
    kept = {
        name: {
            k: torch.from_numpy(v.copy()) if hasattr(v, "dtype") else v
            for k, v in saved[wire].items()
        }
        for name, wire in wires.items()
        if wire in saved
    }
    return {"version": _VERSION, "compression": kept}


def load(entry: Any, wires: Mapping[str, str]) -> None:
    """Put back what :func:`save` has made; what is not in it begins anew.

    Raises :class:`ConfigError` for what is no such entry, and as
    :meth:`bpsx.compression.manager.Compressing.restore`.
    """
    if (
        not isinstance(entry, Mapping)
        or entry.get("version") != _VERSION
        or not isinstance(entry.get("compression"), Mapping)
    ):
        raise ConfigError(
            f"load_state_dict: {KEY!r} holds no state of compression that this version of bpsx"
            " knows"
        )
    given = entry["compression"]
    compressing = adapter.session().compressing
    compressing.restore(
        {wires[name]: _arrays(state) for name, state in given.items() if name in wires}
    )
    compressing.forget([wire for name, wire in wires.items() if name not in given])


def _arrays(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state  # refused below
    return {k: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
