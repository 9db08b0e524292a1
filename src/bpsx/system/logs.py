"""Logging in one format to standard error.

``BYTEPS_LOG_LEVEL`` and ``BYTEPS_LOG_HIDE_TIME`` configure it.
"""

from __future__ import annotations

import logging
import sys

from bpsx.config import Config

_LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40, "fatal": 50}


#: Messages logged before any handler was configured.
_early: list[tuple[logging.Logger, str, tuple[object, ...]]] = []


def log_from_import(logger: logging.Logger, text: str, *values: object) -> None:
    """Log at level INFO from an import, which may run before :func:`configure`.

    Without a handler, the message is kept until :func:`configure`. Thread-safe.
    """
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text, *values)
    else:
        _early.append((logger, text, values))


def configure(config: Config, who: str) -> None:
    """Set up the ``bpsx`` loggers for the process called ``who``, and log dubious variables.

    A second call changes level and name.
    """
    logger = logging.getLogger("bpsx")
    logger.setLevel(_LEVELS[config.log_level])
    time = "" if config.log_hide_time else "%(asctime)s "
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{time}bpsx {who} %(levelname)s: %(message)s"))
    for old in [h for h in logger.handlers if getattr(h, "bpsx", False)]:
        logger.removeHandler(old)
    handler.bpsx = True  # type: ignore[attr-defined]
    logger.addHandler(handler)
    logger.propagate = False
    # PS_VERBOSE shows connections whatever BYTEPS_LOG_LEVEL is.
    logging.getLogger("bpsx.connections").setLevel(
        logging.INFO if config.verbose else logging.NOTSET
    )
    while _early:
        one, text, values = _early.pop(0)
        one.info(text, *values)
    for warning in config.unknown:
        logger.warning("%s", warning)
