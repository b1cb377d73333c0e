"""A linear model's predictions as columns beside those of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite.problems.loss import Loss
from fedcomposite.problems.losses import Logistic


def beside(columns: Mapping[str, npt.NDArray[Any]], margins: Tensor, loss: Loss, threshold: float) -> pd.DataFrame:
    """The columns, and ``margin``, ``prediction`` and for a logistic model ``class``."""
    made = {"margin": margins.numpy(), "prediction": loss.response(margins).numpy()}
    if isinstance(loss, Logistic):
        made["prediction"] = torch.sigmoid(margins).numpy()
        made["class"] = (made["prediction"] >= threshold).astype(int)
    taken = {f"{name} (file)" if name in made else name: values for name, values in columns.items()}
    return pd.DataFrame({**taken, **made})
