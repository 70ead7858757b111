"""What goes wrong in a function or constant, as operations on its syntax tree: formatting is of no matter.

Expressions are given as Python writes them. What an operation looks for stands in its place exactly once.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Concatenate, NamedTuple, ParamSpec

Fault = Callable[[ast.AST], None]
"""Changes the syntax tree of its place."""
P = ParamSpec("P")


class StaleError(ValueError):
    """The source is another than the one that a fault was made for."""


class Slot(NamedTuple):
    """Where a node hangs on its parent: operators share their nodes, and are told apart by this."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST

    def put(self, node: ast.AST | None) -> None:
        """Another node in this place, or none: an element of a list is left out."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index : self.index + 1] = [] if node is None else [node]


def _fault(change: Callable[Concatenate[ast.AST, P], None]) -> Callable[P, Fault]:
    """What is given besides the place first, and makes a fault."""
    return lambda *given, **named: lambda place: change(place, *given, **named)


@_fault
def constant(place: ast.AST, value: str) -> None:
    """The constant has this value."""
    if not isinstance(place, ast.Assign | ast.AnnAssign):
        raise StaleError("it is no constant")
    place.value = _expression(value)


@_fault
def returns(place: ast.AST, value: str) -> None:
    """The function returns this wherever it returns something; `result` stands for what it would return."""
    given = [node for node in ast.walk(place) if isinstance(node, ast.Return) and node.value is not None]
    if not given:
        raise StaleError("it returns nothing")
    for node in given:
        holder = ast.Expr(_expression(value))
        for slot in list(_slots(holder)):
            if isinstance(slot.node, ast.Name) and slot.node.id == "result":
                slot.put(node.value)
        node.value = holder.value


@_fault
def becomes(place: ast.AST, before: str, after: str) -> None:
    """An expression or statement becomes another; '' removes a statement."""
    wanted = ast.parse(before).body[0]
    new = ast.parse(after).body[0] if after else ast.Pass()
    if isinstance(wanted, ast.Expr) and isinstance(new, ast.Expr):
        wanted, new = wanted.value, new.value  # type: ignore[assignment]
    _only(before, _like(place, wanted)).put(new)


@_fault
def _decided(place: ast.AST, condition: str, outcome: bool) -> None:
    found = _like(place, _expression(condition))
    for kinds in (ast.If, ast.IfExp | ast.BoolOp | ast.comprehension):
        if conditions := [slot for slot in found if isinstance(slot.parent, kinds)]:
            found = conditions
            break
    _only(condition, found).put(ast.Constant(outcome))


def always(condition: str) -> Fault:
    """A condition counts as met. Of equal expressions that of an `if` is meant, then other conditions."""
    return _decided(condition, True)


def never(condition: str) -> Fault:
    """A condition counts as not met."""
    return _decided(condition, False)


@_fault
def swaps(place: ast.AST, before: str, after: str) -> None:
    """An operator becomes another: `swaps('<', '<=')`."""
    kind, new = type(_operator(before)), _operator(after)
    _only(before, (slot for slot in _slots(place) if type(slot.node) is kind)).put(new)


@_fault
def gives(place: ast.AST, key: str, value: str) -> None:
    """An argument of this name, or the entry of a dictionary under this key, has another value."""
    slot, number = _entry(place, key)
    if isinstance(slot.node, ast.Dict):
        slot.node.values[number] = _expression(value)
    elif isinstance(slot.node, ast.Call):
        slot.node.keywords[number].value = _expression(value)


@_fault
def omits(place: ast.AST, key: str) -> None:
    """An argument of this name, or the entry of a dictionary under this key, is left out."""
    slot, number = _entry(place, key)
    if isinstance(slot.node, ast.Dict):
        del slot.node.keys[number], slot.node.values[number]
    elif isinstance(slot.node, ast.Call):
        del slot.node.keywords[number]


@_fault
def drops(place: ast.AST, function: str) -> None:
    """A statement that calls this function or method and does no more is left out."""
    _only(f"a statement {function}(...)", (s for s in _slots(place) if _calls(s.node, function))).put(
        ast.Pass()
    )


@_fault
def text(place: ast.AST, before: str, after: str) -> None:
    """A text of a file of data becomes another."""
    assert isinstance(place, ast.Constant)
    given = str(place.value)
    if given.count(before) != 1:
        raise StaleError(f"{before} stands there {given.count(before)} times")
    place.value = given.replace(before, after)


def planted(given: str, name: str, fault: Fault) -> str:
    """The text of a file with a fault in the place of this name."""
    if name.endswith(".toml"):
        data = ast.Constant(given)
        fault(data)
        return str(data.value)
    module = ast.parse(given)
    nodes = [node for found, node in _definitions_of(module, "") if found == name]
    if len(nodes) != 1:
        raise StaleError(f"{name} is defined {len(nodes)} times in its file")
    was = ast.unparse(nodes[0])
    try:
        fault(nodes[0])
    except StaleError as error:
        raise StaleError(f"{name}: {error}") from None
    if ast.unparse(ast.fix_missing_locations(nodes[0])) == was:
        raise StaleError(f"{name}: nothing changes")
    changed = ast.unparse(module)
    compile(changed, name, "exec")
    return changed


@cache
def definitions(given: str) -> tuple[str, ...]:
    """The qualified names of all functions, methods and constants of a module."""
    return tuple(name for name, _ in _definitions_of(ast.parse(given), ""))


def _definitions_of(within: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(within):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                if "overload" not in map(ast.unparse, node.decorator_list):
                    yield f"{prefix}{name}", node
                    yield from _definitions_of(node, f"{prefix}{name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield f"{prefix}{name}", node
            case ast.If() | ast.Try() | ast.With():
                yield from _definitions_of(node, prefix)


def _slots(root: ast.AST) -> Iterator[Slot]:
    for parent in ast.walk(root):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, ast.AST):
                yield Slot(parent, field, None, value)
            elif isinstance(value, list):
                for index, node in enumerate(value):
                    if isinstance(node, ast.AST):
                        yield Slot(parent, field, index, node)


def _only(wanted: str, slots: Iterable[Slot]) -> Slot:
    found = list(slots)
    if len(found) != 1:
        raise StaleError(f"{wanted} stands there {len(found)} times")
    return found[0]


def _like(place: ast.AST, wanted: ast.AST) -> list[Slot]:
    text = ast.unparse(wanted)
    return [s for s in _slots(place) if type(s.node) is type(wanted) and ast.unparse(s.node) == text]


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _operator(symbol: str) -> ast.AST:
    if symbol == "not":
        return ast.Not()
    match _expression(f"a {symbol} b"):
        case ast.Compare(ops=[operator]) | ast.BinOp(op=operator) | ast.BoolOp(op=operator):
            return operator
    raise ValueError(symbol)


def _entry(place: ast.AST, key: str) -> tuple[Slot, int]:
    found: list[tuple[Slot, int]] = []
    root = Slot(place, "", None, place)
    for slot in (root, *_slots(place)):
        if isinstance(slot.node, ast.Dict):
            keys = [node.value if isinstance(node, ast.Constant) else None for node in slot.node.keys]
        elif isinstance(slot.node, ast.Call):
            keys = [keyword.arg for keyword in slot.node.keywords]
        else:
            continue
        found += [(slot, number) for number, given in enumerate(keys) if given == key]
    if len(found) != 1:
        raise StaleError(f"{key} is given {len(found)} times")
    return found[0]


def _calls(node: ast.AST, function: str) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name == function
    return False
