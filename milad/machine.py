"""What this machine has: its processor's name, memory that a daemon may take, within its cgroup. Reads /proc and /sys only."""

from __future__ import annotations

import os

# ARM kernels tell numbers only (MIDR_EL1: implementer and part): the cores of servers, boards and laptops that run models.
_ARM = {
    0x41: {0xd03: "Cortex-A53", 0xd05: "Cortex-A55", 0xd07: "Cortex-A57", 0xd08: "Cortex-A72", 0xd09: "Cortex-A73",
           0xd0a: "Cortex-A75", 0xd0b: "Cortex-A76", 0xd0c: "Neoverse N1", 0xd0d: "Cortex-A77", 0xd40: "Neoverse V1",
           0xd41: "Cortex-A78", 0xd44: "Cortex-X1", 0xd46: "Cortex-A510", 0xd47: "Cortex-A710", 0xd48: "Cortex-X2",
           0xd49: "Neoverse N2", 0xd4d: "Cortex-A715", 0xd4e: "Cortex-X3", 0xd4f: "Neoverse V2", 0xd80: "Cortex-A520",
           0xd81: "Cortex-A720", 0xd82: "Cortex-X4", 0xd84: "Neoverse V3", 0xd85: "Cortex-X925", 0xd87: "Cortex-A725",
           0xd8e: "Neoverse N3"},
    0x61: {0x022: "Apple M1 Icestorm", 0x023: "Apple M1 Firestorm", 0x032: "Apple M2 Blizzard", 0x033: "Apple M2 Avalanche"},
    0xc0: {0xac3: "Ampere-1", 0xac4: "Ampere-1a"},
}


def processor(cpuinfo: str | None = None) -> str:
    """The processor's name by the text of /proc/cpuinfo; the kinds of its cores where only their numbers stand there; at least
    the architecture."""
    if cpuinfo is None:
        try:
            with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
                cpuinfo = f.read(1 << 20)
        except OSError:
            cpuinfo = ""
    cores: dict[str, int] = {}
    implementer = 0
    for key, _, value in (line.partition(":") for line in cpuinfo.splitlines()):
        key, value = key.strip(), value.strip()
        if key == "model name" and value:
            return value
        try:
            if key == "CPU implementer":
                implementer = int(value, 0)
            elif key == "CPU part":
                name = _ARM.get(implementer, {}).get(int(value, 0), f"implementer {implementer:#04x} part {int(value, 0):#05x}")
                cores[name] = cores.get(name, 0) + 1
        except ValueError:
            pass
    if len(cores) > 1:                       # big and little ones
        return f"{os.uname().machine}, " + " and ".join(f"{n} {name}" for name, n in cores.items())
    return ", ".join([os.uname().machine, *cores])


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
