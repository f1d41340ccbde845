"""YAML 1.2 scalars (the core schema) on top of PyYAML's safe loader and dumper.

PyYAML reads YAML 1.1, where `3e-4` is text, `no` is false, `010` is 8, `1:30` is 90, and the last of two equal keys
wins.  Here these are a number, text, 10, text and an error.  The dumper quotes by the same rules, so that its output
reads back equal."""

import copy
import functools
import re
from typing import Any

import yaml
from yaml.reader import ReaderError

CORE_SCHEMA = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "null": r"~|null|Null|NULL|",
}
MAX_NODES = 20_000  # per document; the longest configuration shipped has 60
MAX_DIGITS = 18  # per whole number: fits 64 bits, and is more than any key needs


class YamlLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's registry, one per class
    problems: list[str]

    def construct_unique_mapping(self, node: yaml.MappingNode) -> dict:
        first_lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # construct_mapping rejects !!map [a]
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in first_lines:
                first = first_lines[key.value]
                self.problems.append(f"line {line}: duplicate key '{key.value}', first on line {first}. Remove one")
            first_lines.setdefault(key.value, line)
        return self.construct_mapping(node, deep=True)  # deep: an alias inside its own anchor is then an error

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        digits, line = len(node.value.lstrip("+-0")), node.start_mark.line + 1
        if digits > MAX_DIGITS:
            limit = f"at most {MAX_DIGITS} fit. Quote it if it is text"
            raise yaml.YAMLError(f"line {line}: a whole number of {digits} digits; {limit}")
        return int(node.value)


class Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's registry, one per class

    def ignore_aliases(self, data: Any) -> bool:
        return True


YamlLoader.add_constructor("tag:yaml.org,2002:map", YamlLoader.construct_unique_mapping)
YamlLoader.add_constructor("tag:yaml.org,2002:int", YamlLoader.construct_decimal)
for tag, pattern in CORE_SCHEMA.items():
    for registry in (YamlLoader, Dumper):
        registry.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"), None)


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> tuple[Any, list[str]]:
    """Cached: a sweep reads the same files for each cell (300 cells: 2 s instead of 7 s)."""
    loader = YamlLoader(text)
    loader.problems = []
    node = loader.get_single_node()
    if node is None:
        return None, []
    if count_nodes(node, {}) > MAX_NODES:
        raise yaml.YAMLError(f"more than {MAX_NODES:,} values, those that aliases repeat included. Shorten it")
    return loader.construct_document(node), loader.problems


def count_nodes(node: yaml.Node, counts: dict[int, int]) -> int:
    """Number of nodes with aliases expanded, possibly exponential.
    counts: nodes already counted, by id; 0 while in progress, for a node that contains itself."""
    if id(node) not in counts:
        counts[id(node)] = 0
        children = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [each for pair in node.value for each in pair]
        counts[id(node)] = 1 + sum(count_nodes(child, counts) for child in children)
    return counts[id(node)]


def read(text: str) -> tuple[Any, list[str]]:
    """The value of a YAML document, and the problems found in it.  After a syntax error the value is None."""
    try:
        return copy.deepcopy(_parse(text))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        return None, [f"{line}not YAML: {error.problem}. Quote text that has : # * & @ or % in it; indent with spaces"]
    except RecursionError:
        return None, ["nested too deeply. A value is a scalar or a list of scalars"]
    except ReaderError as error:
        return None, [f"not YAML: {' '.join(str(error).split())}. Save it as UTF-8 text"]
    except (ValueError, KeyError, AttributeError):  # from explicit tags
        return None, ["a tag does not fit its value, as in `!!int twelve`. Remove the tag, or correct the value"]
    except yaml.YAMLError as error:  # raised in this module
        return None, [str(error)]


def write(tree: dict) -> str:
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, width=120)
