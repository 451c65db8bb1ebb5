"""Examples of media: objects, uploads, tags, and the cluster."""

from __future__ import annotations

from pathlib import Path

from headrace import Headrace
from headrace.media.service.entry import EntryOptions

app = Headrace()


async def main() -> None:
    """Every call that needs no running node, in an order that works."""
    #: app.media.objects.put
    await app.media.objects.put("tracks/a.mp3", b"\xff\xfb" + bytes(1000))
    #: app.media.objects.info
    size = (await app.media.objects.info("tracks/a.mp3")).size_bytes
    #: app.media.objects.ls
    keys = [found.key for found in await app.media.objects.ls("tracks")]
    #: app.media.objects.url
    url = app.media.objects.url("tracks/a.mp3")
    short = app.media.objects.url("tracks/a.mp3", ttl_s=3600, address="203.0.113.0/24", rate=65_536)
    #: app.media.objects.sign
    signed = await app.media.objects.sign("tracks/a.mp3", ttl_s=3600)
    print(signed.url, signed.expires_at)
    #: app.media.objects.target
    path = app.media.objects.target("tracks/a.mp3", ttl_s=3600)
    #: -
    assert (size, keys) == (1002, ["tracks/a.mp3"])
    assert "?" not in url
    assert "?" in short
    assert path.startswith("/m/tracks/a.mp3?")
    #: app.media.tags.put
    tag = await app.media.tags.put(title="Song", artist="Ann", buyer="order-7")
    bought = await app.media.objects.sign("tracks/a.mp3", tag=tag.id)
    #: app.media.tags.get
    title = (await app.media.tags.get(tag.id)).title
    #: app.media.tags.require
    await app.media.tags.require(tag.id)
    #: app.media.tags.rm
    await app.media.tags.rm(tag.id)
    #: -
    assert title == "Song"
    assert bought

    #: app.media.uploads.create
    upload = await app.media.uploads.create("tracks/b.mp3", 6)

    #: app.media.uploads.append
    async def chunks():
        yield b"abc"
        yield b"def"

    offset = await app.media.uploads.append(upload.id, 0, chunks())
    #: app.media.uploads.get
    upload = await app.media.uploads.get(upload.id)
    #: app.media.uploads.rm
    await app.media.uploads.rm(upload.id)
    #: app.media.uploads.sweep
    removed = await app.media.uploads.sweep()
    #: -
    assert (offset, upload.offset_bytes, removed) == (6, 6, 0)
    #: app.media.purges.purge
    purged = await app.media.purges.purge(prefix="tracks/", is_dry_run=True)
    #: app.media.objects.rm
    await app.media.objects.rm("tracks/b.mp3")
    #: app.media.traces.start
    await app.media.traces.start("user=42", for_s=600)
    #: app.media.traces.list
    watches = await app.media.traces.list()
    #: app.media.traces.stop
    await app.media.traces.stop("user=42")
    #: app.media.nodes.list
    nodes = [node.name for node in await app.media.nodes.list()]
    #: -
    assert purged
    assert (len(watches), nodes) == (1, [])
    await app.close()


async def in_a_cluster(key: str) -> None:
    """Calls that need nodes of a cluster."""
    #: app.media.nodes.get
    node = await app.media.nodes.get("node-1")
    #: app.media.nodes.drain
    await app.media.nodes.drain("node-1")
    #: app.media.nodes.undrain
    await app.media.nodes.undrain("node-1")
    #: app.media.nodes.set_weight
    await app.media.nodes.set_weight("node-1", 2.0)
    #: app.media.nodes.remove
    await app.media.nodes.remove("node-1")
    #: app.media.partitions.show
    owners = await app.media.partitions.show(key)
    #: app.media.partitions.plan
    plan = await app.media.partitions.plan(lost=["node-1"])
    #: app.media.entry.list
    for one in await app.media.entry.list():
        print(one)
    #: app.media.entry.node_of
    name = await app.media.entry.node_of(key)
    url = app.media.objects.url(key, prefer=name)
    #: app.media.entry.render
    print(await app.media.entry.render("haproxy", EntryOptions(listen=":443")))
    #: app.media.entry.watch
    await app.media.entry.watch("haproxy", EntryOptions(), Path("/etc/haproxy/nodes.cfg"))
    #: app.media.warming.warm
    await app.media.warming.warm([key])
    #: -
    print(node, owners, plan, url)


async def on_a_node(disk: str) -> None:
    """Calls of the machine that runs the node."""
    #: app.media.disks.list
    for one in await app.media.disks.list():
        print(one)
    #: app.media.disks.add
    await app.media.disks.add("/mnt/ssd2", 100 * 2**30)
    #: app.media.disks.get
    print(await app.media.disks.get("/mnt/ssd2"))
    #: app.media.disks.drain
    await app.media.disks.drain(disk)
    #: app.media.disks.undrain
    await app.media.disks.undrain(disk)
    #: app.media.disks.retire
    await app.media.disks.retire(disk)
    #: app.media.disks.verify
    await app.media.disks.verify(0.01)
    #: app.media.hottest.list
    for hot in await app.media.hottest.list(objects_max=10):
        print(hot)
