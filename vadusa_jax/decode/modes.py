"""Modes of decoding as values, and how they are written on a command line."""

import dataclasses

from vadusa_jax.config import DecodeConfig
from vadusa_jax.decode.accept import EXACT, Greedy, Pcg, Rule, Ssd, Tolerance, TopK, Typical, Unverified

HELP = (
    "ar, greedy_ar, exact, greedy, tolerance:N, typical, topk:K, pcg, ssd or viterbi; behind it, where they apply, "
    ":nodes=T (size of the tree), :chain=D (only the best guess of each of D heads), :draft=D (a draft model speaks D "
    "tokens ahead), :coupled=0 (rank guesses without the noise), :eps=E:alpha=A (typical), :threshold=C (pcg), "
    ":beta=B (ssd)"
)


@dataclasses.dataclass(frozen=True)
class Mode:
    """An acceptance rule, and what is drafted for it."""

    rule: Rule
    nodes: int | None = None  # 1: plain autoregressive decoding; None: what was found fastest on this device
    chain: int | None = None  # no tree: only the best guess of each of so many heads
    drafter: str = "heads"  # "heads", "viterbi" or "lm" (a draft language model); the last two draft a chain
    coupled: bool = True  # rank drafts with the noise that the target will be drawn with


def parse_mode(text: str, nodes: int | None = None, decode: DecodeConfig | None = None) -> Mode:
    """Reads a mode such as `ar`, `tolerance:3`, `exact:nodes=16:coupled=0` or `ssd:beta=0.1:draft=4`.

    `nodes` is the tree size of the speculative modes that name none, `decode` has the defaults of the rules.
    Raises ValueError for anything else, with what can be written.
    """
    try:
        name, *rest = text.split(":")
        count = int(rest.pop(0)) if name in ("tolerance", "topk") else 0
        given = dict(option.split("=") for option in rest)
        rule = _rule(name, count, given, decode or DecodeConfig())
        chain, draft, size = (int(given.pop(key, 0)) or None for key in ("chain", "draft", "nodes"))
        coupled = bool(int(given.pop("coupled", "1")))
        plain, lone = name in ("ar", "greedy_ar"), chain or draft or name in ("viterbi", "ssd")
        if given or min(size or 1, chain or 1, draft or 1) < 1 or (plain and (lone or size)) or (lone and size):
            raise ValueError
        if (chain and draft) or (draft and name == "viterbi") or (chain and name == "ssd"):
            raise ValueError
    except (KeyError, ValueError, IndexError) as error:
        why = f" ({error})" if isinstance(error, ValueError) and "must be" in str(error) else ""
        raise ValueError(f"unknown mode {text!r}{why}; write {HELP}") from None
    if plain:
        return Mode(rule, nodes=1, coupled=coupled)
    if name == "viterbi":
        return Mode(rule, chain=chain, drafter="viterbi", coupled=coupled)
    if draft or name == "ssd":
        return Mode(rule, chain=draft or 4, drafter="lm", coupled=coupled)
    return Mode(rule, None if chain else size or nodes, chain, coupled=coupled)


def _rule(name: str, count: int, given: dict[str, str], decode: DecodeConfig) -> Rule:
    """The rule of a name; takes its own options out of `given`."""

    def number(key: str, default: float) -> float:
        return float(given.pop(key, default))

    match name:
        case "ar" | "exact":
            return EXACT
        case "greedy_ar" | "greedy":
            return Greedy()
        case "tolerance":
            return Tolerance(count)
        case "topk":
            return TopK(count)
        case "typical":
            return Typical(number("eps", decode.typical_eps), number("alpha", decode.typical_alpha))
        case "pcg":
            return Pcg(number("threshold", decode.pcg_threshold))
        case "ssd":
            return Ssd(number("beta", decode.ssd_beta))
        case "viterbi":
            return Unverified()
    raise KeyError(name)
