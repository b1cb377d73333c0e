"""The folder that each site receives, and its site.toml."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fedcomposite.data.spec import Recoding
from fedcomposite.data.steps import Unit
from fedcomposite.federation.folders import EngineName, FolderError, read_toml
from fedcomposite.federation.site.approval import Approval
from fedcomposite.federation.site.policy import Limits


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Site(_Section):
    name: str
    engine: EngineName
    address: str
    device: str = "cpu"
    """Where rounds are computed."""
    books: str | None = None
    """Folder of ledger, secret and books of rows: one for all federations in which the same patients take part."""


class DataSection(_Section):
    """``[data]`` of site.toml."""

    file: str | None = None
    """The samples: .csv, .parquet, .npz or .svm; a folder of .csv or .parquet files is one table."""
    database: str | None = None
    """In place of a file: one of DuckDB, or a URL of SQLAlchemy; ``$NAME`` is taken from the environment."""
    query: str | None = None
    """One SELECT, whose rows are the table; nothing is ever written there."""
    target: str | None = None
    test: str | None = None
    new: str | None = None
    """Patients whom ``federation predict`` scores, for this site's own people; those of ``file`` if left out."""
    drop: list[str] = []
    missing: list[str] = ["?"]
    columns: dict[str, str] = {}
    """Common name = name in this site's file."""
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    weight: str | None = None
    """The column that says what each sample counts; its sum is told to the coordinator."""
    offset: str | None = None
    """The column that is added to each sample's margin."""
    time: str | None = None
    """Of times to an event, the column of the time; ``target`` is whether there was one."""
    entry: str | None = None
    """The column of when observation began, where that was late."""
    strata: str | None = None
    """The column of groups with baselines of their own."""
    features: int | None = Field(default=None, ge=1)
    """How many features an .svm file has."""
    thousands: str | None = None
    units: dict[str, Unit] = {}
    """What makes this site's numbers those of the common unit, by common name."""
    recode: dict[str, Recoding] = {}
    """Common name = {level in this file = common level}; for tables that recipes prepare."""
    classes: list[int] | None = None
    """The labels that the target may have, if they are other than -1 and 1 or 0 and 1; they are told to others."""
    recipe: bool = False
    """Whether the file is a table as people have it, which experiments' recipes prepare."""


class SiteFile(_Section):
    """site.toml."""

    site: _Site
    data: DataSection = DataSection()
    limits: Limits = Limits()
    approval: Approval = Approval()


class SiteFolder:
    """A site's folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.file: SiteFile = read_toml(self.path / "site.toml", SiteFile)
        self.name, self.address, self.engine = self.file.site.name, self.file.site.address, self.file.site.engine
        self.key, self.coordinator = self.path / "site.key", self.path / "coordinator.pub"
        self.state = self.path / "state"
        self.books = self.path / self.file.site.books if self.file.site.books else self.state
        for path in (self.key, self.coordinator):
            self._check_there(path)

    def check_kit(self) -> None:
        """Refuse a folder without the engine's part of it; a site whose engine others run needs none."""
        for name in {"nvflare": ["flare/startup/client.key"], "flower": ["ca.crt"], "local": []}[self.engine]:
            self._check_there(self.path / name)

    def _check_there(self, path: Path) -> None:
        if not path.is_file():
            hint = "; ask the coordinator for it (its command is: federation rotate)" * (path == self.coordinator)
            raise FolderError(f"{path}: missing from the enrolment folder{hint}")

    @property
    def peers(self) -> dict[str, Path]:
        """The other sites' public keys."""
        return {p.stem: p for p in sorted((self.path / "peers").glob("*.pub"))}
