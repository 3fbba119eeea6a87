#!/usr/bin/env python3
"""Draws peers.svg: server CPU per GB of the servers in docs/benchmarks.md, "Other servers", table A (ranges as bars).

python3 docs/images/peers.py > docs/images/peers.svg
"""

ROWS = [  # name, (write of later rounds, low and high), (read)
    ("this worker 0.1.0, TCP", (0.25, 0.27), (0.15, 0.17)),
    ("riffle 0.27, TCP", (0.47, 0.55), (0.42, 0.47)),
    ("this worker 0.1.0, gRPC", (0.33, 0.39), (0.25, 0.27)),
    ("riffle 0.27, gRPC", (0.70, 0.76), (0.80, 0.88)),
    ("Uniffle Java 0.10, gRPC", (1.66, 1.75), (1.46, 2.29)),
]
LEFT, SCALE, TOP, STEP = 190, 235, 62, 52  # pixels; SCALE is pixels per CPU-s/GB
WIDTH, HEIGHT = 820, TOP + STEP * len(ROWS) + 44

print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
      'font-family="system-ui, -apple-system, \'Segoe UI\', \'DejaVu Sans\', sans-serif" font-size="13" fill="#6e7781">')
print("<title>Server CPU seconds per GB, published Java client 0.9.2, spilling</title>")
print("<!-- Made by docs/images/peers.py. The greys and colours are readable on light and dark pages. -->")
print(f'<text x="20" y="22" font-weight="600">Server CPU seconds per GB, Java client 0.9.2, 3.14 GB through 1 GB of memory (lower is better)</text>')
for x, colour, name in ((LEFT, "#d97706", "write and spill, rounds after the first"), (LEFT + 290, "#3b82f6", "read back")):
    print(f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/><text x="{x + 18}" y="45">{name}</text>')
for tick in (0, 0.5, 1, 1.5, 2):
    x = LEFT + tick * SCALE
    print(f'<path d="M{x} {TOP - 6} V{HEIGHT - 34}" stroke="#8c959f" stroke-opacity="0.4"/>'
          f'<text x="{x}" y="{HEIGHT - 16}" text-anchor="middle">{tick:g}</text>')
for row, (name, write, read) in enumerate(ROWS):
    y = TOP + row * STEP
    print(f'<text x="{LEFT - 12}" y="{y + 24}" text-anchor="end">{name}</text>')
    for offset, colour, (low, high) in ((0, "#d97706", write), (20, "#3b82f6", read)):
        # Solid up to the lowest value seen, lighter up to the highest.
        print(f'<rect x="{LEFT}" y="{y + offset}" width="{low * SCALE:.1f}" height="16" fill="{colour}"/>'
              f'<rect x="{LEFT + low * SCALE:.1f}" y="{y + offset}" width="{(high - low) * SCALE:.1f}" height="16" fill="{colour}" fill-opacity="0.45"/>'
              f'<text x="{LEFT + high * SCALE + 6:.1f}" y="{y + offset + 13}">{low:.2f}–{high:.2f}</text>')
print("</svg>")
