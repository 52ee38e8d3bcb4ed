"""Random JSON schemas, each with a predicate that says what fits it. The predicates do not read the schemas."""

import re


def form(draw, depth=2):
    """(schema, predicate) of values that end soon, whatever a random model writes."""
    kinds = [_whole, _text, _choice, _truth] + ([_record, _record, _list] if depth else [])
    return draw.choice(kinds)(draw, depth)


def record(draw):
    """The same of an object, as the arguments of a tool are."""
    return _record(draw, 1)


def _whole(draw, depth):
    low = draw.randrange(-20, 20)
    high = low + draw.randrange(40)
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return schema, lambda value: type(value) is int and low <= value <= high


def _text(draw, depth):
    if draw.random() < 0.5:
        most = draw.randrange(1, 6)
        return {"type": "string", "maxLength": most}, lambda value: isinstance(value, str) and len(value) <= most
    pattern = draw.choice(["[a-f]{2,4}", "(yes|no)!?", "x[0-9]{3}"])
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    return schema, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _choice(draw, depth):
    few = draw.sample(["red", 'a"b', 5, None, True, "é漢", ""], 3)
    return {"enum": few}, lambda value: any(type(value) is type(one) and value == one for one in few)


def _truth(draw, depth):
    return {"type": "boolean"}, lambda value: isinstance(value, bool)


def _list(draw, depth):
    (inner, fits), most = form(draw, depth - 1), draw.randrange(1, 4)
    schema = {"type": "array", "items": inner, "maxItems": most, "minItems": 1}
    return schema, lambda value: isinstance(value, list) and 1 <= len(value) <= most and all(map(fits, value))


def _record(draw, depth):
    fields = {name: form(draw, depth - 1) for name in draw.sample(["a", "b c", "ü", 'q"', "n"], draw.randrange(1, 4))}
    needed = [name for name in fields if draw.random() < 0.7]
    schema = {
        "type": "object",
        "properties": {name: inner for name, (inner, _) in fields.items()},
        "required": needed,
        "additionalProperties": False,
    }

    def fits(value):
        is_known = isinstance(value, dict) and set(needed) <= set(value) <= set(fields)
        return is_known and all(fields[name][1](one) for name, one in value.items())

    return schema, fits
