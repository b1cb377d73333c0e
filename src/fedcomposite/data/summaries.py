"""What silos hold, and how different they are, in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from fedcomposite.data.silos import Silos


def summary(silos: Silos) -> pd.DataFrame:
    """See :meth:`fedcomposite.Silos.summary`."""
    frame = pd.DataFrame({"client": silos.names, "samples": silos.sizes})
    if (classes := silos.classes) is not None:
        counts = np.zeros((len(silos), len(classes)), np.int64)
        owner = np.repeat(np.arange(len(silos)), silos.sizes)
        np.add.at(counts, (owner, np.searchsorted(classes, silos.targets.numpy())), 1)
        for j, label in enumerate(classes):
            frame[f"class {label:g}"] = counts[:, j]
    else:
        frame["target mean"] = [float(silos[i][1].double().mean()) for i in range(len(silos))]
        frame["target sd"] = [float(silos[i][1].double().std(correction=0)) for i in range(len(silos))]
    return frame


def heterogeneity(silos: Silos) -> dict[str, float]:
    """See :meth:`fedcomposite.Silos.heterogeneity`."""
    sizes = silos.sizes
    out = {"size_ratio": float(sizes.max() / sizes.min())}
    if (classes := silos.classes) is not None and len(classes) > 1:
        counts = summary(silos)[[f"class {c:g}" for c in classes]].to_numpy(float)
        shares = counts / counts.sum(1, keepdims=True)
        overall = counts.sum(0) / counts.sum()
        out["label_skew"] = float(np.abs(shares - overall).sum(1).mean() / 2)
        out["single_class"] = float((counts.max(1) == counts.sum(1)).mean())
    return out
