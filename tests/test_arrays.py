"""Arrays and tables in memory that must be taken as they are, and those that must be refused: one table of each."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from torch.utils.data import TensorDataset

import fedcomposite as fc
from fedcomposite.data import DataError, Silos

X2, Y2 = np.array([[1.0, 2.0], [3.0, 4.0]]), [0, 1]
FRAME = pd.DataFrame(X2, columns=["a", "b"])


def masked(values, mask):
    return np.ma.array(values, mask=mask)


GOOD_ARRAYS = {
    "lists": ([(X2.tolist(), Y2)], X2),
    "a generator": (((X, y) for X, y in [(X2, Y2)]), X2),
    "lists as pairs": ([[X2, Y2]], X2),
    "booleans": ([(X2 > 2, np.array([True, False]))], X2 > 2),
    "boolean tensors": ([(torch.from_numpy(X2 > 2), torch.tensor([True, False]))], X2 > 2),
    "boolean and numeric columns": ([(FRAME.assign(b=[True, False]), Y2)], [[1, 1], [3, 0]]),
    "objects that are numbers": ([(np.array([[1, 2.5], [True, np.float32(4)]], object), Y2)], [[1, 2.5], [1, 4]]),
    "nullable columns": ([(FRAME.astype("Int64"), pd.Series([0, 1], dtype="Int64"))], X2),
    "a mask without effect": ([(masked(X2, False), Y2)], X2),
    "unsigned": ([(X2.astype(np.uint16), np.array(Y2, np.uint64))], X2),
    "unsigned tensors": ([(torch.from_numpy(X2.astype(np.uint32)), Y2)], X2),
    "another order of columns": ([(FRAME, Y2), (FRAME[["b", "a"]], Y2)], np.concatenate([X2, X2])),
    "an array beside a table": ([(FRAME, Y2), (X2, Y2)], np.concatenate([X2, X2])),
    "numbers as names": ([(pd.DataFrame(X2), Y2), (pd.DataFrame(X2)[[1, 0]], Y2)], np.concatenate([X2, X2])),
    "labels of rows": ([(FRAME.set_axis([5, 7]), pd.Series(Y2, [5, 7]))], X2),
    "other labels of rows": ([(FRAME.set_axis([5, 7]), pd.Series(Y2))], X2),
    "whole numbers beside single precision": (
        [(np.array([[2**24 + 1, 0]]), [0]), (np.ones((1, 2), np.float32), [1])],
        [[2**24 + 1, 0], [1, 1]],
    ),
    "images": ([(np.ones((2, 1, 3, 3), np.uint8), Y2)], np.ones((2, 1, 3, 3))),
}


@pytest.mark.parametrize("name", GOOD_ARRAYS)
def test_arrays_read_right(name):
    arrays, expected = GOOD_ARRAYS[name]
    silos = Silos.from_arrays(arrays)
    assert silos.features.tolist() == np.asarray(expected, float).tolist()
    assert silos.features.dtype not in (torch.bool, torch.uint16, torch.uint32)
    assert silos.targets.dtype != torch.bool
    assert silos.targets.tolist() in ([0, 1], [1, 0], [0, 1, 0, 1])
    if silos.features.ndim == 2:
        at = fc.Problem(silos, loss="least_squares").gradient(torch.ones(silos.features.shape[1], dtype=torch.float64))
        X = np.asarray(expected, float)
        residuals = (X.sum(1) - silos.targets.numpy()) / len(silos) / np.repeat(silos.sizes, silos.sizes)
        np.testing.assert_allclose(at, X.T @ residuals, rtol=1e-12)


def test_tables_name_the_features():
    silos = Silos.from_arrays([(FRAME, Y2)], test=(FRAME[["b", "a"]], Y2))
    assert silos.feature_names == ("a", "b")
    assert silos.test[0].tolist() == X2.tolist()
    assert Silos.from_arrays([(FRAME, Y2)], feature_names=["p", "q"]).feature_names == ("p", "q")


SET = TensorDataset(torch.from_numpy(X2), torch.tensor(Y2))
BAD_ARRAYS = {
    "no clients": ([], "no clients were given"),
    "a pair, not a list of pairs": ((X2, Y2), "wants a list with a pair of arrays (X, y) per client, not one pair"),
    "a list of arrays": ([X2, Y2], "client 0: from_arrays wants a pair of arrays (X, y) per client, this is a ndarray"),
    "an array": (X2, "not a ndarray"),
    "a table": (FRAME, "not a DataFrame"),
    "a dictionary": ({"a": (X2, Y2)}, "not a dict"),
    "a Dataset": (SET, "not a TensorDataset"),
    "Datasets": ([SET, SET], "client 0: from_arrays wants a pair of arrays (X, y) per client, this is a TensorDataset"),
    "triples": ([(X2, Y2, Y2)], "this is a tuple of 3"),
    "other names": (
        [(FRAME, Y2), (FRAME.rename(columns={"b": "c"}), Y2)],
        "columns differ from the first client's: b, c",
    ),
    "a column more": ([(FRAME, Y2), (FRAME.assign(c=1.0), Y2)], "columns differ from the first client's: c"),
    "names twice": ([(FRAME.set_axis(["a", "a"], axis=1), Y2)], "two columns are called 'a'"),
    "the target among the features": (
        [(FRAME.assign(y=Y2), FRAME.assign(y=Y2)["y"])],
        "the targets are also the column 'y' of the features",
    ),
    "rows in another order": ([(FRAME, pd.Series(Y2, [1, 0]))], "the same row labels in another order"),
    "masked": ([(masked(X2, [[True, False], [True, True]]), Y2)], "client 0, features: 3 value(s) are masked"),
    "masked targets": ([(X2, masked(Y2, [False, True]))], "client 0, targets: 1 value(s) are masked"),
    "complex": ([(X2 + 1j, Y2)], "numbers of type complex128 are not supported"),
    "complex tensors": ([(torch.from_numpy(X2 + 1j), Y2)], "numbers of type complex128 are not supported"),
    "complex targets": ([(X2, np.array([1j, 0]))], "client 0, targets: numbers of type complex128"),
    "complex columns": ([(FRAME.astype(complex), Y2)], "numbers of type complex128"),
    "sparse": ([(X2, sparse.csr_array(X2))], "client 0, targets: a sparse matrix; make it dense with .toarray()"),
    "old sparse": ([(X2, sparse.coo_matrix(X2))], "a sparse matrix"),
    "sparse tensors": ([(X2, torch.from_numpy(X2[0]).to_sparse())], "a sparse tensor; make it dense with .to_dense()"),
    "text": ([(np.array([["1", "low"], ["2", "3"]]), Y2)], "1 of 4 values are text, not numbers, such as 'low'"),
    "numbers as text": ([(np.array([["1", "2"]]), [0])], "numbers stored as text"),
    "text labels": ([(X2, ["yes", "no"])], "client 0, targets: 2 of 2 values are text"),
    "text columns": ([(FRAME.assign(b=["x", "y"]), Y2)], "column 'b' is not numeric: 2 of 2 values, such as 'x'"),
    "categories": ([(FRAME.assign(b=pd.Categorical(["x", "y"])), Y2)], "column 'b' is not numeric"),
    "dates": ([(FRAME.assign(b=pd.to_datetime(["2020-01-01"] * 2)), Y2)], "column 'b' is not numeric"),
    "arrays of dates": ([(np.zeros((2, 2), "M8[s]"), Y2)], "values of type datetime64[s] are not numbers"),
    "None": ([([[1, None], [2, 3]], Y2)], "column '1' has 1 missing value(s), the first in data row 0"),
    "NA": (
        [(FRAME.astype("Int64").replace(4, pd.NA), Y2)],
        "column 'b' has 1 missing value(s), the first in data row 1",
    ),
    "lists in an array": ([(np.array([[1, 2], [[], 3]], object), Y2)], "column '0' is not numeric: 1 of 2"),
    "rows of unequal length": ([([[1, 2], [3]], Y2)], "give rows of equal length"),
    "400 digits": ([([[10**400, 1], [2, 3]], Y2)], "beyond 1.8e308"),
    "beyond 2^53": ([(np.array([[2**53 + 1, 1]]), [0])], "1 whole number(s) beyond 2^53 would lose digits"),
    "below -2^53": ([(torch.tensor([[-(2**53) - 1, 1]]), [0])], "beyond 2^53"),
    "the largest integer": ([(np.array([[2**63 - 1, -(2**63)]]), [0])], "1 whole number(s) beyond 2^53"),
    "beyond 2^53 beside fractions": (
        [(pd.DataFrame({"i": [2**53 + 1], "x": [0.5]}), [0])],
        "column 'i': 1 whole number(s)",
    ),
    "beyond 2^63": ([(np.array([[2**64 - 1]], np.uint64), [0])], "beyond 2^63"),
    "NaN": (
        [(np.array([[1, np.nan], [np.inf, 3]]), Y2)],
        "2 value(s) are NaN or infinite, the first in row 0, column 1",
    ),
    "NaN target": ([(X2, [0, np.nan])], "client 0, targets: 1 value(s) are NaN or infinite, the first in row 1"),
    "a column of targets": ([(X2, [[0], [1]])], "targets have shape (2, 1), expected (2,)"),
    "no features": ([(np.ones((2, 0)), Y2)], "has no features"),
    "an empty table": ([(FRAME[[]], Y2)], "has no features"),
    "bytes beside floating-point images": (
        [(np.ones((2, 1, 3, 3), np.uint8), Y2), (np.ones((2, 1, 3, 3)), Y2)],
        "client 1: images of type float64, client 0's are uint8",
    ),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_arrays_refused(name):
    arrays, message = BAD_ARRAYS[name]
    with pytest.raises(DataError) as caught:
        Silos.from_arrays(arrays)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_everything_that_is_wrong_in_one_error():
    hole, ragged = np.array([[1, np.nan], [2, 3]]), (X2, [0])
    with pytest.raises(DataError) as caught:
        Silos.from_arrays([(X2, Y2), (hole, Y2), (X2[:, :1], Y2), ragged, (X2[:0], [])], test=(hole, Y2))
    first, *lines = str(caught.value).splitlines()
    assert first == "5 problems with the data:"
    for line, told in zip(
        lines,
        (
            "client 1, features: 1 value(s) are NaN or infinite, the first in row 0, column 1",
            "client 2 has samples of shape (1,), the first client (2,)",
            "client 3: targets have shape (1,), expected (2,)",
            "client 4 is an empty silo",
            "test data, features: 1 value(s) are NaN",
        ),
        strict=True,
    ):
        assert told in line
    tables = FRAME.assign(b=["x", "y"]), FRAME.rename(columns={"b": "c"})
    with pytest.raises(
        DataError, match=r"(?s)2 problems.*client 1, features: column 'b' is not.*client 2: columns differ"
    ):
        Silos.from_arrays([(FRAME, Y2), *((table, Y2) for table in tables)])


def test_names_are_lists():
    for option in ("names", "feature_names"):
        with pytest.raises(DataError, match=f"{option} = 'ab' must be a list of names"):
            Silos.from_arrays([(X2, Y2)], **{option: "ab"})


def test_feature_names_occur_once():
    with pytest.raises(DataError, match="feature_names: 'a' occurs twice"):
        Silos.from_arrays([(X2, Y2)], feature_names=["a", "a"])


def test_arrays_are_left_alone():
    X, frame = X2.copy(), FRAME[["b", "a"]].assign(b=[True, False])
    kept = frame.copy(deep=True)
    Silos.from_arrays([(X, Y2), (X, Y2)]).standardize()
    Silos.from_arrays([(FRAME, Y2), (frame, Y2)])
    assert np.array_equal(X, X2)
    pd.testing.assert_frame_equal(frame, kept)
