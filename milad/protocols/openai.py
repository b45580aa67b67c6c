"""What chat, completions and responses have in common: OpenAI's error body, usage and token logprobs. Pure."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

from ..errors import ContextOverflow, MiladError
from ..events import TokenLogprob, Usage

NO_LOGPROB = -9999.0     # OpenAI's stand-in for minus infinity, which JSON lacks
MAX_RETRY_AFTER_S = 60   # above it Claude Code gives up at once

_TYPES = {
    "auth": "authentication_error", "forbidden": "permission_error", "rate_limited": "rate_limit_error",
    "overloaded": "rate_limit_error", "internal": "server_error", "unavailable": "server_error", "timeout": "timeout_error"}
_CODES = {
    "auth": "invalid_api_key", "not_found": "not_found", "rate_limited": "rate_limit_exceeded",
    "overloaded": "rate_limit_exceeded", "too_large": "request_too_large", "internal": "server_error",
    "unavailable": "model_not_ready", "timeout": "timeout"}


def message_of(error: MiladError) -> str:
    """The error's words; the path stands before them where they don't begin with it."""
    if isinstance(error, ContextOverflow):
        return (f"This model's maximum context length is {error.limit} tokens. However, your request has "
                f"{error.n_tokens} tokens. Please reduce the length of the messages.")
    if error.param and error.param not in error.message:
        return f"{error.param}: {error.message}"
    return error.message


def error_object(error: MiladError) -> dict[str, Any]:
    return {"message": message_of(error), "type": _TYPES.get(error.kind, "invalid_request_error"), "param": error.param,
            "code": error.code or _CODES.get(error.kind)}


def retry_headers(error: MiladError) -> list[tuple[str, str]]:
    """The error's own headers, Retry-After within what clients honour, and x-should-retry: false where trying again can't
    help: SDKs retry 408, 409, 429 and 5xx else."""
    headers = list(error.headers)
    if error.retry_after_s is not None:
        headers.append(("Retry-After", str(min(MAX_RETRY_AFTER_S, max(1, error.retry_after_s)))))
    elif error.status < 500 and error.kind not in ("rate_limited", "overloaded"):
        headers.append(("x-should-retry", "false"))
    return headers


def error_reply(error: MiladError, request_id: str) -> tuple[int, dict[str, Any], list[tuple[str, str]]]:
    """The HTTP reply; the app puts the request id into every reply's headers."""
    return error.status, {"error": error_object(error)}, retry_headers(error)


def usage_object(usages: Iterable[Usage], prompts: Iterable[Usage]) -> dict[str, Any]:
    """Chat's and completions' usage: every choice's output, every prompt once."""
    outputs, inputs = list(usages), list(prompts)
    n_in, n_out = sum(u.input_tokens for u in inputs), sum(u.output_tokens for u in outputs)
    return {
        "prompt_tokens": n_in, "completion_tokens": n_out, "total_tokens": n_in + n_out,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in inputs), "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": sum(u.reasoning_tokens for u in outputs), "audio_tokens": 0,
            "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}}


def finite(logprob: float) -> float:
    return logprob if NO_LOGPROB < logprob <= 0.0 else 0.0 if logprob > 0.0 else NO_LOGPROB


def token_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def logprob_object(token: TokenLogprob) -> dict[str, Any]:
    """Chat's and responses' entry of one token."""
    return {"token": token_text(token.data), "logprob": finite(token.logprob), "bytes": list(token.data),
            "top_logprobs": [{"token": token_text(d), "logprob": finite(p), "bytes": list(d)} for d, p in token.top]}


def logprob_list(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [logprob_object(t) for t in tokens]
