"""Without an engine: lines of hits, shards, aggregation, valid hits, traffic of user agents."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernel.config import InvalidConfig, load_config
from headrace.views import Hit, Traffic, ViewsConfig
from headrace.views.bots import Bots, default_rules
from headrace.views.errors import InvalidHit, TooManyHits, TooManyIds
from headrace.views.flush import FlushBatch
from headrace.views.model import (
    NUMBER,
    id_key,
    line_of,
    parse_line,
    require_hits,
    require_ids,
    shard_of,
)

IDS = st.text(alphabet="aB9._:@~-", min_size=1, max_size=6)
COUNTERS = ("phone", "photo_2")
HITS = st.builds(
    Hit,
    id=IDS,
    n=st.integers(1, 1_000_000),
    traffic=st.sampled_from(list(Traffic)),
    counters=st.sampled_from([(), (), COUNTERS, COUNTERS[1:]]),
)


def line_with(hit):
    return line_of(hit, COUNTERS)


@given(HITS)
def test_a_line_is_parsed_to_its_hit(hit):
    found = (hit.id, NUMBER[hit.traffic], hit.n, list(hit.counters))
    assert parse_line(line_with(hit)) == found


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(HITS, min_size=1, max_size=5)), max_size=8))
def test_aggregation_loses_nothing_and_has_one_row_per_key(entries):
    batch = FlushBatch("0-1")
    expected: Counter = Counter()
    for number, (hour, hits) in enumerate(entries):
        ms = hour * 3_600_000 + 5
        batch.add([(f"{ms}-{number}", ",".join(map(line_with, hits)))])
        for hit in hits:
            expected[hit.id, NUMBER[hit.traffic], hour, ""] += hit.n
            expected.update((hit.id, NUMBER[hit.traffic], hour, name) for name in hit.counters)
    counts = batch.counts()
    found = {(*count[:3], count.counter): count.views for count in counts}
    assert found == expected
    assert len(found) == len(counts)


def test_shards_and_entry_ids():
    assert [shard_of(f"ad:{n}", 4) for n in (1, 2, 3)] == [1, 3, 1], "CRC-32"
    assert id_key("9-1") < id_key("10-0") < id_key("10-9") < id_key("10-10")


INVALID = [
    ("", "id ''"),
    ("a,b", "id 'a,b'"),
    ("a*5", "id 'a\\*5'"),
    ("x" * 129, "id"),
    (Hit(id="a", n=0), "n 0:"),
    (Hit(id="a", n=1_000_001), "n 1000001:"),
    (Hit(id="a", n=True), "n True:"),
    (Hit(id="a", n=10**5000), "a very large integer"),
    (Hit(id="a", n=None), "n None:"),
    (Hit(id="a", viewer="a b"), "viewer 'a b'"),
    (Hit(id="a", viewer=5), "viewer 5:"),
    (Hit(id="a", event="é"), "event 'é'"),
    (Hit(id="a", event=""), "event ''"),
    (Hit(id="a", event=b"e"), "event"),
    (Hit(id="a", traffic="robot"), "class 'robot'"),
    (Hit(id="a", traffic=["bot"]), "class"),
    (Hit(id=None), "id None:"),
    (None, "hit None: expected a Hit or an id"),
    (5, "hit 5:"),
    ("tom+me@x.example", "use a hash"),
]


def test_an_invalid_hit_is_refused_by_name():
    for hit, named in INVALID:
        with pytest.raises(InvalidHit, match=named):
            require_hits(["good", hit])
    for wrong in ("ad:1", b"ad:1", None, 5):
        with pytest.raises(InvalidHit, match="expected a list of hits; nothing was counted"):
            require_hits(wrong)
        with pytest.raises(InvalidHit, match=r"expected a list of ids$"):
            require_ids(wrong)
    for wrong in ("a b", None, 5):
        with pytest.raises(InvalidHit) as raised:
            require_ids([wrong])
        assert "counted" not in raised.value.text, "this call only reads"


def test_calls_are_bounded():
    assert len(require_hits(["a"] * 1_000)) == 1_000
    with pytest.raises(TooManyHits):
        require_hits(["a"] * 1_001)
    with pytest.raises(TooManyIds):
        require_ids(["a"] * 1_001)


BROWSERS = """
Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 Chrome/126.0.0.0 Safari/537.36
Mozilla/5.0 (Macintosh; Intel Mac OS X 14_5) AppleWebKit/605.1.15 Version/17.5 Safari/605.1.15
Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X) AppleWebKit/605.1.15 Safari/604.1
Mozilla/5.0 (X11; Ubuntu; Linux x86_64; rv:127.0) Gecko/20100101 Firefox/127.0
Mozilla/5.0 (Linux; Android 11; CUBOT NOTE 20) AppleWebKit/537.36 Chrome/108.0.0.0 Safari/537.36
Mozilla/5.0 (Linux; Android 9; CUBOT_X18_Plus) AppleWebKit/537.36 Chrome/120.0.0.0 Safari/537.36
Dalvik/2.1.0 (Linux; U; Android 12; CUBOT P60 Build/SP1A.210812.016)
okhttp/4.12.0
AvitoLike/182.2 (Pixel 8; Android 14) okhttp/4.12.0
NewsFeed/3.2 (iPhone; iOS 17.5; Scale/3.00)
Preview Magazine/2.1 (iPad; iOS 16.7)
HeartMonitor/5.0 (iPhone; iOS 17.4)
QRScanner/1.9 CFNetwork/1494.0.7 Darwin/23.4.0
SpiderSolitaire/7.3 CFNetwork/1410.0.3 Darwin/22.6.0
PythonQuiz/1.0 (iPhone; iOS 17.0)
Dart/3.4 (dart:io)
Fetch Rewards/3.41.0 (iPhone; iOS 17.5)
Mozilla/5.0 (Linux; Android 13; SM-S918B) Chrome/124.0 Mobile Safari/537.36 [FBAN/FB4A;FBAV/460.0]
Mozilla/5.0 (iPhone; CPU iPhone OS 17_4 like Mac OS X) Mobile/15E148 Instagram 330.0.0.28.88
Opera/9.80 (J2ME/MIDP; Opera Mini/9.80) Presto/2.5.25 Version/10.54
"""
PROGRAMS = """
Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)
Mozilla/5.0 (compatible; YandexBot/3.0; +http://yandex.com/bots)
Mozilla/5.0 (compatible; bingbot/2.0; +http://www.bing.com/bingbot.htm)
Mozilla/5.0 (compatible; Baiduspider/2.0; +http://www.baidu.com/search/spider.html)
Sogou web spider/4.0(+http://www.sogou.com/docs/help/webmasters.htm#07)
Mozilla/5.0 (compatible; AhrefsBot/7.0; +http://ahrefs.com/robot/)
Twitterbot/1.0
TelegramBot (like TwitterBot)
WhatsApp/2.23.20.0 A
facebookexternalhit/1.1
Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 HeadlessChrome/126.0.0.0 Safari/537.36
Mozilla/5.0 (Linux; Android 11) Chrome/119.0 Mobile Safari/537.36 Chrome-Lighthouse
Mozilla/5.0+(compatible; UptimeRobot/2.0; http://www.uptimerobot.com/)
NewsBlur Feed Fetcher - 30 subscribers - http://www.newsblur.com/site/1
curl/8.5.0
Wget/1.21.4
python-requests/2.32
Python-urllib/3.11
Python/3.11 aiohttp/3.9.5
Go-http-client/2.0
Java/17.0.10
axios/1.7.2
node
PostmanRuntime/7.39.0
GPTBot/1.2 (+https://openai.com/gptbot)
"""


def test_user_agents_of_people_and_programs_are_distinguished():
    people, programs = BROWSERS.strip().splitlines(), PROGRAMS.strip().splitlines()
    bots = Bots()
    assert [agent for agent in people if bots.traffic_of(agent) != "human"] == []
    assert [a for a in [*programs, "", None] if bots.traffic_of(a) != "bot"] == []


def test_each_bot_rule_has_a_reason_and_an_example_and_is_fast():
    for rule in default_rules():
        assert len(rule.reason.split()) >= 4, rule
        assert re.search(rule.pattern, rule.example, re.IGNORECASE), rule
        assert not re.search(r"[+*]\)[+*]", rule.pattern), "no repetition within a repetition"


RULE = "[[rule]]\npattern = '{0}'\nreason = 'r'\nexample = '{1}'\n"


def test_operators_replace_the_list_of_bots_while_it_is_used(tmp_path):
    path = tmp_path / "bots.toml"
    path.write_text(RULE.format("shopscan", "ShopScan/1"))
    config = {"HEADRACE_VIEWS_BOTS": str(path)}
    loaded = load_config({"views": ViewsConfig}, env=config).section(ViewsConfig)
    bots = Bots(loaded.bots)
    agents = ("ShopScan/2", "Googlebot/2.1", "PriceHawk", None)
    assert [bots.traffic_of(agent) for agent in agents] == ["bot", "human", "human", "bot"]
    invalid = ("", "x", RULE.format("(", "a"), RULE.format("a", "b"), RULE.format("a*", "a"), None)
    for text in invalid:
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        bots.look()
        assert bots.traffic_of("ShopScan/2") == "bot", "the rules before stay"
        with pytest.raises(InvalidConfig, match="HEADRACE_VIEWS_BOTS"):
            load_config({"views": ViewsConfig}, env=config)
    path.write_text(RULE.format("pricehawk", "PriceHawk"))
    bots.look()
    assert [bots.traffic_of(agent) for agent in agents] == ["human", "human", "bot", "bot"]
