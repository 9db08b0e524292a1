"""Exchange of one optimizer's gradients: their names on the wire and their compression."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bpsx.api.lifecycle import finish
from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.async_training import refuse_compression
from bpsx.plugin.checkpoint import Keeping, by_place
from bpsx.plugin.compression import Compressor, NoneCompressor, check_not_both
from bpsx.plugin.compression_params import Params, check_params, choose
from bpsx.plugin.momentum import Momentum
from bpsx.plugin.owners import Owner, claim, owner_of

log = logging.getLogger("bpsx.plugin")
#: A gradient's name on the wire is this and its parameter's name.
PREFIX = "Gradient."
#: TensorFlow and MXNet: under this prefix and the first parameter's name workers count how many of
#: them have used each gradient. PyTorch does so under a prefix of its own.
USED_COUNTS = "Users of gradients from "
#: TensorFlow and PyTorch: workers agree on sparse gradients under this prefix and that name.
KINDS = "Kinds of gradients from "


class Charge(Owner):
    """An optimizer's charge of its gradients' names, under which compression keeps state.

    A later optimizer for the same gradients takes them over. ``compresses``: whether it has
    compression. ``traced``: whether a graph exchanges its gradients, which goes on to do so.
    """

    instead = "Use one optimizer for them, or no compression_params"

    def __init__(self, what: str, compresses: bool) -> None:
        super().__init__(what)
        self.compresses, self.traced = compresses, False

    def refusal(self, name: str, other: Owner, same: bool) -> str:
        """Return "": optimizers of which only the later is used cannot be told from others."""
        return ""

    def replace(self, by: Owner) -> None:
        """Release the names; without compression there is no state that the two could mix."""
        if not (self.compresses or isinstance(by, Charge) and by.compresses):
            self.release()
            return
        if self.traced:
            log.warning(
                "the %s takes over gradients of the %s, and the state that compression keeps of"
                " them begins anew. If a tf.function goes on to use the earlier one, too, their"
                " momentum and errors mix: use one optimizer for these variables, or no"
                " compression_params",
                by.what,
                self.what,
            )
        super().replace(by)


class GradientExchange:
    """Names and compression of one optimizer's gradients.

    The exchanges of TensorFlow's and MXNet's plugins derive from it; PyTorch has its own.

    ``verb``: begins each error. ``params``: ``compression_params``, applied on the way.
    ``compression``: converts tensors before the exchange. ``has_momentum``: whether the optimizer
    has a momentum. ``names``: those of all gradients, if they are known. ``anew``: drop state that
    compression has kept under the same names; otherwise continue with it.

    Not thread-safe. Raises :class:`ConfigError`.
    """

    def __init__(
        self,
        verb: str,
        params: Params,
        compression: type[Compressor] = NoneCompressor,
        has_momentum: bool = False,
        names: Sequence[str] = (),
        anew: bool = True,
    ) -> None:
        check_params(params, verb, has_momentum)
        check_not_both(compression, params, verb)
        self._verb, self._params, self._compression, self._anew = verb, params, compression, anew
        self._charge = Charge(verb, bool(params))
        #: Compression of the gradients that have one, by name.
        self.choices: dict[str, adapter.CompressionSpec] = {}
        # By session: the names that have been declared.
        self._declared: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self._begun: set[str] = set()  # names that have been declared in any job
        self._wires = by_place(PREFIX + name for name in names)
        #: The state of compression, by a gradient's place among all names.
        self.keeping = Keeping(self._wires)

    @property
    def compresses(self) -> bool:
        """Whether compression may keep state of the gradients."""
        return bool(self._params)

    @property
    def needs_rate(self) -> bool:
        """Whether compression needs the learning rate."""
        return any(choice.ef == "corrected" for choice in self.choices.values())

    def check_async(self) -> None:
        """Raise :class:`ConfigError` if gradients were to be compressed.

        In asynchronous training changes of weights travel in their place.
        """
        refuse_compression(self._verb, self._compression, self._params)

    def declare_all(
        self,
        names: Sequence[str],
        momentum: Momentum | None = None,
        script_names: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        """Declare how gradients travel, each once in a job.

        ``names``: of the gradients' parameters. ``momentum``: the optimizer's, which compression
        may replace. ``script_names``: returns each parameter's name in the script, by its name in
        ``names``; it is called for new names only. None: the names are equal. Raises
        :class:`ConfigError`.
        """
        session = adapter.session()
        known = self._declared.setdefault(session, set())
        new = [name for name in names if name not in known]
        self._take_charge(names, new)
        if new:
            in_script = script_names() if script_names is not None else dict(zip(names, names))
            momenta = momentum.by_name(list(in_script.values())) if momentum is not None else {}
            chosen = choose(self._params, in_script.values(), self._verb, momenta)
            found = {name: chosen[in_script[name]] for name in names if in_script[name] in chosen}
            self.choices = {**self.choices, **found}
        if momentum is not None:
            momentum.take_over(names, self.choices)
        self._settle(session, new)
        for name in new:
            choice, anew = self.choices.get(name), self._anew and name not in self._begun
            session.declare(PREFIX + name, choice, anew=anew)
        known.update(new)
        self._begun.update(new)
        if new:
            wires = [*self._wires.values(), *(PREFIX + name for name in new)]
            self._wires.update(by_place(dict.fromkeys(wires)))
            self.keeping.put_back()

    def _settle(self, session: Any, new: Sequence[str]) -> None:
        """Wait for sums of an earlier optimizer, if how the ``new`` names travel may change.

        A sum that the engine of a framework begins later would travel in the new way on this worker
        alone.
        """
        if new and (self._params or session.compressing.any):
            order = session.order
            if any(PREFIX + name in order for name in new):
                finish(math.inf)

    def _take_charge(self, names: Sequence[str], new: Sequence[str]) -> None:
        """Take charge of the ``new`` ones of ``names``. A tape only looks whose they are.

        Raises :class:`ConfigError`.
        """
        if self._anew:
            self._charge.check_current()
            if new:
                claim(self._charge, {PREFIX + name: self for name in new})
            return
        for name in names:
            owner = owner_of(PREFIX + name)
            if isinstance(owner, Charge) and owner.compresses:
                raise ConfigError(
                    f"{self._verb}: {name!r}: the {owner.what} compresses gradients of the same"
                    " variable and keeps state of them, which this tape's gradients would change:"
                    " give it the gradients of a tf.GradientTape, or delete it first"
                )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue with state that :attr:`keeping` has saved, now or at the first exchange."""
        self.keeping.load(saved, adapter.session() in self._declared)
