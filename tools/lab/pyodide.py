"""CPython for the browser, as one script that a page from the disk can load.

Pyodide comes from the npm registry, once, by its exact version and checksum, and stays in the
user's cache. `npm pack` fetches it where there is an npm, else a plain download. Where neither
works there is None, and the lab's pages say so.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from pathlib import Path

VERSION = "314.0.7"
SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
FILE = f"pyodide-{VERSION}.tgz"
REGISTRY = "https://registry.npmjs.org"
PARTS = {
    "loader": "pyodide.mjs",
    "module": "pyodide.asm.mjs",
    "wasm": "pyodide.asm.wasm",
    "lock": "pyodide-lock.json",
    "library": "python_stdlib.zip",
}
TIMEOUT = 120  # seconds for a download


def cache_folder() -> Path:
    """Where the download is kept: the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mini-vllm"


def _checked(data: bytes) -> bytes:
    found = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != SHA512:
        raise ValueError(f"{FILE} has the checksum {found}, expected {SHA512}")
    return data


def _by_npm() -> bytes:
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("there is no npm")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [npm, "pack", f"pyodide@{VERSION}", "--silent"],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=TIMEOUT,
        )
        return (Path(folder) / FILE).read_bytes()


def _by_download() -> bytes:
    registry = os.environ.get("npm_config_registry") or REGISTRY
    url = f"{registry.rstrip('/')}/pyodide/-/{FILE}"
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
        return bytes(response.read())


def package(folder: Path | None = None) -> tuple[bytes | None, str]:
    """The package as it was published, and a line about it; None where it cannot be had."""
    kept = (folder or cache_folder()) / FILE
    reasons = []
    for fetch in (kept.read_bytes, _by_npm, _by_download):
        try:
            data = _checked(fetch())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if fetch != kept.read_bytes:
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}")
            part.write_bytes(data)
            part.replace(kept)
        return data, f"Pyodide {VERSION}"
    return None, f"the lab has no Pyodide {VERSION} ({'; '.join(reasons[1:])})"


def script(data: bytes) -> str:
    """The package's parts, packed, as a script that hands them to the lab."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        parts = {}
        for name, file in PARTS.items():
            member = archive.extractfile(f"package/{file}")
            assert member is not None, file
            packed = gzip.compress(member.read(), 9, mtime=0)
            parts[name] = base64.b64encode(packed).decode()
    return f"miniVllmPyodide({json.dumps(parts)});\n"
