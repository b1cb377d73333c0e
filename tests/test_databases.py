"""Tables in databases and folders of files: the numbers of the same table in a file, and nothing is ever written."""

import json
import sqlite3
import tomllib

import numpy as np
import pandas as pd
import pytest
import tomli_w
from analyst import PLAIN, inquiry
from local_federation import opened

import fedcomposite as fc
from fedcomposite.data.databases import StoredTable, not_one_select, shown
from fedcomposite.experiments import Config, ConfigError
from fedcomposite.federation.coordinator import inquiry as inquiries
from fedcomposite.federation.folders import FederationFolder, FolderError
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.enrolment import open_site
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.federation.site_folders import SiteFolder
from fedcomposite.runtime import Driver

duckdb = pytest.importorskip("duckdb")
SELECT = "SELECT age, sex, smoker, sick FROM patients"


def table(seed, n=60):
    draw = np.random.default_rng(seed)
    age, sex = draw.normal(60, 9, n).round(), draw.choice(["f", "m"], n)
    smoker = draw.integers(0, 2, n).astype(float)
    smoker[: n // 10] = np.nan
    sick = (draw.random(n) < 1 / (1 + np.exp(-(age - 60) / 9 - (sex == "m")))).astype(int)
    return pd.DataFrame({"age": age, "sex": sex, "smoker": smoker, "sick": sick})


def stored(path, frame):
    with duckdb.connect(str(path)) as connection:
        connection.register("frame", frame)
        connection.execute("CREATE TABLE patients AS SELECT * FROM frame")
    return path


@pytest.fixture
def places(tmp_path):
    """North has DuckDB, south SQLite, east a folder of files."""
    frames = {name: table(i) for i, name in enumerate(("north", "south", "east"))}
    stored(tmp_path / "north.duckdb", frames["north"])
    with sqlite3.connect(tmp_path / "south.db") as connection:
        frames["south"].to_sql("patients", connection, index=False)
    (tmp_path / "east").mkdir()
    frames["east"][:20].to_csv(tmp_path / "east" / "2024.csv", index=False)
    frames["east"][20:].to_csv(tmp_path / "east" / "2025.csv", index=False, sep=";")
    return tmp_path, frames


def same_rows(found, expected):
    order = list(expected.columns)
    pd.testing.assert_frame_equal(
        found.astype(str).sort_values(order, ignore_index=True),
        expected.astype(str).sort_values(order, ignore_index=True),
    )


def test_the_rows_are_those_of_the_table_and_in_an_order_of_their_own(places):
    folder, frames = places
    for name, database in {"north": folder / "north.duckdb", "south": f"sqlite:///{folder}/south.db"}.items():
        found = fc.data.read_sql(database, f"{SELECT};")
        same_rows(found, frames[name])
        other = fc.data.read_sql(database, f"WITH q AS ({SELECT}) SELECT * FROM q ORDER BY age DESC, sick")
        pd.testing.assert_frame_equal(found, other)


@pytest.mark.parametrize("query", [
    "DELETE FROM patients", "SELECT 1 AS a; DROP TABLE patients", "DROP TABLE patients", "COPY patients TO 'x.csv'", "",
    "WITH gone AS (DELETE FROM patients RETURNING *) SELECT * FROM gone", "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT nothing FROM patients", "SELECT * FROM patients WHERE age > 1000", "/* SELECT */ PRAGMA x",
])  # fmt: skip
@pytest.mark.parametrize("kind", ["duckdb", "sqlite"])
def test_nothing_but_one_select_is_asked_and_nothing_is_written(places, query, kind):
    folder, _ = places
    path = folder / ("north.duckdb" if kind == "duckdb" else "south.db")
    before = path.read_bytes()
    with pytest.raises(fc.DataError, match=path.name):
        fc.data.read_sql(path if kind == "duckdb" else f"sqlite:///{path}", query)
    assert path.read_bytes() == before
    assert not (folder / "x.csv").exists()


def test_a_write_that_looks_like_a_select_is_refused_by_the_database(places):
    """Text alone decides nothing: the transaction and the connection are read only."""
    folder, _ = places
    import sqlalchemy

    from fedcomposite.data.databases import _reading

    engine = sqlalchemy.create_engine(f"sqlite:///{folder}/south.db", poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection, _reading(connection, "sqlite"), pytest.raises(sqlalchemy.exc.OperationalError):
        connection.exec_driver_sql("DELETE FROM patients")
    assert len(fc.data.read_sql(f"sqlite:///{folder}/south.db", SELECT)) == 60
    with pytest.raises(fc.DataError, match="several columns 'age'"):
        fc.data.read_sql(f"sqlite:///{folder}/south.db", "SELECT age, age FROM patients")


def test_what_is_no_select_and_what_is_not_told():
    assert not not_one_select("  -- ; a remark\n SELECT ';' AS a /* ; */ ; ")
    assert not_one_select("SELECT 1; SELECT 2")
    assert shown("postgresql://me:secret@host/study") == "postgresql://me:***@host/study"
    for url in ("mssql+pyodbc://me:secret@host/x", "nothing://a", "sqlite:///none.db", "none.duckdb"):
        with pytest.raises(fc.DataError) as error:
            fc.data.read_sql(url, "SELECT 1 AS a")
        assert "secret" not in str(error.value)


def test_an_environment_variable_stands_in_for_a_secret(places, monkeypatch):
    folder, frames = places
    monkeypatch.setenv("STUDY_FOLDER", str(folder))
    same_rows(fc.data.read_sql("sqlite:///$STUDY_FOLDER/south.db", SELECT), frames["south"])


def test_an_experiment_on_databases_is_that_on_frames(places, cli):
    folder, frames = places
    (folder / "study.toml").write_text(f"""
name = "study"
[data]
target = "sick"
query = "{SELECT}"
databases.north = "north.duckdb"
databases.south = {{ database = "sqlite:///{folder}/south.db", query = "{SELECT} WHERE age > 0" }}
[recipe]
impute = "most_frequent"
one_hot = ["sex"]
[table_one]
[problem]
loss = "logistic"
bias = true
weights = "samples"
""")
    problem = Config.read(folder / "study.toml").make_problem()
    recipe = fc.Recipe(impute="most_frequent", one_hot=["sex"])
    two = {
        name: fc.data.read_sql(folder / f"{name}.duckdb", SELECT)
        if name == "north"
        else frame.sort_values(list(frame.columns), key=lambda c: c.astype(str), kind="stable")
        for name, frame in frames.items()
        if name != "east"
    }
    silos = recipe.prepare(two, target="sick")
    assert problem.silos.names == silos.names
    np.testing.assert_allclose(problem.silos.features, silos.features)
    cli("fit", folder / "study.toml", "--out", folder / "run", check=0)
    told = json.loads((folder / "run" / "analysis.json").read_text())
    assert told["table_one"]["numbers"][0]["group"] == "total"
    assert "60" in cli("data", "describe", folder / "study.toml", check=0).out


@pytest.mark.parametrize(("section", "named"), [
    ({"query": "SELECT 1"}, "query"), ({"databases": {}}, "databases"), ({"databases": {"a": 3}}, "a = 3"),
    ({"databases": {"a": "a.duckdb"}}, "query"), ({"databases": {"a": "a.duckdb"}, "query": "DROP TABLE x"}, "SELECT"),
    ({"databases": {"a": "a.duckdb"}, "query": "SELECT 1", "separator": ";"}, "separator"),
])  # fmt: skip
def test_what_an_experiment_cannot_say(section, named):
    content = {"data": {"target": "y", **section}, "recipe": {}, "run": {"rounds": 0}}
    with pytest.raises(ConfigError, match=named):
        Config.check(content)
    with pytest.raises(ConfigError, match=r"recipe|files"):
        Config.check({**content, "recipe": None})


def test_a_folder_of_files_is_one_table(places):
    folder, frames = places
    found = fc.describe([folder / "east"])
    one = fc.describe({"east": frames["east"]})
    pd.testing.assert_frame_equal(found, one)
    silos = fc.Recipe(impute="mean", one_hot=["sex"]).prepare([folder / "east"], target="sick")
    assert len(silos.targets) == 60
    frames["east"].rename(columns={"age": "years"}).to_csv(folder / "east" / "2026.csv", index=False)
    with pytest.raises(fc.DataError, match="2026"):
        fc.describe([folder / "east"])
    (folder / "none").mkdir()
    with pytest.raises(fc.DataError, match="none"):
        fc.describe([folder / "none"])


# -- at sites ---------------------------------------------------------------------------------------------------------


def test_sites_on_databases_and_folders_are_those_on_files(places, tmp_path):
    folder, frames = places
    sources = {
        "north": StoredTable(str(folder / "north.duckdb"), SELECT),
        "south": StoredTable(f"sqlite:///{folder}/south.db", SELECT),
        "east": folder / "east",
    }
    limits = opened(min_count=5)
    sites = [
        TableSite(n, StateStore(tmp_path / "state" / n), limits, lambda line: None, source=TableFile(n, source))
        for n, source in sources.items()
    ]
    recipe = {"impute": "mean", "one_hot": ["sex"]}
    asking, _ = inquiry(sites, PLAIN + tomli_w.dumps({"recipe": recipe}))
    asking.recipe = inquiries.learn(Driver(asking), asking.config, "sick")
    there = asking.meet()
    silos = fc.Recipe(**recipe).prepare(frames, target="sick")
    here = asking.config.make_problem(silos)
    path, mine = fc.path(there, count=5, ratio=0.1, driver=Driver(asking)), fc.path(here, count=5, ratio=0.1)
    np.testing.assert_allclose(path.solutions, mine.solutions, rtol=1e-9, atol=1e-10)
    digests = {name: TableFile(name, source).digest for name, source in sources.items()}
    assert len({*digests.values()}) == 3
    again = TableFile("north", StoredTable(str(folder / "north.duckdb"), f"{SELECT} ORDER BY age"))
    assert again.digest == digests["north"]  # the same rows are the same data set, whatever their order


@pytest.mark.parametrize(("data", "named"), [
    ({"database": "x.duckdb"}, "query"), ({"database": "x.duckdb", "query": "SELECT 1", "file": "a.csv"}, "file"),
    ({"database": "x.duckdb", "query": "SELECT 1"}, "recipe"),
    ({"database": "x.duckdb", "query": "SELECT 1", "recipe": True, "separator": ";"}, "separator"),
])  # fmt: skip
def test_what_a_site_cannot_say(tmp_path, data, named):
    with pytest.raises(FolderError, match=named):
        open_site(site_folder(tmp_path / "fed", data))


def test_a_site_is_opened_on_its_database(places, tmp_path):
    folder, _ = places
    section = {"database": str(folder / "north.duckdb"), "query": SELECT, "recipe": True}
    site = open_site(site_folder(tmp_path / "fed", section))
    assert list(site.summary()["column"]) == ["age", "sex", "smoker", "sick"]
    with pytest.raises(fc.DataError, match="SELECT"):
        open_site(site_folder(tmp_path / "other", section | {"query": "DROP TABLE patients"}))


def site_folder(path, data):
    """An enrolment folder with this under [data] of its site.toml."""
    fed = FederationFolder.create(path, "127.0.0.1", 9093, ["north", "south"], engine="local")
    place = fed.path / "sites" / "north" / "site.toml"
    place.write_text(tomli_w.dumps(tomllib.loads(place.read_text()) | {"data": data}))
    return SiteFolder(place.parent)
