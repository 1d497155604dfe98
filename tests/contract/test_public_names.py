"""Every public name is where users look for it."""

import pytest

import kvbridge


@pytest.mark.parametrize("name", kvbridge.__all__)
def test_public_names_load_when_they_are_used(name: str) -> None:
    assert getattr(kvbridge, name) is not None
    assert name in dir(kvbridge)


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = kvbridge.nonsense
