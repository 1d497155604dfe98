"""A simulator of whole plants: the real life cycle of requests, in virtual time, under faults."""

from kvbridge.testing.simulation.run import Result, simulate

__all__ = ["Result", "simulate"]
