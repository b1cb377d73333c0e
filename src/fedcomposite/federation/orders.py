"""What a coordinator asks of a site, and what a site says about itself: plain data, checked on arrival."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcomposite.federation.wire import WireError, clean

Name = Annotated[str, Field(max_length=200)]
Number = Annotated[int, Field(ge=0, le=2**31)]
Extents = Annotated[list[Annotated[int, Field(ge=1, le=2**31)]], Field(min_length=1, max_length=8)]
Names = Annotated[list[Name], Field(max_length=1_000_000)]
Labels = Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(max_length=1000)]
TargetType = Literal["float32", "float64", "uint8", "int64", "int32", "bool"]
Constant = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse and check; the first mistake is the error."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = clean(".".join(map(str, first["loc"])), 60) or "text"
            raise WireError(f"not a valid {cls.__name__.lower()}: {where}: {clean(first['msg'].lower())}") from None
        except (ValueError, RecursionError, TypeError):
            raise WireError(f"not a valid {cls.__name__.lower()}: it cannot be read") from None


class Shape(_Data):
    """What all sites must agree on; the server learns it from their introductions."""

    features: Extents
    """Shape of a sample."""
    dtype: Literal["float32", "float64", "uint8", "int64", "int32", "bool"]
    """Type of the stored samples."""
    targets: Extents | None = None
    """Shape of a sample's target, where it has several."""
    target_dtype: TargetType = "float64"
    """Type of the stored targets."""
    names: Names = []
    """Columns, in the order of the model; empty for samples without names."""
    labels: Labels = []
    """Classes of all sites together, for a classifier."""
    clients: int = Field(ge=1, le=2**31)
    sites: Names = []
    """Names of the clients in their order, so that every site can tell its own number; needed in secure sums."""


class Key(_Data):
    """A site's keys for one epoch of secure sums, signed with its own key."""

    site: Name
    channel: str = Field(pattern="^[0-9a-f]{64}$")
    """X25519, for what only one other site may read."""
    mask: str = Field(pattern="^[0-9a-f]{64}$")
    """X25519, for masks."""
    commitment: str = Field(pattern="^[0-9a-f]{64}$")
    """Digest of the seed of its own mask."""
    signature: str = Field(max_length=200)


Parties = Annotated[list[Name], Field(max_length=1000)]


class Secure(_Data):
    """What an order says about secure sums: one of four phases, see ``secure``."""

    phase: Literal["keys", "shares", "sum", "open"]
    epoch: str = Field(pattern="^[0-9a-f]{32}$")
    """The keys that are meant."""
    recover: bool = False
    """Whether a sum can be opened without the sites that went away meanwhile."""
    parties: Parties = []
    """Who is asked for keys; whose sum is asked for."""
    trainers: Parties = []
    """Those of them that train in this round."""
    survivors: Parties = []
    """Whose masked numbers have arrived."""
    keys: Annotated[list[Key], Field(max_length=1000)] = []
    boxes: dict[Name, Annotated[str, Field(max_length=1000)]] = {}
    """Shares for this site, by sender; nobody else can read them."""
    samples: int = Field(default=0, ge=0, le=2**50)
    """Of all sites together, once they are known."""


class Samples(_Data):
    """Which of a site's samples count: ``runtime.protocol.Rows``."""

    kind: Literal["all", "fold", "site", "half", "sites", "bootstrap"] = "all"
    number: Number = 0
    of: int = Field(default=1, ge=1, le=10_000)
    held: bool = False
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    copy_number: int = Field(default=0, ge=0, le=200)
    """Of which completed copy; 0 for the mean over all."""


class Question(_Data):
    """One request for sums over samples; its arrays travel as vectors ``i.NAME``."""

    name: Literal[
        "newton", "losses", "information", "scores", "tallies", "calibration", "residuals", "rates",
        "timetable", "logrank", "schoenfeld", "risk_sums", "concordance", "horizon",
        "quadratic", "placed", "strayed", "lasting",
    ]  # fmt: skip
    width: Constant = 0.0
    """Over which a kink of the loss is rounded off."""
    bins: int = Field(default=0, ge=0, le=4096)
    """Of the histograms behind an AUC."""
    errors: bool = False
    """Whether ``losses`` are to tell errors as well."""
    count: int = Field(default=0, ge=0, le=10_000)
    """Models of ``losses``, slopes of ``rates``, lines of ``calibration``; edges of all others."""
    times: int = Field(default=0, ge=0, le=1000)
    """Of the grid of times to an event."""
    causes: int = Field(default=1, ge=1, le=20)
    """Of events."""
    groups: int = Field(default=0, ge=0, le=100)
    """Edges of groups of predictions at a ``horizon``; models of ``placed`` and ``strayed``."""
    products: bool = False
    """Whether ``risk_sums`` are to tell sums of products of features as well."""
    at: float = Field(default=0.0, allow_inf_nan=False)
    """The time of a ``horizon``."""
    hazard: float = Field(default=-1.0, allow_inf_nan=False)
    """Of the baseline until then, for sites that a model was not made from; negative if each has its own."""
    rows: Samples = Samples()
    part: Literal["train", "validation", "test", "new"] = "train"
    threshold: float = Field(default=0.5, gt=0, lt=1)
    """Probability from which on a new patient is of class 1, in the file that stays at the site."""


Head = Annotated[str, Field(max_length=400)]
"""Of an audit log: number and digest of its last line, and the site's signature."""


class AnalysisOrder(_Data):
    """What an analysis asks in one exchange: queries about a table, questions about samples, or an introduction."""

    number: Number = 0
    """Of the exchange."""
    queries: Annotated[list[Annotated[str, Field(max_length=8 << 20)]], Field(max_length=64)] = []
    """As JSON, see ``data.queries``."""
    questions: Annotated[list[Question], Field(max_length=200)] = []
    plan: Annotated[dict[Name, Number], Field(max_length=128)] = {}
    """What the whole job will ask at most: kinds of answers, as ``site.analyses.kinds`` names them, and numbers."""

    @property
    def introduces(self) -> bool:
        """Whether nothing is asked but who the site is."""
        return not self.queries and not self.questions


class Order(_Data):
    """One request to one site."""

    job: str = Field(pattern="^[0-9a-z-]{1,64}$")
    site: Name
    config: str
    """The experiment, as TOML."""
    shape: Shape | None = None
    """Left out in the question that introduces the sites."""
    client: Number = 0
    """The site's number; it draws the minibatches of this client."""
    round: Number = 0
    last: int = Field(default=-1, ge=-1, le=2**31)
    """The last round in which this site took part and was counted; -1 for none."""
    position: Number = 0
    cohort: int = Field(default=1, ge=1, le=2**31)
    train: bool = False
    evaluate: bool = False
    secure: Secure | None = None
    recipe: str = Field(default="", max_length=8 << 20)
    """How the site's table becomes features, once it has been learned, as JSON."""
    analysis: AnalysisOrder | None = None
    heads: Annotated[dict[Name, Head], Field(max_length=1000)] = {}
    """Of all sites' audit logs, for the others to keep."""

    @property
    def tells(self) -> bool:
        """Whether it is answered with numbers of the site, and not with keys or shares."""
        return self.secure is None or self.secure.phase == "sum"

    def depends(self, *more: str) -> dict[str, str]:
        """What every answer to this order depends on beside its vectors; ``more`` are further fields that matter."""
        names = ("config", "shape", "client", "recipe", *more)
        return {name: self.model_dump_json(include={name}) for name in names}


class Introduction(_Data):
    """What a site says about its data before the first round: names and counts."""

    site: Name
    version: Name
    """Of the package."""
    samples: int | None = Field(default=None, ge=1, le=2**40)
    """Left out in secure sums, where only their sum is told."""
    weight: float | None = Field(default=None, gt=0, le=2.0**40, allow_inf_nan=False)
    """The sum of the samples' weights, where they have some: it takes the place of their number."""
    weighted: bool = False
    """Whether they have some."""
    head: Head = ""
    """Of its audit log."""
    noised: bool = False
    """Whether what it counts at a model has noise: of scores it tells ``tallies`` only."""
    features: Extents
    dtype: Literal["float32", "float64", "uint8", "int64", "int32", "bool"]
    names: Names = []
    labels: Labels = []
    targets: Extents | None = None
    target_dtype: TargetType = "float64"
    smoothness: Constant | None = None
    """Smoothness constant of the site's loss; left out where it has none."""
    honest: int | None = Field(default=None, ge=1, le=2**31)
    """How many parties of a secure sum the site assumes to be honest, where noise is shared."""
    scale: Constant | None = None
    """What it would be for a loss of curvature 1; left out for networks."""
