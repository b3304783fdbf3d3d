"""Every knob of the server, beside the engine's. Frozen, validated once; command-line flags come from its fields."""

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.config import check_whole, knob
from quire.core.request import MAX_PRIORITY

MAX_PORT = 65_535
_HOST = re.compile(r"[a-z0-9_.-]{1,253}|[0-9a-f:.]{2,45}")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(?:[a-z0-9_.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {("http", "80"), ("https", "443")}


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens, and its limits."""

    host: str = knob("127.0.0.1", "address to listen on; beyond loopback a key is required")
    port: int = knob(8000, "for HTTP")
    grpc_port: int | None = knob(None, "for gRPC; by default there is none")
    admin_port: int | None = knob(None, "for debugging and administration, on loopback; by default there is none")
    served_model_name: str | None = knob(None, "what clients call the model; by default the name of its file")
    allow_origin: tuple[str, ...] = knob(
        (), "a web page's origin that may use the server, such as https://chat.example; * for any (with keys only)"
    )
    allow_host: tuple[str, ...] = knob(
        (), "a name under which the server is used without a key, such as host.docker.internal"
    )
    page: bool = knob(True, "pages for people: a chat at /, the API at /docs")
    strict_fields: bool = knob(False, "refuse unknown fields of requests instead of ignoring them")
    max_queued_requests: int = knob(256, "requests that may wait; more get a 429")
    max_queued_tokens: int = knob(1_000_000, "tokens that these may come to, prompts and generated ones")
    max_key_requests: int | None = knob(
        None, "Maximum number of requests of one API key that wait and run; a key file may set another", expert=True
    )
    max_key_queued_tokens: int | None = knob(
        None, "Maximum number of tokens in waiting requests of one API key; a key file may set another", expert=True
    )
    max_key_tokens_per_minute: int | None = knob(
        None, "Maximum number of tokens per minute of one API key; a key file may set another", expert=True
    )
    batch_folder: str | None = knob(None, "for /v1/files and /v1/batches, of this server alone; by default none")
    max_batch_file_bytes: int = knob(200 << 20, "of one file for /v1/batches", expert=True)
    max_batch_bytes: int = knob(10 << 30, "of all files and answers of batches, for each key", expert=True)
    access_log: str = knob("all", "requests that have a line in the log: all, errors or off")
    max_priority: int = knob(0, "the highest priority a request may have", expert=True)
    max_connections: int = knob(
        1024, "open connections; more get a 503, except for a few that health checks and metrics may use", expert=True
    )
    max_body_bytes: int = knob(8 << 20, "of one request", expert=True)
    heartbeat_s: int = knob(15, "seconds without an event after which a stream gets a comment", expert=True)
    keep_alive_timeout_s: int = knob(75, "seconds a connection may stay open between two requests", expert=True)
    read_timeout_s: int = knob(20, "seconds a client may take to send a request", expert=True)
    write_timeout_s: int = knob(60, "seconds a client may leave its stream unread before it ends", expert=True)
    request_timeout_s: int = knob(3600, "seconds a request may take; clients may set less", expert=True)
    drain_timeout_s: int = knob(300, "seconds that running requests have to finish after SIGTERM", expert=True)
    kv_events: bool = knob(
        False, "GET /v1/kv_events, for routers with an admin key: which pages are cached, by their hashes", expert=True
    )
    otlp_endpoint: str | None = knob(
        None, "where OpenTelemetry's spans and metrics go, such as http://127.0.0.1:4318", expert=True
    )

    def __post_init__(self) -> None:
        for name in ("port", "grpc_port", "admin_port"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0, MAX_PORT)
        ports = [port for port in (self.port, self.grpc_port, self.admin_port) if port]
        if len(set(ports)) < len(ports):
            raise ValueError(f"port={self.port}, grpc_port={self.grpc_port}, admin_port={self.admin_port} must differ")
        for name in (
            "max_queued_requests", "max_queued_tokens", "max_connections", "max_body_bytes",
            "max_batch_file_bytes", "max_batch_bytes",
            "heartbeat_s", "keep_alive_timeout_s", "read_timeout_s", "write_timeout_s", "request_timeout_s",
            "drain_timeout_s",
        ):  # fmt: skip
            check_whole(name, getattr(self, name), 1, 1 << 40)
        if self.access_log not in ("all", "errors", "off"):
            raise ValueError(f"access_log={self.access_log!r} must be all, errors or off")
        for name in ("max_key_requests", "max_key_queued_tokens", "max_key_tokens_per_minute"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1, 1 << 40)
        check_whole("max_priority", self.max_priority, 0, MAX_PRIORITY)
        if not isinstance(self.host, str) or not self.host or "/" in self.host:
            raise ValueError(f"host={self.host!r} must be an address or a name, without http:// and without a port")
        for name in ("served_model_name", "batch_folder"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}='' is empty; give a value, or leave it out")
        for origin in self.allow_origin:
            _check_origin(origin)
        for name in self.allow_host:
            if not _HOST.fullmatch(name):
                raise ValueError(
                    f"allow_host={name!r} must be a name or an address, without http:// and without a port"
                )
        if self.otlp_endpoint is not None:
            url = urlsplit(self.otlp_endpoint)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError(f"otlp_endpoint={self.otlp_endpoint!r} must be an http or https URL")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _check_origin(origin: str) -> None:
    """Raise ValueError unless it is `*`, or an origin as browsers write them."""
    match = _ORIGIN.fullmatch(origin)
    if origin != "*" and match is None:
        raise ValueError(
            f"allow_origin={origin!r} must be * or SCHEME://HOST[:PORT] in lower case, such as http://localhost:3000: "
            "no path, no / at the end"
        )
    if match and match.groups() in _DEFAULT_PORTS:
        raise ValueError(f"allow_origin={origin!r}: browsers leave the default port out; so must this")
