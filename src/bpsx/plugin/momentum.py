"""Lets the momentum of ``compression_params`` replace an optimizer's own momentum.

The optimizer's momentum is taken over, and switched off while the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bpsx.errors import ConfigError
from bpsx.plugin import adapter

_WHAT = "compression_params: momentum='nesterov'"


def has_momentum(optimizer: Any, attribute: str = "momentum") -> bool:
    """Whether ``optimizer`` has a momentum.

    ``attribute``: where it is kept, which differs in v1 optimizers; there it may be a tensor.
    """
    return _is_one(getattr(optimizer, attribute, 0.0))


def _is_one(value: Any) -> bool:
    return not isinstance(value, (int, float)) or value != 0


class Momentum:
    """Momentum of one optimizer.

    ``attribute``: the optimizer's attribute that holds it. ``of_gradients``: whether it is a
    momentum of gradients, which compression can replace. ``where_it_is``: names of such optimizers,
    for messages. One thread at a time may use it, but several threads of replicas may be in
    :meth:`off` together.
    """

    def __init__(
        self, optimizer: Any, attribute: str, of_gradients: bool, where_it_is: str
    ) -> None:
        self._optimizer, self._attribute, self._of_gradients, self._where_it_is = (
            optimizer,
            attribute,
            of_gradients,
            where_it_is,
        )
        self._taken = 0.0  # its value when compression took it over
        self._stays = False  # compression adds none to some variables' gradients
        self._stepping = 0

    @property
    def has_value(self) -> bool:
        """Whether the optimizer has a momentum."""
        return _is_one(self.value)

    def follow(self, optimizer: Any, of_gradients: bool) -> None:
        """Follow another optimizer that has replaced the earlier one."""
        self._optimizer, self._of_gradients = optimizer, of_gradients

    @property
    def value(self) -> Any:
        """The optimizer's momentum; in v1 optimizers it may be a tensor."""
        return self._taken if self._stepping else getattr(self._optimizer, self._attribute, 0.0)

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
        own = type(self._optimizer).__name__
        value: Any = self.value
        stays, self._stays = self._stays, self._stays or bool(without)
        if not _is_one(value) or len(without) == len(names) and not self._taken:
            return
        if not self._of_gradients:
            raise ConfigError(
                f"{_WHAT} cannot replace {own}'s momentum ({value}), which is not a momentum of"
                f" gradients; it can replace that of {self._where_it_is}. Leave out one of the two"
                " momenta"
            )
        if not isinstance(value, (int, float)):
            raise ConfigError(
                f"{_WHAT} replaces {own}'s momentum, which is a {type(value).__name__}: give a"
                " number"
            )
        if without or stays:
            names_of = f", but not for {', '.join(map(repr, without[:5]))}" if without else ""
            raise ConfigError(
                f"{_WHAT} replaces {own}'s momentum for some variables{names_of}: use it for all"
                " of an optimizer's variables, or for none"
            )
        self._taken = self._taken or float(value)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the optimizer has no momentum, if compression has taken it over.

        Raises :class:`ConfigError` if the optimizer's momentum has changed since: the momentum that
        compression adds to gradients would not follow.
        """
        if not self._taken:
            yield
            return
        if self.value != self._taken:
            raise ConfigError(
                f"the momentum of {type(self._optimizer).__name__} is {self.value}, but was"
                f" {self._taken} when compression_params' momentum='nesterov' replaced it."
                " Compression cannot follow the change: keep the momentum constant"
            )
        self._stepping += 1
        vars(self._optimizer)[self._attribute] = 0.0
        try:
            yield
        finally:
            self._stepping -= 1
            if not self._stepping:
                vars(self._optimizer)[self._attribute] = self._taken
