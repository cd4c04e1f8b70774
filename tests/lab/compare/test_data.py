"""Reading: every format and kind from small files, what is guessed, and the message of each fault."""

import datetime
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchrum.lab.compare import table
from torchrum.lab.compare.data import read_problem
from torchrum.lab.compare.problem import BadDataError, Problem

DRAW = np.random.default_rng(0)


def day(i: int) -> str:
    return str(np.datetime64("2020-01-01") + i)


def write(path: Path, head: str, rows: list[list[Any]], mark: str = ",") -> Path:
    path.write_text("\n".join([head, *(mark.join(map(str, row)) for row in rows)]) + "\n")
    return path


def load_rows(count: int = 100) -> list[list[Any]]:
    return [[day(i), i % 7, round(float(np.sin(i)), 4)] for i in range(count)]


def guess(problem: Problem, what: str) -> str:
    return next(text for text in problem.guesses if text.startswith(what + ":"))


def shapes(problem: Problem) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Sequences of each part, and the shapes of the first input and target."""
    parts = (problem.train, problem.validation, problem.test)
    return [(len(part.inputs), tuple(part.inputs[0].shape), tuple(part.targets[0].shape)) for part in parts]


def test_a_series_is_forecast(tmp_path):
    problem = read_problem(write(tmp_path / "load.csv", "date,temp,load", load_rows()))
    assert (problem.kind, problem.metric, problem.features, problem.outputs) == ("forecasting", "RMSE", 2, 1)
    assert problem.symbols is None
    assert problem.target_scale is not None and problem.target_scale.shape == (1,)
    assert guess(problem, "target") == 'target: "load", the last column'
    assert guess(problem, "time") == 'time: "date", since it holds dates'
    assert guess(problem, "kind") == 'kind: forecasting, since "load" is numeric and rows have a time column "date"'
    assert guess(problem, "inputs") == 'inputs: "temp", "load"'
    assert all(
        x.dtype == y.dtype == torch.float32 for x, y in zip(problem.test.inputs, problem.test.targets, strict=True)
    )


def test_what_is_given_is_not_guessed(tmp_path):
    path = write(tmp_path / "load.csv", "date,temp,load", load_rows())
    problem = read_problem(path, target="temp", time="date", inputs=["load"], kind="forecasting")
    assert problem.reading["columns"] == ["load", "temp"]  # the target is among the inputs of a forecast
    assert {text.partition(":")[0] for text in problem.guesses} <= {"parts", "windows", "target", "changes"}
    assert not any(text.startswith('target: "') for text in problem.guesses)


@pytest.mark.parametrize("suffix, mark", [(".csv", ";"), (".csv", "\t"), (".csv", "|"), (".tsv", "\t"), (".CSV", ",")])
def test_delimiters(tmp_path, suffix, mark):
    problem = read_problem(write(tmp_path / f"load{suffix}", mark.join(["date", "temp", "load"]), load_rows(), mark))
    assert problem.reading["columns"] == ["temp", "load"]


def test_decimal_commas_and_utf16(tmp_path):
    rows = [[row[0], str(row[1] + 0.5).replace(".", ","), str(row[2]).replace(".", ",")] for row in load_rows()]
    path = write(tmp_path / "load.csv", "date;temp;größe", rows, ";")
    path.write_bytes(path.read_text().encode("utf-16"))
    problem = read_problem(path)
    plain = read_problem(write(tmp_path / "plain.csv", "date,temp,load", [[a, b + 0.5, c] for a, b, c in load_rows()]))
    assert problem.reading["columns"] == ["temp", "größe"]
    assert problem.reading["means"] == plain.reading["means"]
    assert "decimal comma" in guess(problem, "numbers")


def test_numbers_between_blanks(tmp_path):
    rows = [[i, f"{i % 7:>3}", np.sin(i)] for i in range(100)]
    problem = read_problem(write(tmp_path / "load.csv", "t  temp   load", rows, " "))
    assert (problem.reading["time"], problem.reading["columns"]) == ("t", ["temp", "load"])
    texts = read_problem(write(tmp_path / "a.csv", "some words", [["of", "abc"[i % 3]] for i in range(100)], " "))
    assert texts.reading["alphabet"] == ["of a", "of b", "of c"]


def test_labels_that_are_no_numbers(tmp_path):
    """Marks alone do not make a number of a text."""
    labels = ("v1", "1st", "10.0.0.1", "a 100", "12:30", "1-2")
    rows = [[np.sin(i), labels[i % len(labels)]] for i in range(100)]
    assert read_problem(write(tmp_path / "a.csv", "v,label", rows)).reading["classes"] == sorted(labels)


def test_rows_of_one_name_stay_together(tmp_path):
    """Also if most names have one row: rows of one patient in two parts would be a leak."""
    names = [i - (i % 3 == 2) for i in range(120)]  # two thirds are different
    rows = [[name, DRAW.normal(), "ab"[name % 2]] for name in names]
    problem = read_problem(write(tmp_path / "a.csv", "patient,x,label", rows))
    assert problem.reading["group"] == "patient"
    assert sum(len(part.inputs) for part in (problem.train, problem.validation, problem.test)) == 80
    different = [[i, *row[1:]] for i, row in enumerate(rows)]
    assert read_problem(write(tmp_path / "b.csv", "patient,x,label", different)).reading["group"] is None


def test_a_file_without_a_header(tmp_path):
    problem = read_problem(write(tmp_path / "plain.csv", "5,0.25", [[i % 5, np.cos(i)] for i in range(80)]))
    assert problem.reading["columns"] == ["1", "2"]
    assert "columns are named 1 to 2" in guess(problem, "header")


@pytest.mark.parametrize(
    "form", ["%d.%m.%Y", "%d/%m/%Y %H:%M", "%b %d, %Y", "%Y/%m/%d", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S+02:00"]
)
def test_forms_of_dates(tmp_path, form):
    """Rows in any order give the same problem as rows sorted by time."""
    start = datetime.datetime(2024, 1, 5)
    rows = [[(start + datetime.timedelta(days=i)).strftime(form).join('""'), np.sin(i)] for i in range(90)]
    ordered = read_problem(write(tmp_path / "a.csv", "when,v", rows))
    random.Random(0).shuffle(rows)
    shuffled = read_problem(write(tmp_path / "b.csv", "when,v", rows))
    assert ordered.reading["time"] == "when"
    assert all(torch.equal(a, b) for a, b in zip(ordered.test.inputs, shuffled.test.inputs, strict=True))


def test_series_side_by_side(tmp_path):
    """Times that repeat show which column is the group; texts become 0 and 1."""
    rows = [
        [day(i), shop, i % 7 + np.sin(i), random.Random(i).choice(["yes", "no"])] for i in range(90) for shop in "ABC"
    ]
    problem = read_problem(write(tmp_path / "sales.csv", "date,shop,sales,promo", rows), target="sales")
    assert guess(problem, "group") == 'group: "shop", since times repeat, but not within it'
    assert problem.reading["columns"] == ["sales", "promo=no", "promo=yes"]
    assert set(torch.cat(problem.train.inputs)[:, 1:].unique().tolist()) == {0, 1}


def test_gaps_in_time_are_said(tmp_path):
    problem = read_problem(write(tmp_path / "load.csv", "date,temp,load", load_rows()[:20] + load_rows()[30:]))
    assert guess(problem, "steps").endswith('"date" goes in steps of 1 d to 11 d')


def gestures(label: Any) -> list[list[Any]]:
    return [[g, t, np.sin(g + t), label(g, t)] for g in range(24) for t in range(10)]


def test_one_class_for_each_group(tmp_path):
    rows = gestures(lambda g, t: ["up", "down"][g % 2])
    problem = read_problem(write(tmp_path / "g.csv", "subject,t,ax,label", rows))
    assert problem.kind == "classification"
    assert (problem.reading["group"], problem.reading["time"], problem.reading["columns"]) == ("subject", "t", ["ax"])
    assert shapes(problem) == [(16, (10, 1), ()), (4, (10, 1), ()), (4, (10, 1), ())]
    assert problem.reading["classes"] == ["down", "up"]


def test_one_number_for_each_group(tmp_path):
    problem = read_problem(write(tmp_path / "g.csv", "subject,t,ax,age", gestures(lambda g, t: g + 0.5)))
    assert (problem.kind, shapes(problem)[0]) == ("regression", (16, (10, 1), (1,)))


def test_classes_that_change_within_a_group(tmp_path):
    rows = gestures(lambda g, t: ["walk", "run"][t // 5])
    problem = read_problem(write(tmp_path / "g.csv", "subject,t,ax,activity", rows))
    assert (problem.kind, shapes(problem)[0]) == ("tagging", (16, (10, 1), (10,)))
    assert set(problem.floor) == {"majority tag", "nearest mean input"}


def test_words_with_tags(tmp_path):
    rows = [[s, word, word[0]] for s in range(30) for word in ("the", "cat", "saw", "the", f"w{s}")]
    problem = read_problem(write(tmp_path / "w.csv", "sentence_id,word,tag", rows))
    assert (problem.kind, problem.symbols, problem.features) == ("tagging", 4, 1)  # the, cat, saw, and all rare words
    assert problem.reading["alphabet"] == ["cat", "saw", "the"]
    assert problem.train.inputs[0].tolist() == [2, 0, 1, 2, 3]


def test_events_of_users(tmp_path):
    rows = [[user, "abc"[i % 3]] for user in range(10) for i in range(12)]
    problem = read_problem(write(tmp_path / "e.csv", "user_id,event", rows), kind="symbols")
    assert (problem.kind, problem.outputs, shapes(problem)[0]) == ("symbols", 4, (6, (11,), (11,)))
    assert torch.equal(problem.train.inputs[0][1:], problem.train.targets[0][:-1])


def test_a_lone_column(tmp_path):
    """Texts are symbols, also with times; whole numbers are numbers."""
    events = read_problem(write(tmp_path / "e.csv", "date,event", [[day(i), "abc"[i % 3]] for i in range(90)]))
    assert (events.kind, events.outputs, events.reading["time"]) == ("symbols", 4, "date")
    counts = read_problem(write(tmp_path / "c.csv", "rainy days", [[i % 5] for i in range(90)]))
    assert guess(counts, "kind") == 'kind: forecasting, since "rainy days" is numeric, and there are no other inputs'


def test_each_row_is_a_series(tmp_path):
    rows = [[*np.round(DRAW.normal(size=8), 3), i % 3] for i in range(60)]
    head = ",".join(f"pixel{i}" for i in range(8)) + ",digit"
    problem = read_problem(write(tmp_path / "digits.csv", head, rows))
    assert (problem.kind, shapes(problem)[0]) == ("classification", (42, (8, 1), ()))
    assert len(problem.reading["means"]) == 1
    assert "scaled together" in guess(problem, "sequences")


def test_each_row_of_unlike_columns_is_scaled_by_column(tmp_path):
    rows = [[*DRAW.normal(size=3) * (1, 100, 10000), "xy"[i % 2]] for i in range(60)]
    problem = read_problem(write(tmp_path / "iris.csv", "a,b,c,kind", rows))
    steps = torch.stack(problem.train.inputs)
    assert steps.shape == (44, 3, 1)
    torch.testing.assert_close(steps.std(0, correction=0), torch.ones(3, 1))


def test_each_row_is_a_text(tmp_path):
    rows = [["ham" if i % 2 else "spam", f"message number {i} " * (1 + 40 * (i == 7))] for i in range(60)]
    problem = read_problem(write(tmp_path / "sms.csv", "label,text", rows))
    assert (problem.kind, problem.reading["classes"]) == ("classification", ["ham", "spam"])
    assert guess(problem, "sequences") == 'sequences: the characters of "text" in each row; only the first 512 of each'
    text = "".join(problem.reading["alphabet"][i] for i in problem.train.inputs[0])
    assert text.startswith("message number ")


def test_kind_can_be_told(tmp_path):
    rows = [[np.sin(i), "ab"[i // 5 % 2]] for i in range(100)]
    path = write(tmp_path / "s.csv", "v,label", rows)
    assert read_problem(path).kind == "classification"
    tagged = read_problem(path, kind="tagging")
    assert (tagged.kind, shapes(tagged)[2]) == ("tagging", (1, (15, 1), (15,)))


def test_arrays(tmp_path):
    x = DRAW.normal(size=(40, 12, 3))
    np.savez(tmp_path / "c.npz", x=x, y=np.arange(40) % 2)
    assert shapes(read_problem(tmp_path / "c.npz"))[0] == (28, (12, 3), ())
    np.save(tmp_path / "f.npy", x)
    forecast = read_problem(tmp_path / "f.npy")
    assert (forecast.kind, forecast.outputs, shapes(forecast)[0]) == ("forecasting", 3, (28, (11, 3), (11, 3)))
    assert read_problem((x, DRAW.normal(size=(40, 2)))).outputs == 2
    stepwise = read_problem({"x": x, "y": DRAW.normal(size=(40, 12))})
    assert (stepwise.kind, shapes(stepwise)[0]) == ("forecasting", (28, (12, 3), (12, 1)))
    tagged = read_problem((DRAW.integers(0, 5, (40, 12)), DRAW.integers(0, 3, (40, 12))))
    assert (tagged.kind, tagged.symbols, tagged.outputs) == ("tagging", 6, 3)
    assert read_problem(torch.randint(5, (40, 12))).kind == "symbols"
    assert shapes(read_problem(DRAW.normal(size=300)))[2][1] == (22, 1)  # one series: 45 rows, 44 steps in two windows
    assert read_problem(DRAW.normal(size=(300, 4))).features == 4
    assert read_problem(DRAW.integers(0, 255, (60, 12)).astype(np.uint8)).kind == "forecasting"


def test_sequences_of_unequal_length():
    x = [DRAW.normal(size=(3 + i % 4, 2)) for i in range(40)]
    problem = read_problem((x, ["a", "b"] * 20))
    assert {len(x) for x in problem.train.inputs} == {3, 4, 5, 6}
    texts = read_problem((["acgt" * (1 + i % 3) for i in range(40)], [i % 2 for i in range(40)]))
    assert (texts.symbols, {len(x) for x in texts.train.inputs}) == (5, {4, 8, 12})


def test_columns_in_memory():
    columns = {"date": np.arange("2020-01", "2020-04", dtype="datetime64[D]"), "v": list(np.sin(np.arange(91)))}
    problem = read_problem(columns)
    assert (problem.kind, problem.reading["time"], problem.reading["target"]) == ("forecasting", "date", "v")


def test_text(tmp_path):
    (tmp_path / "book.txt").write_text("Ein schöner Tag. " * 100)
    problem = read_problem(tmp_path / "book.txt")
    assert (problem.kind, problem.metric) == ("symbols", "bits per symbol")
    assert problem.symbols == problem.outputs == len(set("Ein schöner Tag. ")) + 1
    text = "".join(problem.reading["alphabet"][i] for i in problem.train.inputs[0])
    assert text == ("Ein schöner Tag. " * 100)[: len(text)]
    assert guess(problem, "symbols") == "symbols: characters, since the encoding is UTF-8"


def test_text_of_unknown_encoding_is_bytes(tmp_path):
    (tmp_path / "book.txt").write_bytes(("Ein schöner Tag. " * 100).encode("latin-1"))
    problem = read_problem(tmp_path / "book.txt")
    assert guess(problem, "symbols") == "symbols: bytes, since the encoding is not UTF-8"
    assert "\xf6" in problem.reading["alphabet"]


def test_folder_of_texts(tmp_path):
    for label in ("neg", "pos"):
        (tmp_path / label).mkdir()
        for i in range(12):
            (tmp_path / label / f"{i}.txt").write_text(f"{label} " * (i + 200 * (i == 3) + 1))
    problem = read_problem(tmp_path)
    assert (problem.kind, problem.reading["classes"]) == ("classification", ["neg", "pos"])
    assert max(len(x) for part in (problem.train, problem.validation, problem.test) for x in part.inputs) == 512
    assert problem.floor == {"majority class": 0.5, "bag of inputs": 0.0}


def test_parquet_without_its_reader(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadDataError, match=r"a\.parquet needs pyarrow, which is not installed: pip install pyarrow"):
        read_problem(tmp_path / "a.parquet")


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="reading Parquet needs pyarrow, which no extra installs")
    import pyarrow.parquet as parquet

    when = [datetime.datetime(2020, 1, 1) + datetime.timedelta(hours=i) for i in range(100)]
    columns = {"when": when, "shop": pa.array(["a", "b"] * 50).dictionary_encode(), "lists": [[1]] * 100}
    parquet.write_table(pa.table({**columns, "v": DRAW.normal(size=100)}), tmp_path / "a.parquet")
    problem = read_problem(tmp_path / "a.parquet")
    assert (problem.kind, problem.reading["time"]) == ("forecasting", "when")
    assert problem.reading["columns"] == ["v", "shop=a", "shop=b"]
    assert guess(problem, "columns") == "columns: without lists, which hold neither numbers, dates nor texts"
    parquet.write_table(pa.table({"v": [None if i == 6 else float(i) for i in range(100)]}), tmp_path / "b.parquet")
    with pytest.raises(BadDataError, match=r'b\.parquet, row 7, column "v": the value is missing'):
        read_problem(tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 or not" * 9)
    with pytest.raises(BadDataError, match=r"c\.parquet is not a Parquet file that can be read"):
        read_problem(tmp_path / "c.parquet")


def test_only_the_first_part_of_a_large_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "MOST_VALUES", 240)
    problem = read_problem(write(tmp_path / "load.csv", "date,temp,load", load_rows()))
    assert guess(problem, "rows") == "rows: only the first 80, since the file holds more than 240 values"
    assert "56 / 12 / 12 rows" in guess(problem, "parts")


def replaced(row: int, column: int, cell: Any) -> list[list[Any]]:
    rows = load_rows()
    rows[row - 2][column] = cell
    return rows


ROWS = {
    "text": (replaced(17, 1, "n/a"), {}, r'load\.csv, row 17, column "temp": "n/a" is not a number; fill or remove'),
    "empty": (replaced(17, 2, ""), {}, r'load\.csv, row 17, column "load": the cell is empty'),
    "nan": (replaced(17, 2, "nan"), {}, r'row 17, column "load": the value is missing'),
    "inf": (replaced(17, 2, "-inf"), {}, r'row 17, column "load": -inf is not finite'),
    "later": (replaced(90, 1, "?"), {}, r'row 90, column "temp": "\?" is not a number'),
    "date": (replaced(17, 0, "soon"), {}, r'row 17, column "date": "soon" is not a date of the same form'),
    "twice": (replaced(17, 0, day(3)), {}, r'row 17, column "date": 2020-01-04 .* occurs twice, first in row 5'),
    "unequal": (replaced(17, 2, "1,2"), {}, r"load\.csv, row 17 has 4 cells, but row 1 has 3; all rows must"),
    "constant": ([[a, b, 3] for a, b, _ in load_rows()], {}, r'target "load" is 3 in all of the training part'),
    "few": (load_rows(20), {}, r"load\.csv has 20 rows; at least 50 are needed"),
    "none": ([], {}, r"load\.csv has a header and no rows"),
    "misspelt": (load_rows(), {"target": "laod"}, r'no column "laod" for --target; did you mean "load"\?'),
    "missing": (load_rows(), {"group": "zzz"}, r'no column "zzz" for --group; it has: date, temp, load'),
    "inputs": (load_rows(), {"inputs": ["tmp"]}, r'no column "tmp" for --inputs; did you mean "temp"'),
    "string": (load_rows(), {"inputs": "temp"}, r"inputs is 'temp'; pass a list"),
    "roles": (load_rows(), {"time": "date", "group": "date"}, r'--time and --group both name "date"'),
    "input": (load_rows(), {"time": "date", "inputs": ["date"]}, r'"date" is --time, so it cannot be among --inputs'),
    "kind": (load_rows(), {"kind": "x"}, r"kind is 'x'; it must be one of classification, regression"),
    "classes": (load_rows(), {"kind": "tagging"}, r'"load" has 100 different numbers .*; tagging needs classes'),
    "money": (
        [[a, b, f"${1000 + i:,}".join('""')] for i, (a, b, _) in enumerate(load_rows())],
        {},
        r'row 2, column "load": "\$1,000" is not a plain number, such as 1234\.5 \(100 such cells\); write all as such',
    ),
    "thousands": ([[a, b, f"1.{100 + b},50".join('""')] for a, b, _ in load_rows()], {}, r'"1\.100,50" is not a plain'),
    "percent": ([[a, f"{b}%", c] for a, b, c in load_rows()], {}, r'column "temp": "0%" is not a plain number'),
    "number": (load_rows(), {"target": "date", "kind": "forecasting"}, r'row 2, column "date": "2020.*" is not a'),
    "no time": ([["a", b, c] for _, b, c in load_rows()], {"time": "date"}, r'row 2.*"a" is neither a number nor'),
    "leak": (
        [[a, b, "xy"[i % 2]] for i, (a, b, _) in enumerate(load_rows())],
        {"target": "load", "inputs": ["load"]},
        r'"load" is the target, so it cannot be among --inputs',
    ),
    "texts": ([[f"a{i}", f"b{i}", f"c{i}"] for i in range(60)], {}, r'"load" has 60 different texts in 60 rows'),
    "no inputs": ([[f"a{i}", f"b{i}", "xy"[i % 2]] for i in range(60)], {}, r"has no input columns beside \"load\""),
    "varies": (
        [[i // 5, i, i % 2] for i in range(100)],
        {"group": "date", "kind": "classification"},
        r'row 3, column "load": 1 differs from row 2 of the same group \(0\); classification needs one value for each',
    ),
    "one class": ([["a", i % 7, "x"] for i in range(60)], {"kind": "classification"}, r"has one class only, 'x'"),
    "rare": ([["a", i % 7, "x" if i else "y"] for i in range(60)], {}, r"class 'y' has 1 sequences; each class needs"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_faults_of_tables(tmp_path, name):
    rows, options, message = ROWS[name]
    with pytest.raises(BadDataError, match=message) as caught:
        read_problem(write(tmp_path / "load.csv", "date,temp,load", rows), **options)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_a_bad_column_that_is_not_used_is_no_fault(tmp_path):
    path = write(tmp_path / "load.csv", "date,temp,load", replaced(17, 1, "n/a"))
    problem = read_problem(path, target="load", inputs=["load"])
    assert problem.reading["columns"] == ["load"]


FILES = {
    "a.csv": (b"", r"a\.csv is empty; give a CSV, Parquet"),
    "b.csv": (b"\n\n", r"b\.csv is empty"),
    "c.csv": (bytes(range(256)), r"c\.csv is binary, in no format that is known"),
    "d.csv": (b"a,b\n1,2\n1,\xe9\n", r"d\.csv, row 3: byte 0xe9 is not UTF-8; convert"),
    "e.csv": (b"a,a\n1,2\n", r'e\.csv has two columns "a"'),
    "f.csv": (b"a,b\n" + b"1,2\n" * 5 + b'"1,2\n' + b"1,2\n" * 40000, r"f\.csv, row 7: field larger.*not closed"),
    "g.csv": (b"a,b\n1,2\n\n1,2\n", r"g\.csv, row 3 is blank; remove it"),
    "h.csv": (b"\xff\xfea", r"h\.csv begins as UTF-16 but is damaged"),
    "i.xlsx": (bytes(100), r"i\.xlsx: files that end in \.xlsx are not read; save the sheet as CSV"),
    "i.json": (b'{"a": 1}\n' * 60, r"i\.json: .*; write its rows as CSV"),
    "i.csv.gz": (bytes(100), r"i\.csv\.gz: .*; unpack it first"),
    "i.dat": (bytes(100), r"i\.dat is binary, in no format that is known"),
    "i.csv": (b"a,b\n" + b"1,2\n" * 60 + b'"1,2\n' + b"1,2\n" * 60, r"row 62 has 1 cell, .* mark that is not closed"),
    "j.txt": (b"short", r"j\.txt has 5 symbols; at least 50 are needed"),
    "k.txt": (b"a" * 500, r"k\.txt has fewer than 2 symbols that occur twice"),
    "l.npz": (b"hello", r"l\.npz was not written by numpy"),
    "m.npz": (b"PK\3\4hello", r"m\.npz is damaged"),
    "n.npy": (b"\x93NUMPYhello", r"n\.npy is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_faults_of_files(tmp_path, name):
    content, message = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadDataError, match=message):
        read_problem(tmp_path / name)


def test_faults_of_paths(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, message in {
        tmp_path / "none.csv": r"none\.csv cannot be read: No such file",
        tmp_path / "pipe": "pipe is not a regular file",
        Path("https://example.org/a.csv"): "a.csv is an address; download the file",
        Path("/dev/zero"): "/dev/zero is not a regular file",
        tmp_path: "has no classes: it must have a subfolder of text files for each class",
    }.items():
        with pytest.raises(BadDataError, match=message):
            read_problem(path)


def test_faults_of_folders(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(BadDataError, match="is divided into train, which are not classes"):
        read_problem(tmp_path)
    (tmp_path / "pos").mkdir()
    with pytest.raises(BadDataError, match="the class pos has no files"):
        read_problem(tmp_path)
    (tmp_path / "pos" / "a.txt").write_text(" ")
    (tmp_path / "train" / "a.txt").write_text("text")
    with pytest.raises(BadDataError, match="a file of the class pos is empty"):
        read_problem(tmp_path)
    with pytest.raises(BadDataError, match="can only be classified; not tagging"):
        read_problem(tmp_path, kind="tagging")
    os.mkfifo(tmp_path / "pos" / "pipe")
    with pytest.raises(BadDataError, match="pipe is not a regular file"):
        read_problem(tmp_path)


def test_options_that_files_without_columns_refuse(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    np.save(tmp_path / "a.npy", np.ones((9, 9)))
    with pytest.raises(BadDataError, match=r"a\.txt is read as text.*no columns for --target to name"):
        read_problem(tmp_path / "a.txt", target="x")
    with pytest.raises(BadDataError, match=r"a\.txt is read as text, of which only the next symbol"):
        read_problem(tmp_path / "a.txt", kind="tagging")
    with pytest.raises(BadDataError, match=r"a\.npy holds arrays, so there are no columns for --time and --group"):
        read_problem(tmp_path / "a.npy", time="a", group="b")
    with pytest.raises(BadDataError, match="a folder of texts"):
        read_problem(tmp_path, inputs=["a"])


def test_python_objects_are_not_loaded(tmp_path):
    for name, save in {"a.npz": np.savez, "a.npy": np.save}.items():
        save(tmp_path / name, np.array([None, 1], dtype=object)) if name == "a.npy" else save(
            tmp_path / name, x=np.array([None, 1], dtype=object)
        )
        with pytest.raises(BadDataError, match="holds Python objects, which are not loaded"):
            read_problem(tmp_path / name)
    np.savez(tmp_path / "b.npz", a=np.ones(3))
    with pytest.raises(BadDataError, match=r"b\.npz must hold an array x, and may hold y; it holds: a"):
        read_problem(tmp_path / "b.npz")


X, Y = DRAW.normal(size=(40, 10, 2)), np.arange(40) % 2
HOLE = np.where(np.arange(800).reshape(X.shape) == 69, np.nan, X)
ARRAYS = {
    "length": ((X, Y[:30]), {}, "y has 30 targets, but x has 40 sequences"),
    "axes": ((X[None], Y[:1]), {}, r"x\[0\] has shape \(40, 10, 2\); it must be"),
    "nan": ((HOLE, Y), {}, r"x\[3\]\[4, 1\] is nan; fill or remove it"),
    "targets": ((X, np.where(Y, np.nan, 0.5)), {}, r"y\[1\] is nan \(20 such values in it\)"),
    "one class": ((X, 0 * Y), {}, "has one class only, 0"),
    "few": ((X[:5], Y[:5]), {}, "has 5 sequences; at least 20 are needed"),
    "no y": (X, {"kind": "classification"}, "has no array y; classification needs a target"),
    "no steps": ((X, Y), {"kind": "tagging"}, r"y has shape \(40,\), which fits classification or regression"),
    "no symbols": (X, {"kind": "symbols"}, "x holds numbers, but symbols must be integers"),
    "features": (([X[0], X[1, :, :1]], [0, 1]), {}, r"x\[1\] has shape \(10, 1\), but x\[0\] has \(10, 2\)"),
    "many": ((X, np.arange(40)), {"kind": "classification"}, "y has 40 different values in 40"),
    "texts": ((X, ["a"] * 40), {"kind": "regression"}, "y holds texts; regression needs numbers"),
    "empty": ((np.zeros((0, 3)), np.zeros(0)), {}, r"x has shape \(0, 3\), which is empty"),
    "constant": (np.ones((30, 20, 2)), {}, r'target "x\[0\]" is 1 in all of the training part'),
    "short": (X[:, :1], {}, "a sequence has 1 step; forecasting needs at least 2"),
    "short text": (["a", "ab"] * 20, {}, "a sequence has 1 symbol"),
    "complex": (X + 1j, {}, "x has dtype complex128; it must hold real numbers"),
    "nothing": (None, {}, "x has dtype object; it must hold real numbers"),
    "ragged": ([[1, [2]], [1]], {}, "x.* has rows of unequal lengths"),
    "rows": ({"a": [1, 2], "b": [1]}, {}, 'column "b" has 1 rows, but column "a" has 2'),
    "no rows": ({"a": []}, {}, "data has no rows"),
    "matrix": ({"a": X[0], "b": [1]}, {}, r'column "a" has shape \(10, 2\); a column must be \(rows,\)'),
    "huge": (X * 1e300, {}, "has numbers too large to square"),
    "option": (X, {"target": "a"}, "data holds arrays, so there are no columns for --target"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_faults_of_arrays(name):
    data, options, message = ARRAYS[name]
    with pytest.raises(BadDataError, match=message):
        read_problem(data, **options)
