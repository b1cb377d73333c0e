"""What a site's data were when it answered: a file that has grown by one patient must not be asked like the one before.

The difference of an answer from before and one from after is about whoever came, left or was corrected. For every data
set that was answered of, numbers for its rows (by the site's secret) lie in ``state/rows/DATA.versions.npy``.
"""

from __future__ import annotations

import hashlib
import hmac
import io
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.policy import DataRefusalError, RefusalError
from fedcomposite.federation.site.row_sets import put_book

_SUFFIX = ".versions.npy"


class DataVersions:
    """The data sets that one site has answered of; ``rows`` are those of the present one, in whatever form."""

    def __init__(
        self, folder: Path, data: str, least: int, ledger: Ledger, rows: Callable[[], Iterable[bytes]]
    ) -> None:
        self._folder, self._least, self._ledger, self._rows = folder / "rows", least, ledger, rows
        self._path, self._known = self._folder / f"{data[:32]}{_SUFFIX}", False

    def check(self) -> None:
        """Refuse data that differ from earlier ones by a few rows; take others down."""
        if self._known or self._least <= 1:
            return
        if not self._path.exists() or self._path.name not in self._names():
            now = self._numbers()
            for name in self._names():
                before = self._read(name)
                for one, other in ((now, before), (before, now)):
                    only = sum((Counter(one.tolist()) - Counter(other.tolist())).values())
                    if 0 < only < self._least:
                        raise DataRefusalError(
                            "its data differ from those of an earlier answer by fewer than min_count = "
                            f"{self._least} rows; the site's people can wait for more, or take the earlier file",
                            f"{only} rows",
                        )
            content = io.BytesIO()
            np.save(content, now)
            put_book(self._ledger, self._path, content.getvalue())
        self._known = True

    def _names(self) -> list[str]:
        """Files of the data sets that were answered of."""
        return [name.removeprefix("rows/") for name in self._ledger.files() if name.endswith(_SUFFIX)]

    def _read(self, name: str) -> npt.NDArray[np.uint64]:
        path = self._folder / name
        content = path.read_bytes() if path.exists() else None
        self._ledger.check(f"rows/{name}", content)
        if content is None:
            return np.zeros(0, np.uint64)  # a crash came before it was written, and nothing was answered
        try:
            found: npt.NDArray[np.uint64] = np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError):
            raise RefusalError("its book of rows cannot be read; the site's people have to look at it") from None
        return found

    def _numbers(self) -> npt.NDArray[np.uint64]:
        key = self._ledger.secret_seed("versions").to_bytes(8, "little")
        each = [hmac.digest(key, row, hashlib.sha256)[:8] for row in self._rows()]
        return np.sort(np.frombuffer(b"".join(each), np.uint64))
