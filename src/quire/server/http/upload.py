"""Reads an upload, `multipart/form-data` with one file, and writes the file to disk as it comes."""

from collections.abc import AsyncIterable, Callable
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from quire.server.errors import ApiError

MAX_PARTS = 8
MAX_FIELD_BYTES = 512
FORM_BYTES = 64 << 10
"""What an upload may have beside the file."""


class Upload:
    """The fields of one upload. The bytes of its file go where they are wanted, and are nowhere else."""

    def __init__(self, content_type: str, file: BinaryIO, take_room: Callable[[int], None]) -> None:
        """`take_room` is called before bytes of the file are written, and may refuse them."""
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if not boundary:
            raise ApiError(400, "content-type names no boundary", code="invalid_upload")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self._file = file
        self._take_room = take_room
        self._num_parts = 0
        self._header = self._value = b""
        self._name = ""
        self._is_file = self._is_complete = False
        self._data = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part,
                "on_header_field": self._on_header,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header_end,
                "on_part_data": self._on_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    async def read(self, chunks: AsyncIterable[bytes]) -> None:
        """Read all of it; ApiError if it is not a whole upload with a file."""
        try:
            async for chunk in chunks:
                self._parser.write(chunk)
        except FormParserError as error:
            raise ApiError(400, f"this is no multipart/form-data: {error}", code="invalid_upload") from None
        if not self._is_complete or self.filename is None:
            message = "an upload needs a part 'file' that has a name, and an end"
            raise ApiError(400, message, param="file", code="invalid_upload")
        if not self.num_bytes:
            raise ApiError(
                400, "the file is empty: send one request a line, as JSON", param="file", code="invalid_upload"
            )

    # -- what the parser calls ----------------------------------------------------------------------------------------

    def _on_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ApiError(400, f"an upload has at most {MAX_PARTS} parts", code="invalid_upload")
        self._name, self._is_file, self._data = "", False, bytearray()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            self._is_file = self._name == "file"
            if self._is_file:
                if self.filename is not None:
                    raise ApiError(400, "an upload has one file", param="file", code="invalid_upload")
                self.filename = options.get(b"filename", b"upload.jsonl").decode("utf-8", "replace")[:MAX_FIELD_BYTES]
        self._header = self._value = b""

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._take_room(end - start)
            self.num_bytes += end - start
            self._file.write(data[start:end])
            return
        self._data += data[start:end]
        if len(self._data) > MAX_FIELD_BYTES:
            message = f"the field {self._name!r} is longer than {MAX_FIELD_BYTES} bytes"
            raise ApiError(400, message, param=self._name, code="invalid_upload")

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._data.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._is_complete = True
