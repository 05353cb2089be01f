"""Write tests/golden/kernels/*.json: small inputs and outputs of every kernel, by plain Python arithmetic in float64.

Nothing of the package is used here. Formulas are those of the model specification, sections 2.2 to 2.12, 4.1 and 6.1;
inputs are exact in bfloat16, so that both dtypes can be tested. Run from the repository root:

    python tests/golden/make_kernels.py
"""

import json
import math
import struct
from pathlib import Path

OUT = Path(__file__).parent / "kernels"

Vector = list[float]
Matrix = list[list[float]]


def bf16(x: float) -> float:
    """Nearest bfloat16, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def f32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def wave(i: int, step: float = 0.7) -> float:
    """A repeatable value in [-2, 2], exact in bfloat16."""
    return bf16(2 * math.sin(step * i + 0.3))


def write(name: str, **content: object) -> None:
    """One line for each value, and one for each element of a list of lists or objects."""
    path = OUT / f"{name}.json"
    parts = []
    for key, value in content.items():
        lines = (
            [json.dumps(item) for item in value]
            if isinstance(value, list) and isinstance(value[0], list | dict)
            else None
        )
        parts.append(
            f"{json.dumps(key)}: " + (json.dumps(value) if lines is None else "[\n" + ",\n".join(lines) + "\n]")
        )
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    print(f"{path.name}: {path.stat().st_size} bytes")


# ---- 2.3 norm --------------------------------------------------------------------------------------------------------


def rms_norm(x: Vector, weight: Vector, eps: float) -> Vector:
    statistic = 1 / math.sqrt(dot(x, x) / len(x) + eps)
    return [v * statistic * w for v, w in zip(x, weight, strict=True)]


def norm() -> None:
    weight = [1.0, 2.0, 0.5, -1.0]
    cases = {
        "3-4-0-0: mean square 6.25, root 2.5": [3.0, 4.0, 0.0, 0.0],
        "large": [bf16(1000 * v) for v in (1.5, -2.25, 0.5, 3.0)],
        "tiny: 1e-8 squared is far above eps 1e-20": [bf16(1e-8 * v) for v in (1.0, -2.0, 0.5, 3.0)],
        "below eps: 1e-12 squared is far under eps": [bf16(1e-12 * v) for v in (1.0, -2.0, 0.5, 3.0)],
        "zero": [0.0] * 4,
    }
    write(
        "norm",
        weight=weight,
        eps=1e-20,
        cases=[{"name": name, "x": x, "y": rms_norm(x, weight, 1e-20)} for name, x in cases.items()],
    )


# ---- 2.4 rotary ------------------------------------------------------------------------------------------------------


def frequencies(dim: int, theta: float, yarn: tuple[float, float, float, int] | None) -> Vector:
    base = [1 / theta ** (2 * i / dim) for i in range(dim // 2)]
    if yarn is None:
        return base
    factor, fast, slow, original = yarn

    def c(n: float) -> float:
        return dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(c(fast)), 0), min(math.ceil(c(slow)), dim - 1)
    out = []
    for i, f in enumerate(base):
        ramp = min(max((i - low) / max(high - low, 1e-3), 0), 1)
        out.append(f / factor * ramp + f * (1 - ramp))
    return out


def rotate(x: Vector, position: int, freqs: Vector, sign: int) -> Vector:
    y = list(x)
    first = len(x) - 2 * len(freqs)
    for i, f in enumerate(freqs):
        a, b = x[first + 2 * i], x[first + 2 * i + 1]
        angle = sign * position * f
        y[first + 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        y[first + 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return y


def rope() -> None:
    freqs = [1.0, 0.25]
    x = [5.0, -3.0, 1.0, 0.0, 2.0, -1.0]
    positions = [0, 1, 7, 100]
    write(
        "rope",
        frequencies=[
            {"dim": dim, "theta": theta, "yarn": yarn, "f": frequencies(dim, theta, yarn)}
            for dim, theta, yarn in [
                (64, 10000.0, None),
                (64, 160000.0, (16, 32, 1, 65536)),  # release: pairs 0-15 as they are, from 25 on divided by 16
                (64, 160000.0, (16, 32, 1, 512)),
                (64, 10000.0, (16, 32, 1, 65536)),  # the ramp ends at 33, behind the last pair
                (8, 100.0, (4, 32, 1, 65536)),  # and at 9, which dim - 1 cuts to 7
                (4, 10000.0, None),
            ]
        ],
        freqs=freqs,
        x=x,
        positions=positions,
        turned=[rotate(x, p, freqs, 1) for p in positions],
        back=[rotate(x, p, freqs, -1) for p in positions],
    )


# ---- 6.2 products ----------------------------------------------------------------------------------------------------


def gemm() -> None:
    x = [[1.0, 2.0, 3.0], [-0.5, 0.25, 4.0]]
    weight = [[1.0, 0.0, -1.0], [0.5, 0.5, 0.5], [2.0, -1.0, 0.25], [0.0, 0.0, 0.0]]
    # 256 + 1 + 1 + 1: bfloat16 holds 256 and 260 (spacing 2: 258 too); adding the ones one by one in bfloat16 loses all
    long_row = [256.0] + [1.0] * 6
    grouped_x = [[[1.0, 2.0], [3.0, -1.0]], [[0.5, 0.0], [1.0, 1.0]]]  # [T, G, K]
    grouped_w = [[[1.0, 1.0], [2.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [0.0, 1.0], [-1.0, 0.5]]]  # [G, N, K]
    write(
        "gemm",
        x=x,
        weight=weight,
        y=[[dot(row, w) for w in weight] for row in x],
        long_row=long_row,
        long_sum=sum(long_row),
        grouped_x=grouped_x,
        grouped_weight=grouped_w,
        grouped_y=[[[dot(row[g], w) for w in grouped_w[g]] for g in range(2)] for row in grouped_x],
    )


# ---- 2.12 activation, router, experts --------------------------------------------------------------------------------


def silu(x: float) -> float:
    return x * sigmoid(x)


def activation(gate: float, up: float, limit: float, weight: float) -> float:
    if limit > 0:
        gate, up = min(gate, limit), max(min(up, limit), -limit)
    return silu(gate) * up * weight


def swiglu() -> None:
    gate = [0.0, 1.0, -2.0, 9.5, 12.0, 300.0, -300.0, 3.0]
    up = [1.0, 2.0, -3.0, 20.0, -20.0, 10.0, 5.0, -0.5]
    cases = [
        {
            "limit": limit,
            "weight": weight,
            "y": [activation(g, u, limit, weight) for g, u in zip(gate, up, strict=True)],
        }
        for limit, weight in ((10.0, 1.0), (10.0, 0.375), (0.0, 1.0), (1.0, 2.0))
    ]
    write("swiglu", gate=gate, up=up, cases=cases)


def route(h: Vector, gate: Matrix, bias: Vector, k: int, normalise: bool, scale: float) -> tuple[list[int], Vector]:
    scores = []
    for row in gate:
        g = dot(h, row)
        scores.append(math.sqrt(g if g > 30 else math.log1p(math.exp(g))))
    order = sorted(range(len(gate)), key=lambda e: (-(scores[e] + bias[e]), e))[:k]
    weights = [scores[e] for e in order]
    if normalise and k > 1:
        total = sum(weights) + 1e-20
        weights = [w / total for w in weights]
    return order, [w * scale for w in weights]


def moe_gate() -> None:
    gate = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.5], [0.0, 1.0]]  # rows 1 and 4 are equal
    cases = []
    for name, h, bias, k, normalise, scale in [
        ("plain", [1.0, 2.0], [0.0] * 5, 2, True, 1.5),
        ("equal experts: the lower index first", [0.5, 3.0], [0.0, 0.0, -9.0, 0.0, 0.0], 3, True, 1.5),
        ("the bias chooses, the weight ignores it", [1.0, 1.0], [0.0, 0.0, 0.0, 7.0, 0.0], 2, True, 1.5),
        ("one expert is not normalised", [1.0, 2.0], [0.0] * 5, 1, True, 1.5),
        ("normalisation off", [1.0, 2.0], [0.0] * 5, 3, False, 2.0),
        ("far below and far above zero", [-40.0, 100.0], [0.0] * 5, 5, True, 1.0),
    ]:
        ids, weights = route(h, gate, bias, k, normalise, scale)
        cases.append(
            {
                "name": name,
                "h": h,
                "bias": bias,
                "k": k,
                "normalise": normalise,
                "scale": scale,
                "ids": ids,
                "weights": weights,
            }
        )
    write("moe_gate", gate=gate, cases=cases)


def moe_experts() -> None:
    x = [[1.0, -1.0], [2.0, 0.5], [0.0, 3.0]]
    ids = [[2, 0], [1, 2], [2, 1]]  # expert 3 is idle
    weights = [[0.75, 0.5], [1.0, 0.25], [0.5, 0.5]]
    w13 = [[[wave(e * 12 + r * 2 + c) for c in range(2)] for r in range(6)] for e in range(4)]  # [E, 2*I, D], I = 3
    w2 = [[[wave(100 + e * 6 + r * 3 + c) for c in range(3)] for r in range(2)] for e in range(4)]  # [E, D, I]
    limit = 2.0
    out = []
    for row, row_ids, row_weights in zip(x, ids, weights, strict=True):
        total = [0.0, 0.0]
        for e, w in zip(row_ids, row_weights, strict=True):
            both = [dot(row, m) for m in w13[e]]
            y = [activation(both[i], both[3 + i], limit, w) for i in range(3)]
            total = [t + dot(y, m) for t, m in zip(total, w2[e], strict=True)]
        out.append(total)
    write("moe_experts", x=x, ids=ids, weights=weights, w13=w13, w2=w2, limit=limit, y=out)


# ---- 2.2 hyper-connections -------------------------------------------------------------------------------------------


def sinkhorn(a: Matrix, eps: float, iters: int) -> Matrix:
    n = len(a)
    c = []
    for row in a:
        peak = max(row)
        e = [math.exp(v - peak) for v in row]
        c.append([v / sum(e) + eps for v in e])
    for step in range(2 * iters - 1):
        if step % 2:  # over the outputs of each input
            c = [[v / (sum(row) + eps) for v in row] for row in c]
        else:  # over the inputs of each output
            sums = [sum(c[i][k] for i in range(n)) + eps for k in range(n)]
            c = [[row[k] / sums[k] for k in range(n)] for row in c]
    return c


def hyper() -> None:
    streams, width, eps = 2, 3, 1e-6
    scale = [0.5, 0.25, 1.5]
    base = [-1.0, 2.0, 0.5, -0.5, 1.0, -2.0, 0.0, 0.75]
    fn = [[wave(r * 6 + c, 1.1) for c in range(6)] for r in range(8)]
    cases = []
    for name, s, iters in [
        ("one step", [[1.0, 2.0, -1.0], [0.5, 0.0, 4.0]], 1),
        ("twenty steps", [[1.0, 2.0, -1.0], [0.5, 0.0, 4.0]], 20),
        ("large streams", [[1000.0, 2000.0, -500.0], [0.5, 0.0, 4.0]], 3),
        ("tiny streams", [[bf16(1e-8), bf16(-2e-8), 0.0], [bf16(3e-8), 0.0, bf16(1e-8)]], 3),
    ]:
        v = [value for row in s for value in row]
        statistic = 1 / math.sqrt(dot(v, v) / len(v) + 1e-20)
        z = [dot(row, v) * statistic for row in fn]
        pre = [sigmoid(z[i] * scale[0] + base[i]) + eps for i in range(2)]
        post = [2 * sigmoid(z[2 + i] * scale[1] + base[2 + i]) for i in range(2)]
        logits = [[z[4 + 2 * i + j] * scale[2] + base[4 + 2 * i + j] for j in range(2)] for i in range(2)]
        comb = sinkhorn(logits, eps, iters)
        out = [1.0, -2.0, 0.5]
        cases.append(
            {
                "name": name,
                "s": s,
                "iters": iters,
                "pre": pre,
                "post": post,
                "comb": comb,
                "collapsed": [sum(pre[j] * s[j][d] for j in range(streams)) for d in range(width)],
                "out": out,
                "expanded": [
                    [post[k] * out[d] + sum(comb[j][k] * s[j][d] for j in range(streams)) for d in range(width)]
                    for k in range(streams)
                ],
            }
        )
    write("hyper", fn=fn, scale=scale, base=base, norm_eps=1e-20, hc_eps=eps, cases=cases)


# ---- 2.6 pooling -----------------------------------------------------------------------------------------------------


def compress() -> None:
    a = [[[1.0, 2.0], [3.0, -4.0]], [[0.5, 100.0], [-0.5, 1.0]]]  # [G, r, dh]
    b = [[[0.0, 0.0], [0.0, 2.0]], [[-1.0, 500.0], [1.0, -500.0]]]
    out = []
    for values, logits in zip(a, b, strict=True):
        row = []
        for channel in range(2):
            peak = max(line[channel] for line in logits)
            e = [math.exp(line[channel] - peak) for line in logits]
            row.append(sum(w * line[channel] for w, line in zip(e, values, strict=True)) / sum(e))
        out.append(row)
    write("compress", a=a, b=b, y=out)


# ---- 2.9 n-gram memory -----------------------------------------------------------------------------------------------


def engram() -> None:
    multipliers = [76632096046245, 4839876093313, 35959672319349, 73987337458391]  # the release's layer 1
    primes = [[16000057, 16000079], [16000081, 16000877], [16000879, 16000889]]  # values of the release, two heads
    flat = [p for row in primes for p in row]
    offsets = [[sum(flat[: 2 * i + h]) for h in range(2)] for i in range(3)]
    ids = [[5, 17, 99091, 2], [99091, 99091, 99091, 99091], [0, 0, 0, 0], [12345, 678, 2, 2]]
    rows = []
    for tokens in ids:
        mixed = tokens[0] * multipliers[0]
        row = []
        for i in range(1, 4):
            mixed ^= tokens[i] * multipliers[i]
            row += [mixed % primes[i - 1][h] + offsets[i - 1][h] for h in range(2)]
        rows.append(row)

    weight = [[1.0, 0.5, -1.0, 2.0], [0.25, 1.0, 1.0, 1.0]]
    value = [1.0, -2.0, 0.5, 4.0]
    cases = []
    for name, s, key in [
        ("plain", [[1.0, 2.0, -1.0, 0.5], [3.0, 0.0, 1.0, -2.0]], [[2.0, 1.0, 1.0, 1.0], [-1.0, 2.0, 0.5, 4.0]]),
        ("dot exactly zero counts as positive", [[1.0, 0.0, 0.0, 0.0]] * 2, [[0.0, 1.0, 0.0, 0.0]] * 2),
        ("large stream, tiny key", [[1000.0, -2000.0, 500.0, 250.0]] * 2, [[bf16(1e-8), 0.0, bf16(2e-8), 0.0]] * 2),
    ]:
        out, gates = [], []
        for c in range(2):
            d = math.fsum(s[c][i] * weight[c][i] * key[c][i] for i in range(4))
            d /= math.sqrt(dot(s[c], s[c]) / 4 + 1e-20) * math.sqrt(dot(key[c], key[c]) / 4 + 1e-20) * 2.0
            gate = sigmoid(math.copysign(math.sqrt(max(abs(d), 1e-6)), d))
            gates.append(gate)
            out.append([s[c][i] + gate * value[i] for i in range(4)])
        cases.append({"name": name, "s": s, "keys": key, "gates": gates, "y": out})
    write(
        "engram",
        multipliers=multipliers,
        primes=primes,
        offsets=offsets,
        ids=ids,
        rows=rows,
        weight=weight,
        value=value,
        eps=1e-20,
        cases=cases,
    )


# ---- 4.1 records -----------------------------------------------------------------------------------------------------

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e2m1_code(x: float) -> int:
    """Nearest code; of two equally near ones the even one."""
    size = min(abs(x), 6.0)
    code = min(range(8), key=lambda c: (abs(E2M1[c] - size), c % 2))
    return code | (8 if math.copysign(1, x) < 0 else 0)


def e4m3_value(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


def e4m3_code(x: float) -> int:
    """Nearest code up to 448; of two equally near ones the even one."""
    size = min(abs(x), 448.0)
    code = min(range(127), key=lambda c: (abs(e4m3_value(c) - size), c % 2))
    return code | (128 if math.copysign(1, x) < 0 else 0)


def power_exponent(ratio: float) -> int:
    mantissa, exponent = math.frexp(ratio)  # ratio = mantissa * 2^exponent, mantissa in [0.5, 1)
    return exponent - 1 if mantissa == 0.5 else exponent


def pair_bytes(codes: list[int]) -> list[int]:
    return [codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2)]


def kv_copy() -> None:
    x = [bf16(v) for v in (0.5 * i * (-1) ** (i // 3) for i in range(32))]  # 0 to 15.5, signs in threes
    record: dict[str, dict[str, object]] = {}

    exponent = power_exponent(f32(max(map(abs, x)) / 448))
    codes = [e4m3_code(v / 2.0**exponent) for v in x]
    record["fp8"] = {
        "data": codes,
        "scales": [exponent + 127],
        "values": [e4m3_value(c) * 2.0**exponent for c in codes],
    }

    exponent = power_exponent(f32(max(map(abs, x)) / 6))
    codes = [e2m1_code(v / 2.0**exponent) for v in x]
    record["mxfp4"] = {
        "data": pair_bytes(codes),
        "scales": [exponent + 127],
        "values": [math.copysign(E2M1[c & 7], 7.5 - c) * 2.0**exponent for c in codes],
    }

    data, scales, values = [], [], []
    for group in (x[:16], x[16:]):
        code = e4m3_code(f32(max(map(abs, group)) / 6))
        scale = e4m3_value(code)
        codes = [e2m1_code(f32(v / scale)) for v in group]
        data += pair_bytes(codes)
        scales.append(code)
        values += [math.copysign(E2M1[c & 7], 7.5 - c) * scale for c in codes]
    record["nvfp4"] = {"data": data, "scales": scales, "values": values}

    record["f32"] = {"data": list(struct.pack("<32f", *x)), "scales": [], "values": x}
    write("kv_copy", x=x, records=record)


# ---- 2.5 attention ---------------------------------------------------------------------------------------------------


def attend(q: Vector, listed: list[Vector | None], sink: float, scale: float, round_probs: bool) -> Vector:
    """Online softmax over groups of 64 listed rows, as section 2.5 describes it; None is a skipped row."""
    peak, total, out = -1e30, 0.0, [0.0] * len(q)
    for first in range(0, len(listed), 64):
        group = [row for row in listed[first : first + 64] if row is not None]
        logits = [scale * dot(q, row) for row in group]
        new = max([peak, *logits])
        shrink = math.exp(peak - new)
        total, out = total * shrink, [v * shrink for v in out]
        for logit, row in zip(logits, group, strict=True):
            p = math.exp(logit - new)
            total += p
            p = bf16(p) if round_probs else p
            out = [v + p * k for v, k in zip(out, row, strict=True)]
        peak = new
    if total == 0:
        return out  # no row at all: the sink takes everything
    total += math.exp(sink - peak)
    return [v / total for v in out]


def attn_sparse() -> None:
    width, scale = 4, 0.5
    rows = [[wave(4 * i + c, 0.37) for c in range(width)] for i in range(140)]
    entries = [[wave(7 * i + 3 * c, 0.53) for c in range(width)] for i in range(90)]
    q = [[3.0, -1.0, 2.0, 0.5], [0.25, 4.0, -3.0, 1.0]]  # two heads
    sink = [0.5, -2.0]
    cases = []
    for name, begin, count, records in [
        ("one row, no entry", 3, 1, None),
        ("two rows and one entry", 10, 2, [5]),
        ("a full window and two skipped entries", 12, 128, [0, 4, 80, -1, -1]),
        ("window of 70, 66 entries: groups of 64 on both sides", 0, 70, [*range(10, 76)]),
        ("nothing to see", 0, 0, None),
    ]:
        window: list[Vector | None] = list(rows[begin : begin + count])
        window += [None] * (-count % 64)
        listed = window + [None if r < 0 else entries[r] for r in records or []]
        cases.append(
            {
                "name": name,
                "begin": begin,
                "count": count,
                "records": records,
                "exact": [attend(q[h], listed, sink[h], scale, False) for h in range(2)],
                "rounded": [attend(q[h], listed, sink[h], scale, True) for h in range(2)],
            }
        )
    write("attn_sparse", q=q, rows=rows, entries=entries, sink=sink, scale=scale, cases=cases)


# ---- 2.7, 2.8 indexer ------------------------------------------------------------------------------------------------


def indexer() -> None:
    heads, width, n = 3, 4, 21
    q = [[wave(5 * h + c, 0.9) for c in range(width)] for h in range(heads)]
    w = [0.75, -0.375, 1.25]
    keys = [[wave(3 * j + 2 * c, 0.61) for c in range(width)] for j in range(n)]
    exact, rounded = [], []
    for key in keys:
        dots = [dot(q[h], key) for h in range(heads)]
        exact.append(sum(w[h] * max(dots[h], 0.0) for h in range(heads)))
        rounded.append(bf16(sum(bf16(bf16(w[h]) * max(bf16(dots[h]), 0.0)) for h in range(heads))))
    scores = [1.0, 0.0, 5.0, 0.0, 3.0, 3.0, -1.0, 3.0, 0.0, 2.0, 7.0, 0.0, -2.0, 6.0]
    choices = [
        {"visible": 14, "topk": 4, "candidates": None, "entries": [2, 4, 10, 13]},  # 7 6 5, then the first 3
        {"visible": 13, "topk": 4, "candidates": None, "entries": [2, 4, 5, 10]},
        {"visible": 14, "topk": 9, "candidates": None, "entries": [0, 1, 2, 4, 5, 7, 9, 10, 13]},  # a zero: the first
        {"visible": 3, "topk": 4, "candidates": None, "entries": [0, 1, 2, -1]},
        {"visible": 0, "topk": 4, "candidates": None, "entries": [-1, -1, -1, -1]},
        {"visible": 14, "topk": 4, "candidates": [0, 1, -1], "entries": [2, 4, 5, 7]},  # blocks of 4: entries 0 to 7
        {"visible": 14, "topk": 4, "candidates": [3, -1, -1], "entries": [12, 13, -1, -1]},  # partial block, 2 left
        {"visible": 14, "topk": 4, "candidates": [1, 3, -1], "entries": [4, 5, 7, 13]},
    ]
    blocks = [  # of 4 entries: block maxima 5, 3, 7, 6
        {"visible": 14, "blocks": 2, "candidates": [2, 3]},  # the newest and the best other
        {"visible": 13, "blocks": 2, "candidates": [2, 3]},  # the newest holds one entry of -2 and stays
        {"visible": 12, "blocks": 2, "candidates": [0, 2]},
        {"visible": 9, "blocks": 2, "candidates": [0, 2]},
        {"visible": 4, "blocks": 2, "candidates": [0, -1]},
        {"visible": 0, "blocks": 2, "candidates": [-1, -1]},
        {"visible": 14, "blocks": 5, "candidates": [0, 1, 2, 3, -1]},
    ]
    write(
        "indexer",
        q=q,
        w=w,
        keys=keys,
        exact=exact,
        rounded=rounded,
        scores=scores,
        block_size=4,
        choices=choices,
        blocks=blocks,
    )


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for make in (
        norm,
        rope,
        gemm,
        swiglu,
        moe_gate,
        moe_experts,
        hyper,
        compress,
        engram,
        kv_copy,
        attn_sparse,
        indexer,
    ):
        make()
