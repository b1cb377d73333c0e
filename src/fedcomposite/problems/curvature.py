"""Second derivatives of linear models: A_W' D A_W / m of each client, on the coordinates W that are asked for.

D holds phi'' of each sample: a number, or a C x C matrix with C outputs. There the coordinates of x are those of a
``(features, C)`` matrix, row by row, so a coordinate is a pair of a feature and an output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcomposite.problems.sparse import Stack

_CHUNK = 1 << 22  # elements of the selected columns that are worked on at a time


def hessians(X: Tensor | Stack, second: Tensor, weight: Tensor, at: Tensor, outputs: int) -> Tensor:
    """``(n, k, k)``: the Hessians of n clients on the k coordinates ``at``.

    ``X`` is ``(n, m, features)``, ``second`` ``(n, m)`` or ``(n, m, C, C)``, ``weight`` holds 1/m_i on client i's
    samples.
    """
    if isinstance(X, Stack):
        return X.hessians(second, weight, at, outputs)
    n, m = X.shape[:2]
    k = len(at)
    feature, output = at // outputs, at % outputs
    out = X.new_empty(n, k, k)
    per = max(1, _CHUNK // max(1, m * k))
    for a in range(0, n, per):
        c = slice(a, a + per)
        Z = X[c] if outputs == 1 and k == X.shape[2] else X[c].index_select(2, feature)
        bent = second[c] * weight[c].view(*weight[c].shape[:2], *(1,) * (second.ndim - 2))
        if outputs == 1:
            torch.bmm(Z.transpose(1, 2), Z * bent.unsqueeze(2), out=out[c])
            continue
        for one in range(outputs):
            rows = (output == one).nonzero().squeeze(1)
            right = Z * bent[:, :, one].index_select(2, output)
            out[c, rows] = torch.bmm(Z.index_select(2, rows).transpose(1, 2), right)
    return out
