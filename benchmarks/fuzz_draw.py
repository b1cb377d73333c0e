"""Random problems for the fuzz: every one a function of (seed, number) alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import fedcomposite as fc
from benchmarks.fuzz_cox import ENTRY, EVENT
from benchmarks.fuzz_oracle import Pooled, losses, slopes
from benchmarks.fuzz_terms import Array, Term

KINDS = ("estimator", "solve", "path", "confidence")
_SHARES = (0.4, 0.4, 0.12, 0.08)
REAL = ("least_squares", "huber", "quantile", "absolute")
TWO = ("logistic", "squared_hinge", "hinge")
LOSSES = (*REAL, *TWO, "poisson", "multinomial")
_TIMES = 0.11  # share of problems that are of times to an event
_CLUSTERS = 0.04  # share of problems whose term is ClusteredLasso
_OF_ESTIMATORS = tuple(name for name in LOSSES if name != "absolute")
_OF_PATHS = ("least_squares", "huber", "logistic", "squared_hinge", "poisson", "multinomial")
_OF_INTERVALS = ("least_squares", "logistic", "poisson")
_TERMS = (
    *("Zero", "L1", "L1", "L2Squared", "L2Squared", "ElasticNet", "PositivePart", "MCP", "SCAD", "L0", "TopK"),
    *("GroupLasso", "SparseGroupLasso", "LinfNorm", "NuclearNorm", "FusedLasso", "Sparsity2to4"),
    *("Box", "NonNegative", "L2Ball", "L1Ball", "Simplex", "Affine", "Blocks"),
)
TERMS = (*_TERMS, "ClusteredLasso")  # the last one by a stream of its own
_TERMS_OF_PATHS = (
    *("L1", "L1", "ElasticNet", "MCP", "SCAD", "L2Squared", "GroupLasso"),
    *("SparseGroupLasso", "LinfNorm", "NuclearNorm", "FusedLasso"),
)
STYLES = ("plain", "plain", "mean 1000", "spread", "offset 100", "tiny", "huge", "sites apart", "binary")
FLAWS = ("none", "none", "none", "duplicate", "constant", "zero column", "collinear")


@dataclass(frozen=True)
class Case:
    """A problem with its data, and how it is given to the package."""

    kind: str
    loss: str
    option: float
    arrays: list[tuple[Array, Array]]
    weights: list[Array] | None
    offsets: list[Array] | None
    term: Term
    bias: bool
    weighting: str
    classes: int
    words: str  # what the data are like
    as_arrays: bool  # for estimators: arrays and labels of sites in place of silos
    unpenalised: bool  # for estimators: zeros among the weights of L1 as an option

    def __str__(self) -> str:
        sizes = "+".join(str(len(y)) for _, y in self.arrays)
        option = f"({self.option:.3g})" if self.loss in ("quantile", "huber") else ""
        option = f"({self.ties})" if self.loss == "cox" else option
        return (
            f"{self.kind} {self.loss}{option} {self.term} n={sizes} d={self.arrays[0][0].shape[1]} bias={self.bias:d} "
            f"{self.weighting}; {self.words}"
        )

    @property
    def ties(self) -> str:
        """How a Cox model takes them."""
        return "efron" if self.option == 1 else "breslow"

    def silos(self) -> fc.Silos:
        """The data as the package takes them."""
        return fc.Silos.from_arrays(self.arrays, weights=self.weights, margin_offsets=self.offsets)

    def problem(self) -> fc.Problem:
        """The problem as the package has it."""
        known = {"quantile": {"tau": self.option}, "huber": {"delta": self.option}, "cox": {"ties": self.ties}}
        options: dict[str, Any] | None = known.get(self.loss)
        return fc.Problem(
            self.silos(),
            loss=self.loss,
            loss_options=options,
            regularizer=self.term.build(),
            bias=self.bias,
            weights=self.weighting,  # type: ignore[arg-type]
        )

    def pooled(self) -> Pooled:
        """The same as one set of weighted samples."""
        X, y = (np.concatenate([one[k] for one in self.arrays]) for k in (0, 1))
        v = [np.ones(len(b)) for _, b in self.arrays] if self.weights is None else self.weights
        total = sum(one.sum() for one in v)
        each = [one / one.sum() / len(v) if self.weighting == "uniform" else one / total for one in v]
        t = np.zeros(len(y)) if self.offsets is None else np.concatenate(self.offsets)
        y = 2.0 * y - 1 if self.loss in TWO else y.astype(float)
        if self.loss == "cox":
            site = np.repeat(np.arange(len(self.arrays)), [len(b) for _, b in self.arrays])
            absent = [np.full(len(y), -np.inf), np.zeros(len(y))][y.shape[1] - ENTRY :]
            y = np.column_stack([y, *absent, site])
        return Pooled(self.loss, self.option, X, y, np.concatenate(each), t, self.term, self.bias, self.classes)


def generator(seed: int, number: int, stream: int = 0) -> np.random.Generator:
    """The numbers of one case, by counter."""
    key, counter = np.array([seed, number], np.uint64), np.array([0, 0, 0, stream], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draw(seed: int, number: int) -> Case:
    """Case ``number`` of a seed."""
    rng = generator(seed, number)
    kind = str(rng.choice(KINDS, p=_SHARES))
    known = {"estimator": _OF_ESTIMATORS, "solve": LOSSES, "path": _OF_PATHS, "confidence": _OF_INTERVALS}[kind]
    loss = str(rng.choice(known))
    if generator(seed, number, 1).random() < _TIMES:  # a stream of its own: other cases keep their numbers
        loss = "cox"
    classes = 3 if loss == "multinomial" else 1
    name = str(rng.choice(_TERMS_OF_PATHS if kind == "path" else ["L1"] if kind == "confidence" else _TERMS))
    if kind != "confidence" and generator(seed, number, 2).random() < _CLUSTERS:
        name = "ClusteredLasso"
    d = int(np.exp(rng.uniform(0, np.log(30.99 if classes == 1 else 12))))
    n = int(np.exp(rng.uniform(np.log(8), np.log(200.99))))
    if loss == "cox":
        n = min(n, 120)  # cvxpy has a row for each event
    if kind == "confidence":
        d = min(d, 10)
        n = max(n, 8 * (d + 1) + 10)
    if name == "Sparsity2to4" and classes > 1:
        name = "L1"  # its blocks run along a row, which has three entries here
    if name == "Sparsity2to4":
        d = max(4, d - d % 4)
    X, words = _features(rng, n, d, calm=kind == "confidence")
    sites = _sites(rng, n)
    truth = rng.normal(size=(d, classes)) * (rng.random((d, classes)) < 0.5) * np.exp(rng.uniform(-1, 1))
    Z = _standard(X) @ truth
    if words.startswith("sites apart"):
        X = X + sites[:, None] * rng.normal(size=d) * 2
    times = loss == "cox"
    y, more = _times(rng, Z[:, 0], sites) if times else _targets(rng, loss, Z, sites, one_class=kind == "solve")
    option = float(rng.uniform(0.05, 0.95)) if loss == "quantile" else 0.0
    if loss == "huber":
        option = float(np.exp(rng.uniform(-2, 1.5)) * (np.std(y) or 1.0))
    if times:
        option = float(rng.integers(2))
    weighting = str(rng.choice(["samples", "samples", "uniform"]))
    bias = bool(rng.random() < (0.9 if kind == "confidence" else 0.65)) and not times
    v, t, which = _weights_and_offsets(rng, loss, n, sites, y, kind)
    order = [np.flatnonzero(sites == k) for k in np.unique(sites)]
    case = Case(
        kind, loss, option, [(X[g], y[g]) for g in order], None if v is None else [v[g] for g in order],
        None if t is None else [t[g] for g in order], Term("Zero"), bias, weighting, classes,
        ", ".join([words, *more, *which]), bool(rng.random() < 0.5), bool(rng.random() < 0.5),
    )  # fmt: skip
    return Case(**(vars(case) | {"term": _term(rng, name, case.pooled(), kind)}))


def _standard(X: Array) -> Array:
    s = X.std(0)
    return (X - X.mean(0)) / np.where(s > 1e-12 * abs(X).max(0, initial=1e-300), s, np.inf)


def _features(rng: np.random.Generator, n: int, d: int, calm: bool) -> tuple[Array, str]:
    """Features of some style, with a flaw now and then."""
    style, flaw = str(rng.choice(STYLES)), str(rng.choice(FLAWS))
    X = rng.normal(size=(n, d))
    match style:
        case "mean 1000":
            X = 1000 + 1e-4 * X if not calm else 1000 + X
        case "spread":
            X = X * 10 ** rng.uniform(-4, 4, d)
        case "offset 100":
            X = X + 100
        case "tiny":
            X = 1e-4 * X
        case "huge":
            X = 1e4 * X
        case "binary":
            X = (rng.normal(size=d) < X).astype(float)
    if d > 1:
        j, k = rng.choice(d, 2, replace=False)
        match flaw:
            case "duplicate":
                X[:, j] = X[:, k]
            case "constant":
                X[:, j] = 3.0
            case "zero column":
                X[:, j] = 0.0
            case "collinear":
                X[:, j] = X @ rng.normal(size=d) if d > 2 else -2 * X[:, k]
    return X, style if flaw == "none" or d == 1 else f"{style}, {flaw}"


def _sites(rng: np.random.Generator, n: int) -> Array:
    """The site of each sample: one to five, of very different sizes."""
    count = int(rng.integers(1, 6))
    share = rng.dirichlet(np.full(count, 0.7))
    label = rng.choice(count, n, p=share)
    label[:count] = np.arange(count)  # nobody is empty
    return np.asarray(label)


def _targets(rng: np.random.Generator, loss: str, Z: Array, sites: Array, one_class: bool) -> tuple[Array, list[str]]:
    """Targets around margins in standard units."""
    n, z, words = len(Z), Z[:, 0], list[str]()
    if loss in REAL:
        noise = rng.normal(size=n) * np.exp(rng.uniform(-4, 0.5))
        if rng.random() < 0.3:
            noise, words = noise / rng.random(n), ["heavy tails"]
        scale = 10 ** rng.uniform(-3, 3) if rng.random() < 0.5 else 1.0
        shift = rng.normal() * 10 ** rng.uniform(0, 2) if rng.random() < 0.4 else 0.0
        y = scale * (z + noise + shift)
        if rng.random() < 0.15:
            y, words = np.round(y / scale) * scale, [*words, "ties"]
        return y, [*words, f"targets x {scale:.2g}, + {scale * shift:.2g}"]
    if loss == "poisson":
        y = rng.poisson(np.exp(np.clip(z + rng.uniform(-1, 3), -20, 6))).astype(float)
        how = rng.random()
        if how < 0.12:
            y[sites == sites[-1]], words = 0.0, ["zeros at a site"]
        elif how < 0.2:
            y[:], words = 0.0, ["all zeros"]
        return y, words
    if loss == "multinomial":
        noise = rng.gumbel(size=Z.shape) * (0.0 if rng.random() < 0.2 else 1.0)
        y = (Z + noise).argmax(1)
        y[rng.choice(n, 3, replace=False)] = [0, 1, 2]
        return y.astype(float), ["separable, nearly"] if not noise.any() else []
    separable = rng.random() < 0.25
    y = (z + (0.0 if separable else 1.0) * rng.logistic(size=n) + rng.normal() * 0.5 > 0).astype(float)
    words = ["separable"] if separable else []
    if rng.random() < 0.2:
        y[sites == sites[-1]], words = 1.0, [*words, "a site of one class"]
    if len(np.unique(y)) < 2 and not (one_class and rng.random() < 0.5):
        y[rng.integers(n)] = 1 - y[0]
    return y, [*words, "one class"] if len(np.unique(y)) < 2 else words


def _times(rng: np.random.Generator, z: Array, sites: Array) -> tuple[Array, list[str]]:
    """Times to an event, of which some are censored, tied, seen late, in strata, or in an order without exception."""
    n, words, how = len(z), list[str](), rng.random()
    if how < 0.12:
        time, words = np.exp(-np.clip(z, -8, 8)), ["in order"]
    else:
        time = rng.exponential(size=n) * np.exp(-np.clip(z, -8, 8))
    censored = np.quantile(time, rng.uniform(0.2, 0.95)) * rng.uniform(0.2, 3, n)
    event = (time <= censored).astype(float)
    time = np.minimum(time, censored)
    if rng.random() < 0.35:
        grid = np.quantile(time, rng.uniform(0.1, 0.9))
        time, words = np.ceil(time / grid) * grid, [*words, "ties"]
    if rng.random() < 0.15:
        event[sites == sites[-1]], words = 0.0, [*words, "a site without events"]
    event[rng.integers(n)] = 1.0
    columns = [time, event]
    late, strata = rng.random() < 0.25, rng.random() < 0.25
    if late or strata:
        columns.append(np.where(rng.random(n) < 0.6 * late, rng.uniform(0, 0.9, n) * time, -1.0))
        words += ["late entries"] if late else []
    if strata:
        columns.append(rng.integers(0, 2, n).astype(float))
        words += ["strata"]
    return np.column_stack(columns), words


def _weights_and_offsets(
    rng: np.random.Generator, loss: str, n: int, sites: Array, y: Array, kind: str
) -> tuple[Array | None, Array | None, list[str]]:
    v = t = None
    words = list[str]()
    how = rng.random()
    if how < 0.12:
        v, words = rng.uniform(0.2, 3, n), ["weights"]
    elif how < 0.2:
        v, words = np.full(n, 1e-6), ["weights 1e-6"]
    elif how < 0.27:
        v, words = 10 ** rng.uniform(-6, 0, n), ["weights 1e-6 to 1"]
    elif how < 0.35:
        v, words = rng.integers(0, 3, n).astype(float), ["weights with zeros"]
        for k in np.unique(sites):
            v[np.flatnonzero(sites == k)[0]] = 1.0
        for label in np.unique(y) if loss in (*TWO, "multinomial") else []:
            v[np.flatnonzero(y == label)[0]] = 1.0  # a class without weight is none
        if loss == "cox":
            v[np.flatnonzero(y[:, EVENT])[0]] = 1.0
    if loss != "multinomial" and rng.random() < 0.2:
        t = rng.normal(size=n) * (np.std(y) if loss in REAL else 1.0)
        words = [*words, "offsets"]
    return v, t, words


# -- the term h -------------------------------------------------------------------------------------------------------


def _slope(p: Pooled) -> tuple[Array, Array]:
    """The slope of f in each coefficient at the best constant, roughly, and the size of its curvature."""
    step = 1e-6
    c = np.zeros(p.classes)
    if p.bias:
        grid = np.linspace(-8, 8, 81)
        if p.loss not in ("least_squares", "huber", "quantile", "absolute"):
            best = min(grid, key=lambda b: float((p.o * losses(p, b + p.t[:, None] + np.zeros((1, p.classes)))).sum()))
            c[:] = best if p.classes == 1 else 0.0
        else:
            c[:] = np.median(p.y - p.t)
    Z = np.broadcast_to(c + p.t[:, None], (len(p.y), p.classes)).astype(float)
    if p.loss == "cox":
        D = slopes(p, Z) / np.where(p.o > 0, p.o, 1.0)[:, None]
    else:
        D, size = np.zeros_like(Z), step * max(1.0, float(abs(Z).max()), float(abs(p.y).max()))
        for k in range(p.classes):
            move = np.zeros(p.classes)
            move[k] = size
            D[:, k] = (losses(p, Z + move) - losses(p, Z - move)) / (2 * size)
    weighted = p.o[:, None] * p.X
    slope, most = weighted.T @ D, abs(weighted).T @ abs(D)
    return np.where(abs(slope) < 1e-6 * most.max(), 1e-3 * most, slope), (p.o[:, None] * p.X**2).sum(0)


def _term(rng: np.random.Generator, name: str, p: Pooled, kind: str) -> Term:
    """A term whose strength matters for these data."""
    slope, curvature = _slope(p)
    D = p.d * p.classes
    top = float(abs(slope).max()) or 1.0
    strong = rng.random() < 0.85
    lam = top * 10 ** (rng.uniform(-3, 0.2) if strong else rng.uniform(-6, -3))
    if kind == "confidence":
        lam = top * 10 ** rng.uniform(-2.5, -0.7)
    heavy = float(np.median(curvature[curvature > 0], axis=None)) if (curvature > 0).any() else 1.0
    ridge = heavy * 10 ** (rng.uniform(-4, 1) if strong else rng.uniform(-8, -4))
    reach = top / max(float(curvature.max()), 1e-300) * 10 ** rng.uniform(-1.5, 1)  # the size of a coefficient
    second = float(lam * 10 ** rng.uniform(-2, 0.5))
    match name:
        case "Zero" | "NonNegative":
            return Term(name)
        case "L1" if rng.random() < 0.25 and kind != "path":
            return Term(name, {"lam": lam, "weights": tuple(rng.choice([0.0, 0.5, 1.0, 3.0], D).tolist())})
        case "L1" | "PositivePart":
            return Term(name, {"lam": lam})
        case "L2Squared":
            return Term(name, {"lam": ridge})
        case "ElasticNet":
            return Term(name, {"l1": lam, "l2": ridge})
        case "MCP":
            return Term(name, {"lam": lam, "theta": float(10 ** rng.uniform(-0.3, 1.5) / heavy), "kappa": 1.0})
        case "SCAD":
            return Term(name, {"lam": lam, "a": float(2.05 + 10 ** rng.uniform(-1, 1.5)), "kappa": 1.0})
        case "L0":
            return Term(name, {"lam": lam * reach})
        case "TopK":
            return Term(name, {"k": int(rng.integers(1, D + 1))})
        case "GroupLasso" | "SparseGroupLasso":
            return _grouped(rng, name, lam, second, p)
        case "ClusteredLasso":
            own = second if rng.random() < 0.5 or kind == "path" else 0.0  # a path needs something to vary
            return _grouped(rng, name, lam / (D if rng.random() < 0.5 else 1.0), own, p)
        case "LinfNorm":
            return Term(name, {"lam": lam * (D if rng.random() < 0.3 else 1.0)})
        case "NuclearNorm":
            shapes = [(a, D // a) for a in range(1, D + 1) if D % a == 0 and a + D // a <= 16] or [(D, 1)]
            shape = (p.d, p.classes) if p.classes > 1 else shapes[int(rng.integers(len(shapes)))]
            return Term(name, {"lam": lam, "shape": shape})
        case "FusedLasso":
            alone = kind == "path" and D == 1  # one coordinate has no jumps, and a path needs something to vary
            return Term(name, {"lam": lam, "l1": second if rng.random() < 0.5 or alone else 0.0})
        case "Sparsity2to4":
            return Term(name, {"lam": lam / max(reach, 1e-300) ** 2})
        case "Box":
            low, high = -reach * rng.random(), reach * rng.random()
            return Term(name, {"low": -np.inf if rng.random() < 0.2 else low, "high": high})
        case "L2Ball" | "L1Ball":
            return Term(name, {"radius": reach})
        case "Simplex":
            return Term(name, {"total": reach if rng.random() < 0.5 else 1.0})
        case "Affine":
            A = rng.normal(size=(int(rng.integers(1, max(2, D // 2 + 1))), D))
            b = A @ (rng.normal(size=D) * reach)
            return Term(name, {"A": tuple(map(tuple, A.tolist())), "b": tuple(b.tolist())})
    cut = int(rng.integers(0, D + 1))
    parts = [(Term("L1", {"lam": lam}), 0, cut), (Term("L2Squared", {"lam": ridge}), cut, D)]
    return Term("Blocks", parts=tuple(part for part in parts if part[1] < part[2]))


def _grouped(rng: np.random.Generator, name: str, lam: float, second: float, p: Pooled) -> Term:
    D = p.d * p.classes
    fields: dict[str, Any] = {"GroupLasso": {"lam": lam}, "ClusteredLasso": {"lam": lam, "l1": second}}.get(
        name, {"l1": second, "l2": lam}
    )
    if p.classes > 1 and rng.random() < 0.6:
        where = {"groups": str(rng.choice(["rows", "columns"])), "shape": (p.d, p.classes)}
        return Term(name, fields | where | ({"weights": "equal"} if name == "ClusteredLasso" else {}))
    cuts = np.sort(rng.choice(np.arange(1, D), int(rng.integers(0, D)), replace=False)) if D > 1 else []
    sizes = tuple(int(s) for s in np.diff([0, *cuts, D]))
    weights: Any = rng.choice(["sqrt", "equal", "own"])
    weights = tuple(rng.uniform(0.5, 2, len(sizes)).tolist()) if weights == "own" else str(weights)
    return Term(name, fields | {"groups": sizes, "weights": weights})
