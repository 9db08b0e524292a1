"""Who has which gradients' names: one live optimizer or module each, and none that workers could
confuse."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from bpsx.plugin import adapter
from bpsx.plugin.owners import Owner, claim, is_owned, next_ordinal

PREFIX = "Gradient."
#: With the id of a parameter, a name that only live optimizers of this process know: of two without
#: names, the later has the parameter.
_UNNAMED = "Parameter of an optimizer without names: "


class Exchanging(Protocol):
    """What an owner has to know of its exchange.

    ``outlives``: it may keep its model, and with that the optimizer, alive when nobody else does.
    """

    outlives: bool

    @property
    def busy(self) -> bool: ...

    @property
    def parameters(self) -> list[torch.Tensor]: ...

    def detach(self) -> None: ...


class ExchangeOwner(Owner):
    """Owner of the names of one exchange's gradients. ``ordinal``: its number among those with
    generated names; None: it has been given names."""

    def __init__(self, what: str, exchange: Exchanging, ordinal: int | None) -> None:
        super().__init__(what)
        self._exchange, self.ordinal = weakref.ref(exchange), ordinal
        self.session: object = None  # in which it has exchanged, or was made

    def claim(self, names: Mapping[str, torch.Tensor]) -> None:
        """Register parameters by name. Raises :class:`ConfigError` if another live owner has one of
        the names."""
        self.session = adapter.session()
        wanted: dict[str, Any] = {PREFIX + name: parameter for name, parameter in names.items()}
        if self.ordinal is not None:
            wanted |= {f"{_UNNAMED}{id(parameter)}": parameter for parameter in names.values()}
        claim(self, wanted)

    def added_name(self, group: int, index: int, first: str) -> str:
        """The name of a parameter of a group that is added later. ``first``: of this owner's first
        parameter."""
        if self.ordinal is not None:
            return generated_name(self.ordinal, group, index)
        return f"{generated_name(0, group, index)} beside {first}"

    def refusal(self, name: str, other: Owner, same: bool) -> str:
        """An optimizer for the same parameters replaces this one, unless gradients are under way.
        So does one for others, as in the next fold of a
        cross-validation, if nothing but this one's optimizer knows its parameters any more."""
        exchange = self._exchange()
        if exchange is None or self.session is not adapter.session():
            return ""  # of a job that has ended
        if same:
            return (
                f"the {self.what} has gradients of the same parameters under way: call its step() "
                "or zero_grad() first, or delete it"
                if exchange.busy
                else ""
            )
        if exchange.outlives and not exchange.busy or not _are_in_use(exchange.parameters):
            return ""
        return (
            f"{name.removeprefix(PREFIX)!r} is also the name of another parameter, of the "
            f"{self.what}, which is still alive, so that gradients of "
            "the two would be added to each other. Give other names "
            "(named_parameters=[(f'second.{n}', p) for n, p in "
            "model.named_parameters()]), or delete the other optimizer first"
        )

    def replace(self, by: Owner) -> None:
        """Take the hooks off, too."""
        super().replace(by)
        exchange = self._exchange()
        if exchange is not None:
            exchange.detach()


def generated_name(ordinal: int, group: int, index: int) -> str:
    """A parameter's of the ordinal-th optimizer without names."""
    return f"push_pull.noname.{f'{ordinal}.' if ordinal else ''}{group}.{index}"


def new_ordinal() -> int:
    """The number of a new optimizer without names: the same on all workers that make the same in
    the same order. Raises
    :class:`~bpsx.errors.NotInitializedError`."""
    return next_ordinal(
        adapter.session(), "optimizer", lambda n: is_owned(PREFIX + generated_name(n, 0, 0))
    )


def _are_in_use(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a module, a namespace or another object has one of them by name: who knows them by
    their optimizer only cannot train them."""
    ids = {id(p) for p in parameters}
    return any(
        isinstance(holder, dict)  # an OrderedDict in a module of PyTorch before 2.5
        and any(isinstance(key, str) and id(value) in ids for key, value in holder.items())
        for holder in gc.get_referrers(*parameters)
    )
