"""Natural loops of a kernel, from the back edges of its control-flow graph.

Nodes of the graph are instructions, by index; the node behind the last one is the exit.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxsim.ptx.parse import Instruction, Kernel


@dataclass(frozen=True)
class Loop:
    """The instructions from which an edge back to `header` can be reached without passing it."""

    header: int
    body: frozenset[int]
    parent: int | None  # header of the smallest loop around it
    depth: int  # 1: no loop around it


def successors(kernel: Kernel) -> list[list[int]]:
    """For each instruction, those that may come next."""
    size = len(kernel.instructions)
    return [_next(kernel, index, instruction, size) for index, instruction in enumerate(kernel.instructions)] + [[]]


def _next(kernel: Kernel, index: int, instruction: Instruction, size: int) -> list[int]:
    base, is_guarded = instruction.words[0], instruction.predicate is not None
    following = [index + 1] if is_guarded or base not in ("bra", "ret", "exit", "trap") else []
    if base == "bra":
        following.append(kernel.labels[instruction.operands[0]])
    elif base in ("ret", "exit"):
        following.append(size)
    return list(dict.fromkeys(following))


def natural_loops(kernel: Kernel) -> list[Loop]:
    """All loops, in the order of their headers; loops with one header are one."""
    following = successors(kernel)
    preceding: list[list[int]] = [[] for _ in following]
    for index, targets in enumerate(following):
        for target in targets:
            preceding[target].append(index)
    order = _reverse_postorder(following)
    dominator = _dominators(order, preceding)
    bodies: dict[int, set[int]] = {}
    for index in order:
        for target in following[index]:
            if _dominates(dominator, target, index, order):
                bodies.setdefault(target, {target}).update(_reaching(index, target, preceding))
    return _nested(bodies)


def _reverse_postorder(following: list[list[int]]) -> list[int]:
    """Nodes that can be reached from the first one, each before those behind it."""
    visited, postorder, stack = {0}, [], [(0, iter(following[0]))]
    while stack:
        node, targets = stack[-1]
        target = next((each for each in targets if each not in visited), None)
        if target is None:
            postorder.append(node)
            stack.pop()
        else:
            visited.add(target)
            stack.append((target, iter(following[target])))
    return postorder[::-1]


def _dominators(order: list[int], preceding: list[list[int]]) -> dict[int, int]:
    """The immediate dominator of each node: the iterative algorithm of Cooper, Harvey and Kennedy (2001)."""
    position = {node: place for place, node in enumerate(order)}
    dominator = {order[0]: order[0]}
    has_changed = True
    while has_changed:
        has_changed = False
        for node in order[1:]:
            known = [each for each in preceding[node] if each in dominator]
            new = known[0]
            for other in known[1:]:
                while new != other:
                    while position[new] > position[other]:
                        new = dominator[new]
                    while position[other] > position[new]:
                        other = dominator[other]
            if dominator.get(node) != new:
                dominator[node], has_changed = new, True
    return dominator


def _dominates(dominator: dict[int, int], above: int, node: int, order: list[int]) -> bool:
    while node != above and node != order[0]:
        node = dominator[node]
    return node == above


def _reaching(tail: int, header: int, preceding: list[list[int]]) -> set[int]:
    """Nodes that reach `tail` without passing `header`."""
    found, stack = {tail, header}, [tail] if tail != header else []
    while stack:
        for node in preceding[stack.pop()]:
            if node not in found:
                found.add(node)
                stack.append(node)
    return found


def _nested(bodies: dict[int, set[int]]) -> list[Loop]:
    parents: dict[int, int | None] = {}
    for header in bodies:
        around = [other for other, body in bodies.items() if other != header and header in body]
        parents[header] = min(around, key=lambda other: len(bodies[other]), default=None)

    def depth(header: int) -> int:
        parent = parents[header]
        return 1 if parent is None else 1 + depth(parent)

    return [Loop(header, frozenset(bodies[header]), parents[header], depth(header)) for header in sorted(bodies)]
