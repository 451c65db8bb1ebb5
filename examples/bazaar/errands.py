"""Those who keep the site's own jobs busy: followers who get mails, buyers who ask, moderators.

Every job is recorded before the call and again when it was accepted. If no answer comes, it
is sent again with the same key, so it is a job once.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from dataclasses import dataclass
from typing import Any, Final

from examples.bazaar.adverts import MODERATED
from examples.bazaar.client import Client
from examples.bazaar.faults import Faults
from examples.bazaar.records import Records

TICK_S: Final = 1.0
DIGEST_EVERY_S: Final = 20.0
DIGEST_MAILS: Final = 45
MAIL: Final = "bazaar.mail"
QUESTIONS: Final = "bazaar.questions"
QUEUES: Final = (MAIL, QUESTIONS)
PROVIDERS: Final = ("post.example", "mail.example", "letters.example")
_PEOPLE: Final = ("ann", "bob", "carol", "dan", "eve", "femke", "gus", "hana", "ivo", "june")
_ASKED: Final = (
    "Is it still there?",
    "Would you send it to Oslo?",
    "Is the small scratch on the left?",
    "Can I come on Saturday?",
    "I pay by wire transfer, double the price!",
    "Does it fit a small flat?",
)


@dataclass(slots=True)
class Sent(Faults):
    """What was sent until now."""

    errands: int = 0
    decisions: int = 0


class Senders:
    """They send errands and decide about photos until cancelled."""

    def __init__(self, api_url: str, token: str, records: Records, sellers: list[str]) -> None:
        self.sent = Sent()
        self._api_url, self._token = api_url, token
        self._records, self._sellers = records, sellers
        self._dice = random.Random()
        self._name = f"{int(time.time()):x}"
        self._number = 0

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_always())
            group.create_task(self._moderate_always())

    async def send(self, client: Client, queue: str, jobs: list[dict[str, Any]]) -> list[str]:
        """Have these jobs done; returns their names. Raises: ServerFailedError."""
        uids = [job["payload"]["uid"] for job in jobs]
        await asyncio.to_thread(self._records.ask, [(uid, queue) for uid in uids])
        headers = {"content-type": "application/json", "idempotency-key": uids[0]}
        path, body = f"/v1/queues/{queue}/jobs", json.dumps(jobs).encode()
        reply = await client.request("POST", path, body=body, headers=headers, is_repeatable=True)
        reply.json()
        await asyncio.to_thread(self._records.accept, uids)
        self.sent.errands += len(uids)
        return uids

    async def send_probe(self, client: Client) -> str:
        """One question, whose effect shows that jobs run. Raises: ServerFailedError."""
        [uid] = await self.send(client, QUESTIONS, [self._question()])
        return uid

    async def _send_always(self) -> None:
        client, began_s, digest_at_s = (
            Client(self._api_url, token=self._token),
            time.monotonic(),
            5.0,
        )
        try:
            while True:
                age_s = time.monotonic() - began_s
                with self.sent.attempt("enqueues of mails and questions"):
                    # More at some times than at others, so that charts have a shape.
                    count = round(2.5 + 2 * math.sin(age_s / 9))
                    await self.send(client, QUESTIONS, [self._question() for _ in range(count)])
                    await self.send(client, MAIL, [self._mail("An answer from the seller")])
                    if age_s > digest_at_s:
                        digest_at_s = age_s + DIGEST_EVERY_S
                        seller = self._dice.choice(self._sellers)
                        mails = [self._mail(f"New from {seller}") for _ in range(DIGEST_MAILS)]
                        await self.send(client, MAIL, mails)
                await asyncio.sleep(TICK_S)
        finally:
            client.close()

    async def _moderate_always(self) -> None:
        client = Client(self._api_url, token=self._token)
        try:
            while True:
                with self.sent.attempt("decisions about photos"):
                    await self._moderate(client)
                await asyncio.sleep(TICK_S)
        finally:
            client.close()

    async def _moderate(self, client: Client) -> None:
        """Decide about one new photo."""
        path = f"/v1/queues/{MODERATED}/take?n=1&lease=2m"
        taken = (await client.request("POST", path, is_repeatable=True)).json()
        if not taken["jobs"]:
            return
        decision = "report" if self._dice.random() < 0.08 else "fine"
        outcomes = {str(job["id"]): {"decision": decision, "by": "eve"} for job in taken["jobs"]}
        path = f"/v1/leases/{taken['lease_id']}/ack"
        headers = {"content-type": "application/json"}
        body = json.dumps({"outcomes": outcomes}).encode()
        reply = await client.request("POST", path, body=body, headers=headers, is_repeatable=True)
        if reply.status != 204:
            self.sent.fault(f"{path}: expected 204, got {reply.status}")
        self.sent.decisions += 1

    def _uid(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number}"

    def _mail(self, subject: str) -> dict[str, Any]:
        provider, chance = self._dice.choice(PROVIDERS), self._dice.random()
        trouble = "greylisted" if chance < 0.06 else "no mailbox" if chance < 0.08 else ""
        letter = {
            "uid": self._uid(),
            "to": f"{self._dice.choice(_PEOPLE)}@{provider}",
            "subject": subject,
            "trouble": trouble,
        }
        return {"payload": letter, "lane": provider}

    def _question(self) -> dict[str, Any]:
        question = {
            "uid": self._uid(),
            "text": self._dice.choice(_ASKED),
            "seller": self._dice.choice(self._sellers),
        }
        return {"payload": question}
