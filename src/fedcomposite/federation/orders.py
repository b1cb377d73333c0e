"""What a coordinator asks of a site, and what a site says about itself: plain data, checked on arrival."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcomposite.federation.wire import WireError


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse and check; the first mistake is the error."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "text"
            raise WireError(f"not a valid {cls.__name__.lower()}: {where}: {first['msg'].lower()}") from None


class Shape(_Data):
    """What all sites must agree on; the server learns it from their introductions."""

    features: list[int]
    """Shape of a sample."""
    dtype: Literal["float32", "float64", "uint8", "int64", "int32", "bool"]
    """Type of the stored samples."""
    names: list[str] = []
    """Columns, in the order of the model; empty for samples without names."""
    labels: list[float] = []
    """Classes of all sites together, for a classifier."""
    clients: int = Field(ge=1)


class Order(_Data):
    """One request to one site."""

    job: str = Field(pattern="^[0-9a-z-]{1,64}$")
    site: str
    config: str
    """The experiment, as TOML."""
    shape: Shape | None = None
    """Left out in the question that introduces the sites."""
    client: int = Field(default=0, ge=0)
    """The site's number; it draws the minibatches of this client."""
    round: int = Field(default=0, ge=0)
    last: int = Field(default=-1, ge=-1)
    """The last round in which this site took part and was counted; -1 for none."""
    position: int = Field(default=0, ge=0)
    cohort: int = Field(default=1, ge=1)
    train: bool = False
    evaluate: bool = False


class Introduction(_Data):
    """What a site says about its data before the first round: names and counts."""

    site: str
    version: str
    """Of the package."""
    samples: int = Field(ge=1)
    features: list[int]
    dtype: Literal["float32", "float64", "uint8", "int64", "int32", "bool"]
    names: list[str] = []
    labels: list[float] = []
    smoothness: float | None = None
    """Smoothness constant of the site's loss; left out where it has none."""
    scale: float | None = None
    """What it would be for a loss of curvature 1; left out for networks."""
