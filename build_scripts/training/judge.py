"""Whether a completion is Python: the protocol of the demo model's evaluation."""

from __future__ import annotations

import ast
import builtins
import codeop

from .clean import parse

_FLAGS: int = codeop.PyCF_ALLOW_INCOMPLETE_INPUT | codeop.PyCF_DONT_IMPLY_DEDENT  # type: ignore[attr-defined]


def cut(head: str, completion: str, ended: bool) -> str:
    """Return the head with as much of its completion as can be judged.

    A completion that ended by itself is judged whole. One cut off by the token limit loses its
    last, partial line; then, while Python reports that the input is incomplete (an open bracket or
    string, a block without its body, a `try` without its handler), one more line. An error
    anywhere else is not repaired.
    """
    if ended:
        return head + completion
    lines = (head + completion).split("\n")[:-1]
    while len(lines) > head.count("\n") and is_incomplete("\n".join(lines) + "\n"):
        lines.pop()
    return "\n".join(lines) + "\n"


def is_incomplete(text: str) -> bool:
    """Whether more text could still make a module of it, by Python's own parser."""
    try:
        compile(text, "<completion>", "exec", _FLAGS, dont_inherit=True)
    except SyntaxError as error:
        return "incomplete input" in str(error)
    except ValueError:  # a null character
        return False
    return False


def accepts(head: str, completion: str, ended: bool) -> bool:
    """Whether `ast.parse` accepts what `cut` left, and that has at least one new statement.

    A string on its own does not count as a statement.
    """
    tree = parse(cut(head, completion, ended))
    if tree is None:
        return False
    first = head.count("\n") + 1
    return any(
        node.lineno >= first and not _is_string(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
    )


def is_valid_so_far(head: str, completion: str, ended: bool) -> bool:
    """Whether Python finds no error in what `cut` leaves before it drops unfinished statements."""
    text = head + completion
    if not ended:
        text = text[: text.rfind("\n") + 1]
    return parse(text) is not None or (not ended and is_incomplete(text))


def repeats(completion: str, times: int = 3) -> bool:
    """Whether some line longer than a bracket occurs `times` times or more."""
    lines = [line.strip() for line in completion.split("\n")]
    return any(len(line) > 3 and lines.count(line) >= times for line in set(lines))


def known_names(source: str) -> float | None:
    """Share of the names read inside a function that it binds itself or that are builtins.

    The rest are globals, which a lone function cannot show to exist: compare with human code.
    """
    tree = parse(source)
    if tree is None:
        return None
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    read = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                read.append(node.id)
            else:
                bound.add(node.id)
        elif isinstance(node, ast.ExceptHandler | ast.FunctionDef | ast.ClassDef) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
    if not read:
        return None
    return sum(name in bound or hasattr(builtins, name) for name in read) / len(read)


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
