"""Asynchronous training: a worker steps on its own gradients and pushes its weights' changes."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.compression import Compressor, NoneCompressor

Weight = TypeVar("Weight")
#: A weight's name on the wire is this and its own name.
PREFIX = "Async."


class Weights(abc.ABC, Generic[Weight]):
    """Synchronizes the weights of one optimizer with the servers, which hold them.

    The servers start from worker 0's weights. All workers wait for these before the first step; no
    later step waits for another worker. A plugin fills in how its weights travel. Not thread-safe.
    """

    def __init__(self) -> None:
        # By session: names of the weights that the servers hold.
        self._seeded: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()

    def step(self, update: Callable[[], Any], weights: Mapping[str, Weight]) -> Any:
        """Let ``update`` change ``weights``, push the changes, and take the servers' weights.

        ``weights``: by name. Returns what ``update`` returns.
        """
        seeded = self._seeded.setdefault(adapter.session(), set())
        new = {PREFIX + name: weights[name] for name in weights if name not in seeded}
        seeded.update(weights)  # also if the wait is interrupted: the others do not repeat it
        self._take(new)
        before = {PREFIX + name: self._copy(name, weight) for name, weight in weights.items()}
        result = update()
        self._push({PREFIX + name: weight for name, weight in weights.items()}, before)
        return result

    @abc.abstractmethod
    def _take(self, weights: Mapping[str, Weight]) -> None:
        """Overwrite ``weights`` with worker 0's. ``weights``: by name on the wire; may be empty."""

    @abc.abstractmethod
    def _copy(self, name: str, weight: Weight) -> Any:
        """Return a copy of the weight's values."""

    @abc.abstractmethod
    def _push(self, weights: Mapping[str, Weight], before: Mapping[str, Any]) -> None:
        """Push weight minus copy for each name on the wire, and assign the sums to the weights.

        The sums are what a push_pull without average returns: the servers' weights. The first
        weights are the most urgent.
        """


def refuse_gradients(verb: str, instead: str = "use DistributedOptimizer") -> None:
    """Raise :class:`ConfigError` in asynchronous training. ``instead``: what to use there."""
    if adapter.session().config.asynchronous:
        raise ConfigError(
            f"{verb}: with BYTEPS_ENABLE_ASYNC=1 servers add what workers push to the weights, so"
            f" workers must push changes of weights; {instead}"
        )


def refuse_compression(verb: str, compression: type[Compressor], params: Any) -> None:
    """Raise :class:`ConfigError` if asynchronous training were to compress."""
    if params or compression is not NoneCompressor:
        also = "" if compression is NoneCompressor else f"compression={compression.__name__} and "
        raise ConfigError(
            f"{verb}: {also}compression_params cannot be used with BYTEPS_ENABLE_ASYNC=1, because"
            " servers add what is pushed to the weights, in the weights' own dtype; omit both"
        )
