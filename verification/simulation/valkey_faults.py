"""Faults of the models of Valkey and PostgreSQL, and a record of the time without any fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from verification.simulation.faults import Act, Fault, FaultKind
from verification.simulation.postgres import PostgresModel
from verification.simulation.valkey import ValkeyModel
from verification.simulation.world import World

DOWN_S: Final = 5.0
"""Longest time until a server runs again."""
POWER_S: Final = 1.0
"""With `everysec` a power cut loses writes of up to this age."""
OLD_WRITES_MAX: Final = 400
LOST_COMMITS_MAX: Final = 20


@dataclass(slots=True)
class Disturbance:
    """Whether faults last, and when the last one ended."""

    active: int = 0
    ended_s: float = 0.0

    def calm_s(self, now_s: float) -> float:
        """How long there has been no fault."""
        return 0.0 if self.active else now_s - self.ended_s

    def noting(self, kind: FaultKind, *, rest_s: float = 10.0) -> FaultKind:
        """The same kind, which records its faults; each is felt `rest_s` longer."""

        def act(world: World, fault: Fault) -> Callable[[], Any]:
            heal = kind.act(world, fault)
            self.active += 1

            def end() -> None:
                if heal is not None:
                    heal()
                self.active -= 1
                self.ended_s = max(self.ended_s, world.now_s + rest_s)

            return end

        return replace(kind, act=act)


def valkey_kinds(model: ValkeyModel, *, lasts_max_s: float) -> list[FaultKind]:
    """Faults of a Valkey server. Those that lose data call `ValkeyModel.on_loss`."""

    def restart(end_of: Callable[[Fault], int | None]) -> Act:
        def act(_world: World, fault: Fault) -> None:
            model.restart(end=end_of(fault), down_s=0.1 + DOWN_S * fault.strength**3)

        return act

    def set_lag(name: str, longest_s: float) -> Act:
        def act(_world: World, fault: Fault) -> Callable[[], None]:
            # What is written or replicated now stays so.
            model.written(), model.replicated()
            setattr(model, name, longest_s * fault.strength)
            return lambda: setattr(model, name, 0.0)

        return act

    def synced(_fault: Fault) -> int:
        return model.written() if model.policy == "always" else model.synced(age_s=POWER_S)

    def older(fault: Fault) -> int:
        return max(0, model.units_end - 1 - int(OLD_WRITES_MAX * fault.strength**2))

    def stall(_world: World, fault: Fault) -> Callable[[], None]:
        model.written()
        model.write_lag_s = 2.0

        def kill() -> None:
            end = model.written()
            model.write_lag_s = 0.0
            model.restart(end=end, down_s=0.1 + fault.strength)

        return kill

    kinds = [
        ("valkey_kill", restart(lambda _fault: model.written()), 3.0),
        ("valkey_power", restart(synced), 1.0),
        ("valkey_emptied", restart(lambda _fault: None), 1.0),
        ("valkey_old", restart(older), 1.0),
        ("valkey_freeze", lambda world, _fault: world.pause(model.name), 2.0),
        ("valkey_clock", _step, 1.0),
        ("valkey_disk", set_lag("write_lag_s", 2.0), 1.0),
        ("valkey_kill_on_slow_disk", stall, 2.0),
    ]
    if model.replicas:
        kinds += [
            ("valkey_failover", restart(lambda _fault: model.replicated()), 2.0),
            ("valkey_replica_lag", set_lag("replica_lag_s", 5.0), 2.0),
        ]
    return [FaultKind(name, act, [model.name], lasts_max_s, weight) for name, act, weight in kinds]


def link_kind(targets: Sequence[str], model: ValkeyModel, *, lasts_max_s: float) -> FaultKind:
    """A process cannot reach Valkey, but it reaches PostgreSQL."""

    def cut(world: World, fault: Fault) -> Callable[[], None]:
        network, name = world.network, model.name
        heals = [network.cut(fault.target, name), network.cut(name, fault.target)]
        return lambda: [heal() for heal in heals] and None

    return FaultKind("cut_from_valkey", cut, targets, lasts_max_s, 2.0)


def postgres_kinds(
    model: PostgresModel, *, lasts_max_s: float, on_failover: Callable[[], Any] = lambda: None
) -> list[FaultKind]:
    """Faults of a PostgreSQL server; `on_failover` is called after one that loses commits."""

    def crash(_world: World, fault: Fault) -> None:
        model.crash(down_s=0.1 + DOWN_S * fault.strength**3)

    def fail_over(_world: World, fault: Fault) -> None:
        lost = 1 + int(LOST_COMMITS_MAX * fault.strength**2)
        model.crash(down_s=0.1 + DOWN_S * fault.strength, lost_commits=lost)
        on_failover()

    def freeze(world: World, _fault: Fault) -> Callable[[], None]:
        return world.pause(model.name)

    return [
        FaultKind("postgres_crash", crash, [model.name], 0.0, 2.0),
        FaultKind("postgres_failover", fail_over, [model.name], 0.0, 1.0),
        FaultKind("postgres_freeze", freeze, [model.name], lasts_max_s, 1.0),
        FaultKind("postgres_clock", _step, [model.name]),
    ]


def _step(world: World, fault: Fault) -> None:
    # Servers are corrected by seconds often and by an hour rarely.
    world.step_clock(fault.target, (fault.strength - 0.5) ** 5 * 32 * 3600)
