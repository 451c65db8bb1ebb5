"""User agents as they are sent: people and the apps they use on one side, programs on the other."""

from __future__ import annotations

import re

import pytest

from headrace.views import traffic_of_user_agent
from headrace.views.model import bot_rules

PEOPLE = (
    (
        "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36"
        " (KHTML, like Gecko) Chrome/126.0.0.0 Safari/537.36"
    ),
    (
        "Mozilla/5.0 (Macintosh; Intel Mac OS X 14_5) AppleWebKit/605.1.15"
        " (KHTML, like Gecko) Version/17.5 Safari/605.1.15"
    ),
    (
        "Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X) AppleWebKit/605.1.15"
        " Version/17.5 Mobile/15E148 Safari/604.1"
    ),
    "Mozilla/5.0 (X11; Ubuntu; Linux x86_64; rv:127.0) Gecko/20100101 Firefox/127.0",
    (
        "Mozilla/5.0 (Linux; Android 11; CUBOT NOTE 20) AppleWebKit/537.36"
        " (KHTML, like Gecko) Chrome/108.0.0.0 Mobile Safari/537.36"
    ),
    (
        "Mozilla/5.0 (Linux; Android 9; CUBOT_X18_Plus) AppleWebKit/537.36"
        " Chrome/120.0.0.0 Mobile Safari/537.36"
    ),
    "Dalvik/2.1.0 (Linux; U; Android 12; CUBOT P60 Build/SP1A.210812.016)",
    "okhttp/4.12.0",
    "AvitoLike/182.2 (Pixel 8; Android 14) okhttp/4.12.0",
    "NewsFeed/3.2 (iPhone; iOS 17.5; Scale/3.00)",
    "Preview Magazine/2.1 (iPad; iOS 16.7)",
    "HeartMonitor/5.0 (iPhone; iOS 17.4)",
    "QRScanner/1.9 CFNetwork/1494.0.7 Darwin/23.4.0",
    "SpiderSolitaire/7.3 CFNetwork/1410.0.3 Darwin/22.6.0",
    "PythonQuiz/1.0 (iPhone; iOS 17.0)",
    "Dart/3.4 (dart:io)",
    "Fetch Rewards/3.41.0 (iPhone; iOS 17.5)",
    (
        "Mozilla/5.0 (Linux; Android 13; SM-S918B) AppleWebKit/537.36"
        " Chrome/124.0 Mobile Safari/537.36 [FBAN/FB4A;FBAV/460.0]"
    ),
    (
        "Mozilla/5.0 (iPhone; CPU iPhone OS 17_4 like Mac OS X) AppleWebKit/605.1.15"
        " Mobile/15E148 Instagram 330.0.0.28.88"
    ),
    "Opera/9.80 (J2ME/MIDP; Opera Mini/9.80) Presto/2.5.25 Version/10.54",
)
PROGRAMS = (
    "Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)",
    "Mozilla/5.0 (compatible; YandexBot/3.0; +http://yandex.com/bots)",
    "Mozilla/5.0 (compatible; bingbot/2.0; +http://www.bing.com/bingbot.htm)",
    "Mozilla/5.0 (compatible; Baiduspider/2.0; +http://www.baidu.com/search/spider.html)",
    "Sogou web spider/4.0(+http://www.sogou.com/docs/help/webmasters.htm#07)",
    "Mozilla/5.0 (compatible; AhrefsBot/7.0; +http://ahrefs.com/robot/)",
    "Twitterbot/1.0",
    "TelegramBot (like TwitterBot)",
    "WhatsApp/2.23.20.0 A",
    "facebookexternalhit/1.1",
    (
        "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36"
        " (KHTML, like Gecko) HeadlessChrome/126.0.0.0 Safari/537.36"
    ),
    (
        "Mozilla/5.0 (Linux; Android 11) AppleWebKit/537.36"
        " Chrome/119.0 Mobile Safari/537.36 Chrome-Lighthouse"
    ),
    "Mozilla/5.0+(compatible; UptimeRobot/2.0; http://www.uptimerobot.com/)",
    "NewsBlur Feed Fetcher - 30 subscribers - http://www.newsblur.com/site/1",
    "curl/8.5.0",
    "Wget/1.21.4",
    "python-requests/2.32",
    "Python-urllib/3.11",
    "Python/3.11 aiohttp/3.9.5",
    "Go-http-client/2.0",
    "Java/17.0.10",
    "axios/1.7.2",
    "node",
    "PostmanRuntime/7.39.0",
    "GPTBot/1.2 (+https://openai.com/gptbot)",
)


@pytest.mark.parametrize("user_agent", PEOPLE)
def test_people_and_their_apps_are_counted_as_people(user_agent):
    assert traffic_of_user_agent(user_agent) == "human"


@pytest.mark.parametrize("user_agent", [*PROGRAMS, "", None])
def test_programs_are_counted_as_bots(user_agent):
    assert traffic_of_user_agent(user_agent) == "bot"


@pytest.mark.parametrize("rule", bot_rules(), ids=lambda rule: rule.pattern[:30])
def test_each_rule_has_a_reason_and_matches_its_example(rule):
    assert len(rule.reason.split()) >= 4
    assert re.search(rule.pattern, rule.example, re.IGNORECASE)


def test_no_match_takes_long_on_a_hostile_user_agent():
    """Every rule is a plain alternation: nothing to repeat within a repetition."""
    assert not [rule.pattern for rule in bot_rules() if re.search(r"[+*]\)[+*]", rule.pattern)]
