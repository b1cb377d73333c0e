"""Analyses under secure sums: the numbers of plain ones, and nothing but sums and names for whoever asks."""

import json
import math
import tomllib

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from analyst import PLAIN
from local_federation import LocalSites, make_sites, opened
from secure_sites import make_keys, make_site, secure_sites, secure_tables

import fedcomposite as fc
from fedcomposite.analysis.score_bins import Cells
from fedcomposite.data import Recipe
from fedcomposite.data.describing import look_at, table_of
from fedcomposite.data.queries import LevelCounts, Moments
from fedcomposite.data.steps import Absent
from fedcomposite.experiments import Config, RunFolder
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator import inquiry as inquiries
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry
from fedcomposite.federation.coordinator.jobs import Job, carry_out
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.orders import Order
from fedcomposite.federation.secure import keys as mask_keys
from fedcomposite.federation.secure import masking
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.runtime import Driver
from fedcomposite.runtime.protocol import ALL, HIGHEST, LOWEST, Rows, losses, newton, ranges_of, scores
from fedcomposite.runtime.transports.silo_answers import SiloTransport

SECURE = Settings(secure=True)


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messy") / "hospitals"
    files, config = fc.data.messy_consortium(folder), folder / "experiment.toml"
    content = tomllib.loads(config.read_text())
    content.pop("data")
    return files, Config.read(config), tomli_w.dumps({**content, "algorithm": {"name": "ProxNewton"}})


@pytest.fixture(scope="module")
def silos():
    """Four sites, 40 samples each."""
    generator, pairs = np.random.default_rng(0), []
    for shift in (0.0, 0.5, -0.5, 1.0):
        X = generator.normal(size=(40, 3)) + shift
        pairs.append((X, (generator.random(40) < 1 / (1 + np.exp(-X @ [1.0, -1.0, 0.0]))).astype(float)))
    return fc.Silos.from_arrays(pairs, names=["a", "b", "c", "d"], feature_names=["u", "v", "w"])


def ask_of(sites, text=PLAIN, settings=SECURE, job="job", grid=None, **options):
    grid = grid or LocalSites(sites)
    one = Inquiry(grid, [s.name for s in sites], grid.permitted, parse(text, recipe=True), job, settings, **options)
    return one, grid


def compare(found, expected, where=""):
    """Two trees of numbers are the same to 1e-9."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            compare(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            compare(a, b, f"{where}[{i}]")
    elif isinstance(expected, float) and not isinstance(found, str):
        same = math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
        assert same or (math.isnan(found) and math.isnan(expected)), (where, found, expected)
    else:
        assert found == expected, where


def of_all(analysis):
    """What an analysis says of all sites together."""
    made = analysis.content()
    made.pop("communication")
    made["quality"] = {"all": made["quality"]["all"]}
    made["quality"]["all"].pop("note")
    return made


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cross_validation_with_a_recipe_equals_the_plain_one(messy, tmp_path):
    """Recipe, models, scores, intervals and overall quality, at sites that take part in secure sums only."""
    files, here, text = messy
    target, found = here.data["target"], []
    limits = {"min_count": 5, "losses": ["logistic"]}
    plain = [TableSite(n, StateStore(tmp_path / n), opened(**limits), source=TableFile(n, p)) for n, p in files.items()]
    required = secure_tables(files, tmp_path / "secure", opened(**limits, secure="required"))
    for sites, settings in ((plain, None), (required, SECURE)):
        asking, _ = ask_of(sites, text, settings)
        driver = Driver(asking)
        asking.recipe = inquiries.learn(driver, asking.config, target)
        made = fc.analyse(asking.meet(), "cv", folds=3, count=6, ratio=0.1, seed=here.seed, driver=driver)
        found.append((asking.recipe.model_dump(), made))
    (recipe, ours), (learned, theirs) = found
    compare(learned, recipe)
    compare(of_all(theirs), of_all(ours))
    assert theirs.quality.by_site == {}
    assert "secure sums" in theirs.quality.notes["sites"]
    assert "secure sums" in theirs.content()["quality"]["all"]["note"]
    assert ours.quality.overall.cells.plain is False  # bins were joined: ranges are told apart in the sum


def events(seed=2):
    """Counts over exposures, with weights of patients."""
    generator, pairs, weights, offsets = np.random.default_rng(seed), [], [], []
    for size in (70, 50, 60):
        X, exposure = generator.normal(size=(size, 4)), generator.random(size) + 0.5
        pairs.append((X, generator.poisson(exposure * np.exp(X @ [0.6, -0.4, 0, 0] + 0.3)).astype(float)))
        weights.append(generator.random(size) + 0.5)
        offsets.append(np.log(exposure))
    return fc.Silos.from_arrays(pairs, feature_names=list("abcd"), weights=weights, margin_offsets=offsets)


@pytest.mark.parametrize("loss", ["poisson", "logistic"])
def test_weighted_samples_with_offsets(loss, tmp_path):
    silos = events()
    if loss == "logistic":
        silos = fc.Silos.from_arrays(
            [(silos[i][0], (silos[i][1] > 1).double()) for i in range(3)], feature_names=list("abcd"),
            weights=[silos.weights[slice(*silos.offsets[i : i + 2])] for i in range(3)],
        )  # fmt: skip
    text, made = PLAIN.replace('"logistic"', f'"{loss}"'), []
    for place, settings in (("plain", None), ("secure", SECURE)):
        limits = opened(min_count=3)
        sites = make_sites(silos, tmp_path / place, limits) if settings is None else secure_sites(
            silos, tmp_path / place, limits
        )  # fmt: skip
        asking, _ = ask_of(sites, text, settings)
        made.append(fc.analyse(asking.meet(), "fit", driver=Driver(asking)))
    compare(of_all(made[1]), of_all(made[0]))


def test_stability_and_areas_of_folds(silos, tmp_path):
    made = []
    for place, settings in (("plain", None), ("secure", SECURE)):
        found = []
        for least in (1, 5):  # halves that follow from a seed may differ by few
            limits, folder = opened(min_count=least), tmp_path / f"{place}{least}"
            sites = make_sites(silos, folder, limits) if settings is None else secure_sites(silos, folder, limits)
            asking, _ = ask_of(sites, settings=settings)
            found.append((asking.meet(), Driver(asking)))
        stable = fc.stability(found[0][0], draws=4, count=5, ratio=0.1, seed=3, driver=found[0][1])
        problem, driver = found[1]
        cv = fc.cross_validate(problem, folds=2, seed=3, scoring="auc", count=4, ratio=0.1, driver=driver)
        made.append({"share": stable.share.tolist(), "mean": cv.mean.tolist(), "off": cv.mean_error.tolist()})
    compare(made[1], made[0])


def test_absolute_errors_that_one_site_keeps_are_unknown(tmp_path):
    """Their sum over the other sites is not that of all."""
    keys, silos = make_keys(["silo0", "silo1", "silo2"]), events()
    silos = fc.Silos.from_arrays([silos[i] for i in range(3)], names=[*keys], feature_names=list("abcd"))
    text = PLAIN.replace('"logistic"', '"least_squares"')
    for metrics, known in ((["r2", "mae"], True), (["r2"], False)):
        sites = [
            make_site(silos, i, tmp_path / str(known), keys, opened(metrics=metrics if i == 1 else []))
            for i in range(3)
        ]
        asking, _ = ask_of(sites, text)
        found = fc.quality(asking.meet(), torch.zeros(5, dtype=torch.float64), driver=Driver(asking)).overall
        assert math.isfinite(found.r2)
        assert math.isnan(found.mae) is not known


def test_columns_in_any_unit_keep_their_digits(messy, tmp_path):
    """Deviations of 1e-9 and of 1e9: squares are summed with 128 digits on either side of the point."""
    generator, files = np.random.default_rng(0), {}
    for name in ("a", "b", "c"):
        files[name] = tmp_path / f"{name}.csv"
        frame = pd.DataFrame({"small": generator.normal(size=40) * 1e-9, "large": generator.normal(size=40) * 1e9})
        frame.assign(y=generator.integers(0, 2, 40)).to_csv(files[name], index=False)
    text = tomli_w.dumps({**tomllib.loads(PLAIN), "recipe": {"standardize": True}})
    asking, _ = ask_of(secure_tables(files, tmp_path / "s", opened(min_count=5)), text)
    learned = inquiries.learn(Driver(asking), asking.config, "y")
    pooled = pd.concat([pd.read_csv(path) for path in files.values()])
    (step,) = learned.steps
    for column in ("small", "large"):
        assert step.sd[column] == pytest.approx(pooled[column].std(ddof=0), rel=1e-12)
        assert step.mean[column] == pytest.approx(pooled[column].mean(), rel=1e-9)


def test_a_description_is_of_all_sites_together(messy, tmp_path):
    files, here, text = messy
    asking, _ = ask_of(secure_tables(files, tmp_path, opened(min_count=5, secure="required")), text)
    driver = Driver(asking)
    looks = look_at(lambda query: driver.ask([query])[0], driver.names, together=not driver.by_site)
    table = table_of(looks, here.data["target"]).set_index("feature")
    assert set(table["site"]) == {"all"}
    recipe = Recipe(**here.recipe)
    pooled = [recipe.local(sheet.name).apply(sheet) for sheet in recipe.sheets(files.values())]
    for name in ("age", "chol"):
        values = np.concatenate([sheet.numbers(name) for sheet in pooled])
        there, row = values[~np.isnan(values)], table.loc[name]
        assert (row["n"], row["missing"]) == (len(there), len(values) - len(there))
        assert (row["mean"], row["sd"]) == pytest.approx((there.mean(), there.std()), rel=1e-9)
        shares = [row[f"{share} %"] for share in (5, 25, 50, 75, 95)]
        assert (
            np.abs(np.array(shares) - np.quantile(there, [0.05, 0.25, 0.5, 0.75, 0.95])).max() < 0.1 * there.std() + 5
        )
    sexes = np.concatenate([sheet["sex"] for sheet in pooled])
    assert table.loc["sex", "levels"] == f"f {(sexes == 'f').sum()}, m {(sexes == 'm').sum()}"


# -- ranges of scores -------------------------------------------------------------------------------------------------


def random_site(generator, bins):
    """Counts of one site: disjoint ranges of bins in each class, with weights and sums."""
    counts = torch.zeros(2, bins, 5, dtype=torch.float64)
    for kind in range(2):
        ends = np.sort(generator.choice(bins, 2 * int(generator.integers(1, bins // 4)), replace=False))
        for low, high in zip(ends[::2], ends[1::2], strict=True):
            high = low if generator.random() < 0.3 else high
            weight = float(generator.integers(1, 9))
            values = weight * torch.from_numpy(generator.normal(size=3))
            counts[kind, low, LOWEST] = counts[kind, high, HIGHEST] = weight
            counts[kind, low, 2:] = values
    return counts


@pytest.mark.parametrize("bins", [8, 60, 400])
def test_ranges_are_told_from_their_sum_over_sites(bins):
    """Few sites among many bins: the cells are theirs. Many in few bins: each is inside of one, and sums are kept."""
    generator, edges = np.random.default_rng(bins), torch.arange(bins - 1, dtype=torch.float64)
    apart = 0
    for _ in range(40):
        each = [random_site(generator, bins) for _ in range(4)]
        own = Cells.all([Cells.told([one], edges, True) for one in each])
        found = Cells.summed([torch.stack([ranges_of(one) for one in each]).sum(0)], edges, True)
        for kind in (0, 1):
            mine, theirs = (c.table[c.table[:, 0] == kind] for c in (own, found))
            np.testing.assert_allclose(theirs[:, 3:].sum(0), mine[:, 3:].sum(0), atol=1e-9)
            for low, high in mine[:, 1:3]:
                assert ((theirs[:, 1] <= low) & (theirs[:, 2] >= high)).any()
        if len(found.table) == len(own.table):
            apart += 1
            np.testing.assert_allclose(found.table, own.table, atol=1e-9)
    assert apart >= (35 if bins == 400 else 0)


# -- what is refused --------------------------------------------------------------------------------------------------


def zeros(on=False):
    return newton(torch.zeros(4, dtype=torch.float64), torch.full((4,), on), ALL)


def refusal(answer):
    return wire.text(answer, "refusal") if wire.kind(answer) == "refusal" else ""


def changed(content, vectors=None, analysis=None, **secure):
    """An order with other vectors, or with another analysis or secure part."""
    order = Order.read(wire.text(content, "order"))
    update = {"secure": order.secure.model_copy(update=secure)}
    if analysis is not None:
        update["analysis"] = order.analysis.model_copy(update=analysis)
    record = dict(content)
    record["order"] = order.model_copy(update=update).model_dump_json()
    if vectors is not None:
        record["vectors"] = wire.block(vectors)
    return record


def moved(content):
    """The vectors of an order, a little elsewhere."""
    given = wire.deserialise(content["vectors"])
    return {k: v + 1e-9 if v.is_floating_point() else v for k, v in given.items()}


@pytest.fixture
def asked(silos, tmp_path):
    """Sites after one question in a secure sum, the order for site a, and its answer."""
    sites = {s.name: s for s in secure_sites(silos, tmp_path)}
    asking, grid = ask_of(list(sites.values()))
    asking.meet()
    asking.ask([zeros()])
    _, content, answer = [one for one in grid.log if one[0] == "a"][-1]
    return sites, content, answer


def fresh(sites, content):
    """Other keys of all sites, as a coordinator gets them."""
    names, epoch = sorted(sites), "e" * 32
    told = [
        sites[n].answer(renamed(changed(content, phase="keys", epoch=epoch, parties=names), n)) for n in names
    ]  # fmt: skip
    keys = [mask_keys.Key.read(wire.text(one, "secure")) for one in told]
    for n in names:
        wire.text(sites[n].answer(renamed(changed(content, phase="shares", epoch=epoch, keys=keys), n)), "secure")
    return epoch


def renamed(content, site):
    order = Order.read(wire.text(content, "order")).model_copy(update={"site": site})
    return wire.content(order=order.model_dump_json())


def test_masks_are_for_one_question(asked):
    sites, content, answer = asked
    assert wire.encode(sites["a"].answer(content)) == wire.encode(answer)  # lost on the way, and given again as it was
    order = Order.read(wire.text(content, "order"))
    half = order.analysis.questions[0].rows.model_copy(update={"kind": "fold", "of": 2, "seed": 3})
    other = [order.analysis.questions[0].model_copy(update={"rows": half})]
    for forged in (
        changed(content, moved(content)),
        changed(content, analysis={"questions": other}),
        changed(content, samples=7),
    ):
        assert "used for another answer" in refusal(sites["a"].answer(forged))


def test_under_fresh_masks_an_exchange_has_its_question_still(asked):
    sites, content, answer = asked
    epoch = fresh(sites, content)
    assert "another question in exchange" in refusal(sites["a"].answer(changed(content, moved(content), epoch=epoch)))
    fewer = ["a", "b", "c"]
    assert "parties" in refusal(sites["a"].answer(changed(content, epoch=epoch, parties=fewer)))
    again = sites["a"].answer(changed(content, epoch=epoch))
    words = [wire.deserialise(one["vectors"])["analysis.wide"] for one in (answer, again)]
    assert float((words[0] == words[1]).double().mean()) < 0.05


def test_no_unmasked_number_crosses(messy, tmp_path, monkeypatch):
    """A site's answers hold masked words, names, and the number of the exchange."""
    hidden, conceal = [], masking.conceal

    def noting(numbers, me, seeds, own, context):
        hidden.append((me, numbers.wide.copy()))
        return conceal(numbers, me, seeds, own, context)

    monkeypatch.setattr(masking, "conceal", noting)
    files, here, text = messy
    asking, grid = ask_of(secure_tables(files, tmp_path, opened(min_count=5, secure="required")), text)
    asking.recipe = inquiries.learn(Driver(asking), asking.config, here.data["target"])
    problem = asking.meet()
    x = torch.full((problem.dimension,), 0.01, dtype=torch.float64)
    asking.ask([newton(x, torch.ones(len(x), dtype=torch.bool), ALL), losses(x[None], ALL)])
    for name in files:
        mine = [(content, answer) for site, content, answer in grid.log if site == name]
        sent = b"".join(wire.encode(answer) for _, answer in mine)
        numbers = np.concatenate([wide for me, wide in hidden if me == name and wide.shape[1] == masking.WIDEST])
        some = numbers[(numbers[:, 1:3] != 0).any(1)]
        assert len(some) > 100
        assert not [row for row in some if row.tobytes()[8:24] in sent]
        for content, answer in mine:
            analysis = Order.read(wire.text(content, "order")).analysis
            if wire.kind(answer) == "report":
                assert wire.numbers(answer) == {"exchange": analysis.number}
            elif wire.kind(answer) == "answers":
                told = [json.loads(one) for one in json.loads(wire.text(answer, "answers"))]
                assert all(isinstance(v, str) for one in told for values in one.values() for v in values)
            elif wire.kind(answer) == "introduction":
                assert {json.loads(wire.text(answer, "introduction"))[k] for k in ("samples", "scale", "weight")} == {
                    None
                }
            else:
                assert wire.kind(answer) == "secure"


AT, OFF = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.bool)
FEW = "over some of the sites"
HERE = {"data": {"name": "heart_disease"}, "run": {"rounds": 0}}


@pytest.mark.parametrize(
    ("limits", "request_", "reason"),
    [
        ({"min_samples": 15}, newton(AT, OFF, Rows("fold", 0, 4, held=True, seed=3)), "fewer than min_samples = 15"),
        ({}, newton(AT, OFF, Rows("site", 1)), FEW),
        ({}, losses(AT[None], Rows("site", 1, held=True)), FEW),
        ({}, losses(AT[None], Rows("sites", 1, 4)), FEW),
        ({"left_out": True}, losses(AT[None], Rows("sites", 1, 4)), FEW),
        ({}, scores(AT, AT[:1], "test"), "one site alone"),
    ],
)
def test_what_is_refused_before_anything_is_masked(limits, request_, reason, silos, tmp_path, monkeypatch):
    """Minimum counts, sums of a few sites, numbers beyond the range: a reason without numbers of samples' values."""
    asking, _ = ask_of(secure_sites(silos, tmp_path, opened(**limits)))
    asking.meet()
    monkeypatch.setattr(masking, "conceal", lambda *a: pytest.fail("something was masked"))
    with pytest.raises(FederationError, match=reason):
        asking.ask([request_])


def test_what_leaving_a_site_out_gives_away(silos, tmp_path):
    """The sum over all less that over the others is one site's own: told where sites agreed to it, and refused else."""
    for agreed in (True, False):
        asking, _ = ask_of(secure_sites(silos, tmp_path / str(agreed), opened(left_out=agreed, min_parties=3)))
        problem = asking.meet()
        at = torch.full((problem.dimension,), 0.1, dtype=torch.float64)
        off = torch.zeros(problem.dimension, dtype=torch.bool)
        pair = [newton(at, off, ALL), newton(at, off, Rows("site", 1))]
        if not agreed:
            with pytest.raises(FederationError, match=FEW):
                asking.ask(pair)
            continue
        every, others = asking.ask(pair)
        alone = SiloTransport(Config.check(tomllib.loads(PLAIN) | HERE).make_problem(silos)).ask(
            [newton(at, off, Rows("site", 1, held=True))]
        )[0]
        assert torch.allclose(every["gradient"] - others["gradient"], alone["gradient"], atol=1e-8)


def test_levels_and_columns_below_the_minimum_are_not_told(tmp_path):
    """A level of two rows at one site: its name is told by the sites that have enough of it, its count is theirs."""
    files = {}
    for name, rare in (("a", 2), ("b", 9), ("c", 0)):
        files[name] = tmp_path / f"{name}.csv"
        kinds = ["x"] * 20 + ["y"] * 20 + ["z"] * rare
        pd.DataFrame({"kind": kinds, "y": [i % 2 for i in range(len(kinds))]}).to_csv(files[name], index=False)
    content = {**tomllib.loads(PLAIN), "recipe": {"one_hot": ["kind"], "rare": 5}}
    asking, grid = ask_of(secure_tables(files, tmp_path / "s", opened(min_count=5)), tomli_w.dumps(content))
    found = Driver(asking).ask([LevelCounts(columns=["kind"])])[0][0]
    levels = dict(zip(found["levels:kind"].tolist(), found["counts:kind"].tolist(), strict=True))
    plain = [
        TableSite(n, StateStore(tmp_path / "p" / n), opened(min_count=5), source=TableFile(n, p))
        for n, p in files.items()
    ]
    told = ask_of(plain, tomli_w.dumps(content), None)[0].ask([LevelCounts(columns=["kind"])])[0]
    both = LevelCounts(columns=["kind"]).combine(told)
    assert levels == dict(zip(both["levels:kind"].tolist(), both["counts:kind"].tolist(), strict=True))
    assert levels["z"] == 9
    assert found["rest:kind"].tolist() == both["rest:kind"].tolist()
    names = [
        wire.text(answer, "answers") for site, _, answer in grid.log if site == "a" and wire.kind(answer) == "answers"
    ]
    assert not any('"z"' in one or "z\\" in one for one in names)


def test_what_a_column_of_one_site_gives_away(tmp_path):
    """Its sums are of that site's rows alone, as plain ones are; what keeps them from being of few is its min_count."""
    generator, files, extra = np.random.default_rng(0), {}, {}
    for name, gaps in (("a", 30), ("b", 37), ("c", 40)):
        files[name] = tmp_path / f"{name}.csv"
        frame = pd.DataFrame({"age": generator.normal(size=40), "y": generator.integers(0, 2, 40)})
        if gaps < 40:
            own = generator.normal(size=40)
            own[:gaps] = np.nan
            frame["own " + name] = extra[name] = own
        frame.to_csv(files[name], index=False)
    text = tomli_w.dumps({**tomllib.loads(PLAIN), "recipe": {"absent": "missing"}})
    asking, _ = ask_of(secure_tables(files, tmp_path / "s", opened(min_count=5)), text)
    names = ["own a", "own b"]
    query = Moments(columns=names, steps=[Absent(columns=names)])
    [[found]] = Driver(asking).ask([query])
    assert found["sum"][0] == pytest.approx(np.nansum(extra["a"]), rel=1e-12)
    assert (found["sum"][1], found["n"][1], found["withheld"][1]) == (0.0, 0, 1)  # three values


def test_a_site_alone_is_refused_where_sums_are_required_and_needs_secure(silos, tmp_path):
    sites = secure_sites(silos, tmp_path, opened(secure="required"))
    with pytest.raises(FederationError, match=r"secure = .required.*--secure"):
        ask_of(sites, settings=None)[0].meet()
    asking, _ = ask_of(sites)
    problem, driver = asking.meet(), Driver(asking)
    with pytest.raises(FederationError, match=r"answers by site.*--secure"):
        driver.each([zeros()])
    with pytest.raises(FederationError, match="take a number"):
        fc.cross_validate(problem, folds="sites", driver=driver)
    with pytest.raises(ValueError, match="'samples'"):
        fc.stability(problem, over="sites", driver=driver)


@pytest.mark.parametrize("privacy", [{}, {"privacy": {"noise": 1.0, "clip": 1.0}}])
def test_a_site_with_a_budget_says_what_it_takes_part_in(privacy, silos, tmp_path):
    """With [privacy] and without it the reason is the same: no advice leads to another refusal."""
    text = tomli_w.dumps({**tomllib.loads(PLAIN), **privacy})
    for settings in (None, SECURE):
        with pytest.raises(FederationError, match=r"privacy budget \(epsilon = 1\).*\[privacy\] level = 'study'"):
            ask_of(secure_sites(silos, tmp_path, opened(epsilon=1.0)), text, settings)[0].meet()


def test_orders_that_are_no_analysis_in_a_sum_of_all_are_refused(asked):
    """Sums that could be opened without a site, and rounds under the number of an exchange."""
    sites, content, _ = asked
    assert "all parties or none" in refusal(sites["a"].answer(changed(content, recover=True)))
    order = Order.read(wire.text(content, "order"))
    for fields in ({"train": True}, {"analysis": order.analysis.model_copy(update={"questions": []})}):
        forged = wire.content(order=order.model_copy(update=fields).model_dump_json())
        assert "for an analysis and for a round" in refusal(sites["a"].answer(forged))


def test_a_site_that_is_restarted_is_asked_again_with_fresh_masks(silos, tmp_path):
    keys, lines = make_keys(silos.names), []
    sites = [make_site(silos, i, tmp_path, keys) for i in range(4)]
    asking, grid = ask_of(sites, log=lines.append)
    asking.meet()
    (before,) = asking.ask([zeros()])
    grid.sites[silos.names[1]] = make_site(silos, 1, tmp_path, keys)
    (after,) = asking.ask([zeros()])
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert any("lost its keys" in line for line in lines)


# -- a run whose experiment has a recipe ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_a_run_learns_its_recipe_first(secure, messy, tmp_path):
    files, here, text = messy
    limits = opened(min_count=5, **({"secure": "required"} if secure else {}))
    content = {**tomllib.loads(text), "run": {"rounds": 3, "stationarity_step": 0.1}}
    content["algorithm"] = {"name": "FedAvg", "local_steps": 2, "step": 0.05}
    content["regularizer"] = {"name": "Zero"}
    made = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 9443, [*files], engine="local")
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.config.write_text(tomli_w.dumps(content))
    made.job("j1").parent.mkdir()
    settings = {"secure": secure}
    made.job("j1").write_text(Job(name="j1", out=str(folder.path), data=here.data, settings=settings).model_dump_json())
    grid, lines = LocalSites(secure_tables(files, tmp_path / "sites", limits)), []
    run = carry_out(grid, made, "j1", lines.append)
    problem = Config.check({**content, "data": here.data}).make_problem()
    want = fc.simulate(problem, fc.algorithms.FedAvg(local_steps=2, step=0.05), rounds=3)
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-9)
    compare(json.loads((folder.path / "recipe.json").read_text()), json.loads(problem.silos.recipe.text))
    assert any("recipe is learned" in line for line in lines)
    asked = len(grid.log)
    again = carry_out(grid, made, "j1", lines.append)  # from the checkpoint, by the recipe that is there
    torch.testing.assert_close(again.solution, run.solution)
    assert not any(Order.read(wire.text(content, "order")).analysis for _, content, _ in grid.log[asked:])
