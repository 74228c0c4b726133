"""Configuration of the documentation site: `make docs` writes it to docs/_build/html."""

import importlib
import re
import sys
from pathlib import Path
from typing import get_args

import click
from docutils import nodes
from pygments.lexers import get_lexer_by_name
from sphinx.addnodes import pending_xref, toctree
from sphinx.application import Sphinx
from sphinx.ext.autodoc import mock

from tf4slurm import __version__
from tf4slurm.cli.options import JobVerb
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.options import Group, options_of

sys.path.insert(0, str(Path(__file__).parent))
from generated import PUBLIC_NAMES, fill_in

SECTION = re.compile(r"\w*::?")
OPTION = ".. option:: "
OPTION_NAME = re.compile(r"(?<![\w`-])--[a-z][\w-]*")
TUTORIALS = Path(__file__).parent.parent / "TUTORIALS"

# autodoc_mock_imports does not cover the imports of Sphinx's source analysis.
without_tensorflow = mock(["keras", "numpy", "tensorflow"])
without_tensorflow.__enter__()
importlib.import_module("tensorflow").__version__ = "2.21.0"  # tf4slurm compares it

project = "tf4slurm"
author = "the developers of tf4slurm"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "tutorials/runs", "tutorials/checkpoints", "**/.ipynb_checkpoints"]
nitpicky = True


autodoc_member_order = "bysource"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_use_ivar = True
nitpick_ignore_regex = [
    ("py:.*", r"(collections|keras|os|pathlib|tensorflow|tf|typing)\..*"),
    ("py:class", r"tf4slurm\.clusters\.base\._Cluster"),  # a type variable
]
smartquotes = False  # "--ps" has two dashes

nb_execution_mode = "off"  # the stored output of the notebooks is shown; `make notebooks` executes them
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_remove_prompts = True

html_theme = "furo"
html_title = f"tf4slurm {version}"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_show_copyright = html_show_sphinx = False


def adapt_tutorials(app: Sphinx, doctree: nodes.document) -> None:
    """Let links to TUTORIALS/NAME.ipynb lead to the page tutorials/NAME, and accept shell commands in cells.

    Sphinx resolves the symbolic link, and its lexers do not know commands of several lines.
    """
    for node in doctree.findall(pending_xref):
        if Path(node["reftarget"]).parent == TUTORIALS:
            node["reftarget"] = f"tutorials/{Path(node['reftarget']).name}"
    if app.env.docname.startswith("tutorials/"):
        for block in doctree.findall(nodes.literal_block):
            block["force"] = True


def resolve_public_names(_app: Sphinx, doctree: nodes.document) -> None:
    """Let references to functions and classes lead to their public names."""
    for node in doctree.findall(pending_xref):
        node["reftarget"] = PUBLIC_NAMES.get(node["reftarget"], node["reftarget"])


def adapt_docstring(_app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Write indented code, `code` and asterisks of a docstring as reStructuredText has them."""
    found: list[str] = []
    for line in lines:
        if line.startswith("    ") and found[-1:] == [""] and not any(SECTION.fullmatch(each) for each in found):
            found += ["::", ""]
        parts = line.split("`")  # the odd ones are code
        parts[::2] = [part.replace("*", r"\*") for part in parts[::2]]
        found += ["Example::", ""] if line == "Example:" else ["``".join(parts)]
    lines[:] = found


def use_dashes(_app: Sphinx, doctree: nodes.document) -> None:
    """Put a dash between a parameter or an error and its text: without `smartquotes` Sphinx puts two hyphens."""
    for text in list(doctree.findall(lambda node: isinstance(node, nodes.Text) and node == " -- ")):
        text.parent.replace(text, nodes.Text(" – "))


def omit(_app: Sphinx, _context: click.Context, lines: list[str]) -> None:
    """Omit the list of arguments, which has no texts, and the epilog, which has the examples."""
    lines.clear()


def add_examples(_app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Show the examples of a verb as code below its usage, not at its end."""
    examples = getattr(context.command, "examples", ())
    if examples:
        lines += [".. rubric:: Examples", "", ".. code-block:: bash", "", *(f"   {each}" for each in examples), ""]


def group_options(_app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Put the options under the headings of `--help`; those without a group come first, below "Options".

    A verb that starts a job refers to the page of all options of a job.
    """
    shared = options_of(BatchSpec) if isinstance(context.command, JobVerb) else {}
    entries = "\n".join(lines).split(OPTION)[1:]
    shown = [each for each in context.command.params if isinstance(each, click.Option) and not each.hidden]
    groups: dict[str, list[str]] = {group: [] for group in get_args(Group)}
    for option, entry in zip(shown, entries, strict=True):
        if option.name not in shared:
            groups[getattr(option, "group", "Options")].append(OPTION + entry)
    lines[:] = [":doc:`The options of a job <options>`.", ""] if shared else []
    lines += "".join(groups.pop("Options")).split("\n")
    for group, found in groups.items():
        if found:
            lines += ["", f".. rubric:: {group}", "", *"".join(found).split("\n")]


def mark_up_texts(_app: Sphinx, _context: click.Context, lines: list[str]) -> None:
    """Write options in texts of the command line as code, and asterisks as reStructuredText has them."""
    for number, line in enumerate(lines):
        if not line.startswith(OPTION):
            text = line.replace("*", r"\*").replace(r"\*\*Required\*\*", "**Required**")  # as sphinx-click has it
            lines[number] = OPTION_NAME.sub(r"``\g<0>``", text)


def fill_in_page(_app: Sphinx, _docname: str, source: list[str]) -> None:
    """Insert what is made from the code."""
    source[0] = fill_in(source[0])


def write_index_for_language_models(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt, the index of the site in the format of https://llmstxt.org: pages and their first paragraphs."""
    if error is not None or app.builder.name != "html":
        return
    home = app.env.get_doctree("index")
    lines = [f"# {project}", "", f"> {first_paragraph(home)}"]
    for tree in home.findall(toctree):
        lines += ["", f"## {tree['caption']}", ""]
        for _, page in tree["entries"]:
            text = first_paragraph(app.env.get_doctree(page))
            lines.append(f"- [{app.env.titles[page].astext()}]({page}.html): {text}")
    Path(app.outdir, "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def first_paragraph(page: nodes.document) -> str:
    """Return the first paragraph of a page as one line."""
    return " ".join(next(page.findall(nodes.paragraph)).astext().split())


def setup(app: Sphinx) -> None:
    """Add what the extensions lack."""
    app.connect("autodoc-process-docstring", adapt_docstring, priority=400)  # before napoleon
    for part in ("description", "options"):
        app.connect(f"sphinx-click-process-{part}", mark_up_texts)
    app.connect("sphinx-click-process-options", group_options)
    app.connect("sphinx-click-process-usage", add_examples)
    for part in ("arguments", "epilog"):
        app.connect(f"sphinx-click-process-{part}", omit)
    app.connect("build-finished", write_index_for_language_models)
    app.connect("source-read", fill_in_page)
    app.connect("doctree-read", adapt_tutorials)
    app.connect("doctree-read", use_dashes)
    app.connect("doctree-read", resolve_public_names)
    app.add_lexer("python", type(get_lexer_by_name("ipython3")))  # knows the notebooks' %magic and !commands
