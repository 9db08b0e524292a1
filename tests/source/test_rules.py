"""Rules for the sources that can be checked without running them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from bpsx.config import reference
from support.places import ROOT, SOURCE, files

PACKAGE = files("src")
#: A thread that is no ``NamedThread``, or a class of such threads.
_OTHER_THREADS = re.compile(r"\bThread\((?!\))|(?<!NamedThread)\(threading\.Thread\)")


def everything() -> list:
    return files("src", "tests", "bench", "examples")


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: p.name)
def test_only_config_reads_the_environment(path):
    if path != SOURCE / "config" / "config.py":
        assert not re.search(r"os\.environ|getenv|os import .*environ", path.read_text())


def test_threads_have_names_that_tools_show():
    made = [p.name for p in PACKAGE if _OTHER_THREADS.search(p.read_text())]
    assert not made, f"{made}: use bpsx.system.threads.NamedThread"


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: p.name)
def test_nothing_is_unpickled_or_evaluated(path):
    if path == SOURCE / "plugin" / "objects.py":
        # The one file that unpickles; it accepts only bytes that prove the job secret. See
        # tests/frameworks/test_torch_objects.py.
        return
    modules = r"\b(c?[pP]ickle|cloudpickle|marshal|shelve|dill|joblib|yaml)\b"
    assert not re.search(
        modules + r"|\beval\(|\bexec\(|torch\.(load|save)\(|allow_pickle", path.read_text()
    )


def statements(text: str):
    """Return (name, statements) of each function of a Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1


def functions(text: str):
    """Return (name, lines) of each function of a Cython file, by indentation."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        head = re.match(r"(\s*)(?:async\s+)?(?:def|cdef(?!\s+class)|cpdef)\b.*\(", line)
        if not head or line.rstrip().endswith((";", "nogil")) and not line.rstrip().endswith(":"):
            continue
        end = i + 1
        while end < len(lines) and (
            not lines[end].strip()
            or len(lines[end]) - len(lines[end].lstrip()) > len(head[1])
            or lines[end].lstrip().startswith(")")
        ):
            end += 1
        while not lines[end - 1].strip():
            end -= 1
        yield line.strip(), end - i


def others() -> list:
    """C, build files and scripts: no tool here checks their columns."""
    builds = [ROOT / "meson.build", ROOT / "Makefile", *(ROOT / ".ci").iterdir()]
    builds += [*SOURCE.rglob("meson.build"), *ROOT.glob("requirements*.txt")]
    return builds + files("tests", endings=(".c", ".h", ".sh"))


@pytest.mark.parametrize("path", others(), ids=lambda p: str(p.relative_to(ROOT)))
def test_lines_of_other_files_have_at_most_100_columns(path):
    assert not [line for line in path.read_text().splitlines() if len(line) > 100]


@pytest.mark.parametrize("path", everything(), ids=lambda p: p.name)
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 750
    if path.suffix != ".py":  # ruff checks these
        assert not [line for line in text.splitlines() if len(line) > 100]
    found, most = (statements(text), 55) if path.suffix == ".py" else (functions(text), 75)
    assert not [(name, n) for name, n in found if n > most]


def structs(text: str):
    """(comment above, name, fields) of each struct of a Cython file."""
    body = r"((?:    .*\n|\n(?=    )|#.*\n)+)"
    for found in re.finditer(
        r"((?:^#.*\n)*)^cdef (?:packed )?struct (\w+):.*\n" + body, text, re.M
    ):
        code = re.sub(r"\([^()]*\)", "", re.sub(r"#.*", "", found[3]))
        fields = [line for line in code.splitlines() if re.match(r" {4}\w", line)]
        yield found[1], found[2], sum(1 + line.count(",") for line in fields)


@pytest.mark.parametrize(
    "path", [p for p in PACKAGE if p.suffix in (".pxd", ".pyx")], ids=lambda p: p.name
)
def test_structs_have_few_fields_or_a_reason(path):
    large = [
        (name, n)
        for why, name, n in structs(path.read_text())
        if n > 20 and "than 20" not in " ".join(why.replace("#", "").split())
    ]
    assert not large


@pytest.mark.parametrize(
    "path", [p for p in PACKAGE if p.suffix == ".pxd"], ids=lambda p: str(p.relative_to(SOURCE))
)
def test_inline_functions_need_no_gil_unless_their_file_says_so(path):
    text = path.read_text()
    head = text[: text.index("import")] if "import" in text else text
    if "GIL" not in head.replace("without the GIL", ""):
        for name in re.findall(
            r"^cdef inline [^:]*?(\w+)\([^)]*\)(?! noexcept nogil:)", text, re.M
        ):
            raise AssertionError(
                f"{name} may touch Python; say in the file's first lines that it does"
            )


def test_nogil_code_compiles_without_hints(tmp_path):
    """One Cython for all files: importing it takes as long as a file."""
    paths = [str(path) for path in PACKAGE if path.suffix == ".pyx"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "cython",
            "-3",
            "-Wextra",
            "-I",
            str(ROOT / "src"),
            *paths,
            "-o",
            f"{tmp_path}/",  # files of the same name overwrite each other
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert paths and done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "performance hint" not in said and "warning" not in said, said


def test_the_header_equals_the_tests_definition():
    """The message header equals the tests' own definition, field by field.

    The scripted peers of the tests were written from the wire format.
    """
    from support.wire import Record

    text = (SOURCE / "core" / "wire.pxd").read_text()
    body = text[text.index("cdef packed struct Header") : text.index("cdef inline uint64_t padded")]
    found = re.findall(r"^ {4}(u?int\d+)_t (\w+)", body, re.M)
    assert sum(int(kind.removeprefix("u").removeprefix("int")) // 8 for kind, _ in found) == 64
    assert [name for _, name in found] == ["magic", "version", *Record._fields[:-1]]


def test_stage_and_status_codes_agree():
    from bpsx.errors import STATUS, Status
    from bpsx.planning.placement import PARTS_PER_TENSOR
    from bpsx.planning.stages import Stage

    stages = (SOURCE / "core" / "partition.pxd").read_text()
    block = stages[stages.index("cdef enum Stage:") : stages.index("cdef struct")]
    assert {n: int(v) for n, v in re.findall(r"^ {4}(\w+) = (\d+)", block, re.M)} == {
        s.name: s.value for s in Stage
    }
    machine = (SOURCE / "core" / "local" / "neighbour.pxd").read_text()
    assert 1 << int(re.search(r"PART_BITS = (\d+)", machine)[1]) == PARTS_PER_TENSOR
    status = (SOURCE / "core" / "status.pxd").read_text()
    codes = {n: int(v) for n, v in re.findall(r"^ {4}E_(\w+) = (-\d+)", status, re.M)}
    assert codes == {s.name: s.value for s in Status} and set(codes.values()) == set(STATUS)


def test_the_options_page_is_generated():
    assert (ROOT / "docs" / "reference" / "options.md").read_text() == reference(), (
        "run `make docs`"
    )


def required(name: str) -> set[str]:
    """Return the packages in a list of requirements."""
    lines = {line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()}
    return lines - {""}


def test_requirements_hold_the_packages_of_the_project():
    """Lists of requirements equal the project's dependencies.

    The demo's list has only what it needs.
    """
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    demo = {
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *extras["demo"],
    }
    assert required("requirements-demo.txt") == demo | {"ninja"}  # meson runs ninja
    assert required("requirements-dev.txt") == {"-r requirements-demo.txt", *extras["test"]}


def test_versions_agree():
    import bpsx

    for name in ("pyproject.toml", "meson.build"):
        assert re.search(
            rf"^\s*version\s*[=:]\s*['\"]{re.escape(bpsx.__version__)}['\"]",
            (ROOT / name).read_text(),
            re.M,
        ), name


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=["ruff", "format", "mypy"],
)
def test_lint(command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
