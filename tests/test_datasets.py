"""Data sets against the publishers' facts, downloads over real HTTP, and the statistics of synthetic(alpha, beta)."""

import bz2
import functools
import gzip
import hashlib
import io
import lzma
import os
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import fedcomposite as fc
from fedcomposite.data import DATASETS, DataError, Silos, download, load, normalization, synthetic
from fedcomposite.data.catalog import FILES
from fedcomposite.data.fetch import SHIPPED, File, fetch

FOLDER = os.environ.get("FEDCOMPOSITE_DATA")


def need(name):
    """Skip unless every file of the data set lies in the data folder, so that no test goes to the network."""
    if not FOLDER:
        pytest.skip("set FEDCOMPOSITE_DATA to a folder with the published files")
    for file in FILES[name]:
        first, _, rest = file.path.partition("/")
        places = [Path(FOLDER, file.path), Path(FOLDER).resolve().parent / f"data-{first}" / rest]
        if not any(p.with_name(p.name + s).is_file() for p in places for s in ("", ".gz", ".bz2", ".xz")):
            pytest.skip(f"FEDCOMPOSITE_DATA has no {file.path}")


@functools.cache
def loaded(name):
    need(name)
    return load(name)


def counts(targets):
    return torch.unique(targets, return_counts=True)[1].tolist()


# -- published facts ----------------------------------------------------------------------------------------------

IMAGES = {
    "mnist": (
        (60000, 1, 28, 28),
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "fashion_mnist": ((60000, 1, 28, 28), [6000] * 10, [1000] * 10),
    "cifar10": ((50000, 3, 32, 32), [5000] * 10, [1000] * 10),
}


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", pytest.param("cifar10", marks=pytest.mark.slow)])
def test_images(name):
    shape, train, test = IMAGES[name]
    silos = loaded(name)
    assert silos.features.shape == shape
    assert silos.test[0].shape == (10000, *shape[1:])
    assert silos.features.dtype == silos.test[0].dtype == torch.uint8
    assert counts(silos.targets) == train
    assert counts(silos.test[1]) == test
    assert silos.classes.tolist() == list(range(10))
    # counts of bytes are exact, so these are the channels' moments
    counted = [np.bincount(c.numpy().ravel(), minlength=256) for c in silos.features.unbind(1)]
    histogram = np.array([c / c.sum() for c in counted])
    values = np.arange(256) / 255
    first, second = histogram @ values, histogram @ values**2
    mean, std = normalization(name)
    np.testing.assert_allclose(mean, first, atol=1e-4)
    np.testing.assert_allclose(std, np.sqrt(second - first**2), atol=1e-4)
    if name == "cifar10":  # as found everywhere
        np.testing.assert_allclose(first, [0.49139968, 0.48215841, 0.44653091], atol=5e-9)


def test_flattened_images():
    raw = loaded("mnist")
    flat = load("mnist", flatten=True)
    assert flat.features.shape == (60000, 784)
    assert flat.test[0].shape == (10000, 784)
    assert flat.features.dtype == torch.float32
    assert (float(flat.features.min()), float(flat.features.max())) == (0.0, 1.0)
    rows = [0, 777, 59999]
    assert torch.equal((flat.features[rows] * 255).round().to(torch.uint8).view(-1, 1, 28, 28), raw.features[rows])
    assert torch.equal(flat.targets, raw.targets)


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("a9a", (32561, 123), [24720, 7841]),
        ("w8a", (49749, 300), [48270, 1479]),
        ("mushrooms", (8124, 112), [3916, 4208]),
    ],
)
def test_libsvm(name, shape, classes):
    silos = loaded(name)
    assert silos.features.shape == shape
    assert silos.classes.tolist() == [-1, 1]
    assert counts(silos.targets) == classes
    assert set(silos.features.unique().tolist()) == {0.0, 1.0}
    # an independent reading of the first line of the file
    path = Path(FOLDER, FILES[name][0].path + ".gz")
    line = gzip.decompress(path.read_bytes()).split(b"\n")[0]
    ones = [int(pair.split(b":")[0]) - 1 for pair in line.split()[1:]]
    assert torch.nonzero(silos.features[0]).ravel().tolist() == ones


def test_a9a_test_split():
    X, y = loaded("a9a").test
    assert X.shape == (16281, 123)
    assert counts(y) == [12435, 3846]


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No data folder and an empty cache."""
    monkeypatch.delenv("FEDCOMPOSITE_DATA", raising=False)
    monkeypatch.setenv("FEDCOMPOSITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache"


def table(path):
    """A published file as strings, read without pandas."""
    return [line.split(",") for line in (SHIPPED / path).read_text().split()]


def test_wisconsin(alone):
    silos = load("wisconsin", standardize=False)
    rows = table("breast-cancer-wisconsin/breast-cancer-wisconsin.data")
    assert silos.features.shape == (699, 9)
    assert torch.isfinite(silos.features).all()
    assert counts(silos.targets) == [458, 241]
    assert [1.0 if r[-1] == "4" else -1.0 for r in rows] == silos.targets.tolist()
    known = [float(r[6]) for r in rows if r[6] != "?"]
    assert len(known) == 683
    expected = np.array([[float(v) if v != "?" else sum(known) / 683 for v in r[1:-1]] for r in rows])
    np.testing.assert_allclose(silos.features, expected, rtol=1e-14)
    assert silos.feature_names[5] == "bare nuclei"
    assert not alone.exists()  # shipped: nothing was downloaded


HEART = {
    "cleveland": (303, 139, 303),
    "hungary": (294, 106, 261),
    "switzerland": (123, 115, 46),
    "longbeach": (200, 149, 130),
}


def test_heart_disease(alone):
    silos = load("heart_disease", standardize=False)
    assert silos.names == tuple(HEART)
    assert silos.sizes.tolist() == [complete for _, _, complete in HEART.values()]
    assert len(silos.targets) == 740
    assert silos.feature_names == (
        "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak",
    )  # fmt: skip
    for i, site in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        rows = [r for r in table(f"heart-disease/processed.{site}.data") if "?" not in r[:10]]
        np.testing.assert_array_equal(silos[i][0], [[float(v) for v in r[:10]] for r in rows])
        assert silos[i][1].tolist() == [1.0 if int(r[-1]) > 0 else -1.0 for r in rows]


def test_heart_disease_imputed(alone):
    silos = load("heart_disease", missing="mean", standardize=False)
    assert silos.sizes.tolist() == [rows for rows, _, _ in HEART.values()]
    assert silos.summary()["class 1"].tolist() == [sick for _, sick, _ in HEART.values()]
    rows = table("heart-disease/processed.switzerland.data")
    known = [float(r[5]) for r in rows if r[5] != "?"]  # fasting blood sugar, missing in most Swiss rows
    gaps = [i for i, r in enumerate(rows) if r[5] == "?"]
    assert len(gaps) == 75
    np.testing.assert_allclose(silos[2][0][gaps, 5], sum(known) / len(known), rtol=1e-14)


@pytest.mark.parametrize("missing", ["drop", "mean"])
def test_heart_disease_indicators(alone, missing):
    numbers = load("heart_disease", standardize=False, missing=missing)
    silos = load("heart_disease", standardize=False, one_hot=True, missing=missing)
    assert silos.features.shape[1] == 13
    cp = numbers.features[:, numbers.feature_names.index("cp")]
    for level in (2, 3, 4):
        column = silos.features[:, silos.feature_names.index(f"cp={level}")]
        assert torch.equal(column, (cp == level).double())  # chest pain is never missing
    restecg = silos.features[:, [silos.feature_names.index(f"restecg={level}") for level in (1, 2)]]
    assert restecg.min() >= 0
    assert restecg.sum(1).max() <= 1


def test_standardized_over_all_hospitals(alone):
    X = load("heart_disease").features
    np.testing.assert_allclose(X.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose((X**2).mean(0), 1, rtol=1e-12)
    # with held-out data the scaling comes from the training rows alone
    silos = load("heart_disease", test=0.3, seed=4)
    np.testing.assert_allclose(silos.features.mean(0), 0, atol=1e-12)
    assert silos.test[0].mean(0).abs().max() > 0.01
    raw = load("heart_disease", test=0.3, seed=4, standardize=False)
    scaled = (raw.test[0] - raw.features.mean(0)) / raw.features.std(0, correction=0)
    np.testing.assert_allclose(silos.test[0], scaled, rtol=1e-9, atol=1e-12)
    assert len(silos.targets) + len(silos.test[1]) == 740


def test_ilea_schools():
    silos = loaded("ilea_schools")
    assert len(silos) == 139
    assert silos.features.shape == (15362, 27)
    assert (silos.sizes.min(), silos.sizes.max()) == (22, 251)
    assert (float(silos.targets.min()), float(silos.targets.max())) == (1, 70)
    assert silos.classes is None  # points, not classes
    raw = load("ilea_schools", standardize=False, constant=True)
    assert raw.features.shape[1] == 28
    assert (raw.features[:, 27] == 1).all()
    names = raw.feature_names
    for group in ("year", "gender", "verbal reasoning band", "ethnic group", "school gender", "school denomination"):
        columns = [j for j, n in enumerate(names) if n.startswith(group)]
        # the names cut the indicators where they belong; 15 pupils were not given a band
        assert (raw.features[:, columns].sum(1) != 1).sum() == (15 if group == "verbal reasoning band" else 0), group
    for i in range(len(raw)):  # school features do not vary between its pupils
        assert len(raw[i][0][:, 21:27].unique(dim=0)) == 1
    assert (load("ilea_schools", constant=True).features[:, 27] == 1).all()


def test_shipped_files_are_the_published_ones():
    for name in ("wisconsin", "heart_disease"):
        for file in FILES[name]:
            assert hashlib.sha256((SHIPPED / file.path).read_bytes()).hexdigest() == file.sha256
    credits = (SHIPPED / "ATTRIBUTION.md").read_text()
    for who in ("Wolberg", "Janosi", "Steinbrunn", "Pfisterer", "Detrano", "CC BY 4.0"):
        assert who in credits


def test_solved_after_loading(alone):
    """From the name to a model: the problem made of the silos has the minimiser that cvxpy finds on the pooled rows."""
    import cvxpy as cp

    silos = load("heart_disease")
    X, y = silos.features.numpy(), silos.targets.numpy()
    w = cp.Variable(10)
    loss = cp.sum(cp.logistic(cp.multiply(-y, X @ w))) / 740
    cp.Problem(cp.Minimize(loss + 0.05 * cp.norm1(w))).solve(solver=cp.CLARABEL)
    problem = fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.05), weights="samples")
    assert problem.stationarity(w.value) < 1e-4
    assert problem.objective(w.value) == pytest.approx(float(loss.value) + 0.05 * np.abs(w.value).sum(), rel=1e-9)


# -- where files come from ----------------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    asked: list[str]

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path.startswith("/cut/"):  # promises more than it sends
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 10)
        else:
            super().do_GET()

    def log_message(self, *args):
        pass


@pytest.fixture
def site(tmp_path):
    """A real web server on this machine: (folder it serves, its address, paths it was asked for)."""
    folder = tmp_path / "site"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}", server.asked
    server.shutdown()
    thread.join()
    server.server_close()


TEXT = b"+1 1:1 3:1\n-1 2:1\n" * 50
SUM = hashlib.sha256(TEXT).hexdigest()


def inside(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) if folder.exists() else []


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_download_once(alone, site, suffix, pack):
    folder, address, asked = site
    (folder / f"tiny{suffix}").write_bytes(pack(TEXT))
    file = File("toy/tiny", SUM, (f"{address}/tiny{suffix}",))
    seen = []
    assert fetch("toy", [file], lambda *step: seen.append(step)) == [TEXT]
    assert seen[-1] == (f"{address}/tiny{suffix}", len(pack(TEXT)), len(pack(TEXT)))
    assert inside(alone) == [f"toy/tiny{suffix}"]
    assert fetch("toy", [file]) == [TEXT]
    assert len(asked) == 1  # the second came from the cache


def test_wrong_checksum_leaves_nothing(alone, site):
    folder, address, _ = site
    (folder / "tiny").write_bytes(TEXT + b"!")
    with pytest.raises(DataError, match=r"toy: tiny was not found(.|\n)*wrong checksum(.|\n)*" + SUM):
        fetch("toy", [File("toy/tiny", SUM, (f"{address}/tiny",))])
    assert inside(alone) == []


def test_corrupt_and_cut_downloads(alone, site):
    folder, address, _ = site
    (folder / "tiny.gz").write_bytes(gzip.compress(TEXT)[:-20])
    (folder / "tiny.tar.gz").write_bytes(b"not an archive")
    urls = (f"{address}/tiny.gz", f"{address}/cut/tiny", f"{address}/tiny.tar.gz#tiny")
    with pytest.raises(DataError) as caught:
        fetch("toy", [File("toy/tiny", SUM, urls)])
    lines = {line.strip().split(": ")[0]: line for line in str(caught.value).splitlines()}
    assert "cannot be decompressed" in lines[urls[0]]
    assert "ended after 10 of 1000 bytes" in lines[urls[1]]
    assert "not a readable archive" in lines[urls[2]]
    assert inside(alone) == []


def test_second_mirror(alone, site):
    folder, address, asked = site
    (folder / "tiny").write_bytes(TEXT)
    file = File("toy/tiny", SUM, (f"{address}/gone/tiny", f"{address}/tiny"))
    assert fetch("toy", [file]) == [TEXT]
    assert asked == ["/gone/tiny", "/tiny"]
    assert inside(alone) == ["toy/tiny"]


def test_all_fail_lists_everything(alone, site, monkeypatch, tmp_path):
    _, address, _ = site
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as closed:
        port = closed.server_port
    file = File("toy/tiny", SUM, (f"{address}/a", f"http://127.0.0.1:{port}/b"))
    with pytest.raises(DataError) as caught:
        fetch("toy", [file])
    message = str(caught.value)
    for part in ("the variable is not set", str(alone / "toy/tiny"), f"{address}/a: HTTP 404", f":{port}/b: "):
        assert part in message
    assert "Connection refused" in message
    monkeypatch.setenv("FEDCOMPOSITE_DATA", str(tmp_path / "mine"))
    with pytest.raises(DataError) as caught:
        fetch("toy", [file])
    assert str(tmp_path / "mine" / "toy/tiny") in str(caught.value)
    assert str(tmp_path / "data-toy" / "tiny") in str(caught.value)


def test_archive_is_downloaded_once(alone, site):
    folder, address, asked = site
    parts = {"a.bin": b"alpha" * 100, "b.bin": b"beta" * 100}
    with tarfile.open(folder / "both.tar.gz", "w:gz") as tar:
        for name, content in parts.items():
            member = tarfile.TarInfo(f"inner/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    files = [
        File(f"toy/{n}", hashlib.sha256(c).hexdigest(), (f"{address}/both.tar.gz#inner/{n}",)) for n, c in parts.items()
    ]
    assert fetch("toy", files) == list(parts.values())
    assert asked == ["/both.tar.gz"]
    assert inside(alone) == ["toy/a.bin", "toy/b.bin"]


def test_data_folder_first(alone, monkeypatch, tmp_path):
    file = File("toy/tiny", SUM, ())
    monkeypatch.setenv("FEDCOMPOSITE_DATA", str(tmp_path / "mine"))
    beside = tmp_path / "data-toy"
    beside.mkdir()
    (beside / "tiny.xz").write_bytes(lzma.compress(TEXT))
    assert fetch("toy", [file]) == [TEXT]
    own = tmp_path / "mine" / "toy"
    own.mkdir(parents=True)
    (own / "tiny.gz").write_bytes(gzip.compress(TEXT)[:-9])
    with pytest.raises(DataError, match=r"tiny\.gz: cannot be decompressed"):  # a bad own file is never passed over
        fetch("toy", [file])
    (own / "tiny.gz").write_bytes(gzip.compress(TEXT + b"!"))
    with pytest.raises(DataError, match=r"tiny\.gz: wrong checksum"):
        fetch("toy", [file])


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress)])
def test_bad_cache_is_replaced(alone, site, suffix, pack):
    folder, address, asked = site
    (folder / f"tiny{suffix}").write_bytes(pack(TEXT))
    (alone / "toy").mkdir(parents=True)
    (alone / "toy" / "tiny").write_bytes(b"half a fi")
    for _ in range(2):
        assert fetch("toy", [File("toy/tiny", SUM, (f"{address}/tiny{suffix}",))]) == [TEXT]
    assert len(asked) == 1


def test_cache_that_cannot_be_written(alone, site, monkeypatch, tmp_path):
    folder, address, _ = site
    (folder / "tiny").write_bytes(TEXT)
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("FEDCOMPOSITE_CACHE", str(tmp_path / "a file"))
    with pytest.raises(DataError, match=r"cannot write(.|\n)*FEDCOMPOSITE_CACHE"):
        fetch("toy", [File("toy/tiny", SUM, (f"{address}/tiny",))])


def test_load_over_http(alone, site, monkeypatch):
    """The whole way: load() fetches mushrooms from a web server, and download() finds it in the cache."""
    need("mushrooms")
    folder, address, asked = site
    content = gzip.decompress(Path(FOLDER, "libsvm-extra/mushrooms.gz").read_bytes())
    (folder / "mushrooms").write_bytes(content)  # plain, as the publisher has it
    (file,) = FILES["mushrooms"]
    monkeypatch.setitem(FILES, "mushrooms", (File(file.path, file.sha256, (f"{address}/mushrooms",)),))
    assert load("mushrooms").features.shape == (8124, 112)
    download("mushrooms")
    assert asked == ["/mushrooms"]


def test_addresses_are_complete():
    assert set(FILES) <= set(DATASETS)
    for files in FILES.values():
        for file in files:
            assert file.urls
            assert all(u.startswith(("https://", "http://")) for u in file.urls)
            assert len(file.sha256) == 64


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("synthetic", {"clients": "abc"}, "synthetic: clients = 'abc', must be an integer"),
        ("synthetic", {"clients": 0}, "synthetic: clients = 0, must be an integer >= 1"),
        ("synthetic", {"clients": 2.0}, "synthetic: clients = 2.0, must be an integer >= 1"),
        ("synthetic", {"samples": 0}, "synthetic: samples = 0, must be an integer >= 1 or none"),
        ("synthetic", {"alpha": -1}, "synthetic: alpha = -1, must be a number >= 0"),
        ("synthetic", {"labels": "sign"}, "synthetic: labels = 'sign', must be one of 'logit', 'softmax'"),
        ("synthetic", {"classes": 3}, "synthetic: classes = 3, must be at least 2, and 2 for labels = 'logit'"),
        ("synthetic", {"client": 3}, "synthetic has no option 'client'; did you mean 'clients'?"),
        ("digits", {"test": 1.0}, "digits: test = 1.0, must be a number >= 0 and < 1"),
        ("mnist", {"flatten": "yes"}, "mnist: flatten = 'yes', must be true or false"),
        ("a9a", {"test": 0.1}, "a9a has no option 'test' (its options: none)"),
        ("heart_disease", {"missing": "zero"}, "heart_disease: missing = 'zero', must be one of 'drop', 'mean'"),
        ("minst", {}, "unknown data set 'minst'; did you mean 'mnist'?"),
    ],
)
def test_wrong_options(alone, name, options, message):
    with pytest.raises(DataError) as caught:
        load(name, **options)
    assert str(caught.value).startswith(message)


def test_unknown_names(alone):
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        download("cifar-10")
    with pytest.raises(DataError, match="no normalization constants for 'a9a'"):
        normalization("a9a")
    download("digits")  # has no files: nothing to do
    with pytest.raises(DataError, match="labels = 'sign'"):
        synthetic(labels="sign")


def test_numpy_numbers_are_numbers():
    assert len(load("synthetic", clients=np.int64(3), alpha=np.float32(1.0), samples=5)) == 3


# -- silos ----------------------------------------------------------------------------------------------------------


def test_from_files(tmp_path):
    X, y = np.arange(6.0).reshape(3, 2), np.array([0, 1, 1])
    for name in ("north", "south"):
        np.savez(tmp_path / f"{name}.npz", X=X, sick=y)
        (tmp_path / f"{name}.csv").write_text(
            "a,b,sick\n" + "".join(f"{p},{q},{t}\n" for (p, q), t in zip(X, y, strict=True))
        )
    packed = Silos.from_files([tmp_path / "north.npz", tmp_path / "south.npz"], target="sick")
    text = Silos.from_files([tmp_path / "north.csv", str(tmp_path / "south.csv")], target="sick")
    assert packed.names == text.names == ("north", "south")
    assert torch.equal(packed.features, text.features)
    assert packed.targets.tolist() == text.targets.tolist() == [0, 1, 1, 0, 1, 1]
    assert text.feature_names == ("a", "b")
    assert Silos.from_files([tmp_path / "north.csv"], target="sick", drop=["a"]).feature_names == ("b",)
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 nonsense")
    (tmp_path / "empty.csv").write_text("a,b,sick\n")
    for paths, options, message in [
        (["north.npz", "north.csv"], {}, "all .csv or all .npz, these are .csv, .npz"),
        ([], {}, "these are none"),
        (["north.npz"], {"drop": ["a"]}, "take no option 'drop'"),
        (["gone.npz"], {}, "no such file"),
        (["bad.npz"], {}, "not a readable .npz file"),
        (["empty.csv"], {}, "empty silo"),
        (["north.csv"], {"drop": ["sikc"]}, "no file has this column; did you mean 'sick'?"),
    ]:
        with pytest.raises(DataError) as caught:
            Silos.from_files([tmp_path / p for p in paths], target="sick", **options)
        assert message in str(caught.value)
    with pytest.raises(DataError, match=r"no array 'y' \(it has: X, sick\)"):
        Silos.from_files([tmp_path / "north.npz"], target="y")


def test_silos_refuse_inconsistent_parts():
    X, y = torch.zeros(4, 2), torch.zeros(4)
    for offsets in ((0, 2, 2, 4), (0, 3), (1, 4), (0,), (0, 3, 2, 4)):
        with pytest.raises(DataError, match="do not cut 4 samples"):
            Silos(X, y, offsets)
    with pytest.raises(DataError, match="3 targets for 4 samples"):
        Silos(X, y[:3], (0, 4))
    with pytest.raises(DataError, match="2 ids for 1 clients"):
        Silos(X, y, (0, 4), ids=(0, 1))
    with pytest.raises(DataError, match="numbers of type complex256 are not supported"):
        Silos.from_arrays([(np.zeros((2, 2), np.complex256), [0, 1])])


def test_big_endian_and_read_only_arrays():
    X = np.arange(6, dtype=">f8").reshape(3, 2)
    X.flags.writeable = False
    assert Silos.from_arrays([(X, np.zeros(3, ">i4"))]).features.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_split_and_standardize():
    silos = Silos.from_arrays([(np.arange(20.0).reshape(10, 2), np.arange(10) % 2), (np.ones((5, 2)), np.ones(5, int))])
    parts = silos.split(0.2, seed=1)
    assert parts.sizes.tolist() == [8, 4]
    assert sorted(map(tuple, torch.cat([parts.features, parts.test[0]]).tolist())) == sorted(
        map(tuple, silos.features.tolist())
    )
    with pytest.raises(DataError, match="test data already"):
        parts.split(0.2)
    with pytest.raises(DataError, match="holds out none"):
        Silos.from_arrays([(np.ones((1, 2)), [1])]).split(0.5)
    constant = Silos.from_arrays([(np.array([[1.0, 7.0], [3.0, 7.0]]), [0, 1])]).standardize()
    assert constant.features.tolist() == [[-1, 7], [1, 7]]


def test_summary_counts():
    silos = Silos.from_arrays([(np.zeros((3, 1)), [-1, 1, 1]), (np.zeros((2, 1)), [-1, -1])])
    assert silos.summary()[["class -1", "class 1"]].to_numpy().tolist() == [[1, 2], [2, 0]]
    assert silos.heterogeneity() == pytest.approx(
        {"size_ratio": 1.5, "label_skew": ((3 / 5 - 1 / 3) + (1 - 3 / 5)) / 2, "single_class": 0.5}
    )


# -- synthetic(alpha, beta) -----------------------------------------------------------------------------------------


def test_alpha_has_no_influence_under_the_softmax_rule():
    for classes in (2, 10):
        options = {"clients": 20, "features": 30, "samples": 200, "beta": 1.0, "labels": "softmax", "classes": classes}
        small, large = (synthetic(alpha=a, seed=3, **options) for a in (1.0, 50.0))
        assert torch.equal(small.features, large.features)
        assert torch.equal(small.targets, large.targets)
        assert len(small.classes) == classes
    small, large = (synthetic(alpha=a, seed=3, labels="logit") for a in (1.0, 50.0))
    assert torch.equal(small.features, large.features)
    assert not torch.equal(small.targets, large.targets)


def test_covariance_spectrum():
    samples, d = 100_000, 20
    X = synthetic(clients=1, features=d, samples=samples, scale=False, seed=5).features.numpy()
    covariance = np.cov(X.T)
    variance = np.arange(1, d + 1) ** -1.2
    np.testing.assert_allclose(np.diag(covariance), variance, rtol=5 * np.sqrt(2 / samples))
    correlation = covariance / np.sqrt(np.outer(variance, variance))
    assert np.abs(correlation - np.eye(d)).max() < 5 * np.sqrt(2 / samples)


def test_means_of_the_clients():
    """v_kj ~ N(B_k, 1), B_k ~ N(0, beta) with beta a standard deviation."""
    n, d, beta = 1500, 8, 3.0
    silos = synthetic(clients=n, features=d, samples=400, beta=beta, scale=False, seed=6)
    means = silos.features.view(n, 400, d).mean(1).numpy()
    within = means - means.mean(1, keepdims=True)
    assert within.var() * d / (d - 1) == pytest.approx(1.0, rel=0.05)
    assert stats.kstest(means.mean(1) / np.sqrt(beta**2 + 1 / d), "norm").pvalue > 1e-3


def test_sizes_are_lognormal():
    """int(lognormal(4, 2)) + 50: log(size - 49) is the upper end of the cell of the logarithm, cell by cell."""
    sizes = synthetic(clients=2000, features=1, samples=None, seed=7).sizes
    assert sizes.min() >= 50
    drawn = sizes - 50
    for k in (0, 5, 20, 54, 200, 1000, 5000):
        p = stats.norm.cdf((np.log(k + 1) - 4) / 2)  # P(int(value) <= k)
        assert abs((drawn <= k).mean() - p) < 4.5 * np.sqrt(p * (1 - p) / 2000)


@pytest.mark.parametrize("labels", ["logit", "softmax"])
def test_stable_at_50_50(labels):
    raw = synthetic(clients=400, alpha=50.0, beta=50.0, labels=labels, scale=False, seed=8)
    assert torch.isfinite(raw.features).all()
    # half of the clients lean to each side; the published softmax, not stabilised, put 98 % into class 0
    assert 0.4 < float((raw.targets > 0).double().mean()) < 0.6
    assert raw.heterogeneity()["single_class"] > 0.9
    norms = raw.features.norm(dim=1)
    assert norms.min() < 20
    assert norms.max() > 400
    scaled = synthetic(clients=400, alpha=50.0, beta=50.0, labels=labels, seed=8)
    assert float(scaled.features.norm(dim=1).max()) == pytest.approx(1.0, rel=1e-12)
    assert torch.equal(scaled.targets, raw.targets)
    assert fc.Problem(scaled, loss="logistic").smoothness() <= 0.25


def test_published_split():
    silos = synthetic(clients=30, features=60, samples=None, labels="softmax", classes=10, test=0.1, seed=9)
    held = len(silos.test[1]) / (len(silos.test[1]) + len(silos.targets))
    assert held == pytest.approx(0.1, abs=0.005)
    assert silos.classes.tolist() == list(range(10))


def test_a_function_in_place_of_a_name():
    def ward(*, beds, scale: float = 1.0):
        return fc.Silos.from_arrays([(scale * np.ones((beds, 2)), np.arange(beds) % 2)])

    assert fc.data.load(ward, beds=5, scale=2).features.sum() == 20
    with pytest.raises(fc.DataError, match=r"ward has no option 'bed'; did you mean 'beds'"):
        fc.data.load(ward, bed=5)
    with pytest.raises(fc.DataError, match="ward: scale = 'wide', must be a number"):
        fc.data.load(ward, beds=5, scale="wide")
    with pytest.raises(fc.DataError, match="gives a int, must be Silos"):
        fc.data.load(lambda: 3)
