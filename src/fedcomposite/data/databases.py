"""Tables in databases: the answer to one SELECT, read only.

A file of DuckDB is opened read-only, without access to other files; what SQLAlchemy reaches is asked in a read-only
transaction, of kinds of databases that have such. The rows are put in order, since a database promises none, and the
same rows must be the same data set.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedcomposite.data.faults import DataError, stop

if TYPE_CHECKING:
    from sqlalchemy import Connection

_READ_ONLY = {
    "sqlite": "PRAGMA query_only = ON",
    "postgresql": "SET TRANSACTION READ ONLY",
    "mysql": "SET TRANSACTION READ ONLY",
    "mariadb": "SET TRANSACTION READ ONLY",
    "oracle": "SET TRANSACTION READ ONLY",
}
"""What makes a transaction one that writes nothing; of MySQL and MariaDB it is said before the transaction."""
_ASIDE = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
_EXTRA = "pip install 'fedcomposite[sql]'"


@dataclass(frozen=True)
class StoredTable:
    """A table that lies in a database: ``database`` is a file of DuckDB, or a URL of SQLAlchemy."""

    database: str
    """With ``$NAME`` for what stands in the environment, so that no password need be in a file."""
    query: str
    """One SELECT."""

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The rows, read once and in order."""
        source = shown(self.database)
        given = os.path.expandvars(self.database)
        made = _sqlalchemy(given, self.query, source) if _is_url(given) else _duckdb(given, self.query, source)
        names = [str(name).strip() for name in made.columns]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise stop(source, f"the query has several columns {twice[0]!r}", "name them apart by AS")
        if not len(made):
            raise stop(source, "the query has no rows", "look at its WHERE")
        made = made.set_axis(names, axis=1)
        return made.sort_values(names, key=lambda column: column.astype(str), kind="stable", ignore_index=True)


def read_sql(database: str | Path, query: str) -> pd.DataFrame:
    """The rows of one SELECT, read only; a table for whatever takes DataFrames.

    Parameters
    ----------
    database : str or path
        A file of DuckDB, or a URL of SQLAlchemy (``postgresql://user:$PASSWORD@host/study``, ``sqlite:///study.db``);
        ``$NAME`` is taken from the environment.
    query : str
        One SELECT. The rows come in an order of their own, by all columns.
    """
    return StoredTable(str(database), query).frame


def stored_tables(section: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """The tables of ``[data.databases]``: of each site, a database, or its own ``database`` and ``query``."""
    tables = {}
    for site, given in section["databases"].items():
        one = given if isinstance(given, Mapping) else {"database": given}
        tables[site] = read_sql(one["database"], one.get("query", section.get("query", "")))
    return tables


def check_databases(section: Mapping[str, Any]) -> list[str]:
    """What is wrong with ``[data.databases]`` and ``query``, before anything is opened."""
    wrong: list[str] = []
    databases = section.get("databases")
    if not isinstance(databases, Mapping) or not databases:
        return ["databases must have one for each site: { north = 'north.duckdb' }"]
    for site, given in databases.items():
        one = given if isinstance(given, Mapping) else {"database": given}
        query = one.get("query", section.get("query"))
        if one.keys() - {"database", "query"} or not isinstance(one.get("database"), str):
            wrong.append(f"databases: {site} = {given!r:.60}, must be a database, or have a database and a query")
        elif not isinstance(query, str):
            wrong.append(f"databases: {site} needs a query: SELECT ...")
        elif reason := not_one_select(query):
            wrong.append(f"databases: {site}: {reason}")
    return wrong


def located(section: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """``[data.databases]`` with its files beside the experiment."""
    made = {}
    for site, given in section["databases"].items():
        one = dict(given) if isinstance(given, Mapping) else {"database": given}
        if isinstance(one.get("database"), str):
            one["database"] = placed(one["database"], base)
        made[site] = one
    return {**section, "databases": made}


def placed(database: str, base: Path) -> str:
    """A database whose file, if it is one, lies relative to a folder."""
    return database if _is_url(database) else str(base / database)


def not_one_select(query: str) -> str:
    """Why a text is not one SELECT; empty if it is. The database itself sees to it that nothing is written."""
    bare = _ASIDE.sub(" ", query).strip().rstrip(";").strip()
    if not re.match(r"(select|with)\b", bare, re.IGNORECASE):
        return "the query must be a SELECT"
    return "the query must be one statement" if ";" in bare else ""


def shown(database: str) -> str:
    """What a database is called in messages: without a password."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", database)


def _is_url(database: str) -> bool:
    return "://" in database


def _checked(query: str, source: str) -> None:
    if reason := not_one_select(query):
        raise stop(source, reason, "give one SELECT")


def _duckdb(path: str, query: str, source: str) -> pd.DataFrame:
    try:
        import duckdb
    except ImportError:
        raise stop(source, "reading it needs duckdb", _EXTRA) from None
    _checked(query, source)
    if not Path(path).is_file():
        raise stop(source, "no such file", "check the path; other databases have a URL, as in postgresql://")
    alone: dict[str, Any] = {"enable_external_access": "false", "lock_configuration": "true"}
    try:
        with contextlib.closing(duckdb.connect(path, read_only=True, config=alone)) as connection:
            (statement,) = connection.extract_statements(query)
            if statement.type.name != "SELECT":
                raise stop(source, f"a {statement.type.name} is no SELECT", "give one SELECT")
            frame: pd.DataFrame = connection.execute(statement).df()
            return frame
    except (duckdb.Error, ValueError) as error:
        raise error if isinstance(error, DataError) else stop(source, _said(error), "look at the query") from None


def _sqlalchemy(url: str, query: str, source: str) -> pd.DataFrame:
    try:
        import sqlalchemy
    except ImportError:
        raise stop(source, "reading it needs sqlalchemy", _EXTRA) from None
    _checked(query, source)
    try:
        kind = sqlalchemy.make_url(url).get_backend_name()
        if kind not in _READ_ONLY:
            raise stop(
                source, f"{kind} has no read-only transactions here", f"one of {', '.join(_READ_ONLY)}, or a file"
            )
        if kind == "sqlite" and not Path(sqlalchemy.make_url(url).database or "").is_file():
            raise stop(source, "no such file", "check the path")  # it would be made
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        with engine.connect() as connection, _reading(connection, kind):
            found = connection.execute(sqlalchemy.text(query))
            return pd.DataFrame.from_records(found.fetchall(), columns=list(found.keys()), coerce_float=True)
    except ImportError as error:
        raise stop(
            source, f"its driver is not here ({_said(error)})", "install the driver that SQLAlchemy names"
        ) from None
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise stop(source, _said(getattr(error, "orig", None) or error), "look at the URL and the query") from None


@contextlib.contextmanager
def _reading(connection: Connection, kind: str) -> Iterator[None]:
    """A transaction in which the database refuses to write, and that is rolled back."""
    connection.exec_driver_sql(_READ_ONLY[kind])
    if kind in ("mysql", "mariadb"):
        connection.rollback()  # it is said of the next one
    try:
        yield
    finally:
        connection.rollback()


def _said(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
