"""Catalogue uploads and sellers' pages in a browser, and uploads that are no file."""

from __future__ import annotations

import httpx
import pytest
from browser import WIDTHS
from crawler import Page

from headrace.console.model import FieldsInvalid
from headrace.console.uploads import UploadTooLarge, receive_form

pytestmark = pytest.mark.slow
FORM = "/console/do/fetch-upload"
HEAD = "id,name,price\n"


@pytest.mark.parametrize("is_scripted", [True, False])
async def test_a_catalogue_is_uploaded_reviewed_and_applied_on_a_phone(stack, tab, is_scripted):
    customer = f"upload-{is_scripted}".lower()
    stack.customer(customer)
    stack.wait_run(stack.catalogue(customer, ["a,Old <b>name</b>,5,,,", "b,Goes,5,,,"]))
    async with tab(width=WIDTHS["phone"], scripts=is_scripted) as screen:
        page = screen.page
        screen.allow("status of 422")
        await screen.open(f"/console/fetch/customers/{customer}")
        await page.locator("a.button", has_text="Upload catalogue").click()
        file = {"name": "shop.csv", "mimeType": "text/csv", "buffer": b""}
        choose = page.locator("input[type=file]")
        send = page.locator("#form button.primary")
        await choose.set_input_files({**file, "buffer": b"%PDF-1.7"})
        await send.click()
        await page.get_by_text("the file is a PDF document").wait_for()
        text = f"{HEAD}a,<script>alert(1)</script>,5\nc,New,7\nd,Bad,cheap\n".encode()
        await choose.set_input_files({**file, "buffer": text})
        await send.click()
        await page.wait_for_url("**/console/fetch/runs/*")
        await page.goto(f"{page.url}?list=changes")
        assert await screen.overflow() == 0
        shown = await screen.text()
        for part in ("compared", "Old <b>name</b>", "<script>alert(1)</script>", "Row errors (1)"):
            assert part in shown, part
        await page.locator("a.button", has_text="Apply").first.click()
        await send.click()
        await page.get_by_text("1 new, 1 changed, 1 removed").first.wait_for()
    newest = stack.call("GET", f"/v1/fetch/runs?customer={customer}")["runs"][0]
    assert newest["state"] in ("applied", "done")


async def test_a_sellers_page_of_hostile_values_fits_a_phone(stack, chromium):
    """The page is opened by a browser that has never logged in."""
    context = await chromium.new_context(viewport={"width": WIDTHS["phone"], "height": 740})
    page = await context.new_page()
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    try:
        for customer in ("lamp-house", "bike-shop"):
            address = f"/v1/fetch/customers/{customer}/seller-link"
            url = stack.call("POST", address, json={"days": 1})["url"]
            await page.goto(url)
            wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert await page.evaluate(wider) == 0
            await page.locator("a[lang=ru]").click()
            assert await page.locator("html[lang=ru]").count() == 1
            assert await page.locator("script, img, iframe, form").count() == 0
            await page.locator("table a").first.click()
            assert await page.locator("h2").count() > 1
        assert "bike-bad" in await page.inner_text("body")
    finally:
        await context.close()
    assert faults == []


class Sent:
    """A request whose body arrives in blocks of `size` bytes."""

    def __init__(self, body: bytes, size: int) -> None:
        self.headers = {"content-type": "multipart/form-data; boundary=frontier"}
        self._blocks = [body[at : at + size] for at in range(0, len(body), size)]

    async def stream(self):
        for block in self._blocks:
            yield block


@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_a_file_is_written_unchanged_up_to_its_limit(tmp_path, size):
    content = b"id,name\r\n--frontie\r\n\x00\xff\r\n--" * 20
    parts = {"customer": b"shop", 'file"; filename="a b.csv': content, "mapping": b""}
    body = b"".join(
        b'--frontier\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
        % (name.encode(), value)
        for name, value in parts.items()
    )
    body += b"--frontier--\r\n"
    path = tmp_path / "upload"
    given = await receive_form(Sent(body, size), path, bytes_max=len(content))
    assert given == {"customer": "shop", "file": "a b.csv", "mapping": ""}
    assert path.read_bytes() == content
    with pytest.raises(UploadTooLarge, match="split it, or compress it"):
        await receive_form(Sent(body, size), path, bytes_max=len(content) - 1)
    for cut in (body[:-20], body[:60], b""):
        with pytest.raises(FieldsInvalid):
            await receive_form(Sent(cut, size), path, bytes_max=len(content))


def form_of(stack):
    """The fields of an open upload form."""
    page = Page(FORM, stack.browse.get(FORM, params={"customer": "bike-shop"}).text)
    return page.form(f"{FORM}/file").fields


def test_bodies_that_are_no_upload_are_refused(stack):
    fields, headers = form_of(stack), {"origin": stack.api}
    place, before = f"{FORM}/file", stack.call("GET", "/v1/fetch/runs?customer=bike-shop")
    multipart = {**headers, "content-type": "multipart/form-data; boundary=x"}
    file = {"file": ("a.csv", HEAD.encode())}
    for status, options in (
        (422, {"data": fields}),
        (422, {"data": fields, "files": {"file": ("", b"")}}),
        (422, {"content": b"not a form", "headers": multipart}),
        (422, {"content": b"--x\r\n\r\n", "headers": multipart}),
        (413, {"data": {**fields, "mapping": "m" * 300_000}, "files": file}),
        (422, {"data": {**fields, "mapping": "unknown"}, "files": file}),
        (403, {"data": {**fields, "csrf_token": "x"}, "files": file}),
        (403, {"data": fields, "files": file, "headers": {"origin": "https://evil.example"}}),
    ):
        answer = stack.browse.post(place, **{"headers": headers, **options})
        assert answer.status_code == status, (options, answer.text[:2000])
    assert stack.browse.post(FORM, data=fields, headers=headers).status_code == 422
    with httpx.Client(base_url=stack.api, headers={"accept": "text/html"}) as stranger:
        answer = stranger.post(place, data=fields, files=file, headers=headers)
        assert answer.status_code == 303
        assert "/console/login" in answer.headers["location"]
    assert stack.call("GET", "/v1/fetch/runs?customer=bike-shop") == before
