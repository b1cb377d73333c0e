"""Silos: the samples of every client, side by side and never mixed."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import annotated_types as at
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite._validation import suggest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ArrayLike = Tensor | npt.ArrayLike
Seed = Annotated[int, at.Ge(0)]
Share = Annotated[float, at.Ge(0), at.Lt(1)]


class DataError(ValueError):
    """Data that cannot be used, with the client, the place and the remedy in the message."""


def _tensor(values: ArrayLike, what: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    array = np.asarray(values)
    if array.dtype == object or array.dtype.kind in "USO":
        raise DataError(f"{what}: values of type {array.dtype} are not numbers; encode text columns first")
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError:
        raise DataError(f"{what}: numbers of type {array.dtype} are not supported; cast them to float64") from None


def _check_finite(values: Tensor, what: str) -> None:
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        bad = torch.nonzero(~torch.isfinite(values))
        row, *rest = bad[0].tolist()
        column = f", column {rest[0]}" if rest else ""
        raise DataError(
            f"{what}: {len(bad)} value(s) are NaN or infinite, the first in row {row}{column}; "
            "impute or drop them before the run"
        )


def _read_npz(path: Path, target: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            for name in ("X", target):
                if name not in file:
                    raise DataError(f"{path}: no array {name!r} (it has: {', '.join(file)})")
            return file["X"], file[target]
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a readable .npz file ({error})") from None


@dataclass(frozen=True)
class Silos:
    """The data of n clients; sizes may differ.

    Samples are stored one client after another: client i owns rows ``offsets[i]:offsets[i+1]``. Make one
    with :meth:`from_arrays`, :meth:`from_files` or :func:`fedcomposite.data.load`.
    """

    features: Tensor
    targets: Tensor
    offsets: tuple[int, ...]
    names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    test: tuple[Tensor, Tensor] | None = None
    ids: tuple[int, ...] = field(default=())
    """The clients' numbers in the whole federation; their minibatches are drawn by these."""

    def __post_init__(self) -> None:
        n = len(self.offsets) - 1
        steps = [b - a for a, b in itertools.pairwise(self.offsets)]
        if n < 1 or self.offsets[0] != 0 or min(steps) < 1 or self.offsets[-1] != len(self.features):
            raise DataError(f"offsets {self.offsets} do not cut {len(self.features)} samples into silos of 1 or more")
        if len(self.targets) != len(self.features):
            raise DataError(f"{len(self.targets)} targets for {len(self.features)} samples")
        if not self.names:
            object.__setattr__(self, "names", tuple(f"client {i}" for i in range(n)))
        if not self.ids:
            object.__setattr__(self, "ids", tuple(range(n)))
        if len(self.names) != n:
            raise DataError(f"{len(self.names)} names for {n} clients")
        if len(self.ids) != n:
            raise DataError(f"{len(self.ids)} ids for {n} clients")
        if self.feature_names and len(self.feature_names) != self.features.shape[1]:
            raise DataError(f"{len(self.feature_names)} feature names for {self.features.shape[1]} features")

    # -- making -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_arrays(
        cls,
        arrays: Iterable[tuple[ArrayLike, ArrayLike]],
        *,
        names: Sequence[str] = (),
        feature_names: Sequence[str] = (),
        test: tuple[ArrayLike, ArrayLike] | None = None,
    ) -> Silos:
        """Take one ``(X, y)`` pair per client: X is ``(samples, ...)``, y is ``(samples,)``."""
        parts: list[tuple[Tensor, Tensor]] = []
        labels = list(names)
        for i, (X, y) in enumerate(arrays):
            who = labels[i] if i < len(labels) else f"client {i}"
            parts.append(cls._pair(X, y, who, parts[0][0] if parts else None))
        if not parts:
            raise DataError("no clients were given")
        held_out = cls._pair(*test, "test data", parts[0][0]) if test is not None else None
        offsets = np.cumsum([0, *(len(y) for _, y in parts)]).tolist()
        return cls(
            torch.cat([X for X, _ in parts]),
            torch.cat([y for _, y in parts]),
            tuple(offsets),
            tuple(labels),
            tuple(feature_names),
            held_out,
        )

    @staticmethod
    def _pair(X: ArrayLike, y: ArrayLike, who: str, first: Tensor | None) -> tuple[Tensor, Tensor]:
        features, targets = _tensor(X, f"{who}, features"), _tensor(y, f"{who}, targets")
        if features.ndim < 2:
            raise DataError(f"{who}: features have shape {tuple(features.shape)}, expected (samples, features)")
        if targets.ndim != 1 or len(targets) != len(features):
            raise DataError(
                f"{who}: targets have shape {tuple(targets.shape)}, expected ({len(features)},) to match the features"
            )
        if len(features) == 0:
            raise DataError(f"{who} is an empty silo: it has no samples; leave it out or give it data")
        if first is not None and features.shape[1:] != first.shape[1:]:
            raise DataError(
                f"{who} has samples of shape {tuple(features.shape[1:])}, the first client {tuple(first.shape[1:])}; "
                "all must have the same features in the same order"
            )
        _check_finite(features, f"{who}, features")
        _check_finite(targets, f"{who}, targets")
        return features, targets

    @classmethod
    def from_csv(
        cls,
        paths: Iterable[str | Path],
        *,
        target: str,
        drop: Sequence[str] = (),
        missing: Sequence[str] = ("?",),
    ) -> Silos:
        """Read one CSV file with a header row per client; the file's stem is the client's name.

        ``target`` is the column to predict, ``drop`` are columns to ignore, ``missing`` are markers of absent
        values (which are reported, never guessed). Columns are matched by name, so their order may differ between
        files.
        """
        arrays, names, columns = [], [], None
        seen: set[str] = set()
        for path in map(Path, paths):
            if not path.is_file():
                raise DataError(f"{path}: no such file")
            try:
                frame = pd.read_csv(path, na_values=list(missing), skipinitialspace=True)
            except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
                raise DataError(f"{path}: not a readable CSV file ({error})") from None
            if target not in frame:
                raise DataError(f"{path}: no column {target!r} (it has: {', '.join(map(str, frame.columns))})")
            if frame.empty:
                raise DataError(f"{path} is an empty silo: it has no rows below the header")
            seen |= set(map(str, frame.columns))
            frame = frame.drop(columns=list(drop), errors="ignore")
            found = [c for c in frame.columns if c != target]
            if columns is None:
                columns = found
            if set(found) != set(columns):
                differ = sorted(set(map(str, found)) ^ set(map(str, columns)))
                raise DataError(f"{path}: columns differ from the first file's: {', '.join(differ)}")
            for column in [*columns, target]:
                if not pd.api.types.is_numeric_dtype(frame[column]):
                    raise DataError(f"{path}: column {column!r} is not numeric; encode it or put it in `drop`")
                absent = int(frame[column].isna().sum())
                if absent:
                    raise DataError(
                        f"{path}: column {column!r} has {absent} missing value(s), the first in data row "
                        f"{int(np.flatnonzero(frame[column].isna())[0])}; impute or drop them before the run"
                    )
            arrays.append((frame[columns].to_numpy(np.float64), frame[target].to_numpy(np.float64)))
            names.append(path.stem)
        for column in drop:
            if arrays and column not in seen:
                raise DataError(f"drop = {column!r}: no file has this column{suggest(column, seen)}")
        return cls.from_arrays(arrays, names=names, feature_names=[str(c) for c in columns or ()])

    @classmethod
    def from_files(cls, paths: Iterable[str | Path], *, target: str, **options: Any) -> Silos:
        """Read one file per client, all ``.csv`` (with the options of :meth:`from_csv`) or all ``.npz``.

        An ``.npz`` file holds the features as the array ``X`` and the targets as the array named ``target``.
        """
        files = [Path(path) for path in paths]
        kinds = sorted({path.suffix.casefold() for path in files})
        if kinds == [".csv"]:
            return cls.from_csv(files, target=target, **options)
        if kinds != [".npz"]:
            raise DataError(f"files must be all .csv or all .npz, these are {', '.join(kinds) or 'none'}")
        if options:
            raise DataError(f".npz files take no option {next(iter(options))!r}")
        return cls.from_arrays([_read_npz(path, target) for path in files], names=[path.stem for path in files])

    # -- looking ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Client i's ``(features, targets)``."""
        if not 0 <= i < len(self):
            raise IndexError(f"client {i} of {len(self)}")
        rows = slice(self.offsets[i], self.offsets[i + 1])
        return self.features[rows], self.targets[rows]

    def __repr__(self) -> str:
        sizes = self.sizes
        spread = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
        shape = "x".join(map(str, self.features.shape[1:]))
        many = "client" if len(self) == 1 else "clients"
        return f"Silos({len(self)} {many}, {spread} samples each, {shape} features)"

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Samples per client."""
        return np.diff(np.asarray(self.offsets))

    @property
    def classes(self) -> npt.NDArray[Any] | None:
        """The labels, when the targets look like classes; otherwise None.

        They do if they are of an integer type with at most 1000 values, or whole numbers of a floating-point
        type with at most 50 (examination points from 1 to 70 are a quantity).
        """
        values: npt.NDArray[Any] = torch.unique(self.targets).numpy()
        most = 50 if self.targets.is_floating_point() else 1000
        return values if len(values) <= most and bool(np.all(values == np.round(values))) else None

    def summary(self) -> pd.DataFrame:
        """One row per client: its size and, for classification, how many samples it has of each class."""
        frame = pd.DataFrame({"client": self.names, "samples": self.sizes})
        if (classes := self.classes) is not None:
            counts = np.zeros((len(self), len(classes)), np.int64)
            owner = np.repeat(np.arange(len(self)), self.sizes)
            np.add.at(counts, (owner, np.searchsorted(classes, self.targets.numpy())), 1)
            for j, label in enumerate(classes):
                frame[f"class {label:g}"] = counts[:, j]
        else:
            frame["target mean"] = [float(self[i][1].double().mean()) for i in range(len(self))]
            frame["target sd"] = [float(self[i][1].double().std(correction=0)) for i in range(len(self))]
        return frame

    def heterogeneity(self) -> dict[str, float]:
        """Numbers that say how different the clients are.

        ``size_ratio`` is the largest over the smallest silo; ``label_skew`` the mean total-variation distance
        between a client's class frequencies and everyone's (0: alike, towards 1: disjoint); ``single_class`` the
        share of clients that hold one class only.
        """
        sizes = self.sizes
        out = {"size_ratio": float(sizes.max() / sizes.min())}
        if (classes := self.classes) is not None and len(classes) > 1:
            counts = self.summary()[[f"class {c:g}" for c in classes]].to_numpy(float)
            shares = counts / counts.sum(1, keepdims=True)
            overall = counts.sum(0) / counts.sum()
            out["label_skew"] = float(np.abs(shares - overall).sum(1).mean() / 2)
            out["single_class"] = float((counts.max(1) == counts.sum(1)).mean())
        return out

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the class counts (or sizes) per client as stacked bars; write a picture when ``path`` is given."""
        from fedcomposite.plots import draw_silos

        return draw_silos(self, path)

    # -- reshaping --------------------------------------------------------------------------------------------------

    def partition(self, name: str, *, clients: int, seed: int = 0, **options: Any) -> Silos:
        """Pool all samples and deal them out again, as :mod:`fedcomposite.data.partition` lists."""
        from fedcomposite.data.partition import partition

        return partition(self, name, clients=clients, seed=seed, **options)

    def subset(self, groups: Sequence[npt.NDArray[np.int64]], names: Sequence[str] = ()) -> Silos:
        """New silos from groups of row numbers of the pooled samples."""
        rows = torch.from_numpy(np.concatenate([np.sort(g) for g in groups]))
        offsets = tuple(np.cumsum([0, *(len(g) for g in groups)]).tolist())
        return replace(
            self,
            features=self.features[rows],
            targets=self.targets[rows],
            offsets=offsets,
            names=tuple(names),
            ids=(),
        )

    def split(self, test: float = 0.2, seed: int = 0) -> Silos:
        """Hold out a share of every client's samples (at least one stays) as pooled test data."""
        if not 0 < test < 1:
            raise DataError(f"split: test = {test}, must be between 0 and 1")
        if self.test is not None:
            raise DataError("split: these silos have test data already")
        generator = np.random.default_rng(seed)
        keep, out = [], []
        for i in range(len(self)):
            rows = self.offsets[i] + generator.permutation(int(self.sizes[i]))
            cut = min(len(rows) - 1, round(test * len(rows)))
            out.append(rows[:cut])
            keep.append(rows[cut:])
        held = torch.from_numpy(np.sort(np.concatenate(out)))
        if len(held) == 0:
            raise DataError(f"split: test = {test} of silos with at most {self.sizes.max()} samples holds out none")
        kept = self.subset(keep, self.names)
        return replace(kept, test=(self.features[held], self.targets[held]), ids=self.ids)

    def standardize(self) -> Silos:
        """(x - mean) / sd of each feature over the pooled training samples; test data are scaled alike.

        A feature that is constant in training is left as it is.
        """
        X = self.features.double()
        low, high = X.amin(0), X.amax(0)
        varies = high > low
        mean = torch.where(varies, X.mean(0), 0.0)
        sd = torch.where(varies, X.std(0, correction=0), 1.0)
        test = ((self.test[0].double() - mean) / sd, self.test[1]) if self.test is not None else None
        return replace(self, features=(X - mean) / sd, test=test)
