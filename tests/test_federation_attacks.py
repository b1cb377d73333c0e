"""A rogue coordinator against one site: each attack finds the site's rows where the site has opted out of its policy,
so that the attack is real, and is refused by the default one."""

import math

import numpy as np
import pytest
import torch
from lone_site import D, M, ask, experiment, make_site, people

import fedcomposite as fc
from fedcomposite import rng
from fedcomposite.federation import wire
from fedcomposite.federation.orders import Introduction, Order
from fedcomposite.federation.site.policy import RefusalError


def found(rows, X):
    """How many of the rows of X are among the given ones, to six digits."""
    rows = np.asarray(rows).reshape(-1, X.shape[1])
    return sum(bool(len(rows)) and float(np.abs(rows - x).max(1).min()) < 1e-6 for x in X)


# -- (a) a wide network whose units isolate samples -----------------------------------------------------------------


def isolating_network(site, generator):
    """One evaluation: unit k of the hidden layer is active on the samples whose projection is above a threshold."""
    width = 400
    direction = generator.normal(size=D)
    thresholds = np.linspace(-6, 6, width)
    model = {"name": "mlp", "options": {"hidden": [width]}, "evaluation_samples": 0}
    first = np.tile(direction, (width, 1))
    second = np.stack([np.zeros(width), 1e-9 * np.ones(width)])  # hardly changes the outputs
    x = np.concatenate([first.ravel(), -thresholds, second.ravel(), np.zeros(2)])
    _, got = ask(site, experiment(model=model), model=x)
    g = got["gradient"].double().numpy()
    weights, biases = g[: width * D].reshape(width, D), g[width * D : width * D + width]
    rows = []
    for k in range(width - 1):  # the difference of neighbours is a sum over the samples between their thresholds
        dw, db = weights[k] - weights[k + 1], biases[k] - biases[k + 1]
        if abs(db) > 1e-14:
            rows.append(dw / db)
    return rows


def test_a_network_whose_units_isolate_samples(tmp_path):
    X, _ = people()
    rows = isolating_network(make_site(tmp_path / "1", networks=True), np.random.default_rng(1))
    assert found(rows, X) >= M // 2  # those that are alone between two thresholds
    with pytest.raises(RefusalError, match="allows linear models only"):
        isolating_network(make_site(tmp_path / "2"), np.random.default_rng(1))
    with pytest.raises(RefusalError, match="width 400 is over this site's max_width = 64"):
        isolating_network(make_site(tmp_path / "3", networks=True, max_width=64), np.random.default_rng(1))
    with pytest.raises(RefusalError, match="mlp is not among this site's models"):
        isolating_network(make_site(tmp_path / "4", networks=True, models=["cnn"]), np.random.default_rng(1))


# -- (b) minibatches of known rows ----------------------------------------------------------------------------------


def known_batches(site, rounds, batch=10, seed=3):
    """Gradients of least squares at zero on batches whose rows follow from the seed: a linear system for rows y_j x_j;
    then once more at a unit vector for the products of entries. Here: rows times targets."""
    config = f"seed = {seed}\n" + experiment("least_squares", batch_size=batch)
    system, right = np.zeros((rounds, M)), []
    for r in range(rounds):
        drawn = rng.batches(seed, np.zeros(1, np.uint64), np.array([M], np.uint64), r, range(1), batch)
        np.add.at(system[r], drawn.ravel().astype(int), 1 / batch)
        _, got = ask(site, config, round=r, message=np.zeros(D), labels=())
        right.append(got["reply.dx"].numpy())  # minus the gradient: mean of y_j x_j
    return np.linalg.lstsq(system, np.stack(right), rcond=None)[0]


def test_minibatches_whose_rows_are_known(tmp_path):
    generator = np.random.default_rng(0)
    X, y = generator.normal(size=(M, D)), generator.normal(size=M) + 3.0
    rows = known_batches(make_site(tmp_path / "1", (X, y), reproducible_batches=True), 70)
    assert found(rows, X * y[:, None]) == M
    rows = known_batches(make_site(tmp_path / "2", (X, y)), 70)
    assert found(rows, X * y[:, None]) == 0


def test_batches_are_secret_but_repeatable(tmp_path):
    """The same job draws the same batches at a site that was restarted, another job or another site other ones."""
    config = experiment("logistic", batch_size=10)
    one = ask(make_site(tmp_path / "1"), config, message=np.zeros(D))[1]["reply.dx"]
    assert torch.equal(one, ask(make_site(tmp_path / "1"), config, message=np.zeros(D))[1]["reply.dx"])
    assert not torch.equal(one, ask(make_site(tmp_path / "1"), config, message=np.zeros(D), job="b")[1]["reply.dx"])
    assert not torch.equal(one, ask(make_site(tmp_path / "2"), config, message=np.zeros(D))[1]["reply.dx"])
    assert (tmp_path / "1" / "secret").stat().st_mode & 0o077 == 0
    assert (tmp_path / "1").stat().st_mode & 0o077 == 0
    assert len((tmp_path / "1" / "secret").read_bytes()) == 32


def test_small_batches_are_refused(tmp_path):
    with pytest.raises(RefusalError, match="batch_size = 9 is below this site's min_batch = 10"):
        ask(make_site(tmp_path), experiment(batch_size=9), message=np.zeros(D))


# -- (c) evaluations on single samples ------------------------------------------------------------------------------


def one_patient(site, clients=1, samples=1):
    """The gradient of softmax regression on one sample: class 0's weights get (p - 1) x, its bias p - 1."""
    model = {"name": "linear", "evaluation_samples": samples}
    _, got = ask(site, experiment(model=model), model=np.zeros(2 * D + 2), clients=clients)
    g = got["gradient"].double().numpy()
    return [g[:D] / g[2 * D]]


def test_an_evaluation_on_one_sample(tmp_path):
    X, _ = people()
    assert found(one_patient(make_site(tmp_path / "1", networks=True, min_evaluation=1, min_parties=1)), X) == 1
    with pytest.raises(RefusalError, match="allows linear models only"):
        one_patient(make_site(tmp_path / "2"))
    with pytest.raises(RefusalError, match="are below this site's min_evaluation = 10"):
        one_patient(make_site(tmp_path / "3", networks=True, min_parties=1))
    with pytest.raises(RefusalError, match="evaluation_samples = 2000 of 2000 clients are below"):
        one_patient(make_site(tmp_path / "4", networks=True), clients=2000, samples=2000)


def one_row_test(folder, **limits):
    """Least squares on a test part of one row: its losses at D + 1 models and two more give the row and its target."""
    X, y = people()
    secret = np.array([[0.3, -1.7, 2.2, 0.4, -0.9]]), np.array([1.5])
    site = make_site(folder, (X, y), test=secret, **limits)
    losses = []
    for r, x in enumerate([np.zeros(D), *np.eye(D), *(-np.eye(D))]):
        _, got = ask(site, experiment("least_squares"), round=r, model=x, labels=())
        losses.append(got["counts.test/loss"][0, 0].item())
    target = math.sqrt(2 * losses[0])
    row = [(m - p) / (2 * target) for p, m in zip(losses[1 : D + 1], losses[D + 1 :], strict=True)]
    return found([row], secret[0])


def test_a_test_file_of_one_row(tmp_path):
    assert one_row_test(tmp_path / "1", min_evaluation=1) == 1
    with pytest.raises(fc.DataError, match="1 test samples, fewer than min_evaluation = 10"):
        one_row_test(tmp_path / "2")


# -- (d) targets as class labels ------------------------------------------------------------------------------------


def introduce(site, loss):
    answer = site.answer(
        wire.content(order=Order(job=loss.replace("_", "-"), site="a", config=experiment(loss)).model_dump_json())
    )
    if wire.kind(answer) == "refusal":
        raise RefusalError(wire.text(answer, "refusal"))
    return Introduction.read(wire.text(answer, "introduction")).labels


def test_distinct_targets_do_not_leave_as_classes(tmp_path):
    """43 survival days stay at the site whatever the loss is; classes are told if the site's own file names them."""
    X, _ = people()
    days = np.random.default_rng(0).permutation(np.arange(M) + 100.0)
    opted = {"parameter_share": math.inf, "min_class": 1}
    assert introduce(make_site(tmp_path / "1", (X, days), classes=days.tolist(), **opted), "multinomial") == sorted(
        days
    )
    for loss in ("multinomial", "logistic"):
        with pytest.raises(RefusalError, match="its data do not fit this experiment"):
            introduce(make_site(tmp_path / "2", (X, days), **opted), loss)
    assert introduce(make_site(tmp_path / "3", (X, days)), "least_squares") == []
    kinds = np.arange(M) % 3.0
    assert introduce(make_site(tmp_path / "4", (X, kinds), classes=[0, 1, 2]), "multinomial") == [0, 1, 2]
    with pytest.raises(fc.DataError, match="the target 2 is not among its classes"):
        make_site(tmp_path / "5", (X, kinds), classes=[0, 1])
    assert introduce(make_site(tmp_path / "6", (X, np.arange(M) % 2.0)), "logistic") == [0, 1]


def rare_class(site):
    """Multinomial at zero: class c's gradient is mean(x)/C - (1/m) sum of the rows of class c."""
    _, got = ask(site, experiment("multinomial"), model=np.zeros(3 * D), labels=(0.0, 1.0, 2.0))
    g = got["gradient"].numpy().reshape(D, 3)
    rest = ask(site, experiment("multinomial"), round=1, model=np.zeros(3 * D), labels=(0.0, 1.0, 2.0))[1]
    assert torch.equal(rest["gradient"], got["gradient"])
    return g


def test_a_class_of_one_sample(tmp_path):
    X, _ = people()
    X = X - X.mean(0)
    y = np.r_[2.0, np.arange(M - 1) % 2]
    g = rare_class(make_site(tmp_path / "1", (X, y), classes=[0, 1, 2], min_class=1))
    assert found([-M * g[:, 2]], X) == 1
    with pytest.raises(RefusalError, match="fewer samples here than min_class = 5"):
        rare_class(make_site(tmp_path / "2", (X, y), classes=[0, 1, 2]))


# -- (e) full gradients of linear models at models of the coordinator's choice --------------------------------------


def half_spaces(site, direction, queries, scale):
    """Logistic with an intercept at steep models: the gradient counts and sums the samples of a half-space. Bisection
    moves the plane until exactly one sample is beyond it."""
    config, r = experiment("logistic", bias=True), 0

    def beyond(threshold):
        nonlocal r
        x = scale * np.r_[direction, -threshold]
        _, got = ask(site, config, round=r, model=x)
        r += 1
        return got["gradient"].numpy() * M

    none = beyond(1e3)
    low, high = -10.0, 10.0
    while r < queries:
        middle = (low + high) / 2
        inside = beyond(middle) - none
        if abs(inside[-1] - 1) < 1e-3:
            return r, inside[:-1] / inside[-1]
        low, high = (middle, high) if inside[-1] > 1 else (low, middle)
    return r, np.full(D, math.nan)


def test_steep_models_single_out_a_row_with_full_gradients(tmp_path):
    """What full gradients of a logistic model can give away, in so many queries; the default bounds margins."""
    X, _ = people()
    direction = np.random.default_rng(2).normal(size=D)
    direction /= np.linalg.norm(direction)
    queries, row = half_spaces(make_site(tmp_path / "1", max_margin=math.inf), direction, 60, 1e5)
    assert found([row], X) == 1
    assert queries <= 12
    with pytest.raises(RefusalError, match="margins beyond this site's max_margin = 10"):
        half_spaces(make_site(tmp_path / "2"), direction, 60, 1e5)


def test_any_number_of_least_squares_gradients_gives_second_moments_only(tmp_path):
    """D + 1 gradients give X'X and X'y; they predict every further one, so that there is nothing more to learn."""
    X, y = people()
    site, config = make_site(tmp_path), experiment("least_squares")
    points = [np.zeros(D), *np.eye(D)]
    seen = [ask(site, config, round=r, model=x, labels=())[1]["gradient"].numpy() for r, x in enumerate(points)]
    second = np.stack([g - seen[0] for g in seen[1:]], 1)
    np.testing.assert_allclose(second, X.T @ X / M, atol=1e-12)
    np.testing.assert_allclose(-seen[0], X.T @ y / M, atol=1e-12)
    x = np.random.default_rng(0).normal(size=D) * 1e3
    _, more = ask(site, config, round=D + 1, model=x, labels=())
    np.testing.assert_allclose(more["gradient"].numpy(), second @ x + seen[0], rtol=1e-10)
