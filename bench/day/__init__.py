"""The simulated day of the fleet: the scenario, the fleet that lives it, its waits, the plot."""
