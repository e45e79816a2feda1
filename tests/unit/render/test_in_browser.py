"""The page as a browser shows it. In CI the lack of a browser is a failure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from render_builders import MIXED, gate

from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.snapshots import load_snapshots
from mcore_compat.gate.model import GateFinding, GateReport
from mcore_compat.report.html import render_page
from mcore_compat.report.timeline import timeline

DATA = Path(__file__).parents[3] / "compat_matrix"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Asked in the page: what a visitor with this window, a keyboard or a screen reader would meet.
QUESTIONS = """
<script>
addEventListener("load", () => {
  const wide = document.scrollingElement.scrollWidth - innerWidth;
  const folds = [...document.querySelectorAll("summary")].filter(e => e.offsetParent);
  const small = folds.filter(e => e.getBoundingClientRect().height < 24);
  const focusable = [...document.querySelectorAll("a[href],summary,[tabindex='0']")];
  const unnamed = focusable.filter(e => !(e.innerText || e.textContent || e.ariaLabel || "").trim());
  const answer = document.querySelector(".answer").getBoundingClientRect().bottom;
  const cause = document.querySelector("#cause-1").getBoundingClientRect().bottom;
  const boxes = document.querySelectorAll("article.cause, details[open]").length;
  location.hash = document.querySelector("td a.failed").getAttribute("href");
  setTimeout(() => {
    const target = document.querySelector(location.hash);
    document.title = "ANSWER" + JSON.stringify({
      wide, small: small.length, unnamed: unnamed.length, focusable: focusable.length,
      opened: !!target.closest("details").open && target.getBoundingClientRect().height > 0,
      background: getComputedStyle(document.body).backgroundColor,
      sections: document.querySelectorAll("main > section").length,
      answer, cause, boxes,
    });
  }, 300);
});
</script></body>"""


def browser() -> str:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        missing = "no Chromium was found: install it (Debian: apt-get install chromium), or name it in CHROMIUM"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def ask(folder: Path, width: int, *more: str, judged: GateReport | None = None) -> dict:
    page = folder / "page.html"
    transitions = timeline(load_snapshots(DATA / "contracts"), load_rules(DATA / "rules"))
    page.write_text(render_page(MIXED, transitions, judged or gate()).replace("</body>", QUESTIONS))
    command = [
        browser(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    ]
    command += [
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},900",
        "--virtual-time-budget=5000",
        *more,
    ]
    shown = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    start = shown.stdout.index("<title>ANSWER") + len("<title>ANSWER")
    return json.loads(shown.stdout[start : shown.stdout.index("</title>", start)])


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_window(tmp_path, width):
    seen = ask(tmp_path, width)
    assert seen["wide"] <= 0  # only tables scroll sideways, inside their own frame
    assert seen["small"] == 0
    assert seen["unnamed"] == 0
    assert seen["focusable"] > 20
    assert seen["opened"]  # a link of the matrix opens the folded checks that it leads to
    assert seen["sections"] == 7
    assert seen["background"] == "rgb(255, 255, 255)"


def test_the_page_in_the_dark(tmp_path):
    seen = ask(tmp_path, 1280, "--blink-settings=preferredColorScheme=0")
    assert seen["background"] == "rgb(13, 17, 23)"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_answer_and_its_cause_are_on_the_first_screen(tmp_path, width):
    """A candidate without one keyword fails most checks with messages that name it: that is one cause."""
    message = "ModeError: the hook no longer hands over `scale_logits`"
    lost = gate().findings[0].model_copy(update={"message": "the hook does not hand over `scale_logits`"})
    failures = tuple(
        GateFinding(origin="cell", title=f"test_mtp.py::test_{n}", state="new", level="break", message=message)
        for n in range(75)
    )
    judged = gate().model_copy(update={"findings": (lost, *failures)})
    seen = ask(tmp_path, width, judged=judged)
    assert seen["answer"] < 450
    assert seen["cause"] < 900
    assert seen["boxes"] == 2  # this one, and the cell that could not be installed
