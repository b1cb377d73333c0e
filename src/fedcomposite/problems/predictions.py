"""A linear model's predictions as columns beside those of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite.problems.losses import Cox, Logistic, Loss, Multinomial

Columns = dict[str, npt.NDArray[Any]]


def predicted(margins: Tensor, loss: Loss, threshold: float, hazard: float | None = None) -> Columns:
    """``margin``, ``prediction`` and ``class``, as far as the loss has them; of several classes a column for each.

    Of times to an event the prediction is the probability of one by the time until which the baseline has ``hazard``.
    """
    if isinstance(loss, Multinomial):
        labels, shares = np.array(loss.labels), torch.softmax(margins, -1)
        each = {f"{name}[{c}]": values[:, k].numpy() for name, values in (("margin", margins), ("prediction", shares))
                for k, c in enumerate(labels.tolist())}  # fmt: skip
        return {**each, "class": labels[shares.argmax(-1).numpy()]}
    made = {"margin": margins.numpy()}
    if isinstance(loss, Cox):
        return made | ({} if hazard is None else {"prediction": -np.expm1(-hazard * np.exp(margins.numpy()))})
    if not loss.classifier:
        return made | {"prediction": loss.response(margins).numpy()}
    if not isinstance(loss, Logistic):  # margins that are no logarithms of odds
        return made | {"class": (margins >= 0).long().numpy()}
    share = torch.sigmoid(margins)
    return made | {"prediction": share.numpy(), "class": (share >= threshold).long().numpy()}


def beside(columns: Mapping[str, npt.NDArray[Any]], made: Columns) -> pd.DataFrame:
    """The columns of a file, and what was made of it; a name that both have is the file's with ``(file)`` behind it."""
    taken = {f"{name} (file)" if name in made else name: values for name, values in columns.items()}
    return pd.DataFrame({**taken, **made})
