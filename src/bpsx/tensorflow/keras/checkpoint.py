"""What compression keeps of an optimizer's gradients, in what Keras and TensorFlow save of it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from bpsx.tensorflow.checkpoint import Archived
from bpsx.tensorflow.exchange import Exchange

#: What Keras looks for when it walks through the attributes of what it saves. It has no public
#: name; without it nothing is saved there.
_Saveable: Any = next(
    (cls for cls in keras.optimizers.Optimizer.__mro__ if cls.__name__ == "KerasSaveable"), object
)
_KEY = "state"


class Kept(Archived, _Saveable):  # type: ignore[misc]
    """Of one exchange.

    A file without it, as of a run without compression, makes everything begin anew.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def _save(self) -> dict[str, Any]:
        return self._exchange.keeping.save()

    def _load(self, saved: dict[str, Any]) -> None:
        self._exchange.load(saved)

    def _obj_type(self) -> str:
        return "Optimizer"  # whose attributes Keras does not look into

    def save_own_variables(self, store: Any) -> None:
        """Keras's way to :meth:`serialize`."""
        store[_KEY] = np.frombuffer(self.serialize(), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Keras's way to :meth:`deserialize`."""
        there = _KEY in set(store.keys())
        self.deserialize(np.asarray(store[_KEY]).tobytes() if there else b"")
