"""Silos: the samples of every client, side by side and never mixed."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack, cast

import annotated_types as at
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite._validation import Count, check_call
from fedcomposite.data import saved
from fedcomposite.data.arrays import (
    ArrayLike,
    as_tensor,
    check_offsets,
    check_parts,
    check_weights,
    clients,
    gather,
    per_sample,
    pooled,
    texts,
)
from fedcomposite.data.cells import spread_of
from fedcomposite.data.client_files import read_all
from fedcomposite.data.datasets import Columns, from_datasets, from_folders
from fedcomposite.data.faults import DataError, DataWarning
from fedcomposite.data.pictures import Channels
from fedcomposite.data.sheets import MARKERS, labels_of, listed
from fedcomposite.data.sparse import Features, SparseRows, dense, tensors_only

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedcomposite.data.fitted import FittedRecipe

__all__ = ["ArrayLike", "DataError", "Seed", "Share", "Silos"]

Seed = Annotated[int, at.Ge(0)]
Share = Annotated[float, at.Ge(0), at.Lt(1)]
HeldOut = Literal["validation", "test"]


class FileOptions(TypedDict, total=False):
    """What :meth:`Silos.from_files` takes beside files and a target."""

    names: Sequence[str]
    test: str | Path | None
    columns: Mapping[str, str] | None
    drop: str | Sequence[str]
    missing: str | Sequence[str]
    separator: str | None
    decimal: str | None
    encoding: str | None
    thousands: str | None
    weight: str | None
    offset: str | None
    features: int | None
    time: str | None
    entry: str | None
    strata: str | None


class _Held(TypedDict, total=False):
    test: Any
    validation: Any
    names: Sequence[str]
    save_to: str | Path | None


class ItemOptions(_Held, total=False):
    """What :meth:`Silos.from_datasets` takes beside data sets."""

    features: Columns
    target: str | None
    feature_names: Sequence[str]


class FolderOptions(_Held, total=False):
    """What :meth:`Silos.from_folders` takes beside folders."""

    size: tuple[int, int] | None
    channels: Channels | None


@dataclass(frozen=True)
class Silos:
    """The data of n clients; sizes may differ.

    Samples are stored one client after another: client i owns rows ``offsets[i]:offsets[i+1]``. Make one
    with :meth:`from_arrays`, :meth:`from_files` or :func:`fedcomposite.data.load`.
    """

    features: Features
    targets: Tensor
    offsets: tuple[int, ...]
    names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    test: tuple[Features, Tensor] | None = None
    ids: tuple[int, ...] = field(default=())
    """The clients' numbers in the whole federation; their minibatches are drawn by these."""
    validation: tuple[Features, Tensor] | None = None
    held_by: Mapping[HeldOut, Tensor] = field(default_factory=dict)
    """Whose the samples of a held-out part are, where that is known: positions of clients."""
    weights: Tensor | None = None
    """What each training sample counts within its client, ``(samples,)``; alike if left out. Linear models only."""
    margin_offsets: Tensor | None = None
    """What is added to each training sample's margin, ``(samples,)``, such as the logarithm of an exposure."""
    held_margin_offsets: Mapping[HeldOut, Tensor] = field(default_factory=dict)
    """The same for the samples of a held-out part."""
    recipe: FittedRecipe | None = None
    """How the features were made, where a recipe made them."""
    copies: tuple[Tensor, ...] = ()
    """The features of every completed copy, the first among them, where gaps were imputed by draws."""

    def __post_init__(self) -> None:
        n = len(self.offsets) - 1
        steps = [b - a for a, b in itertools.pairwise(self.offsets)]
        if n < 1 or self.offsets[0] != 0 or min(steps) < 1 or self.offsets[-1] != len(self.features):
            raise DataError(f"offsets {self.offsets} do not cut {len(self.features)} samples into silos of 1 or more")
        if len(self.targets) != len(self.features):
            raise DataError(f"{len(self.targets)} targets for {len(self.features)} samples")
        if self.copies and not (isinstance(self.features, Tensor) and torch.equal(self.copies[0], self.features)):
            object.__setattr__(self, "copies", ())  # what has other samples or columns has no copies of them
        if not self.names:
            object.__setattr__(self, "names", tuple(f"client {i}" for i in range(n)))
        if not self.ids:
            object.__setattr__(self, "ids", tuple(range(n)))
        if len(self.names) != n:
            raise DataError(f"{len(self.names)} names for {n} clients")
        if len(set(self.names)) < n:
            raise DataError(f"names: {max(self.names, key=self.names.count)!r} occurs twice; give every client its own")
        if len(self.ids) != n:
            raise DataError(f"{len(self.ids)} ids for {n} clients")
        if self.weights is not None:
            check_weights(self.weights, self.offsets, self.names)
        check_offsets(self.margin_offsets, len(self.targets), "training")
        for part, (_, y) in self.held_out.items():
            if part in self.held_margin_offsets or self.margin_offsets is not None:
                check_offsets(self.held_margin_offsets.get(part, torch.empty(0)), len(y), part)
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
        validation: tuple[ArrayLike, ArrayLike] | None = None,
        weights: Iterable[ArrayLike] | None = None,
        margin_offsets: Iterable[ArrayLike] | None = None,
        held_margin_offsets: Mapping[HeldOut, ArrayLike] | None = None,
    ) -> Silos:
        """Take one ``(X, y)`` pair per client: X is ``(samples, ...)``, y ``(samples,)``, a model's ``(samples, ...)``.

        X may be sparse, of scipy or torch, and stays so. ``validation`` and ``test`` are pairs of samples that nobody
        trains on. Columns of pandas tables are matched by name, in the order of the first client's, whose names are
        taken over. ``weights`` has an array per client: what each of its samples counts; ``margin_offsets`` what is
        added to each one's margin, and ``held_margin_offsets`` that of held-out samples (``{"test": ...}``).
        """
        columns = texts("feature_names", feature_names) or None
        if columns is not None and len(set(columns)) < len(columns):
            raise DataError(
                f"feature_names: {max(columns, key=columns.count)!r} occurs twice; give every feature its own"
            )
        labels = texts("names", names)
        given = [(labels[i] if i < len(labels) else f"client {i}", one) for i, one in enumerate(clients(arrays))]
        if not given:
            raise DataError("no clients were given")
        held_out = [("test", test), ("validation", validation)]
        held = [(f"{part} data", one) for part, one in held_out if one is not None]
        features, targets, order = gather([*given, *held])
        columns = order if columns is None else columns
        n = len(given)
        sizes = [len(y) for y in targets[:n]]
        there = [part for part, one in held_out if one is not None]
        extra: dict[str, Any] = dict(zip(there, zip(features[n:], targets[n:], strict=True), strict=True))
        for option, numbers in (("weights", weights), ("margin_offsets", margin_offsets)):
            if numbers is not None:
                extra[option] = per_sample(option, numbers, sizes)
        if held_margin_offsets is not None:
            check_parts(held_margin_offsets, there)
            each = {part: as_tensor(t, f"{part}, margin offsets").double() for part, t in held_margin_offsets.items()}
            extra["held_margin_offsets"] = each
        starts = tuple(np.cumsum([0, *sizes]).tolist())
        return cls(pooled(features[:n]), torch.cat(targets[:n]), starts, labels, columns, **extra)

    @classmethod
    def from_csv(
        cls, paths: str | Path | Iterable[str | Path], *, target: str, **options: Unpack[FileOptions]
    ) -> Silos:
        """Read one CSV file per client, whatever the files are called; the options are those of :meth:`from_files`."""
        return cls._read(paths, ".csv", target, **check_call("from_csv", cls._read, options, DataError))

    @classmethod
    def from_files(
        cls, paths: str | Path | Iterable[str | Path], *, target: str | None = None, **options: Unpack[FileOptions]
    ) -> Silos:
        """Read one file per client: all ``.csv``, ``.parquet`` (where pyarrow is installed), ``.npz`` or ``.svm``.

        A table has a header, and its columns are matched by name, so their order may differ between files. An ``.npz``
        file holds the features as the array ``X`` and the targets as the array named ``target``. An ``.svm``
        (``.libsvm``, ``.svmlight``) file has its targets in front and stays sparse. All that is wrong with the files is
        reported in one error.

        Parameters
        ----------
        paths : path or list of paths
            The files; a client is called as its file is, without the suffix.
        target : str
            The column to predict; not for ``.svm`` files.

        Other Parameters
        ----------------
        weight : str, optional
            The column that says what each sample counts.
        offset : str, optional
            The column that is added to each sample's margin, such as the logarithm of an exposure.
        time, entry, strata : str, optional
            Columns of times to an event, which the target then says: when it was, when observation began if that was
            late, and numbers of groups with baselines of their own.
        features : int, optional
            How many features ``.svm`` files have; the largest number in any of them, if left out.
        names : list of str
            Other names for the clients.
        test : path, optional
            A file of the same kind with held-out samples.
        columns : dict, optional
            ``{"common name": "name in a file"}`` for columns that are called otherwise somewhere.
        drop : str or list of str
            Columns to leave out, by their names in the files.
        missing : str or list of str
            Markers of absent values besides the usual ones ("", "NA", "?", "-", ...); they are reported, never guessed.
        separator, decimal, encoding, thousands : str, optional
            How CSV files are written, where it cannot be found from them: ``";"``, ``","``, ``"cp1252"``, ``"."``.
        """
        return cls._read(paths, None, target, **check_call("from_files", cls._read, options, DataError))

    @classmethod
    def _read(
        cls,
        paths: str | Path | Iterable[str | Path],
        kind: str | None,
        target: str | None,
        *,
        names: Sequence[str] = (),
        test: str | Path | None = None,
        columns: Mapping[str, str] | None = None,
        drop: str | Sequence[str] = (),
        missing: str | Sequence[str] = MARKERS,
        separator: str | None = None,
        decimal: str | None = None,
        encoding: str | None = None,
        weight: str | None = None,
        offset: str | None = None,
        features: Count | None = None,
        thousands: str | None = None,
        time: str | None = None,
        entry: str | None = None,
        strata: str | None = None,
    ) -> Silos:
        style = {"separator": separator, "decimal": decimal, "encoding": encoding, "weight": weight, "offset": offset}
        style |= {"thousands": thousands, "time": time, "entry": entry, "strata": strata}
        files = listed(paths)
        every = [*files, *([Path(test)] if test is not None else [])]
        given = {"target": target, "drop": drop, "missing": missing, "columns": columns, **style}
        tables = read_all(every, kind, features, given)
        held = tables.pop() if test is not None else None
        silos = cls.from_arrays(
            [(table.features, table.targets) for table in tables],
            names=names or labels_of(files),
            feature_names=tables[0].names if tables else (),
            test=None if held is None else (held.features, held.targets),
            weights=None if weight is None else [t.weights for t in tables if t.weights is not None],
            margin_offsets=None if offset is None else [t.offsets for t in tables if t.offsets is not None],
            held_margin_offsets=None if held is None or held.offsets is None else {"test": held.offsets},
        )
        if len(values := torch.unique(silos.targets if time is None else silos.targets[:, 1])) == 1:
            warnings.warn(f"all targets are {values[0]:g}: there is nothing to tell apart", DataWarning, stacklevel=3)
        return silos

    @classmethod
    def from_datasets(cls, datasets: Any, **options: Unpack[ItemOptions]) -> Silos:
        """Read one data set per client; of one alone, a pooled silo is made, to be dealt out by :meth:`partition`.

        All that is wrong with any item is told in one error.

        Parameters
        ----------
        datasets : list of data sets, or one
            Map-style data sets of torch whose items are (x, y), images of Pillow included; tables of Hugging Face's
            ``datasets``; DataFrames, whose columns keep their names; lists of pairs.

        Other Parameters
        ----------------
        features, target : str or list of str
            Columns of tables, or keys of items that are dictionaries. All columns but the target if left out.
        test, validation : data set, optional
            Held-out samples.
        names, feature_names : list of str
            Of the clients and of the features.
        save_to : path, optional
            A new folder to which the samples go as they are read; the silos are then those of :meth:`open`.
        """
        made = from_datasets(cls, datasets, **check_call("from_datasets", from_datasets, options, DataError))
        return cast(Silos, made)

    @classmethod
    def from_folders(cls, folders: str | Path | Sequence[str | Path], **options: Unpack[FolderOptions]) -> Silos:
        """Read PNG and JPEG images as bytes, a folder per client with a folder per class in it.

        Classes are numbered over all folders (:func:`fedcomposite.data.class_names`). Options beside ``test``,
        ``validation``, ``names`` and ``save_to``: ``size=(height, width)`` and ``channels=1`` or ``3``, to which images
        are brought; without them all must be alike.
        """
        made = from_folders(cls, folders, **check_call("from_folders", from_folders, options, DataError))
        return cast(Silos, made)

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = False) -> Silos:
        """Open what :meth:`save` wrote. Features stay in their files until a minibatch needs them; targets are read.

        Networks train on such silos; everything else needs ``.dense()``, which reads them. ``verify=True`` reads all
        files once and compares them with the digests that were written beside them.
        """
        return cls(**saved.read(folder, verify=verify))

    def save(self, folder: str | Path) -> Silos:
        """Write the samples to a new folder, a ``.npy`` file per array, and open it."""
        saved.save(self, folder)
        return Silos.open(folder)

    # -- looking ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int | str) -> tuple[Features, Tensor]:
        """The ``(features, targets)`` of a client, by its place or its name."""
        i = self.names.index(i) if isinstance(i, str) and i in self.names else i
        if isinstance(i, str) or not 0 <= i < len(self):
            raise IndexError(f"client {i} of {len(self)} ({', '.join(self.names[:5])}{', ...' * (len(self) > 5)})")
        rows = slice(self.offsets[i], self.offsets[i + 1])
        return self.features[rows], self.targets[rows]

    def __repr__(self) -> str:
        sizes = self.sizes
        spread = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
        shape = "x".join(map(str, self.features.shape[1:]))
        many = "client" if len(self) == 1 else "clients"
        return f"Silos({len(self)} {many}, {spread} samples each, {shape} features)"

    @property
    def held_out(self) -> dict[HeldOut, tuple[Features, Tensor]]:
        """The parts that nobody trains on, where there are any."""
        parts: dict[HeldOut, tuple[Features, Tensor] | None] = {"validation": self.validation, "test": self.test}
        return {name: part for name, part in parts.items() if part is not None}

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
        if self.targets.ndim > 1:
            return None
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

    def partition(self, name: str | Callable[..., Any], *, clients: int, seed: int = 0, **options: Any) -> Silos:
        """Pool all samples and deal them out again, as :mod:`fedcomposite.data.partition` lists, or by a function."""
        from fedcomposite.data.partition import partition

        return partition(self, name, clients=clients, seed=seed, **options)

    def subset(self, groups: Sequence[npt.NDArray[np.int64] | int | str], names: Sequence[str] = ()) -> Silos:
        """Some of the clients as they are, by place or name, or new silos from groups of rows of the pooled samples.

        >>> import fedcomposite as fc
        >>> fc.data.load("heart_disease").subset(["hungary"]).names
        ('hungary',)
        """
        kinds = set() if isinstance(groups, str) else {np.ndim(g) for g in groups}
        if kinds == {0}:
            return self._chosen(cast("Sequence[int | str]", groups), names)
        if kinds != {1}:
            raise DataError(f"subset: {groups!r:.60}, must be a list of clients, or of arrays of row numbers")
        dealt = [np.sort(np.asarray(g)) for g in groups]
        rows = torch.from_numpy(np.concatenate(dealt))
        offsets = tuple(np.cumsum([0, *(len(g) for g in dealt)]).tolist())
        return replace(
            self,
            features=self.features[rows],
            targets=self.targets[rows],
            offsets=offsets,
            names=tuple(names),
            ids=(),
            held_by={},
            weights=None if self.weights is None else self.weights[rows],
            margin_offsets=None if self.margin_offsets is None else self.margin_offsets[rows],
        )

    def _chosen(self, clients: Sequence[int | str], names: Sequence[str]) -> Silos:
        """Some clients with their samples, names and numbers; of held-out samples those that are known to be theirs."""
        whole = [isinstance(c, int | np.integer) and not isinstance(c, bool) and 0 <= c < len(self) for c in clients]
        strange = [c for c, there in zip(clients, whole, strict=True) if not there and c not in self.names]
        if strange:
            raise DataError(
                f"subset: no client {strange[0]!r}; these are {', '.join(self.names[:9])}{', ...' * (len(self) > 9)}, "
                f"or 0 to {len(self) - 1}"
            )
        places = [self.names.index(c) if isinstance(c, str) else int(c) for c in clients]
        if len(set(places)) < len(places):
            raise DataError(f"subset: client {self.names[max(places, key=places.count)]!r} is given twice")
        kept = self.subset(
            [np.arange(*self.offsets[i : i + 2]) for i in places], names or [self.names[i] for i in places]
        )
        parts: dict[str, Any] = {}
        owners, shifts = {}, dict(self.held_margin_offsets)
        for part, owner in self.held_by.items():
            X, y = self.held_out[part]
            mine = np.flatnonzero(np.isin(owner.numpy(), places))
            parts[part] = (X[mine], y[mine]) if len(mine) else None
            owners[part] = torch.tensor([places.index(i) for i in owner[mine].tolist()], dtype=torch.int64)
            if part in shifts:
                shifts[part] = shifts[part][mine]
            if not len(mine):
                del owners[part]
                shifts.pop(part, None)
        ids = tuple(self.ids[i] for i in places)
        return replace(kept, **parts, ids=ids, held_by=owners, held_margin_offsets=shifts)

    def dense(self) -> Silos:
        """The same samples as tensors, where they are sparse or in a file."""
        held: dict[str, Any] = {part: (dense(X), y) for part, (X, y) in self.held_out.items()}
        return replace(self, features=dense(self.features), **held)

    def class_weighted(self, weights: Literal["balanced"] | Mapping[float, float] = "balanced") -> Silos:
        """The same samples, each counting what its class does, times what it counted before.

        Parameters
        ----------
        weights : "balanced" or mapping
            A number per label; or samples / (classes * samples of the class) over all silos, as in scikit-learn.
        """
        labels, at, counts = torch.unique(self.targets, return_inverse=True, return_counts=True)
        if self.classes is None:
            raise DataError("class_weighted: the targets are not classes")
        if weights == "balanced":
            each = len(self.targets) / (len(labels) * counts.double())
        elif isinstance(weights, Mapping) and {float(v) for v in labels} <= {float(v) for v in weights}:
            given = {float(k): float(v) for k, v in weights.items()}
            each = torch.tensor([given[float(v)] for v in labels], dtype=torch.float64)
        else:
            shown = ", ".join(f"{float(v):g}" for v in labels[:10])
            raise DataError(
                f"class_weighted: weights = {weights!r:.60}, must be 'balanced' or have a number for each of {shown}"
            )
        return replace(self, weights=each[at] * (1.0 if self.weights is None else self.weights))

    def split(self, test: float = 0.2, seed: int = 0, validation: float = 0.0, *, stratify: bool = False) -> Silos:
        """Hold out shares of every client's samples (at least one stays) as pooled test and validation data.

        ``stratify=True`` gives each part a client's labels in the shares that they have there; which samples those are
        is then a function of the seed, the client and its labels alone.
        """
        shares: dict[HeldOut, float] = {"test": test, "validation": validation}
        wrong = [
            f"{part} = {share!r}" for part, share in shares.items() if not isinstance(share, int | float | np.number)
        ]
        wrong += [] if isinstance(seed, int | np.integer) and seed >= 0 else [f"seed = {seed!r}"]
        if wrong:
            raise DataError(
                f"split: {', '.join(wrong)}; shares must be numbers between 0 and 1, a seed an integer >= 0"
            )
        if sum(shares.values()) >= 1:
            raise DataError(
                f"split: {' and '.join(f'{k} = {v}' for k, v in shares.items() if v)} leave nothing to train on"
            )
        for part, share in shares.items():
            if not (0 < share < 1 or (share == 0 and sum(shares.values()) > 0)):
                raise DataError(f"split: {part} = {share}, must be between 0 and 1")
            if share > 0 and part in self.held_out:
                raise DataError(f"split: these self have {part} data already")
        generator = np.random.default_rng(seed)
        keep: list[npt.NDArray[np.int64]] = []
        out: dict[HeldOut, list[npt.NDArray[np.int64]]] = {part: [] for part, share in shares.items() if share > 0}
        for i in range(len(self)):
            mine = slice(self.offsets[i], self.offsets[i + 1])
            order = stratified(self.targets[mine].numpy(), seed, self.ids[i]) if stratify else None
            rows = self.offsets[i] + (generator.permutation(int(self.sizes[i])) if order is None else order)
            size = len(rows)
            for part, held in out.items():
                cut = min(len(rows) - 1, round(shares[part] * size))
                held.append(rows[:cut])
                rows = rows[cut:]
            keep.append(rows)
        parts: dict[str, Any] = {}
        owners, shifts = dict(self.held_by), dict(self.held_margin_offsets)
        for part, held in out.items():
            chosen = np.sort(np.concatenate(held))
            if len(chosen) == 0:
                most = self.sizes.max()
                raise DataError(f"split: {part} = {shares[part]} of self with at most {most} samples holds out none")
            owners[part] = torch.from_numpy(np.searchsorted(self.offsets, chosen, side="right") - 1)
            parts[part] = self.features[chosen], self.targets[chosen]
            if self.margin_offsets is not None:
                shifts[part] = self.margin_offsets[chosen]
        kept = self.subset(keep, self.names)
        return replace(kept, **parts, ids=self.ids, held_by=owners, held_margin_offsets=shifts)

    def standardize(self) -> Silos:
        """(x - mean) / sd of each feature over the pooled training samples; held-out data are scaled alike.

        A feature that is constant in training is left as it is. Sparse samples stay sparse: their means are subtracted
        where they are multiplied.
        """
        held: dict[str, Any]
        if isinstance(own := self.features, SparseRows):
            held = {k: (v.standardized(own), b) for k, (v, b) in self.held_out.items() if isinstance(v, SparseRows)}
            return replace(self, features=own.standardized(own), **held)
        X = tensors_only(own, "standardize").double()
        mean, sd = X.mean(0), X.std(0, correction=0)
        varies = torch.from_numpy(spread_of(mean.numpy(), sd.numpy()) > 0)
        mean, sd = torch.where(varies, mean, 0.0), torch.where(varies, sd, 1.0)
        held = {k: ((dense(v).double() - mean) / sd, b) for k, (v, b) in self.held_out.items()}
        return replace(self, features=(X - mean) / sd, **held)


def stratified(labels: npt.NDArray[Any], seed: int, client: int) -> npt.NDArray[np.int64]:
    """The rows of one client, at random, so that any first part of them has every label in its share, within one.

    Of a label with m rows the j-th, in a random order, comes at (j + u) / m with one u for the label.

    Examples
    --------
    >>> order = stratified(np.array([0] * 6 + [1] * 3), seed=0, client=0)
    >>> [int((order[:3] < 6).sum()), int((order[:6] < 6).sum())]
    [2, 4]
    """
    kinds, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
    keys = rng.words(seed, rng.Use.SPLIT, np.uint64(client), 0, np.uint64(0), len(labels))
    shifts = rng.words(seed, rng.Use.SPLIT, np.uint64(client), 1, np.uint64(0), len(kinds)) / 2.0**32
    at = np.empty(len(labels))
    for kind, count in enumerate(counts.tolist()):
        mine = np.flatnonzero(which == kind)
        at[mine[np.argsort(keys[mine], kind="stable")]] = (np.arange(count) + shifts[kind]) / count
    return np.lexsort((keys, at))
