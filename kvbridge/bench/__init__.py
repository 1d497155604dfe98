"""How fast a transport moves bytes between two processes of this machine."""

from kvbridge.bench.cases import Case, Layout, Measurement, Quartiles, quartiles
from kvbridge.bench.measure import measure
from kvbridge.bench.pair import BenchError, Pair

__all__ = [
    "BenchError",
    "Case",
    "Layout",
    "Measurement",
    "Pair",
    "Quartiles",
    "measure",
    "quartiles",
]
