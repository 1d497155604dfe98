"""A transport that is right and can nothing."""

from dataclasses import asdict

from kvbridge.transport import Capabilities
from tests.mutants.base import Declares


class MinimalTransport(Declares):
    """Finds its peers and lets go of them; every capability is off."""

    changes = asdict(Capabilities())
