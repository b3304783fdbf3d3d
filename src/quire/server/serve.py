"""One server process: it loads the model, listens, and drains when a signal stops it."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from quire.async_llm import AsyncLLM
from quire.async_llm.admission import Admission
from quire.async_llm.observer import Observer
from quire.llm import LLM
from quire.server.access import AccessLog
from quire.server.batches.store import Store
from quire.server.config import ServerConfig
from quire.server.http.connections import limited
from quire.server.http.debug import Admin
from quire.server.http.routes import Api
from quire.server.keys import Keys
from quire.server.logs import announce, printed_as_log, set_up_logs
from quire.server.observe.metrics import Metrics
from quire.server.observe.telemetry import Telemetry
from quire.server.observe.trace_log import TraceLog
from quire.server.service import Service

if TYPE_CHECKING:
    from quire.server.batches.worker import Batches
    from quire.server.grpc.server import GrpcServer

LISTEN_BACKLOG = 512
SPARE_FILES = 4 * LISTEN_BACKLOG + 256
"""Beside those of connections: connections that are accepted to be refused, model files, libraries. asyncio accepts a
whole backlog in one turn of its loop, and a connection that is refused has its file for four."""
SWITCH_S = 0.001
"""The engine's thread gives way to the event loop after so long: a response crosses between them many times."""

LOOK_EVERY_S = 0.2
FAILED_S = 2.0
"""How long a server whose engine is lost answers 503 before it ends: time for clients to get their errors."""

_log = logging.getLogger("quire.server")


async def serve(
    open_llms: Sequence[Callable[[], LLM]],
    model_name: str,
    config: ServerConfig,
    keys: Keys,
    admin_keys: Keys,
) -> None:
    """Serve the LLM that a function opens, or several of one model, until a signal stops it."""
    check_exposure(config, keys, admin_keys)
    _prepare_process(config)
    for one in (keys, admin_keys):
        one.report_exposed_file()
    listener = _listen(config.host, config.port)  # before the model is loaded: a port that is taken fails at once
    admin_listener = None if config.admin_port is None else _listen("127.0.0.1", config.admin_port)
    store = Store(Path(config.batch_folder), config.max_batch_bytes) if config.batch_folder else None
    model_name = config.served_model_name or model_name
    metrics, trace_log = Metrics(), TraceLog()
    access = AccessLog(config.access_log, metrics.count_request)
    rpc = _grpc_server(config, keys, access)
    telemetry = Telemetry(config.otlp_endpoint, model_name) if config.otlp_endpoint else None
    observers: list[Observer | None] = [metrics, trace_log if admin_listener else None, telemetry]
    stopped = _stop_signal()
    async with contextlib.AsyncExitStack() as running:  # what is started is stopped in the opposite order
        running.enter_context(printed_as_log())
        admission = Admission(
            max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens, find_client=keys.find_tenant
        )
        watching = [observer for observer in observers if observer]
        engine = AsyncLLM.from_factory(*open_llms, admission=admission, observers=watching)
        engine.set_tenant_weights(keys.weights)
        _reload_on_hangup(config, keys, admin_keys, engine)
        detail = f"loading {model_name}; what has not been compiled before is compiled now"
        announce("loading", detail, model=model_name)
        await _load(engine, stopped)
        if telemetry:
            running.push_async_callback(asyncio.to_thread, telemetry.close)
        running.push_async_callback(engine.close)
        service = Service(engine, model_name, int(time.time()), config.max_priority)
        running.callback(service.close)
        metrics.watch(engine, model_name)
        if admin_listener:
            app = Admin(service, config, trace_log, access).app(admin_keys)
            await running.enter_async_context(_serving(app, config, admin_listener, metrics))
            announce("admin", f"to look inside, {_url(admin_listener)}/debug", url=_url(admin_listener))
        where, urls = f"{_url(listener)}/v1", {"url": _url(listener)}
        if rpc:
            await rpc.start(service)
            running.push_async_callback(rpc.stop)
            where += f" and grpc://{rpc.address}"
            urls["grpc"] = rpc.address
        api = Api(service, config, metrics, store, access)
        app = api.app(keys, admin_keys)
        if api.batches and store:
            metrics.watch_batches(store)
            running.callback(store.close)
            running.push_async_callback(api.batches.stop)
            api.batches.go_on(keys.callers)
            _reload_on_hangup(config, keys, admin_keys, engine, api.batches)
        serving = await running.enter_async_context(_serving(app, config, listener, metrics))
        running.callback(engine.end_all)  # before the connections are closed: their clients get an error
        page = f"; to chat, open {_url(listener)}/" if config.page else ""
        announce("ready", f"ready on {where}; serving {model_name}{page}", model=model_name, **urls)
        failed = asyncio.create_task(_until_failed(engine))
        await asyncio.wait((serving, stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            await _end(engine)
        failed.cancel()
        if api.batches:
            await api.batches.stop()  # the next server goes on with them
        await _drain(engine, config)


def _reload_on_hangup(
    config: ServerConfig, keys: Keys, admin_keys: Keys, engine: AsyncLLM, batches: "Batches | None" = None
) -> None:
    """Let SIGHUP reload keys. Without a key file it ends the server, as when its terminal is closed."""
    if keys.has_file or admin_keys.has_file:
        reload = partial(_reload_keys, config, keys, admin_keys, engine, batches)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def _reload_keys(
    config: ServerConfig, keys: Keys, admin_keys: Keys, engine: AsyncLLM, batches: "Batches | None" = None
) -> None:
    """Read the key files again, run the batches of their keys, and pause the batches of all others.

    Requests that run continue. A file that is wrong changes nothing, nor does the other file.
    """
    try:
        new, new_admin = keys.reread(), admin_keys.reread()
        check_exposure(config, new, new_admin)
    except ValueError as error:
        _log.error("keys not reloaded", extra={"detail": str(error)})
        return
    keys.become(new)
    admin_keys.become(new_admin)
    for one in (keys, admin_keys):
        one.report_exposed_file()
    engine.set_tenant_weights(keys.weights)
    if batches:
        batches.go_on(keys.callers)
    announce("keys reloaded", f"keys reloaded: {len(keys)} of clients, {len(admin_keys)} of admins", keys=len(keys))


def check_exposure(config: ServerConfig, keys: Keys, admin_keys: Keys) -> None:
    """Raise ValueError if somebody beyond this machine could use the server without a key."""
    if not config.is_local and not len(keys):
        raise ValueError(
            f"--host {config.host} can be reached from elsewhere and there is no API key; give --api-key, "
            "--api-key-file or QUIRE_API_KEY, or listen on 127.0.0.1"
        )
    if "*" in config.allow_origin and not len(keys):
        raise ValueError(
            "--allow-origin * without an API key lets every web page that is open on this machine use the server; "
            "name the origins, or give --api-key, --api-key-file or QUIRE_API_KEY"
        )
    if keys.overlaps(admin_keys):
        raise ValueError("--admin-key is an API key too: whoever may ask could also administer; give another one")
    for flag, is_given in (("--admin-port", config.admin_port is not None), ("--kv-events", config.kv_events)):
        if is_given and not len(admin_keys):
            raise ValueError(
                f"{flag} needs --admin-key, --admin-key-file or QUIRE_ADMIN_KEY: what it tells is not for everybody"
            )


def _grpc_server(config: ServerConfig, keys: Keys, access: AccessLog) -> "GrpcServer | None":
    if config.grpc_port is None:
        return None
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines are no JSON, and clients can bring them about
    from quire.server.grpc.server import GrpcServer

    return GrpcServer(config, keys, access)


def _prepare_process(config: ServerConfig) -> None:
    set_up_logs()
    num_ports = 1 if config.grpc_port is None else 2
    _allow_files(num_ports * config.max_connections + SPARE_FILES)
    sys.setswitchinterval(SWITCH_S)
    asyncio.get_running_loop().set_exception_handler(_log_loop_error)


def _stop_signal() -> asyncio.Task[bool]:
    """A task that is done when a signal stops the process."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop, stopping)
    return asyncio.create_task(stopping.wait())


async def _load(engine: AsyncLLM, stopped: asyncio.Task[bool]) -> None:
    loading = asyncio.create_task(engine.start())
    await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        os._exit(0)  # a compilation cannot be interrupted, and holds nothing that must be given back
    loading.result()


@contextlib.asynccontextmanager
async def _serving(
    app: Any, config: ServerConfig, listener: socket.socket, metrics: Metrics
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve a port while the block runs; yields the task that does it."""
    server = _Server(app, config, metrics)
    task = asyncio.create_task(server.serve([listener]))
    while not server.started and not task.done():  # only then does it listen
        await asyncio.sleep(0.01)
    try:
        yield task
    finally:
        server.should_exit = True
        await task


async def _until_failed(engine: AsyncLLM) -> None:
    while engine.failure is None:
        await asyncio.sleep(LOOK_EVERY_S)


async def _end(engine: AsyncLLM) -> None:
    """The engine will never step again: say so for a while to whoever asks, then end. A thread of jax may hang."""
    announce("stopping", f"stopping: {engine.failure}")
    await asyncio.sleep(FAILED_S)
    os._exit(1)


async def _drain(engine: AsyncLLM, config: ServerConfig) -> None:
    """Take nothing new, and wait for what runs to finish, for a limited time."""
    if count := engine.num_streams:
        requests = "1 request is" if count == 1 else f"{count} requests are"
        announce("stopping", f"stopping: {requests} finishing; press Ctrl-C again to stop now", requests=count)
    try:
        await asyncio.wait_for(engine.drain(), config.drain_timeout_s)
    except TimeoutError:
        _log.warning("drain timeout", extra={"requests": engine.num_streams})


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop without the objects that asyncio would show: they have addresses in them."""
    _log.error(context["message"], exc_info=context.get("exception"))


def _allow_files(count: int) -> None:
    """Raise the limit of open files to `count`, as far as the system allows: a connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and count > hard:
        _log.warning("fewer open files are allowed than max_connections needs", extra={"limit": hard, "needed": count})
        count = hard
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _stop(stopping: asyncio.Event) -> None:
    if stopping.is_set():  # a second signal: at once
        os._exit(130)
    stopping.set()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Marked as TCP, because asyncio turns Nagle's algorithm off only there: responses would wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ValueError(f"--port {port} on {host} cannot be listened on: {error.strerror}") from None
    listener.set_inheritable(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Server(uvicorn.Server):
    """A uvicorn without its own signal handlers: draining is ours."""

    def __init__(self, app: Any, config: ServerConfig, metrics: Metrics) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=limited(config, metrics.count_refused_connection),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=LISTEN_BACKLOG,
                timeout_keep_alive=config.keep_alive_timeout_s,
                timeout_graceful_shutdown=10,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stay with whoever runs this server."""
        yield
