"""What a program compiled for TPUs does, counted from its text: bytes through main memory, products, collectives."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

_WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:,|$)")
_OPERAND = re.compile(r"%([\w.\-]+)")  # XLA writes /*index=5*/ before every fifth
_CALLED = re.compile(r"\b(?:calls|body|condition|to_apply|branch_computations)=(\{[^}]*\}|%[\w.\-]+)")
_FREE = {"parameter", "bitcast", "get-tuple-element", "tuple", "constant", "custom-call", "after-all", "while"}
_SENT = {  # bytes that each of n devices sends for every byte that it puts in, in a ring
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
}


@dataclasses.dataclass(frozen=True)
class Array:
    """Part of a result: its shape, its bytes, and whether it lies in main memory."""

    shape: tuple[int, ...]
    nbytes: int
    main: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation, with the results of its operands."""

    op: str
    results: list[Array]
    operands: list[list[Array]]
    line: str


@dataclasses.dataclass
class Computation:
    """A part of the program: how often it runs, and whether its inner results never leave the chip."""

    instructions: list[Instruction]
    runs: int = 0
    fused: bool = False


def read(hlo: str) -> list[Computation]:
    """The computations of a compiled program, and how often each runs."""
    hlo = re.sub(r'\n(?=["}][^\n])', " ", hlo)  # kernels write their settings over several lines
    named = {}
    for text in re.split(r"\n(?=\S)", hlo):
        if head := re.match(r"(ENTRY )?%([\w.\-]+) ", text):
            named[head[2]] = Computation(list(_instructions(text)), runs=int(head[1] is not None))
    for caller in reversed(named.values()):  # what is called is written above its caller
        for one in caller.instructions:
            for called in _CALLED.findall(one.line):
                for name in _OPERAND.findall(called):
                    if name in named:
                        named[name].runs += caller.runs * _turns(one, named)
                        named[name].fused |= caller.fused or one.op not in ("while", "conditional", "call")
    return list(named.values())


def _turns(one: Instruction, named: dict[str, Computation]) -> int:
    """How often a loop runs: it counts from 0 to the one number in its condition. Any other loop counts once."""
    condition = re.search(r"condition=%([\w.\-]+)", one.line)
    if one.op != "while" or condition[1] not in named:
        return 1
    ends = [re.search(r"s32\[\]\S* constant\((\d+)\)", each.line) for each in named[condition[1]].instructions]
    ends = [int(end[1]) for end in ends if end]
    return ends[0] if len(ends) == 1 else 1


def _instructions(text: str) -> Iterator[Instruction]:
    arrays: dict[str, list[Array]] = {}
    for line in text.splitlines():
        if found := _LINE.match(line):
            name, kind, op, arguments = found.groups()
            arrays[name] = [_array(*part) for part in _ARRAY.findall(kind)]
            yield Instruction(op, arrays[name], [arrays.get(x, []) for x in _OPERAND.findall(arguments)], line)


def _array(kind: str, dims: str, layout: str) -> Array:
    shape = tuple(int(d) for d in dims.split(",") if d)
    return Array(shape, _WIDTH.get(kind, 4) * math.prod(shape), "S(" not in layout)


def memory_traffic(program: list[Computation]) -> Iterator[float]:
    """Bytes that each instruction moves between the chip's main memory and anything else.

    XLA's own `bytes accessed` counts a weight when it is fetched into the fast on-chip memory, again when pieces of it
    are joined there and again when it is used. Here an operand or result counts if its layout lies in main memory: a
    fetch once, an update in place by what is written.
    """
    for part in program:
        if not part.fused and part.runs:
            yield from (part.runs * x for one in part.instructions if (x := _moved(one)))


def _moved(one: Instruction) -> float:
    if one.op in _FREE or one.op.endswith("-done"):
        return 0.0
    if one.op.endswith("-start"):  # operand, result, context: moved if one of the two is in main memory
        source, target = (one.results * 2)[:2]
        return float(min(source.nbytes, target.nbytes)) if source.main or target.main else 0.0
    if one.op == "dynamic-update-slice":
        (whole, *_), (written, *_) = one.operands[1], one.results
        return float(whole.nbytes * (whole.main + written.main))
    return float(sum(x.nbytes for each in (*one.operands, one.results) for x in each if x.main))


def products(program: list[Computation]) -> float:
    """Operations of all matrix products, which compiled for a TPU are convolutions, and of the attention kernels."""
    return float(sum(part.runs * _operations(one) for part in program for one in part.instructions))


def _operations(one: Instruction) -> float:
    if one.op == "custom-call" and (kernel := re.search(r"splash_mha_(fwd|dkv)", one.line)):
        *batch, heads, length, size = one.operands[2][0].shape  # the queries; without an axis for rows on some chips
        tile = int(re.search(r'block_q\w*\\": (\d+)', one.line)[1])
        seen = length * (length + tile) / 2  # tiles on and below the diagonal; 2 products of each, 5 backward
        return {"fwd": 4.0, "dkv": 10.0}[kernel[1]] * math.prod(batch) * heads * size * seen
    if one.op not in ("convolution", "dot"):
        return 0.0
    # Of [b, m, k] x [b, k, n] -> [b, m, n]: the sizes multiply to b^3 (m k n)^2. What is b has a number for a label.
    shapes = [x[0].shape for x in (*one.operands[:2], one.results)]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.line).groups()
    left, right, out = (dict(zip(x, shape, strict=True)) for x, shape in zip(labels, shapes, strict=True))
    batch = math.prod(n for label, n in out.items() if label.isdigit() and left[label] == right[label] == n)
    return 2 * math.sqrt(math.prod(map(math.prod, shapes)) / batch)


def collectives(program: list[Computation], devices: int) -> dict[str, tuple[int, float]]:
    """How many collectives of each kind run, and the bytes that one device sends for them, in rings."""
    found = collections.defaultdict(lambda: (0, 0.0))
    for part in program:
        for one in part.instructions:
            kind = one.op.removesuffix("-start")
            if kind in _SENT and part.runs:
                put_in, (count, sent) = sum(x.nbytes for each in one.operands for x in each), found[kind]
                more = part.runs * put_in * _SENT[kind](_group(one.line, devices))
                found[kind] = count + part.runs, sent + more
    return dict(found)


def _group(line: str, devices: int) -> int:
    """Devices of one replica group, in any of the ways in which XLA writes them."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2]))
    return devices
