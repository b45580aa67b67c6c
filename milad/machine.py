"""What this machine has: memory that a daemon may take, within its cgroup. Reads /proc and /sys only."""

from __future__ import annotations

import os


def available_memory() -> int:
    """Bytes that can be taken without swapping, within the cgroup's limit (v2 and v1); a guess of 2 GiB where nothing tells."""
    available = 2 << 30
    try:
        with open("/proc/meminfo") as f:
            fields = dict(line.split(":", 1) for line in f)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        except (OSError, ValueError):
            pass
    for limit_file, used_file in (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
                                  ("/sys/fs/cgroup/memory/memory.limit_in_bytes",
                                   "/sys/fs/cgroup/memory/memory.usage_in_bytes")):
        limit, used = _number(limit_file), _number(used_file)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


def _number(path: str) -> int | None:
    try:
        with open(path) as f:
            return int(f.read())
    except (OSError, ValueError):  # "max" among them
        return None
