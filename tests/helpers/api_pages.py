"""The API as pages for the site, read from the package's source without importing it: a page per room, in MyST."""

import ast

from rooms import ROOMS, ROOT, module_path, modules, notebooks_of_modules, room_of

FENCE = ":::"  # of a function, or of what stands inside a class; a class has one colon more


def api_page(room: str) -> str:
    "The place on the site of a room's page of the API."
    return f"api/{room or 'rlbench'}.md"


def api_pages() -> dict[str, str]:
    "Every page of the API: its place on the site -> its text."
    known, notebooks = modules(), notebooks_of_modules()
    pages = {}
    for room in ROOMS:
        sections = [f"# {f'rlbench.{room}' if room else 'rlbench'}\n"]
        for module in known:
            if room_of(module) == room:
                notebook = notebooks[module].relative_to(ROOT / "nbs").as_posix()
                sections.append(module_section(module, notebook))
        pages[api_page(room)] = "\n".join(sections)
    return pages


def module_section(module: str, notebook: str) -> str:
    "A module: its purpose, the notebook that it is written in, and its public functions and classes."
    tree = ast.parse(module_path(module).read_text(encoding="utf-8"))
    head = (
        f"## {module}\n"
        f"\n"
        f"{ast.get_docstring(tree) or ''} Written in [{notebook.removesuffix('.ipynb')}](../{notebook}).\n"
    )
    parts = [head, f"```{{py:module}} rlbench.{module}\n:no-typesetting:\n```\n"]
    described = {}  # of a name that is defined twice, the last definition counts
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            described[node.name] = class_part(node) if isinstance(node, ast.ClassDef) else function_part(node)
    return "\n".join([*parts, *described.values()])


def without_metadata(annotation: ast.expr | None) -> ast.expr | None:
    "`Annotated[X, ...]` as X: ranges and help of a parameter are in the notebook."
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        return annotation.slice.elts[0]
    return annotation


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    "A function's parameters and result, on one line."
    given = node.args
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
        argument.annotation = without_metadata(argument.annotation)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(given)}){result}".replace("\n", " ")


def function_part(node: ast.FunctionDef | ast.AsyncFunctionDef, kind: str = "function") -> str:
    "The directive of a function or a method."
    option = ":async:\n" if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{FENCE}{{py:{kind}}} {signature(node)}\n{option}\n{ast.get_docstring(node) or ''}\n{FENCE}\n"


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    "It is read like a field."
    return any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)


def class_part(node: ast.ClassDef) -> str:
    "The directive of a class: its docstring, its fields in one table, its public methods."
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)]
    rows = [f"| `{part.target.id}` | `{type_in_table(part.annotation)}` |" for part in fields]
    table = "\n".join(["", "| field | type |", "|---|---|", *rows, ""]) if rows else ""
    members = {}
    for part in node.body:
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) and not part.name.startswith("_"):
            if is_property(part):
                members[part.name] = f"{FENCE}{{py:property}} {part.name}\n\n{ast.get_docstring(part) or ''}\n{FENCE}\n"
            else:
                members[part.name] = function_part(part, "method")
    body = "\n".join([ast.get_docstring(node) or "", table, *members.values()])
    return f"{FENCE}:{{py:class}} {node.name}\n\n{body}\n{FENCE}:\n"


def type_in_table(annotation: ast.expr) -> str:
    "A type as the cell of a table."
    return ast.unparse(without_metadata(annotation)).replace("|", r"\|").replace("\n", " ")
