"""YAML as people mean it: the 1.2 core schema on PyYAML's safe loader.

PyYAML reads YAML 1.1, where `3e-4` is text, `no` is false, `010` is 8, `1:30` is 90 and the last of two equal keys
wins.  Here they are a number, text, 10, text and an error.  The writer quotes by the same rules, so that what it writes
reads back equal."""

import re
from typing import Any

import yaml

SCHEMA = (  # tag, what is written, the first characters by which PyYAML looks a pattern up ("" is the empty value)
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+", [*"-+0123456789"]),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
)


DIGITS = 18  # of a whole number, at most: what fits 64 bits, and more than any key means


class Unfit(yaml.YAMLError):
    """YAML, but nothing that a configuration holds."""


class Reader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's registry, one for each class

    def __init__(self, text: str):
        super().__init__(text)
        self.problems: list[str] = []

    def mapping(self, node: yaml.MappingNode) -> dict:
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, line) != line:
                self.problems.append(
                    f"line {line}: key '{key.value}' is there already, on line {first[key.value]}. Remove one"
                )
        return self.construct_mapping(node, deep=True)  # deep: an alias inside its own anchor is then an error

    def decimal(self, node: yaml.ScalarNode) -> int:
        digits = len(node.value.lstrip("+-0"))
        if digits > DIGITS:
            line = node.start_mark.line + 1
            raise Unfit(
                f"line {line}: a whole number of {digits} digits; {DIGITS} are the most. Quote it if it is text"
            )
        return int(node.value)


class Writer(yaml.SafeDumper):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's registry, one for each class

    def ignore_aliases(self, data: Any) -> bool:
        return True


Reader.add_constructor("tag:yaml.org,2002:map", Reader.mapping)
Reader.add_constructor("tag:yaml.org,2002:int", Reader.decimal)
for tag, pattern, first in SCHEMA:
    for end in (Reader, Writer):
        end.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


def read(text: str) -> tuple[Any, list[str]]:
    """The value of a YAML document and what is wrong with it, in words; after an error of syntax the value is None."""
    reader = None
    try:
        reader = Reader(text)
        return reader.get_single_data(), reader.problems
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        return None, [f"{line}not YAML: {error.problem}. Quote text that has : # * & @ or % in it; indent with spaces"]
    except Unfit as error:
        return None, [str(error)]
    except RecursionError:
        return None, ["nested too deep. A value is a scalar or a list of them"]
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an explicit tag, as in `!!int twelve`
        return None, [f"not YAML: {' '.join(str(error).split())}. Save it as UTF-8 text"]
    finally:
        if reader:
            reader.dispose()


def write(tree: dict) -> str:
    return yaml.dump(tree, Dumper=Writer, sort_keys=False, width=120)
