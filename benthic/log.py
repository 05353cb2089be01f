"""Logs for an operator: one line per event, a constant message, and values as key=value fields.

    log = logging.getLogger(__name__)
    log.info("blocks evicted", extra={"tier": "host", "blocks": 128})
    2026-01-31T12:00:00.250Z info benthic.cache.blocks: blocks evicted tier=host blocks=128

A library must not configure its user's logging, so nothing is set up until a command calls `setup`.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/+%@,[]()")


class LineFormatter(logging.Formatter):
    """Time (UTC), level, logger, message, fields. An exception becomes the fields `error` and `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        values = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            values["error"] = f"{type(error).__name__}: {error}"
            values["traceback"] = self.formatException(record.exc_info)
        message = record.getMessage().replace("\n", "\\n")
        shown = "".join(f" {key}={_show(value)}" for key, value in values.items())
        return f"{time} {record.levelname.lower()} {record.name}: {message}{shown}"


def _show(value: object) -> str:
    """A field's value without spaces or line ends, or as a JSON string."""
    text = format(value, ".6g") if isinstance(value, float) else str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=False)


def setup(level: str, stream: TextIO | None = None) -> None:
    """Send the events of `benthic` loggers to `stream`, replacing an earlier setup.

    level   debug, info, warning or error.
    stream  None: standard error.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(LineFormatter())
    logger = logging.getLogger("benthic")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
