#!/usr/bin/env python3
"""Draws peers.svg: server CPU per GB, from the table "Spilling" of docs/benchmarks.md (machine I).

python3 docs/images/peers.py > docs/images/peers.svg
"""

ROWS = [  # name, write of later rounds, read
    ("this worker, TCP", 0.63, 0.43),
    ("riffle 0.27, TCP", 1.11, 1.40),
    ("this worker, gRPC", 0.99, 0.69),
    ("riffle 0.27, gRPC", 1.66, 2.42),
]
LEFT, SCALE, TOP, STEP = 150, 245, 62, 52  # pixels; SCALE is pixels per CPU-s/GB
WIDTH, HEIGHT = 820, TOP + STEP * len(ROWS) + 44

print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
      'font-family="system-ui, -apple-system, \'Segoe UI\', \'DejaVu Sans\', sans-serif" font-size="13" fill="#6e7781">')
print("<title>Server CPU seconds per GB, published Java client 0.9.2, spilling</title>")
print("<!-- Made by docs/images/peers.py. The greys and colours are readable on light and dark pages. -->")
print('<text x="20" y="22" font-weight="600">Server CPU seconds per GB, Java client 0.9.2, 3.15 GB through 1 GB of memory (lower is better)</text>')
for x, colour, name in ((LEFT, "#d97706", "write and spill, rounds after the first"), (LEFT + 290, "#3b82f6", "read back")):
    print(f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/><text x="{x + 18}" y="45">{name}</text>')
for tick in (0, 0.5, 1, 1.5, 2, 2.5):
    x = LEFT + tick * SCALE
    print(f'<path d="M{x} {TOP - 6} V{HEIGHT - 34}" stroke="#8c959f" stroke-opacity="0.4"/>'
          f'<text x="{x}" y="{HEIGHT - 16}" text-anchor="middle">{tick:g}</text>')
for row, (name, write, read) in enumerate(ROWS):
    y = TOP + row * STEP
    print(f'<text x="{LEFT - 12}" y="{y + 24}" text-anchor="end">{name}</text>')
    for offset, colour, value in ((0, "#d97706", write), (20, "#3b82f6", read)):
        print(f'<rect x="{LEFT}" y="{y + offset}" width="{value * SCALE:.1f}" height="16" fill="{colour}"/>'
              f'<text x="{LEFT + value * SCALE + 6:.1f}" y="{y + offset + 13}">{value:.2f}</text>')
print("</svg>")
