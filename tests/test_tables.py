"""Files that must be read right, and those that must be refused: one table of each.

The expected numbers are written down here, or come from ``float``; no reader of the package is its own oracle.
"""

import gzip
import pickle
import warnings

import numpy as np
import pytest
import torch

from fedcomposite.data import DataError, Silos
from fedcomposite.data.faults import DataWarning

# -- files that must be read right: bytes, options, feature names, rows, targets ---------------------------------------

PLAIN = b"a,b,y\n1,2.5,0\n-3,4e-1,1\n"
ROWS, LABELS = [[1, 2.5], [-3, 0.4]], [0, 1]

GOOD = {
    "plain": (PLAIN, {}, "a b", ROWS, LABELS),
    "no newline at the end": (PLAIN.rstrip(), {}, "a b", ROWS, LABELS),
    "blank lines": (b"\n" + PLAIN.replace(b"\n", b"\n\n"), {}, "a b", ROWS, LABELS),
    "CRLF": (PLAIN.replace(b"\n", b"\r\n"), {}, "a b", ROWS, LABELS),
    "old Macintosh": (PLAIN.replace(b"\n", b"\r"), {}, "a b", ROWS, LABELS),
    "byte order mark": (b"\xef\xbb\xbf" + PLAIN, {}, "a b", ROWS, LABELS),
    "byte order mark, quoted": (b'\xef\xbb\xbf"a",b,y\n1,2.5,0\n-3,.4,1\n', {}, "a b", ROWS, LABELS),
    "UTF-16": (PLAIN.decode().encode("utf-16"), {}, "a b", ROWS, LABELS),
    "UTF-16 big-endian": (b"\xfe\xff" + PLAIN.decode().encode("utf-16-be"), {}, "a b", ROWS, LABELS),
    "UTF-16 without a mark, named": (
        PLAIN.decode().encode("utf-16-le"),
        {"encoding": "utf-16-le"},
        "a b",
        ROWS,
        LABELS,
    ),
    "Windows-1252, named": (
        "größe,b,y\n1,2.5,0\n-3,.4,1\n".encode("cp1252"),
        {"encoding": "cp1252"},
        "größe b",
        ROWS,
        LABELS,
    ),
    "UTF-8 names": ("größe,b,y\n1,2.5,0\n-3,.4,1\n".encode(), {}, "größe b", ROWS, LABELS),
    "gzip": (gzip.compress(PLAIN), {}, "a b", ROWS, LABELS),
    "semicolons": (PLAIN.replace(b",", b";"), {}, "a b", ROWS, LABELS),
    "tabs": (PLAIN.replace(b",", b"\t"), {}, "a b", ROWS, LABELS),
    "bars": (PLAIN.replace(b",", b"|"), {}, "a b", ROWS, LABELS),
    "colons, named": (PLAIN.replace(b",", b":"), {"separator": ":"}, "a b", ROWS, LABELS),
    "decimal commas": (b"a;b;y\n1;2,5;0\n-3;,4;1\n", {}, "a b", ROWS, LABELS),
    "decimal commas with exponents": (b"a;b;y\n1;2,5e0;0\n-3;4,0e-1;1\n", {}, "a b", ROWS, LABELS),
    "decimal commas in quotes": (b'a,b,y\n1,"2,5",0\n-3,"0,4",1\n', {}, "a b", ROWS, LABELS),
    "decimal comma of three digits, named": (
        b"a;y\n1,234;0\n2,500;1\n",
        {"decimal": ","},
        "a",
        [[1.234], [2.5]],
        LABELS,
    ),
    "points between semicolons": (b"a;b;y\n1;2.500;0\n-3;0.400;1\n", {}, "a b", ROWS, LABELS),
    "points for thousands, named": (b"a;y\n1.234;0\n950;1\n", {"decimal": "."}, "a", [[1.234], [950]], LABELS),
    "a line of spaces": (PLAIN + b"  \n", {}, "a b", ROWS, LABELS),
    "another separator in a name": (b"a;x,b,y\n1,2.5,0\n-3,.4,1\n", {}, "a;x b", ROWS, LABELS),
    "spaces in the header": (b" a , b\t,y \n1,2.5,0\n-3,.4,1\n", {}, "a b", ROWS, LABELS),
    "spaces around numbers": (b"a, b, y\n 1 , 2.5, 0\n-3,  .4 ,1 \n", {}, "a b", ROWS, LABELS),
    "quoted numbers": (b'"a","b","y"\n"1","2.5","0"\n" -3 ",".4","1"\n', {}, "a b", ROWS, LABELS),
    "a name with a newline": (b'"a\nx",b,y\n1,2.5,0\n-3,.4,1\n', {}, None, ROWS, LABELS),
    "ways to write a number": (
        b"a,y\n+1.,0\n.5,1\n1E+2,0\n-0,1\n007,0\n1e-400,1\n",
        {},
        "a",
        [[1], [0.5], [100], [0], [7], [0]],
        [0, 1] * 3,
    ),
    "near the ends of the range": (
        b"a,b,y\n1e308,-1e308,0\n1.7976931348623157e308,5e-324,1\n",
        {},
        "a b",
        [[1e308, -1e308], [1.7976931348623157e308, 5e-324]],
        LABELS,
    ),
    "whole numbers a float holds": (
        b"a,y\n9007199254740992,0\n9007199254740994,1\n",
        {},
        "a",
        [[2**53], [2**53 + 2]],
        LABELS,
    ),
    "true and false": (b"a,b,y\nTrue,1,false\nFALSE,2,true\n", {}, "a b", [[1, 1], [0, 2]], LABELS),
    "a text column that is dropped": (b"id,a,y\nx,1,0\ny z,2,1\n", {"drop": "id"}, "a", [[1], [2]], LABELS),
    "a dropped name of several letters": (
        b"age,a,g,e,y\n7,1,2,3,0\n8,4,5,6,1\n",
        {"drop": "age"},
        "a g e",
        [[1, 2, 3], [4, 5, 6]],
        LABELS,
    ),
    "dropped twins": (b"a,b,b,y\n1,2,3,0\n4,5,6,1\n", {"drop": ["b"]}, "a", [[1], [4]], LABELS),
    "renamed": (b"alter,b,y\n1,2.5,0\n-3,.4,1\n", {"columns": {"age": "alter"}}, "age b", ROWS, LABELS),
    "renamed target": (b"a,b,krank\n1,2.5,0\n-3,.4,1\n", {"columns": {"y": "krank"}}, "a b", ROWS, LABELS),
    "swapped names": (b"a,b,y\n1,2.5,0\n-3,.4,1\n", {"columns": {"a": "b", "b": "a"}}, "b a", ROWS, LABELS),
    "an index that is dropped by pandas' name": (
        b",a,y\n7,1,0\n9,2,1\n",
        {"drop": "Unnamed: 0"},
        "a",
        [[1], [2]],
        LABELS,
    ),
    "target in front": (b"y,a,b\n0,1,2.5\n1,-3,.4\n", {}, "a b", ROWS, LABELS),
    "numbers as names": (b"0,1,y\n1,2.5,0\n-3,.4,1\n", {}, "0 1", ROWS, LABELS),
    "a separator at the end of all lines": (
        b"a,y,\n1,0,\n2,1,\n",
        {"_warns": "1 column\\(s\\) have neither a name nor values"},
        "a",
        [[1], [2]],
        LABELS,
    ),
    "one row": (b"a,y\n3,1.5\n", {"_warns": "all targets are 1.5"}, "a", [[3]], [1.5]),
    "duplicate rows": (b"a,y\n3,1\n3,1\n3,0\n", {}, "a", [[3], [3], [3]], [1, 1, 0]),
    "pandas' index": (b",a,y\n0,5,0\n1,6,1\n", {"_warns": "numbers the rows"}, "a", [[5], [6]], LABELS),
    "pandas' index, named": (
        b"Unnamed: 0,a,y\n0,5,0\n1,6,1\n",
        {"_warns": "numbers the rows"},
        "a",
        [[5], [6]],
        LABELS,
    ),
    "R's row names": (b'"","a","y"\n"1",5,0\n"2",6,1\n', {"_warns": "numbers the rows"}, "a", [[5], [6]], LABELS),
}


@pytest.mark.parametrize("name", GOOD)
def test_read_right(tmp_path, name):
    content, options, names, X, y = GOOD[name]
    (tmp_path / "f.csv").write_bytes(content)
    options = dict(options)
    if said := options.pop("_warns", None):
        with pytest.warns(DataWarning, match=said):
            silos = Silos.from_files([tmp_path / "f.csv"], target="y", **options)
    else:
        silos = Silos.from_files([tmp_path / "f.csv"], target="y", **options)
    assert silos.features.tolist() == X
    assert silos.targets.tolist() == y
    assert silos.features.dtype == silos.targets.dtype == torch.float64
    if names is not None:
        assert silos.feature_names == tuple(names.split())


# -- files that must be refused: bytes, options, what the one error says, in each of its faults ------------------------

BAD = {
    "empty": (b"", {}, ["not a readable CSV file (it is empty)"]),
    "white": (b" \n\n\t\n", {}, ["it is empty"]),
    "header only": (b"a,y\n", {}, ["an empty silo: it has no rows below the header"]),
    "target twice": (b"a,y,y\n1,0,0\n2,1,1\n", {}, ["two columns are called 'y'"]),
    "a feature three times": (b"a,a,a,y\n1,1,1,0\n2,2,2,1\n", {}, ["3 columns are called 'a'"]),
    "twice after stripping": (b"a, a ,y\n1,1,0\n2,2,1\n", {}, ["two columns are called 'a'"]),
    "twice after renaming": (
        b"a,b,y\n1,1,0\n2,2,1\n",
        {"columns": {"a": "b"}},
        ["two columns are called 'a' after renaming"],
    ),
    "rows longer than the header": (
        b"a,y\n9,1,0\n8,2,1\n",
        {},
        ["2 row(s) are longer than the header, 3 instead of 2 fields (lines 2, 3)"],
    ),
    "a separator at the end of rows": (b"a,y\n1,0,\n2,1,\n", {}, ["longer than the header"]),
    "one long row": (
        b"a,y\n1,0\n2,1\n3,1,4\n",
        {},
        ["1 row(s) are longer than the header, 3 instead of 2 fields (line 4)"],
    ),
    "short rows": (
        b"a,b,y\n1,2,0\n3,1\n",
        {},
        ["1 row(s) are shorter than the header, 2 instead of 3 fields (line 3)"],
    ),
    "decimal commas between commas": (b"a,y\n1,5,0\n2,5,1\n", {}, ["longer than the header"]),
    "an index that is a number of its own": (
        b",a,y\n17,1,0\n9,2,1\n",
        {},
        ["the first column has no name and does not number the rows", "drop it as 'Unnamed: 0'"],
    ),
    "an index of text": (b",a,y\np1,1,0\np2,2,1\n", {}, ["the first column has no name"]),
    "a nameless column elsewhere": (b"a,,y\n1,2,0\n3,4,1\n", {}, ["column number 2 has no name"]),
    "a nameless column with one value": (b"a,y,\n1,0,\n2,1,7\n", {}, ["column number 3 has no name"]),
    "no target": (b"a,yy\n1,0\n", {}, ["no column 'y'; did you mean 'yy'? (it has: a, yy)"]),
    "no header": (b"1,0\n2,1\n", {}, ["no column 'y' (it has: 1, 0)"]),
    "spaces as separators": (b"a b y\n1 2 0\n", {}, ["no column 'y' (it has: a b y)"]),
    "target only": (b"y\n0\n1\n", {}, ["no features left beside the target"]),
    "all dropped": (b"a,b,y\n1,2,0\n", {"drop": ["a", "b"]}, ["no features left beside the target"]),
    "index and target": (b",y\n0,0\n1,1\n", {"_warns": True}, ["no features left beside the target"]),
    "drop is the target": (PLAIN, {"drop": "y"}, ["drop = 'y' is the target"]),
    "drop is the target's own name": (PLAIN, {"drop": ["b"], "columns": {"y": "b"}}, ["drop = 'b' is the target"]),
    "drop unknown": (PLAIN, {"drop": "bb"}, ["drop = 'bb': no file has this column; did you mean 'b'?"]),
    "drop is a list in a list": (PLAIN, {"drop": [["a"]]}, ["drop = [['a']] must be a name or a list of names"]),
    "drop is a number": (PLAIN, {"drop": 3}, ["drop = 3 must be a name or a list of names"]),
    "target is a list": (PLAIN, {"target": ["y"]}, ["target = ['y'] must be the name of a column"]),
    "columns is a list": (PLAIN, {"columns": ["a"]}, ["columns = ['a'] must map common names"]),
    "columns unknown": (PLAIN, {"columns": {"age": "aa"}}, ["no column 'aa'; did you mean 'a'?"]),
    "columns twice the same": (PLAIN, {"columns": {"p": "a", "q": "a"}}, ["columns gives 'a' several names"]),
    "columns and drop": (PLAIN, {"columns": {"p": "a"}, "drop": "a"}, ["'a' is both in columns and in drop"]),
    "separator of two characters": (PLAIN, {"separator": ", "}, ["separator = ', ' must be one character"]),
    "separator and decimal alike": (PLAIN, {"separator": ",", "decimal": ","}, ["separator and decimal are both ','"]),
    "decimal unknown": (PLAIN, {"decimal": ";"}, ["decimal = ';' must be '.' or ','"]),
    "encoding unknown": (PLAIN, {"encoding": "latin-99"}, ["encoding = 'latin-99' is not known"]),
    "encoding a number": (PLAIN, {"encoding": 8}, ["from_files: encoding = 8, must be a string"]),
    "the separator is unclear": (b"a;b,c;y\n1;2,3;0\n", {}, ["the separator is unclear, the header has ',' and ';'"]),
    "the wrong separator": (b"a,y\n1;0\n", {}, ["1 row(s) are shorter than the header"]),
    "commas and points": (
        b"a;b;y\n1,5;1.5;0\n2,5;2.5;1\n",
        {},
        ["the decimal mark is unclear: '1,5' in column 'a', '1.5' in column 'b'"],
    ),
    "a thousand or a fraction": (
        b"a;y\n1,234;0\n2,500;1\n",
        {},
        ["the decimal mark is unclear", "may be a thousand or a fraction"],
    ),
    "commas where points were named": (b"a;y\n1,5;0\n2,5;1\n", {"decimal": "."}, ["column 'a' is not numeric: 2 of 2"]),
    "points where commas were named": (b"a;y\n1.5;0\n2.5;1\n", {"decimal": ","}, ["column 'a' is not numeric: 2 of 2"]),
    "thousands": (b"a;y\n1.234,5;0\n2;1\n", {}, ["such as '1.234,5'", "without thousands separators"]),
    "thousands in quotes": (b'a,y\n"1,234,567",0\n2,1\n', {}, ["such as '1,234,567'", "without thousands separators"]),
    "thousands with spaces": (b"a,y\n1 234,0\n2,1\n", {}, ["such as '1 234'", "without thousands separators"]),
    "text": (
        b"a,y\nlow,0\nhigh,1\n3,0\n",
        {},
        ["column 'a' is not numeric: 2 of 3 values, such as 'low'", "(lines 2, 3)"],
    ),
    "text labels": (b"a,y\n1,yes\n2,no\n", {}, ["column 'y' is not numeric: 2 of 2 values, such as 'yes'"]),
    "dates": (b"a,y\n2020-01-31,0\n2020-02-01,1\n", {}, ["column 'a' is not numeric", "'2020-01-31'"]),
    "points for thousands": (b"a;y\n1.234;0\n950;1\n", {}, ["'1.234' may be a thousand or a fraction"]),
    "times": (b"a,y\n12:30,0\n12:31,1\n", {}, ["column 'a' is not numeric"]),
    "percentages": (b"a,y\n5%,0\n6%,1\n", {}, ["column 'a' is not numeric"]),
    "underscores": (b"a,y\n1_000,0\n2,1\n", {}, ["such as '1_000'"]),
    "hexadecimal": (b"a,y\n0x1F,0\n2,1\n", {}, ["such as '0x1F'"]),
    "other digits": ("a,y\n٣,0\n2,1\n".encode(), {}, ["column 'a' is not numeric: 1 of 2"]),
    "two numbers in a cell": (b"a,y\n1-2,0\n2,1\n", {}, ["such as '1-2'"]),
    "half a number": (b"a,y\n1e,0\n2,1\n", {}, ["such as '1e'"]),
    "a complex number": (b"a,y\n1+2j,0\n2,1\n", {}, ["such as '1+2j'"]),
    "true and numbers": (b"a,y\ntrue,0\n2,1\n", {}, ["column 'a' mixes true and false with numbers"]),
    "absent": (
        b"a,b,y\n1,,0\n2,NA,1\n3,n/a,0\n4,7,1\n",
        {},
        ["column 'b' has 3 missing value(s), the first in data row 0 (lines 2, 3, 4)"],
    ),
    "markers": (
        b"a,y\n?,0\n-,1\n.,0\nnull,1\nNone,0\nNaN,1\n<NA>,0\n#N/A,1\n",
        {},
        ["column 'a' has 8 missing", "(lines 2, 3, 4, ...)"],
    ),
    "a marker of one's own": (b"a,y\nunknown,0\n2,1\n", {"missing": "Unknown"}, ["column 'a' has 1 missing value(s)"]),
    "a number as a marker": (b"a,y\n-9,0\n-9.0,1\n3,1\n", {"missing": ["-9"]}, ["column 'a' has 2 missing value(s)"]),
    "an absent target": (
        b"a,y\n1,0\n2,\n3,1\n",
        {},
        ["column 'y' has 1 missing value(s), the first in data row 1 (line 3)"],
    ),
    "infinite": (
        b"a,y\ninf,0\n-Infinity,1\n",
        {},
        ["2 value(s) are NaN or infinite, the first in row 0, column 0 (lines 2, 3)"],
    ),
    "too large": (b"a,y\n1e309,0\n2,1\n", {}, ["1 number(s) beyond 1.8e308"]),
    "400 digits": (b"a,y\n" + b"7" * 400 + b",0\n2,1\n", {}, ["1 number(s) beyond 1.8e308"]),
    "5000 digits": (b"a,y\n" + b"7" * 5000 + b",0\n2,1\n", {}, ["1 number(s) beyond 1.8e308"]),
    "digits that a float loses": (
        b"id,y\n9007199254740993,0\n2,1\n",
        {},
        ["column 'id': 1 whole number(s) beyond 2^53 would lose digits"],
    ),
    "an open quote": (b'a,y\n"1,0\n2,1\n', {}, ["not a readable CSV file", "starts in line 2", "close every quote"]),
    "text after a quote": (b'a,y\n"1"2,0\n2,1\n', {}, ["not a readable CSV file", "starts in line 2"]),
    "Windows-1252": ("größe,y\n1,0\n".encode("cp1252"), {}, ["line 1 is not utf-8 text", "give its encoding"]),
    "UTF-16 without a mark": (PLAIN.decode().encode("utf-16-le"), {}, ["it has NUL characters"]),
    "half of UTF-16": (PLAIN.decode().encode("utf-16")[:-1], {}, ["is not utf-16 text"]),
    "a workbook": (b"PK\x03\x04\x14\x00\x06\x00", {}, ["it is a workbook or an archive"]),
    "half of gzip": (gzip.compress(PLAIN)[:-12], {}, ["damaged gzip"]),
    "an unknown option": (PLAIN, {"dorp": "a"}, ["from_files has no option 'dorp'; did you mean 'drop'?"]),
    "names of the missing are bad": (
        PLAIN,
        {"missing": [None]},
        ["missing = [None] must be a name or a list of names"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(tmp_path, name):
    content, options, messages = BAD[name]
    (tmp_path / "f.csv").write_bytes(content)
    options = {"target": "y", **options}
    expected = pytest.warns(DataWarning) if options.pop("_warns", False) else warnings.catch_warnings()
    with expected, pytest.raises(DataError) as caught:
        Silos.from_files([tmp_path / "f.csv"], **options)
    for message in messages:
        assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1 or len(caught.value.faults) > 1


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    (tmp_path / "north.csv").write_text("a,b,c,y\n1,low,inf,0\n?,high,2,1\n3,1\n,mid,4,\n")
    (tmp_path / "south.csv").write_text("a,b,b,z\n1,2,3,0\n")
    with pytest.raises(DataError) as caught:
        Silos.from_csv([tmp_path / "north.csv", tmp_path / "south.csv", tmp_path / "gone.csv"], target="y")
    found = [(f.source.rpartition("/")[2], f.column, f.count, f.lines) for f in caught.value.faults]
    assert found == [
        ("north.csv", None, 1, (4,)),  # a short row
        ("north.csv", "a", 2, (3, 5)),  # missing
        ("north.csv", "b", 3, (2, 3, 5)),  # text
        ("north.csv", "c", 1, (2,)),  # infinite
        ("north.csv", "y", 1, (5,)),  # missing
        ("south.csv", "b", 2, ()),  # twice
        ("south.csv", "y", 1, ()),  # no target
        ("gone.csv", None, 1, ()),
    ]
    lines = str(caught.value).splitlines()
    assert lines[0] == "8 problems with the data:"
    assert len(lines) == 9
    assert all(str(fault) in line for fault, line in zip(caught.value.faults, lines[1:], strict=True))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.faults) == (str(caught.value), caught.value.faults)


def test_many_faults_are_cut(tmp_path):
    names = [f"c{i}" for i in range(50)]
    (tmp_path / "f.csv").write_text(",".join(names) + ",y\n" + "x," * 50 + "1\n")
    with pytest.raises(DataError) as caught:
        Silos.from_csv([tmp_path / "f.csv"], target="y")
    assert len(caught.value.faults) == 50
    assert str(caught.value).endswith("... and 30 more")


def test_line_numbers_count_lines_within_quotes(tmp_path):
    (tmp_path / "f.csv").write_text('note,a,y\n"two\nlines",1,0\n\nx,?,1\n')
    with pytest.raises(DataError) as caught:
        Silos.from_csv([tmp_path / "f.csv"], target="y", drop="note")
    assert caught.value.faults[0].lines == (5,)


@pytest.mark.slow
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("plain", [True, False])
def test_thousands_of_rows_to_the_bit(tmp_path, newline, plain):
    """Both ways to read, the quick one and cell by cell, give the float that is nearest to what is written."""
    rng = np.random.default_rng(0)
    bits = np.frombuffer(rng.bytes(8 * 60_000), np.float64)
    values = bits[np.abs(bits) < 1e15][:24_000].reshape(12_000, 2)
    cells = [[repr(a), f"{b:.25e}"] for a, b in values.tolist()]
    y = (np.arange(12_000) % 2).tolist()
    lines = ["a,b,y", *(f"{a},{b},{label}" for (a, b), label in zip(cells, y, strict=True))]
    if not plain:
        lines[-1] = lines[-1].replace(",", ", ")
    (tmp_path / "f.csv").write_bytes(newline.join(lines).encode())
    silos = Silos.from_csv([tmp_path / "f.csv"], target="y")
    expected = np.array([[float(a), float(b)] for a, b in cells])
    assert silos.features.numpy().tobytes() == expected.tobytes()
    assert silos.targets.tolist() == y


def test_what_counts_as_a_number():
    """Random short strings: a cell is a number if and only if the grammar in words says so."""
    from fedcomposite.data.cells import Column

    def grammar(text):
        mantissa, mark, exponent = text.strip(" ").replace("E", "e").partition("e")
        whole, _, fraction = mantissa[mantissa[:1] in ("+", "-") :].partition(".")
        power = exponent[exponent[:1] in ("+", "-") :]
        digits = set("0123456789")
        right = set(whole + fraction) <= digits and whole + fraction != "" and set(power) <= digits
        return right and (power != "") == (mark != "")

    rng = np.random.default_rng(0)
    for alphabet in ("019+-.eE ", "01.e_,xj٣"):
        for _ in range(3000):
            text = "".join(rng.choice(list(alphabet), size=rng.integers(1, 6)))
            column = Column("a", (), ".")
            column.add([text, "1"])
            assert grammar(text) == (not column.found), text
            if not column.found:
                assert column.values[0] == float(text)
