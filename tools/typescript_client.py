"""The TypeScript client in clients/typescript: types and operations from the OpenAPI description.

`index.d.ts` has the types of every operation, `operations.js` what each sends. `index.js`, which is
written by hand, sends them. Nothing needs a compiler: browsers, Node.js, Deno and Bun run it as it
is. (openapi-typescript would need Node.js and its packages in every check of the reference.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

NOTE: Final = "// Written by `make reference` from the OpenAPI description; do not edit.\n"
BINARY: Final = "Blob | ArrayBuffer | Uint8Array | ReadableStream<Uint8Array> | string"
HEAD: Final = """\
export interface Options {
  /** Address of the API, such as http://127.0.0.1:8080. */
  baseUrl: string;
  /** A token, or a function that returns one, such as after its renewal. */
  token?: string | (() => string | Promise<string>);
  /** Another fetch than the global one. */
  fetch?: typeof globalThis.fetch;
}

/** An answer with a status from 400: application/problem+json (RFC 9457). */
export declare class Problem extends Error {
  readonly status: number;
  /** Code of the error, such as jobs.queue_unknown; see the page of errors. */
  readonly code: string;
  readonly body: ProblemDocument | string;
  /** Seconds after which the request may be repeated, if the server names them. */
  readonly retryAfterS: number | undefined;
}

export interface RequestOptions {
  signal?: AbortSignal;
  headers?: Record<string, string>;
}

"""
CLASS: Final = """\
export declare class Headrace {
  constructor(options: Options);
"""


def typescript_files(description: dict[str, Any]) -> dict[str, str]:
    """Name -> text of each generated file."""
    operations = dict(sorted(_operations(description)))
    return {
        "index.d.ts": _types(description, operations),
        "operations.js": _table(operations),
    }


def _operations(description: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield operation["operationId"], {**operation, "method": method.upper(), "path": path}


def _table(operations: dict[str, dict[str, Any]]) -> str:
    lines = [NOTE, "export const operations = {"]
    for name, operation in operations.items():
        names = [one["name"] for one in operation.get("parameters") or [] if one["in"] == "query"]
        row = [operation["method"], operation["path"], names, _media_type(operation) or ""]
        lines.append(f"  {name}: {json.dumps(row)},")
    return "\n".join([*lines, "};", ""])


def _media_type(operation: dict[str, Any]) -> str | None:
    """The type of the body that is sent: JSON, or the last, most general one."""
    content = (operation.get("requestBody") or {}).get("content") or {}
    return next(reversed(content), None)


def _types(description: dict[str, Any], operations: dict[str, dict[str, Any]]) -> str:
    lines = [NOTE, HEAD, CLASS]
    for name, operation in operations.items():
        text = " ".join((operation.get("description") or operation["summary"]).split())
        lines.append(f"  /** {text} */")
        fields, is_required = _parameters(operation)
        given = f"parameters{'' if is_required else '?'}: {{ {'; '.join(fields)} }}, "
        answer = _answer(operation)
        lines.append(f"  {name}({given if fields else ''}options?: RequestOptions): {answer};\n")
    lines.append("}\n")
    for name, schema in sorted(description["components"]["schemas"].items()):
        if text := schema.get("description"):
            lines.append(f"/** {' '.join(text.split())} */")
        lines.append(f"export type {_name(name)} = {_type_of(schema)};\n")
    return "\n".join(lines)


def _parameters(operation: dict[str, Any]) -> tuple[list[str], bool]:
    """The fields of an operation's parameters, and whether one is required."""
    fields, is_required = [], False
    for one in operation.get("parameters") or []:
        kind = "string | number" if one["in"] == "path" else _type_of(one["schema"])
        is_required |= one["required"]
        fields.append(f"{_key(one['name'])}{'' if one['required'] else '?'}: {kind}")
    body = operation.get("requestBody") or {}
    if (media_type := _media_type(operation)) is not None:
        schema = body["content"][media_type]["schema"]
        is_json = media_type == "application/json" and schema.get("format") != "binary"
        mark = "" if body.get("required") else "?"
        is_required |= bool(body.get("required"))
        fields.append(f"body{mark}: {_type_of(schema) if is_json else BINARY}")
    return fields, is_required


def _answer(operation: dict[str, Any]) -> str:
    """The type of the answer: JSON as its schema, other text and streams as Response."""
    good = [one for status, one in operation["responses"].items() if status.startswith("2")]
    content = good[0].get("content") or {} if good else {}
    if not content:
        return "Promise<void>"
    schema = (content.get("application/json") or {}).get("schema")
    return "Promise<Response>" if schema is None else f"Promise<{_type_of(schema)}>"


def _name(schema: str) -> str:
    """The type of a schema; `Problem` is the class that is thrown."""
    return "ProblemDocument" if schema == "Problem" else schema


PLAIN: Final = {
    "integer": "number",
    "number": "number",
    "string": "string",
    "boolean": "boolean",
    "null": "null",
}


def _type_of(schema: dict[str, Any]) -> str:
    """A JSON Schema as a type of TypeScript."""
    kind = schema.get("type")
    if "$ref" in schema:
        found = _name(str(schema["$ref"]).rpartition("/")[2])
    elif "enum" in schema:
        found = " | ".join(map(json.dumps, schema["enum"]))
    elif parts := schema.get("oneOf") or schema.get("anyOf"):
        found = " | ".join(dict.fromkeys(map(_type_of, parts)))
    elif isinstance(kind, list):
        found = " | ".join(_type_of({**schema, "type": one}) for one in kind)
    elif kind == "array":
        found = f"Array<{_type_of(schema.get('items') or {})}>"
    elif kind == "object":
        found = _object(schema)
    else:
        found = BINARY if schema.get("format") == "binary" else PLAIN.get(str(kind), "unknown")
    return found


def _object(schema: dict[str, Any]) -> str:
    required = set(schema.get("required") or ())
    fields = [
        f"{_key(name)}{'' if name in required else '?'}: {_type_of(part)}"
        for name, part in (schema.get("properties") or {}).items()
    ]
    others = schema.get("additionalProperties")
    if isinstance(others, dict) and not fields:
        return f"Record<string, {_type_of(others)}>"
    if not fields:
        return "Record<string, unknown>"
    return "{ " + "; ".join(fields) + " }"


def _key(name: str) -> str:
    return name if name.isidentifier() else json.dumps(name)
