"""Tables of numbers: LIBSVM's binary problems, two medical data sets and the London schools.

Heart Disease and the schools come as they were collected, one silo per hospital or school; the others are pooled.
``test`` holds out that share of every silo; ``standardize`` scales the features to mean 0 and variance 1 over
the pooled training samples.
"""

from __future__ import annotations

import io
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedcomposite.data.catalog import FILES
from fedcomposite.data.fetch import fetch
from fedcomposite.data.silos import Seed, Share, Silos

Floats = npt.NDArray[np.float64]

WISCONSIN = (
    "clump thickness",
    "uniformity of cell size",
    "uniformity of cell shape",
    "marginal adhesion",
    "single epithelial cell size",
    "bare nuclei",
    "bland chromatin",
    "normal nucleoli",
    "mitoses",
)
HEART = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal")
HOSPITALS = ("cleveland", "hungary", "switzerland", "longbeach")
SCHOOL = (
    *(f"year {i}" for i in (1, 2, 3)),
    "percent free meals",
    "percent verbal reasoning band 1",
    *(f"gender {i}" for i in (1, 2)),
    *(f"verbal reasoning band {i}" for i in (1, 2, 3)),
    *(f"ethnic group {i}" for i in range(1, 12)),
    *(f"school gender {i}" for i in (1, 2, 3)),
    *(f"school denomination {i}" for i in (1, 2, 3)),
    "constant",
)


def finish(silos: Silos, standardize: bool, test: float, validation: float, seed: int) -> Silos:
    """Hold out data first, so that the scaling knows nothing of them."""
    silos = silos.split(test, seed, validation) if test or validation else silos
    return silos.standardize() if standardize else silos


def _svmlight(content: bytes, features: int) -> tuple[npt.NDArray[np.float32], Floats]:
    from sklearn.datasets import load_svmlight_file

    X, y = load_svmlight_file(io.BytesIO(content), n_features=features, dtype=np.float32, zero_based=False)
    return X.toarray(), y.astype(np.float64)


def a9a() -> Silos:
    """Adult census incomes (Platt 1998): 32561 + 16281 people, 123 binary features, +1 if over 50000 dollars."""
    train, test = (_svmlight(content, 123) for content in fetch("a9a", FILES["a9a"]))
    return Silos.from_arrays([train], names=["pooled"], test=test)


def w8a(*, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0) -> Silos:
    """Web pages (Platt 1998): 49749 pages, 300 binary features, labels -1 (48270) and +1 (1479)."""
    (content,) = fetch("w8a", FILES["w8a"])
    return finish(Silos.from_arrays([_svmlight(content, 300)], names=["pooled"]), False, test, validation, seed)


def mushrooms(*, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0) -> Silos:
    """Mushrooms (UCI): 8124 samples, 112 binary features; the published labels 1 and 2 become -1 and +1 (edible)."""
    (content,) = fetch("mushrooms", FILES["mushrooms"])
    X, y = _svmlight(content, 112)
    return finish(Silos.from_arrays([(X, 2 * y - 3)], names=["pooled"]), False, test, validation, seed)


def wisconsin(*, standardize: bool = True, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0) -> Silos:
    """Breast cancer, Wisconsin original (Wolberg 1992): 699 samples, 9 features from 1 to 10, malignant (+1) or not.

    The 16 missing values, all of bare nuclei, are replaced by the mean of that column; the sample number is dropped.
    """
    (content,) = fetch("wisconsin", FILES["wisconsin"])
    frame = pd.read_csv(io.BytesIO(content), header=None, names=["id", *WISCONSIN, "class"], na_values="?")
    X = frame[list(WISCONSIN)].astype(float)
    X = X.fillna(X.mean())
    y = np.where(frame["class"] == 4, 1.0, -1.0)
    return finish(
        Silos.from_arrays([(X.to_numpy(), y)], names=["pooled"], feature_names=WISCONSIN),
        standardize,
        test,
        validation,
        seed,
    )


def heart_disease(
    *,
    missing: Literal["drop", "mean"] = "drop",
    one_hot: bool = False,
    standardize: bool = True,
    test: Share = 0.0,
    validation: Share = 0.0,
    seed: Seed = 0,
) -> Silos:
    """Heart disease (+1) or not at four hospitals (Janosi, Steinbrunn, Pfisterer & Detrano 1988), one silo each.

    Parameters
    ----------
    missing : {"drop", "mean"}
        slope, ca and thal are hardly measured outside Cleveland and always left out. Of the other ten features,
        "drop" keeps the complete rows: 303 + 261 + 46 + 130 = 740, those of FLamby. "mean" keeps all 920 rows and fills
        gaps with the mean of the same hospital, which a hospital can do alone.
    one_hot : bool
        Replace chest pain (cp) and the resting electrocardiogram (restecg) by indicators of all but the first
        level, 13 features as in FLamby; otherwise they are numbers.
    standardize : bool
        Scale the features by mean and deviation over all hospitals' training rows (a federation learns these from one
        secure sum).
    test, validation : float
        Shares of every silo that are held out.
    seed : int
        Chooses the held-out rows.

    Notes
    -----
    Cholesterol is 0 for every Swiss patient: it was not measured. The zeros are kept, as others keep them; for a
    recipe that treats them as missing, see :func:`heart_frames` and the experiment ``heart-recipe``.
    """
    frames = [frame.drop(columns=["slope", "ca", "thal"]) for frame in heart_frames().values()]
    if one_hot:
        frames = [_indicators(_indicators(frame, "cp", (2, 3, 4)), "restecg", (1, 2)) for frame in frames]
    if missing == "drop":
        frames = [frame.dropna() for frame in frames]
    else:
        frames = [frame.fillna(frame.mean()) for frame in frames]
    arrays = [
        (frame.drop(columns="num").to_numpy(np.float64), np.where(frame["num"] > 0, 1.0, -1.0)) for frame in frames
    ]
    columns = [str(c) for c in frames[0].columns if c != "num"]
    return finish(
        Silos.from_arrays(arrays, names=HOSPITALS, feature_names=columns), standardize, test, validation, seed
    )


def heart_frames() -> dict[str, pd.DataFrame]:
    """The four hospitals' tables as published: 14 columns, gaps as NaN, ``num`` from 0 (healthy) to 4."""
    contents = fetch("heart_disease", FILES["heart_disease"])
    read = [pd.read_csv(io.BytesIO(c), header=None, names=[*HEART, "num"], na_values="?") for c in contents]
    return {name: frame.astype(float) for name, frame in zip(HOSPITALS, read, strict=True)}


def _indicators(frame: pd.DataFrame, column: str, levels: tuple[int, ...]) -> pd.DataFrame:
    """Replace a column by one of 0 and 1 per level; what is missing stays missing."""
    values = frame[column]
    known = {f"{column}={level}": (values == level).astype(float).where(values.notna()) for level in levels}
    return frame.drop(columns=column).assign(**known)


def ilea_schools(
    *, constant: bool = False, standardize: bool = True, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0
) -> Silos:
    """Examination scores of 15362 pupils at 139 schools of Inner London, 1985-87: regression, one silo per school.

    The 27 features are indicators of year, gender, verbal reasoning band, ethnic group, school gender and
    denomination, and two percentages of the school; 15 pupils have no reasoning band. The published constant column
    is dropped (ask the problem for an intercept), unless ``constant=True``.
    """
    from scipy.io import loadmat

    (content,) = fetch("ilea_schools", FILES["ilea_schools"])
    cells = loadmat(io.BytesIO(content))  # type: ignore[arg-type]  # the stubs know paths only
    kept = len(SCHOOL) if constant else len(SCHOOL) - 1
    arrays = [
        (X[:, :kept].astype(np.float64), y.ravel().astype(np.float64))
        for X, y in zip(cells["X"].ravel(), cells["Y"].ravel(), strict=True)
    ]
    names = [f"school {i + 1}" for i in range(len(arrays))]
    return finish(
        Silos.from_arrays(arrays, names=names, feature_names=SCHOOL[:kept]), standardize, test, validation, seed
    )


def _load(name: str, standardize: bool, test: float, validation: float, seed: int, binary: bool = False) -> Silos:
    """Read, hold out a share, standardize the features over the pooled training samples."""
    from sklearn import datasets  # slow to load, and many runs do without it

    bunch: Any = getattr(datasets, f"load_{name}")()
    X, y = np.asarray(bunch.data, float), np.asarray(bunch.target, float)
    if binary:
        y = 2 * y - 1
    silos = Silos.from_arrays([(X, y)], names=["pooled"], feature_names=[str(c) for c in bunch.feature_names])
    return finish(silos, standardize, test, validation, seed)


def breast_cancer(*, standardize: bool = True, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0) -> Silos:
    """Wisconsin diagnostic breast cancer: 569 samples, 30 features, benign (+1) or malignant (-1)."""
    return _load("breast_cancer", standardize, test, validation, seed, binary=True)


def diabetes(*, standardize: bool = True, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0) -> Silos:
    """Diabetes progression after a year: 442 patients, 10 features, regression."""
    return _load("diabetes", standardize, test, validation, seed)


def digits(*, standardize: bool = True, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0) -> Silos:
    """Handwritten digits: 1797 images of 8 x 8, 10 classes."""
    return _load("digits", standardize, test, validation, seed)


def wine(*, standardize: bool = True, test: Share = 0.0, validation: Share = 0.0, seed: Seed = 0) -> Silos:
    """Wine recognition: 178 samples, 13 features, 3 cultivars."""
    return _load("wine", standardize, test, validation, seed)
