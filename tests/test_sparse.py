"""Sparse samples: everything equals the dense path on the same numbers, and nothing is made dense."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import sparse

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.algorithms import FedNMap, Zhang
from fedcomposite.data import DataError
from fedcomposite.data.sparse import SparseRows
from fedcomposite.problems import LOSSES
from fedcomposite.problems import sparse_products as products

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning")  # torch calls its layouts beta

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
SIZES = (7, 12, 12, 40)


def samples(loss="logistic", sizes=SIZES, features=9, density=0.3, seed=0, dtype=np.float64):
    """Clients' (X, y) with X sparse: an empty row, an empty column and a constant one."""
    generator = np.random.default_rng(seed)
    made = []
    for m in sizes:
        X = generator.normal(size=(m, features)) * (generator.random((m, features)) < density)
        X[m // 2] = 0.0
        X[:, 3], X[:, 5] = 0.0, 2.0
        z = X[:, 0] - X[:, 1] + generator.normal(size=m)
        y = {"multinomial": np.digitize(z, [-0.5, 0.5]), "poisson": generator.poisson(1.5, m)}.get(loss, np.sign(z))
        made.append((sparse.csr_array(X.astype(dtype)), y))
    return made


def both(loss="logistic", sizes=SIZES, *, standard=False, weights=False, dtype=np.float64, test=False):
    """The same silos sparse and dense."""
    arrays = samples(loss, sizes, dtype=dtype)
    generator = np.random.default_rng(1)
    extra = {"weights": [generator.random(m) + 0.1 for m in sizes]} if weights else {}
    if weights and loss != "multinomial":
        extra["margin_offsets"] = [generator.normal(size=m) for m in sizes]
    silos = [
        fc.Silos.from_arrays(arrays, **extra),
        fc.Silos.from_arrays([(X.toarray(), y) for X, y in arrays], **extra),
    ]
    if test:
        silos = [s.split(0.3) for s in silos]
    return [s.standardize() if standard else s for s in silos]


def problems(loss, *args, h=None, bias=False, pooled=False, metrics=(), **options):
    weights = "samples" if pooled else "uniform"
    return [
        fc.Problem(s, loss=loss, regularizer=h or reg.L1(0.01), bias=bias, weights=weights, metrics=metrics)
        for s in both(loss, *args, **options)
    ]


def test_it_stays_sparse():
    silos, _ = both(standard=True, test=True)
    assert isinstance(silos.features, SparseRows)
    assert isinstance(silos.test[0], SparseRows)
    assert isinstance(silos.partition("iid", clients=3).features, SparseRows)
    assert isinstance(silos[1][0], SparseRows)
    assert repr(silos).endswith("9 features)")


CASES = [(SIZES, *case) for case in itertools.product([False, True], repeat=3)]
CASES += [(sizes, same, same, same) for sizes in ((12, 12), (30,), (3, 300)) for same in (False, True)]


@pytest.mark.parametrize(("packed", "dense"), [(0, 2.0), (60, 0.0)])
@pytest.mark.parametrize("loss", ["logistic", "multinomial"])
def test_every_way_of_multiplying_is_right(loss, packed, dense, monkeypatch):
    """Clients on their own and in blocks of some; Gram matrices of sparse and of dense columns."""
    monkeypatch.setattr(products, "_PACKED", packed)
    monkeypatch.setattr(products, "_DENSE", dense)
    for same in (False, True):
        test_the_smooth_part_is_the_dense_one(loss, SIZES, same, same, same)
    blocks = fc.Problem(both(loss)[0], loss=loss).smooth().X.blocks(np.array([0, 7, 19, 31]), np.array(SIZES))
    assert len(blocks.parts) > 1


def test_lanczos_has_the_same_bound():
    X = sparse.random_array((700, 600), density=0.01, format="csr", rng=np.random.default_rng(0))
    y = np.sign(X.sum(1) - 3)
    for standard in (False, True):
        silos = [fc.Silos.from_arrays([(Z, y)]) for Z in (X, X.toarray())]
        one, two = (fc.Problem(s.standardize() if standard else s, bias=True) for s in silos)
        assert one.smoothness() == pytest.approx(two.smoothness(), rel=1e-9)
        rows = X.toarray() if not standard else two.silos.features.numpy()
        exact = np.linalg.norm(np.column_stack([rows, np.ones(700)]), 2) ** 2 / 700 / 4
        assert exact <= one.smoothness() <= 1.011 * exact


@pytest.mark.parametrize(("sizes", "standard", "bias", "weights"), CASES, ids=str)
@pytest.mark.parametrize("loss", sorted(name for name, loss in LOSSES.items() if loss.by_sample))
def test_the_smooth_part_is_the_dense_one(loss, sizes, standard, bias, weights):
    one, two = problems(loss, sizes, standard=standard, bias=bias, weights=weights, pooled=weights)
    x = torch.linspace(-1, 1, two.dimension, dtype=torch.float64)
    n, everyone = len(sizes), np.arange(len(sizes), dtype=np.uint64)
    assert one.dimension == two.dimension
    assert one.objective(x) == pytest.approx(two.objective(x), rel=1e-12)
    torch.testing.assert_close(one.gradient(x), two.gradient(x), **CLOSE)
    a, b = one.smooth(), two.smooth()
    each = x * torch.linspace(0.5, 1.5, n, dtype=torch.float64).unsqueeze(1)
    torch.testing.assert_close(a.full(everyone)(each), b.full(everyone)(each), **CLOSE)
    torch.testing.assert_close(a.losses(everyone, each), b.losses(everyone, each), **CLOSE)
    rows = torch.stack([o + torch.tensor([0, 2, 2, 1]) for o in torch.as_tensor(a.offsets.astype(int))])
    torch.testing.assert_close(a.minibatch(each, rows), b.minibatch(each, rows), **CLOSE)
    for some in ([0], [n - 1, 0]):
        who = np.array(some, np.uint64)
        torch.testing.assert_close(a.full(who)(each[some]), b.full(who)(each[some]), **CLOSE)
    for of in ("clients", "mean", "samples"):
        assert a.scale(of) == pytest.approx(b.scale(of), rel=1e-12)
    assert a.lipschitz() == pytest.approx(b.lipschitz(), rel=1e-12)
    assert a.second_moment() == pytest.approx(b.second_moment(), rel=1e-12)
    if one.loss.smooth:
        for at in (torch.arange(one.dimension), torch.tensor([0, 4, 5, one.dimension - 1])):
            torch.testing.assert_close(a.hessians(everyone, each, at), b.hessians(everyone, each, at), **CLOSE)


@pytest.mark.parametrize("backend", ["stacked", "loop"])
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize(
    "h",
    [reg.L1(0.02), reg.MCP(0.02, 5.0), reg.ElasticNet(0.01, 0.1), reg.GroupLasso(0.02, groups=3), reg.NonNegative()],
    ids=lambda h: type(h).__name__,
)
@pytest.mark.parametrize("loss", ["logistic", "huber", "multinomial", "poisson"])
def test_runs_are_the_dense_ones(loss, h, batch, backend):
    if loss == "multinomial" and isinstance(h, reg.GroupLasso):
        h = reg.L1(0.03)
    one, two = problems(loss, (12, 12, 20), standard=loss == "huber", bias=loss == "logistic", h=h, test=True)
    method = FedNMap(3, 0.02, 1.0, gamma=0.1, partial_participation=True)
    settings = {"rounds": 5, "batch_size": batch, "seed": 3, "backend": backend, "participation": 0.67}
    runs = [fc.simulate(problem, method, **settings) for problem in (one, two)]
    torch.testing.assert_close(runs[0].solution, runs[1].solution, **CLOSE)
    for a, b in zip(*(run.history for run in runs), strict=True):
        assert set(a) == set(b)
        for key in set(a) - {"seconds"}:
            assert a[key] == pytest.approx(b[key], rel=1e-11, abs=1e-12), key


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("loss", ["logistic", "least_squares", "multinomial", "poisson", "squared_hinge"])
def test_solutions_are_the_dense_ones(loss, standard):
    one, two = problems(loss, standard=standard, bias=loss == "logistic", h=reg.ElasticNet(0.02, 0.01))
    runs = [fc.solve(problem, tolerance=1e-11) for problem in (one, two)]
    assert "ProxNewton" in runs[0].message
    torch.testing.assert_close(runs[0].solution, runs[1].solution, rtol=0, atol=1e-9)
    assert runs[0].certificate.value == pytest.approx(runs[1].certificate.value, abs=1e-11)


def test_metrics_scores_and_predictions():
    one, two = problems("logistic", test=True, standard=True, bias=True, metrics=("auc", "log_loss", "brier"))
    x = torch.linspace(-1, 1, one.dimension, dtype=torch.float64)
    a, b = one.evaluate(x).metrics, two.evaluate(x).metrics
    assert set(a) == set(b)
    for key in a:
        torch.testing.assert_close(a[key], b[key], **CLOSE)
    np.testing.assert_allclose(one.scores(x).to_numpy(float), two.scores(x).to_numpy(float), rtol=1e-12)
    X = samples()[0][0]
    for given in (X, sparse.coo_array(X), torch.from_numpy(X.toarray()).to_sparse_csr()):
        torch.testing.assert_close(one.predict(x, given), two.predict(x, X.toarray()), **CLOSE)
    torch.testing.assert_close(one.predict(x, one.silos.features), two.predict(x, two.silos.features), **CLOSE)


def test_float32_is_not_copied():
    silos, plain = both(dtype=np.float32, sizes=(12, 12), standard=True)
    assert silos.features.dtype == torch.float32
    problem, dense = (fc.Problem(s, regularizer=reg.L1(0.01)) for s in (silos, plain))
    for dtype in (torch.float32, torch.float64):
        smooth = problem.smooth(dtype)
        x = torch.linspace(-1, 1, 9, dtype=dtype)
        seen = smooth.evaluate(x)
        smooth.full(np.arange(2, dtype=np.uint64))(x.expand(2, -1))
        assert np.shares_memory(smooth.X.rows.values, silos.features.values)
        assert np.shares_memory(smooth.X.pooled.parts[0][1].data, silos.features.values)
        assert seen.gradient.dtype == dtype
        close = CLOSE if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(seen.gradient, dense.smooth(dtype).evaluate(x).gradient, **close)
    wide, _ = both(sizes=(12, 12))
    run = fc.simulate(fc.Problem(wide), Zhang(2, 0.1, 1.0), rounds=2, dtype=torch.float32)
    assert run.solution.dtype == torch.float32


def test_standardising_twice_and_held_out_samples():
    one, two = both(test=True)
    for _ in range(2):
        one, two = one.standardize(), two.standardize()
        torch.testing.assert_close(one.dense().features, two.features, **CLOSE)
        torch.testing.assert_close(one.dense().test[0], two.test[0], **CLOSE)


def test_rows_as_tensors_have_them():
    one, two = both()
    X, D = one.features, two.features
    for rows in (slice(3, 9), slice(None), slice(5, 5), slice(0, 30, 4), np.array([4, 4, 0, -1]), torch.tensor([7, 2])):
        torch.testing.assert_close(X[rows].dense(), D[rows])
    order = [3, 1, 0, 2, 8, 7, 5, 4, 6]
    torch.testing.assert_close(X.columns(order).dense(), D[:, order])
    scaled = one.standardize().features
    torch.testing.assert_close(scaled.columns(order).dense(), scaled.dense()[:, order])


def forms(X):
    """One matrix in every form that is taken."""
    rng = np.random.default_rng(0)
    C = sparse.coo_array(X)
    shuffled = rng.permutation(C.nnz)
    twice = sparse.coo_array((np.tile(C.data / 2, 2), (np.tile(C.row, 2), np.tile(C.col, 2))), shape=X.shape)
    wide = sparse.csr_array(X)
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)
    zeros = sparse.csr_array(X + np.where(np.arange(X.shape[1]) == 3, 9.0, 0.0))
    zeros.data[zeros.data == 9.0] = 0.0
    unsorted = sparse.csr_array(X)
    unsorted.indices, unsorted.data = unsorted.indices.copy(), unsorted.data.copy()
    a, b = unsorted.indptr[:2]
    unsorted.indices[a:b], unsorted.data[a:b] = unsorted.indices[a:b][::-1], unsorted.data[a:b][::-1]
    T = torch.from_numpy(X)
    return {
        "csc": sparse.csc_array(X), "old": sparse.csr_matrix(X), "lil": sparse.lil_matrix(X), "int64": wide,
        "coo": sparse.coo_array((C.data[shuffled], (C.row[shuffled], C.col[shuffled])), shape=X.shape),
        "duplicates": twice, "zeros": zeros, "unsorted": unsorted,
        "torch coo": T.to_sparse(), "torch csr": T.to_sparse_csr(), "torch csc": T.to_sparse_csc(),
    }  # fmt: skip


def test_every_form_is_the_same_data():
    X, y = samples()[1]
    X = X.toarray()
    plain = fc.Silos.from_arrays([(sparse.csr_array(X), y)]).features
    for name, given in forms(X).items():
        features = fc.Silos.from_arrays([(given, y)]).features
        for part, array in plain.tensors().items():
            torch.testing.assert_close(features.tensors()[part], array, rtol=0, atol=1e-15, msg=name)
        assert features.indices.dtype == np.int32


def test_later_changes_do_not_reach_the_silos():
    X, y = samples()[0]
    silos = fc.Silos.from_arrays([(X, y)])
    before = silos.features.values.copy()
    X.data[:] = 7.0
    np.testing.assert_array_equal(silos.features.values, before)


def test_whole_numbers_booleans_and_nothing_at_all():
    y = [1.0, -1.0]
    silos = fc.Silos.from_arrays([(sparse.csr_array(np.eye(2, dtype=kind)), y) for kind in (bool, np.int8, np.int64)])
    assert silos.features.dtype == torch.float64
    empty = fc.Silos.from_arrays([(sparse.csr_array((2, 4)), y), (sparse.csr_array(np.eye(2, 4)), y)])
    problem = fc.Problem(empty, regularizer=reg.L1(0.01), bias=True)
    assert fc.solve(problem).status == "converged"
    nothing = fc.Problem(fc.Silos.from_arrays([(sparse.csr_array((2, 4)), y)]).standardize())
    assert nothing.smoothness() == 0.0
    assert float(nothing.gradient(torch.ones(4)).norm()) == 0.0


def broken():
    X = sparse.csr_array(np.eye(3))
    X.indices = np.array([0, 7, 2], np.int32)
    return X


def with_value(value, kind=float):
    X = sparse.lil_array((3, 4), dtype=kind)
    X[1, 2] = value
    return sparse.csr_array(X)


Y = [1.0, -1.0, 1.0]
WRONG = {
    "nan": ([(with_value(np.nan), Y)], r"client 0, features: 1 value\(s\) are NaN or infinite, .* row 1, column 2"),
    "inf": ([(with_value(np.inf), Y)], "NaN or infinite"),
    "complex": ([(with_value(1j, complex), Y)], "numbers of type complex128 are not supported"),
    "digits": ([(with_value(2**53 + 1, np.int64), Y)], r"1 whole number\(s\) beyond 2\^53"),
    "width": ([(with_value(1), Y), (sparse.csr_array((3, 5)), Y)], r"client 1 has samples of shape \(5,\), the first"),
    "rows": ([(with_value(1), [1.0])], r"targets have shape \(1,\), expected \(3,\)"),
    "no rows": ([(sparse.csr_array((0, 4)), [])], "empty silo"),
    "no columns": ([(sparse.csr_array((3, 0)), Y)], "has no features"),
    "index": ([(broken(), Y)], "not a valid sparse matrix"),
    "mixed": ([(with_value(1), Y), (np.eye(3, 4), Y)], "client 1 has dense features, the first client sparse ones"),
    "mixed too": ([(np.eye(3, 4), Y), (with_value(1), Y)], "client 1 has sparse features, the first client dense ones"),
    "targets": ([(with_value(1), sparse.csr_array(np.eye(3)[:1]))], "targets: a sparse matrix"),
    "one axis": ([(torch.zeros(3).to_sparse(), Y)], r"expected \(samples, features\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    given, message = WRONG[name]
    with pytest.raises(DataError, match=message) as caught:
        fc.Silos.from_arrays(given)
    assert "\n" not in str(caught.value)


def test_what_needs_tensors_says_so():
    silos, _ = both()
    with pytest.raises(DataError, match=r"a model needs dense features, these are sparse; .* silos.dense\(\)"):
        fc.Problem(silos, model=torch.nn.Linear(9, 2))
    assert fc.Problem(silos.dense(), model=torch.nn.Linear(9, 2).double()).dimension == 20
    with pytest.raises(DataError, match="before they are standardised"):
        silos.standardize().partition("kmeans", clients=2)
    assert len(silos.partition("kmeans", clients=2)) == 2
    with pytest.raises(DataError, match=r"sparse features are for the CPU, not meta; make them dense: silos.dense\(\)"):
        fc.Problem(silos).smooth(device="meta")


WIDE = """
import resource
import numpy as np
from scipy import sparse
import fedcomposite as fc

X = sparse.random_array((2000, 47_000), density=0.0015, format="csr", rng=np.random.default_rng(0))
y = np.where(X[:, :400].sum(1) - X[:, 400:800].sum(1) > 0, 1.0, -1.0)
small = fc.Silos.from_arrays([(X[:50, :60], y[:50])])
fc.solve(fc.Problem(small, regularizer=fc.regularizers.L1(0.02)))  # whatever the first call loads
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
silos = fc.Silos.from_arrays([(X[:700], y[:700]), (X[700:], y[700:])]).standardize()
problem = fc.Problem(silos, regularizer=fc.regularizers.L1(0.04), bias=True)
run = fc.solve(problem, tolerance=1e-8)
fc.simulate(problem, fc.algorithms.Zhang(3, 1e-3, 1.0), rounds=3, batch_size=50)
assert run.status == "converged", run.message
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000)
"""


@pytest.mark.slow
def test_a_wide_problem_is_never_dense():
    """2,000 samples of 47,000 features: 752 MB dense; a fit keeps vectors of 0.4 MB, most of them Lanczos' basis."""
    done = subprocess.run([sys.executable, "-c", WIDE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 250
