"""Compressors from outside the package: the modules that ``BPSX_COMPRESSORS`` names register them
when they are imported.
"""

from __future__ import annotations

import importlib

from bpsx.errors import ConfigError


def import_compressors(modules: str) -> None:
    """Import those named, separated by commas.

    Their code is run: who sets the variable decides what a worker or server does.

    Raises :class:`~bpsx.errors.ConfigError`, which names option, module and cause.
    """
    for module in filter(None, modules.split(",")):
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"BPSX_COMPRESSORS: {module} cannot be imported: {type(error).__name__}: {error}"
            ) from error
