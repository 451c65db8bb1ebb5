"""The room `fetch` in the simulation: sellers' hosts, models of its statements, processes."""

from verification.simulation.fetch.scenario import FetchScenario

__all__ = ["FetchScenario"]
