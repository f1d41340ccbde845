"""Writes docs/reference/: the keys of configurations from their schemas, and the commands from their parser.

    python docs/make_reference.py

Types, bounds and defaults are pydantic's; a key's meaning is its comment where its section is declared."""

import ast
import io
import re
import textwrap
import tokenize
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from spmd_lm import errors
from spmd_lm.cli import POSITIONALS, VERBS, make_parser
from spmd_lm.config import adapters, data_sections, layers, rope, schema
from spmd_lm.config.schema import RunConfig, variants
from spmd_lm.config.section import sections_within, yaml_fields
from spmd_lm.prepare import schema as recipe_schema

HERE = Path(__file__).parent / "reference"
GENERATED = "<!-- Written by docs/make_reference.py. -->"


def comments(path: str) -> dict[str, dict[str, str]]:
    """By class and field: the comment behind a field, or the lines of comment before it."""
    source = Path(path).read_text()
    by_line = {
        token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }

    def comment_of(node: ast.stmt) -> str:
        if node.lineno in by_line and not by_line[node.lineno][1]:
            return by_line[node.lineno][0]
        lines, line = [], node.lineno - 1
        while line in by_line and by_line[line][1]:
            lines.insert(0, by_line[line][0])
            line -= 1
        return " ".join(lines)

    return {
        each.name: {
            ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]): comment_of(node)
            for node in each.body
            if isinstance(node, ast.AnnAssign | ast.Assign)
        }
        for each in ast.parse(source).body
        if isinstance(each, ast.ClassDef)
    }


COMMENTS = {
    name: fields
    for each in (recipe_schema, adapters, data_sections, layers, rope, schema)
    for name, fields in comments(each.__file__).items()
}


def meaning(section: type[BaseModel], field: str) -> str:
    found = (COMMENTS.get(base.__name__, {}).get(field) for base in section.__mro__)
    return next(filter(None, found), "")


def type_name(about: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if choices := about.get("anyOf") or about.get("oneOf"):
        return " or ".join(dict.fromkeys(name for each in choices if (name := type_name(each))))
    if "enum" in about or "const" in about:
        return ", ".join(f"`{value}`" for value in about.get("enum", [about.get("const")]))
    if "$ref" in about:  # a section within the section
        return "mapping"
    if about["type"] == "null":
        return ""
    if about["type"] == "array":
        items = type_name(about["items"])
        word, *bounds = items.split(" ", 1)
        return f"list of {items}" if "`" in items else " ".join([f"list of {word}s", *bounds])
    name = {"object": "mapping", "boolean": "`true`, `false`"}.get(about["type"], about["type"])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {about[key]:g}" for key, sign in signs.items() if about.get(key, schema.MOST) != schema.MOST]
    return " ".join([name, ", ".join(bounds)]).strip()


def value_name(value: Any) -> str:
    if value in (None, ()) or isinstance(
        value, recipe_schema.CleaningSteps | recipe_schema.SplitShares
    ):  # a table follows
        return ""
    if isinstance(value, list | tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table(section: type[BaseModel], within: bool = False) -> list[str]:
    """within: whether it has the keys of sections within the section too."""
    return ["| key | type | default | |", "| --- | --- | --- | --- |", *rows(section, "", within)]


def rows(section: type[BaseModel], prefix: str, within: bool) -> list[str]:
    properties, lines = section.model_json_schema(by_alias=True)["properties"], []
    for key, field in yaml_fields(section).items():
        name = next(name for name, each in section.model_fields.items() if each is field)
        about, inner = meaning(section, name), sections_within(field) if within else []
        inner = [] if about.startswith("default: model.") else inner  # its keys are in the model's rows
        default = "required" if field.is_required() else value_name(field.default)
        default = "" if inner or about.startswith("default:") else default
        kind = type_name(properties[key])
        cells = f"{prefix}{key}", kind, default, about
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("<name>", "NAME") for cell in cells) + " |")
        inner_prefix = f"{prefix}{key}{'[]' * kind.startswith('list')}."
        lines += dict.fromkeys(row for each in inner for row in rows(each, inner_prefix, within))
    return lines


def configuration() -> str:
    lines = [
        "# Configuration",
        "",
        GENERATED,
        "",
        "One YAML file per run. `base: other.yaml` inherits from another file, relative to the one that says it;",
        "`section.key=value` on the command line changes a key. `spmd-lm config CONFIG` prints the resolved file.",
        f"A whole number is at most {schema.MOST:,}, where nothing else is said.",
    ]
    for name in RunConfig.model_fields:
        for kind, section in variants(name).items():
            discriminator = RunConfig.model_fields[name].discriminator
            lines += ["", f"## {name}" + (f", `{discriminator}: {kind}`" if kind else ""), ""]
            about = section.__doc__ if section.__doc__ != section.__mro__[1].__doc__ else None
            lines += [*textwrap.wrap(re.sub(r"\s+", " ", about), 120), ""] if about else []
            lines += table(section, within=True)
    return "\n".join(lines) + "\n"


def preparation() -> str:
    """The keys of `spmd-lm prepare`, section by section."""
    lines = [
        "# Preparation",
        "",
        GENERATED,
        "",
        "The keys of `spmd-lm prepare`; [docs/prepare.md](../prepare.md) explains.",
    ]
    sections = {"": recipe_schema.Preparation, "sources": recipe_schema.Source, "steps": recipe_schema.CleaningSteps}
    sections |= {"steps.leaks": recipe_schema.Leaks, "steps.near_duplicates": recipe_schema.NearDuplicates}
    sections |= {"tokenizer": recipe_schema.TrainedTokenizer, "split": recipe_schema.SplitShares}
    for name, section in sections.items():
        lines += ["", f"## {name}" if name else "## The file", ""]
        about = section.__doc__ if section.__doc__ != section.__mro__[1].__doc__ else None
        lines += [*textwrap.wrap(re.sub(r"\s+", " ", about), 120), ""] if about else []
        lines += table(section)
    return "\n".join(lines) + "\n"


def commands() -> str:
    lines = ["# Commands", "", GENERATED, "", "    spmd-lm VERB CONFIG [section.key=value ...] [OPTION ...]", ""]
    lines += ["| exit code | |", "| --- | --- |"]
    lines += [f"| {code.value} | {comments(errors.__file__)['Exit'][code.name]} |" for code in errors.Exit]
    for name, verb in VERBS.items():
        parser = make_parser(name)
        usage = f"    spmd-lm {name} {verb.usage}"
        lines += ["", f"## {name}", "", verb.help[0].upper() + verb.help[1:] + ".", "", usage, ""]
        lines += ["| | |", "| --- | --- |"]
        lines += [f"| `{each}` | {POSITIONALS[each]} |" for each in verb.positionals]
        for action in parser._actions:
            if action.option_strings and action.dest != "help":
                value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 else ""
                lines.append(f"| `{', '.join(action.option_strings)}{value}` | {(action.help or '') % vars(action)} |")
    return "\n".join(lines) + "\n"


PAGES = {"configuration.md": configuration, "preparation.md": preparation, "commands.md": commands}

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
