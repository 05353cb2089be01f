"""Makes quant.json: hand-checkable groups with their scales and codes, in exact fractions. No torch, no numpy.

    python -m tests.golden.make_quant

Written from section 6.1 of the model specification alone: the formulas below share nothing with the package.
"""

import json
import struct
from fractions import Fraction
from pathlib import Path

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]  # codes 0 to 7
# codes 0 to 126: exponent field 0 is subnormal, 127 would be NaN
E4M3 = [
    Fraction(m, 512) if e == 0 else Fraction(8 + m, 8) * Fraction(2) ** (e - 7)
    for e in range(16)
    for m in range(8)
    if (e, m) != (15, 7)
]


def f32(x: Fraction) -> Fraction:
    """A fraction as float32 stores it; the inputs here are exact or quotients of float32 numbers."""
    return Fraction(struct.unpack("<f", struct.pack("<f", float(x)))[0])


def nearest(size: Fraction, table: list[Fraction]) -> int:
    """Code of the nearest magnitude; of two equally near ones, the even code."""
    return min(range(len(table)), key=lambda code: (abs(table[code] - size), code % 2))


def ceil_log2(x: Fraction) -> int:
    e = -200
    while Fraction(2) ** e < x:
        e += 1
    return e


def quantise(kind: str, values: list[float]) -> tuple[int, list[int]]:
    """(scale byte, codes) of one group. The sign bit of a code is that of the value, also for zero."""
    exact = [Fraction(v) for v in values]
    top = max(abs(v) for v in exact)
    if kind == "fp8":
        exponent = ceil_log2(f32(max(top, f32(Fraction(1, 10000))) / 448))
        scale, byte = Fraction(2) ** exponent, exponent + 127
    elif kind == "mxfp4":
        exponent = ceil_log2(f32(max(top, 6 * Fraction(2) ** -126) / 6))
        scale, byte = Fraction(2) ** exponent, exponent + 127
    else:
        byte = nearest(min(f32(max(top, 6 * Fraction(2) ** -9) / 6), Fraction(448)), E4M3)
        scale = E4M3[byte]
    table, sign_bit = (E4M3, 128) if kind == "fp8" else (E2M1, 8)
    codes = []
    for v, x in zip(values, exact, strict=True):
        size = min(f32(abs(x) / scale), table[-1])
        codes.append(nearest(size, table) | (sign_bit if str(v).startswith("-") else 0))
    return byte, codes


def cases() -> list[tuple[str, str, list[float]]]:
    def fill(values: list[float], width: int) -> list[float]:
        return values + [0.0] * (width - len(values))

    every_code = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    midpoints = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]
    out: list[tuple[str, str, list[float]]] = []
    for kind, width in (("mxfp4", 32), ("nvfp4", 16)):
        out += [
            ("all 16 codes, scale 1", kind, fill(every_code, width)),
            ("midpoints go to the even code", kind, fill(midpoints, width)),
            ("maximum one bf16 step above 6", kind, fill([6.03125, 3.0, -0.4], width)),
            ("small group", kind, fill([2.0**-20, -(2.0**-21), 3 * 2.0**-22], width)),
        ]
    out += [
        ("zeros: the floor", "mxfp4", fill([0.0, -0.0], 32)),
        ("zeros: the floor", "nvfp4", fill([0.0, -0.0], 16)),
        ("below the floor", "nvfp4", fill([6 * 2.0**-10, 2.0**-10, -(2.0**-11)], 16)),
        ("scale between two E4M3 numbers", "nvfp4", fill([6.4, 1.0, -2.66, 5.3], 16)),
        ("beyond 2688: saturates", "nvfp4", fill([3000.0, -2688.0, 1344.0, 100.0], 16)),
        ("zeros: the floor", "fp8", fill([0.0, -0.0], 32)),
        ("below the floor", "fp8", fill([0.00005, -0.00002], 32)),
        ("maximum 448: scale 1", "fp8", fill([448.0, -448.0, 1.0, 1.0625, 1.1875, 0.001], 32)),
        ("one bf16 step above 448: scale 2", "fp8", fill([450.0, 17.0, 19.0, -0.3], 32)),
        ("power of two", "fp8", fill([1.0, -0.999, 0.01, 0.00001], 32)),
        ("subnormal codes", "fp8", fill([448.0] + [k / 1024 for k in range(1, 20)], 32)),
    ]
    return out


def make() -> str:
    rows = []
    for title, kind, values in cases():
        values = [float(f32(Fraction(v))) if v else v for v in values]
        scale, codes = quantise(kind, values)
        rows.append({"title": title, "kind": kind, "values": values, "scale": scale, "codes": codes})
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


if __name__ == "__main__":
    Path(__file__).with_name("quant.json").write_text(make())
