"""FedMLS in plain NumPy, line by line from Algorithm 1 of the paper, one client after another."""

import numpy as np


def fedmls(subgradients, y0, rounds, lam, steps, radius=np.inf):
    """The models x_1, ..., x_K as rows, and the largest norm that any client's iterate had.

    ``subgradients`` holds one function u -> subgradient of f_i at u per client; ``lam(k)`` and ``steps(k)`` are the
    schedules lambda_k and T_k.
    """
    n = len(subgradients)

    def beta(k):
        return 4 / (lam(k) * k)

    def gamma(k):
        return 2 / (k + 1)

    y0 = np.asarray(y0, float)
    z, x, y = {1: y0}, {0: y0}, {1: y0}
    zi, xi, yi = ([{0: y0} for _ in range(n)] for _ in range(3))
    for i in range(n):
        yi[i][1] = y0
    largest = 0.0
    for k in range(1, rounds + 1):
        for i in range(n):
            v = zi[i][k - 1] - (yi[i][k] - y[k]) / (beta(k) * lam(k))
            u, averaged = zi[i][k - 1], zi[i][k - 1]
            for t in range(1, steps(k) + 1):
                theta = 2 * (t + 1) / (t * (t + 3))
                u_hat = u - 1 / (1 + t / 2) * (subgradients[i](u) / (n * beta(k)) + u - v)
                norm = np.sqrt(np.sum(u_hat**2))
                u = u_hat * min(1.0, radius / norm) if norm > 0 else u_hat
                averaged = (1 - theta) * averaged + theta * u
                largest = max(largest, np.sqrt(np.sum(u**2)))
            zi[i][k] = u
            xi[i][k] = (1 - gamma(k)) * xi[i][k - 1] + gamma(k) * averaged
            yi[i][k + 1] = (1 - gamma(k + 1)) * xi[i][k] + gamma(k + 1) * zi[i][k]
        x[k] = (1 - gamma(k)) * x[k - 1] + gamma(k) * z[k]
        y[k + 1] = (1 - gamma(k + 1)) * x[k] + gamma(k + 1) * z[k]
        mean = sum(yi[i][k + 1] for i in range(n)) / n
        z[k + 1] = z[k] - (y[k + 1] - mean) / (beta(k + 1) * lam(k + 1))
    return np.stack([x[k] for k in range(1, rounds + 1)]), largest
