"""The cells of an ablation: what is decoded how. A cell is one row of the table."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vadusa_jax.config import DecodeConfig
from vadusa_jax.decode.accept import Greedy
from vadusa_jax.decode.modes import Mode, parse_mode
from vadusa_jax.decode.sampling import Sampling
from vadusa_jax.evaluation.clips import file_name
from vadusa_jax.evaluation.scores import AR

GREEDY_AR = "greedy_ar"
RULES = (AR, "greedy", "exact", "tolerance:3", "typical", "topk:5", "pcg", "ssd", "viterbi")  # one mode of every rule


@dataclasses.dataclass(frozen=True)
class Cell:
    """A mode with its nodes, as it is written on a command line, the draft heads that it may use, and the sampling."""

    mode: str
    heads: int | None  # only the first so many; None: all, or no heads draft
    decode: DecodeConfig

    @property
    def parsed(self) -> Mode:
        """The mode as a value."""
        return parse_mode(self.mode, decode=self.decode)

    @property
    def reference(self) -> "Cell":
        """Plain decoding with the same sampling: what speed-up, identity and differences of the cell refer to."""
        return Cell(GREEDY_AR if isinstance(self.parsed.rule, Greedy) else AR, None, self.decode)

    @property
    def name(self) -> str:
        """The cell in a file name."""
        heads, d = f"-heads-{self.heads}" if self.heads else "", self.decode
        return f"{file_name(self.mode)}{heads}-t{d.temperature}-k{d.top_k}-p{d.top_p}-w{d.repeat_window}"


def grid(
    modes: Sequence[str],
    nodes: Sequence[int],
    heads: Sequence[int | None],
    sampling: Iterable[DecodeConfig],
) -> list[Cell]:
    """All combinations, each once, their plain decoding first.

    Nodes are for the modes that draft a tree and name no size, heads for those that draft with heads.
    """
    made = []
    for decode, text in itertools.product(sampling, modes):
        mode = parse_mode(text, decode=decode)
        sized = mode.drafter == "heads" and not (mode.nodes or mode.chain)
        for size in nodes if sized else [None]:
            one = f"{text}:nodes={size}" if size else text
            by_heads = drafts_with_heads(parse_mode(one, decode=decode))
            made += [Cell(one, count, decode) for count in (heads if by_heads else [None])]
    return list(dict.fromkeys(each for cell in made for each in (cell.reference, cell)))


def drafts_with_heads(mode: Mode) -> bool:
    """Whether draft heads make the guesses; else a draft language model does, or nobody."""
    return mode.drafter != "lm" and mode.nodes != 1


def samplings(decode: DecodeConfig, changes: Mapping[str, Sequence[Any]]) -> list[DecodeConfig]:
    """All combinations of other values for fields of a config; a field without any keeps its own.

    Raises ValueError for values that cannot be sampled with.
    """
    fields = [name for name, values in changes.items() if values]
    combinations = itertools.product(*(changes[name] for name in fields))
    made = [dataclasses.replace(decode, **dict(zip(fields, values, strict=True))) for values in combinations]
    for each in made:
        Sampling(each.temperature, each.top_k, each.top_p)
    return made


def obstacle(voice: Any, cell: Cell, batch: int) -> str | None:
    """Why the voice cannot speak the cell (a part is missing, too few heads, no such tree), or None."""
    mode, count = cell.parsed, voice.lm.head_count
    if drafts_with_heads(mode) and count < (cell.heads or 1):
        return f"this voice has {count} draft heads"
    try:
        voice.drafter(mode).check(voice.lm, voice.settings(mode, cell.heads, batch, cell.decode).tree)
    except ValueError as error:
        return str(error)
    return None
