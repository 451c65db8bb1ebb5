"""Real clients against a real node: curl, `wget -c`, ffprobe and a browser's audio element.

The node is the command with its own processes. Every URL is signed, and every track begins with a
buyer's tag.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from dataclasses import dataclass

import pytest
from id3_tracks import JPEG, make_mp3
from playwright.async_api import async_playwright
from tests.kit.processes import HeadraceProcess
from tests.kit.waiting import wait_true
from tests.kit.whole_nodes import SECRET, whole_node

from headrace.engines.blobs import Blobs
from headrace.media import Media, MediaConfig
from headrace.media.id3 import START_BYTES, Tags, own_tag_bytes, tag_bytes

pytestmark = pytest.mark.slow
TAGS = {"title": "Ein Lied", "artist": "Wer sonst", "album": "Platte", "buyer": "user:42"}
SECONDS, TIMES = 5, 120
MODES = {"files": "", "disks": "blocks:96MiB"}


@dataclass
class Shop:
    """A running node, and the expected bytes of a bought track."""

    media: Media
    url: str
    bought: bytes
    node: HeadraceProcess


def needs(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


@pytest.fixture(scope="module", params=["disks", pytest.param("files", marks=pytest.mark.soak)])
async def shop(request, tmp_path_factory):
    needs("ffmpeg")
    folder = tmp_path_factory.mktemp(f"shop-{request.param}")
    blobs = Blobs((folder / "store").as_uri())
    config = MediaConfig(signed="required")
    media = Media(blobs, config, secret=lambda: SECRET)
    track = make_mp3(folder / "made.mp3", seconds=SECONDS, times=TIMES, title="as recorded")
    music = track[own_tag_bytes(track[:START_BYTES], len(track)) :]
    await media.objects.put("tracks/song.mp3", track)
    stored = await media.tags.put(**TAGS, cover=JPEG)
    signed = await media.objects.sign("tracks/song.mp3", tag=stored.id, ttl_s=3600, trace="user=42")
    settings = {
        "blobs_url": blobs.folder.as_uri(),
        "media_signed": "required",
        "media_workers": "1",
        "media_disks": MODES[request.param] and f"{folder}/{MODES[request.param]}",
    }
    async with whole_node(folder, **settings) as node:
        url = signed.url.replace("127.0.0.1:8081", f"127.0.0.1:{node.port}")
        bought = tag_bytes(Tags(**TAGS, cover=JPEG)) + music
        yield Shop(media, url, bought, node.process)
    await blobs.close()


def run(*command: str) -> bytes:
    ran = subprocess.run(command, capture_output=True, timeout=90, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout


def curl(*arguments: str) -> bytes:
    return run(needs("curl"), "-sS", "--fail-with-body", *arguments)


def test_curl_gets_all_and_keeps_what_has_not_changed(shop, tmp_path):
    etag, out = tmp_path / "etag", tmp_path / "song.mp3"
    again = ["--etag-save", str(etag), "--etag-compare", str(etag), "-o", str(out), shop.url]
    etag.touch()
    assert curl("-w", "%{http_code}", *again) == b"200"
    assert (out.read_bytes() == shop.bought) is True
    assert curl("-w", "%{http_code}", *again) == b"304"
    seam = len(shop.bought) - len(shop.bought.partition(JPEG)[2])
    assert curl("-r", f"{seam - 5}-{seam + 5}", shop.url) == shop.bought[seam - 5 : seam + 6]


@pytest.mark.parametrize("kept", [100, 5_000_001])
def test_wget_continues_where_it_was_cut(shop, tmp_path, kept):
    out = tmp_path / "song.mp3"
    out.write_bytes(shop.bought[:kept])
    run(needs("wget"), "-q", "-c", "-O", str(out), shop.url)
    assert (out.read_bytes() == shop.bought) is True


def test_ffprobe_finds_the_buyer_and_the_music(shop):
    reported = run(
        needs("ffprobe"), "-v", "error", "-of", "json", "-show_format", "-show_streams", shop.url
    )
    found = json.loads(reported)
    tags = found["format"]["tags"]
    assert tags["HEADRACE_BUYER"] == "user:42"
    assert (tags["title"], tags["artist"], tags["album"]) == ("Ein Lied", "Wer sonst", "Platte")
    assert found["format"]["format_name"] == "mp3"
    assert float(found["format"]["duration"]) == pytest.approx(SECONDS * TIMES, rel=0.02)
    kinds = {stream["codec_name"]: stream for stream in found["streams"]}
    assert kinds["mjpeg"]["disposition"]["attached_pic"] == 1
    assert kinds["mp3"]["bit_rate"] == "128000"


def test_ffmpeg_decodes_from_the_middle(shop):
    command = ["-v", "error", "-ss", "300", "-t", "2", "-i", shop.url, "-f", "s16le", "-"]
    samples = run(needs("ffmpeg"), *command)
    assert len(samples) == pytest.approx(2 * 44_100 * 2, rel=0.1)
    assert any(samples)


async def test_what_is_traced_is_logged_by_the_node(shop):
    """The user is that of the signed URL, not of the client's fields; no line has a signature."""
    parent = f"00-{'4b' * 16}-{'f0' * 8}-01"
    client = ["-o", os.devnull, "-r", "300000-300099", "-H", f"traceparent: {parent}"]
    await shop.media.traces.start("user=42", for_s=60)

    async def traced() -> list[dict]:
        await asyncio.to_thread(curl, *client, "-H", "baggage: user=43,request=r7", shop.url)
        return shop.node.events("request_traced")

    [line, *_] = await wait_true(traced, what="a line of a traced request")
    await shop.media.traces.stop()
    assert (line["trace_id"], line["user"], line["request"]) == ("4b" * 16, "42", "r7")
    assert (line["status"], line["outcome"], line["object"]) == (206, "done", "tracks/song.mp3")
    assert 100 < line["sent_bytes"] < 1000
    assert {"parse_ms", "verify_ms", "find_ms", "send_ms"} <= line.keys()
    signature = shop.url.rpartition("&s=")[2]
    assert signature not in shop.node.err


PLAY = """async (url) => {
  const audio = document.createElement('audio');
  audio.muted = true;
  document.body.append(audio);
  const once = (name) => new Promise((resolve, reject) => {
    audio.addEventListener(name, resolve, {once: true});
    audio.addEventListener('error', () => reject(new Error(audio.error.message)), {once: true});
  });
  const loaded = once('loadedmetadata');
  audio.src = url;
  await loaded;
  const seeked = once('seeked');
  audio.currentTime = audio.duration - 1;
  await seeked;
  const ended = once('ended');
  await audio.play();
  await ended;
  return {duration: audio.duration, at: audio.currentTime};
}"""


async def test_a_browser_plays_and_seeks(shop):
    chromium = os.environ.get("HEADRACE_CHROMIUM") or needs("chromium")
    options = ["--no-sandbox", "--disable-gpu", "--autoplay-policy=no-user-gesture-required"]
    ranges, statuses = [], []

    async def note(response) -> None:
        statuses.append(response.status)
        ranges.append((await response.request.all_headers()).get("range"))

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=options)
        try:
            page = await browser.new_page()
            page.on("response", note)
            played = await page.evaluate(PLAY, shop.url)
        finally:
            await browser.close()
    assert played["duration"] == pytest.approx(SECONDS * TIMES, rel=0.02)
    assert played["at"] == pytest.approx(played["duration"], abs=0.2)
    assert set(statuses) == {206}
    assert any(asked and not asked.startswith("bytes=0-") for asked in ranges), ranges
