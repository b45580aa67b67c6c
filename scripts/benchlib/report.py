"""Tables for people, and a plot of the ratios as SVG."""

from __future__ import annotations

from html import escape
from typing import Any


def machine() -> dict[str, Any]:
    """What the figures belong to: processor, instruction set, limits measured now."""
    from milad import capi
    name = "unknown"
    try:
        with open("/proc/cpuinfo") as f:
            name = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"cpu": name, "isa": capi.devices().get("isa"), "read_GBps": [round(capi.probe("bandwidth", t) / 1e9, 1) for t in (1, 2)],
            "int8_GOPS": [round(capi.probe("int8", t) / 1e9) for t in (1, 2)]}


def head() -> str:
    m = machine()
    return (f"{m['cpu']}, {m['isa']}; read {m['read_GBps'][0]} / {m['read_GBps'][1]} GB/s and int8 {m['int8_GOPS'][0]} / "
            f"{m['int8_GOPS'][1]} GOPS on one / two threads\n"
            f"{'':42} {'threads':>7} {'milad':>10} {'llama.cpp':>10} {'ratio':>6} {'of the limit':>15}")


def line(row: dict[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    limit = f"of {row['read_GBps']:.0f} GB/s" if row.get("read_GBps") else row["limit"]
    share = "-" if row["share"] is None else f"{row['share']:.0%} {limit}"
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return (f"{row['name']:42} {row['threads']:>7} {number(row['milad']):>10} {number(row['peer']):>10} {ratio:>6} {share:>15}"
            f"  {row['unit']}{'' if row.get('steady', True) else ', while memory kept changing'}".rstrip())


def svg(rows: list[dict[str, Any]]) -> str:
    """Bars of milad / llama.cpp, 1 marked."""
    bars = [r for r in rows if r["ratio"]]
    top = max([2.0, *(r["ratio"] for r in bars)])
    width, left, high = 900, 330, 20
    scale = (width - left - 60) / top
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{high * len(bars) + 30}" font-family="sans-serif" '
           'font-size="12">', '<text x="4" y="14">milad / llama.cpp, more is better</text>']
    for i, row in enumerate(bars):
        y = 24 + i * high
        out.append(f'<text x="4" y="{y + 13}">{escape(row["name"])}, {row["threads"]} threads</text>'
                   f'<rect x="{left}" y="{y + 2}" width="{row["ratio"] * scale:.1f}" height="{high - 5}" fill="#4a7"/>'
                   f'<text x="{left + row["ratio"] * scale + 4:.1f}" y="{y + 13}">{row["ratio"]:.2f}</text>')
    out.append(f'<line x1="{left + scale:.1f}" x2="{left + scale:.1f}" y1="20" y2="{24 + high * len(bars)}" stroke="#a33"/></svg>')
    return "\n".join(out) + "\n"
