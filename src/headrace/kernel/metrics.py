"""Prometheus series with bounded labels, and one scrape for several processes.

Every metric is declared through `counter`, `gauge` or `histogram` with all values of each label. An
undeclared value is counted as `other`, so ids, hosts and addresses never become series.

A process without a snapshot file, such as a slot, sends the increments of its counters to its
parent (`take_deltas`, `add_deltas`). A scrape then shows one agent, and counts of a dead slot stay.

Each role of a machine writes its series to `<folder>/<role>-<pid>.prom` every two seconds. The API
merges fresh files under a `role` label. A file older than STALE_S belongs to a dead process.

The registry is one per process by design: a snapshot file describes a process, not an app.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

disable_created_metrics()  # type: ignore[no-untyped-call]
REGISTRY: Final = CollectorRegistry()
STALE_S: Final = 15.0
WRITE_EVERY_S: Final = 2.0
_LOADED_S: Final = time.time()
"""A snapshot file that is older was written by an earlier process, which has ended."""
PEAK_HELD_S: Final = 13.0
"""The history reads the files of all roles every 10 s, and each is written every 2 s."""
_ALLOWED: Final[dict[str, Mapping[str, frozenset[str]]]] = {}
FINE_BUCKETS_S: Final = (
    *(0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025),
    *(0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0),
)
"""Buckets for operations that usually take microseconds."""
_GROWING: Final = frozenset({"counter", "histogram"})
Delta = tuple[str, str, str, dict[str, str], float]
"""Family, type, sample name, labels and increment."""
SampleKey = tuple[str, tuple[tuple[str, str], ...]]
_reported: Final[dict[SampleKey, float]] = {}
_added: Final[dict[SampleKey, Delta]] = {}


def counter(name: str, help_text: str, **labels: Iterable[str]) -> Counter:
    """Declare a counter; each label lists all its values."""
    return Counter(name, help_text, _declare(name, labels), registry=REGISTRY)


def gauge(name: str, help_text: str, **labels: Iterable[str]) -> Gauge:
    """Declare a gauge; each label lists all its values."""
    return Gauge(name, help_text, _declare(name, labels), registry=REGISTRY)


def histogram(
    name: str,
    help_text: str,
    *,
    buckets_s: Sequence[float] = Histogram.DEFAULT_BUCKETS,
    **labels: Iterable[str],
) -> Histogram:
    """Declare a histogram of seconds; each label lists all its values."""
    return Histogram(name, help_text, _declare(name, labels), registry=REGISTRY, buckets=buckets_s)


class Peak:
    """Sets a gauge to the highest value of the last PEAK_HELD_S, so that no reading misses it."""

    def __init__(self, shown: Gauge) -> None:
        self._shown = shown
        self._value, self._at_s = 0.0, float("-inf")

    def note(self, value: float) -> None:
        """Note the value of now."""
        now_s = time.monotonic()
        if value >= self._value or now_s - self._at_s > PEAK_HELD_S:
            self._value, self._at_s = value, now_s
        self._shown.set(self._value)


def _declare(name: str, labels: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    _ALLOWED[name] = {label: frozenset(values) | {"other"} for label, values in labels.items()}
    return tuple(labels)


START_METRIC: Final = "process_start_time_seconds"
_started: Final = gauge(
    START_METRIC, "When the process started, in seconds since 1970.", version=()
)


def note_start(version: str) -> None:
    """Record that this process starts now, as `version` of Headrace."""
    allow_values(START_METRIC, version=(version,))
    bound(_started, START_METRIC, version=version).set(time.time())


SECRET_METRIC: Final = "process_secret_info"  # noqa: S105 - a name
_secret: Final = gauge(
    SECRET_METRIC,
    "1, with the fingerprints of HEADRACE_SECRET and of the further secrets accepted.",
    secret=(),
    accepted=(),
)


def note_secret(fingerprint: str, accepted: str) -> None:
    """Record the fingerprint of the root secret, and those also accepted, joined by commas."""
    allow_values(SECRET_METRIC, secret=(fingerprint,), accepted=(accepted,))
    bound(_secret, SECRET_METRIC, secret=fingerprint, accepted=accepted).set(1)


def bound(metric: Any, name: str, **labels: str) -> Any:
    """The child of `metric` for `labels`; an undeclared value becomes `other`."""
    allowed = _ALLOWED[name]
    return metric.labels(
        **{key: value if value in allowed[key] else "other" for key, value in labels.items()}
    )


def observe_many(histogram: Any, counts: Sequence[int], total_s: float) -> None:
    """Add observations as a count per bucket, +Inf last, and their sum.

    The library has no method to add several observations in one call.
    """
    histogram._sum.inc(total_s)  # noqa: SLF001 - see above
    for bucket, count in zip(histogram._buckets, counts, strict=True):  # noqa: SLF001
        if count:
            bucket.inc(count)


def allow_values(name: str, **labels: Iterable[str]) -> None:
    """Add label values that are known only after start, such as routes."""
    allowed = _ALLOWED[name]
    _ALLOWED[name] = {label: allowed[label] | set(labels.get(label, ())) for label in allowed}


def declared_metrics() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Help text and labels by name, of every metric of the modules imported so far."""
    found = {family.name: family.documentation for family in REGISTRY.collect()}
    return {
        name: (found.get(name, found.get(name.removesuffix("_total"), "")), tuple(labels))
        for name, labels in sorted(_ALLOWED.items())
    }


def take_deltas() -> list[Delta]:
    """Increments of this process's counters and histograms since the last call."""
    grown: list[Delta] = []
    for family in REGISTRY.collect():
        for sample in family.samples if family.type in _GROWING else ():
            key = _key(sample.name, sample.labels)
            by = sample.value - _reported.get(key, 0.0)
            if by > 0:
                _reported[key] = sample.value
                grown.append((family.name, family.type, sample.name, sample.labels, by))
    return grown


def discard_deltas() -> None:
    """Discard increments that a forked process inherited: its parent reports them."""
    take_deltas()


def add_deltas(grown: Iterable[Delta]) -> None:
    """Add the increments of another process to the series of this process."""
    for family, kind, name, labels, by in grown:
        key = _key(name, labels)
        before = _added[key][4] if key in _added else 0.0
        _added[key] = (family, kind, name, labels, before + by)


def _key(name: str, labels: Mapping[str, str]) -> SampleKey:
    return name, tuple(sorted(labels.items()))


class _WithDeltas:
    """The series of this process plus the added increments."""

    def collect(self) -> Iterable[Metric]:
        left = dict(_added)
        families = {family.name: family for family in REGISTRY.collect()}
        for family in families.values():
            family.samples = [
                sample._replace(value=sample.value + left.pop(key)[4]) if key in left else sample
                for sample in family.samples
                for key in [_key(sample.name, sample.labels)]
            ]
        for family_name, kind, name, labels, by in left.values():
            target = families.setdefault(family_name, Metric(family_name, family_name, kind))
            target.add_sample(name, labels, by)
        return families.values()


def own_metrics() -> bytes:
    """The exposition text of this process, including added increments."""
    if not _added:
        return generate_latest(REGISTRY)
    grown = CollectorRegistry()
    grown.register(_WithDeltas())
    return generate_latest(grown)


def write_snapshot(folder: Path, role: str) -> None:
    """Write this process's series to its snapshot file, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{role}-{os.getpid()}.prom"
    draft = path.with_suffix(".draft")
    draft.write_bytes(own_metrics())
    draft.replace(path)


def remove_snapshot(folder: Path, role: str) -> None:
    """Delete this process's snapshot file, and those that its dead predecessors left behind.

    A file that remains shows the minute history that the last process of a role died.
    """
    own = folder / f"{role}-{os.getpid()}.prom"
    own.unlink(missing_ok=True)
    for path in folder.glob(f"{role}-*.prom"):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < _LOADED_S:
                path.unlink()


def merged_metrics(folder: Path | None, role: str | None) -> bytes:
    """The exposition text of all fresh snapshots in `folder`, and of this process as `role`.

    A role may have several processes, whose snapshots are named `<role>.worker`. The pid is a label
    of their series, so that a restart resets no counter.
    """
    own, texts = role, []
    for path in sorted(folder.glob("*.prom")) if folder is not None else []:
        try:
            name, _, pid = path.stem.rpartition("-")
            if role is not None and pid == str(os.getpid()) and name.partition(".")[0] == role:
                own = path.stem
            elif time.time() - path.stat().st_mtime < STALE_S:
                texts.append((path.stem, path.read_text()))
        except FileNotFoundError:
            continue
    if own is not None:
        texts.insert(0, (own, generate_latest(REGISTRY).decode()))
    merged = CollectorRegistry()
    merged.register(_Merged(texts))
    return generate_latest(merged)


def _labels_of(snapshot: str) -> dict[str, str]:
    """The labels for a snapshot named `<role>-<pid>` or `<role>.worker-<pid>`, or for a role."""
    name, _, pid = snapshot.rpartition("-")
    role, _, is_worker = (name or snapshot).partition(".")
    return {"role": role, "process": pid} if is_worker else {"role": role}


class _Merged:
    """The families of the expositions of several processes, with labels of the process."""

    def __init__(self, texts: list[tuple[str, str]]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, text in self._texts:
            labels = _labels_of(name)
            for family in text_string_to_metric_families(text):
                target = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    target.add_sample(sample.name, {**sample.labels, **labels}, sample.value)
        return families.values()
