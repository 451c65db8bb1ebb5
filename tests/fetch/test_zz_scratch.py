"""scratch"""
import time
from penstock.engines.sql import compile_query
async def test_big(shop):
    text = "id,name,price,photos\n" + "".join(f"i{n},Item {n},5,http://a.example/{n}.jpg|http://a.example/{n}b.jpg\n" for n in range(100_000))
    text = text.replace("a.example", f"127.0.0.1:{shop.origin.port}")
    t=time.time(); await shop.run(text); print("first", time.time()-t)
    q=compile_query("q","-- x\nINSERT INTO penstock.fetch_link (customer,url,outcome,run_id) SELECT 'shop', url, 'failed:http_404', 1 FROM penstock.fetch_need WHERE item LIKE 'i%7' OR item = ANY(:x::text[])")
    await shop.postgres.run(q, x=[""])
    await shop.postgres.run(compile_query("q","-- x\nUPDATE penstock.fetch_change SET published_at=now()"))
    t=time.time(); r=await shop.run(text); print("second", time.time()-t, r.photos, r.items_pending)
    t=time.time(); r=await shop.run(text); print("third", time.time()-t, r.photos, r.items_pending)
    t=time.time(); r=await shop.run(text, is_dry_run=True); print("dry", time.time()-t, r.photos, r.items_pending)
