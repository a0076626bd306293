"""Files that are written whole or not at all, and read with one clear error. Knows no content."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def save(path: str | Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8. If that fails, the old file stays.

    Raises:
        OSError: the folder is missing or cannot be written, or the disk is full.
    """
    path = Path(path).resolve()
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # /dev/null, or a folder, which says so
        path.write_bytes(data)
        return
    try:
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    except OSError as error:  # it names the temporary file
        raise type(error)(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def try_out(path: str | Path) -> None:
    """Raise the OSError of `save` now, before there are results to lose. Leaves no file."""
    path = Path(path).resolve()
    if path.is_char_device():  # /dev/full is full, /dev/null is not
        with open(path, "wb", buffering=0) as file:
            if not file.isatty():
                file.write(b"\n")
    elif path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    elif not path.exists() or path.is_file():
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name) as file:
                file.write(bytes(1 << 16))
        except OSError as error:
            raise type(error)(error.errno, error.strerror, str(path)) from None


def load_json(path: str | Path, format: str, version: int) -> dict[str, Any]:
    """An object that says it has this format and version.

    Raises:
        ValueError: the file cannot be read, or is something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text, parse_constant=_no_number)
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != format:
        raise ValueError(f"{path} is not a {format} file")
    if content.get("version") != version:
        raise ValueError(f"{path} has version {content.get('version')!r}, expected {version}")
    return content


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number")
