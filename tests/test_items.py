"""Data as people have them: data sets of torch and Hugging Face, tables, folders of images."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import fedcomposite as fc
from fedcomposite.data import DataError, Silos, class_names
from fedcomposite.data.mapped import MappedRows

Image = pytest.importorskip("PIL.Image", reason="Pillow reads images")
R = np.random.default_rng(0)
X, Y = R.normal(size=(40, 5)).astype(np.float32), R.integers(0, 3, 40)


class Pairs:
    """A data set that is nothing but a length and items."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        item = self.items[i]
        if isinstance(item, Exception):
            raise item
        return item


def kept(silos, folder):
    """The same through a folder."""
    assert isinstance(silos.features, MappedRows)
    assert (folder / "silos.json").exists()
    return silos.dense()


@pytest.mark.parametrize("lazily", [False, True])
def test_torch_data_sets_are_the_arrays_they_hold(lazily, tmp_path):
    whole = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    options = {"save_to": tmp_path / "kept"} if lazily else {}
    made = Silos.from_datasets(
        [Subset(whole, range(10)), Pairs(list(zip(X[10:30], Y[10:30], strict=True)))],
        test=Subset(whole, range(30, 40)),
        names=["a", "b"], feature_names=list("vwxyz"), **options,
    )  # fmt: skip
    made = kept(made, tmp_path / "kept") if lazily else made
    same = Silos.from_arrays([(X[:10], Y[:10]), (X[10:30], Y[10:30])], test=(X[30:], Y[30:]), names=["a", "b"])
    assert torch.equal(made.features, same.features)
    assert torch.equal(made.targets, same.targets)
    assert made.features.dtype == torch.float32
    assert made.targets.dtype == torch.int64
    assert all(torch.equal(a, b) for a, b in zip(made.test, same.test, strict=True))
    assert (made.offsets, made.names, made.feature_names) == (same.offsets, ("a", "b"), tuple("vwxyz"))


def test_one_data_set_is_dealt_out():
    whole = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    made = Silos.from_datasets(whole)
    assert made.names == ("pooled",)
    dealt = made.partition("dirichlet", clients=3, alpha=0.5)
    assert torch.equal(
        dealt.features, Silos.from_arrays([(X, Y)]).partition("dirichlet", clients=3, alpha=0.5).features
    )


def test_kinds_of_items():
    assert Silos.from_datasets([[(3.0, True), (4.0, False)]]).features.tolist() == [[3.0], [4.0]]
    masks = Silos.from_datasets([[(np.array([True, False]), 1.5)]])
    assert (masks.features.dtype, masks.targets.dtype) == (torch.float64, torch.float64)
    words = Silos.from_datasets([[({"ids": torch.tensor([3, 1]), "label": np.int8(1), "mask": 0}, 0)[0]]],
                                features="ids", target="label")  # fmt: skip
    assert words.features.tolist() == [[3, 1]]
    assert (words.features.dtype, words.targets.dtype) == (torch.int64, torch.int64)
    tags = Silos.from_datasets([[(np.zeros(2, np.uint16), np.array([1, 0, 1]))]])
    assert tags.features.dtype == torch.int32
    assert tags.targets.tolist() == [[1, 0, 1]]
    grey, colour = (Image.fromarray(R.integers(0, 256, shape, np.uint8)) for shape in ((4, 6), (4, 6, 3)))
    assert Silos.from_datasets([[(grey, 0)]]).features.shape == (1, 1, 4, 6)
    shown = Silos.from_datasets([[(colour, 0)]]).features
    assert shown.dtype == torch.uint8
    assert np.array_equal(shown[0].numpy().transpose(1, 2, 0), np.asarray(colour))


def test_everything_that_is_wrong_in_one_error(tmp_path):
    good = [(np.zeros(3), 0)] * 20
    bad = list(good)
    bad[17], bad[18] = (np.zeros(4), 0), (np.zeros((3, 1)), 0)
    bad[3], bad[4], bad[5] = (np.zeros(3, np.float32), 0), (np.full(3, np.nan), 0), ("cat", 0)
    bad[6], bad[7], bad[8] = (np.zeros(3), 0.5), (np.zeros(3), "yes"), OSError("disk on fire")
    bad[9], bad[10], bad[11] = (1, 2, 3), {"x": 1}, (np.zeros(3), [0, 1])

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(good)

    with pytest.raises(DataError) as caught:
        Silos.from_datasets(
            [Pairs(good), Pairs([]), Stream(), Pairs(bad), DataLoader(good), {"train": 1}, "folder", (X, Y)],
            test=Pairs([(np.zeros(2), 0)]), names=["one", "two"], save_to=tmp_path / "kept",
        )  # fmt: skip
    text = str(caught.value)
    for line in (
        r"names: 2 names for 8 clients",
        r"client 1: an empty data set; leave it out",
        r"client 2: a Stream cannot be read by number; give a map-style data set",
        r"client 3: item 17 has shape \(4,\), that of the first \(3,\) \(and 1 more items\); make all items alike",
        r"client 3: item 3 is float32, the first float64; store all items alike",
        r"client 3: item 4 has values that are NaN or infinite; impute",
        r"client 3: the target of item 6 is float64, the first int64 \(and 1 more items\); make all targets alike",
        r"client 3: item 5: text, not numbers \(and 4 more items\); mend",
        r"client 4: a DataLoader cannot be read by number",
        r"client 5: a dict of train; give one of its parts",
        r"client 6: 'folder' is a path; read images with from_folders",
        r"client 7: a tuple is no data set; give arrays to from_arrays",
        r"test data: item 0 has shape \(2,\)",
    ):
        assert re.search(line, text), (line, text)
    assert len(caught.value.faults) == 13
    assert not (tmp_path / "kept").exists()
    for items, told in (
        ([OSError("disk on fire")], "item 0: OSError: disk on fire; mend or leave out the item"),
        ([(1, 2, 3)], r"item 0: a tuple of 3, not a pair \(x, y\)"),
        ([{"x": 1}], "item 0: a dictionary with x; say features= and target="),
    ):
        with pytest.raises(DataError, match=f"^client 0: {told}"):
            Silos.from_datasets([Pairs(items)])
    with pytest.raises(DataError, match="no 'y' among x"):
        Silos.from_datasets([Pairs([{"x": 1}])], features="x", target="y")
    with pytest.raises(DataError, match="from_datasets has no option 'traget'; did you mean 'target'"):
        Silos.from_datasets([Pairs(good)], traget="y")
    with pytest.raises(DataError, match="2 feature names for 3 features"):
        Silos.from_datasets([Pairs(good)], feature_names=["a", "b"])
    with pytest.raises(DataError, match="no data sets were given"):
        Silos.from_datasets([])


# -- tables -----------------------------------------------------------------------------------------------------------


def table(rows, order=("age", "dose", "sick")):
    frame = pd.DataFrame({"age": X[rows, 0], "dose": Y[rows], "sick": np.where(X[rows, 1] > 0, 1, -1)})
    return frame[list(order)]


def test_tables_keep_their_names(tmp_path):
    frames = [table(slice(0, 15)), table(slice(15, 30), ("sick", "dose", "age"))]
    made = Silos.from_datasets(frames, target="sick", test=table(slice(30, 40)), names=["a", "b"])
    assert made.feature_names == ("age", "dose")
    assert torch.equal(made.features[15:, 0], torch.from_numpy(X[15:30, 0]).double())
    problem = fc.Problem(made, loss="logistic", bias=True)
    assert problem.coordinate_names == ("age", "dose", "(intercept)")
    assert Silos.from_datasets(frames, target="sick", features=["dose"]).feature_names == ("dose",)
    lazily = Silos.from_datasets(frames, target="sick", save_to=tmp_path / "kept")
    assert torch.equal(lazily.dense().features, made.features)
    assert lazily.feature_names == made.feature_names


def test_everything_that_is_wrong_with_tables():
    first = table(slice(0, 5))
    with pytest.raises(DataError) as caught:
        Silos.from_datasets(
            [first, first.drop(columns="sick"), first.assign(age="old"), first[:0], first.rename(columns={"dose": "d"}),
             Pairs([(X[0], 1)]), first.assign(dose=np.nan)],
            target="sick",
        )  # fmt: skip
    text = str(caught.value)
    for line in (
        "client 1: no column 'sick'; there are age, dose",
        r"client 2: column 'age' is not numeric: 5 of 5 values, such as 'old'",
        "client 3: an empty data set",
        "client 4: columns differ from the first's: d, dose",
        "client 5: a Pairs among tables",
        "client 6: column 'dose' has 5 missing value",
    ):
        assert re.search(line, text), (line, text)
    numbers = first.astype(float)  # a table of one type is looked at column by column as well
    with pytest.raises(
        DataError, match=r"(?s)2 problems.*client 0: column 'age' has 5 missing.*client 1: column 'dose'"
    ):
        Silos.from_datasets([numbers.assign(age=np.nan), numbers.assign(dose=np.inf)], target="sick")
    for options, told in (
        ({}, "say which one to predict: target="),
        ({"target": "sic"}, "no column 'sic'; did you mean 'sick'"),
        ({"target": "sick", "features": ["age", "sick"]}, "the target 'sick' is among the features"),
    ):
        with pytest.raises(DataError, match=told):
            Silos.from_datasets([first], **options)


class Value:
    pass


class List:
    pass


class Hub:
    """What of a table of Hugging Face is used here, faithfully: formats, slices, columns."""

    def __init__(self, columns, features, form=None, only=None):
        self._columns, self.features, self._form, self._only = columns, features, form, only

    @property
    def column_names(self):
        return list(self._columns)

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def with_format(self, type=None, columns=None):
        return Hub(self._columns, self.features, type, columns)

    def __getitem__(self, at):
        assert isinstance(at, slice)
        rows = {name: column[at] for name, column in self._columns.items() if name in (self._only or self._columns)}
        return {k: np.asarray(v) for k, v in rows.items()} if self._form == "numpy" else rows


def hub(columns, **kinds):
    """A real table, where the package is there."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    return datasets.Dataset.from_dict(columns)


def duck(columns, **kinds):
    """A stand-in with the same columns."""
    return Hub(columns, {name: List() if name in kinds else Value() for name in columns})


@pytest.mark.parametrize("make", [duck, hub], ids=["stand-in", "datasets"])
def test_hugging_face_tables(make, tmp_path):
    numbers = {"age": X[:, 0].tolist(), "dose": [int(y) for y in Y], "sick": [int(v > 0) for v in X[:, 1]]}
    rows = make(numbers)
    made = Silos.from_datasets([rows], target="sick")
    assert made.feature_names == ("age", "dose")
    assert torch.equal(made.features, torch.tensor([numbers["age"], numbers["dose"]], dtype=torch.float64).T)
    assert made.targets.tolist() == numbers["sick"]
    one = Silos.from_datasets([rows, rows], target="sick", features="dose", save_to=tmp_path / "kept")
    assert one.dense().features.flatten().tolist() == [*numbers["dose"], *numbers["dose"]]
    assert one.feature_names == ("dose",)
    texts = make({"ids": [[1, 2, 3], [4, 5, 6]] * 40, "label": [0, 1] * 40}, ids=True)
    tokens = Silos.from_datasets([texts], target="label", features="ids")
    assert tokens.features.tolist() == [[1, 2, 3], [4, 5, 6]] * 40
    assert tokens.feature_names == ()
    ragged = make({"ids": [[1, 2, 3], [4, 5]], "label": [0, 1]}, ids=True)
    if make is hub:
        with pytest.raises(DataError, match=r"item 1 has shape \(2,\), that of the first \(3,\)"):
            Silos.from_datasets([ragged], target="label", features="ids")
    with pytest.raises(DataError, match="no column 'labels'; did you mean 'label'"):
        Silos.from_datasets([texts], target="labels")


def test_hugging_face_images():
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    pictures = [Image.fromarray(R.integers(0, 256, (4, 5, 3), np.uint8)) for _ in range(70)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1] * 35}, features=features)
    made = Silos.from_datasets([rows], features="image", target="label")
    wanted = np.stack([np.asarray(p).transpose(2, 0, 1) for p in pictures])
    assert made.features.dtype == torch.uint8
    assert np.array_equal(made.features.numpy(), wanted)
    assert made.targets.tolist() == [0, 1] * 35


# -- folders of images ------------------------------------------------------------------------------------------------


def write(path, shape=(6, 4, 3), count=2, suffix=".png"):
    path.mkdir(parents=True)
    arrays = [R.integers(0, 256, shape, np.uint8) for _ in range(count)]
    for i, array in enumerate(arrays):
        Image.fromarray(array).save(path / f"{i}{suffix}")
    return arrays


def test_folders_of_images(tmp_path):
    cats, dogs = write(tmp_path / "north" / "cat"), write(tmp_path / "north" / "dog", count=3)
    emus = write(tmp_path / "south" / "emu")
    write(tmp_path / "south" / "cat", count=1)
    tests = write(tmp_path / "held" / "dog")
    (tmp_path / "north" / "cat" / ".DS_Store").write_text("")
    folders = [tmp_path / "north", tmp_path / "south"]
    made = Silos.from_folders(folders, test=tmp_path / "held")
    assert class_names([*folders, tmp_path / "held"]) == ("cat", "dog", "emu")
    assert made.names == ("north", "south")
    assert made.targets.tolist() == [0, 0, 1, 1, 1, 0, 2, 2]
    assert made.features.dtype == torch.uint8
    stored = made.features.numpy().transpose(0, 2, 3, 1)
    for i, array in zip([0, 1, 2, 3, 4, 6, 7], [*cats, *dogs, *emus], strict=True):
        assert np.array_equal(stored[i], array)
    assert made.test[1].tolist() == [1, 1]
    assert np.array_equal(made.test[0][0].numpy().transpose(1, 2, 0), tests[0])
    lazily = Silos.from_folders(folders, save_to=tmp_path / "kept", size=(3, 2), channels=1)
    assert lazily.features.shape == (8, 1, 3, 2)
    small = Image.fromarray(cats[0]).convert("L").resize((2, 3), Image.Resampling.BILINEAR)
    assert np.array_equal(lazily.dense().features[0, 0].numpy(), np.asarray(small))
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    fc.simulate(fc.Problem(lazily, model=model), fc.algorithms.FedAvg(local_steps=2, step=0.1), rounds=2, batch_size=2)


def test_numbered_classes_and_jpeg(tmp_path):
    write(tmp_path / "a" / "2", suffix=".jpg")
    write(tmp_path / "a" / "10", suffix=".JPEG")
    assert class_names([tmp_path / "a"]) == ("2", "10")
    assert Silos.from_folders(str(tmp_path / "a")).targets.tolist() == [0, 0, 1, 1]


def test_everything_that_is_wrong_with_folders(tmp_path):
    write(tmp_path / "a" / "cat")
    write(tmp_path / "b" / "cat", shape=(6, 5, 3))
    write(tmp_path / "c" / "cat", shape=(6, 4))
    Image.new("RGBA", (4, 6)).save(tmp_path / "c" / "cat" / "9.png")
    Image.new("I;16", (4, 6)).save(tmp_path / "c" / "cat" / "8.png")
    (tmp_path / "a" / "cat" / "broken.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError) as caught:
        Silos.from_folders([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    text = str(caught.value)
    for line in (
        r"a: item 2 \(cat/broken.png\): UnidentifiedImageError",
        r"b: item 0 \(cat/0.png\) has shape \(3, 6, 5\), that of the first \(3, 6, 4\) \(and 1 more items\).*size=",
        r"c: item 0 \(cat/0.png\) has shape \(1, 6, 4\)",
        r"c: item 2 \(cat/8.png\): an image of mode 'I;16'.*\(and 1 more items\)",
    ):
        assert re.search(line, text), (line, text)
    (tmp_path / "d" / "cat").mkdir(parents=True)
    (tmp_path / "d" / "cat" / "notes.txt").write_text("")
    (tmp_path / "e").mkdir()
    with pytest.raises(DataError) as caught:
        Silos.from_folders([tmp_path / "d", tmp_path / "e", tmp_path / "f"])
    text = str(caught.value)
    for line in ("d: 1 file.s. are no PNG or JPEG, such as cat/notes.txt", "has no folders in it", "is no folder"):
        assert re.search(line, text), (line, text)
    (tmp_path / "d" / "cat" / "notes.txt").unlink()
    with pytest.raises(DataError, match="d: an empty data set"):
        Silos.from_folders([tmp_path / "d"])
    for options in ({"size": (0, 3)}, {"size": (3,)}, {"channels": 2}):
        with pytest.raises(DataError, match=r"must be|size"):
            Silos.from_folders([tmp_path / "a"], **options)


# -- by name ----------------------------------------------------------------------------------------------------------


def test_in_an_experiment(tmp_path):
    for site in ("north", "south"):
        for name in ("cat", "dog"):
            write(tmp_path / site / name, shape=(8, 8), count=4)
    Silos.from_folders([tmp_path / "north", tmp_path / "south"], save_to=tmp_path / "kept")
    text = """
    data = {{name = "{name}", {options}}}
    model = {{name = "linear"}}
    algorithm = {{name = "FedAvg", local_steps = 2, step = 0.1}}
    run = {{rounds = 2, batch_size = 3}}
    """
    folders = f'folders = ["{tmp_path}/north", "{tmp_path}/south"]'
    models = []
    for name, options in (
        ("mapped", f'folder = "{tmp_path}/kept"'),
        ("mapped", f'folder = "{tmp_path}/kept", in_memory = true, verify = true'),
        ("image_folders", folders),
    ):
        (tmp_path / "run.toml").write_text(text.format(name=name, options=options))
        config = fc.experiments.Config.read(tmp_path / "run.toml")
        problem = config.make_problem()
        models.append(fc.simulate(problem, config.make_algorithm(config.specs[0], problem), rounds=2, batch_size=3))
    assert isinstance(fc.data.load("mapped", folder=str(tmp_path / "kept")).features, MappedRows)
    assert torch.equal(models[0].solution, models[1].solution)
    assert torch.equal(models[0].solution, models[2].solution)
