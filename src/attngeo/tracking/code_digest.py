"""Digest of the code that a result depends on, so that an edit reruns what uses it and nothing else.

A digest covers the import closure of a module as canonical syntax trees (comments, docstrings, layout and the Python
version do not count), the sources of the compiled operators found in that closure, given values (a run's row, its
recipe) and the locked versions that matter. The attention registry names its classes by string, so a closure ends
there and the kinds that a run really uses are added by the caller.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from attngeo.errors import UserError
from attngeo.files import write_aside

# Modules that move data, names and messages but compute no number.
NOT_COMPUTATION = tuple(
    f"attngeo{name}"
    for name in (
        "",
        ".cli",
        ".config",
        ".data.download",
        ".doctor",
        ".errors",
        ".files",
        ".gpu_lease",
        ".jobs.extension",
        ".jobs.stamps",
        ".paper.records",
        ".training.display",
    )
)
NOT_COMPUTATION_PACKAGES = ("attngeo.cli.", "attngeo.config.", "attngeo.tracking.")

# Compiled sources that serve several operators, by how their file names begin; others begin with their operator's name.
_SERVES = {"pairwise": ("laplacian_kernel", "gaussian_kernel"), "inverse": ("newton_schulz",)}

_C_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


class _Import(NamedTuple):
    module: str
    name: str | None  # None for `import module`


class _Source(NamedTuple):
    digest: str
    imports: tuple[_Import, ...]
    rebound: dict[str, _Import]  # name -> where a package takes it from, for `from package import name`


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def _canonical(node: Any) -> str:
    """Write a syntax tree down without positions and without fields that only some Python versions have."""
    if isinstance(node, list):
        return "[" + ",".join(map(_canonical, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = [type(node).__name__]
    for field, value in sorted(ast.iter_fields(node)):
        if value is None or value == [] or field in ("ctx", "type_comment", "kind", "type_ignores"):
            continue
        if field == "body" and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            value = _without_docstring(value)
        parts.append(f"{field}={_canonical(value)}")
    return "(" + " ".join(parts) + ")"


def _imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[_Import, str]]:
    """Each import of a module of this project, with the local name that it binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "attngeo":
                    yield _Import(alias.name, None), alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, base] if base else parts)
            if base.split(".")[0] == "attngeo":
                for alias in node.names:
                    yield _Import(base, alias.name), alias.asname or alias.name


class CodeDigest:
    """Digests of modules of one source tree, as it is when each file is first read: a parse makes a new one.

    Parsed files are remembered by content in `cache_file`.
    """

    def __init__(self, root: Path, cache_file: Path | None = None) -> None:
        self.root = root
        self.source_root = root / "src"
        self._cache_file = cache_file
        self._cache: dict[str, Any] = {}
        self._cache_grew = False
        self._sources: dict[Path, _Source] = {}
        self._module_files: dict[str, Path | None] = {}
        self._resolved: dict[_Import, tuple[str, ...]] = {}
        self._closures: dict[tuple[str, ...], dict[str, Path]] = {}
        self._extensions: dict[frozenset[str], dict[str, str]] = {}
        self._locked: dict[str, str] | None = None
        if cache_file is not None:
            try:
                self._cache = json.loads(cache_file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                self._cache = {}  # only a cache: what is missing or damaged is computed anew

    def save_cache(self) -> None:
        """Keep what was parsed for the next parse; a folder that cannot be written costs only time."""
        if self._cache_file is None or not self._cache_grew:
            return
        with suppress(OSError, UserError), write_aside(self._cache_file) as stream:
            stream.write(json.dumps(self._cache))

    def module_file(self, module: str) -> Path | None:
        """The file of a module of this project, None if there is no such module."""
        if module not in self._module_files:
            base = self.source_root.joinpath(*module.split("."))
            places = (base.with_suffix(".py"), base / "__init__.py")
            self._module_files[module] = next((file for file in places if file.is_file()), None)
        return self._module_files[module]

    def _source(self, file: Path, module: str) -> _Source:
        known = self._sources.get(file)
        if known is not None:
            return known
        text = file.read_text(encoding="utf-8")
        key = _sha256(f"{module}\n{text}")
        entry = self._cache.get(key)
        if entry is None:
            try:
                tree = ast.parse(text)
            except SyntaxError as error:
                raise SyntaxError(f"{file}: {error.msg} (line {error.lineno})") from error
            found = list(_imports(tree, module, file.name == "__init__.py"))
            entry = {
                "digest": _sha256(_canonical(tree)),
                "imports": sorted({(item.module, item.name or "") for item, _ in found}),
                "rebound": {local: [item.module, item.name] for item, local in found if item.name},
            }
            self._cache[key] = entry
            self._cache_grew = True
        source = _Source(
            entry["digest"],
            tuple(_Import(module, name or None) for module, name in entry["imports"]),
            {local: _Import(module, name) for local, (module, name) in entry["rebound"].items()},
        )
        self._sources[file] = source
        return source

    def _resolve(self, wanted: _Import) -> Iterator[str]:
        """The modules that an import really takes something from; re-exports are followed to their origin."""
        file = self.module_file(wanted.module)
        if file is None:
            return
        if wanted.name is None or file.name != "__init__.py":
            yield wanted.module
            return
        rebound = self._source(file, wanted.module).rebound.get(wanted.name)
        submodule = f"{wanted.module}.{wanted.name}"
        if rebound is not None and rebound != wanted:
            yield from self._resolve(rebound)
        elif self.module_file(submodule) is not None:
            yield submodule
        else:
            yield wanted.module

    def closure(self, modules: Iterable[str]) -> dict[str, Path]:
        """Every module of this project that the given ones import, at any depth, with its file.

        Raises ValueError for a module that does not exist, so that a renamed module is noticed at once.
        """
        waiting = list(modules)
        asked = tuple(waiting)
        if asked in self._closures:
            return self._closures[asked]
        for module in waiting:
            if self.module_file(module) is None:
                raise ValueError(f"no module {module} under {self.source_root}")
        found: dict[str, Path] = {}
        while waiting:
            module = waiting.pop()
            if module in found or module in NOT_COMPUTATION or module.startswith(NOT_COMPUTATION_PACKAGES):
                continue
            file = self.module_file(module)
            if file is None:
                continue
            found[module] = file
            for wanted in self._source(file, module).imports:
                if wanted not in self._resolved:
                    self._resolved[wanted] = tuple(self._resolve(wanted))
                waiting.extend(self._resolved[wanted])
        self._closures[asked] = found
        return found

    def closure_of_file(self, file: Path) -> tuple[list[Path], list[str]]:
        """The files that a file outside the package brings in from its own folder, itself first, and the modules of
        this project that they import.
        """
        files, modules, waiting = [], [], [file]
        while waiting:
            current = waiting.pop()
            if current in files:
                continue
            files.append(current)
            modules += [m for wanted in self._source(current, current.stem).imports for m in self._resolve(wanted)]
            for node in ast.walk(ast.parse(current.read_text(encoding="utf-8"))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                siblings = (current.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names)
                waiting += [sibling for sibling in siblings if sibling.is_file()]
        return files, modules

    def _extension_sources(self, operators: set[str]) -> dict[str, str]:
        """Digests of the compiled sources behind the named operators; comments and layout do not count."""
        if not operators:
            return {}
        known = self._extensions.get(frozenset(operators))
        if known is not None:
            return known
        extension = self.root / "cuda_ext"
        every = [f for f in sorted(extension.glob("csrc/**/*")) if f.suffix in (".cpp", ".cu", ".cuh", ".h", ".hpp")]
        every = [f for f in every if "emulator" not in f.parts]
        folders = [d.name for d in (self.root / "src/attngeo/ops").iterdir() if d.is_dir()]
        serves = {**{name: (name,) for name in folders}, **_SERVES}
        digests = {}
        for file in every:
            served = next((names for start, names in serves.items() if file.stem.startswith(start)), None)
            if served is None or operators.intersection(served):  # a file that serves no operator by name serves all
                digests[str(file.relative_to(self.root))] = _sha256(strip_c_comments(file.read_text(encoding="utf-8")))
        for file in (extension / "setup.py", *sorted((extension / "attngeo_ext").glob("*.py"))):
            if file.is_file():
                digests[str(file.relative_to(self.root))] = self._source(file, file.stem).digest
        self._extensions[frozenset(operators)] = digests
        return digests

    def explain(
        self,
        modules: Iterable[str],
        *,
        values: Mapping[str, Any] | None = None,
        files: Iterable[Path] = (),
        packages: Iterable[str] = (),
    ) -> dict[str, Any]:
        """All parts of a digest, and the digest itself under "digest".

        `values` are plain data the result depends on, `files` other files (Python ones by syntax tree, others by
        bytes), `packages` the names whose locked versions count. Raises SyntaxError naming the file.
        """
        closure = self.closure(modules)
        operators = {m.split(".")[2] for m in closure if m.startswith("attngeo.ops.") and m.endswith(".compiled")}
        parts: dict[str, Any] = {
            "modules": {m: self._source(f, m).digest[:16] for m, f in sorted(closure.items())},
            "extension": {name: digest[:16] for name, digest in self._extension_sources(operators).items()},
            "files": {},
            "values": dict(values or {}),
            "versions": {name: self.locked_versions().get(name, "unlocked") for name in sorted(packages)},
        }
        for file in files:
            content = (
                self._source(file, file.stem).digest
                if file.suffix == ".py"
                else hashlib.sha256(file.read_bytes()).hexdigest()
            )
            parts["files"][str(file.relative_to(self.root) if file.is_relative_to(self.root) else file)] = content[:16]
        return _with_digest(parts)

    def explain_extension(self) -> dict[str, Any]:
        """The digest of everything that is compiled, with its parts."""
        operators = {folder.name for folder in (self.root / "src/attngeo/ops").iterdir() if folder.is_dir()}
        versions = {"torch": self.locked_versions().get("torch", "unlocked")}
        return _with_digest({"extension": self._extension_sources(operators), "versions": versions})

    def extension_digest(self) -> str:
        """One digest of everything that is compiled, whatever it is compiled for."""
        return _sha256(json.dumps(self.explain_extension()["extension"], sort_keys=True))[:20]

    def locked_versions(self) -> dict[str, str]:
        """Versions pinned in the requirements*.lock files, by lower-case name."""
        if self._locked is not None:
            return self._locked
        versions: dict[str, str] = {}
        for lock in sorted(self.root.glob("requirements*.lock")):
            for line in lock.read_text(encoding="utf-8").splitlines():
                name, equals, version = line.split("#")[0].strip().partition("==")
                if equals:
                    versions[name.strip().lower()] = version.split(";")[0].strip()
        self._locked = versions
        return versions


def _with_digest(parts: dict[str, Any]) -> dict[str, Any]:
    return {"digest": _sha256(json.dumps(parts, sort_keys=True))[:20], **parts}


def strip_c_comments(text: str) -> str:
    """C++ or CUDA source without comments and with white space folded, strings kept as they are."""
    kept = _C_COMMENT_OR_STRING.sub(lambda m: " " if m.group().startswith("/") else m.group(), text)
    return "\n".join(" ".join(line.split()) for line in kept.splitlines() if line.strip())


def write_stamp(path: Path, content: Mapping[str, Any]) -> None:
    """Write a digest stamp only if its digest changed, so that its modification time tells when the code did."""
    try:
        if json.loads(path.read_text(encoding="utf-8"))["digest"] == content["digest"]:
            return
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or damaged: written anew below
    with write_aside(path) as stream:
        stream.write(json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def read_stamp(path: Path) -> dict[str, Any]:
    """The content of a stamp file; its digest is under "digest"."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
