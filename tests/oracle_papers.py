"""The papers' algorithms in plain NumPy, line by line as printed, one client after another: no code of the package.

``gradients`` holds one function per client; ``prox(v, s)`` is that of s h, and is called as often as the paper has it.
"""

import numpy as np


def fedcanon(gradients, prox, z, rounds, tau, beta, alpha):
    """FedCanon, Algorithm 1: the models z^1, z^2, ..., and the last c_i."""
    n, c, found = len(gradients), [np.zeros_like(z) for _ in gradients], []
    for _ in range(rounds):
        deltas = []
        for i in range(n):
            y = z.copy()
            for _ in range(tau):
                y = y - beta * (gradients[i](y) + c[i])
            deltas.append((z - y) / (beta * tau))
        mean = sum(deltas) / n
        z = prox(z - alpha * mean, alpha)
        c = [c[i] + mean - deltas[i] for i in range(n)]
        found.append(z)
    return np.stack(found), np.stack(c)


def zhang(gradients, prox, x_bar, rounds, tau, eta, eta_g, last_prox=True):
    """Zhang, Hu & Johansson, Algorithm 1: the models P(x-^2), P(x-^3), ...

    Without ``last_prox`` line 9 is left out in the last local step, where nothing uses its result.
    """
    n, whole, found = len(gradients), eta * eta_g * tau, []
    c = [np.zeros_like(x_bar) for _ in range(n)]
    model = prox(x_bar, whole)
    for _ in range(rounds):
        sent, means = [], []
        for i in range(n):
            pre, post, taken = model, model, []
            for t in range(tau):
                taken.append(gradients[i](post))
                pre = pre - eta * (taken[-1] + c[i])
                if t < tau - 1 or last_prox:
                    post = prox(pre, (t + 1) * eta)
            sent.append(pre)
            means.append(sum(taken) / tau)
        x_bar = model + eta_g * (sum(sent) / n - model)
        c = [(model - x_bar) / whole - means[i] for i in range(n)]
        model = prox(x_bar, whole)
        found.append(model)
    return np.stack(found)


def fednmap(gradients, prox, z, rounds, tau, eta, eta_s, gamma):
    """FedNMap, (3) to (7): the points z^1, z^2, ... of the normal map, whose models are P_gamma(z)."""
    n, c, found = len(gradients), [np.zeros_like(z) for _ in gradients], []
    for _ in range(rounds):
        ys = []
        for i in range(n):
            local = z.copy()
            for _ in range(tau):
                x = prox(local, gamma)
                local = local - eta * (gradients[i](x) + (local - x) / gamma + c[i])
            ys.append((z - local) / (eta * tau))
        mean = sum(ys) / n
        z = z - eta_s * eta * tau * mean
        c = [c[i] + mean - ys[i] for i in range(n)]
        found.append(z)
    return np.stack(found)


def fedprox(matrices, vectors, w, rounds, eta):
    """FedProx, all clients and exact solves of f_i(y) + ||y - w||^2 / (2 eta), f_i(y) = y'A_i y / 2 - b_i'y."""
    found, one = [], np.eye(len(w))
    for _ in range(rounds):
        w = sum(np.linalg.solve(A + one / eta, b + w / eta) for A, b in zip(matrices, vectors, strict=True))
        w = w / len(matrices)
        found.append(w)
    return np.stack(found)
