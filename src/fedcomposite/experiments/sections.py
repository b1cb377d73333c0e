"""The sections of an experiment file that are tables of plain values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A table: nothing that is not named here, and no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ProblemSection(Section):
    """``[problem]``: the loss, how clients are weighted, and how much each feature is regularized."""

    loss: str | None = None
    loss_options: dict[str, Any] = {}
    bias: bool = False
    weights: Literal["uniform", "samples"] = "uniform"
    metrics: list[str] = []
    penalty_factor: dict[str, float] | list[float] | None = None
    """What the term of each feature is multiplied by: ``{age = 0.0}`` leaves that column alone."""


class ModelSection(Section):
    """``[model]``: a network of :mod:`fedcomposite.models` instead of a linear model, and how it is evaluated."""

    name: str
    """One of ``fedcomposite list models``."""
    options: dict[str, Any] = {}
    """The model's own."""
    seed: int | None = None
    """Of the first parameters; the experiment's if left out."""
    gradients: Literal["auto", "vmap", "loop", "streams"] = "auto"
    chunk: int | None = Field(default=None, ge=1)
    precision: Literal["full", "bf16"] = "full"
    evaluation_samples: int = Field(default=2000, ge=0)
    """Training samples used for loss, gradient and accuracy, and the most test samples; 0 takes all."""


class RunSection(Section):
    """``[run]``: the settings of :func:`fedcomposite.simulate`."""

    rounds: int = Field(ge=0)
    batch_size: int | None = Field(default=None, ge=1)
    sampling: Literal["replacement", "epoch"] = "replacement"
    clip_norm: float | None = Field(default=None, gt=0)
    participation: float = Field(default=1.0, gt=0, le=1)
    replace: bool = False
    """Whether cohorts are drawn with replacement."""
    dtype: Literal["float32", "float64"] | None = None
    """float64 for linear models and float32 for networks if left out."""
    device: str = "cpu"
    """``"cpu"``, ``"cuda"`` or ``"cuda:1"``."""
    evaluate_every: int = Field(default=1, ge=1)
    tolerance: float | None = Field(default=None, gt=0)
    stationarity_step: float | None = Field(default=None, gt=0)
    backend: Literal["stacked", "loop"] = "stacked"
    mode: Literal["auto", "eager", "record", "compile"] = "auto"
    checkpoint_every: int = Field(default=50, ge=0)
    """Rounds between checkpoints; 0 writes one at the end and at Ctrl-C."""
    aggregator: dict[str, Any] | None = None
    """A robust mean of :mod:`fedcomposite.aggregators`: its name and fields."""


class TrialsSection(Section):
    """``[trials]``: how values are chosen for the fields that say ``{tune = [...]}``."""

    seed: Seed = 1000
    """The seed they are chosen with, none of those that are reported."""
    criterion: str = "objective"
    """What the last record is judged by: the lowest wins, of accuracies the highest."""
    rounds: int | None = Field(default=None, ge=1)
    """Rounds of a trial; as many as a run has if left out."""
