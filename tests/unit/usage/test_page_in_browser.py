"""The page of downstreams as a browser shows it. In CI the lack of a browser is a failure."""

import json
import os
import shutil
import subprocess

import pytest
from usage_builders import extracted, side

from mcore_compat.usage.matrix import assess
from mcore_compat.usage.page import render_usage_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUESTIONS = """
<script>
addEventListener("load", () => {
  const link = document.querySelector("td.import a");
  location.hash = link.getAttribute("href");
  setTimeout(() => {
    const target = document.querySelector(location.hash);
    document.title = "ANSWER" + JSON.stringify({
      wide: document.scrollingElement.scrollWidth - innerWidth,
      small: [...document.querySelectorAll("summary, td a")].filter(e => e.getBoundingClientRect().height < 24).length,
      unnamed: [...document.querySelectorAll("a, summary")].filter(e => !(e.textContent || e.ariaLabel).trim()).length,
      target: target.tagName,
      background: getComputedStyle(document.body).backgroundColor,
      cell: getComputedStyle(link.parentElement).backgroundColor,
      scripts: document.querySelectorAll("script").length,
    });
  }, 300);
});
</script></body>"""


def page():
    source = "from megatron.core.m import f"
    sides = [side({"megatron/core/m.py": "f = 1"}, "0.1"), side({"megatron/core/m.py": "g = 1"}, "0.2")]
    return render_usage_page([assess(extracted(source), sides)])


def test_the_page_as_text():
    html = page()
    assert "<script" not in html
    assert "http" not in html
    assert 'aria-label="acme with 0.2: fails at import, 1 findings"' in html
    assert "acme/train.py:1" in html


@pytest.mark.parametrize(
    ("width", "more", "background"),
    [
        (1280, (), "rgb(255, 255, 255)"),
        (390, (), "rgb(255, 255, 255)"),
        (1280, ("--blink-settings=preferredColorScheme=0",), "rgb(13, 17, 23)"),
    ],
)
def test_the_page_in_a_window(tmp_path, width, more, background):
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not browser:
        missing = "no Chromium was found: install it (Debian: apt-get install chromium), or name it in CHROMIUM"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    file = tmp_path / "page.html"
    file.write_text(page().replace("</body>", QUESTIONS))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--virtual-time-budget=5000"]
    shown = subprocess.run(
        [browser, *flags, *more, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    start = shown.index("<title>ANSWER") + len("<title>ANSWER")
    seen = json.loads(shown[start : shown.index("</title>", start)])
    assert seen["wide"] <= 0
    assert seen["small"] == seen["unnamed"] == 0
    assert seen["target"] == "DETAILS"
    assert seen["background"] == background
    assert seen["cell"] != background
    assert seen["scripts"] == 1  # this test's own
