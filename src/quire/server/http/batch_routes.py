"""OpenAI's `/v1/files` and `/v1/batches` over HTTP. A caller sees what was made with its own key, and nothing else."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from quire.server.batches.store import MAX_FILES, StoredFile, Tenant, page_of, write_synced
from quire.server.batches.worker import Batches
from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.http.application import json_response
from quire.server.http.upload import Upload
from quire.server.openai import schema

ReadBody = Callable[[HttpRequest, type[Any]], Awaitable[Any]]
UPLOADS = frozenset({"/v1/files"})
"""Paths to which files are sent."""
DEFAULT_PAGE = 20
MAX_PAGE = 10_000


class BatchRoutes:
    """The routes of files and batches; all of them say so where the server keeps none."""

    def __init__(self, batches: Batches | None, config: ServerConfig, read: ReadBody) -> None:
        """`read` returns the body of a request as a struct."""
        self._batches = batches
        self._config = config
        self._read = read

    def routes(self) -> list[Route]:
        """For the public port."""

        def route(path: str, method: str, answer: Callable[[HttpRequest, Batches], Awaitable[Response]]) -> Route:
            async def endpoint(request: HttpRequest) -> Response:
                return await answer(request, self._found())

            return Route(path, endpoint, methods=[method])

        return [
            route("/v1/files", "POST", self.upload),
            route("/v1/files", "GET", self.files),
            route("/v1/files/{file_id}", "GET", self.file),
            route("/v1/files/{file_id}", "DELETE", self.delete),
            route("/v1/files/{file_id}/content", "GET", self.content),
            route("/v1/batches", "POST", self.create),
            route("/v1/batches", "GET", self.batches),
            route("/v1/batches/{batch_id}", "GET", self.batch),
            route("/v1/batches/{batch_id}/cancel", "POST", self.cancel),
        ]

    def _found(self) -> Batches:
        if self._batches is None:
            message = "this server keeps no files and no batches: it has to be started with --batch-folder FOLDER"
            raise ApiError(404, message, code="no_batch_folder")
        return self._batches

    # -- files --------------------------------------------------------------------------------------------------------

    async def upload(self, request: HttpRequest, batches: Batches) -> Response:
        """`POST /v1/files`: keep a file for a batch."""
        tenant = batches.tenant(request.state.caller)
        if len(tenant.files) >= MAX_FILES:
            message = f"you have {MAX_FILES:,} files, and more are not kept: delete some of them"
            raise ApiError(413, message, code="too_many_files")
        part, taken = tenant.new_part(), 0

        def take_room(num_bytes: int) -> None:
            nonlocal taken
            if taken + num_bytes > self._config.max_batch_file_bytes:
                message = f"the file is larger than {self._config.max_batch_file_bytes:,} bytes"
                raise ApiError(413, message, param="file", code="file_too_large")
            tenant.take_room(num_bytes)
            taken += num_bytes

        try:
            with part.open("wb") as file:
                upload = Upload(request.headers["content-type"], file, take_room)
                await upload.read(request.stream())
                _check_fields(upload.fields)
                await asyncio.to_thread(write_synced, file)
            stored = StoredFile(
                id=f"file-{uuid.uuid4().hex}",
                bytes=upload.num_bytes,
                created_at=int(time.time()),
                filename=upload.filename or "",
                purpose="batch",
            )
            await tenant.add_file(stored, part)
        except BaseException:
            tenant.num_bytes -= taken
            part.unlink(missing_ok=True)
            raise
        return json_response(stored.shown())

    async def files(self, request: HttpRequest, batches: Batches) -> Response:
        """`GET /v1/files`: the caller's files."""
        query = _query(request, "purpose", "order", "after", "limit")
        files = list(batches.tenant(request.state.caller).files.values())
        if purpose := query.get("purpose"):
            files = [file for file in files if file.purpose == purpose]
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order={order!r} must be 'asc' or 'desc'", param="order", code="invalid_value")
        page = page_of(files, after=query.get("after"), limit=_limit(query, MAX_PAGE), newest_first=order == "desc")
        return json_response(page)

    async def file(self, request: HttpRequest, batches: Batches) -> Response:
        """`GET /v1/files/ID`: what is known of a file."""
        _, file = _file(request, batches)
        return json_response(file.shown())

    async def delete(self, request: HttpRequest, batches: Batches) -> Response:
        """`DELETE /v1/files/ID`: forget a file."""
        tenant, file = _file(request, batches)
        tenant.remove_file(file)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: HttpRequest, batches: Batches) -> Response:
        """`GET /v1/files/ID/content`: the bytes of a file."""
        tenant, file = _file(request, batches)
        return FileResponse(tenant.path(file), media_type="application/octet-stream")

    # -- batches ------------------------------------------------------------------------------------------------------

    async def create(self, request: HttpRequest, batches: Batches) -> Response:
        """`POST /v1/batches`: answer the lines of a file."""
        body = await self._read(request, schema.BatchRequest)
        return json_response((await batches.create(request.state.caller, body)).shown())

    async def batches(self, request: HttpRequest, batches: Batches) -> Response:
        """`GET /v1/batches`: the caller's batches."""
        query = _query(request, "after", "limit")
        found = list(batches.tenant(request.state.caller).batches.values())
        return json_response(page_of(found, after=query.get("after"), limit=_limit(query, DEFAULT_PAGE)))

    async def batch(self, request: HttpRequest, batches: Batches) -> Response:
        """`GET /v1/batches/ID`: how far a batch is."""
        tenant = batches.tenant(request.state.caller)
        return json_response(tenant.batch(request.path_params["batch_id"]).shown())

    async def cancel(self, request: HttpRequest, batches: Batches) -> Response:
        """`POST /v1/batches/ID/cancel`: end a batch; its answers so far stay."""
        batch = await batches.cancel(request.state.caller, request.path_params["batch_id"])
        return json_response(batch.shown())


def _file(request: HttpRequest, batches: Batches) -> tuple[Tenant, StoredFile]:
    tenant = batches.tenant(request.state.caller)
    return tenant, tenant.file(request.path_params["file_id"])


def _check_fields(fields: dict[str, str]) -> None:
    if (purpose := fields.pop("purpose", None)) != "batch":
        message = f"purpose={purpose!r} is not supported: 'batch' is the only purpose of a file"
        raise ApiError(400, message, param="purpose", code="invalid_value")
    for name in fields:
        message = f"{name} is not supported: files stay until they are deleted; send file and purpose only"
        raise ApiError(400, message, param=name, code="unsupported_field")


def _query(request: HttpRequest, *names: str) -> dict[str, Any]:
    """The parameters of a request for a list; ApiError for one that there is not."""
    for name in request.query_params:
        if name not in names:
            raise ApiError(400, f"unknown parameter {name!r}; {', '.join(names)} are known", param=name)
    return dict(request.query_params)


def _limit(query: dict[str, Any], default: int) -> int:
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= MAX_PAGE):
        raise ApiError(400, f"limit={text!r} must be 1 to {MAX_PAGE}", param="limit", code="invalid_value")
    return int(text[:9])
