"""Fuzz one target until libFuzzer ends this process: ``tests.fuzz.one TARGET OPTION ...``."""

import logging
import sys
from random import Random

import atheris

with atheris.instrument_imports(include=["kvbridge"]):
    from tests.fuzz.targets import TARGETS, mutate

BY_BYTES = 0.4
"""So many messages are changed by libFuzzer, which knows bytes only; the others by us."""


def main() -> None:
    _, target, *options = sys.argv

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        if Random(seed).random() < BY_BYTES:
            return bytes(atheris.Mutate(data, min(max_size, 2 * len(data) + 16)))
        return mutate(target, data, seed)[:max_size]

    logging.disable(logging.CRITICAL)
    atheris.Setup([target, *options], TARGETS[target], custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
