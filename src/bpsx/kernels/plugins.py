"""Import of compressors from outside the package.

Modules named in ``BPSX_COMPRESSORS`` register them when imported.
"""

from __future__ import annotations

import importlib

from bpsx.errors import ConfigError


def import_compressors(modules: str) -> None:
    """Import the modules named in ``modules``, separated by commas.

    Importing runs their code, so the variable's value controls this worker or server.

    Raises :class:`~bpsx.errors.ConfigError`, which names option, module and cause.
    """
    for module in filter(None, modules.split(",")):
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"BPSX_COMPRESSORS: {module} cannot be imported: {type(error).__name__}: {error}"
            ) from error
