"""Compares what this package uses of Megatron with the tree that it was written for; nothing is imported.

That is: the targets of the patches, functions whose contract the package relies on without replacing them, the functions
and classes that it imports by name, and the flags and configuration fields of Megatron that it names.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import importlib.util
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megacpp_mcore
from megacpp_mcore.errors import CheckoutError, PatchError
from megacpp_mcore.patches import watched
from megacpp_mcore.patches.machinery import git
from megacpp_mcore.patches.machinery.checkout import HOOKED_FILE, Checkout
from megacpp_mcore.patches.machinery.record import Edit
from megacpp_mcore.patches.machinery.source_tree import Definition, SourceTree, nodes
from megacpp_mcore.patches.machinery.symbols import Refusal, digest
from megacpp_mcore.versions import CHECKOUT_TAG

VERDICTS = ("fits", "fingerprints to add", "code to review", "broken")
"""By exit status."""
# CHANGED: how is unknown, as no source with a known fingerprint is available.
EQUAL, COMMENTS, CODE, CHANGED, GONE = "equal", "comments only", "code", "changed", "gone"
_STATUS = {EQUAL: 0, COMMENTS: 1, CODE: 2, CHANGED: 2, GONE: 3}
_OPTIONAL = "=…"
"""Ends a parameter that came and need not be passed."""

_FLAG = re.compile(r"--[a-z][a-z0-9-]+(?=$|[ =])")
_QUOTED_FLAG = re.compile(r"""["'](--[a-z][a-z0-9-]+)["']""")
_CONFIGURATION = re.compile(r"^class \w*(Config|Args)\b", re.MULTILINE)
_HOLDER = re.compile(r"(^|_|\.)(config|cfg|args|arguments)$")


def examine(checkout: Checkout, since: str | None = None) -> dict[str, Any]:
    """Compare a checkout with the sources that this package was written for.

    Args:
        checkout: the tree to judge.
        since: the tag to compare with; by default that of ``versions`` and, where there is none, the installed megatron-core.

    Returns:
        A JSON-ready report; ``status`` is an index of :data:`VERDICTS`.

    Raises:
        CheckoutError: ``since`` is not in the checkout.
        PatchError: a file is not Python.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-mcore-compat-") as folder:
        history, notes = _history(checkout, since, Path(folder))
        bases = {history.tag: history.base} if history else {}
        with contextlib.suppress(CheckoutError, PatchError):
            # Not with itself, where it is the working directory, or installed as editable.
            if (installed := Checkout.installed()).root != checkout.root:
                bases[f"megatron-core {installed.version} in {installed.root}"] = installed.tree
        trees = list(bases.values())
        if not trees:
            notes.append("no tag and no installed megatron-core to compare with: only fingerprints were compared")
        contracts = tuple(Edit(name, sha256, lambda original: original) for name, sha256 in watched.SOURCES.items())
        records = {patch.name: (patch.edits, patch.upstream) for patch in checkout.registry.patches}
        patches: list[dict[str, Any]] = []
        for name, (edits, upstream) in {**records, "not patched": (contracts, ())}.items():
            targets = [_target(edit, checkout.tree, trees, history) for edit in edits]
            merged = {f"#{number}": history and history.merged(number) for number in upstream}
            verdict = VERDICTS[max(_STATUS[target["state"]] for target in targets)]
            patches.append({"name": name, "verdict": verdict, "targets": targets, "upstream_merged": merged})
        uses: dict[str, dict[str, set[str]]] = {"symbols": {}, "flags": {}, "fields": {}, "calls": {}}
        for kind, name, file in _uses():
            uses[kind].setdefault(name, set()).add(file)
        passed = {symbol: max(map(int, counts)) for symbol, counts in uses["calls"].items()}
        imported = _symbols(uses["symbols"], passed, trees[0], checkout.tree) if trees else []
        stock_names = _names(trees[0]) if trees else {"flags": set(), "fields": set()}
        named = {kind: uses[kind].keys() & names for kind, names in stock_names.items()}
        gone = {kind: sorted(named[kind] - names) for kind, names in _names(checkout.tree).items()}
    # A parameter that need not be passed changes no call of ours.
    affected = [row for row in imported if row["state"] == GONE or any(_OPTIONAL not in it for it in row["parameters"])]
    states = [row["state"] for row in (*affected, *(target for patch in patches for target in patch["targets"]))]
    status = max(_STATUS[state] for state in (*states, GONE if any(gone.values()) else EQUAL))
    return {
        "status": status,
        "verdict": VERDICTS[status],
        "root": str(checkout.root),
        "megatron_core": checkout.version,
        "head": history.summary if history else None,
        "compared_with": list(bases),
        "notes": notes,
        "patches": patches,
        "symbols": {"known": len(imported), "changed": [row for row in imported if row["state"] != EQUAL]},
        **{kind: {"known": len(names), "gone": gone[kind]} for kind, names in named.items()},
    }


@dataclass(frozen=True)
class _History:
    """A checkout's commits since a tag (their range, and a line each), and the files of the tag (``base``) and of HEAD."""

    root: Path
    tag: str
    base: SourceTree
    head: SourceTree
    range: str
    commits: list[str]
    summary: str

    def of(self, target: str, texts: Sequence[str]) -> list[str]:
        """List the commits that changed a target whose sources are ``texts`` now, newest first."""
        module, _, name = target.partition(":")
        try:
            file = self.head.file(module).relative_to(self.head.roots[0])
            ranges = [f"-L{node.lineno},{node.end_lineno}:{file}" for node in self.head.definitions(target)]
        except Refusal:  # gone: the commits that took the definition away
            place, pattern = module.replace(".", "/"), rf"(def|class) {name.rpartition('.')[2]}[(:]"
            return self._log("--pickaxe-regex", f"-S{pattern}", self.range, "--", place + ".py", place)
        return ["not committed"] * (self.head.texts(target) != texts) + self._log(*ranges, self.range)

    def merged(self, number: int) -> str | None:
        """Return the commit whose subject names a pull request; None if there is none, or it was reverted."""
        newest = next((line for line in self.commits if re.search(rf"\(#?{number}\)", line)), None)
        return None if newest is None or ' Revert "' in newest else newest

    def _log(self, *words: str) -> list[str]:
        try:
            return git.log(self.root, *words) if self.commits else []  # without commits, -L is an error
        except git.GitUnavailable as error:  # a partial clone lacks old files
            return [f"commits cannot be listed: {error}"]


def _history(checkout: Checkout, since: str | None, folder: Path) -> tuple[_History | None, list[str]]:
    root, tag, notes = checkout.root, since or CHECKOUT_TAG, []
    try:
        base, head = (git.commit(root, name, HOOKED_FILE) for name in (tag, "HEAD"))
        for name, commit in (("base", base), ("head", head)):
            git.write_sources(root, commit, "megatron", folder / name)
        try:
            fork = git.run(root, "merge-base", base, head).decode().strip()
        except git.GitUnavailable:
            fork = base
            notes.append(f"{tag} and HEAD have no commit in common, as in a shallow clone: some commits are not listed")
        (newest,) = git.log(root, "-1", "--format=%h of %cs", head)
        commits = git.log(root, f"{fork}..{head}")
    except git.GitUnavailable as error:
        if since is not None:
            raise CheckoutError(f"nothing can be compared with {since}: {error}", code="no-tag") from error
        return None, [f"no commits are listed: {error}"]
    summary = f"{newest}, {len(commits)} commits after {fork[:10]}" + ("" if fork == base else f", where it left {tag}")
    files = [SourceTree((folder / name,)) for name in ("base", "head")]
    return _History(root, tag, files[0], files[1], f"{fork}..{head}", commits, summary), notes


def _target(edit: Edit, tree: SourceTree, bases: Sequence[SourceTree], history: _History | None) -> dict[str, Any]:
    texts = _texts(tree, edit.target)
    if any(edit.accepts(digest(text)) for text in texts):
        return {"target": edit.target, "state": EQUAL}
    old = [text for base in bases for text in _texts(base, edit.target) if digest(text) in edit.fingerprints]
    state, parameters = (GONE, []) if not texts else _compare(old[0], texts[0]) if old else (CHANGED, [])
    return {
        "target": edit.target,
        "state": state,
        "parameters": parameters,
        "fingerprints": [*edit.fingerprints, *map(digest, texts)],
        "commits": history.of(edit.target, texts) if history else [],
    }


def _compare(old: str, new: str, passed: float = math.inf) -> tuple[str, list[str]]:
    """Return how two sources of a function or class differ, and which parameters were added (+), removed (-) or moved (~).

    A parameter has moved if its position has changed and is among the first ``passed``, those passed by position.
    """
    if old == new:
        return EQUAL, []
    before, after = _definition_in(old), _definition_in(new)
    old_names, new_names = (_parameters(node) for node in (before, after))
    is_open = any(name.startswith("*") for name in old_names)  # what was passed through it may have names now
    added = {name: is_needed for name, is_needed in new_names.items() if is_needed > old_names.get(name, -1)}
    parameters = [f"+{name}{'' if is_needed and not is_open else _OPTIONAL}" for name, is_needed in added.items()]
    parameters += [f"-{name}" for name in old_names if name not in new_names]
    kept = [name for name in _positional(before) if name in new_names]
    places = {name: place for place, name in enumerate(_positional(after))}
    passed += isinstance(before, ast.ClassDef)  # self
    parameters += [f"~{name}" for place, name in enumerate(kept) if passed > place != places.get(name)]
    return CODE if ast.dump(before) != ast.dump(after) else COMMENTS, parameters


def _definition_in(text: str) -> ast.AST:
    """Return the syntax of a function or class without its comments and docstrings."""
    definition = ast.parse(f"if True:\n{text}" if text[0].isspace() else text).body[0]
    for node in ast.walk(definition):
        if isinstance(node, Definition) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return definition.body[0] if isinstance(definition, ast.If) else definition


def _arguments(node: ast.AST | None) -> ast.arguments:
    """Return the parameters of a function, or of a class's ``__init__``; no parameters for anything else."""
    if isinstance(node, ast.ClassDef):
        node = next((inner for inner in node.body if getattr(inner, "name", "") == "__init__"), None)
    args = getattr(node, "args", None)
    return args if isinstance(args, ast.arguments) else ast.arguments([], [], None, [], [], None, [])


def _positional(node: ast.AST) -> list[str]:
    args = _arguments(node)
    return [arg.arg for arg in (*args.posonlyargs, *args.args)]


def _parameters(node: ast.AST) -> dict[str, bool]:
    """Return the parameters by name, whether each has to be passed."""
    args, positional = _arguments(node), _positional(node)
    needed = {name: index < len(positional) - len(args.defaults) for index, name in enumerate(positional)}
    needed |= {arg.arg: value is None for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)}
    rest = {"*": args.vararg, "**": args.kwarg}
    return needed | {f"{stars}{arg.arg}": False for stars, arg in rest.items() if arg is not None}


def _uses() -> Iterator[tuple[str, str, str]]:
    """Yield what this package's files use of Megatron, as kind, name and file.

    The kinds are ``symbols`` (``module:name`` of each import by name), ``flags``, ``fields``, the attributes read from
    configurations or arguments, and ``calls`` of symbols, with the number of positional arguments instead of a file.
    """
    package = Path(megacpp_mcore.__file__).parent
    for file in glob.iglob("**/*.py", root_dir=package, recursive=True):  # also what is linked into the package
        symbols: dict[str, str] = {}
        for node in ast.walk(ast.parse((package / file).read_bytes())):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if re.match(r"megatron\.(?!bridge)", module):
                    symbols |= {alias.asname or alias.name: f"{module}:{alias.name}" for alias in names}
                    yield from (("symbols", f"{module}:{alias.name}", file) for alias in names)
                case ast.Call(func=ast.Name(id=name), args=arguments) if name in symbols:
                    yield (
                        "calls",
                        symbols[name],
                        str(99 if any(isinstance(argument, ast.Starred) for argument in arguments) else len(arguments)),
                    )
                case (
                    ast.Attribute(value=holder, attr=name)
                    | ast.Call(func=ast.Name(id="getattr"), args=[holder, ast.Constant(value=str(name)), *_])
                ) if _HOLDER.search(ast.unparse(holder)):
                    yield "fields", name, file
                case ast.Constant(value=str(text)) if text.startswith("--"):
                    yield from (("flags", flag, file) for flag in _FLAG.findall(text))


def _symbols(symbols: dict[str, set[str]], passed: dict[str, int], base: SourceTree, tree: SourceTree) -> list[dict[str, Any]]:
    """Compare the symbols of ``base``; ``symbols``: files that name each, ``passed``: positional arguments of its calls."""
    rows = []
    for symbol, files in sorted(symbols.items()):
        old, new = (_definition(source, *symbol.split(":")) for source in (base, tree))
        if old is not None:
            state: str = GONE if new is None else EQUAL
            parameters: list[str] = []
            if old and new:
                state, parameters = _compare(old, new, passed.get(symbol, 0))
            rows.append({"symbol": symbol, "state": state, "parameters": parameters, "files": sorted(files)})
    return rows


def _definition(tree: SourceTree, module: str, name: str) -> str | None:
    """Return the source of what ``from module import name`` gives, "" if that is not a function or class; None if it fails."""
    if texts := _texts(tree, f"{module}:{name}"):
        return texts[0]
    with contextlib.suppress(Refusal):
        for node in nodes(tree.parse(module)[1]):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
                return ""
            names = {it.asname or it.name: it.name for it in node.names} if isinstance(node, ast.ImportFrom) else {}
            if isinstance(node, ast.ImportFrom) and name in names:
                package = module if tree.file(module).name == "__init__.py" else module.rpartition(".")[0]
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                return (_definition(tree, source, names[name]) if source != module else None) or ""
        tree.file(f"{module}.{name}")
        return ""
    return None


def _names(tree: SourceTree) -> dict[str, set[str]]:
    """Return Megatron's flags, also those of fields, and the fields of its configurations."""
    flags: set[str] = set()
    fields: set[str] = set()
    root = tree.file("megatron.core").parents[1]
    for file in (file for part in ("core", "training") for file in (root / part).rglob("*.py") if file.is_file()):
        text = file.read_text(encoding="utf-8", errors="replace")
        flags |= set(_QUOTED_FLAG.findall(text))
        if _CONFIGURATION.search(text):
            _, syntax = tree.parse(".".join(file.relative_to(root.parent).with_suffix("").parts))
            classes = [node for node in syntax.body if isinstance(node, ast.ClassDef)]
            fields |= {ast.unparse(it.target) for node in classes for it in node.body if isinstance(it, ast.AnnAssign)}
    words = [field.replace("_", "-") for field in fields]
    return {"flags": flags | {f"--{no}{word}" for word in words for no in ("", "no-")}, "fields": fields}


def _texts(tree: SourceTree, target: str) -> list[str]:
    with contextlib.suppress(Refusal):
        return tree.texts(target)
    return []
