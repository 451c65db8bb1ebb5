"""The decisions of signed URLs: what they allow, and that nothing else passes."""

from __future__ import annotations

import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.engines.blobs import InvalidBlobKey
from headrace.kernel.signing import WeakSecret
from headrace.media.signing import (
    OPEN,
    Gate,
    Keys,
    SignatureInvalid,
    UnsignableUrl,
    UrlRights,
    cache_control,
    check,
    expiry_on_grid,
    is_signed,
    sign,
)

ROOT, NEXT = "r" * 32, "n" * 32
KEYS = Keys.derive(ROOT)
PATH = "/m/tracks/a.mp3"
TAG = "ab" * 32
NOW_S = 1_795_302_000
FULL = {
    "expires_at": NOW_S + 60,
    "address": "203.0.113.7",
    "rate": 65_536,
    "tag": TAG,
    "trace": "user=42,request=r7",
}


def target_of(**options) -> str:
    return f"{PATH}?{sign(KEYS, PATH, **{'expires_at': NOW_S + 60, **options})}"


def admit(target: str, *, now_s: int = NOW_S, address: str = "203.0.113.7", keys: Keys = KEYS):
    path, _, query = target.partition("?")
    return check(keys, path, query, now_s=now_s, address=address)


def refused(target: str, **options) -> str:
    with pytest.raises(SignatureInvalid) as caught:
        admit(target, **options)
    return caught.value.text


def test_a_signed_url_grants_what_was_signed():
    assert admit(target_of()) == UrlRights(NOW_S + 60, None, None, None)
    assert admit(target_of(**FULL)) == UrlRights(NOW_S + 60, 65_536, TAG, "user=42,request=r7")


TARGETS = [target_of(), target_of(**FULL)]
CHARACTERS = st.sampled_from(string.printable) | st.characters(max_codepoint=0x2FF)


@pytest.mark.slow
@given(
    target=st.sampled_from(TARGETS),
    at=st.integers(0, 500),
    new=CHARACTERS,
    edit=st.sampled_from(["replace", "insert", "delete"]),
)
def test_any_changed_byte_is_refused(target, at, new, edit):
    at %= len(target)
    end = at if edit == "insert" else at + 1
    changed = target[:at] + ("" if edit == "delete" else new) + target[end:]
    assume(changed != target)
    refused(changed)


@pytest.mark.slow
@given(target=st.sampled_from(TARGETS), data=st.data())
def test_cut_doubled_and_shuffled_urls_are_refused(target, data):
    path, _, query = target.partition("?")
    fields = query.split("&")
    shuffled = data.draw(st.lists(st.sampled_from(fields), max_size=len(fields) + 2))
    assume(shuffled != fields)
    refused(f"{path}?{'&'.join(shuffled)}")


def test_the_last_character_of_a_signature_has_one_spelling():
    target = target_of()
    alphabet = string.ascii_letters + string.digits + "-_"
    passed = []
    for last in alphabet:
        try:
            admit(target[:-1] + last)
        except SignatureInvalid:
            continue
        passed.append(last)
    assert passed == [target[-1]]


def test_it_is_over_in_the_second_it_names():
    assert admit(target_of(), now_s=NOW_S + 59)
    refused(target_of(), now_s=NOW_S + 60)
    refused(target_of(), now_s=NOW_S + 10**9)


@pytest.mark.parametrize(
    ("signed", "inside", "outside"),
    [
        ("203.0.113.7", ["203.0.113.7", "::ffff:203.0.113.7"], ["203.0.113.8", "::1", "", "x"]),
        ("203.0.113.0/24", ["203.0.113.0", "203.0.113.255"], ["203.0.114.0", "2001:db8::1"]),
        ("2001:db8::/64", ["2001:db8::1", "2001:DB8:0:0:9::9"], ["2001:db8:0:1::1", "1.2.3.4"]),
        ("::ffff:1.2.3.4", ["1.2.3.4"], ["1.2.3.5"]),
        ("2001:0DB8::0001", ["2001:db8::1"], ["2001:db8::2"]),
    ],
)
def test_an_address_or_network_may_be_required(signed, inside, outside):
    target = target_of(address=signed)
    for address in inside:
        assert admit(target, address=address)
    for address in outside:
        refused(target, address=address)


def test_keys_rotate_without_a_url_refused_in_between():
    """The next secret is accepted first, then signs, then the previous one is dropped."""
    old = Keys.derive(ROOT)
    both, other_way = Keys.derive(ROOT, [NEXT]), Keys.derive(NEXT, [ROOT])
    new = Keys.derive(NEXT)
    old_url = f"{PATH}?{sign(old, PATH, expires_at=NOW_S + 60)}"
    new_url = f"{PATH}?{sign(new, PATH, expires_at=NOW_S + 60)}"
    for keys in (both, other_way):
        assert admit(old_url, keys=keys) == admit(new_url, keys=keys)
    refused(new_url, keys=old)
    refused(old_url, keys=new)
    assert old.signing.id != new.signing.id


def test_a_key_id_of_another_key_does_not_pass():
    both = Keys.derive(ROOT, [NEXT])
    other_id = Keys.derive(NEXT).signing.id
    refused(target_of().replace(KEYS.signing.id, other_id), keys=both)
    refused(target_of().replace(KEYS.signing.id, "00000000"), keys=both)


def test_secrets_are_strong_and_not_shown():
    with pytest.raises(WeakSecret):
        Keys.derive("short")
    with pytest.raises(WeakSecret):
        Keys.derive(ROOT, ["short"])
    assert "secret" not in repr(KEYS)
    assert ROOT not in repr(KEYS)


def test_every_fault_of_a_url_that_cannot_be_signed_is_reported():
    with pytest.raises(UnsignableUrl) as caught:
        sign(
            KEYS,
            PATH,
            expires_at=0,
            address="203.0.113.7/24",
            rate=0,
            tag="AB" * 32,
            trace="user=4 2",
        )
    pointers = [problem.pointer for problem in caught.value.problems]
    assert pointers == ["expires_at", "address", "rate", "tag", "trace"]


@pytest.mark.parametrize(
    "options",
    [
        {"expires_at": 10**12},
        {"address": "localhost"},
        {"address": ""},
        {"address": "fe80::1%eth0"},
        {"rate": -1},
        {"rate": 10**12},
        {"tag": "ab" * 31},
        {"trace": "colour=red"},
        {"trace": "user=42&s=x"},
        {"trace": "user=" + "x" * 129},
        {"trace": ""},
    ],
)
def test_invalid_options_are_not_signed(options):
    with pytest.raises(UnsignableUrl):
        target_of(**options)


@pytest.mark.parametrize("path", ["/m/../x", "/m/a b", "/m/%61", "/m/", "/x/a.mp3", "/m/a?b"])
def test_paths_that_name_no_object_are_not_signed(path):
    with pytest.raises((InvalidBlobKey, UnsignableUrl)):
        sign(KEYS, path, expires_at=NOW_S)


def test_the_longest_url_passes():
    longest = {
        "expires_at": 99_999_999_999,
        "address": "2001:db8:1111:2222:3333:4444:5555:0/127",
        "rate": 10**12 - 1,
        "tag": TAG,
        "trace": "user=" + "u" * 128 + ",request=" + "r" * 128,
    }
    target = target_of(**longest)
    rights = admit(target, address="2001:db8:1111:2222:3333:4444:5555:1")
    assert rights == UrlRights(longest["expires_at"], longest["rate"], TAG, longest["trace"])
    assert len(target) < 1_000


def test_a_gate_that_requires_nothing_still_checks_what_is_signed():
    gate = Gate(lambda: KEYS, is_required=False)
    options = {"now_s": NOW_S, "address": "203.0.113.7"}
    assert gate.admit(PATH, **options) is OPEN
    assert gate.admit(f"{PATH}?v=7", **options) is OPEN
    assert gate.admit(target_of(tag=TAG), **options).tag == TAG
    with pytest.raises(SignatureInvalid):
        gate.admit(target_of(tag=TAG)[:-1] + "!", **options)


def test_a_gate_needs_no_secret_until_something_is_signed():
    asked = []

    def make() -> Keys:
        asked.append(1)
        return KEYS

    gate = Gate(make, is_required=False)
    options = {"now_s": NOW_S, "address": "::1"}
    gate.admit(PATH, **options)
    assert not asked
    gate.admit(target_of(), **options)
    gate.admit(target_of(), **options)
    assert asked == [1]
    assert is_signed(target_of())
    assert not is_signed(f"{PATH}?v=7")


@pytest.mark.slow
@given(
    now_s=st.floats(1e9, 4e9),
    ttl_s=st.integers(1, 10**7),
    grid_s=st.integers(1, 10**5),
    later_s=st.floats(0, 1e5),
)
def test_an_expiry_on_a_grid_stays_the_same_within_a_step(now_s, ttl_s, grid_s, later_s):
    expiry = expiry_on_grid(now_s, ttl_s, grid_s)
    assert expiry % grid_s == 0
    assert ttl_s <= expiry - now_s <= ttl_s + grid_s
    if now_s + later_s + ttl_s <= expiry:
        assert expiry_on_grid(now_s + later_s, ttl_s, grid_s) == expiry


def test_a_signed_answer_is_kept_by_its_receiver_and_no_longer_than_its_url():
    assert cache_control(OPEN, is_immutable=False, now_s=NOW_S) == "public, max-age=60"
    forever = "public, max-age=31536000, immutable"
    assert cache_control(OPEN, is_immutable=True, now_s=NOW_S) == forever
    rights = UrlRights(expires_at=NOW_S + 30)
    assert cache_control(rights, is_immutable=False, now_s=NOW_S) == "private, max-age=30"
    later = UrlRights(expires_at=NOW_S + 3600)
    assert cache_control(later, is_immutable=False, now_s=NOW_S) == "private, max-age=60"
    assert (
        cache_control(later, is_immutable=True, now_s=NOW_S) == "private, max-age=3600, immutable"
    )
    assert cache_control(rights, is_immutable=False, now_s=NOW_S + 99) == "private, max-age=0"
