"""Console pages in headless Chromium, with a record of all faults on them.

`Screen` is one tab. It records what users do not see but a product must not do: errors in the
browser's console, failed scripts, dialogs opened by injected scripts, policy violations, and 5xx
responses. `browsing` asserts at the end of each test that there were none.

Tests run axe and other scripts over the debugging protocol, so the page's security policy stays on.
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
"""Timeout of all waits on pages."""
SERIOUS = ("serious", "critical")
WIDTHS = {"phone": 360, "laptop": 1280, "desk": 1920}
WATCH_POLICY = """
window.policyViolations = [];
document.addEventListener('securitypolicyviolation', (event) => {
  const {violatedDirective, blockedURI, sourceFile, lineNumber} = event;
  window.policyViolations.push(`${violatedDirective}: ${blockedURI} ${sourceFile}:${lineNumber}`);
});
"""
RUN_AXE = """async (rules) => {
  const options = {resultTypes: ['violations']};
  if (rules.length) options.runOnly = {type: 'rule', values: rules};
  const found = await axe.run(document, options);
  return found.violations.map((rule) => ({
    id: rule.id, impact: rule.impact, help: rule.help,
    nodes: rule.nodes.slice(0, 4).map(
      (node) => node.html.slice(0, 200) + ' ' + (node.failureSummary || '').slice(0, 300)),
  }));
}"""


PHONE_FAULTS = """() => {
  const shown = (one) => one.checkVisibility() && one.getBoundingClientRect().height > 1;
  const found = [];
  const links = '.rooms a, .tabs a, a.button, button';
  const controls = `${links}, select, textarea, input:not([type=checkbox])`;
  for (const one of document.querySelectorAll(controls)) {
    const high = one.getBoundingClientRect().height;
    if (shown(one) && high < 39.5) found.push(`${high} px high: ${one.outerHTML.slice(0, 99)}`);
  }
  for (const one of document.querySelectorAll('td.n, .tile .v, .rate')) {
    const text = one.innerText;
    const range = document.createRange();
    range.selectNodeContents(one);
    const lineHeight = parseFloat(getComputedStyle(one).lineHeight);
    const isBroken = range.getBoundingClientRect().height > 1.9 * lineHeight;
    if (shown(one) && /\\d/.test(text) && isBroken) found.push(`broken over lines: ${text}`);
  }
  for (const one of document.querySelectorAll('.chip')) {
    if (shown(one) && one.scrollWidth > one.clientWidth + 1) found.push(`cut: ${one.innerText}`);
  }
  for (const one of document.querySelectorAll('.scroll')) {
    const isWide = one.scrollWidth > one.clientWidth + 1;
    if (isWide) found.push(`scrolls sideways: ${one.getAttribute('aria-label')}`);
  }
  return found;
}"""
"""Controls that are too small for a finger, broken numbers, cut states, tables that scroll."""


def chromium_path() -> str | None:
    """Path of Chromium: `HEADRACE_CHROMIUM`, or the system's."""
    return os.environ.get("HEADRACE_CHROMIUM") or shutil.which("chromium")


@asynccontextmanager
async def running_chromium() -> AsyncIterator[Browser]:
    """Run one headless Chromium; skip the test if none is installed."""
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
    """A browser tab on the console."""

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
        """Accept faults that match `pattern`."""
        self._allowed.append(re.compile(pattern))

    async def open(self, path: str) -> Response:
        """Open a path of the console and wait until it is loaded."""
        answer = await self.page.goto(self.address + path, wait_until="load")
        assert answer is not None
        return answer

    async def text(self, selector: str = "main") -> str:
        """Visible text of the first element of `selector`."""
        return await self.page.locator(selector).first.inner_text()

    async def narrow(self) -> None:
        """Resize the window to a phone; wait until nothing overflows it."""
        await self.page.set_viewport_size({"width": WIDTHS["phone"], "height": 740})
        await wait_true(self._fits, what="the page fits a phone")

    async def _fits(self) -> bool:
        return await self.overflow() == 0

    async def phone_faults(self) -> list[str]:
        """Faults that only a narrow window shows."""
        return list(await self.page.evaluate(PHONE_FAULTS))

    async def wait_live(self) -> None:
        """Wait until the page reports that it is live."""
        await self.page.locator("#live-state:text-is('live')").wait_for()

    async def press(self, selector: str) -> None:
        """Click a button or link and wait for the next page."""
        async with self.page.expect_navigation(wait_until="load"):
            await self.page.locator(selector).first.click()

    async def findings(self, *, rules: Sequence[str] = ()) -> list[str]:
        """Serious and critical accessibility findings of axe, by all rules or some."""
        if not await self.page.evaluate("'axe' in window"):
            await self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found: list[dict[str, Any]] = await self.page.evaluate(RUN_AXE, list(rules))
        return [
            f"{rule['id']} ({rule['impact']}): {rule['help']}\n    " + "\n    ".join(rule["nodes"])
            for rule in found
            if rule["impact"] in SERIOUS
        ]

    async def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(await self.page.evaluate(script))

    async def assert_sound(self) -> None:
        """Assert that no fault and no policy violation occurred in this tab."""
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
    """Open a tab with separate cookies; assert at the end that no fault occurred."""
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
