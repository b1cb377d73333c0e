"""The relaxed lasso: blends of the lasso and of unpenalized fits on what it kept, by brute force on pooled samples."""

import numpy as np
import pytest
import statsmodels.api as sm

import fedcomposite as fc
from fedcomposite.analysis import fold_of_samples


@pytest.fixture(scope="module")
def problem():
    return posed("logistic")


def posed(loss):
    g = np.random.default_rng(0)
    X = g.normal(size=(240, 6)) + np.array([0, 0, 0, 0, 0, 30])
    z = X[:, 0] - 0.6 * X[:, 1] + 0.3 * X[:, 2]
    y = (g.random(240) < 1 / (1 + np.exp(-z))).astype(float) if loss == "logistic" else z + g.normal(size=240)
    pairs = [(X[a:b], y[a:b]) for a, b in ((0, 90), (90, 150), (150, 240))]
    return fc.Problem(
        fc.Silos.from_arrays(pairs), loss=loss, bias=True, weights="samples", regularizer=fc.regularizers.L1(1.0)
    )


def unpenalized(problem, x, rows=slice(None)):
    """A model on the support of x, by statsmodels."""
    X, y = problem.silos.features.numpy()[rows], problem.silos.targets.numpy()[rows]
    kept = np.append(x[:-1] != 0, True)
    family = sm.families.Binomial() if type(problem.loss).__name__ == "Logistic" else sm.families.Gaussian()
    made = np.zeros(len(x))
    made[kept] = sm.GLM(y, np.column_stack([X, np.ones(len(X))])[:, kept], family=family).fit(tol=1e-15).params
    return made


@pytest.mark.parametrize("loss", ["logistic", "least_squares"])
@pytest.mark.parametrize("gamma", [0.0, 0.3])
def test_models_of_a_relaxed_path_are_blends(loss, gamma):
    one = posed(loss)
    plain, mine = fc.path(one, count=6, ratio=0.05), fc.path(one, count=6, ratio=0.05, gamma=gamma)
    for x, blend, loss_at in zip(plain.solutions.numpy(), mine.solutions.numpy(), mine.losses, strict=True):
        expected = gamma * x + (1 - gamma) * unpenalized(one, x)
        np.testing.assert_allclose(blend, expected, atol=2e-7)
        value = one.objective(blend) - float(one.regularizer.value(mine.solutions.new_tensor(blend)))
        np.testing.assert_allclose(loss_at, value, rtol=1e-10)
    assert (mine.nonzeros == plain.nonzeros).all()
    assert (mine.deviance >= plain.deviance - 1e-12).all()
    assert mine.gamma == gamma


def test_cross_validation_chooses_the_best_blend(problem):
    gammas = [0.0, 0.5, 1.0]
    cv = fc.cross_validate(problem, folds=4, count=8, ratio=0.05, gamma=gammas, seed=1)
    plain = fc.cross_validate(problem, folds=4, count=8, ratio=0.05, seed=1)
    folds = fold_of_samples(problem, 4, 1)
    X, y = np.column_stack([problem.silos.features.numpy(), np.ones(240)]), problem.silos.targets.numpy()
    table = cv.by_gamma.pivot(index="gamma", columns="lambda", values="mean")[cv.lambdas].to_numpy()
    np.testing.assert_allclose(table[2], plain.mean, rtol=1e-9)
    for i, gamma in enumerate(gammas[:2]):
        total = np.zeros(8)
        for fold in range(4):
            for k, x in enumerate(plain.models[fold].numpy()):
                blend = gamma * x + (1 - gamma) * unpenalized(problem, x, folds != fold)
                z = X[folds == fold] @ blend
                total[k] += 2 * (np.logaddexp(0, z) - y[folds == fold] * z).sum() / 240
        np.testing.assert_allclose(table[i], total, rtol=1e-7)
    best = np.unravel_index(table.argmin(), table.shape)
    assert cv.gamma == gammas[best[0]]
    assert cv.index_min == best[1]
    found = fc.analyse(problem, "cv", folds=4, count=8, ratio=0.05, gamma=gammas, seed=1, choice="min")
    np.testing.assert_allclose(found.x, cv.solution("min"), atol=1e-10)
    assert f"gamma = {cv.gamma:g}" in found.message or cv.gamma == 1
    with pytest.raises(ValueError, match="gamma"):
        fc.path(problem, gamma=1.5)
