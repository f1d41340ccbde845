"""The language of a sweep's `when`: comparisons, arithmetic, `and`, `or`, `not`, `in` over a configuration's keys.

    parallel.model * parallel.pipe <= 8 and (parallel.zero < 3 or not parallel.sequence)

An expression is Python's, read as a syntax tree and never run, so that a file can compute nothing else."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from spmd_lm.config.suggest import did_you_mean
from spmd_lm.errors import ConfigError

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
WORDS = {"true": True, "false": False, "null": None}  # as YAML writes them
LONGEST = 1000  # characters


class Condition:
    """An expression of `when`.  Raises ConfigError, without the name of its file, for an invalid one."""

    def __init__(self, text: str):
        self.text = text
        if len(text) > LONGEST:
            raise ConfigError(f"when: {len(text)} characters. Write several conditions, of at most {LONGEST} each.")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or "too deep"
            raise ConfigError(
                f"when: '{text:.60}' is no condition: {reason}. Write as in: parallel.model <= 4"
            ) from error

    def holds(self, keys: Mapping[str, Any]) -> bool:
        """Evaluates with values by section.key.  Raises ConfigError for an unknown key, or values that cannot be
        compared."""
        try:
            return bool(self._value(self._tree, keys))
        except ConfigError:  # a ValueError too
            raise
        except RecursionError as error:
            raise ConfigError(f"when: '{self.text:.60}' is too deep. Write several conditions.") from error
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise ConfigError(f"when: '{self.text}': {error}. Compare numbers with numbers.") from error

    def _value(self, node: ast.expr, keys: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.Name() | ast.Attribute():
                return self._of_key(ast.unparse(node), keys)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return [self._value(item, keys) for item in items]
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand, keys)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand, keys)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                return ARITHMETIC[type(op)](self._number(left, keys), self._number(right, keys))
            case ast.BoolOp(op=ast.And(), values=values):
                return all(self._value(value, keys) for value in values)
            case ast.BoolOp(values=values):
                return any(self._value(value, keys) for value in values)
            case ast.Compare(left=left, ops=ops, comparators=others) if {*map(type, ops)} <= COMPARISONS.keys():
                values = [self._value(each, keys) for each in (left, *others)]
                pairs = zip(ops, values, values[1:], strict=False)
                return all(COMPARISONS[type(op)](one, other) for op, one, other in pairs)
        what = f"when: '{self.text}' uses '{ast.unparse(node):.40}'"
        raise ConfigError(f"{what}. Use section.key, numbers, text, + - * / // %, comparisons, in, and, or, not.")

    def _number(self, node: ast.expr, keys: Mapping[str, Any]) -> int | float:
        value = self._value(node, keys)
        if not isinstance(value, int | float):  # text or a list could be multiplied to any length
            raise TypeError(f"{ast.unparse(node)} is {value!r:.40}, no number")
        return value

    def _of_key(self, name: str, keys: Mapping[str, Any]) -> Any:
        if name in WORDS:
            return WORDS[name]
        if name not in keys:
            near = did_you_mean(name, keys)
            advice = f"Did you mean {near}?" if near else "Write section.key."
            raise ConfigError(f"when: '{self.text}': there is no key {name}. {advice}")
        return keys[name]
