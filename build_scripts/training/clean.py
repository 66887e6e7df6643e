"""Cleaning of source files, and the functions inside them."""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
import warnings
from dataclasses import dataclass

_GENERATED = re.compile(
    r"auto(matically)?[- ]?generated|generated (by|from|code|with)|do not (edit|modify)",
    re.IGNORECASE,
)
_LICENCE = re.compile(r"copyright|licen[sc]e|spdx|all rights reserved", re.IGNORECASE)
_HEADER = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*(?:#[^\n]*\n?)")  # comments before any code

_LONGEST_LINE = 300
_LARGEST_MEAN_LINE = 70
_MOST_DIGITS = 0.12  # of the characters
_MOST_NON_ASCII = 0.05
_MOST_CONSTANTS = 0.40  # of the syntax tree's nodes: more is a table, not a program
_FUNCTION_LINES = (3, 80)


@dataclass(frozen=True)
class Function:
    """A function or method, dedented to stand alone."""

    source: str
    head_lines: int  # decorators and signature
    docstring_lines: int  # 0 = none
    key: str  # equal for functions that differ in white space alone


def normalise(text: str) -> str:
    """Line feeds, four spaces for a tab, nothing after the last character of a line."""
    lines = (
        text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff").expandtabs(4).split("\n")
    )
    return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


def clean_code(text: str) -> tuple[str, ast.Module] | None:
    """Return a file worth learning from and its tree, or None for tables and generated files."""
    if _GENERATED.search(text[:2000]):
        return None
    text = _without_licence(normalise(text))
    if len(text) < 200 or not _reads_like_code(text):
        return None
    tree = parse(text)
    if tree is None:
        return None
    nodes = constants = 0
    for node in ast.walk(tree):
        nodes += 1
        constants += isinstance(node, ast.Constant)
    return (text, tree) if constants <= _MOST_CONSTANTS * nodes else None


def parse(text: str) -> ast.Module | None:
    """The syntax tree, or None if Python refuses the text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old sources
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def functions(text: str, tree: ast.Module) -> list[Function]:
    """Return the functions of the module and the methods of its classes, in file order."""
    lines = text.split("\n")
    found = []
    for node in _definitions(tree):
        start = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
        end = node.end_lineno or node.lineno
        if not _FUNCTION_LINES[0] <= end - start <= _FUNCTION_LINES[1]:
            continue
        source = textwrap.dedent("\n".join(lines[start:end])) + "\n"
        if parse(source) is None:  # a string that continues at the left margin
            continue
        body = node.body[0]
        has_docstring = ast.get_docstring(node, clean=False) is not None
        if has_docstring and len(node.body) == 1:
            continue  # an abstract method: nothing to learn
        docstring_lines = (body.end_lineno or 0) - body.lineno + 1 if has_docstring else 0
        first = min([body.lineno, *(each.lineno for each in getattr(body, "decorator_list", []))])
        if first == node.lineno:
            continue  # a body on the line of the signature
        key = digest("".join(source.split()))
        found.append(Function(source, _head_lines(lines, start, first), docstring_lines, key))
    return found


def digest(text: str) -> str:
    """A stable 64-bit name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _definitions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    found: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        found += [m for m in members if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
    return found


def _head_lines(lines: list[str], start: int, body_line: int) -> int:
    """Lines from `start` to the colon: comments between it and the body do not count."""
    end = body_line - 1
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].strip()[0] == "#"):
        end -= 1
    return end - start


def _without_licence(text: str) -> str:
    """Drop the comments that open a file when they state its licence."""
    match = _HEADER.match(text)
    if match is None or not _LICENCE.search(match.group()):
        return text
    return text[match.end() :].lstrip("\n")


def _reads_like_code(text: str) -> bool:
    lines = text.split("\n")
    size = len(text)
    return (
        max(map(len, lines)) <= _LONGEST_LINE
        and size <= _LARGEST_MEAN_LINE * len(lines)
        and sum(map(str.isdigit, text)) <= _MOST_DIGITS * size
        and not size - len(text.encode("ascii", "ignore")) > _MOST_NON_ASCII * size
    )
