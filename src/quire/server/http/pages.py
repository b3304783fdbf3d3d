"""Pages for people. Each is one file that asks nobody but this server, under a policy that lets it do nothing else."""

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from types import MappingProxyType

from starlette.responses import Response


def page_response(name: str) -> Response:
    """The page in a file beside this one."""
    return html_response(_read(name))


def html_response(html: str, replaced: Mapping[str, str] = MappingProxyType({})) -> Response:
    """A page whose only script and only style are those in it.

    `replaced` maps placeholders in the page to text of this response.
    """
    headers = {
        "Content-Security-Policy": _policy(html),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
    }
    for placeholder, text in replaced.items():
        html = html.replace(placeholder, escape(text))
    return Response(html, media_type="text/html", headers=headers)


@cache
def _read(name: str) -> str:
    return files("quire.server.http").joinpath(name).read_text(encoding="utf-8")


@cache
def _policy(html: str) -> str:
    def source(tag: str) -> str:
        hashes = (hashlib.sha256(text.encode()).digest() for text in re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S))
        return " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in hashes) or "'none'"

    return (
        f"default-src 'none'; script-src {source('script')}; style-src {source('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
