"""Transports around a transport: one that goes wrong on purpose, one that keeps a record."""

from kvbridge.transport.wrappers.base import TransportWrapper, WrapperConfig
from kvbridge.transport.wrappers.faults import Fault, Faults
from kvbridge.transport.wrappers.faulty import FaultyTransport
from kvbridge.transport.wrappers.recording import (
    Record,
    RecordingConfig,
    RecordingTransport,
    Total,
)

__all__ = [
    "Fault",
    "Faults",
    "FaultyTransport",
    "Record",
    "RecordingConfig",
    "RecordingTransport",
    "Total",
    "TransportWrapper",
    "WrapperConfig",
]
