"""State of compression in the files in which Keras and TensorFlow save an optimizer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from bpsx.tensorflow.checkpoint import Archived
from bpsx.tensorflow.exchange import Exchange

#: Class by which Keras recognizes attributes to save. It has no public name; without it Keras saves
#: nothing for that attribute.
_Saveable: Any = next(
    (cls for cls in keras.optimizers.Optimizer.__mro__ if cls.__name__ == "KerasSaveable"), object
)
_KEY = "state"


class KerasCompressionState(Archived, _Saveable):  # type: ignore[misc]
    """State of compression of one exchange's gradients, as Keras and TensorFlow save it.

    With a file that lacks it, such as one of a run without compression, the state begins anew.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def _save(self) -> dict[str, Any]:
        return self._exchange.keeping.save()

    def _load(self, saved: dict[str, Any]) -> None:
        self._exchange.load(saved)

    def _obj_type(self) -> str:
        return "Optimizer"  # Keras does not look into such an object's attributes

    def save_own_variables(self, store: Any) -> None:
        """Save the state; Keras calls this instead of :meth:`serialize`."""
        store[_KEY] = np.frombuffer(self.serialize(), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Load the state; Keras calls this instead of :meth:`deserialize`."""
        there = _KEY in set(store.keys())
        self.deserialize(np.asarray(store[_KEY]).tobytes() if there else b"")
