"""How the documentation is built."""

from collections.abc import Iterator
from importlib.metadata import version as installed_version

from docutils.nodes import Element, TextElement
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from kvbridge.cli.option_words import options_of
from kvbridge.testing import all_rules
from kvbridge.testing.rules import GROUPS
from kvbridge.transport import get_transport
from kvbridge.transport.registry import transport_entry_points
from kvbridge.transport.wrappers import TransportWrapper

project = "KVBridge"
copyright = "The KVBridge authors"  # noqa: A001  (the name is Sphinx's)
version = release = installed_version("kvbridge")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute that also has a value would be described twice otherwise

# Names of other projects are not looked up: the build must not depend on other sites being there.
# Nor do type variables have a page, and what is private is nobody's business.
nitpick_ignore_regex = [
    ("py:.*", r"(?!kvbridge).*"),
    ("py:(class|obj)", r"kvbridge\..*\.\w+T"),
    ("py:class", r"kvbridge\.plan\.binding\..*"),
    ("py:class", r"kvbridge\.connector\.(scheduler|worker)\.Bridge.*"),
    ("py:class", r"kvbridge\..*\._\w+"),
]


def link_to_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: TextElement
) -> Element | None:
    """Resolve ``kvbridge.model.memory.Region`` to ``kvbridge.model.Region``.

    Type hints name the module that defines a class; users import it from the package around it.
    """
    parts = node.get("reftarget", "").split(".")
    if node.get("refdomain") != "py" or parts[0] != "kvbridge":
        return None
    domain = env.domains.python_domain
    for end in range(len(parts) - 2, 0, -1):
        public = ".".join([*parts[:end], parts[-1]])
        if public in domain.objects:
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", public, node, content
            )
    return None


def rules_in_words() -> Iterator[str]:
    """Yield the conformance rules as Markdown, group by group, from the registry itself."""
    rules = list(all_rules().values())
    for prefix, title in GROUPS.items():
        yield f"## {title}\n"
        yield "| rule | what holds | applies |\n|---|---|---|"
        for rule in (one for one in rules if one.group == prefix):
            words = [f"`{word}` declared" for word in rule.needs]
            words += [f"`{word}` not declared" for word in rule.lacks]
            when = ", ".join(words) or "always"
            harder = "; harder in the full tier" if len(rule.tiers) > 1 else ""
            anchor = f'<span id="{rule.id}">{rule.id}</span>'
            yield f"| {anchor} | {rule.sentence} | {when}{harder} |"
        yield ""


def options_in_words() -> Iterator[str]:
    """Yield the options of every transport here as Markdown, from the classes that declare them."""
    for name in transport_entry_points():
        kind = get_transport(name)
        what = "wraps another one, in tests" if issubclass(kind, TransportWrapper) else ""
        yield f"## `{name}`{', which ' if what else ''}{what}\n"
        yield "| option | may be | default | meaning |\n|---|---|---|---|"
        for option in options_of(kind.config_type):
            default = f"`{option.default}`" if option.default else "must be given"
            yield f"| `{option.name}` | {option.kind} | {default} | {option.text} |"
        yield ""


FILLED = {
    "reference/conformance": ("{{ rules }}", rules_in_words),
    "reference/transports": ("{{ options }}", options_in_words),
}
"""Pages with a place for what the project itself knows."""


def fill(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Put it there."""
    if docname in FILLED:
        place, words = FILLED[docname]
        source[0] = source[0].replace(place, "\n".join(words()))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("missing-reference", link_to_public_name)
    app.connect("source-read", fill)
