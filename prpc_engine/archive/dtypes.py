"""numpy's dtypes as MessagePack values, and back.

    dtype                            written as
    numbers, text, times, void       `dtype.str`: "<f4", "|S7", "<M8[ns]"
    of ml_dtypes (bfloat16, float8)  their name, which has no byte order: little-endian
    records                          [item size, whether aligned, [[field's name, offset, dtype],
                                     ...]]
    an array in a record's field     [dtype, shape]

Titles and metadata of dtypes are no part of a value and are refused, and dropped. Dtypes of Python
objects have no bytes.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prpc_engine.archive.wire import ArchiveError

Spec = Any  # str | list: what the table says
# numpy's own: `dtype.str` says all there is to say about them. Other packages' are void or worse to
# it.
_NAMED_BY_STR = frozenset(np.dtype(code).num for code in "?bhilqBHILQefdgFDGSUmM")
_VOID = np.dtype("V").num
# Those of ml_dtypes that fill whole bytes in memory. A list, so that a name from the wire reaches
# nothing else in that package.
ML_DTYPES = frozenset(
    {
        "bfloat16",
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int1",
        "int2",
        "int4",
        "uint1",
        "uint2",
        "uint4",
    }
)
# All that `dtype.str` says of those, looked at before numpy reads it: its parser takes far more,
# some of it with a warning, and "<M8[s/0]" ends the process with SIGFPE. Multiples of a unit of
# time are 32 bits there: nine digits cannot overflow.
_STRING = re.compile(
    r"\|b1|[<>|][iu][1248]|[<>]f(2|4|8|16)|[<>]c(8|16|32)|[<>|][SUV][0-9]{1,10}"
    r"|[<>][mM]8(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
ITEM_BYTES_MAX = (1 << 31) - 1  # numpy's own bound, which it does not hold itself to everywhere
FIELDS_MAX = 1024  # of one record, a name each
NESTING_MAX = 8  # of records in records
# Items of no bytes (records without fields, "V0") cost the sender nothing: so many of them, and no
# more, can be looped through.
EMPTY_ITEMS_MAX = 1 << 20
# whose items check_items() looks at: all others mean something whatever their bits
CHECKED_KINDS = "bUV"
# dtypes that one program uses; a peer that invents more is served without the cache
_CACHED_MAX = 256

# What is looked up for each array; only this file adds to them.
specs: dict[np.dtype[Any], str] = {}
# of those in _dtypes: items of some bytes each, whose bits all mean something
unchecked: dict[Spec, np.dtype[Any]] = {}
_dtypes: dict[str, np.dtype[Any]] = {}


def spec_of(dtype: np.dtype[Any]) -> Spec:
    """What the table says. Raises ValueError with the reason when the dtype has no plain bytes."""
    spec = specs.get(dtype)  # numpy takes 400 ns to make the text
    if spec is not None:
        return spec
    if dtype.num in _NAMED_BY_STR:
        if not _STRING.fullmatch(dtype.str):
            raise ValueError("its unit of time is too large: convert it")
        if len(specs) < _CACHED_MAX:
            specs[dtype] = dtype.str
        return dtype.str
    if dtype.num == _VOID:
        return _spec_of_void(dtype)
    if dtype.type.__module__ == "ml_dtypes" and dtype.name in ML_DTYPES:
        if not dtype.isnative:
            raise ValueError("only native byte order is known of the dtypes of ml_dtypes")
        return dtype.name
    raise ValueError("such arrays have no plain bytes: convert it to numbers, or send a list")


def _spec_of_void(dtype: np.dtype[Any]) -> Spec:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [spec_of(base), list(shape)]
    if dtype.names is None:
        return dtype.str
    if dtype.hasobject:
        raise ValueError(
            "its records hold Python objects, which have no plain bytes: "
            "send the fields as arrays and lists"
        )
    if len(dtype.names) > FIELDS_MAX:
        raise ValueError(
            f"its records have {len(dtype.names)} fields, at most {FIELDS_MAX} are allowed"
        )
    assert dtype.fields is not None
    fields = []
    for name in dtype.names:
        field = dtype.fields[name]
        if len(field) > 2:
            raise ValueError(
                f"its field {name!r} has a title, which cannot be sent: "
                "leave the titles out of the dtype"
            )
        fields.append([name, field[1], spec_of(field[0])])
    return [dtype.itemsize, dtype.isalignedstruct, fields]


def dtype_of(spec: Spec, depth: int = 0) -> np.dtype[Any]:
    """The dtype. Raises ArchiveError for what spec_of() never wrote."""
    if type(spec) is str:
        return _dtypes.get(spec) or _dtype_of_name(spec)
    if type(spec) is not list or depth > NESTING_MAX:
        raise ArchiveError(
            f"{str(spec)[:100]!r} is no dtype, or is nested deeper than {NESTING_MAX} records"
        )
    try:
        # outside of a record numpy has made it part of the array's shape
        if len(spec) == 2 and depth:
            base, shape = dtype_of(spec[0], depth + 1), _extents(spec[1])
            if math.prod(shape) * base.itemsize > ITEM_BYTES_MAX:
                raise ArchiveError(
                    f"array of shape {shape} and dtype {base} in a record, "
                    f"at most {ITEM_BYTES_MAX} bytes allowed"
                )
            return np.dtype((base, shape))
        size, aligned, fields = spec
        if not 0 <= size <= ITEM_BYTES_MAX or len(fields) > FIELDS_MAX:
            raise ArchiveError(
                f"record of {size} bytes, {len(fields)} fields; at most {ITEM_BYTES_MAX}, "
                f"{FIELDS_MAX} are allowed"
            )
        names, offsets, inner = zip(*fields, strict=True) if fields else ((), (), ())
        formats = [dtype_of(one, depth + 1) for one in inner]
        for name, offset, one in zip(names, offsets, formats, strict=True):
            # numpy adds them up in 32 bits, and reads what lies there
            if not 0 <= offset <= size - one.itemsize:
                raise ArchiveError(
                    f"field {str(name)[:100]!r} of {one.itemsize} bytes at {offset} in a record "
                    f"of {size}"
                )
        described = {
            "names": list(names),
            "formats": formats,
            "offsets": list(offsets),
            "itemsize": size,
        }
        return np.dtype(described, align=bool(aligned))  # type: ignore[call-overload, no-any-return]
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise ArchiveError(f"dtype {str(spec)[:100]!r}: {error}") from error


def _extents(shape: Any) -> tuple[int, ...]:
    if type(shape) is not list or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ArchiveError(f"array of impossible shape {str(shape)[:100]} in a record")
    return tuple(shape)


def _dtype_of_name(name: str) -> np.dtype[Any]:
    if name in ML_DTYPES:
        try:
            import ml_dtypes
        except ImportError as error:
            raise ArchiveError(
                f"dtype {name!r} needs the package ml_dtypes: pip install prpc-engine[ml_dtypes]"
            ) from error
        if not hasattr(ml_dtypes, name):
            raise ArchiveError(
                f"dtype {name!r} is not known to ml_dtypes {ml_dtypes.__version__}: "
                "install a newer one"
            )
        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    else:
        if not _STRING.fullmatch(name):
            raise ArchiveError(f"dtype {name[:100]!r} cannot be sent")
        try:
            dtype = np.dtype(name)
        except (ValueError, TypeError, OverflowError, SyntaxError) as error:
            raise ArchiveError(f"dtype {name!r}: {error}") from error
        if dtype.str != name or dtype.names is not None or dtype.hasobject:
            raise ArchiveError(f"dtype {name!r} is not allowed")
    if len(_dtypes) < _CACHED_MAX:
        _dtypes[name] = dtype
        if dtype.itemsize and dtype.kind not in CHECKED_KINDS:
            unchecked[name] = dtype
    return dtype


def check_items(array: NDArray[Any]) -> None:
    """Refuse an array with items that numpy takes on trust. Raises ArchiveError.

    Items of no bytes: no memory stands for their number. Truth values: numpy counts those of a mask
    by adding their bytes up, and with bytes over 1 it would write past the end of what it selects.
    Text: printing or hashing a record with a code point that is none ends the process.
    """
    dtype = array.dtype
    if not dtype.itemsize:
        if array.size > EMPTY_ITEMS_MAX:
            raise ArchiveError(
                f"array of {array.size} items of no bytes, at most {EMPTY_ITEMS_MAX} allowed"
            )
    elif not array.size:
        return
    elif dtype.kind == "b":
        if array.view(np.uint8).max() > 1:
            raise ArchiveError("array of bool with a byte that is neither 0 nor 1")
    elif dtype.kind == "U":
        points = (
            np.ascontiguousarray(array)
            .reshape(-1)
            .view(np.dtype("u4").newbyteorder(dtype.byteorder))
        )
        if points.max() > sys.maxunicode:
            raise ArchiveError(f"array of text with a character of over {sys.maxunicode:#x}")
    elif dtype.names is not None:
        for name in dtype.names:
            if dtype[name].base.kind in CHECKED_KINDS:
                check_items(array[name])
