#!/usr/bin/env python3
"""Draws the figures of the recovery decision (docs/durability.md), of the extent map and of admission (docs/architecture.md).

python3 docs/images/structures.py     # writes recovery.svg, extents.svg and admission.svg beside this file
"""

import pathlib
from xml.sax.saxutils import escape

GREY, DARK = "#6e7781", "#1f2328"
FILLS = {
    "question": ("#eef1f4", "#8c959f"), "good": ("#dcfce7", "#16a34a"), "bad": ("#ffedd5", "#ea580c"),
    "map": ("#e0e7ff", "#6366f1"), "disk": ("#fef3c7", "#d97706"), "object": ("#dbeafe", "#3b82f6"), "lost": ("#ffffff", "#8c959f"),
}


def box(x, y, width, height, fill, lines, weight=400, dash=False):
    inside, edge = FILLS[fill]
    extra = ' stroke-dasharray="4 3"' if dash else ""
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{inside}" stroke="{edge}" stroke-width="1.5"{extra}/>']
    first = y + height / 2 + 4 - 8 * (len(lines) - 1)
    for row, line in enumerate(lines):
        parts.append(
            f'<text x="{x + width / 2:g}" y="{first + 16 * row:g}" text-anchor="middle" font-weight="{weight}" fill="{DARK}">{escape(line)}</text>'
        )
    return parts


def arrow(path, label="", at=(0, 0)):
    parts = [f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.6" marker-end="url(#head)"/>']
    if label:
        parts.append(f'<text x="{at[0]}" y="{at[1]}">{escape(label)}</text>')
    return parts


def text(x, y, line, anchor="start", weight=400):
    return [f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{escape(line)}</text>']


def write(name, title, width, height, parts):
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, -apple-system, \'Segoe UI\', \'DejaVu Sans\', sans-serif" font-size="12" fill="#6e7781">',
        f"<title>{escape(title)}</title>",
        "<!-- Made by docs/images/structures.py. The greys and colours are readable on light and dark pages. -->",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L10 5 L0 10 z" fill="{GREY}"/></marker></defs>',
        *parts,
        "</svg>",
    ]
    pathlib.Path(__file__).with_name(name).write_text("\n".join(svg) + "\n")


def recovery():
    """Three questions in a row; the first "no" leads to the store, or to incomplete shuffles."""
    questions = [
        ["1. Enough directories present?", "all of one or two,", "a majority of three or more"],
        ["2. None of them used", "without the others?"],
        ["3. One log copy with", "every acknowledged record?"],
    ]
    parts = []
    for number, lines in enumerate(questions):
        x = 14 + 236 * number
        parts += box(x, 14, 204, 66, "question", lines)
        parts += arrow(f"M{x + 204} 47 h30", "yes", (x + 206, 41))
        parts += arrow(f"M{x + 102} 80 V140", "no", (x + 108, 100))
    parts += box(722, 14, 192, 66, "good", ["proven: shuffles, reports", "and results are served"], 600)
    parts += box(14, 142, 684, 34, "question", ["Does an object store have the whole log, and has data of the shuffle been offloaded to it?"])
    parts += arrow("M698 159 H834 V82", "yes, for this shuffle", (704, 153))
    parts += arrow("M356 176 V208", "no", (362, 196))
    parts += box(14, 210, 684, 50, "bad", ["incomplete: data is served; results are refused with an error that names directory or file,",
                                           "until the directory returns or the applications have ended"], 600)
    parts += text(14, 284, "After an upgrade in place, the hand-off record of the predecessor answers question 1.")
    write("recovery.svg", "The recovery decision", 928, 296, parts)


def extents():
    """A partition's stream as a row of extents, and their bytes in data logs and objects."""
    parts = text(14, 26, "partition 7 of a shuffle: one stream of bytes, offsets never change", weight=600)
    row = [("base 0", "object", 120), ("base 4 MiB", "object", 150), ("base 9 MiB", "lost", 100), ("base 12 MiB", "disk", 180), ("base 18 MiB", "disk", 130)]
    x, starts = 14, []
    for label, fill, width in row:
        where = {"object": "Object", "lost": "Lost", "disk": "Disk"}[fill]
        parts += box(x, 38, width, 46, fill, [label, where], dash=fill == "lost")
        starts.append(x)
        x += width + 6
    parts += text(x + 8, 58, "extent: base, length,")
    parts += text(x + 8, 74, "blocks, location")
    parts += box(14, 150, 300, 40, "object", ["object s0000000004, sorted by partition"])
    parts += box(424, 150, 200, 40, "disk", ["data log 5 on /data1"])
    parts += box(644, 150, 200, 40, "disk", ["data log 2 on /data2"])
    parts += arrow("M74 84 V148")
    parts += arrow("M215 84 V148")
    parts += arrow("M492 84 V148")
    parts += arrow("M653 84 L700 148")
    parts += arrow("M424 170 H318", "offload", (340, 164))
    parts += text(14, 216, "Offload copies the extents of the oldest data logs into an object, then changes their location. Base, length and records stay.")
    parts += text(14, 234, "A read resolves each extent: from the disk, as a range of the object, or as an error that names the lost blocks.")
    write("extents.svg", "The extent map", 928, 246, parts)


def admission():
    """What waits, what decides who is next, and what it waits for."""
    parts = []
    for x, line in ((14, "request"), (316, "who is next (sched)"), (660, "resource")):
        parts += text(x, 22, line, weight=600)
    rows = [("ticket request", "memory: max-min shares by weight"), ("sealed batch", "flush workers of a tier"),
            ("chunk of a disk or object read", "read memory and a share of its device"),
            ("gRPC request, response, fetch, HDFS write", "places of one kind"),
            ("registration, report, partition", "heap budget of one kind")]
    for row, (asks, resource) in enumerate(rows):
        y = 32 + 42 * row
        parts += box(14, y, 272, 32, "question", [asks])
        parts += arrow(f"M286 {y + 16} H314")
        parts += arrow(f"M614 {y + 16} H658")
        parts += box(660, y, 254, 32, "disk", [resource])
    parts += box(316, 32, 298, 74, "map", ["FairQueue", "earliest virtual time: paid by size and weight"])
    parts += box(316, 116, 298, 74, "map", ["FairSemaphore", "who holds least by weight, then FairQueue;", "the last eighth is for newcomers"])
    parts += box(316, 200, 298, 32, "bad", ["shares: refused at once beyond 1/(n+1)"])
    write("admission.svg", "Admission: who is next, and for what", 928, 246, parts)


if __name__ == "__main__":
    recovery()
    extents()
    admission()
