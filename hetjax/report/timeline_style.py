"""What the sorts of events on a timeline are called, and their colours, in every drawing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetjax.pipeline.timeline.timeline import Event, is_link

_DARK, _LIGHT = "#1f2933", "#ffffff"
_LIGHT_ENOUGH = 0.38
_OTHER_COLOR = "#8b8299"


@dataclass(frozen=True)
class Style:
    """How a sort of events is drawn.

    Args:
        label: its name in a legend.
        color: of its boxes, as ``"#rrggbb"``.

    Example:
        >>> Style("update", "#ffffff").ink
        '#1f2933'
    """

    label: str
    color: str

    @property
    def ink(self) -> str:
        """The colour of what is written on its boxes."""
        red, green, blue = (int(self.color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        # Relative luminance, with the usual square for the display's gamma.
        luminance = 0.2126 * red**2 + 0.7152 * green**2 + 0.0722 * blue**2
        return _DARK if luminance > _LIGHT_ENOUGH else _LIGHT


# Neighbours in a row differ in lightness too, for those who do not see the hues.
_COMPUTATIONS = {
    "F": Style("forward", "#3b78b8"),
    "R": Style("recomputation", "#6a5a9c"),
    "B": Style("backward", "#3f9c6d"),
    "W": Style("weight gradient", "#b4c25e"),
    "share": Style("exchange between stages", "#a8557a"),
    "update": Style("update", "#e2a13a"),
}
_SENDS = {
    "F": Style("activation on a link", "#a9c8e8"),
    "B": Style("gradient on a link", "#a6d8bd"),
}
_COPIES = {
    "fetch": Style("from the host's memory", "#d9cba3"),
    "store": Style("to the host's memory", "#b7a77a"),
}
_MOVE = Style("move among members", "#c9b3d6")
_ORDER = (*_COMPUTATIONS.values(), *_SENDS.values(), *_COPIES.values(), _MOVE)


def event_style(event: Event) -> Style:
    """The style of an event; a kind that is none of ours is named as it is.

    Args:
        event: an event of a stage, a worker or a link.

    Returns:
        Its style.

    Example:
        >>> event_style(Event("stage 0", "W3", "W", 3, 0.0, 1.0)).label
        'weight gradient'
    """
    if event.kind == "move":
        return _MOVE
    if event.kind in _COPIES:
        return _COPIES[event.kind]
    on_link = is_link(event.track)
    known = _SENDS.get(event.name[:1]) if on_link else _COMPUTATIONS.get(event.kind)
    return known or Style(event.kind, _OTHER_COLOR)


def styles_of(events: Iterable[Event]) -> list[Style]:
    """The styles that events have, each once, in the order of a legend.

    Args:
        events: the events.

    Returns:
        Ours from forward to gradients on a link, then others as they come.
    """
    found = dict.fromkeys(event_style(event) for event in events)
    return [style for style in _ORDER if style in found] + [s for s in found if s not in _ORDER]
