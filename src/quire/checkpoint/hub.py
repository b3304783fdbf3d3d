"""Models by name: `org/name` on the Hugging Face hub, fetched once, verified, and found on disk from then on.

A name may end with a file, `org/name:Q4_K_M`, and a revision, `org/name@v1.0`. A revision is resolved to a commit
first; then every file comes from that commit. Fetched are safetensors or one GGUF file, JSON and chat templates:
nothing that could be code, and nothing is executed. Without a hub, the files on disk are used.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.checkpoint.embedding_files import POOLING
from quire.checkpoint.hub_cache import COMMIT, SUFFIXES, HubFile, Record, RepoCache, WrongFileError, cache_root
from quire.checkpoint.hub_download import Say, download, first_line, size_text
from quire.checkpoint.weight_index import INDEX, indexed_files

DEFAULT_REVISION = "main"
TIMEOUT_S = 10.0

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^@:]+))?(?:@(?P<revision>[^@:]*))?(?::(?P<last>[^@:]+))?",
    re.ASCII,
)
_REVISION = re.compile(r"[A-Za-z0-9][\w./+-]{0,249}", re.ASCII)
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_MAX_LISTED = 40


@dataclass(frozen=True)
class HubName:
    """What a person calls a model of the hub."""

    repo: str
    revision: str = DEFAULT_REVISION
    """A commit, a branch or a tag."""
    file: str | None = None
    """Of a GGUF repository: a file, or a quantisation such as Q4_K_M."""

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repo}{f':{self.file}' if self.file else ''}{revision}"


def parse_name(text: str, revision: str | None = None) -> HubName | None:
    """The parts of `org/name[:file][@revision]`; None if it has another form."""
    parts = _NAME.fullmatch(text)
    if parts is None or (parts["file"] and parts["last"]) or re.search(r"\.\.|--", parts["repo"]):
        return None
    written = parts["revision"]
    if revision is not None and written is not None:
        raise ValueError(f"MODEL {text!r} names a revision already; leave out revision={revision!r}, or @{written}")
    if revision is None:
        revision = DEFAULT_REVISION if written is None else str(written)
    if not isinstance(revision, str) or not _REVISION.fullmatch(revision) or ".." in revision:
        raise ValueError(f"revision={revision!r} must be a commit (40 hex digits), a branch or a tag")
    return HubName(parts["repo"], revision, parts["file"] or parts["last"])


def fetch_model(name: HubName, *, quiet: bool = False, check: Callable[[Path], object] | None = None) -> Path:
    """The folder, or the GGUF file, of a model; what is not on disk is fetched, and all of it is verified.

    `check` looks at a folder with config.json before the weights are fetched, and raises where they would be in vain.
    """
    say = None if quiet else _say
    cache = RepoCache(name.repo, cache_root())
    commit, record, unreachable = _resolve(name, cache, say or _say_nothing)
    files = record.files or cache.files_on_disk(commit)

    def need(needed: Sequence[HubFile]) -> None:
        """Have these files on disk, verified."""
        missing = [file for file in needed if not _is_here(file, record, say or _say_nothing)]
        if missing and unreachable:
            names = ", ".join(file.path for file in missing)
            raise ValueError(f"{name}: not on disk: {names}; and the hub cannot be reached: {unreachable}")
        try:
            if missing:
                download(missing, commit, cache, record, say)
        finally:
            record.write()

    snapshot = cache.snapshot(commit)
    gguf = _choose_gguf(name, files)
    if gguf is not None:
        need([gguf])
    else:
        small = [file for file in files if "/" not in file.path and file.path.endswith((".json", ".jinja"))]
        need([*small, *(file for file in files if file.path == POOLING)])
        if check is not None:
            check(snapshot)
        need(_weights(name, files, snapshot))
    if not unreachable and name.revision != commit:
        cache.write_ref(name.revision, commit)
    return snapshot if gguf is None else snapshot / gguf.path


def _say(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr, flush=True)


def _say_nothing(_: str) -> None:
    pass


def _is_here(file: HubFile, record: Record, say: Say) -> bool:
    try:
        return record.has(file)
    except WrongFileError as error:
        say(str(error))
        return False


# -- which commit ----------------------------------------------------------------------------------------------------


def _resolve(name: HubName, cache: RepoCache, say: Say) -> tuple[str, Record, str]:
    """The commit that a name means, what is known of it, and why the hub cannot be reached (empty if it can).

    A commit whose files are known needs no hub at all.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        commit = name.revision if COMMIT.fullmatch(name.revision) else _ask_for_commit(name)
        record = Record(cache, commit)
        record.files = record.files or _ask_for_files(name.repo, commit)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status < 500 and status not in (408, 429):
            raise ValueError(f"{name} could not be fetched: {_explain(status, name, error)}") from None
        return _last_known(name, cache, f"it answered with HTTP {status}", say)
    except Exception as error:  # of requests or httpx, by the version of the library; HF_HUB_OFFLINE; not even JSON
        if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
            raise
        return _last_known(name, cache, f"{type(error).__name__}: {first_line(error)}", say)
    if commit != name.revision:
        say(f"{name.repo} at {name.revision} is commit {commit}; to pin it: {HubName(name.repo, commit, name.file)}")
    return commit, record, ""


def _ask_for_commit(name: HubName) -> str:
    from huggingface_hub import HfApi

    commit = HfApi().model_info(name.repo, revision=name.revision, timeout=TIMEOUT_S).sha
    if commit is None or not COMMIT.fullmatch(commit):
        raise ValueError(f"{name}: the hub says that {name.revision} is commit {commit!r}, which is none")
    return commit


def _ask_for_files(repo: str, commit: str) -> list[HubFile]:
    """The files of a commit that could be of use, with their sizes and hashes."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    return [
        HubFile(entry.path, entry.lfs.size, entry.lfs.sha256)
        if entry.lfs
        else HubFile(entry.path, entry.size, entry.blob_id)
        for entry in HfApi().list_repo_tree(repo, recursive=True, revision=commit)
        if isinstance(entry, RepoFile) and entry.path.endswith(SUFFIXES)
    ]


def _last_known(name: HubName, cache: RepoCache, reason: str, say: Say) -> tuple[str, Record, str]:
    """The commit on disk, when there is no hub to ask."""
    commit = name.revision if COMMIT.fullmatch(name.revision) else cache.ref(name.revision)
    if commit is None or not cache.snapshot(commit).is_dir():
        raise ValueError(f"{name} is not on disk, and the hub cannot be reached: {reason}")
    if commit != name.revision:
        say(f"the hub cannot be reached ({reason}); {name.repo} at {name.revision} was commit {commit} when last asked")
    return commit, Record(cache, commit), reason


def _explain(status: int, name: HubName, error: BaseException) -> str:
    """What to do about an answer of the hub."""
    kind = type(error).__name__
    if kind == "RevisionNotFoundError":
        return f"there is no commit, branch or tag {name.revision!r}"
    if kind == "GatedRepoError":
        return f"its owner wants to know who takes it: ask at the model's page, and set HF_TOKEN ({kind})"
    if kind == "RepositoryNotFoundError" or status == 401:
        return f"there is no such model, or it is private: check the name, or set HF_TOKEN ({kind})"
    return f"HTTP {status}: {first_line(error)}"


# -- which files -----------------------------------------------------------------------------------------------------


def _weights(name: HubName, files: Sequence[HubFile], snapshot: Path) -> list[HubFile]:
    """The safetensors files of a model: those that its index names, if it has one."""
    found = {file.path: file for file in files if "/" not in file.path and file.path.endswith(".safetensors")}
    if not (snapshot / INDEX).is_file():
        return list(found.values())
    listed = indexed_files(snapshot)
    if absent := [path for path in listed if path not in found]:
        raise ValueError(f"{name}: {INDEX} names {absent[0]!r}, which is not there")
    return [found[path] for path in listed]


def missing_weights(folder: Path) -> str:
    """The first safetensors file that a model lacks; empty if it has all."""
    if not (folder / INDEX).is_file():
        return "" if any(folder.glob("*.safetensors")) else "model.safetensors"
    return next((path for path in indexed_files(folder) if not (folder / path).is_file()), "")


def _choose_gguf(name: HubName, files: Sequence[HubFile]) -> HubFile | None:
    """The GGUF file that a name means; None if it means safetensors."""
    ggufs = [file for file in files if file.path.endswith(".gguf") and not Path(file.path).name.startswith("mmproj")]
    if name.file is None:
        if any("/" not in file.path and file.path.endswith(".safetensors") for file in files):
            return None
        if not ggufs:
            raise ValueError(f"{name} has no safetensors and no GGUF file; other formats are never loaded")
        found, what = ggufs, "has GGUF files only"
    else:
        found = _files_meant(name.file, ggufs)
        what = f"has {len(found) or 'no'} GGUF files for {name.file!r}"
    if len(found) == 1 and not _SPLIT.search(found[0].path):
        return found[0]
    if found and all(_SPLIT.search(file.path) for file in found):
        raise ValueError(f"{name}: {found[0].path} is one of several parts of a model; split GGUF files are not read")
    raise ValueError(f"{name} {what}; choose one, as in {name.repo}:{_example(ggufs)}\n{_listed(ggufs)}")


def _files_meant(asked: str, ggufs: Sequence[HubFile]) -> list[HubFile]:
    """The files that a path, a file name or a quantisation means."""
    if asked.endswith(".gguf"):
        return [file for file in ggufs if asked in (file.path, Path(file.path).name)]
    # A quantisation is a word of the file's name: Q4_K_M is one of "model-Q4_K_M.gguf", Q4_K is none.
    word = re.compile(rf"(?:^|[-._/]){re.escape(asked)}(?:-\d{{5}}-of-\d{{5}})?\.gguf$", re.IGNORECASE)
    return [file for file in ggufs if word.search(file.path)]


def _example(ggufs: Sequence[HubFile]) -> str:
    whole = [file.path for file in ggufs if not _SPLIT.search(file.path)]
    return whole[0] if whole else "file.gguf"


def _listed(ggufs: Sequence[HubFile]) -> str:
    lines = [f"  {file.path}" + (f"  {size_text(file.size)}" if file.size is not None else "") for file in ggufs]
    more = [f"  and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return "\n".join((lines or ["  (it has none)"])[:_MAX_LISTED] + more)
