"""Bazaar: a small classifieds site on top of Headrace, and the demo that shows it at work.

`app.py` is what the site's author writes. Everything else here is the world around it: sellers'
shops with photos on real local HTTP hosts (`shops`, `pictures`, `origins`), their catalogue files
(`catalogues`), the site's own table, its pages and tracks (`adverts`, `shop`, `tracks`), visitors
that fetch photos by range (`visitors`) or walk through the shop (`buyers`) and the play itself
(`demo`). Run it with `python -m examples.bazaar.demo`.
"""
