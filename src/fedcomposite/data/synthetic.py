"""Synthetic heterogeneous classification, synthetic(alpha, beta) of Li et al. (FedProx, MLSys 2020).

Client k draws u_k ~ N(0, alpha), B_k ~ N(0, beta) (standard deviations, as the published code has it), feature means
v_kj ~ N(B_k, 1) and samples a ~ N(v_k, Sigma) with Sigma_jj = j^-1.2. Two label rules, since the papers leave it open:

* ``labels="logit"`` (default): b = sign(w_k'a + w_k0) with w_k, w_k0 ~ N(u_k, 1), in {-1, +1}. Here alpha matters.
* ``labels="softmax"``: the published rule, the argmax of ``classes`` linear scores with W_k, b_k ~ N(u_k, 1). The
  argmax is taken of
  the scores themselves, which never overflow (the published softmax returns nan, hence class 0, for large alpha or
  beta). Because u_k is added to every score, alpha has no influence on the labels under this rule. With two classes
  b is in {-1, +1}.

Features are divided by the largest norm of any sample, ``scale=True``, so that the smoothness constant of the
logistic loss is at most 1/4 whatever beta; the papers do not state their scaling, and the raw one makes it about
1e4 at (50, 50).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedcomposite._validation import Count, ZeroOrMore, check_call
from fedcomposite.data.silos import DataError, Seed, Share, Silos


def synthetic(
    *,
    clients: Count = 30,
    features: Count = 20,
    samples: Count | None = 100,
    alpha: ZeroOrMore = 1.0,
    beta: ZeroOrMore = 1.0,
    seed: Seed = 0,
    labels: Literal["logit", "softmax"] = "logit",
    classes: Count = 2,
    scale: bool = True,
    test: Share = 0.0,
    validation: Share = 0.0,
) -> Silos:
    """Make ``clients`` silos; ``samples=None`` draws their sizes as int(lognormal(4, 2)) + 50, as published.

    ``test`` and ``validation`` are the shares of each silo that are held out (test = 0.1 in the published code).
    """
    check_call("synthetic", synthetic, locals(), DataError)
    if classes < 2 or (labels == "logit" and classes != 2):
        raise DataError(f"synthetic: classes = {classes}, must be at least 2, and 2 for labels = 'logit'")
    rng = np.random.default_rng(seed)
    sizes = np.full(clients, samples) if samples is not None else rng.lognormal(4, 2, clients).astype(int) + 50
    u, B = rng.normal(0, alpha, clients), rng.normal(0, beta, clients)
    deviations = np.arange(1, features + 1) ** -0.6
    arrays = []
    for k in range(clients):
        X = rng.normal(B[k], 1, features) + deviations * rng.standard_normal((sizes[k], features))
        if labels == "logit":
            w, bias = rng.normal(u[k], 1, features), rng.normal(u[k], 1)
            y = np.where(X @ w + bias > 0, 1.0, -1.0)
        else:
            W, b = rng.normal(u[k], 1, (features, classes)), rng.normal(u[k], 1, classes)
            y = np.argmax(X @ W + b, axis=1).astype(float)
            y = 2 * y - 1 if classes == 2 else y
        arrays.append((X, y))
    largest = max(float(np.linalg.norm(X, axis=1).max()) for X, _ in arrays) if scale else 1.0
    silos = Silos.from_arrays([(X / largest, y) for X, y in arrays])
    return silos.split(test, seed, validation) if test or validation else silos
