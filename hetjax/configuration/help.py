"""What ``--help`` says of the configuration, made from the settings themselves."""

from __future__ import annotations

import textwrap

from hetjax.configuration.settings import sections

_WIDTH = 100
_NAME_WIDTH = 40


def settings_help() -> str:
    """Every setting with its default and its meaning, by sections.

    Returns:
        Text of some pages' length.

    Example:
        >>> print(settings_help().splitlines()[1])
          train.steps = 300                     training steps of the whole run
    """
    blocks: list[str] = []
    for section, cls in sections().items():
        blocks.append(f"{section}: {cls.__doc__}")
        for name, field in cls.model_fields.items():
            head = f"  {section}.{name} = {field.default!r}"
            meaning = textwrap.wrap(field.description or "", _WIDTH - _NAME_WIDTH)
            if len(head) >= _NAME_WIDTH:
                blocks.append(head)
                head = ""
            blocks.append(f"{head:<{_NAME_WIDTH}}{meaning[0]}")
            blocks += [" " * _NAME_WIDTH + line for line in meaning[1:]]
        blocks.append("")
    return "\n".join(blocks)
