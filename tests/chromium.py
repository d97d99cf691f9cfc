"""A headless browser, and what a page holds in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
OPTIONS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --window-size=1200,900
""".split()


def open_page(profile: Path, page: Path, script: str = "") -> dict[str, Any]:
    """Open a timeline page, run a script in it, and give what it holds then.

    Args:
        profile: folder for what the browser writes.
        page: the page, which must be drawn without an error.
        script: JavaScript, which stays in the page.

    Returns:
        The data attributes of ``html``, ``body`` and the ``sections``, and the whole ``text``.
    """
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"<script>{{{script}}}</script></body>"))
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    tags = {name: re.findall(rf"<{name}[^>]*>", done.stdout) for name in ("html", "body")}
    dom = {name: _data_attributes(found[0]) for name, found in tags.items()}
    sections = re.findall(r"<section[^>]*>", done.stdout)
    assert dom["html"].get("data-state") == "ready", done.stderr
    assert "data-error" not in dom["html"]
    return {**dom, "sections": [_data_attributes(tag) for tag in sections], "text": done.stdout}


def _data_attributes(tag: str) -> dict[str, str]:
    return dict(re.findall(r'(data-[\w-]+)="([^"]*)"', tag))
