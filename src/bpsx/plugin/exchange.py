"""Exchange of one optimizer's gradients: their names on the wire and their compression."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bpsx.plugin import adapter
from bpsx.plugin.async_training import refuse_compression
from bpsx.plugin.checkpoint import Keeping, by_place
from bpsx.plugin.compression import Compressor, NoneCompressor, check_not_both
from bpsx.plugin.compression_params import Params, check_params, choose
from bpsx.plugin.momentum import Momentum

#: A gradient's name on the wire is this and its parameter's name.
PREFIX = "Gradient."
#: TensorFlow and MXNet: under this prefix and the first parameter's name workers count how many of
#: them have used each gradient. PyTorch does so under a prefix of its own.
USED_COUNTS = "Users of gradients from "
#: TensorFlow and PyTorch: workers agree on sparse gradients under this prefix and that name.
KINDS = "Kinds of gradients from "


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
        if new:
            in_script = script_names() if script_names is not None else dict(zip(names, names))
            momenta = momentum.by_name(list(in_script.values())) if momentum is not None else {}
            chosen = choose(self._params, in_script.values(), self._verb, momenta)
            found = {name: chosen[in_script[name]] for name in names if in_script[name] in chosen}
            self.choices = {**self.choices, **found}
        if momentum is not None:
            momentum.take_over(names, self.choices)
        for name in new:
            choice, anew = self.choices.get(name), self._anew and name not in self._begun
            session.declare(PREFIX + name, choice, anew=anew)
        known.update(new)
        self._begun.update(new)
        if new:
            wires = [*self._wires.values(), *(PREFIX + name for name in new)]
            self._wires.update(by_place(dict.fromkeys(wires)))
            self.keeping.put_back()

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue with state that :attr:`keeping` has saved, now or at the first exchange."""
        self.keeping.load(saved, adapter.session() in self._declared)
