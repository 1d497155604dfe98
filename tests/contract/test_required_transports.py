"""A transport that must run here is never silently left out."""

from collections.abc import Callable

from kvbridge.transport import Transport


def test_required_transports_can_run(
    required_transports: frozenset[str], usable_transport: Callable[[str], type[Transport]]
) -> None:
    for name in sorted(required_transports):
        usable_transport(name)
