"""A cascade of deletes.

A user is deleted, then the posts, then their comments, each table in its own queue.

A step deletes a few rows and enqueues the next steps in the same transaction: after a crash both
exist or neither, so no row is left behind. Small steps hold locks only briefly. A queue that
overloads the database can be paused or limited to fewer slots without stopping the others.
"""

from __future__ import annotations

import asyncio
import os

import asyncpg

from headrace import Headrace

app = Headrace()
POSTS_PER_STEP = 100
COMMENTS_PER_STEP = 500
pools: list[asyncpg.Pool] = []


@app.on_slot_start
async def open_pool() -> None:
    """Connections belong to a slot: they are opened after its fork."""
    pools.append(await asyncpg.create_pool(os.environ["DATABASE_URL"], min_size=0, max_size=2))


@app.on_slot_stop
async def close_pool() -> None:
    """Close the connections."""
    await pools.pop().close()


@app.task("delete.user", importance=2)
async def delete_user(user_id: int) -> None:
    """Delete the user, which the site then no longer shows."""
    async with pools[0].acquire() as connection, connection.transaction():
        await connection.execute("DELETE FROM users WHERE id = $1", user_id)
        await delete_posts.enqueue(user_id=user_id, tx=connection)


@app.task("delete.posts", importance=7, slots=(0, 4))
async def delete_posts(user_id: int) -> None:
    """Delete some posts, enqueue their comments, and repeat while posts are left."""
    async with pools[0].acquire() as connection, connection.transaction():
        rows = await connection.fetch(
            "DELETE FROM posts WHERE id IN (SELECT id FROM posts WHERE user_id = $1 LIMIT $2)"
            " RETURNING id",
            user_id,
            POSTS_PER_STEP,
        )
        await delete_comments.enqueue_many([{"post_id": row["id"]} for row in rows], tx=connection)
        if len(rows) == POSTS_PER_STEP:
            await delete_posts.enqueue(user_id=user_id, tx=connection)


@app.task("delete.comments", importance=9, slots=(0, 2))
async def delete_comments(post_id: int) -> None:
    """Delete some comments, and repeat while comments are left."""
    async with pools[0].acquire() as connection, connection.transaction():
        status = await connection.execute(
            "DELETE FROM comments"
            " WHERE id IN (SELECT id FROM comments WHERE post_id = $1 LIMIT $2)",
            post_id,
            COMMENTS_PER_STEP,
        )
        if status == f"DELETE {COMMENTS_PER_STEP}":
            await delete_comments.enqueue(post_id=post_id, tx=connection)


async def main() -> None:
    """Create a user with posts and comments, and delete it."""
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    await connection.execute(
        "CREATE TABLE IF NOT EXISTS users (id int PRIMARY KEY);"
        "CREATE TABLE IF NOT EXISTS posts (id serial PRIMARY KEY, user_id int);"
        "CREATE TABLE IF NOT EXISTS comments (id serial PRIMARY KEY, post_id int);"
        "CREATE INDEX IF NOT EXISTS posts_of_user ON posts (user_id);"
        "CREATE INDEX IF NOT EXISTS comments_of_post ON comments (post_id);"
        "INSERT INTO users VALUES (7);"
        "INSERT INTO posts (user_id) SELECT 7 FROM generate_series(1, 250);"
        "INSERT INTO comments (post_id) SELECT p.id FROM posts p, generate_series(1, 600) n"
        " WHERE p.user_id = 7 AND p.id % 50 = 0"
    )
    await connection.close()
    await delete_user.enqueue(user_id=7)
    await app.close()


if __name__ == "__main__":
    asyncio.run(main())
