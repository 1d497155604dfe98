"""``kvbridge new-transport``: a project in which only the bytes are missing."""

import json
import keyword
import re
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import click

from kvbridge.errors import ConfigError
from kvbridge.transport.registry import transport_entry_points

_FILES = {
    "pyproject.toml.in": "pyproject.toml",
    "README.md.in": "README.md",
    "init.py.in": "{{package}}/__init__.py",
    "config.py.in": "{{package}}/config.py",
    "driver.py.in": "{{package}}/driver.py",
    "line.py.in": "{{package}}/line.py",
    "link.py.in": "{{package}}/link.py",
    "conformance.py.in": "tests/test_{{name}}.py",
}
"""Where each file of the template goes."""

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@click.command("new-transport")
@click.argument("name")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Where the project goes.  [default: kvbridge-NAME]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a list.")
def command(name: str, folder: Path | None, as_json: bool) -> None:
    """Write a project for a transport of your own.

    It installs, is found by name, and comes with KVBridge's conformance suite, whose failing rules
    say what is left to write.
    """
    check_name(name)
    target = folder or Path(f"kvbridge-{name}")
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already; choose another --dir, or remove it")
    contents = render(name)
    write(target, contents)
    if as_json:
        click.echo(json.dumps({"name": name, "dir": str(target), "files": sorted(contents)}))
        return
    click.echo(f"wrote {target}:")
    for path in contents:
        click.echo(f"  {path}")
    click.echo(f"next: cd {target} && pip install -e '.[testing]' && pytest -x")


def check_name(name: str) -> None:
    """Refuse names that cannot become a package, or are taken.

    Raises:
        ConfigError: It is such a name.
    """
    if not _NAME.fullmatch(name) or len(name) > 40:
        raise ConfigError(
            f"{name!r} is no name for a transport; use up to 40 lower-case letters, digits and "
            "single underscores, a letter first, such as 'my_fabric'"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise ConfigError(f"{name!r} is a word of Python; choose another name")
    if name in transport_entry_points() or find_spec(f"kvbridge_{name}"):
        raise ConfigError(f"a transport {name!r} is installed already; choose another name")
    if name in sys.stdlib_module_names or _is_module(name):
        raise ConfigError(
            f"{name!r} is a module of Python or of an installed package, and who reads the name "
            f"would think of that; choose another name, such as '{name}_kv'"
        )


def _is_module(name: str) -> bool:
    # A mere folder beside the caller has no origin, and is no module that anybody installed.
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def render(name: str) -> dict[str, str]:
    """Return the text of every file of a new project, by its path in there."""
    words = {
        "{{name}}": name,
        "{{Name}}": "".join(part.capitalize() for part in name.split("_")),
        "{{package}}": f"kvbridge_{name}",
    }
    template = files("kvbridge.cli") / "transport_template"
    return {
        _fill(path, words): _fill((template / source).read_text("utf-8"), words)
        for source, path in _FILES.items()
    }


def write(target: Path, contents: dict[str, str]) -> None:
    """Write the files of a project.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        for path, text in contents.items():
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or target}: {error.strerror}") from error


def _fill(text: str, words: dict[str, str]) -> str:
    for placeholder, word in words.items():
        text = text.replace(placeholder, word)
    return text
