"""The page in a real browser: no errors, no network, nothing wider than a phone, readable without a mouse.

Needs Chromium on the path; skipped without. It is driven over its debugging pipe (Chrome DevTools Protocol), so that no
driver has to be installed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic

from breakeven.lab.analysis import summarise
from breakeven.lab.report.html import page

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed (Debian: apt-get install chromium)"),
]
LONG = "a-very-long-arm-name-of-forty-characters"


class Browser:
    """One tab, and everything it complained about or asked the network for."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip

        def place_pipes() -> None:
            high = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (to_browser, from_browser)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *options],
            close_fds=False,
            preexec_fn=place_pipes,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 16)
            assert data, "the browser ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        event: dict[str, Any] = json.loads(line)
        method, parameters = event.get("method"), event.get("params", {})
        if method in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(parameters)[:500])
        elif method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        return event

    def show(self, file: Path, width: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        self.call("Page.navigate", url=file.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._in)
        os.close(self._out)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = synthetic.campaign(
        name="A long title of a campaign, with " + "noBreaksInIt" * 8,
        arms={"off": {"type": "embedded"}, LONG: {"type": "embedded"}},
        blocks=3,
    )
    records = synthetic.cells(given, synthetic.by_level())
    records[3] = synthetic.spoil(records[3], "<script>document.title = 'taken'</script>" + "x" * 300)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(summarise(given, synthetic.ENVIRONMENT, records)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_PAPER = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize("width", [420, 768, 1280])
def test_the_page_has_no_errors_asks_for_nothing_and_never_scrolls_sideways(
    browser: Browser, file: Path, width: int
) -> None:
    browser.complaints.clear()
    browser.requested.clear()
    browser.show(file, width)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.run(_OVERFLOW) == 0
    assert browser.complaints == []
    assert browser.requested == [file.as_uri()]
    assert browser.run("document.title").startswith("A long title")
    assert browser.run("document.scripts.length") == 0


def test_light_and_dark_follow_the_system_and_the_switch_goes_before_it(browser: Browser, file: Path) -> None:
    browser.show(file, 1280)
    light = browser.run(_PAPER)
    browser.run("document.getElementById('theme-dark').click()")
    dark = browser.run(_PAPER)
    assert dark != light
    browser.show(file, 1280, dark=True)
    assert browser.run(_PAPER) == dark
    browser.run("document.getElementById('theme-light').click()")
    assert browser.run(_PAPER) == light


def test_the_keyboard_reaches_the_answer_first_then_the_switch_and_opens_details(browser: Browser, file: Path) -> None:
    browser.show(file, 1280)
    browser.press("Tab", 9)
    assert browser.run("document.activeElement.getAttribute('href')") == "#answer"
    browser.press("Tab", 9)
    assert browser.run("document.activeElement.id") == "theme-auto"
    browser.run("document.querySelector('#times summary').focus()")
    browser.press(" ", 32)
    assert browser.run("document.querySelector('#times details').open")
    assert browser.run("[...document.querySelectorAll('[tabindex]')].every(e => e.tabIndex <= 0)")


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground_by_4_5_to_1(browser: Browser, file: Path, dark: bool) -> None:
    browser.show(file, 1280, dark=dark)
    worst = browser.run("""(() => {
      const parts = c => c.match(/[\\d.]+/g).map(Number);
      const lum = c => { const [r, g, b] = parts(c).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b };
      const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
        if ((parts(c)[3] ?? 1) > 0.99) return c } return 'rgb(255, 255, 255)' };
      let found = [99, ''];
      for (const e of document.querySelectorAll('p,td,th,li,span,figcaption,summary,a,label,dt,dd,h1,h2,h3')) {
        if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
        const a = lum(getComputedStyle(e).color), b = lum(ground(e));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < found[0]) found = [ratio, e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 40)];
      }
      return found })()""")
    assert worst[0] >= 4.5, worst


def test_it_prints_and_leaves_the_switch_and_the_links_out(browser: Browser, file: Path) -> None:
    browser.show(file, 1280, dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.run("getComputedStyle(document.querySelector('.theme')).display") == "none"
    assert browser.run(_PAPER) == "rgb(255, 255, 255)"
    assert len(browser.call("Page.printToPDF")["data"]) > 20_000
