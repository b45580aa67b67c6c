"""The errors that milad's rooms raise for one another, in no vendor's words.

`kind` is what went wrong; each protocol turns it into its own status and body. Whatever a client sent ends as one of these
with a kind below 500's meaning; any other exception is a bug of ours.
"""

from __future__ import annotations

STATUS = {
    "invalid": 400,
    "overflow": 400,        # the prompt is longer than a request's context
    "auth": 401,
    "forbidden": 403,
    "not_found": 404,
    "method": 405,
    "too_large": 413,
    "media_type": 415,
    "upgrade": 426,
    "rate_limited": 429,    # a key's own limit
    "overloaded": 429,      # the queue is full or a deadline passed (Anthropic: 529)
    "internal": 500,
    "unavailable": 503,     # no model is ready yet
    "timeout": 504,
}


class MiladError(Exception):
    """An error for a client or a person. `param` is the JSON path (`messages[3].content[0].type`), `code` a machine's word
    (`unsupported_image`), `retry_after_s` set where trying again makes sense."""

    def __init__(self, kind: str, message: str, *, param: str | None = None, code: str | None = None,
                 retry_after_s: int | None = None, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        assert kind in STATUS, kind
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = headers

    @property
    def status(self) -> int:
        return STATUS[self.kind]


def invalid(param: str | None, message: str, code: str | None = None) -> MiladError:
    """A 400 that names the field."""
    return MiladError("invalid", message, param=param, code=code)


class ContextOverflow(MiladError):
    """The prompt has `n_tokens`, one request may have `limit`. Each protocol words it as its clients expect."""

    def __init__(self, n_tokens: int, limit: int, param: str | None = None) -> None:
        super().__init__("overflow", f"the prompt has {n_tokens} tokens, more than the {limit} of one request",
                         param=param, code="context_length_exceeded")
        self.n_tokens = n_tokens
        self.limit = limit


class UsageError(Exception):
    """Bad options, files or surroundings: one line for the person on stderr, exit code 1 (or `exit_code`)."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ModelError(UsageError):
    """A model file that can't be opened or run; `status` is the core's milad_status."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class EngineFault(Exception):
    """The core failed in a step; the sequence or the engine that it hit is lost, the daemon is not."""
