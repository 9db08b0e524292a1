"""Lets the momentum of ``compression_params`` replace an optimizer's own momentum.

The optimizer's momentum is taken over, and switched off while the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from bpsx.errors import ConfigError
from bpsx.plugin import adapter

WHAT = "compression_params: momentum='nesterov'"


def has_momentum(optimizer: Any, attribute: str = "momentum") -> bool:
    """Whether ``optimizer`` has a momentum.

    ``attribute``: where it is kept, which differs in v1 optimizers; there it may be a tensor.
    """
    return _is_one(vars(optimizer).get(attribute))


def _is_one(value: Any) -> bool:
    return value is not None and (not isinstance(value, (int, float)) or value != 0)


class Momentum:
    """Momentum of an optimizer, or of one of its groups of parameters.

    ``optimizer``: returns the optimizer. ``kinds``: classes whose momentum is one of gradients,
    which compression can replace. ``key``: the momentum's place among the attributes, or among the
    ``options`` of the optimizer. ``part``: words for the group. One thread at a time may use it,
    but several threads of replicas may be in :meth:`off` together.
    """

    def __init__(
        self,
        optimizer: Callable[[], Any],
        kinds: Sequence[type],
        key: str = "momentum",
        options: Callable[[Any], MutableMapping[str, Any]] = lambda optimizer: optimizer.__dict__,
        part: str = "",
    ) -> None:
        self._optimizer, self._kinds, self._key = optimizer, tuple(kinds), key
        self._options, self._part = options, part
        self._taken: float | None = None  # its value when compression took it over
        self._stays = False  # compression adds none to some gradients
        self._stepping = 0

    @property
    def _held(self) -> MutableMapping[str, Any]:
        """The mapping that holds it."""
        return self._options(self._optimizer())

    @property
    def _whose(self) -> str:
        return self._part + type(self._optimizer()).__name__

    @property
    def is_taken(self) -> bool:
        """Whether compression adds momentum to gradients in place of the optimizer."""
        return self._taken is not None

    @property
    def has_value(self) -> bool:
        """Whether the optimizer has a momentum."""
        return _is_one(self.value)

    @property
    def value(self) -> Any:
        """The optimizer's momentum; in v1 optimizers it may be a tensor."""
        found = self._taken if self._stepping else self._held.get(self._key)
        return 0.0 if found is None else found

    def by_name(self, names: Sequence[str]) -> dict[str, float]:
        """The momentum by name, as :func:`bpsx.plugin.compression_params.choose` takes it."""
        value = self.value
        return (
            dict.fromkeys(names, float(value)) if isinstance(value, (int, float)) and value else {}
        )

    def take_over(
        self, names: Sequence[str], choices: Mapping[str, adapter.CompressionSpec]
    ) -> None:
        """Let compression add the momentum to the gradients of these names, if ``choices`` say so.

        Raises :class:`ConfigError` if compression cannot replace the optimizer's momentum.
        """
        without = [name for name in names if name not in choices or not choices[name].momentum]
        value: Any = self.value
        stays, self._stays = self._stays, self._stays or bool(without)
        if len(without) == len(names) and not self.is_taken:
            return
        if _is_one(value):
            self._check(value)
            if without or stays:
                names_of = f", but not for {', '.join(map(repr, without[:5]))}" if without else ""
                raise ConfigError(
                    f"{WHAT} replaces the momentum of {self._whose} for some gradients{names_of}:"
                    " use it for all of its gradients, or for none"
                )
        if not self._taken:
            self._taken = float(value)

    def _check(self, value: Any) -> None:
        """Raise :class:`ConfigError` unless ``value`` is a number, and a momentum of gradients."""
        if not isinstance(self._optimizer(), self._kinds):
            raise ConfigError(
                f"{WHAT} cannot replace the momentum of {self._whose} ({value}), which is not a"
                f" momentum of gradients; it can replace that of"
                f" {' and '.join(kind.__name__ for kind in self._kinds)}. Leave out one of the two"
                " momenta"
            )
        if not isinstance(value, (int, float)):
            raise ConfigError(
                f"{WHAT} replaces the momentum of {self._whose}, which is a"
                f" {type(value).__name__}: give a number"
            )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the optimizer has no momentum, if compression has taken it over.

        Raises :class:`ConfigError` if the optimizer's momentum has changed since: the momentum that
        compression adds to gradients would not follow.
        """
        taken = self._taken
        if taken is not None and self.value != taken:
            raise ConfigError(
                f"the momentum of {self._whose} has changed from {taken} to {self.value} since"
                f" {WHAT} replaced it. Compression cannot follow: keep it constant (PyTorch's"
                " schedulers: cycle_momentum=False; checkpoints: with the same momentum)"
            )
        if not taken:
            yield
            return
        self._stepping += 1
        self._held[self._key] = 0.0
        try:
            yield
        finally:
            self._stepping -= 1
            if not self._stepping:
                self._held[self._key] = taken


def decay_factors(choices: Mapping[str, adapter.CompressionSpec]) -> dict[str, float]:
    """Return mu by name of the gradients whose weight decay has a momentum; others get none."""
    found = {n: c for n, c in choices.items() if c.momentum and c.compressor == "onebit"}
    return {name: choice.mu for name, choice in found.items()}


class Decayed(Protocol):
    """A weight of SGD whose weight decay has a momentum of its own."""

    #: The momentum's factor, and that of weight decay.
    mu: float
    decay: float
    #: Its array, and that of the momentum; 0 before the first step.
    weight: Any
    momentum: Any

    def end(self, momentum: Any) -> None:
        """If the step was made, keep the ``momentum``, and subtract rate times mu times it."""


@contextmanager
def decay_momentum(weights: Iterable[Decayed]) -> Iterator[None]:
    """Context in which SGD steps, and at whose end weight decay's momentum moves ``weights``.

    It is for gradients that get their momentum on the way from onebit, which would lose the decay.
    BytePS does the same: m = mu m + decay w, and w -= rate mu m besides the optimizer's own step.
    """
    grown = [(of, of.mu * of.momentum + of.decay * of.weight) for of in weights]
    yield
    for of, momentum in grown:
        of.end(momentum)
