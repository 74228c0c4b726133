"""The documentation site: it builds without warnings, its links lead somewhere, its reference is complete, and it needs
no network."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import tf4slurm
import tf4slurm.tensorflow
from tests.browser import Browser, browser
from tf4slurm import errors, shutdown
from tf4slurm.cli.main import _VERBS as VERBS
from tf4slurm.control.records import EVENT_KINDS
from tf4slurm.control.shard_leases import ShardProgress
from tf4slurm.jobs.schema import FILE_NAMES, Process, TaskStatus
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.options import options_of

pytest.importorskip("sphinx", reason="pip install tf4slurm[docs]")

__all__ = ["browser"]

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(600)  # the first test builds the site, which takes minutes on a busy machine
MARKDOWN = sorted(ROOT.glob("*.md"))
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("source", "src"), ("iframe", "src"), ("object", "data")}
"""The elements and attributes with which a page loads a file."""


@dataclass
class Page(HTMLParser):
    """The anchors of a page, the targets of its links, and the files that it loads."""

    path: Path
    anchors: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif tag == "a" and name == "href" and value:
                self.links.add(value)
            elif (tag, name) in LOADED and value:
                self.files.add(value)


@dataclass(frozen=True)
class Site:
    """The built site."""

    directory: Path
    pages: dict[Path, Page]

    def anchors_of(self, name: str) -> set[str]:
        return self.pages[self.directory / name].anchors


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site as `make docs` builds it, with each warning an error."""
    directory = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet", "-d", directory / "doctrees")
    done = subprocess.run([*command, ROOT / "docs", directory / "html"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path: Page(path) for path in sorted((directory / "html").rglob("*.html")) if "_static" not in path.parts}
    return Site(directory / "html", pages)


def broken_links(site: Site) -> Iterator[str]:
    for page in site.pages.values():
        for link in page.links:
            target = urlsplit(link)
            if target.scheme:
                continue
            path = (page.path.parent / unquote(target.path)).resolve() if target.path else page.path
            anchors = site.pages[path].anchors if path in site.pages else None
            if not path.is_file() or (target.fragment and anchors is not None and target.fragment not in anchors):
                yield f"{page.path.relative_to(site.directory)}: {link}"


def test_each_link_of_the_site_leads_to_a_page_and_an_anchor(site: Site) -> None:
    assert len(site.pages) > 30
    assert sum(len(page.links) for page in site.pages.values()) > 1_000
    assert sorted(broken_links(site)) == []


def test_each_page_loads_local_files_only(site: Site) -> None:
    for page in site.pages.values():
        assert page.files
        for file in page.files:
            target = urlsplit(file)
            is_inline = target.scheme == "data"
            path = page.path.parent / unquote(target.path) if target.path else page.path
            is_file = not target.scheme and not target.netloc and path.is_file()
            assert is_inline or is_file, f"{page.path}: {file}"


def test_style_sheets_load_local_files_only(site: Site) -> None:
    sheets = sorted(site.directory.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        for url in re.findall(r"""(?:url\(|@import\s)\s*['"]?([^'")\s]+)""", sheet.read_text(encoding="utf-8")):
            assert url.startswith(("data:", "#")) or (sheet.parent / url.partition("?")[0]).is_file(), f"{sheet}: {url}"


def test_index_for_language_models_names_each_page(site: Site) -> None:
    text = (site.directory / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"^- \[.+\]\((.+)\): \S", text, re.MULTILINE)
    assert re.match(r"# tf4slurm\n\n> .*TensorFlow", text)
    made_by_sphinx = {"index.html", "genindex.html", "py-modindex.html", "search.html"}
    names = {path.relative_to(site.directory).as_posix() for path in site.pages}
    below_another = {path for path in names if path.startswith(("sites/", "troubleshooting/"))} - {"sites/index.html"}
    assert sorted(links) == sorted(names - below_another - made_by_sphinx)


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading as GitHub and GitLab make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_each_link_of_a_file_in_the_root_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target = urlsplit(link)
        if target.scheme:
            continue
        path = page.parent / unquote(target.path) if target.path else page
        assert path.exists(), link
        if target.fragment:
            headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert target.fragment in map(anchor_of, headings), link


def test_each_public_name_has_an_entry(site: Site) -> None:
    names = {f"tf4slurm.{name}" for name in tf4slurm._MODULE_OF}
    names |= {f"tf4slurm.tensorflow.{name}" for name in set(tf4slurm.tensorflow._MODULE_OF) - set(tf4slurm._MODULE_OF)}
    names |= {f"tf4slurm.shutdown.{name}" for name in shutdown.__all__}
    names |= {f"tf4slurm.Job.{name}" for name in vars(tf4slurm.Job) if not name.startswith("_")}
    assert names <= site.anchors_of("reference/python.html")


def test_each_verb_and_its_options_have_entries(site: Site) -> None:
    anchors = site.anchors_of("reference/command-line.html")
    assert {f"tf4slurm-{verb}" for verb in VERBS} <= anchors
    assert {"cmdoption-tf4slurm-run-local", "cmdoption-tf4slurm-cancel-grace-period"} <= anchors
    assert "cmdoption-tf4slurm-run-ps" not in anchors  # "Options of a job" has it


def test_each_option_has_an_entry_and_a_variable(site: Site) -> None:
    keys = {key for option in options_of(BatchSpec).values() for key in option.keys}
    anchors = site.anchors_of("reference/options.html")
    assert {f"cmdoption-tf4slurm-{key}" for key in keys} <= anchors
    assert {f"tf4slurm-{key}" for key in keys} <= anchors


def constants() -> Iterator[str]:
    """Yield all texts in the source of the package, except docstrings."""
    for path in (ROOT / "tf4slurm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_each_variable_has_an_entry(site: Site) -> None:
    names = {text for text in constants() if re.fullmatch(r"TF4SLURM_[A-Z_]*[A-Z]", text)}
    assert {"TF4SLURM_LOG", "TF4SLURM_TRUST", "TF4SLURM_TASK"} <= names
    assert {f"envvar-{name}" for name in names} <= site.anchors_of("reference/environment.html")


def test_each_exit_code_has_an_entry(site: Site) -> None:
    codes = {code for name, code in vars(errors).items() if name.startswith("EXIT_")}
    codes |= {kind.exit_code for kind in error_classes()} | {0, 1, 128}
    assert {f"exit-{code}" for code in codes} <= site.anchors_of("reference/exit-codes.html")


def error_classes() -> list[type[errors.Tf4SlurmError]]:
    return [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.Tf4SlurmError)]


def test_each_error_has_an_entry(site: Site) -> None:
    names = {f"tf4slurm.errors.{kind.__name__}" for kind in error_classes()}
    assert len(names) > 20
    assert names <= site.anchors_of("reference/errors.html")


def test_each_json_field_and_kind_of_event_has_an_entry(site: Site) -> None:
    names = {
        f"{kind.__name__}-{name}"
        for kind in (*FILE_NAMES, Process, TaskStatus, ShardProgress)
        for name in fields_of(kind)
    }
    names |= {f"kind-{kind}" for kind in EVENT_KINDS}
    assert {name.lower().replace("_", "-") for name in names} <= site.anchors_of("reference/files.html")


def fields_of(kind: type) -> Iterable[str]:
    return inspect.get_annotations(kind)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("index.html", ("Get started", "tf4slurm runs TensorFlow parameter-server jobs")),
        ("guides/your-script.html", ("Your script",)),
        ("reference/options.html", ("--heartbeat-timeout", "Heartbeat timeout in seconds.")),
    ],
)
def test_page_opens_from_disk_without_a_network(
    site: Site, browser: Browser, name: str, texts: tuple[str, ...]
) -> None:
    words = browser.words((site.directory / name).as_uri())
    assert [text for text in texts if text not in words] == []


def test_search_works_from_disk_without_a_network(site: Site, browser: Browser) -> None:
    words = browser.words(f"{(site.directory / 'search.html').as_uri()}?q=grace+period")
    assert re.search(r"found \d+ pages? matching|finished, found", words), words
    assert "Options of a job" in words


SEARCHES = {
    "InterfaceError: Interface 'ib7' does not exist on node n003. Found: eth0, lo.": "cluster.html#interface-does-not",
    "worker/1 was killed by signal 9 (SIGKILL)": "task.html#was-killed-by-signal-9",
    "connection reset by peer": "cluster.html#failed-to-connect",
    "squeue": "slurm.html#the-job-has-ended",
    "diverged": "training.html#loss-is-nan",
    "did not arrive in time": "cluster.html#the-barrier-broke",
}
"""What is typed in the search field of the troubleshooting page -> a part of the first link that it shows."""

SEARCH_EACH_MESSAGE = """
const field = document.querySelector("#symptom-search input");
const search = (typed) => {
  field.value = typed;
  field.dispatchEvent(new Event("input"));
  return document.querySelector("#symptom-search li a")?.getAttribute("href");
};
const links = [...document.querySelectorAll("ul.symptoms a")].filter((link) => link.querySelector("code"));
"""


def test_search_for_a_message_shows_its_entry_first(site: Site, browser: Browser) -> None:
    with browser.open((site.directory / "troubleshooting.html").as_uri()) as page:
        page.evaluate(SEARCH_EACH_MESSAGE)
        assert page.evaluate("links.length") >= 100
        text = "link.textContent.replaceAll('…', 'n003')"
        assert page.evaluate(f"links.filter((link) => search({text}) !== link.getAttribute('href')).map(String)") == []
        found = {typed: page.evaluate(f"search({json.dumps(typed)})") for typed in SEARCHES}
        assert {typed: link for typed, link in found.items() if SEARCHES[typed] not in link} == {}
        assert page.evaluate("search('zebra')") is None
        assert page.errors == []
