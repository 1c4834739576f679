"""Modes of decoding as values, and how they are written on a command line."""

import dataclasses

from vadusa_jax.decode.accept import EXACT, Greedy, Rule, Tolerance


@dataclasses.dataclass(frozen=True)
class Mode:
    """An acceptance rule and the size of the tree it is used with."""

    rule: Rule
    nodes: int | None = None  # 1: plain autoregressive decoding; None: what was found fastest on this device
    coupled: bool = True  # rank drafts with the noise that the target will be drawn with


_MODES = {
    "ar": Mode(EXACT, nodes=1),
    "greedy_ar": Mode(Greedy(), nodes=1),
    "exact": Mode(EXACT),
    "greedy": Mode(Greedy()),
}


def parse_mode(text: str, nodes: int | None = None) -> Mode:
    """Reads `ar`, `greedy_ar`, `exact`, `greedy` or `tolerance:3`, with options such as `exact:nodes=16:coupled=0`.

    `nodes` is the tree size of the speculative modes that name none.
    """
    try:
        name, *rest = text.split(":")
        mode = _MODES[name] if name != "tolerance" else Mode(Tolerance(int(rest.pop(0))))
        options = dict(option.split("=") for option in rest)
        if mode.nodes is None:
            mode = dataclasses.replace(mode, nodes=int(options.pop("nodes", nodes or 0)) or None)
        coupled = bool(int(options.pop("coupled", "1")))
        if options or (mode.nodes is not None and mode.nodes < 1):
            raise ValueError
    except (KeyError, ValueError, IndexError):
        raise ValueError(
            f"unknown mode {text!r}; write ar, greedy_ar, exact, greedy or tolerance:N (N at least 1), "
            "and after a speculative one :nodes=T or :coupled=0 if needed"
        ) from None
    return dataclasses.replace(mode, coupled=coupled)
