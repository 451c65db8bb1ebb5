"""The room `fetch` in the simulation: sellers' hosts, models of its statements, processes."""

from verification.simulation.fetch.scenario import FetchScenario, StallingFetchScenario

__all__ = ["FetchScenario", "StallingFetchScenario"]
