"""What is given wrongly is named, with what to give instead, before any work: a table for each way in."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

import fedcomposite as fc
from fedcomposite.algorithms import FedMid
from fedcomposite.analysis import SeparationWarning
from fedcomposite.regularizers import L1

NAN = float("nan")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3))
Y = (X[:, 0] > 0).astype(int)
FRAME = pd.DataFrame(X, columns=["age", "bp", "k"])
SILOS = fc.Silos.from_arrays([(X[:12], Y[:12]), (X[12:], Y[12:])])
TABLE = pd.DataFrame({"age": [40.0, 50, 60], "bp": [1.0, 3, 2], "sick": [0, 1, 1]})
TABLES = {"north": TABLE, "south": TABLE}


@pytest.fixture(scope="module")
def problem():
    return fc.Problem(SILOS, loss="logistic", regularizer=L1(0.02))


@pytest.fixture(scope="module")
def kinked():
    return fc.Problem(SILOS, loss="hinge", regularizer=L1(0.02))


def refused(call, *says):
    """One error of ours, with all of these in it and none of Python's or torch's words."""
    with pytest.raises((TypeError, ValueError, fc.ExportError)) as caught:
        call()
    for words in says:
        assert words in str(caught.value)


NUMBERS = [
    ({"tolerance": "x"}, "tolerance = 'x', must be a number >= 0"),
    ({"tolerance": -1}, "tolerance = -1, must be a number >= 0"),
    ({"tolerance": NAN}, "tolerance = nan, must be a number >= 0"),
    ({"seed": -1}, "seed = -1, must be an integer >= 0"),
    ({"seed": 1.5}, "seed = 1.5, must be an integer >= 0"),
    ({"seed": None}, "seed = None, must be an integer >= 0"),
    ({"rounds": "x"}, "rounds = 'x', must be an integer >="),
    ({"rounds": -1}, "rounds = -1, must be an integer >="),
]
MODELS = [
    ("a", "= 'a', must be a vector of numbers"),
    (["a"], "must be a vector of numbers"),
    ([[0.0], [1.0, 2.0]], "must be a vector of numbers"),
    (np.zeros(3, complex), "must be a vector of numbers"),
    (np.array(["a"] * 3), "must be a vector of numbers"),
    (np.zeros(2), "has shape (2,), expected (3,)"),
    (np.array([NAN, 0, 0]), "has NaN or infinite entries"),
]
RUNNING = [
    *NUMBERS,
    *(({"x0": x0}, says) for x0, says in MODELS),
    ({"participation": None}, "participation = None, must be a number"),
    ({"batch_size": 0}, "batch_size = 0, must be an integer >= 1 or none"),
    ({"on_record": 3}, "on_record = 3, must be a function or none"),
    ({"on_record": [print]}, "on_record = [<built-in function print>], must be a function"),
]


@pytest.mark.parametrize(
    ("wrong", "says"), [*RUNNING, ({"local_steps": 0}, "local_steps = 0, must be an integer >= 1")]
)
def test_solve(problem, kinked, wrong, says):
    refused(lambda: fc.solve(problem, **wrong), says)
    refused(lambda: fc.solve(kinked, **wrong), says)
    refused(lambda: fc.solve(problem, **{"participation": 0.5, **wrong}), says)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *RUNNING,
        ({"callbacks": print}, "must be a list: callbacks=[...]"),
        ({"callbacks": None}, "callbacks = None, must be a list"),
        ({"callbacks": [fc.callbacks.EarlyStopping]}, "EarlyStopping is a class; give one of it: EarlyStopping(...)"),
        ({"stationarity_step": "a"}, "stationarity_step = 'a', must be a number > 0 or none"),
        ({"stationarity_step": -1}, "stationarity_step = -1, must be a number > 0"),
        ({"memory_limit": "a"}, "memory_limit = 'a', must be a number or none"),
        ({"state_dir": 3}, "state_dir = 3, must be a string or Path or none"),
        ({"checkpoint": 3}, "checkpoint = 3, must be a string or Path or none"),
        ({"checkpoint": "."}, "checkpoint = '.' is a folder; give a file in it"),
        ({"resume": True}, "resume needs a file: checkpoint=PATH"),
        ({"checkpoint_every": 5}, "checkpoint_every needs a file: checkpoint=PATH"),
        ({"resume": True, "keep_solutions": True, "seed": -1}, "earlier models are not in the checkpoint"),
    ],
)
def test_simulate(problem, wrong, says):
    refused(lambda: fc.simulate(problem, FedMid(2, 0.1), **{"rounds": 2, **wrong}), says)


def test_weights_of_l1_are_as_many_as_coordinates():
    weights = [1.0, 0.5, 2.0]
    for given in (np.array(weights), torch.tensor(weights), weights):
        assert fc.Problem(SILOS, loss="logistic", regularizer=L1(0.1, given)).regularizer.weights == tuple(weights)
    refused(
        lambda: fc.Problem(SILOS, loss="logistic", regularizer=L1(0.1, [1.0] * 7)),
        "L1 has 7 weights, the vector has 3 coordinates",
    )
    refused(lambda: L1(0.1, np.ones((3, 1))), "weights = array", "must be a list of a number >= 0 or none")
    refused(lambda: L1(0.1, np.array([1.0, NAN])), "must be a list of a number >= 0 or none")


def test_clients_by_place_and_by_name():
    north = fc.Silos.from_arrays([(X[:12], Y[:12]), (X[12:], Y[12:])], names=["south", "north"])
    assert torch.equal(north["north"][0], north[1][0])
    for wrong in ("east", 2, -1):
        with pytest.raises(IndexError, match=rf"client {wrong} of 2 \(south, north\)"):
            north[wrong]


def test_all_is_told_at_once(problem):
    says = ["rounds = -1", "seed = -1", "tolerance = -2", "batch_size = 0", "x0 = 'a'", "device = 'gpu'"]
    wrong = {"rounds": -1, "seed": -1, "tolerance": -2, "batch_size": 0, "x0": "a", "device": "gpu"}
    refused(lambda: fc.simulate(problem, FedMid(2, 0.1), **wrong), *says)
    refused(lambda: fc.solve(problem, local_steps=0, **wrong), "local_steps = 0", *says)
    refused(lambda: fc.simulate(SILOS, "FedMid", rounds=-1), "problem is a Silos", "algorithm = FedMid", "rounds = -1")
    told = [
        "folds = 1, must be 'sites' or an integer >= 2",
        "count = 0",
        "ratio = 2",
        "scoring = 'x'",
        "lambdas = [1, 2]",
    ]
    refused(lambda: fc.cross_validate(problem, folds=1, count=0, ratio=2, scoring="x", lambdas=[1, 2]), *told)


def test_a_list_is_read_in_double_precision(problem):
    run = fc.simulate(problem, FedMid(1, 0.1), rounds=0, x0=[0.1, 0.2, 0.3])
    assert run.solution.tolist() == [0.1, 0.2, 0.3]


ANALYSES = {
    "solve": fc.solve,
    "path": fc.path,
    "cross_validate": fc.cross_validate,
    "stability": fc.stability,
    "analyse": fc.analyse,
    "refit": lambda problem: fc.refit(problem, torch.zeros(3)),
    "confidence": lambda problem: fc.confidence(problem, torch.zeros(3)),
    "bootstrap": lambda problem: fc.bootstrap(problem, torch.zeros(3)),
    "quality": lambda problem: fc.quality(problem, torch.zeros(3)),
    "export": lambda problem: fc.export(problem, torch.zeros(3), "nowhere/x.pt"),
    "constants": fc.theory.constants,
}


@pytest.mark.parametrize("name", ANALYSES)
def test_silos_are_no_problem(name):
    refused(lambda: ANALYSES[name](SILOS), "problem is a Silos; make one: fc.Problem(silos")


PATHS = [
    *(pair for pair in NUMBERS if "seed" not in pair[0]),
    ({"rounds": 0}, "rounds = 0, must be an integer >= 1"),
    ({"count": 1}, "count = 1, must be an integer >= 2"),
    ({"count": "a"}, "count = 'a', must be an integer >= 2"),
    ({"count": 2.5}, "count = 2.5, must be an integer >= 2"),
    ({"ratio": 2}, "ratio = 2, must be a number > 0 and < 1"),
    ({"ratio": "a"}, "ratio = 'a', must be a number > 0 and < 1"),
    ({"driver": SILOS}, "must be Driver or none"),
]
LAMBDAS = [[1, 2], [-1], [NAN], ["a"], "a", 3, [], [[2, 1]], [float("inf"), 1], [2, 1, 1]]


@pytest.mark.parametrize(("wrong", "says"), PATHS)
@pytest.mark.parametrize("name", ["path", "cross_validate", "stability"])
def test_paths(problem, name, wrong, says):
    refused(lambda: ANALYSES[name](problem, **wrong), says)


@pytest.mark.parametrize("lambdas", LAMBDAS, ids=repr)
def test_strengths(problem, lambdas):
    refused(lambda: fc.path(problem, lambdas=lambdas), "must be positive and falling")
    refused(lambda: fc.cross_validate(problem, lambdas=lambdas), "must be positive and falling")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"folds": "site"}, "folds = 'site', must be 'sites' or an integer >= 2"),
        ({"folds": 2.0}, "folds = 2.0, must be 'sites' or an integer >= 2"),
        ({"folds": 25}, "folds = 25, and there are 24 samples: a fold needs at least one"),
        ({"folds": "sites"}, "and there are 2: take a number of folds"),
        ({"scoring": "accuracy"}, "scoring = 'accuracy', must be one of 'deviance', 'auc', 'error'"),
        ({"seed": -1}, "seed = -1, must be an integer >= 0"),
    ],
)
def test_cross_validate(problem, wrong, says):
    refused(lambda: fc.cross_validate(problem, count=4, **wrong), says)


def test_choices(problem):
    cv = fc.cross_validate(problem, folds=2, count=3)
    for wrong in (-1, 0, NAN, None):
        refused(lambda wrong=wrong: cv.index(wrong), f"lam = {wrong}, must be a number > 0")
        refused(lambda wrong=wrong: cv.path.at(wrong), f"lam = {wrong}, must be a number > 0")
    refused(lambda: cv.path.at("a"), "lam = 'a', must be a number > 0")
    refused(lambda: fc.analyse(problem, "x"), "kind = 'x', must be one of 'fit', 'path', 'cv'")
    refused(lambda: fc.analyse(problem, "fit", tolerance=-1), "tolerance = -1")
    refused(lambda: fc.analyse(problem, "path", choice="min"), "must be 'aic', 'bic' or 'ebic' for a path")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"draws": 3}, "draws = 3, must be even"),
        ({"draws": 2.0}, "draws = 2.0, must be an integer >= 2"),
        ({"errors": -1}, "errors = -1, must be a number > 0"),
        ({"errors": "a"}, "errors = 'a', must be a number > 0"),
        ({"threshold": 0.5}, "threshold = 0.5, must be a number > 0.5 and <= 1"),
        ({"threshold": "a"}, "threshold = 'a', must be a number > 0.5 and <= 1"),
        ({"over": "x"}, "over = 'x', must be one of 'samples', 'sites'"),
        ({"over": "sites"}, "'sites' where there are four or more (here 2)"),
    ],
)
def test_stability(problem, wrong, says):
    refused(lambda: fc.stability(problem, **wrong), says)


@pytest.mark.parametrize(("model", "says"), MODELS, ids=str)
@pytest.mark.parametrize("name", ["confidence", "bootstrap", "quality", "refit"])
def test_models_that_are_none(problem, name, model, says):
    refused(lambda: getattr(fc, name)(problem, model), says)


def test_models_of_other_kinds(problem):
    run = fc.solve(problem)
    with pytest.warns(SeparationWarning):  # the sign of the first feature is the label
        tables = [fc.confidence(problem, x) for x in (run.solution, run.solution.numpy())]
    pd.testing.assert_frame_equal(*tables)
    assert torch.equal(fc.refit(problem, run.solution.numpy()), fc.refit(problem, run))
    assert problem.objective(run) == problem.objective(run.solution)
    refused(lambda: problem.objective(problem), "x = Problem(", "must be a vector of numbers")
    refused(lambda: problem.objective("a"), "x = 'a', must be a vector of numbers")
    refused(lambda: problem.predict(run.solution, X[:, :2]), "features have shape (24, 2)", "3 features")
    refused(lambda: problem.predict(run.solution, "a"), "features")
    refused(lambda: fc.export(problem, torch.zeros(2), "x.pt"), "shape (2,)")
    refused(lambda: fc.export(problem, "a", "x.pt"), "x = 'a', must be a vector of numbers")
    refused(lambda: fc.export(problem, run, 3), "path = 3, must be a string or Path")
    refused(lambda: fc.refit(problem, run, FedMid(2, 0.1)), "refit needs rounds (an integer >= 0)")
    refused(lambda: fc.refit(problem, run, FedMid(2, 0.1), round=3), "no option 'round'; did you mean 'rounds'?")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p, x: fc.confidence(p, x, level=95), "level = 95, must be a number > 0 and < 1"),
        (lambda p, x: fc.confidence(p, x, inverse="a"), "inverse = 'a', must be one of 'auto', 'exact', 'nodewise'"),
        (lambda p, x: fc.confidence(p, x, robust="a"), "robust = 'a', must be true or false or none"),
        (lambda p, x: fc.bootstrap(p, x, draws="a"), "draws = 'a', must be an integer >= 2"),
        (lambda p, x: fc.bootstrap(p, x, seed=-1), "seed = -1, must be an integer >= 0"),
        (lambda p, x: fc.bootstrap(p, x, tolerance=-1), "tolerance = -1, must be a number >= 0"),
        (lambda p, x: fc.quality(p, x, part="a"), "part = 'a', must be one of 'train', 'validation', 'test'"),
        (lambda p, x: fc.quality(p, x, bins=0), "bins = 0, must be an integer >= 1"),
        (lambda p, x: fc.quality(p, x, exact="a"), "exact = 'a', must be true or false"),
        (lambda p, x: fc.quality(p, x).overall.confusion("a"), "threshold = 'a', must be a number > 0 and < 1"),
        (lambda p, x: fc.quality(p, x).overall.calibration(0), "groups = 0, must be an integer >= 1"),
        (lambda p, x: fc.quality(p, x).overall.decision_curve(["a"]), "threshold = "),
        (lambda p, x: fc.refit(p, x, tolerance=-1), "tolerance = -1, must be a number >= 0"),
        (lambda p, x: fc.predict(3, "a.csv"), "run = 3, must be a string or Path"),
        (lambda p, x: fc.predict("no", "a.csv", threshold="a"), "threshold = 'a', must be a number > 0 and < 1"),
        (lambda p, x: fc.write_report(3), "run = 3, must be a string or Path"),
    ],
)
def test_inference(problem, call, says):
    refused(lambda: call(problem, torch.ones(3, dtype=torch.float64)), says)


ESTIMATORS = {
    "HuberRegression": X[:, 0],
    "LinearRegression": X[:, 0],
    "LinearSVC": Y,
    "LogisticRegression": Y,
    "MultinomialRegression": np.arange(24) % 3,
    "PoissonRegression": np.arange(24) % 4,
    "QuantileRegression": X[:, 0],
}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lam": [1]}, "lam = [1], must be a number >= 0 or 'cv' or none"),
        ({"lam": -1}, "lam = -1, must be a number >= 0 or 'cv' or none"),
        ({"lam": float("inf")}, "lam = inf, must be a number >= 0"),
        ({"penalty_factor": "abc"}, "penalty_factor: give 3 numbers >= 0, one per feature"),
        ({"penalty_factor": [1, 2, -1]}, "penalty_factor: give 3 numbers >= 0, one per feature"),
        ({"penalty_factor": {"age": -1}}, "penalty_factor: 'age' = -1, must be a number >= 0"),
        ({"penalty_factor": {"age": "a"}}, "penalty_factor: 'age' = 'a', must be a number >= 0"),
        ({"penalty_factor": {7: 0}}, "penalty_factor: 7 is none of the numbers of features, 0 to 2"),
        ({"penalty_factor": {1.5: 0}}, "there is no feature 1.5"),
        ({"penalty_factor": {"agee": 0}}, "there is no feature 'agee'; did you mean 'age'?"),
        ({"fit_intercept": "yes"}, "fit_intercept = 'yes', must be true or false"),
        ({"regularizer": "l3"}, "regularizer = 'l3', must be 'l1', 'l2', a Regularizer"),
        ({"regularizer": "l1"}, "regularizer = 'l1' has no strength: give lam=0.1, or lam='cv'"),
        ({"regularizer": 3}, "regularizer = 3, must be a Regularizer"),
        ({"regularizer": L1(0.0), "lam": 0.5}, "has strength 0"),
        ({"folds": 0}, "folds = 0, must be 'sites' or an integer >= 2"),
        ({"choice": "x"}, "choice = 'x', must be one of 'min', '1se', 'aic', 'bic', 'ebic'"),
        ({"scoring": "x"}, "scoring = 'x', must be one of 'deviance', 'auc', 'error'"),
        ({"count": -1, "seed": "a"}, "count = -1, must be an integer >= 2\nseed = 'a', must be an integer >= 0"),
        ({"tolerance": "a"}, "tolerance = 'a', must be a number >= 0"),
        ({"rounds": 0}, "rounds = 0, must be an integer >= 1"),
    ],
)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_options_of_estimators(name, options, says):
    refused(lambda: getattr(fc, name)(**options).fit(FRAME, ESTIMATORS[name]), says)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_data_of_estimators(name):
    kind, y = getattr(fc, name), ESTIMATORS[name]
    refused(lambda: kind(0.1, regularizer="l1").fit(FRAME.assign(bp="high"), y), "X: 'bp' has text; code it first")
    refused(lambda: kind(0.1, regularizer="l1").fit(SILOS, y), "leave y and the others out")
    large = X.copy()
    large[2, 1] = 1e100  # its square is no problem, but those of its squares are
    refused(lambda: kind(0.1, regularizer="l1").fit(large, y), "row 2, column 1 has 1e+100", "other units")
    huge = fc.Problem(fc.Silos.from_arrays([(X, Y), (large, Y)]), regularizer=L1(0.1))
    for fit in (fc.solve, fc.path, fc.cross_validate):
        refused(lambda fit=fit: fit(huge), "client 1, features: row 2, column 1 has 1e+100")
    if not hasattr(kind, "decision_function") and name != "MultinomialRegression":
        refused(
            lambda: kind(0.1, regularizer="l1").fit(X, np.array(["a"] * 24)),
            f"y has np.str_('a') in it; {name} needs numbers",
        )
    model = kind(0.1, regularizer="l1").fit(X, y)
    refused(lambda: model.problem("a"), "silos = 'a', must be Silos")
    refused(lambda: model.problem(fc.Silos.from_arrays([(X[:, :2], y)])), "silos have 2 features, the model 3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # age, left alone, separates these few classes
        one, two = (
            kind(0.1, regularizer="l1", penalty_factor=which).fit(FRAME, y) for which in ({"age": 0}, [0, 1, 1])
        )
    assert np.array_equal(one.coef_, two.coef_)


def network(model, **options):
    return fc.Problem(fc.Silos.from_arrays([(X, 2 * Y - 1)]), model=model, loss="cross_entropy", **options)


RECIPE = fc.Recipe(min_count=1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fc.Silos.from_arrays(3), "wants a list with a pair of arrays (X, y) per client, not a int"),
        (lambda: fc.Silos.from_arrays([(X, Y)], names=3), "names = 3 must be a list of names"),
        (lambda: fc.Silos.from_arrays([(X, Y)], feature_names=3), "feature_names = 3 must be a list of names"),
        (lambda: fc.Silos.from_arrays([(X, Y)], weights=3), "weights = 3, must be an array per client"),
        (lambda: fc.Silos.from_arrays([(X, Y)], margin_offsets=3), "margin_offsets = 3, must be an array per client"),
        (lambda: fc.Silos.from_arrays([(X, Y)], held_margin_offsets=3), "held_margin_offsets: 3; give {'test': ...}"),
        (lambda: fc.Silos.from_arrays([(X, Y)], held_margin_offsets={"tst": Y}), "held_margin_offsets: tst"),
        (lambda: fc.Silos.from_csv(3, target="y"), "file = 3, must be a path"),
        (lambda: fc.Silos.from_csv([3], target="y"), "file = 3, must be a path"),
        (lambda: fc.Silos.from_folders(3), "folder = 3, must be a path"),
        (lambda: fc.Silos.open(3), "folder = 3, must be a path"),
        (lambda: SILOS.save(3), "folder = 3, must be a path"),
        (lambda: fc.Silos.from_datasets([FRAME], target="k", features=3), "features = 3 are no columns"),
        (lambda: fc.data.partition(X, "iid", clients=2), "must be Silos; make them with"),
        (lambda: SILOS.split(test="a", seed=-1), "split: test = 'a', seed = -1; shares must be numbers"),
        (lambda: SILOS.split(test=0.2, validation=0.9), "test = 0.2 and validation = 0.9 leave nothing to train on"),
        (lambda: fc.data.frames(3), "3"),
        (lambda: fc.Recipe(units={"age": 0}), "scale = 0 would make all values alike"),
        (lambda: fc.Recipe(interactions=[["age", "bp"], ["bp", "age"]]), "'age' and 'bp' are there twice"),
        (
            lambda: fc.Recipe(drop=["age", "bp"], min_count=1).prepare(TABLES, target="sick"),
            "no feature is left beside the target",
        ),
        (lambda: RECIPE.prepare(TABLES, target=3), "target = 3, must be the name of a column"),
        (lambda: RECIPE.prepare(3, target="sick"), "a int is no table; give a file or a DataFrame per site"),
        (lambda: RECIPE.prepare(None, target="sick"), "a NoneType is no table"),
        (lambda: RECIPE.prepare(X, target="sick"), "a ndarray is no table"),
        (lambda: RECIPE.prepare({"north": 3}, target="sick"), "north: a int is no table; give a DataFrame"),
        (lambda: RECIPE.prepare(TABLES, target="sick", separator=";"), "separator: for files only"),
        (lambda: RECIPE.prepare([TABLE, TABLE], target="sick", names=["a", "a"]), "give every one of the 2 tables"),
        (lambda: RECIPE.prepare([TABLE, TABLE], target="sick", names=["a"]), "give every one of the 2 tables"),
        (lambda: RECIPE.prepare(TABLES, target="sick", test=0.4, seed=-1), "seed = -1, must be an integer >= 0"),
        (lambda: RECIPE.fit(TABLES, target="sick").silos(TABLES), "a str is no sheet; take recipe.prepare"),
        (lambda: fc.describe(3), "a int is no table"),
        (lambda: fc.describe(SILOS), "is no table; give a file or a DataFrame per site"),
        (lambda: fc.describe(TABLES, target="sik"), "target: no column 'sik'; did you mean 'sick'?"),
        (lambda: fc.describe(TABLES, recipe="a"), "recipe = 'a', must be a Recipe"),
        (lambda: fc.models.build("mlp", 3), "dataset = 3, must be Silos, or the name of a data set"),
        (lambda: fc.models.build("mlp", SILOS, hidden=3), "model 'mlp': hidden = 3, must be a list of an integer >= 1"),
        (lambda: fc.models.build("mlp", SILOS, hidden=[0]), "hidden = [0], must be a list of an integer >= 1"),
        (lambda: fc.models.build("mlp", SILOS, hiden=3, seed=-1), "did you mean 'hidden'? (its options: hidden)\nseed"),
        (lambda: fc.models.build("mobilenetv3-small", "cifar10", dropout=2), "dropout = 2, must be a number >= 0"),
        (lambda: fc.prune(3, torch.zeros(2)), "pruning needs a module, and this is a int"),
        (lambda: fc.Problem(SILOS, loss_options=3), "loss_options = 3, must be a dictionary"),
        (lambda: network(torch.nn.Linear(3, 1)), "cross_entropy needs an output per class, the module gives one"),
        (lambda: network(torch.nn.Linear(3, 2), normalization=3), "normalization = 3, must be (mean, std)"),
        (lambda: L1(0.1).on(3), "on: 3, must be a mask, a list of coordinates or patterns"),
        (lambda: L1(0.1).scaled("a"), "kappa = 'a', must be a number > 0"),
        (lambda: fc.privacy.SampleLevel(clip=1, noise=1).epsilon(-1), "queries = -1, must be an integer >= 0"),
        (lambda: fc.privacy.SampleLevel(clip=1, noise=1).epsilon("a"), "queries = 'a', must be an integer >= 0"),
        (
            lambda: fc.privacy.noise_for(epsilon="a", delta=0, queries=2.5, rate=2),
            "epsilon = 'a', must be a number > 0\ndelta = 0, must be a number > 0 and < 1\n"
            "queries = 2.5, must be an integer >= 1\nrate = 2, must be a number > 0 and <= 1",
        ),
    ],
)
def test_data_and_the_rest(call, says):
    refused(call, says)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: fc.theory.constants(p, of="x"), "of = 'x', must be one of 'clients', 'samples'"),
        (lambda p: fc.theory.constants(p, rounds=-1), "rounds = -1, must be an integer >= 1"),
        (lambda p: fc.theory.constants(p, muh=3), "Constants has no field 'muh'; did you mean 'mu'?"),
        (lambda p: fc.theory.constants(p, x0="a"), "x0 = 'a', must be a vector of numbers"),
        (lambda p: fc.metrics.proximal_point(p, torch.zeros(3), 0), "radius = 0, must be positive"),
        (lambda p: fc.metrics.moreau_gradient_norm(p, torch.zeros(3), "a"), "radius = 'a', must be positive"),
        (lambda p: fc.metrics.distance("a", torch.zeros(3)), "x = 'a', must be a vector of numbers"),
    ],
)
def test_theory_and_metrics(problem, call, says):
    refused(lambda: call(problem), says)


def test_pictures_make_their_folder(tmp_path):
    SILOS.plot(tmp_path / "new" / "silos.png")
    assert (tmp_path / "new" / "silos.png").is_file()


def test_an_array_in_place_of_a_word_is_refused_in_our_words():
    """NumPy's own error was about the truth value of an array."""
    refused(lambda: fc.algorithms.FedMLS(lambda0=1.0, schedule=np.array(["a", "b"])), "schedule", "one of")
