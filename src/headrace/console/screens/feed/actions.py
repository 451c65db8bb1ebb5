"""What can be done about feeds; each says the command and the call that do the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from headrace.console.actions import Action, Field
from headrace.console.seeing import Ask

READ: Final = "feed:read"
WRITE: Final = "feed:write"
SAMPLE: Final = 1_000
VIEWER: Final = Field(name="viewer", label="Viewer")
AUTHOR: Final = Field(name="author", label="Author")
POST: Final = Field(name="post", label="Post")
_VERBS: Final = (
    ("follow", "Follow an author", "{viewer} follows {author}, and sees his posts on the next page.",
     "PUT", "follows", "follows {author}", "followed {author} already"),
    ("unfollow", "Unfollow an author", "{viewer} follows {author} no more; his posts are gone on the next page.",
     "DELETE", "follows", "follows {author} no more", "did not follow {author}"),
    ("mute", "Mute an author", "{viewer} is not shown {author}, followed or not.",
     "PUT", "mutes", "is not shown {author} any more", "had muted {author} already"),
    ("unmute", "End a mute", "{viewer} is shown {author} again, where he follows him.",
     "DELETE", "mutes", "has {author} muted no more", "had not muted {author}"),
    ("block", "Block an author", "Neither of {viewer} and {author} is shown the other.",
     "PUT", "blocks", "and {author} are not shown each other any more", "had blocked {author} already"),
    ("unblock", "End a block", "The block of {author} by {viewer} ends.",
     "DELETE", "blocks", "blocks {author} no more", "had not blocked {author}"),
)  # fmt: skip
"""Verbs between a viewer and an author: name, title, what it does, method, the list it changes, and what is told of the viewer
once it is done, or where it was so before."""


async def delete_post(ask: Ask, given: dict[str, Any]) -> str:
    """Remove a post."""
    gone = await ask.service("feed").delete(given["post"])
    return f"post {given['post']} is removed" if gone else f"there was no post {given['post']}"


async def preview_delete(ask: Ask, given: dict[str, Any]) -> str:
    """What would be removed."""
    found = await ask.service("feed").posts.find(given["post"])
    return f"Post {found.id} of {found.author}, of {found.at:%Y-%m-%d %H:%M:%S} UTC. Handlers of deletions are told."


async def rebuild(ask: Ask, given: dict[str, Any]) -> str:  # noqa: ARG001 - every action is called so
    """Build the index anew."""
    return (
        f"job {await ask.service('feed').index.rebuild()} builds the index; pages go on meanwhile"
    )


async def verify(ask: Ask, given: dict[str, Any]) -> str:  # noqa: ARG001 - every action is called so
    """Compare index and truth."""
    found = await ask.service("feed").index.verify(sample=SAMPLE)
    seen = f"{found.viewers:,} viewers with {found.follows:,} follows, {found.authors:,} authors"
    seen += f" with {found.posts:,} posts"
    if found.is_equal:
        return f"{seen}: the index is what PostgreSQL says"
    first = found.differences[0]
    return (
        f"{seen}: {len(found.differences)} differ, such as {first.kind} of {first.entity}: {first.missing}"
        f" missing, {first.extra} too many; a rebuild mends it"
    )


def _between(verb: str, done: str, before: str) -> Callable[[Ask, dict[str, Any]], Awaitable[str]]:
    async def run(ask: Ask, given: dict[str, Any]) -> str:
        changed = await getattr(ask.service("feed").follows, verb)(given["viewer"], given["author"])
        told = done if changed else f"{before}: nothing is changed"
        return f"viewer {given['viewer']} {told.format(author=given['author'])}"

    return run


ACTIONS: Final = (
    *(
        Action(
            name=f"feed-{verb}",
            title=title,
            scope=WRITE,
            what=what,
            command=f"headrace feed {verb} {{viewer}} {{author}}",
            method=method,
            path=f"/v1/feed/viewers/{{viewer}}/{part}/{{author}}",
            run=_between(verb, done, before),
            fields=(VIEWER, AUTHOR),
        )
        for verb, title, what, method, part, done, before in _VERBS
    ),
    Action(
        name="feed-delete",
        title="Remove a post",
        scope=WRITE,
        what="Removes post {post}, for good: no page shows it any more.",
        command="headrace feed rm {post}",
        method="DELETE",
        path="/v1/feed/posts/{post}",
        run=delete_post,
        fields=(POST,),
        is_danger=True,
        preview=preview_delete,
    ),
    Action(
        name="feed-rebuild",
        title="Build the index anew",
        scope=WRITE,
        what="Puts every viewer and author into Valkey anew, from PostgreSQL, as a job; pages go on meanwhile.",
        command="headrace feed rebuild",
        method="POST",
        path="/v1/feed/rebuild",
        run=rebuild,
    ),
    Action(
        name="feed-verify",
        title="Compare index and truth",
        scope=READ,
        what="Compares what Valkey has of up to 1,000 viewers and authors with PostgreSQL. Changes nothing.",
        command="headrace feed verify",
        method="GET",
        path="/v1/feed/verify",
        run=verify,
    ),
)
