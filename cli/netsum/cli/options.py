"""Options that several subcommands read in the same way."""

from __future__ import annotations

import re
from pathlib import Path

from netsum.protocol.errors import UsageError

_UNITS_US = {"us": 1, "ms": 1_000, "s": 1_000_000, "": 1_000_000}


def seconds_us(text: str) -> int:
    """Microseconds of "3s", "500ms", "2.5". Raises :class:`UsageError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s|)", text.strip())
    if not found:
        raise UsageError(f"{text!r} is not a time; say for example 3s or 500ms")
    return round(float(found[1]) * _UNITS_US[found[2]])


def read_secret(path: Path | None) -> str | None:
    """The text of the file without the white space around it. Raises :class:`UsageError` when it cannot be read or is empty."""
    if path is None:
        return None
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"secret file {path}: {error}") from error
    if not secret:
        raise UsageError(f"secret file {path} is empty")
    return secret
