"""The tables of the reference that are made from the code: a page has `<!-- generated: NAME -->` in their place."""

from __future__ import annotations

import ast
import dataclasses
import functools
import html
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from docutils.nodes import make_id

import tf4slurm
import tf4slurm.tensorflow
from tf4slurm import errors, shutdown
from tf4slurm.cli.main import _VERBS as VERBS
from tf4slurm.control.messages import CheckpointState
from tf4slurm.control.records import EVENT_KINDS
from tf4slurm.control.shard_leases import ShardProgress
from tf4slurm.doctor.pythons import FAILS, WORKS, read_tensorflow_tests
from tf4slurm.doctor.scheduler import SubjectTests, read_tests
from tf4slurm.jobs.known_errors import explain
from tf4slurm.jobs.schema import FILE_NAMES, SCHEMA_VERSION, Event, Process, TaskStatus
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.job_spec import JobSpec
from tf4slurm.spec.options import Group, Option, options_of

ROOT = Path(__file__).parent.parent
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef)

PUBLIC_NAMES: Mapping[str, str] = {
    **{f"{module}.{name}": f"tf4slurm.tensorflow.{name}" for name, module in tf4slurm.tensorflow._MODULE_OF.items()},
    **{f"{module}.{name}": f"tf4slurm.{name}" for name, module in tf4slurm._MODULE_OF.items()},
    **{f"tf4slurm.shutdown.{name}": f"tf4slurm.shutdown.{name}" for name in shutdown.__all__},
}
"""The public name of each function and class, by its name in the module that defines it."""

ERRORS = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


def make_options() -> str:
    """Return the entries of all options of a job, in the groups of the help texts."""
    own, groups = options_of(JobSpec), get_args(Group)
    entries: dict[str, list[str]] = {group: [f"## {group}"] for group in groups}
    for name, each in options_of(BatchSpec).items():
        verbs = each.verbs or (("run", "task", "submit", "script") if name in own else ("submit", "script"))
        entries[each.group].append(_option(each, verbs))
    return "\n\n".join(entry for group in entries.values() if len(group) > 1 for entry in group)


def _option(option: Option, verbs: tuple[str, ...]) -> str:
    names = [*option.flags, f"--{option.key}", *([f"--no-{option.key}"] if option.is_switch else [])]
    value = "" if option.is_switch else f" {option.metavar}"
    variables = [f"`{variable_of(key)}`{{#{variable_of(key)}}}" for key in option.keys]
    places = [*(f"`{verb}`" for verb in verbs), *variables, f"`Job({option.name}=…)`"]
    return "\n".join(
        [f"```{{option}} {', '.join(names)}{value}", _mark_options(option.help), "", " · ".join(places), "```"]
    )


def _mark_options(text: str) -> str:
    text = re.sub(r"(?<![\w`-])--[a-z][\w-]*", r"`\g<0>`", text.replace("<", "&lt;").replace("*", r"\*"))
    return re.sub(r"\[default: (.*)\]$", r"Default: \1.", text)


def variable_of(key: str) -> str:
    """Return the environment variable that sets an option."""
    return "TF4SLURM_" + key.upper().replace("-", "_")


def make_files() -> str:
    """Return one table for each file of a run directory, or part of a file."""
    kinds = [(f"`{name}`", kind) for kind, name in FILE_NAMES.items()]
    kinds += [(f"Part: {kind.__name__}", kind) for kind in (Process, TaskStatus, CheckpointState, ShardProgress)]
    return "\n\n".join(_file(title, kind) + (_events() if kind is Event else "") for title, kind in kinds)


def _file(title: str, kind: type[Any]) -> str:
    head, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:")
    names = [field.name for field in dataclasses.fields(kind)]
    found = re.findall(r"^ {4}(\w+(?:, \w+)*): (.+(?:\n {8,}.+)*)", attributes, re.MULTILINE)
    texts = {name: " ".join(text.split()) for key, text in found for name in key.split(", ")}
    if sorted(texts) != sorted(names):
        raise ValueError(f"The docstring of {kind.__name__} describes other fields than {names}.")
    hints = get_type_hints(kind)
    rows = [f"| `{name}`{{#{kind.__name__}-{name}}} | {_type(hints[name])} | {texts[name]} |" for name in names]
    table = ["| key | type | meaning |", "|---|---|---|", *rows]
    text = re.sub(r"\S+<\S+>[\w.]*\w", r"`\g<0>`", " ".join(head.split()))
    return "\n".join([f"## {title}", "", text, "", *table])


def _events() -> str:
    rows = [
        f"| `{name}`{{#kind-{name}}} | {kind.meaning} | {'yes' if kind.is_on_terminal else ''} |"
        for name, kind in EVENT_KINDS.items()
    ]
    return "\n".join(["\n", "| kind | meaning | printed by `tf4slurm run` |", "|---|---|---|", *rows])


def _type(hint: Any) -> str:
    text = str(hint) if hasattr(hint, "__args__") else hint.__name__
    text = re.sub(r"[a-z]\w*\.(?:\w+\.)*", "", text).replace(", ...]", "]").replace("| None", "or null")
    return text.replace("tuple[", "list[").replace("Mapping[", "object[")


def make_errors() -> str:
    """Return the entry of each error, with its attributes, its exit code, and the functions that raise it."""
    return "\n\n".join(_error(name, kind) for name, kind in ERRORS.items())


def _error(name: str, kind: type[errors.Tf4SlurmError]) -> str:
    bases = ", ".join(
        f"{{py:exc}}`~tf4slurm.errors.{base.__name__}`" if base.__name__ in ERRORS else f"`{base.__name__}`"
        for base in kind.__bases__
    )
    facts = [f"`{fact}` ({hint})" for fact, hint in inspect.get_annotations(kind).items()]
    raisers = [f"{{py:obj}}`{raiser}`" for raiser in raisers_of(name)]
    lines = [
        f"```{{py:exception}} {name}",
        " ".join(inspect.cleandoc(kind.__doc__ or "").split()),
        "",
        *([f"* Attributes: {', '.join(facts)}"] if facts else []),
        *([f"* Raised by {', '.join(raisers)}"] if raisers else []),
        f"* Exit code of the command line: {kind.exit_code}",
        f"* Base: {bases}",
        "```",
    ]
    return "\n".join(lines)


def raisers_of(error: str) -> list[str]:
    """Return the public functions, methods and classes whose docstrings list the error under Raises."""
    return sorted({name for name, text in _docstrings() if re.search(rf"\b{error}\b", text.partition("Raises")[2])})


@functools.cache
def _docstrings() -> list[tuple[str, str]]:
    """Return the public name and the docstring of each public function, method and constructor."""
    found = []
    for name, public in PUBLIC_NAMES.items():
        module, _, own = name.rpartition(".")
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
        (node,) = (each for each in tree.body if isinstance(each, _DEFINITIONS) and each.name == own)
        members = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        for each in [node] if isinstance(node, ast.FunctionDef) else members:
            path = public if each is node or each.name.startswith("_") else f"{public}.{each.name}"
            found.append((path, ast.get_docstring(each) or ""))
    return found


def make_verbs() -> str:
    """Return a section for each verb of the command line, in the order of `tf4slurm --help`."""
    sections = [
        f".. click:: tf4slurm.cli.{place[0].replace('.', ':')}\n   :prog: tf4slurm {verb}\n   :nested: full"
        for verb, place in VERBS.items()
    ]
    return "\n\n".join(["```{eval-rst}", *sections, "```"])


def make_slurm_tests() -> str:
    """Return the table of the tests that ran on each version of Slurm."""
    by_version = read_tests()
    rows = ["", *(f"Slurm {version}" for version in by_version)], ["---"] * (len(by_version) + 1)
    table = [f"| {' | '.join(cells)} |" for cells in rows]
    for subject in sorted({subject for subjects in by_version.values() for subject in subjects}):
        cells = [_count_tests(subjects.get(subject)) for subjects in by_version.values()]
        table.append(f"| {subject} | {' | '.join(cells)} |")
    return "\n".join(table)


def _count_tests(tests: SubjectTests | None) -> str:
    if tests is None:
        return "not run"
    counts = {"passed": tests["passed"], "failed": tests["failed"], "skipped": tests["skipped"]}
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)


def make_tensorflow_tests() -> str:
    """Return the table of the jobs with each version of TensorFlow, and the errors of those that are refused."""
    by_version = read_tensorflow_tests()
    pythons = [".".join(each["python"].split(".")[:2]) for each in by_version.values()]
    rows = [["TensorFlow", *by_version], ["---"] * (len(pythons) + 1), ["Python", *pythons]]
    errors: list[str] = []
    for job in dict.fromkeys(job for each in by_version.values() for job in each["jobs"]):
        cells = [{WORKS: "yes"}.get(each["jobs"][job], each["jobs"][job]) for each in by_version.values()]
        for number, cell in enumerate(cells):
            if cell not in ("yes", FAILS):
                errors += [cell] if cell not in errors else []
                cells[number] = f"no ({errors.index(cell) + 1})"
        rows.append([job, *cells])
    table = [f"| {' | '.join(cells)} |" for cells in rows]
    causes = [
        " ".join([f"{number}. `{error.rstrip('.')}`.", *explain([error])]) for number, error in enumerate(errors, 1)
    ]
    return "\n".join([*table, "", *causes])


def make_search() -> str:
    """Return the search field of the troubleshooting page; _static/symptoms.js fills its list."""
    return """<div id="symptom-search">
<input type="search" placeholder="Words of the message" aria-label="Words of the message">
<ul></ul>
<p hidden>No entry has these words: <a href="search.html">search the whole site</a>.</p>
</div>"""


def make_symptoms() -> str:
    """Return links to all entries of troubleshooting/, in the order of the pages, with their texts for the search."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sections = map(_symptoms_of, re.findall(r"^troubleshooting/\w+$", page, re.MULTILINE))
    return "\n\n".join([*sections, '<script src="_static/symptoms.js"></script>'])


def _symptoms_of(page: str) -> str:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    title, *entries = re.split(r"^##? (?=\S)", text, flags=re.MULTILINE)[1:]
    items = []
    for entry in entries:
        heading, _, remedy = entry.partition("\n")
        message = heading.strip("` ")
        tag = "code" if heading.startswith("`") else "span"
        link = f'<a href="{page}.html#{make_id(message)}"><{tag}>{html.escape(message)}</{tag}></a>'
        items.append(f'<li data-text="{html.escape(" ".join(remedy.split()))}">{link}</li>')
    return "\n".join([f"## [{title.splitlines()[0]}]({page}.md)", "", '<ul class="symptoms">', *items, "</ul>"])


GENERATORS = {
    "search": make_search,
    "symptoms": make_symptoms,
    "verbs": make_verbs,
    "options": make_options,
    "files": make_files,
    "version": lambda: str(SCHEMA_VERSION),
    "errors": make_errors,
    "slurm_tests": make_slurm_tests,
    "tensorflow_tests": make_tensorflow_tests,
}


def fill_in(text: str) -> str:
    """Replace each place of a table in a page."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda match: GENERATORS[match[1]](), text)
