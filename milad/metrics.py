"""What the daemon counts, as Prometheus text (exposition format 0.0.4) and as one JSON object for people.

The event loop's thread only. Names and labels hold no prompt, no key and nothing else that a client chose. Counters of the
engine are read when asked for; only requests and latencies are counted here.
"""

from __future__ import annotations

import math
import os
import resource
import time
from bisect import bisect_left
from typing import Any, Callable, Iterable, Iterator, Mapping

from . import __version__
from .events import Delta

TTFT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Histogram:
    """Cumulative buckets by upper bound, the last one +Inf."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        if value >= 0:                       # False for NaN
            self.counts[bisect_left(self.bounds, value)] += 1
            self.sum += value

    def quantile(self, q: float) -> float:
        """The upper bound of the bucket that holds it; 0 without observations."""
        total, seen = sum(self.counts), 0
        for bound, n in zip((*self.bounds, self.bounds[-1]), self.counts):
            seen += n
            if total and seen >= q * total:
                return bound
        return 0.0


class Metrics:
    def __init__(self) -> None:
        self.started = time.time()
        self.requests: dict[tuple[str, int], int] = {}
        self.cut = 0                         # clients that left before the end
        self.ttft = Histogram(TTFT_BOUNDS)
        self.gap = Histogram(GAP_BOUNDS)

    def count(self, route: str, status: int, cut: bool) -> None:
        """route: of the route table, never the path as sent."""
        key = (route, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        self.cut += cut

    def watch(self, runner: Any) -> "Watched":
        return Watched(runner, self)


class Watched:
    """A turn.Runner whose runs tell the metrics when their text came. Everything else is the runner's own."""

    def __init__(self, runner: Any, metrics: Metrics) -> None:
        self._runner = runner
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, prepared: Any) -> "_Run":
        return _Run(self._runner.run(prepared), self._metrics)


class _Run:
    """turn.Run."""

    def __init__(self, run: Any, metrics: Metrics) -> None:
        self._run = run
        self._metrics = metrics
        self._start = time.monotonic()
        self._last: dict[int, float] = {}    # choice -> when its last text came
        self.cancel = run.cancel
        self.close = run.close

    async def read(self, reader: Callable[[Any], Any]) -> None:
        def watched(batch: Any) -> Any:
            now = time.monotonic()
            for choice, event in batch:
                if isinstance(event, Delta):
                    last = self._last.get(choice)
                    if last is None:
                        self._metrics.ttft.observe(now - self._start)
                    elif last != now:        # else of the same step
                        self._metrics.gap.observe(now - last)
                    self._last[choice] = now
            return reader(batch)

        await self._run.read(watched)


# -- Prometheus ---------------------------------------------------------------------------------------------------------

def _number(value: Any) -> str:
    number = float(value)
    return "0" if not math.isfinite(number) else str(int(number)) if number == int(number) and abs(number) < 1e15 else repr(number)


def _labels(labels: Mapping[str, Any]) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "{" + ",".join(f'{k}="{quoted(str(v))}"' for k, v in labels.items()) + "}" if labels else ""


def _family(name: str, kind: str, what: str, samples: Iterable[tuple[Mapping[str, Any], Any]]) -> Iterator[str]:
    yield f"# HELP {name} {what}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{_labels(labels)} {_number(value)}"


def _histogram(name: str, what: str, h: Histogram) -> Iterator[str]:
    yield f"# HELP {name} {what}"
    yield f"# TYPE {name} histogram"
    total = 0
    for bound, n in zip((*h.bounds, math.inf), h.counts):
        total += n
        yield f'{name}_bucket{{le="{"+Inf" if bound == math.inf else format(bound, "g")}"}} {total}'
    yield f"{name}_sum {_number(h.sum)}"
    yield f"{name}_count {total}"


# (metric, type, help, key of Engine.stats(), factor)
_ENGINE = (
    ("milad_requests_running", "gauge", "Sequences that generate now.", "n_running", 1),
    ("milad_requests_queued", "gauge", "Sequences that wait for a place.", "n_queued", 1),
    ("milad_generated_tokens_total", "counter", "Tokens generated.", "n_generated_tokens", 1),
    ("milad_steps_total", "counter", "Engine steps.", "n_steps", 1),
    ("milad_step_seconds_total", "counter", "Time spent in engine steps.", "step_s_total", 1),
    ("milad_step_faults_total", "counter", "Engine steps that failed.", "n_faults", 1),
    ("milad_stalled_seconds", "gauge", "How long the present step has been going.", "stalled_s", 1),
    ("milad_preemptions_total", "counter", "Sequences that gave their memory to an older one.", "n_preempted", 1),
    ("milad_drafted_tokens_total", "counter", "Tokens guessed ahead.", "n_drafted", 1),
    ("milad_accepted_tokens_total", "counter", "Guessed tokens that were right.", "n_accepted", 1),
    ("milad_kv_evictions_total", "counter", "Cached KV blocks given up for others.", "n_evicted", 1),
    ("milad_decode_step_seconds", "gauge", "A step that only decodes, smoothed.", "decode_step_s", 1),
)
_DISK = (
    ("milad_kv_disk_bytes", "gauge", "Bytes of the prompt cache on disk.", "n_bytes"),
    ("milad_kv_disk_reads_total", "counter", "KV blocks read from disk.", "n_read"),
    ("milad_kv_disk_writes_total", "counter", "KV blocks written to disk.", "n_written"),
    ("milad_kv_disk_bad_total", "counter", "KV blocks on disk that were damaged.", "n_bad"),
)


def _engine_lines(stats: Mapping[str, Any]) -> Iterator[str]:
    for name, kind, what, key, factor in _ENGINE:
        if key in stats:
            yield from _family(name, kind, what, [({}, stats[key] * factor)])
    yield from _family("milad_prompt_tokens_total", "counter", "Prompt tokens, computed or found in the cache.", [
        ({"source": "computed"}, stats.get("n_prompt_tokens", 0)), ({"source": "cached"}, stats.get("n_cached_tokens", 0))])
    total, done, found = (stats.get(k, 0) for k in ("n_reading", "n_read", "n_read_cached"))
    yield from _family("milad_prompt_progress_tokens", "gauge", "Tokens of the prompts that are read now: in all, done, of them cached.", [
        ({"part": "total"}, total), ({"part": "done"}, done), ({"part": "cached"}, found)])
    free, cached, held = (stats.get(k, 0) for k in ("n_blocks_free", "n_blocks_cached", "n_blocks_held"))
    yield from _family("milad_kv_blocks", "gauge", "KV blocks: used by running sequences, cached for later ones, free.", [
        ({"state": "used"}, held), ({"state": "cached"}, cached), ({"state": "free"}, free)])
    row_s = stats.get("prefill_row_s", 0)
    yield from _family("milad_prefill_tokens_per_second", "gauge", "How fast prompts are computed, smoothed; 0: not yet known.",
                       [({}, 1 / row_s if row_s else 0)])
    disk = stats.get("disk", {})
    for name, kind, what, key in _DISK:
        if key in disk:
            yield from _family(name, kind, what, [({}, disk[key])])


def _process_lines(metrics: Metrics) -> Iterator[str]:
    """The names that Prometheus' own client libraries use."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield from _family("process_cpu_seconds_total", "counter", "User and system time.", [({}, usage.ru_utime + usage.ru_stime)])
    yield from _family("process_start_time_seconds", "gauge", "Start, in seconds since the epoch.", [({}, metrics.started)])
    yield from _family("process_max_fds", "gauge", "Most open files.", [({}, resource.getrlimit(resource.RLIMIT_NOFILE)[0])])
    try:
        with open("/proc/self/statm") as f:
            virtual, resident = (int(n) * resource.getpagesize() for n in f.read().split()[:2])
        n_fds = len(os.listdir("/proc/self/fd"))
    except (OSError, ValueError):            # not Linux
        return
    yield from _family("process_virtual_memory_bytes", "gauge", "Address space.", [({}, virtual)])
    yield from _family("process_resident_memory_bytes", "gauge", "Memory in use.", [({}, resident)])
    yield from _family("process_open_fds", "gauge", "Open files.", [({}, n_fds)])


def summed(stats: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Several engines' stats as one: counts and blocks add up, the pace is the first one's."""
    total = dict(stats[0])
    for other in stats[1:]:
        for key, value in other.items():
            if key == "disk":
                total["disk"] = {k: total.get("disk", {}).get(k, 0) + v for k, v in value.items()}
            elif key not in ("decode_step_s", "prefill_row_s", "n_ctx"):
                total[key] = total.get(key, 0) + value
    return total


def prometheus(metrics: Metrics, served: Any, loading: float, n_connections: int, others: Iterable[Any] = ()) -> str:
    """served: app.Served or None while loading; others: further models that are loaded."""
    lines = list(_family("milad_build_info", "gauge", "The program.", [({"version": __version__}, 1)]))
    lines += _family("milad_ready", "gauge", "1: a model answers.", [({}, int(served is not None))])
    lines += _family("milad_load_progress", "gauge", "How far loading the model is, 0 to 1.", [({}, 1 if served else loading)])
    lines += _family("milad_connections", "gauge", "Open connections.", [({}, n_connections)])
    lines += _family("milad_http_requests_total", "counter", "Requests answered, by route and status; 0: none was sent.",
                     [({"route": r, "status": s}, n) for (r, s), n in sorted(metrics.requests.items())])
    lines += _family("milad_http_clients_left_total", "counter", "Clients that left before their answer's end.",
                     [({}, metrics.cut)])
    lines += _histogram("milad_time_to_first_token_seconds", "From a request's admission to its first text.", metrics.ttft)
    lines += _histogram("milad_inter_token_seconds", "Between two pieces of text of one answer.", metrics.gap)
    if served:
        models = [served, *others]
        lines += _family("milad_model_info", "gauge", "The models that answer.", [
            ({"model": m.id, "architecture": m.runner.model.info.architecture, "quantisation": m.runner.model.info.quantisation,
              "context": m.runner.n_ctx}, 1) for m in models])
        lines += _engine_lines(summed([m.runner.engine.stats() for m in models]))
    return "\n".join([*lines, *_process_lines(metrics)]) + "\n"


# -- For people -----------------------------------------------------------------------------------------------------------

def status(metrics: Metrics, served: Any, loading: float, n_connections: int, others: Iterable[Any] = ()) -> dict[str, Any]:
    """GET /v1/milad/status."""
    answer: dict[str, Any] = {
        "object": "milad.status", "version": __version__, "pid": os.getpid(), "uptime_s": round(time.time() - metrics.started, 1),
        "state": "ready" if served else "loading", "progress": 1.0 if served else round(loading, 3), "connections": n_connections,
        "requests": [{"route": r, "status": s, "count": n} for (r, s), n in sorted(metrics.requests.items())],
        "time_to_first_token_s": {"p50": metrics.ttft.quantile(.5), "p95": metrics.ttft.quantile(.95)},
        "inter_token_s": {"p50": metrics.gap.quantile(.5), "p95": metrics.gap.quantile(.95)}}
    if served:
        models = [served, *others]
        answer["model"] = {"id": served.id, "architecture": served.runner.model.info.architecture,
                           "quantisation": served.runner.model.info.quantisation, "context": served.runner.n_ctx}
        answer["models"] = [m.id for m in models]
        answer["engine"] = summed([m.runner.engine.stats() for m in models])
        answer["sequences"] = [{"model": m.id, **s} for m in models for s in m.runner.engine.sequences()]
    return answer
