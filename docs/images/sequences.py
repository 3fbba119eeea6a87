#!/usr/bin/env python3
"""Draws the sequence figures of docs/architecture.md: send.svg, flush.svg, read.svg and upgrade.svg.

python3 docs/images/sequences.py      # writes them beside this file
"""

import pathlib
from xml.sax.saxutils import escape

GREY, WRITE, READ = "#6e7781", "#c2410c", "#2563eb"
FILLS = {
    "out": ("#eef1f4", "#8c959f"), "listen": ("#dbeafe", "#3b82f6"), "serve": ("#e0e7ff", "#6366f1"),
    "mem": ("#dcfce7", "#16a34a"), "flush": ("#fef3c7", "#d97706"), "tier": ("#ffedd5", "#ea580c"),
}
LANE, TOP, ROW, LEFT = 186, 70, 34, 92  # pixels between lifelines, above the first row, per row, left of the first lifeline

# A step is (from, to, text) or (lane, lane, text) for work within a lane; "-" before the text makes a reply, and
# (None, None, text) a heading. Colours: writes orange, reads blue, everything else grey.
FIGURES = {
    "send": {
        "title": "The life of a send",
        "lanes": [("Client", "out"), ("Listener", "listen"), ("Service", "serve"), ("Memory region", "mem"), ("Flusher", "flush"),
                  ("Metadata log", "tier")],
        "colour": WRITE,
        "steps": [
            (0, 2, "requireBuffer: partitions, bytes"),
            (2, 3, "reserve; wait up to 1 s"),
            (2, 0, "-ticket, or NO_BUFFER: try again later"),
            (0, 1, "sendShuffleData"),
            (1, 2, "header: redeem ticket"),
            (1, 3, "each block: copied into its partition's chain, CRC"),
            (2, 3, "commit: visible"),
            (2, 4, "buffers grew (nothing waits)"),
            (2, 0, "-SUCCESS: in memory, not yet on a disk"),
            (0, 2, "reportShuffleResult: block ids"),
            (2, 5, "append, sync two copies together with other reports"),
            (2, 0, "-SUCCESS: on the device"),
        ],
    },
    "flush": {
        "title": "The life of a flush",
        "lanes": [("Memory region", "mem"), ("Scheduler", "flush"), ("Flush worker", "flush"), ("Data log", "tier"), ("Index log", "tier")],
        "colour": WRITE,
        "steps": [
            (0, 1, "above the watermark"),
            (1, 1, "policy picks victims"),
            (1, 0, "seal their chains"),
            (1, 2, "batch, in turns"),
            (2, 3, "one direct write"),
            (2, 4, "index group: bases, records, checksums"),
            (2, 2, "publish: readers find it on disk"),
            (2, 0, "release segments"),
            (None, None, "On an error the batch goes to another disk or tier. If none takes it, it stays in memory, readable, and is retried."),
        ],
    },
    "read": {
        "title": "The life of a read",
        "lanes": [("Client", "out"), ("Service", "serve"), ("Memory region", "mem"), ("Local tier", "tier"), ("Disks, object store", "tier")],
        "colour": READ,
        "steps": [
            (0, 1, "getShuffleResult"),
            (1, 0, "-reported block ids"),
            (0, 1, "getMemoryShuffleData"),
            (1, 2, "slices after cursor"),
            (1, 0, "-blocks; repeat until empty"),
            (0, 1, "getLocalShuffleIndex"),
            (1, 3, "records of all extents of the partition"),
            (1, 0, "-index, fetched once"),
            (0, 1, "getLocalShuffleData"),
            (1, 3, "extents of the range; memory and disk permit"),
            (3, 4, "chunks of 2 MiB"),
            (4, 3, "-verify the CRC"),
            (1, 0, "-bytes, while the next are read"),
            (None, None, "With HDFS the client then opens the files itself. At the end it checks that every reported block arrived."),
        ],
    },
    "upgrade": {
        "title": "The life of an upgrade",
        "lanes": [("Clients", "out"), ("Running worker", "serve"), ("Child: rehearsal", "listen"), ("Successor, same PID", "serve"), ("Operator", "out")],
        "colour": GREY,
        "steps": [
            (4, 1, "SIGUSR2"),
            (1, 2, "new binary, --check"),
            (2, 2, "configuration, ports, memory, disks, HDFS"),
            (2, 1, "-verdict; no: continue"),
            (1, 0, "-writers: NO_BUFFER"),
            (1, 1, "flush memory, or with persistent memory wait for batches"),
            (1, 0, "-GOAWAY; new connections wait in the backlog"),
            (1, 3, "exec: sockets, position in the metadata log, memory"),
            (3, 3, "recover, accept"),
            (0, 3, "repeated and waiting calls"),
            (None, None, "Until exec, any failure leaves the running worker as it was, with the reason in its log and in upgrades_refused_total."),
        ],
    },
}


def draw(figure):
    lanes, steps, colour = figure["lanes"], figure["steps"], figure["colour"]
    width = LEFT * 2 + LANE * (len(lanes) - 1)
    height = TOP + ROW * len(steps) + 24
    x = [LEFT + LANE * lane for lane in range(len(lanes))]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, -apple-system, \'Segoe UI\', \'DejaVu Sans\', sans-serif" font-size="12" fill="{GREY}">',
        f"<title>{escape(figure['title'])}</title>",
        "<!-- Made by docs/images/sequences.py. The greys and colours are readable on light and dark pages. -->",
        f'<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L10 5 L0 10 z" fill="{colour}"/></marker>'
        f'<marker id="reply" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L10 5 L0 10 z" fill="{GREY}"/></marker></defs>',
    ]
    bottom = height - 12 - (ROW if steps[-1][0] is None else 0)
    for (name, fill), centre in zip(lanes, x):
        back, edge = FILLS[fill]
        out.append(f'<path d="M{centre} 44 V{bottom}" stroke="{GREY}" stroke-opacity="0.5" stroke-dasharray="3 4"/>')
        out.append(f'<rect x="{centre - 78}" y="12" width="156" height="32" rx="7" fill="{back}" stroke="{edge}" stroke-width="1.5"/>')
        out.append(f'<text x="{centre}" y="33" text-anchor="middle" font-size="13" font-weight="600" fill="#1f2328">{escape(name)}</text>')
    for row, (begin, end, text) in enumerate(steps):
        y = TOP + ROW * row + 14
        if begin is None:
            out.append(f'<text x="22" y="{y + 10}">{escape(text)}</text>')
            continue
        reply, text = text.startswith("-"), text.lstrip("-")
        if begin == end:
            out.append(f'<path d="M{x[begin]} {y - 8} h18 v14 h-14" fill="none" stroke="{colour}" stroke-width="1.6" marker-end="url(#head)"/>')
            out.append(f'<text x="{x[begin] + 26}" y="{y + 3}">{escape(text)}</text>')
            continue
        style = f'stroke="{GREY}" stroke-width="1.4" stroke-dasharray="5 4" marker-end="url(#reply)"' if reply else \
            f'stroke="{colour}" stroke-width="1.8" marker-end="url(#head)"'
        gap = 4 if end > begin else -4
        out.append(f'<path d="M{x[begin] + gap} {y} H{x[end] - gap}" fill="none" {style}/>')
        out.append(f'<text x="{min(x[begin], x[end]) + (10 if end > begin else 18)}" y="{y - 6}">{escape(text)}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


for name, figure in FIGURES.items():
    (pathlib.Path(__file__).parent / f"{name}.svg").write_text(draw(figure), encoding="utf-8")
