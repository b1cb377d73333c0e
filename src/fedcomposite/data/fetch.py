"""Where the bytes of a data set come from. The first place that has a file wins:

1. the folder named by the environment variable ``FEDCOMPOSITE_DATA``, or ``data-NAME`` beside that folder;
2. the files shipped with the package;
3. the cache, ``~/.cache/fedcomposite`` or the folder named by ``FEDCOMPOSITE_CACHE``;
4. the publisher's site and its mirrors, one after another; what arrives is checked and kept in the cache.

A file is known by the SHA-256 of its content *after decompression*, so a plain, gzip, bzip2 or xz copy is the same
file, and a mirror may compress as it likes.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import http.client
import io
import lzma
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fedcomposite._version import __version__
from fedcomposite.data.silos import DataError

Progress = Callable[[str, int, int | None], None]
"""Called as ``progress(url, bytes received, bytes in all or None)``."""

SHIPPED = Path(__file__).parent / "files"
TIMEOUT = 30.0  # seconds without a byte

_UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
}
_BROKEN = (OSError, EOFError, ValueError, KeyError, zlib.error, lzma.LZMAError, tarfile.TarError)


@dataclass(frozen=True)
class File:
    """One file of a data set."""

    path: str  # within a data folder, without .gz, .bz2 or .xz
    sha256: str  # of the content
    urls: tuple[str, ...] = ()  # tried in order; "archive.tar.gz#member" is a file within an archive


class _CorruptError(Exception):
    """Bytes that are not the file."""


def cache_folder() -> Path:
    """Where downloads are kept, and what has no other place."""
    named = os.environ.get("FEDCOMPOSITE_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "fedcomposite"


def fetch(name: str, files: Sequence[File], progress: Progress | None = None) -> list[bytes]:
    """Contents of ``files``, decompressed and verified; ``name`` is the data set's, for messages."""
    with ThreadPoolExecutor() as pool:  # decompression and hashing run side by side
        looked = dict(zip(files, pool.map(_local, files), strict=True))
    found = {file: content for file, (content, _) in looked.items() if content is not None}
    for file, (_, tried) in looked.items():
        if file not in found:  # nor in the archive of an earlier one
            found |= _download(name, file, [f for f in files if f not in found], tried, progress)
    return [found[file] for file in files]


def _unpack(raw: bytes, suffix: str, file: File) -> bytes:
    """The verified content of a possibly compressed copy."""
    try:
        content = _UNPACK[suffix](raw)
    except _BROKEN as error:
        raise _CorruptError(f"cannot be decompressed ({error})") from None
    _verify(content, file)
    return content


def _verify(content: bytes, file: File) -> None:
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise _CorruptError(f"wrong checksum (SHA-256 of the content is {digest}, expected {file.sha256})")


def _local(file: File) -> tuple[bytes | None, list[str]]:
    """The content and where it was sought; a bad file in the user's own folder is an error, in the cache it is not."""
    tried: list[str] = []
    first, _, rest = file.path.partition("/")
    places: list[Path] = []
    named = os.environ.get("FEDCOMPOSITE_DATA")
    if named:
        folder = Path(named).expanduser()
        places += [folder / file.path, folder.resolve().parent / f"data-{first}" / rest]
    else:
        tried.append("the folder FEDCOMPOSITE_DATA: the variable is not set")
    if (shipped := SHIPPED / file.path).is_file():
        places.append(shipped)
    cached = cache_folder() / file.path
    for place in (*places, cached):
        copies = [copy for suffix in _UNPACK if (copy := place.with_name(place.name + suffix)).is_file()]
        if not copies:
            tried.append(f"{place} (or .gz, .bz2, .xz): no such file")
        for copy in copies:
            try:
                return _unpack(copy.read_bytes(), copy.name.removeprefix(place.name), file), tried
            except (OSError, _CorruptError) as error:
                if place != cached:
                    raise DataError(f"{copy}: {error}; put a good copy there, or remove it") from None
                tried.append(f"{copy}: {error}")
    return None, tried


def _download(
    name: str, file: File, wanted: Sequence[File], tried: list[str], progress: Progress | None
) -> dict[File, bytes]:
    """Get ``file`` from the first mirror that has it, and with it those ``wanted`` that lie in the same archive."""
    for url in file.urls:
        base, _, member = url.partition("#")
        try:
            raw = _receive(base, progress)
            if member:
                return _keep_all(_members(raw, base, wanted))
            suffix = PurePosixPath(base).suffix
            suffix = suffix if suffix in _UNPACK else ""
            content = _unpack(raw, suffix, file)
            _keep(cache_folder() / (file.path + suffix), raw)
            return {file: content}
        except urllib.error.HTTPError as error:
            error.close()
            tried.append(f"{url}: HTTP {error.code} {error.reason}")
        except (OSError, http.client.HTTPException, _CorruptError) as error:
            tried.append(f"{url}: {getattr(error, 'reason', error)}")
    listed = "\n  ".join(tried)
    raise DataError(
        f"{name}: {PurePosixPath(file.path).name} was not found. Tried, in this order:\n  {listed}\n"
        f"Without a network, put it at {file.path} in a folder and set FEDCOMPOSITE_DATA to that folder."
    )


def _receive(url: str, progress: Progress | None) -> bytes:
    """The bytes behind a URL."""
    request = urllib.request.Request(url, headers={"User-Agent": f"fedcomposite/{__version__}"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response, _shown(progress) as show:
        length = response.headers.get("Content-Length")
        total = int(length) if length else None
        body = bytearray()
        while chunk := response.read(1 << 18):
            body += chunk
            show(url, len(body), total)
    if total is not None and len(body) != total:
        raise _CorruptError(f"the connection ended after {len(body)} of {total} bytes")
    return bytes(body)


@contextmanager
def _shown(progress: Progress | None) -> Iterator[Progress]:
    """The caller's progress function, or a bar if someone is watching."""
    if progress is not None:
        yield progress
        return
    from rich.console import Console  # only a download needs it
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("download", total=None)
        yield lambda url, received, total: bar.update(
            task, description=PurePosixPath(url).name, completed=received, total=total
        )


def _members(archive: bytes, base: str, wanted: Sequence[File]) -> dict[File, bytes]:
    """Verified contents of the wanted files of a tar archive."""
    out = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for file in wanted:
                for member in (u.partition("#")[2] for u in file.urls if u.startswith(f"{base}#")):
                    stream = tar.extractfile(member)
                    out[file] = stream.read() if stream is not None else b""
    except _BROKEN as error:
        raise _CorruptError(f"not a readable archive ({error})") from None
    for file, content in out.items():
        _verify(content, file)
    return out


def _keep_all(contents: dict[File, bytes]) -> dict[File, bytes]:
    for file, content in contents.items():
        _keep(cache_folder() / file.path, content)
    return contents


def _keep(path: Path, data: bytes) -> None:
    """Write a file at once or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        raise DataError(
            f"cannot write {path} ({error}); set FEDCOMPOSITE_CACHE to a folder that can be written"
        ) from None
