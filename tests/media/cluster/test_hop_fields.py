"""A hop field is valid once, for one request, to one node; anything else is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from headrace.kernel.signing import derive_key
from headrace.media.cluster.hop import (
    HOP_FIELD,
    KEY_USE,
    AnswerSpan,
    HopGuard,
    HopRefused,
    HopSigner,
    covered_by,
    reply_of,
)

KEY = derive_key("one secret of a cluster, long enough", KEY_USE)
NEXT_KEY = derive_key("the next secret of it, long enough too", KEY_USE)
OTHER_KEY = derive_key("a secret of somebody else, of no use", KEY_USE)
OTHER_USE = derive_key("one secret of a cluster, long enough", "media-url")


@dataclass
class PeerRequest:
    """A request's head."""

    method: str = "GET"
    target: str = "/m/tracks/a.mp3"
    fields: dict[str, str] = field(default_factory=lambda: {"range": "bytes=0-9"})


class Clock:
    """Unix time as the test sets it."""

    now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def signed(line, asked: PeerRequest, *, to: str = "b", generation: int = 0) -> str:
    value, mac = line.sign(to, covered_by(asked.method, asked.target, asked.fields), generation)
    asked.fields[HOP_FIELD] = value
    return mac


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def line(clock):
    return HopSigner([KEY], "a", clock).sequence()


@pytest.fixture
def guard(clock):
    return HopGuard([KEY, NEXT_KEY], "b", clock)


def test_a_client_s_request_is_no_hop(guard):
    assert guard.judge(PeerRequest()) is None


def test_a_hop_is_known_by_its_sender(guard, line):
    for generation in (0, 7):
        asked = PeerRequest()
        mac = signed(line, asked, generation=generation)
        hop = guard.judge(asked)
        assert hop is not None
        assert (hop.sender, hop.generation, hop.mac) == ("a", generation, mac)


@pytest.mark.parametrize(
    "change",
    [
        lambda asked: setattr(asked, "method", "HEAD"),
        lambda asked: setattr(asked, "target", "/m/tracks/b.mp3"),
        lambda asked: setattr(asked, "target", "/m/tracks/a.mp3?x"),
        lambda asked: asked.fields.update(range="bytes=0-99"),
        lambda asked: asked.fields.pop("range"),
        lambda asked: asked.fields.update({"if-match": '"x"'}),
    ],
)
def test_it_is_invalid_for_another_request(guard, line, change):
    asked = PeerRequest()
    signed(line, asked)
    change(asked)
    with pytest.raises(HopRefused):
        guard.judge(asked)


def test_every_changed_character_of_it_is_refused(guard, line):
    asked = PeerRequest()
    signed(line, asked)
    value = asked.fields[HOP_FIELD]
    for place, character in enumerate(value):
        other = "0" if character != "0" else "1"
        asked.fields[HOP_FIELD] = value[:place] + other + value[place + 1 :]
        with pytest.raises(HopRefused):
            guard.judge(asked)
    asked.fields[HOP_FIELD] = value
    assert guard.judge(asked) is not None


@pytest.mark.parametrize(
    "value",
    ["", ";", "1", "1;;;;;;;;", "1;2;3;4;5;6;7;8;9", "x" * 4000, "1;k;a;b;1e9;c;1;0;00",
     "1;k;a;b;٣;c;1;0;00"],
)  # fmt: skip
def test_an_invalid_hop_field_is_refused(guard, value):
    with pytest.raises(HopRefused):
        guard.judge(PeerRequest(fields={HOP_FIELD: value}))


@pytest.mark.parametrize("key", [OTHER_KEY, OTHER_USE], ids=["other secret", "other use"])
def test_other_keys_are_refused(guard, clock, key):
    asked = PeerRequest()
    signed(HopSigner([key], "a", clock).sequence(), asked)
    with pytest.raises(HopRefused):
        guard.judge(asked)


def test_a_former_secret_is_accepted_by_a_node_that_has_both(guard, clock):
    asked = PeerRequest()
    signed(HopSigner([NEXT_KEY, KEY], "a", clock).sequence(), asked)
    assert guard.judge(asked) is not None


def test_a_hop_meant_for_another_node_is_refused(guard, line):
    asked = PeerRequest()
    signed(line, asked, to="c")
    with pytest.raises(HopRefused, match="another node"):
        guard.judge(asked)


def test_it_is_valid_once(guard, line):
    asked = PeerRequest()
    signed(line, asked)
    assert guard.judge(asked) is not None
    with pytest.raises(HopRefused, match="was received before"):
        guard.judge(asked)


def test_an_older_one_of_the_same_connection_is_refused(guard, line):
    first, second = PeerRequest(), PeerRequest()
    signed(line, first)
    signed(line, second)
    assert guard.judge(second) is not None
    with pytest.raises(HopRefused):
        guard.judge(first)


@pytest.mark.parametrize("away_s", [31, -31, 3600])
def test_it_is_valid_for_half_a_minute(guard, line, clock, away_s):
    asked = PeerRequest()
    signed(line, asked)
    clock.now_s += away_s
    with pytest.raises(HopRefused, match="clocks"):
        guard.judge(asked)


def test_used_fields_are_kept_as_long_as_they_are_valid(guard, clock):
    signer = HopSigner([KEY], "a", clock)
    kept = PeerRequest()
    signed(signer.sequence(), kept)
    assert guard.judge(kept) is not None
    for _ in range(40):
        clock.now_s += 1.0
        asked = PeerRequest()
        signed(signer.sequence(), asked)
        guard.judge(asked)
    with pytest.raises(HopRefused):
        guard.judge(kept)
    assert len(guard._newest) == 41
    clock.now_s += 100
    asked = PeerRequest()
    signed(signer.sequence(), asked)
    guard.judge(asked)
    assert len(guard._newest) == 1


def test_an_answer_is_proven_for_its_hop_version_and_span(guard, clock):
    signer = HopSigner([KEY], "a", clock)
    asked, other = PeerRequest(), PeerRequest()
    line = signer.sequence()
    mac, other_mac = signed(line, asked), signed(line, other)
    hop = guard.judge(asked)
    assert hop is not None
    reply = reply_of(hop, AnswerSpan("etag", 0, 10))
    assert signer.is_authentic(mac, reply, AnswerSpan("etag", 0, 10))
    for wrong in [("other", 0, 10), ("etag", 1, 10), ("etag", 0, 11)]:
        assert not signer.is_authentic(mac, reply, AnswerSpan(*wrong))
    assert not signer.is_authentic(other_mac, reply, AnswerSpan("etag", 0, 10))
    for nonsense in ("", "zz", reply[:-2], reply[:32]):
        assert not signer.is_authentic(mac, nonsense, AnswerSpan("etag", 0, 10))
