"""Limits of a customer and its lane: manual settings stay, and no lane lacks a limit."""

from __future__ import annotations

from headrace.fetch.model import LIMITER


async def test_a_pause_and_a_weight_outlast_new_limits(shop):
    lanes = shop.jobs.lanes
    await lanes.set(LIMITER, "shop", starts_max=5, window_s=1, concurrency=2, weight=7)
    await lanes.pause(LIMITER, "shop")
    await shop.fetch.customers.set("shop", starts_max=9, window_s=3, connections=4)
    lane = await lanes.get(LIMITER, "shop")
    assert (lane.paused, lane.weight) == (True, 7)
    assert (lane.starts_max, lane.window_s, lane.concurrency) == (9, 3, 4)


async def test_a_new_customers_lane_is_not_paused(shop):
    await shop.fetch.customers.set("other", starts_max=9, window_s=3, connections=4)
    lane = await shop.jobs.lanes.get(LIMITER, "other")
    assert (lane.paused, lane.weight, lane.follows_limiter) == (False, 1, False)


async def test_a_lane_that_was_reset_is_as_polite_as_can_be_until_limits_are_set(shop):
    await shop.jobs.queues.declare()
    lanes = shop.jobs.lanes
    await lanes.reset(LIMITER, "shop")
    lane = await lanes.get(LIMITER, "shop")
    assert (lane.starts_max, lane.window_s, lane.concurrency) == (1, 1, 1)
    await shop.fetch.customers.set("shop", starts_max=9, window_s=3, connections=4)
    lane = await lanes.get(LIMITER, "shop")
    assert (lane.starts_max, lane.window_s, lane.concurrency) == (9, 3, 4)
