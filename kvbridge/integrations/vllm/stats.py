"""What connectors count, among what vLLM logs and shows to Prometheus."""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvbridge.connector import Spread, Stats
from kvbridge.connector.series import SERIES, TRANSFER_BYTES, TRANSFER_SECONDS, TRANSFERS
from kvbridge.errors import ConfigError


class BridgeStats(KVConnectorStats):
    """What has been counted in a time, as plain data: vLLM sends it from process to process."""

    @classmethod
    def of(cls, recent: Stats, *, is_first: bool = False) -> "BridgeStats":
        """Return what has been counted; what is 0 is left out, unless it may have been more.

        Args:
            recent: What has been counted.
            is_first: Whether nothing was told before: then all series begin, most of them at 0.
        """
        return cls(
            {
                "values": [
                    [list(key), value]
                    for key, value in recent.values.items()
                    if value or is_first or SERIES[key[0]].kind == "gauge"
                ],
                "spreads": [
                    [list(key), list(each.counts), each.total]
                    for key, each in recent.spreads.items()
                    if any(each.counts)
                ],
            }
        )

    def content(self) -> Stats:
        """Return it as values of ours."""
        return Stats(
            {tuple(key): value for key, value in self.data.get("values", ())},
            {
                tuple(key): Spread(tuple(counts), total)
                for key, counts, total in self.data.get("spreads", ())
            },
        )

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "BridgeStats":
        """Return both together; of what is as it is now, the later.

        Raises:
            ConfigError: The other one has not been counted by KVBridge.
        """
        if not isinstance(other, BridgeStats):
            raise ConfigError(f"counts of KVBridge do not add up with a {type(other).__name__}")
        before, after = self.content(), other.content()
        kept = {
            key: value
            for key, value in before.values.items()
            if SERIES[key[0]].kind != "gauge" or key not in after.values
        }
        return BridgeStats.of(Stats(kept, before.spreads) + after)

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs of an interval."""
        recent = self.content()
        ok = recent.value(TRANSFERS.name, outcome="ok")
        reading = recent.spread(TRANSFER_SECONDS.name, phase="reading")
        nbytes = recent.spread(TRANSFER_BYTES.name).total
        said = {
            "Num successful transfers": ok,
            "Num failed transfers": recent.value(TRANSFERS.name, outcome="failed"),
            "Num aborted transfers": recent.value(TRANSFERS.name, outcome="aborted"),
        }
        if ok:
            bounds = TRANSFER_SECONDS.bounds
            said |= {
                "Avg MB per transfer": round(nbytes / ok / 1e6, 3),
                "Avg xfer time (ms)": round(1e3 * reading.total / ok, 3),
                "P90 xfer time (ms)": round(1e3 * reading.quantile(0.9, bounds), 3),
            }
        return {name: int(value) if value == int(value) else value for name, value in said.items()}

    def is_empty(self) -> bool:
        """Whether nothing has been counted: vLLM drops what is empty."""
        return not (self.data.get("values") or self.data.get("spreads"))


class BridgePromMetrics(KVConnectorPromMetrics):
    """Shows the series of :data:`~kvbridge.connector.series.SERIES`, with vLLM's labels in front.

    vLLM chooses the classes, which may be other than Prometheus's own.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Make one metric for each series."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for series in SERIES.values():
            kind = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[series.kind]
            options: dict[str, Any] = {}
            if kind is Gauge:
                options["multiprocess_mode"] = "mostrecent"
            if kind is Histogram:
                options["buckets"] = series.bounds
            self._metrics[series.name] = metric_types[kind](
                name=series.name,
                documentation=series.meaning,
                labelnames=[*labelnames, *series.labels],
                **options,
            )

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add what has been counted."""
        recent = BridgeStats(dict(transfer_stats_data)).content()
        engine = self.per_engine_labelvalues[engine_idx]
        for (name, *labels), value in recent.values.items():
            metric = self._metrics[name].labels(*engine, *labels)
            (metric.set if SERIES[name].kind == "gauge" else metric.inc)(value)
        for (name, *labels), spread in recent.spreads.items():
            metric = self._metrics[name].labels(*engine, *labels)
            for value in measurements(spread, SERIES[name].bounds):
                metric.observe(value)


def measurements(spread: Spread, bounds: Sequence[float]) -> list[float]:
    """Return measurements that would have been counted like this: as many per bound, one sum.

    A histogram of Prometheus takes nothing but measurements. A single one is exact.

    Args:
        spread: What has been counted.
        bounds: Those of its series.
    """
    lows, highs = (0.0, *bounds), (*bounds, max(spread.total, 2 * bounds[-1]))
    places = [at for at, count in enumerate(spread.counts) for _ in range(count)]
    left = spread.total - sum(lows[at] for at in places)
    room = sum(highs[at] - lows[at] for at in places)
    share = min(max(left / room, 1e-9), 1.0) if room else 0.0
    return [lows[at] + share * (highs[at] - lows[at]) for at in places]
