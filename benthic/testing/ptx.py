"""Compiled Triton kernels run on a CPU: one block of threads at a time, all its threads in step, on numpy arrays.

For kernels in Triton's explicit dialect, which its interpreter does not take. Inside `emulating()` every launch
compiles for Hopper, as on the device, and the PTX is run on the CPU tensors of the launch, block after block. Seen are
wrong addresses (a read or write outside the tensors, or not aligned, is an AssertionError), wrong layouts and
descriptors, and what is read or overwritten too early: warp-group products are done as late as the kernel's waits
allow. Not seen is what depends on one warp being ahead of another. Shared memory begins as 0xFF, which reads as NaN.

It knows the instructions that the kernels of this package have needed; another one is a KeyError that names it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benthic.kernels.triton.warm import Hopper

Lanes = Any  # a numpy array with one element a thread; registers are raw bits in uint64, predicates are bool
U64 = np.uint64
BASE = 1 << 40  # address of the first byte of global memory
SHARED_BYTES = 227 << 10


# ---- values in registers ---------------------------------------------------------------------------------------------


def _low(x: Lanes, bits: int) -> Lanes:
    return x if bits == 64 else x & U64((1 << bits) - 1)


def _signed(x: Lanes, bits: int) -> Lanes:
    return x.view(np.int64) if bits == 64 else _low(x, 32).astype(np.uint32).view(np.int32).astype(np.int64)


def _float(x: Lanes) -> Lanes:
    return _low(x, 32).astype(np.uint32).view(np.float32)


def _bits(x: Lanes) -> Lanes:
    return np.asarray(x, np.float32).view(np.uint32).astype(U64)


def _bf16(x: Lanes) -> Lanes:
    """Low 16 bits -> float32."""
    return (_low(x, 16).astype(np.uint32) << 16).view(np.float32)


def _to_bf16(x: Lanes) -> Lanes:
    bits = _bits(x)
    rounded = (bits + U64(0x7FFF) + ((bits >> U64(16)) & U64(1))) >> U64(16)
    return np.where(np.isnan(x), U64(0x7FFF), _low(rounded, 16))


def _e4m3_as_f16(x: Lanes) -> Lanes:
    code = _low(x, 8).astype(np.int64)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size = np.where((code & 0x7F) == 0x7F, np.nan, size)
    return np.where(code & 0x80, -size, size).astype(np.float16).view(np.uint16).astype(U64)


# ---- memory ----------------------------------------------------------------------------------------------------------


class _Memory:
    """The storages of a launch's tensors, side by side, with gaps that nobody may touch."""

    def __init__(self, tensors: list[torch.Tensor]):
        self.places: dict[int, tuple[int, torch.Tensor]] = {}  # data pointer of a storage -> offset, its bytes
        size = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self.places:
                raw = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.places[storage.data_ptr()] = size, raw
                size += -(-raw.numel() // 512) * 512 + 512
        self.bytes, self.mine = np.zeros(size, np.uint8), np.zeros(size, bool)
        for at, raw in self.places.values():
            self.bytes[at : at + raw.numel()], self.mine[at : at + raw.numel()] = raw.numpy(), True

    def address(self, tensor: torch.Tensor) -> int:
        place = self.places.get(tensor.untyped_storage().data_ptr())
        return BASE + place[0] + int(tensor.storage_offset()) * tensor.element_size() if place else 0

    def write_back(self) -> None:
        for at, raw in self.places.values():
            raw.copy_(torch.from_numpy(self.bytes[at : at + raw.numel()]))


# ---- a block of threads ----------------------------------------------------------------------------------------------


class _Code:
    """The body of a kernel: (predicate or None, parts of the operation's name, operands), and where labels are."""

    def __init__(self, ptx: str):
        body = ptx[ptx.index(".entry") :]
        body = body[body.index("\n{") + 2 : body.index("-- End function")]
        self.labels: dict[str, int] = {}
        self.steps: list[tuple[tuple[bool, str] | None, list[str], list[str]]] = []
        for line in body.splitlines():
            text = line.split("//")[0].strip()
            if label := re.fullmatch(r"([$\w]+):", text):
                self.labels[label[1]] = len(self.steps)
                continue
            for statement in text.split(";"):
                self._add(statement.strip())

    def _add(self, text: str) -> None:
        match = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text)
        if match is None:  # a declaration, a bracket of inline assembly
            return
        predicate = (match[1] == "!", match[2]) if match[2] else None
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", match[4])
        self.steps.append((predicate, match[3].split("."), operands))


class _Block:
    def __init__(self, code: _Code, memory: _Memory, params: list[int], threads: int, number: tuple[int, int, int]):
        self.code, self.memory, self.params, self.threads, self.number = code, memory, params, threads, number
        self.shared = np.full(SHARED_BYTES, 0xFF, np.uint8)
        self.registers: dict[str, Lanes] = {}
        self.begun: list[Callable[[], None]] = []  # products since the last commit
        self.groups: list[list[Callable[[], None]]] = []

    def run(self) -> None:
        at = 0
        while at < len(self.code.steps):
            predicate, parts, operands = self.code.steps[at]
            at += 1
            on = np.ones(self.threads, bool)
            if predicate is not None:
                on = self.get(predicate[1]).astype(bool) ^ predicate[0]
            if parts[0] == "bra":
                assert on.all() or not on.any(), "threads of a block take different branches"
                at = self.code.labels[operands[0]] if on[0] else at
            elif parts[0] == "ret":
                return
            elif on.any():
                self.step(parts, operands, on)

    # operands

    def get(self, name: str) -> Lanes:
        if re.match(r"-?\d", name):
            literal = int(name[2:], 16) if name.startswith("0f") else int(name.rstrip("U"), 0)
            return np.full(self.threads, literal & (1 << 64) - 1, U64)
        if name == "%tid.x":
            return np.arange(self.threads).astype(U64)
        if name.startswith("%ctaid"):
            return np.full(self.threads, self.number["xyz".index(name[-1])], U64)
        return np.zeros(self.threads, U64) if name == "global_smem" else self.registers[name]

    def put(self, name: str, value: Lanes, on: Lanes) -> None:
        value = value if value.dtype == bool else value.astype(U64)
        old = self.registers.get(name, np.full(self.threads, 0xDEADBEEFDEADBEEF, U64).astype(value.dtype))
        self.registers[name] = np.where(on, value, old)

    def address(self, operand: str) -> Lanes:
        match = re.fullmatch(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+)\s*)?\]", operand)
        assert match is not None, operand
        return self.get(match[1]).astype(np.int64) + int(match[2] or 0)

    def step(self, parts: list[str], operands: list[str], on: Lanes) -> None:
        name, kind = parts[0], parts[-1]
        if name in ("fence", "bar", "griddepcontrol"):  # all threads are in step
            return
        if name in ("ld", "st", "ldmatrix", "stmatrix", "mma", "wgmma"):
            getattr(self, f"_{name}")(parts, operands, on)
        elif name == "mov" and "{" in operands[0] + operands[1]:
            self._split_or_join(kind, operands, on)
        else:
            sources = [self.get(x) for x in operands[1:]]
            with np.errstate(all="ignore"):
                self.put(operands[0], _value(parts, sources), on)

    def _split_or_join(self, kind: str, operands: list[str], on: Lanes) -> None:
        names = _names(operands[0]) if "{" in operands[0] else _names(operands[1])
        width = int(kind[1:]) // len(names)
        if "{" in operands[0]:
            whole = self.get(operands[1])
            for i, part in enumerate(names):
                self.put(part, _low(whole >> U64(i * width), width), on)
        else:
            pieces = [_low(self.get(part), width) << U64(i * width) for i, part in enumerate(names)]
            self.put(operands[0], np.bitwise_or.reduce(pieces), on)

    # memory

    def _ld(self, parts: list[str], operands: list[str], on: Lanes) -> None:
        if "param" in parts:
            number = re.search(r"param_(\d+)", operands[1])
            assert number is not None, operands
            self.put(operands[0], np.full(self.threads, self.params[int(number[1])] & (1 << 64) - 1, U64), on)
            return
        for name, at in self._elements(parts, operands[0], operands[1], on):
            value = np.zeros(self.threads, U64)
            for byte, place in enumerate(at):
                value[on] |= self._space(parts)[place].astype(U64) << U64(8 * byte)
            self.put(name, value, on)

    def _st(self, parts: list[str], operands: list[str], on: Lanes) -> None:
        for name, at in self._elements(parts, operands[1], operands[0], on):
            value = self.get(name)[on]
            for byte, place in enumerate(at):
                self._space(parts)[place] = (value >> U64(8 * byte)).astype(np.uint8)

    def _space(self, parts: list[str]) -> Lanes:
        return self.memory.bytes if "global" in parts else self.shared

    def _elements(self, parts: list[str], names: str, operand: str, on: Lanes) -> Iterator[tuple[str, list[Lanes]]]:
        """Each register of an access, and where its bytes are for the threads that are on."""
        registers, width = _names(names), int(parts[-1][1:]) // 8
        at = self.address(operand)[on]
        assert not (at % (width * len(registers))).any(), f"not aligned: {'.'.join(parts)} {operand}"
        if "global" in parts:
            at = at - BASE
            for byte in range(width * len(registers)):
                inside = (at + byte >= 0) & (at + byte < len(self.memory.mine))
                assert inside.all(), f"outside memory: {'.'.join(parts)} {operand}"
                assert self.memory.mine[at + byte].all(), f"between tensors: {'.'.join(parts)} {operand}"
        for i, name in enumerate(registers):
            yield name, [at + i * width + byte for byte in range(width)]

    def _stmatrix(self, parts: list[str], operands: list[str], on: Lanes) -> None:
        """8x8 tiles of 16 bits: lane l has (l//4, 2*(l%4)) and the one right of it; eight lanes say where rows go."""
        assert "trans" not in parts
        rows = self.address(operands[0]).reshape(-1, 32)
        row, pair = np.divmod(np.arange(32), 4)
        for tile, name in enumerate(_names(operands[1])):
            value = self.get(name).reshape(-1, 32)
            to = rows[:, 8 * tile + row] + 4 * pair
            for byte in range(4):
                self.shared[to + byte] = (value >> U64(8 * byte)).astype(np.uint8)

    def _ldmatrix(self, parts: list[str], operands: list[str], on: Lanes) -> None:
        """The same tiles read; turned: lane l gets (2*(l%4), l//4) and the one below it."""
        rows = self.address(operands[1]).reshape(-1, 32)
        lane = np.arange(32)
        for tile, name in enumerate(_names(operands[0])):
            value = np.zeros(rows.shape, U64)
            for i in range(2):
                row, column = (2 * (lane % 4) + i, lane // 4) if "trans" in parts else (lane // 4, 2 * (lane % 4) + i)
                at = rows[:, 8 * tile + row] + 2 * column
                half = self.shared[at].astype(U64) | self.shared[at + 1].astype(U64) << U64(8)
                value |= half << U64(16 * i)
            self.put(name, value.reshape(-1), on)

    # a warp's products

    def _mma(self, parts: list[str], operands: list[str], on: Lanes) -> None:
        """m16n8k16 of bf16: lane l has rows l//4 and l//4 + 8 of a and of the sum, and column l//4 of b."""
        assert "m16n8k16" in parts, parts
        out, a, b, c = (_names(operand) for operand in operands)
        lane = np.arange(32)
        left, right = (
            np.zeros((self.threads // 32, 16, 16), np.float32),
            np.zeros((self.threads // 32, 16, 8), np.float32),
        )
        for i, name in enumerate(a):
            for half in range(2):
                row, column = lane // 4 + i % 2 * 8, i // 2 * 8 + 2 * (lane % 4) + half
                left[:, row, column] = _bf16(self.get(name) >> U64(16 * half)).reshape(-1, 32)
        for i, name in enumerate(b):
            for half in range(2):
                row = 8 * i + 2 * (lane % 4) + half
                right[:, row, lane // 4] = _bf16(self.get(name) >> U64(16 * half)).reshape(-1, 32)
        product = left @ right
        for i, (name, old) in enumerate(zip(out, c, strict=True)):
            new = product[:, lane // 4 + i // 2 * 8, 2 * (lane % 4) + i % 2].reshape(-1)
            self.put(name, _bits(_float(self.get(old)) + new), on)

    # warp-group products

    def _wgmma(self, parts: list[str], operands: list[str], on: Lanes) -> None:
        if "mma_async" in parts:
            self.begun.append(self._product(parts, operands))
        elif "commit_group" in parts:
            self.groups.append(self.begun)
            self.begun = []
        elif "wait_group" in parts:
            while len(self.groups) > int(operands[0]):
                for product in self.groups.pop(0):
                    product()

    def _product(self, parts: list[str], operands: list[str]) -> Callable[[], None]:
        """m64nNk16 of bf16 from shared memory. The descriptors and the scale of the old sum are taken now."""
        shape = next(re.fullmatch(r"m64n(\d+)k16", part) for part in parts if part.startswith("m64n"))
        assert shape is not None, parts
        names, columns = _names(operands[0]), int(shape[1])
        left, right, keep = (self.get(x).copy() for x in operands[1:4])
        turned = [operand == "1" for operand in operands[6:8]]
        lane, warp = np.arange(128) % 32, np.arange(128) // 32

        def run() -> None:
            for first in range(0, self.threads, 128):
                group = slice(first, first + 128)
                assert (left[group] == left[first]).all(), "descriptors differ within a warp group"
                a = self._tile(int(left[first]), 64, turned[0])
                product = a @ self._tile(int(right[first]), columns, turned[1]).T
                for i, name in enumerate(names):
                    row, column = 16 * warp + lane // 4 + i // 2 % 2 * 8, i // 4 * 8 + 2 * (lane % 4) + i % 2
                    old = self.registers.setdefault(name, np.zeros(self.threads, U64))
                    base = _float(old[group]) if keep[first] else 0.0
                    old = old.copy()
                    old[group] = _bits(base + product[row, column])
                    self.registers[name] = old

        return run

    def _tile(self, descriptor: int, rows: int, turned: bool) -> Lanes:
        """[rows, 16] bf16 as float32, at a matrix descriptor with a swizzle of 128 bytes."""
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        assert descriptor >> 62 == 1, "only the swizzle of 128 bytes is known"
        row, column = np.arange(rows)[:, None], np.arange(16)[None, :]
        if turned:
            at = start + row // 64 * leading + column // 8 * stride + column % 8 * 128 + row % 64 * 2
        else:
            at = start + row // 8 * stride + row % 8 * 128 + column * 2
        at ^= (at >> 7 & 7) << 4
        return _bf16(self.shared[at].astype(U64) | self.shared[at + 1].astype(U64) << U64(8))


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


# ---- operations that give one value ----------------------------------------------------------------------------------


def _compare(how: str, a: Lanes, b: Lanes) -> Lanes:
    unordered = how in ("neu", "gtu", "ltu", "geu", "leu", "equ")
    opposite = {"neu": "eq", "gtu": "le", "ltu": "ge", "geu": "lt", "leu": "gt"}
    if unordered:
        return ~_compare(opposite[how], a, b)
    return {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[how]


def _convert(parts: list[str], x: list[Lanes]) -> Lanes:
    to, source = parts[-2:]
    if (to, source) == ("f16x2", "e4m3x2"):
        return _e4m3_as_f16(x[0]) | _e4m3_as_f16(x[0] >> U64(8)) << U64(16)
    if (to, source) == ("f32", "f16"):
        return _bits(_low(x[0], 16).astype(np.uint16).view(np.float16))
    if (to, source) == ("f32", "bf16"):
        return _low(x[0], 16) << U64(16)
    if (to, source) == ("bf16x2", "f32"):
        return _to_bf16(_float(x[1])) | _to_bf16(_float(x[0])) << U64(16)
    if (to, source) == ("bf16", "f32"):
        return _to_bf16(_float(x[0]))
    value, bits = _low(x[0], int(source[1:])), int(source[1:])
    if source[0] == "s" and bits < 64:
        value = ((value ^ U64(1 << bits - 1)).astype(np.int64) - (1 << bits - 1)).view(U64)
    return _low(value, int(to[1:]))


def _on_floats(name: str, parts: list[str], x: list[Lanes]) -> Lanes:
    if name == "setp":
        return _compare(parts[1], _float(x[0]), _float(x[1]))
    a, *rest = (_float(operand) for operand in x)
    if name == "fma":
        return _bits((a.astype(np.float64) * rest[0] + rest[1]).astype(np.float32))
    one = {"neg": np.negative, "abs": np.abs, "ex2": np.exp2, "rcp": np.reciprocal}
    two = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.fmax, "min": np.fmin}
    return _bits(one[name](a) if name in one else two[name](a, rest[0]))


def _on_lanes(name: str, parts: list[str], x: list[Lanes]) -> Lanes:
    thread = np.arange(len(x[0]))
    if name == "redux":
        return np.repeat(_signed(x[0], 32).reshape(-1, 32).sum(1), 32).view(U64) & U64(0xFFFFFFFF)
    other = x[1].astype(np.int64)
    lane = thread % 32
    return x[0][thread - lane + (lane ^ other if "bfly" in parts else other)]


def _permute(x: list[Lanes]) -> Lanes:
    both = _low(x[0], 32) | x[1] << U64(32)
    chosen = [x[2] >> U64(4 * byte) & U64(7) for byte in range(4)]
    return np.bitwise_or.reduce([_low(both >> c * U64(8), 8) << U64(8 * byte) for byte, c in enumerate(chosen)])


def _shift(name: str, x: Lanes, by: Lanes, kind: str) -> Lanes:
    bits, by = int(kind[1:]), _low(by, 32)
    near = np.minimum(by, U64(63))
    if name == "shl":
        return np.where(by < bits, _low(x << near, bits), U64(0))
    if kind[0] == "s":
        return _low((_signed(x, bits) >> np.minimum(by, U64(bits - 1)).astype(np.int64)).view(U64), bits)
    return np.where(by < bits, _low(x, bits) >> near, U64(0))


def _multiply(parts: list[str], x: list[Lanes], kind: str) -> Lanes:
    bits = int(kind[1:])
    more = x[2] if parts[0] == "mad" else U64(0)
    if "wide" in parts or "hi" in parts:
        a, b = (_signed(v, 32) if kind[0] == "s" else _low(v, 32).astype(np.int64) for v in x[:2])
        product = a * b
        return product.view(U64) + more if "wide" in parts else _low((product.view(U64) >> U64(32)) + more, 32)
    return _low(x[0] * x[1] + more, bits)


def _divide(name: str, x: list[Lanes], kind: str) -> Lanes:
    bits = int(kind[1:])
    if kind[0] != "s":
        return _low(x[0], bits) // _low(x[1], bits) if name == "div" else _low(x[0], bits) % _low(x[1], bits)
    a, b = _signed(x[0], bits), _signed(x[1], bits)
    quotient = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
    return _low((quotient if name == "div" else a - quotient * b).view(U64), bits)


def _value(parts: list[str], x: list[Lanes]) -> Lanes:
    """The result of one instruction from the bits of its operands."""
    name, kind = parts[0], parts[-1]
    if name == "cvt":
        return _convert(parts, x)
    if kind == "bf16x2":
        assert name == "mul", parts
        return _to_bf16(_bf16(x[0]) * _bf16(x[1])) | _to_bf16(_bf16(x[0] >> U64(16)) * _bf16(x[1] >> U64(16))) << U64(
            16
        )
    if name == "selp":
        return np.where(x[2].astype(bool), x[0], x[1])
    if name in ("shfl", "redux"):
        return _on_lanes(name, parts, x)
    if kind == "f32":
        return _on_floats(name, parts, x)
    if kind == "pred":
        a, *rest = (operand.astype(bool) for operand in x)
        return {"mov": lambda: a, "not": lambda: ~a, "and": lambda: a & rest[0], "or": lambda: a | rest[0]}[name]()
    if name == "prmt":
        return _permute(x)
    if name in ("shl", "shr"):
        return _shift(name, x[0], x[1], kind)
    if name in ("mul", "mad"):
        return _multiply(parts, x, kind)
    if name in ("div", "rem"):
        return _divide(name, x, kind)
    bits = int(kind[1:])
    if name == "bfe":
        field, sign = _low(x[0], bits) >> x[1] & (U64(1) << x[2]) - U64(1), U64(1) << (x[2] - U64(1))
        return _low((field ^ sign) - sign, bits) if kind[0] == "s" else field
    a, b = (_signed(v, bits) if kind[0] == "s" else _low(v, bits) for v in (x[0], x[-1]))
    if name == "setp":
        return _compare(parts[1], a, b)
    simple = {"mov": lambda: a, "not": lambda: ~a, "and": lambda: a & b, "or": lambda: a | b, "xor": lambda: a ^ b}
    simple |= {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "max": lambda: np.maximum(a, b),
        "min": lambda: np.minimum(a, b),
        "neg": lambda: -a,
    }
    return _low(simple[name]().view(U64), bits)


# ---- launches --------------------------------------------------------------------------------------------------------


def _run(kernel: JITFunction, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    compiled: Any = cast("Any", kernel).warmup(*args, grid=(1,), **options)
    given = [(p, value) for p, value in zip(kernel.params, args, strict=False) if not p.is_constexpr]
    memory = _Memory([value for _, value in given if isinstance(value, torch.Tensor)])
    params: list[int] = []
    for p, value in given:
        if isinstance(value, torch.Tensor):
            params.append(memory.address(value))
        elif isinstance(value, float):
            params.append(int(np.float32(value).view(np.uint32)))
        elif value != 1 or p.do_not_specialize:  # an argument of 1 became a constant
            params.append(value)
    code = _Code(compiled.asm["ptx"])
    threads = compiled.metadata.num_warps * 32
    size = (*grid, 1, 1)[:3]
    for number in np.ndindex(size[::-1]):
        _Block(code, memory, [*params, 0, 0], threads, number[::-1]).run()
    memory.write_back()


@contextmanager
def emulating() -> Iterator[None]:
    """Inside this block launches run here, on CPU tensors. Not in a process that runs Triton's interpreter."""
    launch = JITFunction.__getitem__

    def run_here(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: _run(kernel, grid, args, options)

    driver.set_active(cast("Any", Hopper()))
    JITFunction.__getitem__ = run_here  # type: ignore[method-assign]
    try:
        yield
    finally:
        JITFunction.__getitem__ = launch  # type: ignore[method-assign]
