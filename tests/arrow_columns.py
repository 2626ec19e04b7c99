"""A table with a column of each kind of Arrow type, each with a null."""

from __future__ import annotations

import uuid
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa

NOON = datetime(2026, 3, 4, 12, 30, 15, 123456)
DAY, SPAN = date(2026, 3, 4), timedelta(days=2, microseconds=7)
POINT = pa.struct([("x", pa.int64()), ("name", pa.string())])
COLUMNS: dict[str, tuple[Any, Any]] = {  # two values and the type
    "int8": ((-128, 127), pa.int8()),
    "int64": ((2**53 + 1, -(2**63)), pa.int64()),
    "uint64": ((2**64 - 1, 0), pa.uint64()),
    "float32": ((0.1, float("inf")), pa.float32()),
    "float64": ((0.1, -0.0), pa.float64()),
    "bool": ((True, False), pa.bool_()),
    "decimal": ((Decimal("12345678901234567890.50"), Decimal("-0.01")), pa.decimal128(30, 2)),
    "date32": ((DAY, date(1, 1, 1)), pa.date32()),
    "date64": ((DAY, date(1969, 12, 31)), pa.date64()),
    "time32": ((time(1, 2, 3), time(0)), pa.time32("s")),
    "time64": ((time(1, 2, 3, 4), time(0)), pa.time64("us")),
    "timestamp_s": ((datetime(9999, 1, 1), datetime(1, 1, 1)), pa.timestamp("s")),
    "timestamp_us": ((NOON, NOON.replace(year=1905)), pa.timestamp("us")),
    "timestamp_ns": ((2**62 + 1, -7), pa.timestamp("ns")),
    "zoned": ((NOON.replace(tzinfo=timezone.utc), 0), pa.timestamp("us", tz="Europe/Berlin")),
    "duration": ((SPAN, -SPAN), pa.duration("us")),
    "duration_ns": ((2**62 + 1, -7), pa.duration("ns")),
    "string": (("text", ""), pa.string()),
    "large_string": (("text", "é\x00"), pa.large_string()),
    "string_view": (("a text of more than twelve bytes", ""), pa.string_view()),
    "binary": ((b"\xff\x00", b""), pa.binary()),
    "large_binary": ((b"\xff\x00", b""), pa.large_binary()),
    "fixed_binary": ((b"abc", b"\x00\x00\x00"), pa.binary(3)),
    "dictionary": (("red", "green"), pa.dictionary(pa.int8(), pa.string())),
    "list": (([1, None, 3], []), pa.list_(pa.int64())),
    "large_list": ((["a", None], []), pa.large_list(pa.string())),
    "fixed_list": (([1, 2], [3, None]), pa.list_(pa.int16(), 2)),
    "list_of_lists": (([[1], None, []], [[2, 3]]), pa.list_(pa.list_(pa.int32()))),
    "struct": (({"x": 2**53 + 1, "name": None}, {"x": None, "name": "b"}), POINT),
    "list_of_structs": (([{"x": 1, "name": "a"}, None], []), pa.list_(POINT)),
    "map": (([("a", 1), ("b", None)], []), pa.map_(pa.string(), pa.int64())),
    "null": ((None, None), pa.null()),
}


def every_type(repeats: int = 1) -> pa.Table:
    """Three rows, or as many times as many; the second has no value. The table and a column have metadata."""
    arrays = {
        name: pa.array([one, None, other] * repeats, kind) for name, ((one, other), kind) in COLUMNS.items()
    }
    ids = [uuid.UUID(int=7).bytes, None, uuid.UUID(int=2**100).bytes] * repeats
    arrays["extension"] = pa.ExtensionArray.from_storage(pa.uuid(), pa.array(ids, pa.binary(16)))
    fields = [pa.field(name, array.type) for name, array in arrays.items()]
    fields[0] = fields[0].with_metadata({"unit": "m"})
    return pa.Table.from_arrays([*arrays.values()], schema=pa.schema(fields, {"made by": "hand"}))
