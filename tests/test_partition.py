"""Partitions: every sample exactly once, the minimum respected, and the right law."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from scipy import stats

import fedcomposite as fc
from fedcomposite.data import PARTITIONERS, DataError, Silos, load, partition


def pooled(counts=(400, 300, 200, 100), seed=0):
    """One silo whose only feature is the sample's number, with so many samples per class, in random order."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    return Silos.from_arrays([(np.arange(len(labels), dtype=float)[:, None], labels)])


def table(silos):
    """Samples per client and class."""
    return silos.summary().filter(like="class").to_numpy()


@pytest.mark.parametrize("name", PARTITIONERS)
@pytest.mark.parametrize("clients", [1, 7])
def test_every_sample_once(name, clients):
    whole = pooled()
    silos = whole.partition(name, clients=clients, seed=3)
    assert len(silos) == clients
    numbers = silos.features.ravel().long()
    assert torch.equal(numbers.sort().values, torch.arange(1000))
    assert torch.equal(silos.targets, whole.targets[numbers])  # labels travel with their samples
    again = whole.partition(name, clients=clients, seed=3)
    assert torch.equal(again.features, silos.features)
    assert again.offsets == silos.offsets


@pytest.mark.parametrize("name", ["iid", "dirichlet", "half_by_label", "shards", "quantity"])
def test_seed_matters(name):
    one, two = (pooled().partition(name, clients=5, seed=s) for s in (0, 1))
    assert not torch.equal(one.features, two.features)


@pytest.mark.parametrize("name", PARTITIONERS)
@pytest.mark.parametrize("minimum", [1, 60, 100])
def test_minimum(name, minimum):
    options = {"alpha": 0.01} if name in ("dirichlet", "quantity") else {}
    silos = pooled().partition(name, clients=10, minimum=minimum, **options)
    assert silos.sizes.min() >= minimum
    assert torch.equal(silos.features.ravel().long().sort().values, torch.arange(1000))


def test_test_data_stay():
    whole = load("digits", test=0.2)
    parts = whole.partition("dirichlet", clients=4)
    assert torch.equal(parts.test[0], whole.test[0])
    assert parts.feature_names == whole.feature_names


# -- Dirichlet --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.0, 5.0])
def test_dirichlet_marginal(alpha):
    """A client's share of a class is Beta(alpha, (n - 1) alpha), and classes are independent."""
    n, m = 4, 20_000
    whole = pooled((m, m))
    shares = []
    for seed in range(300):
        # straight from the rule: no redraw for a minimum
        rule = PARTITIONERS["dirichlet"](whole, n, 0, np.random.default_rng(seed), alpha=alpha)
        labels = whole.targets.numpy()
        shares.append([[(labels[g] == c).sum() / m for g in rule] for c in (0, 1)])
    shares = np.array(shares)  # (draws, classes, clients)
    rng = np.random.default_rng(0)
    smoothed = (shares * m + rng.random(shares.shape)) / (m + 1)  # undo the rounding to 1/m
    law = stats.beta(alpha, (n - 1) * alpha)
    edges = law.ppf(np.linspace(0, 1, 9)[1:-1])
    edges = edges[edges > 20 / m]  # below, counts are too coarse to compare
    for c in (0, 1):
        for client in range(n):
            for edge in edges:
                p = law.cdf(edge)
                assert abs((smoothed[:, c, client] < edge).mean() - p) < 4.5 * np.sqrt(p * (1 - p) / 300)
    correlation = np.corrcoef(shares[:, 0, 0], shares[:, 1, 0])[0, 1]
    assert abs(correlation) < 4.5 / np.sqrt(300)


def by_rejection(labels, n, alpha, minimum, rng):
    """Counts by the rule of flwr-datasets' DirichletPartitioner, written from its description with plain loops."""
    while True:
        counts = np.zeros((n, labels.max() + 1), int)
        for c in range(labels.max() + 1):
            size, cut, total = int((labels == c).sum()), 0, 0.0
            share = rng.dirichlet([alpha] * n)
            for i in range(n):
                total += share[i]
                end = size if i == n - 1 else int(total * size)
                counts[i, c] = end - cut
                cut = end
        if counts.sum(1).min() >= minimum:
            return counts


def test_dirichlet_given_a_minimum():
    """With a minimum that rejects most draws, sizes and class shares have the law of rejection sampling."""
    whole = pooled((300, 200, 100))
    labels, n, alpha, minimum = whole.targets.numpy(), 4, 0.4, 60
    rng = np.random.default_rng(11)
    theirs = np.array([by_rejection(labels, n, alpha, minimum, rng) for _ in range(400)])
    ours = np.array(
        [table(whole.partition("dirichlet", clients=n, alpha=alpha, minimum=minimum, seed=s)) for s in range(400)]
    )
    free = np.array([by_rejection(labels, n, alpha, 0, rng) for _ in range(400)])
    assert (free.sum(2).min(1) < minimum).mean() > 0.5  # the minimum does matter here
    statistics = {
        "smallest silo": lambda t: t.sum(2).min(1),
        "largest silo": lambda t: t.sum(2).max(1),
        "first client": lambda t: t[:, 0].sum(1),
        "largest part of the first class": lambda t: t[:, :, 0].max(1),
        "part of the last class at the last client": lambda t: t[:, -1, -1],
    }
    for what, statistic in statistics.items():
        assert stats.ks_2samp(statistic(ours), statistic(theirs)).pvalue > 1e-3, what
    # and the test can tell: without the minimum the law is another
    assert stats.ks_2samp(statistics["largest silo"](free), statistics["largest silo"](theirs)).pvalue < 1e-6


def test_dirichlet_001_is_one_client_per_class():
    """At alpha = 0.01 nearly all of a class lies with one client, and that client is uniform."""
    whole = pooled((1000,) * 10)
    tables = np.array([table(whole.partition("dirichlet", clients=10, alpha=0.01, seed=s)) for s in range(60)])
    rng = np.random.default_rng(0)
    expected = rng.dirichlet(np.full(10, 0.01), 20_000).max(1)
    largest = tables.max(1).ravel() / 1000
    # topping up empty silos takes single samples only
    assert largest.mean() == pytest.approx(expected.mean(), abs=4.5 * expected.std() / np.sqrt(600) + 0.005)
    winners = np.bincount(tables.argmax(1).ravel(), minlength=10)
    assert stats.chisquare(winners).pvalue > 1e-3
    assert tables.sum(2).min() >= 1


def test_skew_falls_with_alpha():
    skews = [
        np.mean(
            [
                pooled((500,) * 10).partition("dirichlet", clients=8, alpha=a, seed=s).heterogeneity()["label_skew"]
                for s in range(5)
            ]
        )
        for a in (0.01, 0.1, 1.0, 100.0)
    ]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.7
    assert skews[-1] < 0.06


# -- the others ---------------------------------------------------------------------------------------------------


def test_iid():
    silos = pooled((5000, 5000)).partition("iid", clients=10)
    assert silos.sizes.tolist() == [1000] * 10
    assert stats.chi2_contingency(table(silos)).pvalue > 1e-3
    assert pooled((5, 5)).partition("iid", clients=4).sizes.tolist() == [3, 3, 2, 2]


def test_half_by_label():
    whole = pooled((600,) * 10)
    counts = table(whole.partition("half_by_label", clients=10, seed=2))
    alien = counts - np.diag(np.diag(counts))
    # 300 samples alike per client: about 30 of each label, and half of its own label on top
    assert alien.sum(1).max() <= 300
    assert np.abs(alien[~np.eye(10, dtype=bool)] - 30).max() < 5 * np.sqrt(30)
    assert np.abs(np.diag(counts) - 330).max() < 5 * np.sqrt(150)
    # with more clients than labels, the last ones have their equal share and nothing else
    assert whole.partition("half_by_label", clients=12).sizes[10:].tolist() == [250, 250]
    # three clients: labels 0, 3 to the first, 1 to the second, 2 to the third
    counts = table(pooled((900,) * 4).partition("half_by_label", clients=3))
    favoured = counts > 300
    assert favoured.tolist() == [[True, False, False, True], [False, True, False, False], [False, False, True, False]]
    # labels are counted by their order: -1 is label 0, +1 label 1
    signed = Silos.from_arrays([(np.zeros((400, 1)), np.repeat([-1.0, 1.0], 200))])
    counts = table(signed.partition("half_by_label", clients=2))
    assert (np.diag(counts) > 120).all()


def test_sorted():
    silos = pooled((400, 300, 200, 100)).partition("sorted", clients=4)
    assert table(silos).tolist() == [[250, 0, 0, 0], [150, 100, 0, 0], [0, 200, 50, 0], [0, 0, 150, 100]]


def test_shards():
    silos = pooled((100,) * 10).partition("shards", clients=10, shards=2)
    counts = table(silos)
    assert silos.sizes.tolist() == [100] * 10
    assert ((counts == 0) | (counts == 50) | (counts == 100)).all()
    assert (counts > 0).sum(1).max() <= 2


def test_kmeans_is_a_fixed_point():
    """Every sample is nearest to the mean of its own silo, and separated clusters are found."""
    silos = load("digits").partition("kmeans", clients=6)
    means = torch.stack([silos[i][0].mean(0) for i in range(6)])
    nearest = torch.cdist(silos.features, means).argmin(1).numpy()
    owner = np.repeat(np.arange(6), silos.sizes)
    assert (nearest == owner).mean() > 0.99  # k-means stops when centres move little
    rng = np.random.default_rng(0)
    blobs = Silos.from_arrays(
        [(np.concatenate([rng.normal(9 * c, 1, (50, 2)) for c in range(4)]), np.repeat(np.arange(4), 50))]
    )
    assert sorted(map(tuple, table(blobs.partition("kmeans", clients=4)))) == sorted(
        map(tuple, 50 * np.eye(4, dtype=int))
    )


def test_quantity():
    whole = pooled((10_000, 10_000))
    n, alpha = 5, 1.0
    parts = [whole.partition("quantity", clients=n, alpha=alpha, seed=s) for s in range(300)]
    first = [p.sizes[0] / 20_000 for p in parts]
    assert stats.kstest(first, stats.beta(alpha, (n - 1) * alpha).cdf).pvalue > 1e-3
    assert stats.chi2_contingency(table(parts[0])).pvalue > 1e-3  # labels are alike


def test_zhang_mnist():
    """Zhang, Hu & Johansson: 3000 digits alike at each of 10 clients, the rest of label l at client l."""
    folder = os.environ.get("FEDCOMPOSITE_DATA", "")
    if not os.path.isfile(os.path.join(folder, "mnist", "train-images-idx3-ubyte.gz")):
        pytest.skip("FEDCOMPOSITE_DATA has no mnist/")
    silos = load("mnist").partition("half_by_label", clients=10)
    counts = table(silos)
    published = np.array([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
    assert counts.sum(0).tolist() == published.tolist()
    np.testing.assert_allclose(silos.sizes, 3000 + published / 2, rtol=0.04)
    own = np.diag(counts)
    np.testing.assert_allclose(own, 0.55 * published, rtol=0.04)
    assert silos.features.dtype == torch.uint8


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dirichlett", {}, "unknown partition 'dirichlett'; did you mean 'dirichlet'?"),
        ("dirichlet", {"alpha": 0}, "partition 'dirichlet': alpha = 0, must be a number > 0"),
        ("dirichlet", {"alpha": "low"}, "partition 'dirichlet': alpha = 'low', must be a number > 0"),
        ("dirichlet", {"alpah": 1.0}, "partition 'dirichlet' has no option 'alpah'; did you mean 'alpha'?"),
        ("iid", {"alpha": 1.0}, "partition 'iid' has no option 'alpha' (its options: none)"),
        ("shards", {"shards": 1.5}, "partition 'shards': shards = 1.5, must be an integer >= 1"),
        ("iid", {"clients": "ten"}, "partition 'iid': clients = 'ten', must be an integer >= 1"),
        ("iid", {"clients": 0}, "partition 'iid': clients = 0, must be an integer >= 1"),
        ("iid", {"seed": -1}, "partition 'iid': seed = -1, must be an integer >= 0"),
        ("iid", {"minimum": 0}, "partition 'iid': minimum = 0, must be an integer >= 1"),
        ("iid", {"clients": 1001}, "partition 'iid': cannot give 1001 clients at least 1 of 1000 samples each"),
        ("iid", {"minimum": 400}, "partition 'iid': cannot give 3 clients at least 400 of 1000 samples each"),
    ],
)
def test_errors(name, options, message):
    with pytest.raises(DataError) as caught:
        partition(pooled(), name, **{"clients": 3, **options})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ["dirichlet", "half_by_label", "sorted", "shards"])
def test_continuous_targets_have_no_labels(name):
    with pytest.raises(DataError, match=f"partition '{name}' needs class labels"):
        load("diabetes").partition(name, clients=3)


def test_documented():
    import importlib

    text = importlib.import_module("fedcomposite.data.partition").__doc__
    assert all(f"\n{name} " in text for name in PARTITIONERS)


@pytest.mark.parametrize("name", PARTITIONERS)
def test_held_out_samples_are_measured_after_a_partition(name):
    """test= before the partition or a split after it: every silo has held-out samples like its own."""
    plain = fc.data.load("breast_cancer", seed=3)
    first = fc.data.load("breast_cancer", test=0.3, seed=3)
    silos = first.partition(name, clients=4, seed=1)
    bare = dataclasses.replace(first, test=None, held_by={}).partition(name, clients=4, seed=1)
    assert torch.equal(silos.features, bare.features)  # training samples are dealt as without held-out ones
    assert torch.equal(silos.test[1], first.test[1])
    problem = fc.Problem(silos, loss="logistic")
    table = problem.scores(np.zeros(problem.dimension))
    assert table.loc["all", "test_samples"] == round(0.3 * len(plain.targets))
    assert table["test_samples"][:-1].sum() == table.loc["all", "test_samples"]
    assert table["test_accuracy"][table["test_samples"] > 0].notna().all()
    owner, y = silos.held_by["test"].numpy(), silos.test[1].numpy()
    for i in range(4):
        trained, held = silos[i][1].numpy(), y[owner == i]
        assert abs(len(held) / len(y) - len(trained) / len(silos.targets)) < 0.12
        if len(held) > 20:
            assert abs((held == 1).mean() - (trained == 1).mean()) < 0.3  # of 30 samples or so


def test_held_out_numbers_are_dealt_out_too():
    silos = fc.data.load("diabetes", test=0.2).partition("quantity", clients=3, alpha=2.0)
    assert set(silos.held_by["test"].tolist()) == {0, 1, 2}


def test_some_clients_as_they_are():
    """By place or by name, with their own held-out samples, and fits of each."""
    silos = fc.data.load("heart_disease", test=0.2)
    for i, name in enumerate(silos.names):
        for one in (silos.subset([i]), silos.subset([name]), silos.subset(np.array([i]))):
            assert (one.names, one.ids) == ((name,), (i,))
            assert torch.equal(one.features, silos[i][0])
            assert torch.equal(one.test[1], silos.test[1][silos.held_by["test"] == i])
        problem = fc.Problem(one, loss="logistic", regularizer=fc.regularizers.L2Squared(0.1))
        assert fc.solve(problem).status == "converged"
        assert problem.scores(np.zeros(problem.dimension))["test_samples"].tolist() == [len(one.test[1])] * 2
    two = silos.subset(["longbeach", 0])
    assert two.names == ("longbeach", "cleveland")
    owner = silos.held_by["test"]
    assert torch.equal(two.held_by["test"], torch.where(owner[(owner == 3) | (owner == 0)] == 3, 0, 1))
    alone = silos.subset([np.arange(5), np.arange(10, 12)])  # rows, as before
    assert alone.sizes.tolist() == [5, 2]
    wrong = {"no client 7": [7], "no client 'rome'": ["rome"], "is given twice": [0, "cleveland"],
             "list of clients": "hungary", "arrays of row numbers": [np.arange(3), 1]}  # fmt: skip
    for says, given in wrong.items():
        with pytest.raises(fc.data.DataError, match=says):
            silos.subset(given)


def test_a_rule_of_ones_own():
    """A function in place of a name, with its options; a wrong option is told by its name."""

    def in_turn(silos, clients, minimum, rng, *, first: int = 0):
        return [np.arange((first + i) % clients, len(silos.targets), clients) for i in range(clients)]

    silos = pooled()
    found = silos.partition(in_turn, clients=4, first=1)
    assert found[0][0].ravel().tolist() == list(range(1, 1000, 4))
    with pytest.raises(DataError, match="in_turn"):
        silos.partition(in_turn, clients=4, last=1)
    with pytest.raises(DataError, match="gives int, must be a list of 4 clients' samples"):
        silos.partition(lambda silos, clients, minimum, rng: clients, clients=4)
    with pytest.raises(DataError, match="each of the 1000 samples, 0 to 999, to one client"):
        silos.partition(lambda silos, clients, minimum, rng: [np.arange(250)] * clients, clients=4)
