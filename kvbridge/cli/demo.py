"""``kvbridge demo``: two engines, one prompt, and the proof that nothing was lost on the way."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from kvbridge.errors import TransportUnavailableError
from kvbridge.namespaces import private_network
from kvbridge.processes import interrupted_later

EXIT_TERMINATED = 128 + signal.SIGTERM

_SHAPE_HELP = "as in tp=2,pp=1,page=16,layout=nhd,kv=together; what is left out keeps its default"


@click.command("demo")
@click.option(
    "--transport",
    default="local",
    show_default=True,
    help="What moves the bytes; of several, as in nixl,mooncake, the next is tried if one fails.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the transport; NAME.KEY=VALUE where there are several.",
)
@click.option("--break", "broken", metavar="NAMES", help="Transports whose reads shall fail.")
@click.option(
    "--direction",
    type=click.Choice(["auto", "pull", "push"]),
    default="auto",
    show_default=True,
    help="Who moves the bytes: decode reads, or prefill writes.",
)
@click.option("--prefill", default="tp=2,page=16,layout=nhd", show_default=True, help=_SHAPE_HELP)
@click.option("--decode", default="tp=4,page=32,layout=hnd", show_default=True, help=_SHAPE_HELP)
@click.option("--heads", default=4, show_default=True, help="KV heads of the model.")
@click.option("--layers", default=4, show_default=True, help="Layers of the model.")
@click.option("--seed", default=0, show_default=True, help="Where the model's weights come from.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="A text instead of ours.")
@click.option("--tokens", default=32, show_default=True, help="How many tokens to write.")
@click.option("--port", default=0, help="Handshake port of the prefill engine.  [default: free]")
@click.option(
    "--isolate-network/--share-network",
    "isolate",
    default=None,
    help="Whether the ranks are in a network namespace of their own.  "
    "[default: where it can be made, unless --port or --option is given]",
)
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds, per step.")
@click.option("--explain", is_flag=True, help="Show the plan of every decode rank too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_obj
def command(own_process: bool, /, *, isolate: bool | None, **arguments: Any) -> int:
    """Prefill on one engine, decode on another of any shape, and compare.

    Every rank is a process with its shard of heads and layers. The decode engine pulls the cache
    over the chosen transport and continues; one unsplit engine does the same, and every token
    and every moved byte must be equal. Exits with 1 if anything differs.
    """
    # What is configured by hand may mean this host's network: a port, a device, an address.
    wanted = isolate is None and not (arguments["port"] or arguments["options"])
    with _network(isolate or wanted, required=bool(isolate), for_good=own_process) as network:
        # Numpy starts threads, and a process of several cannot enter every namespace.
        with interrupted_later():
            from kvbridge.cli.demo_run import run

        signal.signal(signal.SIGTERM, _terminated)
        return 0 if run(arguments, network=network) else 1


@contextmanager
def _network(isolate: bool, *, required: bool, for_good: bool) -> Iterator[str]:
    """Be in the network that the ranks shall be in, which is called ``own`` or ``shared``."""
    with ExitStack() as stack:
        network = "shared"
        if isolate:
            try:
                stack.enter_context(private_network(for_good=for_good))
                network = "own"
            except TransportUnavailableError:
                if required:
                    raise
        yield network


def _terminated(_signal: int, _frame: object) -> None:
    """End as after Ctrl-C: the ranks are stopped on the way out."""
    raise SystemExit(EXIT_TERMINATED)
