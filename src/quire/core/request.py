"""A request: a prompt and how to continue it. Frozen."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from quire.config import check_whole
from quire.core.sampling_params import SamplingParams
from quire.field_error import FieldError, refuse_unknown_fields
from quire.short_repr import short_repr

MAX_PRIORITY = 1 << 31
MAX_SALT_LEN = 1024
MAX_GROUP_LEN = 1024


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt, and how to generate `params.n` sequences that continue it."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    """Among requests of one tenant, higher runs first; the same priority runs in order of arrival."""
    cache_salt: str = ""
    """Requests find each other's prefixes in the cache only under the same salt: give each tenant its own.
    None is the same as none."""
    tenant: str | None = None
    """The tenant whose share of the engine this request uses: tenants that wait are served in proportion to their
    weights. None is replaced by `cache_salt`."""
    group: str = ""
    """Where there are several engines, requests of one group and salt go to the same one, as long as that has room:
    a conversation, or attempts at one task. Those that begin alike meet without it."""
    stream: bool = False
    """Tokens are wanted as soon as they are generated: they come in small groups."""
    keeps_end: bool = False
    """Somebody may go on from all of its tokens: its last page stays in the prefix cache, full or not, for requests
    that say the same. Not with layers that see a window."""

    scores_draws: bool = False
    """With `prompt_logprobs` and without output: score the prompt also under what `params` draw from."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.cache_salt is None:
            object.__setattr__(self, "cache_salt", "")
        if not isinstance(self.id, str):
            raise FieldError(f"id={self.id!r} must be a string", field="id")
        if not isinstance(self.prompt_token_ids, SequenceOf) or isinstance(self.prompt_token_ids, str | bytes):
            message = f"prompt_token_ids={self.prompt_token_ids!r} must be a tuple of token ids; encode text first"
            raise FieldError(message, field="prompt_token_ids")
        check_whole("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_LEN:
            message = f"cache_salt={self.cache_salt!r} must be a string of at most {MAX_SALT_LEN} characters"
            raise FieldError(message, field="cache_salt")
        if self.tenant is None:
            object.__setattr__(self, "tenant", self.cache_salt)
        if not isinstance(self.tenant, str) or len(self.tenant) > MAX_SALT_LEN:
            message = f"tenant={self.tenant!r} must be a string of at most {MAX_SALT_LEN} characters"
            raise FieldError(message, field="tenant")
        if not isinstance(self.group, str) or len(self.group) > MAX_GROUP_LEN:
            message = f"group={self.group!r} must be a string of at most {MAX_GROUP_LEN} characters"
            raise FieldError(message, field="group")
        for name in ("stream", "keeps_end", "scores_draws"):
            if not isinstance(getattr(self, name), bool):
                raise FieldError(f"{name}={getattr(self, name)!r} must be True or False", field=name)
        if self.scores_draws:
            self.params.check_scores_draws()
            if self.params.max_tokens != 0:
                message = f"scores_draws=True with max_tokens={self.params.max_tokens}: it is for max_tokens=0"
                raise FieldError(message, field="scores_draws")
