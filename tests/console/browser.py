"""A console page in headless Chromium, and everything that went wrong on it.

`Screen` is one tab. It collects what a person would never see and a product must not do: errors in the browser's
console, scripts that broke, dialogs (an injected script opened one), violations of the Content-Security-Policy, answers of
5xx. `browsing` ends each test by asserting that there were none, so a test says only what it looks for.

Axe and everything else that a test runs in the page comes through the debugging protocol, which no policy of the page holds
back: the policy stays on as users have it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, BrowserContext, Page, Response, async_playwright
from tests.kit.waiting import wait_true

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
PATIENCE_MS = 60_000
"""For whatever a page is waited for."""
SERIOUS = ("serious", "critical")
WIDTHS = {"phone": 360, "laptop": 1280, "desk": 1920}
WATCH_POLICY = """
window.policyViolations = [];
document.addEventListener('securitypolicyviolation', (event) => {
  window.policyViolations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`);
});
"""
RUN_AXE = """async (rules) => {
  const options = {resultTypes: ['violations']};
  if (rules.length) options.runOnly = {type: 'rule', values: rules};
  const found = await axe.run(document, options);
  return found.violations.map((rule) => ({
    id: rule.id, impact: rule.impact, help: rule.help,
    nodes: rule.nodes.slice(0, 4).map((node) => node.html.slice(0, 200) + ' ' + (node.failureSummary || '').slice(0, 300)),
  }));
}"""


def chromium_path() -> str | None:
    """The Chromium to use: `HEADRACE_CHROMIUM`, or the one of the system."""
    return os.environ.get("HEADRACE_CHROMIUM") or shutil.which("chromium")


@asynccontextmanager
async def running_chromium() -> AsyncIterator[Browser]:
    """One headless Chromium; skips the test, with its reason, where there is none."""
    path = chromium_path()
    if path is None:
        pytest.skip("no Chromium: install the package chromium, or set HEADRACE_CHROMIUM to one")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )
        try:
            yield browser
        finally:
            await browser.close()


class Screen:
    """One tab on the console."""

    def __init__(self, context: BrowserContext, page: Page, address: str) -> None:
        self.context = context
        self.page = page
        self.address = address
        self.faults: list[str] = []
        self._allowed: list[re.Pattern[str]] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        page.on("response", self._on_response)
        page.on("dialog", self._on_dialog)

    def allow(self, pattern: str) -> None:
        """Faults that match are part of what this test is about."""
        self._allowed.append(re.compile(pattern))

    async def open(self, path: str) -> Response:
        """Go to a path of the console and wait until it is loaded."""
        answer = await self.page.goto(self.address + path, wait_until="load")
        assert answer is not None
        return answer

    async def text(self, selector: str = "main") -> str:
        """What a person reads in the first element of `selector`."""
        return await self.page.locator(selector).first.inner_text()

    async def narrow(self) -> None:
        """Make the window as narrow as a phone: nothing is wider than it once charts are drawn anew."""
        await self.page.set_viewport_size({"width": WIDTHS["phone"], "height": 740})
        await wait_true(self._fits, what="the page fits a phone")

    async def _fits(self) -> bool:
        return await self.overflow() == 0

    async def wait_live(self) -> None:
        """Wait until the page says that it is live."""
        await self.page.locator("#live-state:text-is('live')").wait_for()

    async def press(self, selector: str) -> None:
        """Press a button or link that leads to another page, and wait for that."""
        async with self.page.expect_navigation(wait_until="load"):
            await self.page.locator(selector).first.click()

    async def findings(self, *, rules: Sequence[str] = ()) -> list[str]:
        """What axe holds to be a serious or critical barrier on this page, by all of its rules or some."""
        if not await self.page.evaluate("'axe' in window"):
            await self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found: list[dict[str, Any]] = await self.page.evaluate(RUN_AXE, list(rules))
        return [
            f"{rule['id']} ({rule['impact']}): {rule['help']}\n    " + "\n    ".join(rule["nodes"])
            for rule in found
            if rule["impact"] in SERIOUS
        ]

    async def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(await self.page.evaluate(script))

    async def assert_sound(self) -> None:
        """Nothing went wrong since the tab was opened, and the policy was never violated."""
        violated = await self.page.evaluate("window.policyViolations || []")
        faults = [*self.faults, *(f"policy: {text}" for text in violated)]
        bad = [text for text in faults if not any(p.search(text) for p in self._allowed)]
        assert not bad, "\n".join(bad)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning") and "was preloaded" not in message.text:
            self.faults.append(f"console {message.type}: {message.text} {_place(message)}")

    def _on_response(self, answer: Response) -> None:
        if answer.status >= 500:
            self.faults.append(f"answer {answer.status}: {answer.url}")

    async def _on_dialog(self, dialog: Any) -> None:
        self.faults.append(f"dialog, a script was injected: {dialog.message}")
        await dialog.dismiss()


@asynccontextmanager
async def browsing(
    browser: Browser,
    address: str,
    *,
    width: int = WIDTHS["laptop"],
    scheme: str = "light",
    scripts: bool = True,
    cookies: list[Any] | None = None,
) -> AsyncIterator[Screen]:
    """A tab of its own, without the cookies of others; asserts at the end that it was sound."""
    context = await browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,  # type: ignore[arg-type]
        reduced_motion="reduce",
        java_script_enabled=scripts,
    )
    if cookies:
        await context.add_cookies(cookies)
    await context.add_init_script(WATCH_POLICY)
    try:
        screen = Screen(context, await context.new_page(), address)
        yield screen
        if scripts:
            await screen.assert_sound()
    finally:
        await context.close()


def _place(message: Any) -> str:
    where = message.location or {}
    return f"({where.get('url', '')}:{where.get('lineNumber', '')})"
