"""Logs as JSON, one object a line, on standard error. They have what happened, never a prompt or a text."""

import json
import logging
import sys
import time

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record and its extra fields as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"at": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "from": record.name}
        line["what"] = record.getMessage()
        line |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        if record.exc_info:
            kind = record.exc_info[0]
            line["error"] = kind.__name__ if kind else ""  # its message may quote a request
        return json.dumps(line, default=str)


def set_up_logs() -> None:
    """Send all logs to standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.getLogger("quire").setLevel(logging.INFO)
    logging.captureWarnings(True)
