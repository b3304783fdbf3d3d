"""Files of one commit, from the hub into its cache folder.

What has come of a file is kept when a connection or a process ends, and the next attempt asks for the rest only. A file
enters the cache after its size and hash were found to be those of the commit; one that lies is deleted.
"""

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from quire import __version__
from quire.checkpoint.hub_cache import HubFile, Record, RepoCache, WrongFileError, verify

Say = Callable[[str], None]

ATTEMPTS_WITHOUT_A_BYTE = 4
_CHUNK_BYTES = 1 << 16  # what came of a chunk before a cut is lost
_QUERY = re.compile(r"(?<=\S)\?[^\s'\"]+")


def download(files: Sequence[HubFile], commit: str, cache: RepoCache, record: Record, say: Say | None) -> None:
    """Fetch and verify files of a commit, one after the other; `say` None for no word and no bar."""
    say_or_not: Say = say or (lambda _: None)
    sizes = [file.size or 0 for file in files]
    have = sum(cache.partial(file).stat().st_size for file in files if cache.partial(file).is_file())
    again = f", of which {size_text(have)} are here already" if have else ""
    count = f"{len(files)} file{'s' * (len(files) != 1)}"
    say_or_not(f"fetching {count} of {cache.repo}, {size_text(sum(sizes))}{again}, into {cache.root}")
    _check_room(sum(sizes) - have, cache.root)
    with _progress(sum(sizes), say) as advance:
        for file in files:
            _fetch(file, commit, cache, record, advance, say_or_not)


def size_text(num_bytes: int) -> str:
    """Bytes for people, in powers of 1,000 as the hub shows them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


def _fetch(
    file: HubFile, commit: str, cache: RepoCache, record: Record, advance: Callable[[int, str], None], say: Say
) -> None:
    """Bring one file into the cache: from another commit that has the same contents, or from the hub."""
    from huggingface_hub.utils import WeakFileLock

    blob, partial, lock = cache.blob(file), cache.partial(file), cache.lock(file)
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.is_file():
            cache.link(file, commit)
        try:
            if record.has(file):  # of another commit, or somebody has fetched it meanwhile
                advance(file.size or 0, file.path)
                return
        except WrongFileError as error:
            say(f"{error}; fetching it again")
        _receive(file, commit, cache.repo, partial, advance)
        try:
            verify(partial, file)
        except WrongFileError:
            partial.unlink()
            raise
        partial.replace(blob)
        cache.link(file, commit)
        record.remember(file)
        record.write()


def _receive(file: HubFile, commit: str, repo: str, partial: Path, advance: Callable[[int, str], None]) -> None:
    """Fetch what is missing of a partial file, again and again while anything comes."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    size, attempts, reason = file.size or 0, ATTEMPTS_WITHOUT_A_BYTE, ""
    with partial.open("ab") as content:
        if content.tell() > size:
            content.truncate(content.seek(0))
        advance(content.tell(), file.path)
        while (begin := content.tell()) < size:
            try:
                _append(content, file, commit, repo, advance)
                reason = "the connection ended"
            except HfHubHTTPError as error:
                reason = _refusal(error, file, partial)
            except OfflineModeIsEnabled:
                raise ValueError(f"{file.path} is not on disk, and HF_HUB_OFFLINE forbids to fetch it") from None
            except WrongFileError:
                partial.unlink()
                raise
            except Exception as error:
                # Errors of requests are OSErrors; those of httpx, which came with version 1.0 of the library, are none.
                if not isinstance(error, OSError) and not type(error).__module__.startswith("httpx"):
                    raise
                reason = f"{type(error).__name__}: {first_line(error)}"
            if content.tell() <= begin:
                attempts -= 1
                if not attempts:
                    came = f"{content.tell():,} of {size:,} bytes"
                    raise ValueError(f"{file.path}: {came} came, then {reason}; they are kept, try again")
                time.sleep(1)


def _append(content: BinaryIO, file: HubFile, commit: str, repo: str, advance: Callable[[int, str], None]) -> None:
    """Ask once for what is missing, and write down what comes; never more than the file's size."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    begin = content.tell()
    headers = build_hf_headers(library_name="quire", library_version=__version__) | {"Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    with _get(hf_hub_url(repo, file.path, revision=commit), headers) as (response, chunks):
        hf_raise_for_status(response)
        if begin and response.status_code != 206:  # a server without ranges: it sends all of it again
            advance(-begin, file.path)
            content.truncate(content.seek(0))
        for chunk in chunks:
            if content.tell() + len(chunk) > (file.size or 0):
                raise WrongFileError(
                    f"{file.path} is longer than the {file.size:,} bytes that the commit says: deleted"
                )
            content.write(chunk)
            advance(len(chunk), file.path)


@contextlib.contextmanager
def _get(url: str, headers: dict[str, str]) -> Iterator[tuple[Any, Iterable[bytes]]]:
    """An answer, and its bytes as they come.

    Both clients drop the token from the headers when a redirect leads to another host, where large files lie.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    session: Any = get_session()
    how = {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
    if isinstance(session.stream, bool):  # requests, before version 1.0 of the library
        with session.get(url, **how, stream=True) as response:
            yield response, response.iter_content(_CHUNK_BYTES)
    else:  # httpx
        with session.stream("GET", url, **how, follow_redirects=True) as response:
            yield response, response.iter_bytes()


def _refusal(error: Any, file: HubFile, partial: Path) -> str:
    """What a hub that answers with an error said; raised unless it may say otherwise later."""
    status = error.response.status_code
    if status == 416:
        partial.unlink()
        raise WrongFileError(f"{file.path} ends before the {file.size:,} bytes that the commit says: deleted") from None
    if status < 500 and status not in (408, 429):
        raise ValueError(f"{file.path} could not be fetched: {first_line(error)}") from None
    return first_line(error)


def first_line(error: BaseException) -> str:
    """What an error says, in one line; those of the library have many.

    Without the queries of addresses: where large files lie, these are signatures that open them.
    """
    text = _QUERY.sub("?...", str(error))
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def _check_room(num_bytes: int, root: Path) -> None:
    folder = root
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ValueError(
            f"{size_text(num_bytes)} are to be fetched and {root} has {size_text(free)} free; "
            "make room, or set HF_HOME to a folder on another disk"
        )


@contextlib.contextmanager
def _progress(total: int, say: Say | None) -> Iterator[Callable[[int, str], None]]:
    """A bar on a terminal; elsewhere a line for every tenth."""
    terminal = sys.stderr.isatty()
    bar = tqdm(
        desc="fetching", total=total, unit="B", unit_scale=True, disable=not terminal or say is None, leave=False
    )
    done = tenths = 0

    def advance(count: int, name: str) -> None:
        nonlocal done, tenths
        done += count
        bar.update(count)
        bar.set_postfix_str(name, refresh=False)
        if not terminal and say is not None and total and done * 10 // total > tenths:
            tenths = done * 10 // total
            say(f"fetched {size_text(done)} of {size_text(total)} ({tenths}0%)")

    with bar:
        yield advance
