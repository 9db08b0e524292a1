"""Names of the models whose DistributedDataParallel uses :func:`~bpsx.torch.ddp_comm_hook`.

Each model has a name of its own.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from bpsx.plugin.owners import Owner, claim

_numbers = itertools.count()
#: Each model's number, in the order in which this process created them. The order must be the same
#: on all workers.
_models: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_owners: weakref.WeakKeyDictionary[Any, HookOwner] = weakref.WeakKeyDictionary()
#: Owners by id of a bucket's first parameter, with that parameter.
_known: dict[int, tuple[weakref.ref[torch.Tensor], HookOwner]] = {}


class HookOwner(Owner):
    """Owner of the names of one model's buckets."""

    def __init__(self, name: str) -> None:
        super().__init__("ddp_comm_hook's model")
        self.name = name

    def refusal(self, name: str, other: Owner, same: bool) -> str:
        """Return the reason for the refusal: buckets of two models would be added to each other."""
        return (
            f"another model that is still alive uses {self.name!r} for its buckets. Register each"
            " model's hook with a DDPHookState of a different name:"
            " model.register_comm_hook(bps.DDPHookState('second'), bps.ddp_comm_hook)"
        )


def _note(module: Any, name: str, submodule: Any) -> None:
    if name == "module" and isinstance(module, DistributedDataParallel) and module not in _models:
        _models[module] = next(_numbers)


register_module_module_registration_hook(_note)


def name_of(first: torch.Tensor, given: str | None) -> str:
    """Return the name of a model's buckets.

    ``first``: a bucket's first parameter. ``given``: the name in the model's :class:`DDPHookState`.

    Raises :class:`~bpsx.errors.ConfigError` if another live model has that name.
    """
    known = _known.get(id(first))
    if known is not None and known[0]() is first:
        return known[1].name
    model = _model_with(first)
    owner = _owners.get(model) if model is not None else None
    if owner is None:
        number = _models.get(model, 0) if model is not None else 0
        owner = HookOwner(given or (f"DDP.{number}" if number else "DDP"))
        claim(owner, {f"{owner.name}.bucket": model})
        if model is not None:
            _owners[model] = owner
    key = id(first)
    _known[key] = weakref.ref(first, lambda _: _known.pop(key, None)), owner
    return owner.name


def _model_with(parameter: torch.Tensor) -> Any:
    """Return the model that has ``parameter``, or None.

    Models created since bpsx.torch was imported are searched first, then all objects.
    """
    for model in list(_models):
        if any(p is parameter for p in model.parameters()):
            return model
    others = [thing for thing in gc.get_objects() if isinstance(thing, DistributedDataParallel)]
    return next((m for m in others if any(p is parameter for p in m.parameters())), None)
