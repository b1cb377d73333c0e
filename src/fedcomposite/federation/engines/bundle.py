"""The bundle that Flower hands from the coordinator to the sites: a label, and no code.

Flower ships programs; this package does not. Its bundle is one ``pyproject.toml`` that names two entry points of the
*installed* package. The service takes bundles from nobody and hands out this one only, to sites that run Flower's own
SuperNode; sites that run ``join`` never ask for any.
"""

from __future__ import annotations

import io
import tempfile
import tomllib
import zipfile
from pathlib import Path

import tomli_w

from fedcomposite._validation import UserError
from fedcomposite._version import __version__

NAME, PUBLISHER, VERSION = "fedcomposite-federation", "fedcomposite", ".".join(__version__.split(".")[:3])
COMPONENTS = {
    "serverapp": "fedcomposite.federation.engines.apps:server",
    "clientapp": "fedcomposite.federation.engines.apps:client",
}
_FILES = {"pyproject.toml", ".info/CONTENT"}
_MOST = 64_000  # bytes; the real one has less than 1000


class BundleError(UserError):
    """A bundle that a site does not accept."""


def write(folder: Path) -> Path:
    """Write the bundle's only file; returns the folder."""
    content = {
        "project": {
            "name": NAME,
            "version": VERSION,
            "description": "Entry points of the installed fedcomposite package",
            "license": "Apache-2.0",
            "dependencies": ["flwr>=1.41.0"],
        },
        "tool": {"flwr": {"app": {"publisher": PUBLISHER, "components": COMPONENTS}}},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(content), encoding="utf-8")
    return folder


def archive() -> bytes:
    """The bundle as Flower packs it, checked."""
    from flwr.cli.build import build_fab_from_disk

    with tempfile.TemporaryDirectory() as folder:
        made: bytes = build_fab_from_disk(write(Path(folder) / "label"))
    check(made)
    return made


def check(archive: bytes) -> None:
    """Refuse a bundle that is not the label above: other files, or other entry points."""
    if len(archive) > _MOST:
        raise BundleError(
            f"the bundle weighs {len(archive)} bytes; the package's own holds no code and has under {_MOST}"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            names = set(file.namelist())
            if foreign := sorted(names - _FILES):
                raise BundleError(f"the bundle holds {foreign[0]!r}; this site runs only its installed package")
            if "pyproject.toml" not in names or file.getinfo("pyproject.toml").file_size > _MOST:
                raise BundleError("the bundle has no readable pyproject.toml")
            content = tomllib.loads(file.read("pyproject.toml").decode())
    except (zipfile.BadZipFile, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BundleError(f"the bundle cannot be read ({type(error).__name__})") from None
    found = content.get("tool", {}).get("flwr", {}).get("app", {}).get("components")
    if found != COMPONENTS:
        raise BundleError("the bundle names other entry points; this site runs only its installed package")
