"""The compression state of gradients as an entry of the optimizer's ``state_dict()``.

The entry consists of tensors, numbers and strings only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bpsx.errors import ConfigError
from bpsx.plugin.checkpoint import Keeping

#: Key of the entry.
KEY = "bpsx"
_VERSION = 1
#: Entry of a run in which nothing had been compressed yet.
NOTHING: dict[str, Any] = {"version": _VERSION, "compression": {}}


def save(wires: Mapping[str, str]) -> dict[str, Any]:
    """Return the entry.

    ``wires``: wire names of the compressed gradients by parameter name; none of them may be in
    flight.
    """
    kept = {
        name: {
            k: torch.from_numpy(v.copy()) if hasattr(v, "dtype") else v for k, v in state.items()
        }
        for name, state in Keeping(wires).save().items()
    }
    return {"version": _VERSION, "compression": kept}


def load(entry: Any, wires: Mapping[str, str]) -> None:
    """Restore what :func:`save` has saved; parameters without an entry start afresh.

    Raises :class:`ConfigError` if ``entry`` is not such an entry, and as
    :meth:`bpsx.compression.manager.Compressing.restore`.
    """
    if (
        not isinstance(entry, Mapping)
        or entry.get("version") != _VERSION
        or not isinstance(entry.get("compression"), Mapping)
    ):
        raise ConfigError(
            f"load_state_dict: this version of bpsx cannot read the compression state in {KEY!r}"
        )
    Keeping(wires).load({name: _arrays(state) for name, state in entry["compression"].items()})


def _arrays(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state  # restore() refuses it
    return {k: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
