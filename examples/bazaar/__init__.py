"""Bazaar: a small classifieds site on top of Headrace, and the demo that shows it at work.

`app.py` and `chores.py` are what the site's author writes: its items, and its own jobs. `shop`,
`storefront`, `adverts` and `tracks` are its pages and tables. Everything else is the world around
it: sellers' shops with photos on real local HTTP hosts (`shops`, `scenes`, `drawing`, `pictures`,
`origins`), their catalogue files (`catalogues`), visitors that fetch photos by range (`visitors`)
or walk through the shop (`buyers`), people who get mails (`errands`), faults on request with the
ledger that shows what they cost (`panel`, `breaks`, `ledger`, `records`), the tour (`tour`) and the
play itself (`demo`). Run it with `python -m examples.bazaar.demo`.
"""
