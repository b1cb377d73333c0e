"""Several files, parquet and npz, and the places where an experiment or a site names its files."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedcomposite.data import DataError, Silos
from fedcomposite.data.faults import DataWarning


def test_columns_are_renamed_where_they_are(tmp_path):
    (tmp_path / "north.csv").write_text("age,dose,y\n1,2,0\n3,4,1\n")
    (tmp_path / "süd.csv").write_text("y;Dosis;alter\n0;2,5;1\n1;4,5;3\n")
    files = [tmp_path / "north.csv", tmp_path / "süd.csv"]
    silos = Silos.from_files(files, target="y", columns={"age": "alter", "dose": "Dosis"})
    assert silos.feature_names == ("age", "dose")
    assert silos.features.tolist() == [[1, 2], [3, 4], [1, 2.5], [3, 4.5]]


def test_held_out_file(tmp_path):
    (tmp_path / "a.csv").write_text("p,q,y\n1,2,0\n3,4,1\n")
    (tmp_path / "t.csv").write_text("y,q,p\n1,6,5\n")
    silos = Silos.from_files([tmp_path / "a.csv"], target="y", test=tmp_path / "t.csv")
    assert silos.test[0].tolist() == [[5, 6]]
    assert silos.test[1].tolist() == [1]
    assert silos.sizes.tolist() == [2]


def test_the_same_file_twice_and_one_class(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("p,y\n1,0\n3,1\n")
    (tmp_path / "b.csv").write_text("p,y\n1,1\n3,1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(DataWarning, match=r"a\.csv: the same file is given 2 times"):
        Silos.from_files(["a.csv", tmp_path / "a.csv"], target="y")
    with pytest.warns(DataWarning, match="all targets are 1: "):
        Silos.from_files(["b.csv"], target="y")
    assert len(Silos.from_files(["a.csv", "b.csv"], target="y")) == 2  # not a word


def test_a_single_path_is_one_file(tmp_path):
    (tmp_path / "a.csv").write_text("p,y\n1,0\n3,1\n")
    for path in (tmp_path / "a.csv", str(tmp_path / "a.csv")):
        assert Silos.from_files(path, target="y").names == Silos.from_csv(path, target="y").names == ("a",)


def test_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"a": [1, 2], "b": [True, False], "c": pd.array([3, None], "Int64"), "y": [0.0, 1.0]})
    path = tmp_path / "f.parquet"
    frame.drop(columns="c").to_parquet(path)
    silos = Silos.from_files(path, target="y")
    assert silos.features.tolist() == [[1, 1], [2, 0]]
    frame["t"], frame["d"] = ["x", None], pd.to_datetime(["2020-01-01", "2020-01-02"])
    frame["n"] = ["1", "2"]
    frame.to_parquet(path)
    with pytest.raises(DataError) as caught:
        Silos.from_files(path, target="y")
    assert [(f.column, f.count) for f in caught.value.faults] == [("c", 1), ("t", 1), ("t", 1), ("d", 2), ("n", 2)]
    assert Silos.from_files(path, target="y", drop=["c", "t", "d", "n"]).feature_names == ("a", "b")
    path.write_bytes(b"PAR1 nonsense")
    for options, message in [({}, "not a readable .parquet file"), ({"decimal": ","}, "take no option 'decimal'")]:
        with pytest.raises(DataError, match=message):
            Silos.from_files(path, target="y", **options)


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


WHOLE = npz(X=np.eye(2), y=[0, 1])
BAD_NPZ = {
    "text": (b"a,y\n1,0\n", {}, "not a readable .npz file: it is not a zip archive"),
    "empty": (b"", {}, "not a zip archive"),
    "one array": (npy(np.eye(2)), {}, "it holds a single array (.npy)"),
    "cut": (WHOLE[:-40], {}, "not a readable .npz file"),
    "damaged": (WHOLE.replace(np.eye(2).tobytes(), np.ones((2, 2)).tobytes()), {}, "Bad CRC"),
    "objects": (npz(X=np.array([[1, "a"]], object), y=[0]), {}, "array 'X' holds Python objects, not numbers"),
    "no target": (npz(X=np.eye(2), z=[0, 1]), {}, "no array 'y' (it has: X, z)"),
    "target is X": (WHOLE, {"target": "X"}, "target = 'X' is the array of the features"),
    "drop": (WHOLE, {"drop": "a"}, ".npz files take no option 'drop'"),
    "columns": (WHOLE, {"columns": {"a": "b"}}, ".npz files take no option 'columns'"),
    "strings": (npz(X=np.array([["1", "a"]]), y=[0]), {}, "1 of 2 values are text"),
    "vector": (npz(X=np.ones(2), y=[0, 1]), {}, "features have shape (2,)"),
    "column of targets": (npz(X=np.eye(2), y=np.ones((2, 1))), {}, "targets have shape (2, 1)"),
    "records": (npz(X=np.zeros(2, [("a", "f8"), ("b", "f8")]), y=[0, 1]), {}, "are not numbers"),
}


@pytest.mark.parametrize("name", BAD_NPZ)
def test_npz_refused(tmp_path, name):
    content, options, message = BAD_NPZ[name]
    (tmp_path / "f.npz").write_bytes(content)
    with pytest.raises(DataError) as caught:
        Silos.from_files(tmp_path / "f.npz", **{"target": "y", **options})
    assert message in str(caught.value)
    assert "pickle" not in str(caught.value)


def test_npz_target_by_another_name(tmp_path):
    (tmp_path / "f.npz").write_bytes(npz(X=np.eye(2, dtype=np.uint8), krank=[0, 1]))
    silos = Silos.from_files(tmp_path / "f.npz", target="y", columns={"y": "krank"})
    assert silos.features.dtype == torch.uint8
    assert silos.targets.tolist() == [0, 1]


# -- where an experiment or a site names its files --------------------------------------------------------------------


def test_experiments_name_columns_and_style(tmp_path):
    """Paths are relative to the configuration, the held-out file's as well."""
    from fedcomposite.experiments.config import Config

    (tmp_path / "a.csv").write_text("alter:y\n1,5:0\n2,5:1\n")
    (tmp_path / "t.csv").write_text("alter:y\n3,5:0\n")
    (tmp_path / "c.toml").write_text(
        '[data]\nfiles = ["a.csv"]\ntest = "t.csv"\ntarget = "y"\nseparator = ":"\n[data.columns]\nage = "alter"\n'
        '[algorithm]\nname = "FedAvg"\nlocal_steps = 1\nstep = 0.1\n[run]\nrounds = 1\n'
    )
    silos = Config.read(tmp_path / "c.toml").make_silos()
    assert silos.feature_names == ("age",)
    assert silos.features.tolist() == [[1.5], [2.5]]
    assert silos.test[0].tolist() == [[3.5]]


def test_sites_read_their_files_alike(tmp_path):
    from fedcomposite.federation.folders import FederationFolder
    from fedcomposite.federation.site.enrolment import open_site
    from fedcomposite.federation.site_folders import SiteFile, SiteFolder

    (tmp_path / "a.csv").write_bytes("größe;id;y\n1,5;x;0\n2,5;z;1\n".encode("cp1252"))
    section = {
        "file": str(tmp_path / "a.csv"),
        "target": "y",
        "drop": ["id"],
        "encoding": "cp1252",
        "columns": {"size": "größe"},
    }
    limits = {"min_samples": 1, "min_batch": 1, "min_evaluation": 1}
    file = SiteFile.model_validate(
        {"site": {"name": "s", "engine": "local", "address": "h:1"}, "data": section, "limits": limits}
    )

    folder = SiteFolder(
        FederationFolder.create(tmp_path / "fed", "127.0.0.1", 9443, ["s"], engine="local").path / "sites" / "s"
    )
    folder.file = file
    site = open_site(folder)
    assert site.silos.names == ("s",)
    assert site.silos.feature_names == ("size",)
    assert site.silos.features.tolist() == [[1.5], [2.5]]


def test_messages_name_sections_that_exist():
    """A section of site.toml that a message tells to edit is one that the template has."""
    from fedcomposite.federation import folders, shape

    assert "[data.columns]" in folders.SITE_TOML
    assert "under [data.columns] in its site.toml" in Path(shape.__file__).read_text(encoding="utf-8")


def test_clients_are_told_apart_by_their_names(tmp_path):
    """Hospitals that all call their file data.csv are known by their folders."""
    text = "a,y\n1,0\n2,1\n3,0\n"
    for name in ("north/data.csv", "south/data.csv", "south/more.csv", "west/2024/data.csv", "east/2024/data.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def names(*files, **options):
        return Silos.from_csv([tmp_path / f for f in files], target="y", **options).names

    assert names("north/data.csv", "south/more.csv") == ("data", "more")
    assert names("north/data.csv", "south/data.csv") == ("north", "south")
    assert names("north/data.csv", "south/data.csv", "south/more.csv") == ("north-data", "south-data", "south-more")
    assert names("west/2024/data.csv", "east/2024/data.csv") == ("data 1", "data 2")
    with pytest.raises(DataError, match="'a' occurs twice"):
        names("north/data.csv", "south/data.csv", names=["a", "a"])
