"""What is around the streamed products of the experts, and the weights they stream: on a CPU by evaluating the very
instructions that unpack them; on a GPU also the products."""

import re

import pytest
import torch
from torch import Tensor

from benthic.errors import KernelBuildError
from benthic.kernels import backends, quant
from benthic.kernels.moe_experts import experts_reference, unprepare
from benthic.types import NUMERICS

pytest.importorskip("triton")

from benthic.kernels.triton import moe_experts, moe_experts_hopper, tuning
from benthic.kernels.triton.moe_experts_hopper import BLOCK, Packed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the CPU interprets
LOW = 0xFFFFFFFF


def stack(experts: int, n: int, k: int, spread: int = 4, device: torch.device = DEVICE) -> quant.Fp4Matrix:
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(121 - spread, 121, (experts, n, k // 32), dtype=torch.uint8, device=device)
    return quant.Fp4Matrix(codes, scales)


# ---- unpacking: the instructions, one after another ------------------------------------------------------------------


def bytes_of(*words: Tensor) -> Tensor:
    return torch.stack([(word >> (8 * i)) & 255 for word in words for i in range(4)], -1)


def permute(low: Tensor, high: Tensor, selector: Tensor) -> Tensor:
    source, out = bytes_of(low, high), torch.zeros_like(low)
    for i in range(4):
        nibble = (selector >> (4 * i)) & 15
        assert (nibble < 8).all()
        out |= source.gather(-1, nibble[..., None]).squeeze(-1) << (8 * i)
    return out


def times(a: Tensor, b: Tensor) -> Tensor:
    """Pairs of bf16 in 32 bits."""
    out = torch.zeros_like(a)
    for shift in (0, 16):
        x, y = (((v >> shift) & 0xFFFF).to(torch.int32) << 16 for v in (a, b))
        product = x.view(torch.float32).double() * y.view(torch.float32).double()
        out |= (product.to(torch.bfloat16).view(torch.int16).long() & 0xFFFF) << shift
    return out


def evaluate(text: str, outputs: int, inputs: list[Tensor]) -> list[Tensor]:
    """Runs inline assembly: $0 .. are outputs, then inputs, 32-bit words in int64."""
    registers = {f"${outputs + i}": x for i, x in enumerate(inputs)}

    def read(name: str) -> Tensor:
        return registers[name] if name in registers else torch.full_like(inputs[0], int(name, 0))

    for line in re.findall(r"[a-z][\w.]* [^;{}]+(?=;)", text):
        op, rest = line.split(" ", 1)
        if op == ".reg" or op == "reg":
            continue
        to, *names = [name.strip() for name in rest.split(",")]
        args = [read(name) for name in names]
        if op == "and.b32":
            value = args[0] & args[1]
        elif op == "shl.b32":
            value = (args[0] << args[1]) & LOW
        elif op == "shr.u32":
            value = args[0] >> args[1]
        elif op == "shf.l.wrap.b32":
            assert names[0] == names[1]
            value = (args[0] << int(names[2]) | args[0] >> 32 - int(names[2])) & LOW
        elif op == "prmt.b32":
            value = permute(*args)
        elif op == "lop3.b32":
            table, value = int(names[3], 0), torch.zeros_like(args[0])
            for row in range(8):
                if table >> row & 1:
                    bits = [x if row >> (2 - i) & 1 else x ^ LOW for i, x in enumerate(args[:3])]
                    value |= bits[0] & bits[1] & bits[2]
        else:
            assert op == "mul.rn.bf16x2", line
            value = times(args[0], args[1])
        registers[to] = value
    return [registers[f"${i}"] for i in range(outputs)]


def unpacked(packed: Packed) -> Tensor:
    """Registers of all threads -> [E, N, K]: values over the row's base, or E4M3 codes."""
    experts, n, k = packed.shape
    shape = (experts, n // BLOCK, k // BLOCK, BLOCK)
    words = packed.words.view(*shape, 4, 4).long() & LOW
    word = list(words.unbind(-1))
    scales = (packed.scales.view(shape).long() & LOW)[..., None].expand(words.shape[:-1])
    halves = []
    for half in range(2):
        if packed.carried:
            tables = moe_experts_hopper.tables(packed.words.device)
            index = (scales >> (8 * torch.arange(4, device=scales.device))) & 31
            low, high = tables[index] & LOW, (tables[index] >> 32) & LOW
            text = moe_experts_hopper._CARRIED.value[half]
            out = evaluate(text, 4, [*word, *[low] * 4, *[high] * 4])
            halves.append(torch.stack([bytes_of(r) for r in out], -2))  # [.., thread, step of 16, byte]
        else:
            out = evaluate(moe_experts_hopper._EXACT.value[half], 8, [*word, *[scales] * 4])
            pairs = torch.stack([torch.stack([r & 0xFFFF, r >> 16], -1) for r in out], -2)
            halves.append(pairs.unflatten(-2, (4, 2)))  # [.., thread, step of 16, pair, which of two]
    together = torch.cat(halves, 5)
    if packed.carried:
        places = together.transpose(4, 5).flatten(-3)  # step, thread, byte
        inverse = moe_experts_hopper.columns(True).argsort().to(places.device)
        columns = places[..., inverse].to(torch.uint8).view(quant.E4M3)
    else:
        bits = together.movedim(4, 6).flatten(-4)  # step, pair, thread, which of two
        columns = bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)
    return columns.transpose(2, 3).reshape(packed.shape)


@pytest.mark.parametrize("spread", [1, 6, 100])
def test_exact_weights_come_out_of_the_registers(spread: int) -> None:
    weight = stack(2, 256, 384, spread)
    packed = moe_experts_hopper.pack(weight, carried=False)
    values = unpacked(packed).float() * packed.base[..., None]
    assert torch.equal(values, quant.values(weight, torch.float32))


@pytest.mark.parametrize("spread", [1, 14, 30])
def test_carried_weights_come_out_of_the_registers(spread: int) -> None:
    weight = stack(2, 256, 384, spread)
    weight.codes[0, 3] &= 0x11  # a row of small codes: its scale is below the groups'
    weight.codes[1, 5] = 0
    packed = moe_experts_hopper.pack(weight, carried=True)
    want = quant.by_row(weight)
    assert torch.equal(unpacked(packed).view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(packed.base, want.scales)


def test_rows_can_be_packed_in_another_order() -> None:
    weight = stack(1, 256, 128)
    order = moe_experts_hopper.interleave(128, DEVICE)
    assert order[:20].tolist() == [*range(8), *range(128, 136), *range(8, 12)]
    assert order.sort().values.tolist() == list(range(256))
    packed = moe_experts_hopper.pack(weight, False, order)
    values = unpacked(packed).float() * packed.base[..., None]
    assert torch.equal(values, quant.values(weight, torch.float32)[:, order])


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("spread", [1, 14])
def test_packed_experts_are_read_back(carried: bool, spread: int) -> None:
    """As `prepare` packs them, w13 in its own order of rows; by the public function, from the form alone."""
    w13, w2 = stack(3, 256, 384, spread), stack(3, 384, 128, spread)
    order = moe_experts_hopper.interleave(128, DEVICE)
    packed = moe_experts_hopper.pack(w13, carried, order), moe_experts_hopper.pack(w2, carried)
    for expert in range(3):
        both = unprepare(*packed, expert)
        assert both is not None
        for got, weight in zip(both, (w13, w2), strict=True):
            want = quant.values(quant.Fp4Matrix(weight.codes[expert], weight.scales[expert]))
            want = quant.roundtrip_carry(want) if carried else want
            assert got.dtype == torch.bfloat16
            assert torch.equal(got, want.to(torch.bfloat16))


def test_a_group_that_is_no_number_shows() -> None:
    weight = stack(1, 128, 128)
    weight.scales[0, 7, 2] = 255
    for carried in (False, True):
        base = moe_experts_hopper.pack(weight, carried).base
        assert base.isnan().nonzero().tolist() == [[0, 7]]


# ---- rows around the products ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "k", "experts", "height"), [(1, 1, 1, 16), (3, 4, 16, 16), (90, 3, 5, 16)])
def test_places(tokens: int, k: int, experts: int, height: int) -> None:
    ids = torch.randint(0, experts, (tokens, k), device=DEVICE)
    ids[0, 0] = -1 if tokens > 1 else 0  # a pair that nobody serves
    places = moe_experts.place(ids, experts, height)
    flat = ids.flatten()
    served = flat >= 0
    order = torch.argsort(torch.where(served, flat, experts), stable=True)[: int(served.sum())]
    want = torch.full_like(flat, -1)
    want[order] = torch.arange(order.shape[0], device=DEVICE)
    assert places.rows.flatten().tolist() == want.tolist()
    tiles, first = [], 0
    for expert, count in enumerate(torch.bincount(flat[served], minlength=experts).tolist()):
        tiles += [[expert, first + at, min(height, count - at)] for at in range(0, count, height)]
        first += count
    assert places.count.item() == len(tiles) <= places.tiles.shape[0]
    assert places.tiles[: len(tiles), :3].tolist() == tiles


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_spread(carried: bool, raw: bool) -> None:
    x = (torch.randn(3, 2 * 256, device=DEVICE) * torch.logspace(-3, 2, 512, device=DEVICE)).bfloat16()[:, 256:]
    x = x if raw else quant.roundtrip_fp8_reference(x)
    ids, weights = torch.tensor([[2, 0], [1, 2], [0, -1]], device=DEVICE), torch.rand(3, 2, device=DEVICE)
    places = moe_experts.place(ids, 3, 16)
    rows = moe_experts._spread_rows(x, places, weights, carried, raw)
    grid = quant.roundtrip_fp8_reference(x)
    codes, scales = quant.carry(grid)
    codes = codes.view(torch.uint8).unflatten(1, (-1, 128))[..., moe_experts_hopper.columns(True, DEVICE)].flatten(1)
    assert torch.equal(rows.grid, grid)
    for token, slot in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0)):
        row = int(places.rows[token, slot])
        assert rows.weights[row] == weights[token, slot]
        if carried:
            assert torch.equal(rows.values[row].view(torch.uint8), codes[token])
            assert rows.scales[row] == scales[token]
        else:
            assert torch.equal(rows.values[row], grid[token])


def test_hidden_rows_are_carried() -> None:
    wide = torch.randn(3, 384, device=DEVICE) * torch.logspace(-4, 2, 384, device=DEVICE)
    codes, groups = quant.quantise_fp8(wide)
    got, scales = moe_experts._carried_rows(codes, groups)
    want, row_scales = quant.carry(quant.dequantise_fp8_reference(codes, groups))
    order = moe_experts_hopper.columns(True, DEVICE)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8).unflatten(1, (-1, 128))[..., order].flatten(1))
    assert torch.equal(scales, row_scales)


def test_a_pair_that_nobody_serves_adds_nothing() -> None:
    y = torch.randn(3, 64, device=DEVICE).bfloat16()
    ids = torch.tensor([[1, -1], [0, 1]], device=DEVICE)
    places = moe_experts.place(ids, 2, 16)
    total = moe_experts._sum(y, places.rows, torch.float32)
    assert torch.equal(total[0], y[1].float())
    assert torch.equal(total[1], y[0].float() + y[2].float())


# ---- configurations --------------------------------------------------------------------------------------------------


def shapes(carried: bool, experts: int = 48, hidden: int = 5120, inner: int = 2304) -> tuple[Packed, Packed]:
    nothing = torch.empty(0)
    return (
        Packed(torch.Size((experts, 2 * inner, hidden)), nothing, nothing, nothing, carried),
        Packed(torch.Size((experts, hidden, inner)), nothing, nothing, nothing, carried),
    )


ROWS = (1, 48, 384, 1152, 3072, 12288, 1 << 20)


@pytest.mark.parametrize("carried", [False, True])
def test_a_configuration_for_any_number_of_rows(carried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_experts_hopper, "_streams", lambda *_: False)
    for sizes in ({}, {"experts": 16, "hidden": 256, "inner": 128}, {"hidden": 384}):
        matrices = shapes(carried, **sizes)
        for rows in ROWS:
            name = moe_experts_hopper.choose(rows, *matrices)
            assert name == moe_experts_hopper.default(carried, rows, matrices[0].shape[0])
            configs = [moe_experts_hopper.config_for(name, matrix) for matrix in matrices]
            assert configs[0]["ROWS"] == configs[1]["ROWS"]
            for config, matrix in zip(configs, matrices, strict=True):
                assert matrix.shape[1] % config["HEIGHT"] == 0


def test_the_table_decides_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = shapes(False)
    key = ("experts_exact", "48x4608x5120")

    def chosen(name: str, rows: int = 48) -> str:
        with tuning.trying({key: {"name": name}}):
            return moe_experts_hopper.choose(rows, *matrices)

    monkeypatch.setattr(moe_experts_hopper, "_streams", lambda *_: False)
    assert chosen("four16") == "four16"
    assert chosen("few") == "ring16"
    monkeypatch.setattr(moe_experts_hopper, "_streams", lambda *_: True)
    assert chosen("few") == "few"
    assert chosen("nobody knows it") == "ring16"
    assert [moe_experts_hopper.choose(rows, *matrices) for rows in (48, 12288)] == ["ring16", "wide128"]
    monkeypatch.setattr(moe_experts_hopper, "STREAMS", True)
    assert [moe_experts_hopper.choose(rows, *matrices) for rows in (48, 3072, 12288)] == ["few", "some", "many"]
    odd = shapes(False, hidden=384)  # 384 weight rows are no pieces of 256
    assert moe_experts_hopper.choose(48, *odd) == "ring16"


def test_a_shape_that_does_not_compile_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise KernelBuildError("no room")

    moe_experts_hopper._streams.cache_clear()
    monkeypatch.setattr(moe_experts_hopper.build, "available", lambda: True)
    monkeypatch.setattr(moe_experts_hopper.stream, "ready", fails)
    monkeypatch.setattr(moe_experts_hopper, "STREAMS", True)
    try:
        assert moe_experts_hopper.choose(48, *shapes(False)) == "ring16"
        assert moe_experts_hopper.choose(48, *shapes(False)) == "ring16"
    finally:
        moe_experts_hopper._streams.cache_clear()
    assert [record.message for record in caplog.records] == ["Triton's experts run instead"]


@pytest.mark.parametrize("form", ["exact", "carried"])
def test_every_configuration_fits_a_multiprocessor(form: str) -> None:
    odd = shapes(form == "carried", hidden=384)[1]
    for name, listed in moe_experts_hopper.CONFIGS[form].items():
        low = moe_experts_hopper.config_for(name, odd)
        assert low["HEIGHT"] == 128, name
        for config in (listed, low):
            warps = config["HEIGHT"] // 16 if config["KIND"] == "ring" else config["num_warps"]
            row = 128 if form == "carried" else 256
            stage = config["HEIGHT"] * 68 + config["ROWS"] * row
            assert config["STAGES"] * stage <= 227 << 10, name
            assert warps * 32 * config["registers"] <= 65536, name


def test_what_the_table_names_is_compiled_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], bool, int]] = []
    monkeypatch.setattr(moe_experts_hopper.build, "available", lambda: True)
    monkeypatch.setattr(moe_experts_hopper.stream, "compile_together", lambda *args: asked.append(args))
    moe_experts_hopper.warm.cache_clear()
    try:
        moe_experts_hopper.warm(True, torch.Size((48, 4608, 5120)), 5120)
        monkeypatch.setattr(moe_experts_hopper, "STREAMS", True)
        moe_experts_hopper.warm(False, torch.Size((48, 4608, 5120)), 5120)
    finally:
        moe_experts_hopper.warm.cache_clear()
    assert [(sorted(names), *rest) for names, *rest in asked] == [([], True, 48), (["few", "many", "some"], False, 48)]


def test_all_of_them_are_tried() -> None:
    for form, configs in moe_experts_hopper.CONFIGS.items():
        tried = moe_experts_hopper.CANDIDATES[form]
        assert set(tried) == {*configs, *moe_experts_hopper.stream.SHAPES[form]}
        assert all(config == {"name": name} for name, config in tried.items())


# ---- the products ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("round_hidden", [False, True])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (3, 3), (65, 3), (700, 2)])
def test_packed_experts(tokens: int, k: int, fast: bool, round_hidden: bool) -> None:
    w13, w2 = stack(6, 512, 384), stack(6, 384, 256)
    prepared = moe_experts.prepare(w13, w2, NUMERICS["fast" if fast else "production"])
    assert isinstance(prepared[0], Packed)
    x = quant.roundtrip_fp8_reference(torch.randn(tokens, 384, device=DEVICE).bfloat16())
    ids = torch.rand(tokens, 6, device=DEVICE).argsort(1)[:, :k].contiguous()
    weights = torch.rand(tokens, k, device=DEVICE)
    got = moe_experts.experts(x, ids, weights, *prepared, 10.0, True, round_hidden, fast)
    with backends.reference():
        want = experts_reference(x, ids, weights, w13, w2, 10.0, True, round_hidden, fast)
    assert (got - want).norm() <= 0.01 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_every_configuration_gives_the_same_bits(fast: bool) -> None:
    w13, w2 = stack(4, 512, 512), stack(4, 512, 256)
    prepared = moe_experts.prepare(w13, w2, NUMERICS["fast" if fast else "production"])
    x = quant.roundtrip_fp8_reference(torch.randn(150, 512, device=DEVICE).bfloat16())
    ids = torch.rand(150, 4, device=DEVICE).argsort(1)[:, :2].contiguous()
    weights = torch.rand(150, 2, device=DEVICE)
    seen: dict[str, Tensor] = {}
    form = moe_experts_hopper.form_of(fast)
    for name, config in moe_experts_hopper.CANDIDATES[form].items():
        with tuning.trying({(f"experts_{form}", "4x512x512"): config}):
            assert moe_experts_hopper.choose(300, *prepared) == name
            seen[name] = moe_experts.experts(x, ids, weights, *prepared, 10.0, True, False, fast)
            alone = moe_experts.experts(x[7:8], ids[7:8], weights[7:8], *prepared, 10.0, True, False, fast)
        assert torch.equal(alone[0], seen[name][7]), name
    first = next(iter(seen.values()))
    assert [name for name, y in seen.items() if not torch.equal(y, first)] == []


@pytest.mark.gpu
def test_experts_in_a_graph_follow_their_routing() -> None:
    w13, w2 = stack(5, 256, 256), stack(5, 256, 128)
    prepared = moe_experts.prepare(w13, w2, NUMERICS["production"])
    x = quant.roundtrip_fp8_reference(torch.randn(9, 256, device=DEVICE).bfloat16())
    ids, weights = torch.zeros(9, 2, dtype=torch.int64, device=DEVICE), torch.rand(9, 2, device=DEVICE)

    def run() -> Tensor:
        return moe_experts.experts(x, ids, weights, *prepared, 10.0, True)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        ids.copy_(torch.rand(9, 5, device=DEVICE).argsort(1)[:, :2])
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, run())


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements() -> None:
    """70000 tokens, 6 slots, 5120 channels: each slot's row is the token's own, so the sum is 6 times it."""
    x = torch.randint(-8, 9, (70000, 5120), device=DEVICE).bfloat16()
    ids = torch.arange(6, device=DEVICE).expand(70000, 6).contiguous()
    places = moe_experts.place(ids, 6, 128)
    rows = moe_experts._spread_rows(x, places, torch.ones(70000, 6, device=DEVICE), False, False)
    assert torch.equal(moe_experts._sum(rows.values, places.rows, torch.bfloat16), 6 * x)
