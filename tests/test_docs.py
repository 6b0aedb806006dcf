"""What the documents say is there: options, commands, points, events, files, tests, messages. Nothing else is cited."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from leto_strategy.cli.main import build_parser
from leto_strategy.config import LetoConfig
from leto_strategy.events import EVENTS
from leto_strategy.faults import FAULTS, POINTS

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "leto_strategy"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
README, OPERATING, PROTOCOL = ROOT / "README.md", ROOT / "docs" / "operating.md", ROOT / "docs" / "recovery-protocol.md"

CODE = ("src/leto_strategy", "src/hydra_plugins", "triton_kernels", "conf", "tests", "examples", "benchmarks")


def table_of(path: Path, header: str) -> dict[str, str]:
    """First column, without backticks, and the rest of each row of the table whose header row starts like this."""
    lines = iter(path.read_text().splitlines())
    assert any(line.startswith(header) for line in lines), f"{path.name} has no table {header!r}"
    next(lines)
    rows = {}
    for line in lines:
        if not line.startswith("|"):
            break
        first, rest = line.removeprefix("|").removesuffix("|").split("|", 1)
        rows[first.strip()] = rest.strip()
    return rows


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def code_in(text: str) -> Iterator[str]:
    """Inline code and lines of code blocks."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def python_files() -> list[Path]:
    return sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))


# README


def test_the_readme_lists_every_option_with_its_default() -> None:
    rows = table_of(README, "| option | default |")
    defaults = {f"`{field.name}`": repr(field.default).replace("'", '"') for field in fields(LetoConfig)}
    defaults["`faults`"] = "()"  # made by a factory
    assert list(rows) == list(defaults)
    for name, default in defaults.items():
        assert rows[name].startswith(f"`{default}` |"), name


@pytest.mark.parametrize("name", NAMES)
def test_snippets_compile(name: str) -> None:
    for snippet in fenced((ROOT / name).read_text(), "python"):
        compile(snippet, name, "exec")


def test_keywords_of_the_strategy_in_documents_are_options() -> None:
    used = {
        keyword
        for path in DOCUMENTS
        for code in code_in(path.read_text())
        for arguments in re.findall(r"LetoStrategy\((.*)\)", code)
        for keyword in re.findall(r"\b(\w+)=", arguments)
    }
    assert used <= set(LetoConfig.option_names()), used


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_to_fill_in(name: str) -> None:
    assert not re.search(r"@@|TODO|TBD|FIXME", (ROOT / name).read_text())


# Commands, points, events


@pytest.mark.parametrize("name", NAMES)
def test_every_command_and_its_options_exist(name: str) -> None:
    (commands,) = (action.choices for action in build_parser()._actions if isinstance(action.choices, dict))
    for code in code_in((ROOT / name).read_text()):
        # A line of output begins like a command, too: "leto recovered from ...".
        found = re.match(r"(?:\$ )?leto ([a-z]+)((?: +-.*)?$|(?= +#))", code.strip())
        if not found:
            continue
        assert found[1] in commands, f"{name}: {code}"
        known = {option for action in commands[found[1]]._actions for option in action.option_strings}
        if found[1] == "train":  # a Hydra application
            known |= {"--help", "--config-dir", "--config-name", "--multirun"}
        used = set(re.findall(r"(?<=\s)--[a-z-]+", found[2] or ""))
        assert used <= known, f"{name}: {code}"


def test_operating_lists_every_option_of_inject() -> None:
    (commands,) = (action.choices for action in build_parser()._actions if isinstance(action.choices, dict))
    known = {option for action in commands["inject"]._actions for option in action.option_strings}
    listed = {row.strip("`").split()[0] for row in table_of(OPERATING, "| option | meaning |")}
    assert listed == known - {"-h", "--help"}


def test_operating_lists_every_point_with_its_meaning() -> None:
    rows = table_of(OPERATING, "| point | what has happened |")
    assert rows == {f"`{point}`": meaning for point, meaning in POINTS.items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_point_and_fault_that_is_named_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    assert set(re.findall(r"--point (\w+)", text)) - {"P"} <= set(POINTS)
    assert set(re.findall(r'"point": "(\w+)"', text)) <= set(POINTS)
    assert set(re.findall(r"--fault ([a-z-]+)", text)) <= set(FAULTS)


def test_operating_lists_every_event() -> None:
    rows = table_of(OPERATING, "| event | tells |")
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(EVENTS)


# Files, links, tests


@pytest.mark.parametrize("name", NAMES)
def test_relative_links_resolve(name: str) -> None:
    path = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith(("http://", "https://", "#")):
            assert (path.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    users = {"train.py", "stub.py", "mynet.py", "own/model/mine.yaml", "config.yaml"}
    for code in code_in((ROOT / name).read_text()):
        for file in re.findall(r"^[\w./-]+\.(?:py|yaml|toml|md|txt)$", code):
            there = any((folder / file).exists() for folder in (ROOT, SOURCE, ROOT / "docs"))
            assert there or file in users, f"{name}: {file}"


@cache
def names_of_tests() -> frozenset[str]:
    return frozenset(
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE)
    )


@pytest.mark.parametrize("name", NAMES)
def test_tests_that_are_named_exist(name: str) -> None:
    for code in code_in((ROOT / name).read_text()):
        for test, open_end in re.findall(r"^(test_\w+)(…?)$", code):
            there = any(known.startswith(test) for known in names_of_tests()) if open_end else test in names_of_tests()
            assert there, f"{name}: {test}"


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for path in DOCUMENTS:
        for code in code_in(path.read_text()):
            found = re.match(r"(?:\$ )?make ([a-z]+)\b", code)
            assert not found or found[1] in targets, f"{path.name}: {code}"


# Messages


@cache
def texts_of_source() -> str:
    """All string literals, one a line, with `…` for what is put in when they are used."""
    lines = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                lines.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value)
    return "\n".join(lines)


@pytest.mark.parametrize("header", ["| message begins with |", "| message | what it means", "| reason | what to do |"])
def test_messages_that_are_explained_are_those_of_the_source(header: str) -> None:
    rows = table_of(OPERATING, header)
    assert rows
    for row in rows:
        message = re.findall(r"`([^`]+)`", row)[0]
        for fragment in filter(None, (part.strip() for part in message.split("…"))):
            assert fragment in texts_of_source(), f"{fragment!r} of {row}"


# What the source cites


def test_the_source_cites_no_document_that_is_not_here() -> None:
    cited = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in python_files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\b(DESIGN|PROTOCOL)\b", line)
    ]
    assert not cited, "\n".join(cited)


def test_every_rule_that_is_cited_is_explained() -> None:
    explained = re.findall(r"^\*\*((?:[RT]\d+(?:, | to )?)+)", PROTOCOL.read_text(), flags=re.MULTILINE)
    rules = set()
    for heading in explained:
        numbers = re.findall(r"([RT])(\d+)", heading)
        if " to " in heading:
            (kind, first), (_, last) = numbers
            rules |= {f"{kind}{number}" for number in range(int(first), int(last) + 1)}
        else:
            rules |= {f"{kind}{number}" for kind, number in numbers}
    assert rules == {f"R{n}" for n in range(1, 18)} | {f"T{n}" for n in range(1, 10)}
    documents = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
    for path in [*python_files(), *documents]:
        cited = set(re.findall(r"(?<![\w-])(R\d{1,2}|T\d)(?=[\s,.;:)–*\]|-]|$)", path.read_text()))
        assert cited <= rules, f"{path.relative_to(ROOT)}: {cited - rules}"
