"""The text that is sent into the jail: the zygote's modules, joined."""

import ast
import sys
from collections import Counter

from rlbench.sandbox.jail_start import ZYGOTE_PARTS, zygote_source


def bound_names(tree: ast.Module) -> list[str]:
    "Names that a module defines at its top, without its imports and `__all__`."
    names = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return [name for name in names if name != "__all__"]


def test_no_name_stands_in_two_parts():
    "The parts share one namespace in the jail, so a second definition would replace the first."
    twice = [name for name, count in Counter(bound_names(ast.parse(zygote_source()))).items() if count > 1]
    assert twice == []


def test_the_source_imports_small_modules_only():
    "Nothing of rlbench is in the jail, and every import makes each fork dearer."
    tree = ast.parse(zygote_source())
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    found = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    small = "_signal _socket collections ctypes errno gc mmap os resource select struct sys time".split()
    assert found == set(small) and found <= set(sys.stdlib_module_names)


def test_every_name_that_a_part_imports_is_in_the_source():
    "What was cut out of the text as an import is defined elsewhere in it."
    defined = set(bound_names(ast.parse(zygote_source())))
    for part in ZYGOTE_PARTS:
        with open(part.__file__, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith("rlbench")):
                assert {name.name for name in node.names} <= defined, (part.__name__, ast.unparse(node))
