"""Values as bytes, and back: None, booleans, numbers, texts, numpy arrays, tuples, and dataclasses of a list.

Nothing else can be written or read, and reading executes nothing. Sizes are checked against what is there before memory
is taken for them. Knows no jax.
"""

import math
import struct
from dataclasses import fields
from typing import Any

import numpy as np

from quire.distributed.errors import ChannelError

DTYPES = tuple(map(np.dtype, ("bool", "uint8", "int32", "uint32", "int64", "float32", "float64")))
MAX_DEPTH = 8
"""Of values inside one another."""
MAX_DIMS = 8
_NONE, _FALSE, _TRUE, _INT, _TEXT, _ARRAY, _TUPLE, _RECORD = range(8)
_SIZE, _WORD = struct.Struct("<I"), struct.Struct("<q")
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Codec:
    """Writes and reads values whose dataclasses are among `records`."""

    def __init__(self, *records: type) -> None:
        self._records = [(record, tuple(field.name for field in fields(record))) for record in records]
        self._index = {record: i for i, record in enumerate(records)}

    def encode(self, value: Any) -> bytes:
        """The bytes of a value; TypeError if it, or something in it, is of no kind that is known."""
        pieces: list[bytes] = []
        self._write(value, pieces.append)
        return b"".join(pieces)

    def _write(self, value: Any, put: Any) -> None:
        kind = type(value)
        if value is None:
            put(bytes((_NONE,)))
        elif kind is bool:
            put(bytes((_TRUE if value else _FALSE,)))
        elif kind is np.ndarray:
            shape = struct.pack(f"<{value.ndim}I", *value.shape)
            put(bytes((_ARRAY, _CODES[value.dtype], value.ndim)) + shape)
            put(value.tobytes())
        elif kind in self._index:
            index = self._index[kind]
            put(bytes((_RECORD, index)))
            for name in self._records[index][1]:
                self._write(getattr(value, name), put)
        elif kind is int:
            put(bytes((_INT,)) + _WORD.pack(value))
        elif kind is str:
            text = value.encode()
            put(bytes((_TEXT,)) + _SIZE.pack(len(text)) + text)
        elif isinstance(value, tuple):
            put(bytes((_TUPLE,)) + _SIZE.pack(len(value)))
            for one in value:
                self._write(one, put)
        else:
            raise TypeError(f"a value of type {kind.__name__} cannot be sent")

    def decode(self, data: bytes) -> Any:
        """The value of some bytes; ChannelError if they are those of none."""
        reader = _Reader(data)
        try:
            value = self._read(reader, MAX_DEPTH)
        except (struct.error, UnicodeDecodeError, LookupError, TypeError, ValueError) as error:
            raise ChannelError(f"sent what cannot be read: {error}") from None
        if reader.num_left:
            raise ChannelError(f"sent {reader.num_left} bytes more than a value has")
        return value

    def _read(self, reader: "_Reader", depth: int) -> Any:
        if depth < 0:
            raise ValueError(f"values more than {MAX_DEPTH} deep")
        tag = reader.byte()
        if tag == _ARRAY:
            dtype, num_dims = DTYPES[reader.byte()], reader.byte()
            if num_dims > MAX_DIMS:
                raise ValueError(f"an array of {num_dims} dimensions")
            shape = struct.unpack(f"<{num_dims}I", reader.take(4 * num_dims))
            content = reader.take(math.prod(shape) * dtype.itemsize)
            return np.frombuffer(content, dtype).reshape(shape).copy()  # aligned
        if tag == _RECORD:
            record, names = self._records[reader.byte()]
            return record(**{name: self._read(reader, depth - 1) for name in names})
        if tag == _TUPLE:
            (length,) = _SIZE.unpack(reader.take(4))
            if length > reader.num_left:
                raise ValueError(f"a tuple of {length} values in {reader.num_left} bytes")
            return tuple([self._read(reader, depth - 1) for _ in range(length)])
        if tag == _INT:
            return _WORD.unpack(reader.take(8))[0]
        if tag == _TEXT:
            return str(reader.take(_SIZE.unpack(reader.take(4))[0]), "utf-8")
        return {_NONE: None, _FALSE: False, _TRUE: True}[tag]


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = memoryview(data), 0

    @property
    def num_left(self) -> int:
        return len(self._data) - self._at

    def take(self, length: int) -> memoryview:
        if length > self.num_left:
            raise ValueError(f"{length} bytes where {self.num_left} are left")
        self._at += length
        return self._data[self._at - length : self._at]

    def byte(self) -> int:
        return self.take(1)[0]
