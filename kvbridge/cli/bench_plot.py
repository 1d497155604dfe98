"""The picture of ``kvbridge bench``: throughput over block size, one line for each transport."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from kvbridge.bench import Measurement
from kvbridge.cli.options import size_words
from kvbridge.config import check_writable
from kvbridge.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Refuse what could not be drawn later.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; pip install 'kvbridge[plot]'")
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path} must end with one of {', '.join(SUFFIXES)}")
    check_writable(path, "--plot")


def draw(found: Sequence[Measurement], path: Path) -> None:
    """Draw what was measured, with a panel for each direction and layout."""
    import matplotlib as mpl

    mpl.use("agg")  # draws without a screen
    from matplotlib import pyplot as plt

    ops = list(dict.fromkeys(m.case.op for m in found))
    layouts = list(dict.fromkeys(m.case.layout for m in found))
    figure, grid = plt.subplots(
        len(layouts),
        len(ops),
        figsize=(5 * len(ops), 3.5 * len(layouts)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    blocks = sorted({m.case.block_nbytes for m in found})
    for (row, layout), (column, op) in product(enumerate(layouts), enumerate(ops)):
        axes = grid[row][column]
        axes.set_title(f"{op}, {layout}")
        for name in dict.fromkeys(m.transport for m in found):
            own = [
                m for m in found if (m.transport, m.case.op, m.case.layout) == (name, op, layout)
            ]
            if not own:
                continue
            own.sort(key=lambda m: m.case.block_nbytes)
            middle = [m.gbps.median for m in own]
            spread = (
                [m.gbps.median - m.gbps.low for m in own],
                [m.gbps.high - m.gbps.median for m in own],
            )
            label = f"{name} ({own[0].path})"
            axes.errorbar(
                [m.case.block_nbytes for m in own],
                middle,
                yerr=spread,
                marker="o",
                capsize=3,
                label=label,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(blocks, [size_words(nbytes) for nbytes in blocks])
        axes.grid(visible=True, which="both", alpha=0.3)
        if row == len(layouts) - 1:
            axes.set_xlabel("block")
        if column == 0:
            axes.set_ylabel("GB/s")
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
