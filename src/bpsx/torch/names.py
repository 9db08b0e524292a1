"""Names of gradients, each of which belongs to at most one live optimizer or module.

So workers cannot confuse gradients of the same name.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.exchange import PREFIX
from bpsx.plugin.owners import Owner, claim, is_owned, next_ordinal

#: Followed by a parameter's id: a name that only live optimizers of this process use. Of two
#: optimizers without names, the later one owns the parameter.
_UNNAMED = "Parameter of an optimizer without names: "


class Exchanging(Protocol):
    """The parts of an exchange that its owner uses.

    ``outlives``: the exchange may keep its model, and so the optimizer, alive without other
    references.
    """

    outlives: bool

    @property
    def busy(self) -> bool: ...

    @property
    def parameters(self) -> list[torch.Tensor]: ...

    def detach(self) -> None: ...


class ExchangeOwner(Owner):
    """Owner of the names of one exchange's gradients.

    ``ordinal``: the optimizer's number among those with generated names; None: it was given names.
    """

    def __init__(self, what: str, exchange: Exchanging, ordinal: int | None) -> None:
        super().__init__(what)
        self._exchange, self.ordinal = weakref.ref(exchange), ordinal
        self.session: object = None  # session of the last exchange, or of the creation

    def claim(self, names: Mapping[str, torch.Tensor]) -> None:
        """Register parameters by name.

        Raises :class:`ConfigError` if another live owner has one of the names.
        """
        self.session = adapter.session()
        wanted: dict[str, Any] = {PREFIX + name: parameter for name, parameter in names.items()}
        if self.ordinal is not None:
            wanted |= {f"{_UNNAMED}{id(parameter)}": parameter for parameter in names.values()}
        claim(self, wanted)

    def added_name(self, group: int, index: int, first: str) -> str:
        """Return the name of a parameter in a group that is added later.

        ``first``: name of this owner's first parameter.
        """
        if self.ordinal is not None:
            return generated_name(self.ordinal, group, index)
        return f"{generated_name(0, group, index)} beside {first}"

    def refusal(self, name: str, other: Owner, same: bool) -> str:
        """Return why ``other`` may not take the name, or "".

        An optimizer for the same parameters replaces this one, unless gradients are in flight. An
        optimizer for other parameters also replaces it if only this one's optimizer still refers to
        its parameters, as in the next fold of a cross-validation.
        """
        exchange = self._exchange()
        if exchange is None or self.session is not adapter.session():
            return ""  # it belongs to a job that has ended
        if same:
            return (
                f"the {self.what} has gradients of the same parameters under way; call its step()"
                " or zero_grad() first, or delete it"
                if exchange.busy
                else ""
            )
        if exchange.outlives and not exchange.busy or not _are_in_use(exchange.parameters):
            return ""
        return (
            f"{name.removeprefix(PREFIX)!r} is also the name of a parameter of the {self.what},"
            " which is still alive, so gradients of the two would be added to each other. Give"
            " different names (named_parameters=[(f'second.{n}', p) for n, p in"
            " model.named_parameters()]), or delete the other optimizer first"
        )

    def replace(self, by: Owner) -> None:
        """Remove the hooks too."""
        super().replace(by)
        exchange = self._exchange()
        if exchange is not None:
            exchange.detach()


def generated_name(ordinal: int, group: int, index: int) -> str:
    """Return a parameter's name in the optimizer without names that has number ``ordinal``."""
    return f"push_pull.noname.{f'{ordinal}.' if ordinal else ''}{group}.{index}"


def new_ordinal() -> int:
    """Return the number of a new optimizer without names.

    The number is the same on all workers that create the same optimizers in the same order. Raises
    :class:`~bpsx.errors.NotInitializedError`.
    """
    return next_ordinal(
        adapter.session(), "optimizer", lambda n: is_owned(PREFIX + generated_name(n, 0, 0))
    )


def _are_in_use(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether a module, a namespace or another object refers to a parameter by name.

    Code that can reach the parameters only through their optimizer cannot train them.
    """
    ids = {id(p) for p in parameters}
    return any(
        isinstance(holder, dict)  # PyTorch before 2.5: an OrderedDict in a module
        and any(isinstance(key, str) and id(value) in ids for key, value in holder.items())
        for holder in gc.get_referrers(*parameters)
    )


class Names(list[tuple[str, torch.Tensor]]):
    """Parameters with their names.

    ``ordinal``: the optimizer's number, if the names are generated.
    """

    ordinal: int | None = None


def names_of(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, torch.Tensor]] | None,
    verb: str = "DistributedOptimizer",
) -> Names:
    """Return the optimizer's parameters with their names, most urgent first, each once.

    Raises :class:`ConfigError`.
    """
    ours = {
        id(p): (g, i, p)
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
    if named is None:
        ordinal = new_ordinal()
        names = Names((generated_name(ordinal, g, i), p) for g, i, p in ours.values())
        names.ordinal = ordinal
        return names
    # For these types the message names the type of the argument; the type of its items says
    # nothing.
    whole = not isinstance(named, Iterable) or isinstance(
        named, (Mapping, str, bytes, torch.Tensor, torch.nn.Module)
    )
    pairs: list[Any] = [named] if whole else list(named)
    for pair in pairs:
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], torch.Tensor)
        ):
            raise ConfigError(
                f"{verb}: named_parameters must be (name, parameter) pairs, as"
                f" model.named_parameters() gives them, not {type(pair).__name__}"
            )
    twice = sorted(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
    if twice:
        raise ConfigError(
            f"{verb}: named_parameters contains these names twice: {', '.join(twice)}"
        )
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, p in pairs:
        if id(p) in ours:
            # A shared parameter under several names counts once.
            first.setdefault(id(p), (name, p))
    unnamed = [
        f"group {g}, index {i}, shape {tuple(p.shape)}"
        for key, (g, i, p) in ours.items()
        if key not in first
    ]
    if unnamed:
        instead = (
            ""
            if first
            else (
                " (it contains none of them: the tensors of model.state_dict() are not the"
                " parameters, use model.named_parameters())"
            )
        )
        raise ConfigError(
            f"{verb}: named_parameters lacks {len(unnamed)} of the optimizer's parameters:"
            f" {'; '.join(unnamed[:10])}{instead}"
        )
    return Names(first.values())
