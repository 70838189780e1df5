"""A page in a headless Chrome or Chromium: what a script finds in it, and a picture of it.

The browser is the first of :data:`NAMES` on PATH, or what MEGACPP_BROWSER names. It gets a profile of its own, and no network.
The page is in a frame, so that it may be as narrow as a phone, and that it need not allow the script.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

VARIABLE = "MEGACPP_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")
PATIENCE_S = 120
HEIGHT = 12000
"""Of the frame, in pixels: more than any page has."""
_FLAGS = (
    "--headless", "--disable-gpu", "--no-first-run", "--no-sandbox", "--hide-scrollbars", "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--enable-logging=stderr", "--dump-dom",
)  # fmt: skip
_FRAME = """<!doctype html><body style="margin: 0"><iframe srcdoc="{page}"
  style="display: block; border: 0; width: {width}px; height: {height}px; color-scheme: {scheme}"></iframe>
<script>
document.querySelector('iframe').onload = async event => {{
  const window = event.target.contentWindow, document = window.document;
  await document.fonts.ready;
  const found = top.document.createElement('code');
  found.hidden = true;
  found.append(JSON.stringify({script}));
  top.document.body.append(found);
}};
</script>"""


def show(page: str, folder: Path, script: str, *, width: int = 1280, dark: bool = False) -> tuple[Any, Image.Image]:
    """What ``script``, an expression, gives in the window of ``page``, and a picture of it; ``folder`` is for files.

    Nothing may have been fetched, and the browser may not have had anything to say.
    """
    program = os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH; {VARIABLE} may name one")
    file, picture, scheme = folder / "frame.html", folder / "frame.png", "dark" if dark else "light"
    query = f"[{script}, window.performance.getEntriesByType('resource').map(one => one.name)]"
    file.write_text(
        _FRAME.format(page=html.escape(page), width=width, height=HEIGHT, scheme=scheme, script=query), encoding="utf-8"
    )
    options = [f"--user-data-dir={folder}", f"--window-size={width},{HEIGHT}", f"--screenshot={picture}"]
    command = [program, *_FLAGS, *options, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    answer, fetched = json.loads(html.unescape(re.findall(r"<code hidden=\"\">(.*)</code>", done.stdout)[-1]))
    assert fetched == []
    return answer, Image.open(picture).convert("RGB")
