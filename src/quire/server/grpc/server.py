"""The service over gRPC, on a port of its own: see `proto/quire.proto`.

Every method is declared as a stream of messages both ways, whatever the proto says: the bytes are the same, and so a
message is read here, with a time limit, and not by grpc before anybody has looked at the call.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from quire import __version__
from quire.async_llm.origin import Origin
from quire.async_llm.stream import Stream
from quire.async_llm.updates import Update, UpdateBuffer
from quire.server.access import REQUEST_ID, AccessLog, checked_request_id, is_request_id, new_request_id
from quire.server.config import ServerConfig
from quire.server.errors import ApiError, as_api_error
from quire.server.grpc.messages import (
    embed_response,
    embedding_message,
    parse,
    read_embed_request,
    read_request,
    response_message,
    update_message,
)
from quire.server.grpc.proto import quire_pb2 as pb
from quire.server.keys import Caller, Keys
from quire.server.logs import log_for
from quire.server.openai import schema
from quire.server.openai.embeddings import parse_embeddings
from quire.server.openai.parse import parse_chat, parse_completion
from quire.server.service import Service

NAME = pb.DESCRIPTOR.services_by_name["Quire"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
PUBLIC = frozenset({f"/{HEALTH}/Check", f"/{HEALTH}/Watch"})
"""Methods that need no key."""
STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
}
MAX_METADATA_BYTES = 16 << 10
MAX_WATCHERS = 64
"""Of health at once: watching needs no key, and must not use up the calls of those who have one."""
NUM_SPARE = 8 + MAX_WATCHERS
"""Calls beyond `max_connections` that may be open, for health."""
WATCH_EVERY_S = 0.25
KEEPALIVE_S = 60
IDLE_S = 600
"""For which a connection may be open without a call; clients open another one by themselves."""
AGE_S = 3600
"""After which a connection takes no more calls; those it has may take as long as any."""
STOP_S = 2.0
MAX_OPTION = (1 << 31) - 1

Call = grpc.aio.ServicerContext
Method = Callable[[Any, Call, Caller], Awaitable[None]]


class GrpcServer:
    """The gRPC server of one port, which is bound when this is made and served from `start` on."""

    def __init__(self, config: ServerConfig, keys: Keys, access: AccessLog) -> None:
        self._config = config
        self._auth = AuthInterceptor(keys, access)
        # One connection carries many calls, where one of HTTP/1.1 carries one: the same number bounds both.
        self._server = grpc.aio.server(
            interceptors=[self._auth],
            options=_options(config),
            maximum_concurrent_rpcs=config.max_connections + NUM_SPARE,
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{config.grpc_port}")
        except RuntimeError:
            raise ValueError(f"--grpc-port {config.grpc_port} on {config.host} cannot be listened on") from None
        self.address = f"{host}:{self.port}"

    async def start(self, service: Service) -> None:
        """Serve calls from now on."""
        for name, calls in (
            (NAME, Methods(service, self._config, self._auth)),
            (HEALTH, Health(service, self._config, self._auth)),
        ):
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, calls.handlers()),))
        await self._server.start()

    async def stop(self) -> None:
        """Close the port; clients have a moment to read what has been sent."""
        await self._server.stop(STOP_S)


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", config.max_connections + NUM_SPARE),
        ("grpc.max_allowed_incoming_connections", config.max_connections + NUM_SPARE),
        ("grpc.server_handshake_timeout_ms", config.read_timeout_s * 1000),
        ("grpc.max_connection_idle_ms", IDLE_S * 1000),
        ("grpc.max_connection_age_ms", AGE_S * 1000),
        ("grpc.max_connection_age_grace_ms", config.request_timeout_s * 1000),
        # A peer that is gone without a word is found out, and its requests end.
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", config.read_timeout_s * 1000),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message may not become a large one
        ("grpc.so_reuseport", 0),  # a port that is taken is an error
    ]
    return [(name, min(value, MAX_OPTION)) for name, value in options]


# -- authentication ---------------------------------------------------------------------------------------------------


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid key, to methods that do not exist too: nobody learns which ones do.

    Without keys the port is on loopback. Web pages, which HTTP has to refuse there, cannot speak gRPC.
    """

    def __init__(self, keys: Keys, access: AccessLog) -> None:
        self._keys = keys
        self.access = access
        self._refusing = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The handler of a method, or one that refuses the call."""
        details: Any = handler_call_details
        if details.method not in PUBLIC and self.find(details.invocation_metadata) is None:
            caller = Caller(request_id=new_request_id())
            status = grpc.StatusCode.UNAUTHENTICATED.name
            self.access.end("grpc", time.perf_counter(), "none", status, "invalid_api_key", caller)
            return self._refusing
        handler = await continuation(handler_call_details)
        if handler is None:  # there is no such method
            found = self.find(details.invocation_metadata) or Caller()
            caller, status = replace(found, request_id=new_request_id()), grpc.StatusCode.UNIMPLEMENTED.name
            self.access.end("grpc", time.perf_counter(), "none", status, "unknown_method", caller)
        return handler

    def find(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller | None:
        """The caller that a call's metadata has a valid key of; None if it has none."""
        if not len(self._keys):
            return self._keys.everyone
        given = [str(value) for name, value in metadata or () if name == "authorization"]
        return self._keys.find_bearer(given[0]) if len(given) == 1 else None


def _request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return the id that a call's metadata gives it."""
    return next((str(value) for name, value in metadata or () if name == REQUEST_ID), None)


async def _refuse(requests: AsyncIterator[bytes], call: Call) -> None:
    text = "no valid API key: send it as metadata, 'authorization: Bearer KEY'"
    await call.abort(grpc.StatusCode.UNAUTHENTICATED, text)


# -- one call ---------------------------------------------------------------------------------------------------------


class Calls:
    """Base of the services: how a call is read, responded to and logged."""

    def __init__(self, config: ServerConfig, auth: AuthInterceptor) -> None:
        self._config = config
        self._auth = auth
        self._num_open = 0
        """Calls to methods that need a key."""

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """The handlers of the service's methods, by name."""
        raise NotImplementedError

    def _handler(self, path: str, kind: type[Message], method: Method) -> grpc.RpcMethodHandler:
        async def handle(requests: AsyncIterator[bytes], call: Call) -> None:
            start, code, reason = time.perf_counter(), grpc.StatusCode.OK, None
            metadata: Any = call.invocation_metadata()
            known, given = self._auth.find(metadata), _request_id(metadata)
            is_good = given is not None and is_request_id(given)
            caller = replace(known or Caller(), request_id=given if is_good else new_request_id())
            state = {"caller": caller}
            log_for(state)
            call.set_trailing_metadata(((REQUEST_ID, caller.request_id),))
            self._num_open += path not in PUBLIC
            try:
                self._check_open_calls()
                if known is None and path not in PUBLIC:
                    raise ApiError(401, "no valid API key", code="invalid_api_key")
                if given is not None:
                    checked_request_id(given)
                message = await self._read(kind, call)
                if isinstance(message, pb.GenerateRequest) and given is None and is_request_id(message.request_id):
                    state["caller"] = replace(caller, request_id=message.request_id)
                    call.set_trailing_metadata(((REQUEST_ID, message.request_id),))
                await method(message, call, state["caller"])
            except (asyncio.CancelledError, grpc.aio.BaseError):  # the client is gone, or the server
                code, reason = grpc.StatusCode.CANCELLED, "cancelled"
                raise
            except Exception as error:
                shown = as_api_error(error)
                code, reason = STATUS.get(shown.status, grpc.StatusCode.INTERNAL), shown.reason
                await self._fail(call, shown, code, state["caller"].request_id)
            finally:
                self._num_open -= path not in PUBLIC
                self._auth.access.end("grpc", start, path, code.name, reason, state["caller"])

        return grpc.stream_stream_rpc_method_handler(handle)

    def _check_open_calls(self) -> None:
        """Raise ApiError if more calls are open than may be; what grpc itself refuses is not counted."""
        if self._num_open > (most := self._config.max_connections):
            message = f"{most} calls are open (--max-connections), and no more may be"
            raise ApiError(429, message, code="overloaded", headers={"Retry-After": "1"}, reason="max_connections")

    async def _read(self, kind: type[Message], call: Call) -> Message:
        try:
            async with asyncio.timeout(self._config.read_timeout_s):
                data = await call.read()
        except TimeoutError:
            raise ApiError(408, f"the message took more than {self._config.read_timeout_s} s") from None
        if data is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
            raise ApiError(400, f"the call has no {kind.DESCRIPTOR.full_name}", code="invalid_message")
        return parse(kind, data)

    async def _write(self, call: Call, message: Message) -> None:
        """Send a message; returns when the client's flow control has let it through."""
        try:
            async with asyncio.timeout(self._config.write_timeout_s):
                await call.write(message.SerializeToString())
        except TimeoutError:
            raise ApiError(499, f"nothing was read for {self._config.write_timeout_s} s", code="cancelled") from None

    async def _fail(self, call: Call, error: ApiError, code: grpc.StatusCode, request_id: str) -> None:
        trailing = [(REQUEST_ID, request_id)]
        trailing += [(name.lower(), value) for name, value in error.headers.items()]
        trailing += [
            (name, value) for name, value in (("quire-field", error.param), ("quire-code", error.code)) if value
        ]
        # A client that does not read does not get the status either. The request has ended; its stream stays open until
        # its connection ends, and counts as a call.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.write_timeout_s):
                await call.abort(code, error.message, tuple(trailing))


# -- health -----------------------------------------------------------------------------------------------------------


class Health(Calls):
    """`grpc.health.v1.Health`: whether a request would be taken.

    Not the one that comes with grpc: there, a watcher that does not read keeps the status of all from changing.
    """

    def __init__(self, service: Service, config: ServerConfig, auth: AuthInterceptor) -> None:
        super().__init__(config, auth)
        self._engine = service.engine
        self._num_watching = 0

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """The handlers of the service's methods, by name."""
        return {
            "Check": self._handler(f"/{HEALTH}/Check", health_pb2.HealthCheckRequest, self.check),
            "Watch": self._handler(f"/{HEALTH}/Watch", health_pb2.HealthCheckRequest, self.watch),
        }

    async def check(self, request: health_pb2.HealthCheckRequest, call: Call, caller: Caller) -> None:
        """Send the status once."""
        if (status := self._status(request.service)) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            raise ApiError(404, "there is no such service", param="service")
        await self._write(call, health_pb2.HealthCheckResponse(status=status))

    async def watch(self, request: health_pb2.HealthCheckRequest, call: Call, caller: Caller) -> None:
        """Send the status now, and whenever it changes."""
        if self._num_watching >= MAX_WATCHERS:
            raise ApiError(
                429, f"{MAX_WATCHERS} watch already, and no more may", headers={"Retry-After": "60"}, reason="watchers"
            )
        self._num_watching += 1
        sent = None
        try:
            while True:
                if (status := self._status(request.service)) != sent:
                    await self._write(call, health_pb2.HealthCheckResponse(status=status))
                sent = status
                await asyncio.sleep(WATCH_EVERY_S)
        finally:
            self._num_watching -= 1

    def _status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        kinds = health_pb2.HealthCheckResponse
        if name not in ("", NAME):
            return kinds.SERVICE_UNKNOWN
        return kinds.SERVING if self._engine.is_ready else kinds.NOT_SERVING


# -- generating -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Running:
    """A call to `Generate` or `Run` that has not ended."""

    stream: Stream | None = None
    is_aborted: bool = False


class Methods(Calls):
    """The methods of the service `quire.v1.Quire`."""

    def __init__(self, service: Service, config: ServerConfig, auth: AuthInterceptor) -> None:
        super().__init__(config, auth)
        self._service = service
        self._running: dict[tuple[str, str], list[_Running]] = {}
        """Calls that have not ended, by tenant and request id. Clients choose the ids: two calls may have the same."""

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """The handlers of the service's methods, by name."""
        return {
            "Generate": self._handler(f"/{NAME}/Generate", pb.GenerateRequest, self.generate),
            "Run": self._handler(f"/{NAME}/Run", pb.GenerateRequest, self.run),
            "Embed": self._handler(f"/{NAME}/Embed", pb.EmbedRequest, self.embed),
            "Abort": self._handler(f"/{NAME}/Abort", pb.AbortRequest, self.abort),
            "GetModel": self._handler(f"/{NAME}/GetModel", pb.GetModelRequest, self.get_model),
        }

    async def generate(self, request: pb.GenerateRequest, call: Call, caller: Caller) -> None:
        """Continue a prompt; sends updates as tokens are generated."""
        async with self._submitted(request, call, caller, stream=True) as (request_id, stream):
            left = stream.request.params.n
            async for updates in stream:
                for update in updates:
                    left -= update.finish_reason is not None
                    make = partial(update_message, request_id, update, stream if not left else None)
                    message = await self._service.format_update(caller, stream, update, make, with_prompt=not left)
                    await self._write(call, message)

    async def run(self, request: pb.GenerateRequest, call: Call, caller: Caller) -> None:
        """Continue a prompt; sends one message once all of it is there."""
        async with self._submitted(request, call, caller, stream=False) as (request_id, stream):
            buffer = UpdateBuffer()
            async for updates in stream:
                for update in updates:
                    buffer.add(update)
            make, wholes = partial(response_message, request_id, stream), buffer.take()
            message = await self._service.format_update(caller, stream, Update(0), make, wholes, with_prompt=True)
        await self._write(call, message)

    async def embed(self, request: pb.EmbedRequest, call: Call, caller: Caller) -> None:
        """Embed prompts; sends one message once all of them are there."""
        service = self._service
        body = read_embed_request(request, model=service.model_name, max_model_len=service.max_model_len)
        parsed = await parse_embeddings(service, body, caller)
        embedded = await parsed.run(service, embedding_message, self._timeout_s(call), _origin(caller))
        await self._write(call, await service.format(caller, embed_response, embedded))

    async def abort(self, request: pb.AbortRequest, call: Call, caller: Caller) -> None:
        """End the caller's requests of this id."""
        running = self._running.get((caller.tenant, request.request_id), [])
        for one in running:
            one.is_aborted = True
            if one.stream:
                one.stream.cancel()
        await self._write(call, pb.AbortResponse(num_aborted=len(running)))

    async def get_model(self, request: pb.GetModelRequest, call: Call, caller: Caller) -> None:
        """Describe the model."""
        engine = self._service.engine.llm.engine
        message = pb.GetModelResponse(
            name=self._service.model_name,
            max_model_len=self._service.max_model_len,
            vocab_size=engine.model.vocab_size,
            eos_token_ids=sorted(engine.eos_ids),
            version=__version__,
        )
        await self._write(call, message)

    @contextlib.asynccontextmanager
    async def _submitted(
        self, request: pb.GenerateRequest, call: Call, caller: Caller, *, stream: bool
    ) -> AsyncIterator[tuple[str, Stream]]:
        """Submit a request; yields its id and its stream. However the block is left, the request ends with it."""
        service = self._service
        body = read_request(request, model=service.model_name, max_model_len=service.max_model_len, stream=stream)
        request_id = body.request_id = body.request_id or caller.request_id
        running, name = _Running(), (caller.tenant, request_id)
        self._running.setdefault(name, []).append(running)
        try:
            if isinstance(body, schema.ChatRequest):
                parsed = await parse_chat(service, body, caller)
            else:
                parsed = await parse_completion(service, body, caller, default_max_tokens=None)
            grammar = await service.compile(caller, parsed.structured, parsed.requests[0].cache_salt)
            (running.stream,) = service.engine.submit(parsed.requests, timeout_s=self._timeout_s(call), grammar=grammar)
            running.stream.origin = _origin(caller)
            if running.is_aborted:  # while it was read
                running.stream.cancel()
            yield request_id, running.stream
        finally:
            if running.stream:
                running.stream.cancel()
            self._running[name].remove(running)
            if not self._running[name]:
                del self._running[name]

    def _timeout_s(self, call: Call) -> float:
        """Seconds until the client's deadline, if it has one, or the server's own limit."""
        remaining: float | None = call.time_remaining()
        limit = float(self._config.request_timeout_s)
        return limit if remaining is None else min(remaining, limit)


def _origin(caller: Caller) -> Origin:
    return Origin(caller.request_id, caller.name)
