"""Claims that the papers make beside their figures."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import linprog

from fedcomposite.algorithms import FedCanon, FedMLS, build
from fedcomposite.analysis import solve
from fedcomposite.data import load
from fedcomposite.data.sparse import dense
from fedcomposite.papers import seed_stack
from fedcomposite.papers.base import histories, only, slope
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.searches import Tunable, tuned
from fedcomposite.papers.verdicts import Claim, against, ahead, fact, row
from fedcomposite.plots import Panel, draw_panels
from fedcomposite.plots.looks import swept
from fedcomposite.problems import Problem
from fedcomposite.problems.base import Batches, ClientGradients, Counter
from fedcomposite.runtime import messages, simulate

K = 10
"""Local steps of FedCanon."""
LINEAR = -0.8
"""A slope that passes for -1, of levels that are noisy themselves."""
RULES = ("growing", "constant")


def canon(cell: dict[str, Any]) -> pd.DataFrame:
    """What FedCanon leaves with this kappa, batch size and share of the step, from the solution on, for every seed."""
    stack = seed_stack.stack_of(cell["experiment"], cell["seeds"])
    alpha = cell["share"] / max(p.smoothness() for p in stack.problems)
    method = FedCanon(K, alpha / K, alpha)
    records = seed_stack.follow(
        stack, method, rounds=cell["rounds"], every=max(1, cell["rounds"] // 40), batch_size=cell["batch"] or None,
        starts=[solve(p, tolerance=1e-12).solution for p in stack.problems],
    )  # fmt: skip
    return _seeded(records, cell)[["seed", "round", "stationarity"]]


def sums(cell: dict[str, Any]) -> pd.DataFrame:
    """The length of the sum of FedCanon's c_i, relative to the sum of their lengths, for every seed and round."""
    rows = []
    for seed in cell["seeds"]:
        problem = seed_stack.stack_of(cell["experiment"], [seed]).problems[0]
        smooth, h, n = problem.smooth(), problem.regularizer, len(problem.silos)
        method = FedCanon(K, 1 / problem.smoothness() / K, 1 / problem.smoothness())
        server, client = method.init(smooth.start(), h)
        clients = messages.stack(client, n)
        for number in range(cell["rounds"]):
            grad = ClientGradients(smooth, np.arange(n, dtype=np.uint64), number, Batches(seed, 4), Counter(), expect=K)
            reply, clients = method.local_round(messages.stack(method.broadcast(server), n), clients, grad, h)
            server = method.aggregate(server, messages.mean(reply), 1.0, h)
            c = clients.pending + server.delta
            share = float(c.sum(0).norm() / c.norm(dim=1).sum())
            rows.append({"seed": seed, "round": number + 1, "share": share})
    return pd.DataFrame(rows)


def nmap(cell: dict[str, Any]) -> pd.DataFrame:
    """F - min F of FedNMap's models, over its first value, for every seed."""
    experiment = {**cell["experiment"], "partition": {**cell["experiment"]["partition"], "clients": cell["n"]}}
    stack = seed_stack.stack_of(experiment, cell["seeds"])
    small = {**experiment, "partition": {**experiment["partition"], "clients": cell["most"]}}
    whole = 0.5 / max(
        p.smoothness() for p in seed_stack.stack_of(small, cell["seeds"]).problems
    )  # the same for every n
    method = build("FedNMap", local_steps=cell["tau"], step=whole / cell["tau"], gamma=whole)
    records = seed_stack.follow(
        stack, method, rounds=cell["rounds"], every=max(1, cell["rounds"] // 100), batch_size=cell["batch"] or None
    )
    best = [p.objective(solve(p, tolerance=1e-13).solution) for p in stack.problems]
    table = _seeded(records, cell)
    table["gap"] = table["objective"] - table["place"].map(dict(enumerate(best)))
    table["gap"] /= table.groupby("place")["gap"].transform("first")
    return table[["seed", "round", "gap"]]


def _seeded(records: list[dict[str, Any]], cell: dict[str, Any]) -> pd.DataFrame:
    table = pd.DataFrame(records)
    return table.assign(seed=table["place"].map(dict(enumerate(cell["seeds"]))))


@functools.cache
def svm(seed: int) -> tuple[Problem, float]:
    """The mean of the clients' mean hinge losses on Wisconsin, and its least value by linear programming."""
    silos = load("wisconsin", test=0.2, seed=seed).partition("kmeans", clients=10, seed=seed)
    parts = [(dense(X).double(), y.double()) for X, y in (silos[i] for i in range(len(silos)))]
    A = torch.cat([y[:, None] * X for X, y in parts]).numpy()
    weight = np.concatenate([np.full(len(y), 1 / (len(parts) * len(y))) for _, y in parts])
    m, d = A.shape
    best = linprog(
        np.r_[np.zeros(d), weight], np.c_[-A, -np.eye(m)], -np.ones(m), bounds=[(None, None)] * d + [(0, None)] * m
    )
    return Problem(silos, loss="hinge"), float(best.fun or 0.0)


def mls(cell: dict[str, Any]) -> pd.DataFrame:
    """FedMLS's gap to the optimum after the last round, for every seed."""
    rows = []
    for seed in cell["seeds"]:
        problem, best = svm(seed)
        size = max(1, int(problem.silos.sizes.min()) // 2)
        method = FedMLS(lambda0=cell["lambda0"], first_steps=cell["T"], schedule=cell["rule"])
        done = simulate(
            problem, method, rounds=cell["rounds"], batch_size=size, seed=seed, evaluate_every=cell["rounds"],
            progress=False,
        )  # fmt: skip
        rows.append({"seed": seed, "round": cell["rounds"], "gap": float(done.history[-1]["objective"]) - best})
    return pd.DataFrame(rows)


def measure(study: Study) -> pd.DataFrame:
    """All cells, with the part of each."""
    s = study.settings
    seeds = {"seeds": s["seeds"]}
    plain = {"experiment": s["fedcanon"], "rounds": s["rounds"], "batch": 0, "share": 1.0, **seeds}
    kappa = s["fedcanon"]["regularizer"]["lam"]
    cells = [
        {**plain, "experiment": {**s["fedcanon"], "regularizer": {"name": "L1", "lam": k}}, "kappa": k}
        for k in s["kappas"]
    ]
    cells += [{**plain, "batch": b, "kappa": kappa} for b in s["batches"]]
    cells += [{**plain, "batch": min(s["batches"]), "share": 0.125, "kappa": kappa}]
    found = [study.each(canon, cells).assign(part="canon")]
    found.append(study.each(sums, [{"experiment": s["fedcanon"], "rounds": 20, **seeds}]).assign(part="sums"))
    most = max(s["clients"])  # then clients are smallest, and their L largest
    one = {
        "experiment": s["fednmap"],
        "rounds": s["longer"],
        "most": 8,
        "n": 8,
        "tau": 4,
        "batch": 0,
        **seeds,
    }
    cells = [
        one,
        *({**one, "batch": 4, "most": most, "n": n} for n in s["clients"]),
        *({**one, "batch": 4, "most": most, "tau": t} for t in s["taus"]),
    ]
    found.append(study.each(nmap, cells).drop_duplicates().assign(part="nmap"))
    given = s["mls"]
    searches = {
        rule: Tunable(
            {"rule": rule, "T": 1 if rule == "growing" else given["constant"], "rounds": given["rounds"],
             "seeds": [s["tuning_seed"]]}, {"lambda0": given["lambda0"][rule]},
        )
        for rule in RULES
    }  # fmt: skip
    chosen, trials = tuned(study, mls, searches, lambda rows: float(rows["gap"].mean()))
    study.note("tuning", trials)
    found.append(study.each(mls, [{**searches[r].fixed, **chosen[r], **seeds} for r in chosen]).assign(part="mls"))
    data = pd.concat(found, ignore_index=True)
    if not len(data):
        return pd.DataFrame()
    names = ["part", "kappa", "batch", "share", "n", "tau", "rule", "seed"]
    kept: pd.DataFrame = data.drop(columns=["rounds", "T", "most"], errors="ignore")
    return kept.assign(run=data[names].map(str).agg(" ".join, axis=1))


def _level(rows: pd.DataFrame, key: str, column: str, power: int = 1) -> pd.DataFrame:
    """The mean over the last quarter of the records, a column for each value of a key, a row for each seed."""
    late = rows[rows["round"] > 0.75 * rows["round"].max()]
    found: pd.DataFrame = late.assign(value=late[column] ** power).groupby(["seed", key])["value"].mean().unstack()
    return found


def _slopes(levels: pd.DataFrame) -> pd.Series:
    """For each seed the slope of the logarithm against that of the key."""
    return levels.apply(lambda one: slope(levels.columns, one)[0], axis=1)


def claims(data: pd.DataFrame) -> list[Claim]:
    """What holds of the statements."""
    found = [*_canon(only(data, part="canon")), *_nmap(only(data, part="nmap"))]
    share = only(data, part="sums").groupby("seed")["share"].max()
    says = "FedCanon: the control variates c_i sum to zero, in every round (after (7))"
    found.insert(
        0, fact(says, bool(share.max() < 1e-10), row("||sum c_i|| / sum ||c_i||, largest", share, "0", "paper"))
    )
    last = only(data, part="mls")
    gaps = {r: only(last, rule=r).set_index("seed")["gap"] for r in RULES}
    first = last.groupby("rule")["lambda0"].first()
    note = "gap after the same rounds and local steps; " + ", ".join(f"{r}: lambda {v:g}" for r, v in first.items())
    says = "FedMLS, Remark 3.3: lambda_k = lambda_0 / k and T_k = k do better than constant ones"
    return [*found, ahead(says, gaps, lower=True, ratio=True, least=0.05, note=note)]


def _canon(data: pd.DataFrame) -> list[Claim]:
    """Theorem 1 with Remarks 2 and 3."""
    full, noisy = data[data["batch"] == 0], data[(data["batch"] > 0) & (data["share"] == 1)]
    by_kappa, by_batch = _level(full, "kappa", "stationarity", 2), _level(noisy, "batch", "stationarity", 2)
    small = only(data, batch=data.loc[data["batch"] > 0, "batch"].min())
    steps = _level(small, "share", "stationarity", 2)
    what = "squared stationarity"
    levels = [row(f"{what}, kappa = {k:g}", by_kappa[k]) for k in by_kappa]
    made = against(
        f"FedCanon, Theorem 1 and Remark 2: what is left falls at least like kappa ({what}, full gradients)",
        "slope against kappa",
        _slopes(by_kappa),
        1.0,
        above=True,
        paper="1 (O(kappa))",
        source="paper",
    )
    batches = against(
        f"FedCanon, Theorem 1 and Remark 3: what noise leaves falls like 1 / B ({what})",
        "slope against B",
        _slopes(by_batch),
        LINEAR,
        above=False,
        paper="-1 (O(1 / B))",
        source="paper",
    )
    each = {f"steps / {1 / float(s):g}": steps[s] for s in sorted(steps.columns)}
    free = "FedCanon, Remark 3: with small batches smaller steps reduce what noise leaves, which Theorem 1 cannot say"
    return [
        made._replace(rows=(*levels, *made.rows)),
        batches._replace(rows=(*(row(f"{what}, B = {b:g}", by_batch[b]) for b in by_batch), *batches.rows)),
        ahead(free, each, lower=True, ratio=True, least=0.05, note="B = 1; a statement of ours beside the remark"),
    ]  # fmt: skip


def _nmap(data: pd.DataFrame) -> list[Claim]:
    """Theorem 8: linear convergence, and noise that clients and local steps average out."""
    exact, noisy = data[data["batch"] == 0], data[data["batch"] > 0]
    rates, ends = {}, {}
    for seed, part in exact.groupby("seed"):
        falling = part[part["gap"] > 1e-12]
        rates[seed] = float(np.exp(np.polyfit(falling["round"], np.log(falling["gap"]), 1)[0]))
        ends[seed] = float(part["gap"].abs().iloc[-1])
    found = [
        fact(
            "FedNMap, Theorem 8: under the PL condition F - min F falls linearly, with full gradients to nothing",
            max(rates.values()) < 1 and max(ends.values()) < 1e-10,
            row("factor of F - min F, a round", pd.Series(rates), "< 1", "ours", digits=4),
            row("F - min F at the end, of the first", pd.Series(ends), "0"),
        )
    ]
    for key, fixed, what in (("n", "tau", "clients"), ("tau", "n", "local steps")):
        at = 4 if fixed == "tau" else 8
        levels = _level(noisy[noisy[fixed] == at], key, "gap")
        made = against(
            f"FedNMap, Theorem 8: what noise leaves falls like one over the number of {what} (common effective step)",
            f"slope against {key}", _slopes(levels), LINEAR, above=False, paper="-1 (linear speedup)", source="paper",
        )  # fmt: skip
        rows = (row(f"F - min F, of the first, {key} = {v:g}", levels[v]) for v in levels)
        found.append(made._replace(rows=(*rows, *made.rows)))
    return found


def draw(data: pd.DataFrame, path: Path) -> None:
    """What kappa, the batch and the number of clients leave, against rounds."""
    canon_, nmap_ = only(data, part="canon"), only(data, part="nmap")
    canon_ = canon_[canon_["round"] > 0].assign(left=lambda rows: rows["stationarity"])
    full, noisy = canon_[canon_["batch"] == 0], canon_[canon_["batch"] > 0]
    linear = nmap_[(nmap_["batch"] == 0) | (nmap_["tau"] == 4)]
    drawn = [
        (full.assign(curve=[f"kappa = {k:g}" for k in full["kappa"]]), "left", "FedCanon from the solution on"),
        (
            noisy.assign(
                curve=[
                    f"B = {b:g}" + ("" if s == 1 else f", steps / {1 / s:g}")
                    for b, s in zip(noisy["batch"], noisy["share"], strict=True)
                ]
            ),
            "left",
            "FedCanon, batches of B",
        ),
        (
            linear.assign(
                curve=[
                    f"n = {n:g}" if b else "full gradients" for n, b in zip(linear["n"], linear["batch"], strict=True)
                ]
            ),
            "gap",
            "FedNMap, PL case",
        ),
    ]
    panels = [
        Panel(histories(rows[rows["gap"] > 0] if y == "gap" else rows, "curve"), y, title=title, log_y=True,
              name="F - min F, of the first" if y == "gap" else "stationarity")
        for rows, y, title in drawn
    ]  # fmt: skip
    draw_panels(panels, path, columns=3, methods=swept(label for panel in panels for label in panel.histories))
