"""Metal text to C++ text: what the compiler's preprocessor cannot do.

Three things are rewritten, line by line in place, so that the compiler's messages name the lines of the kernel:
comments go, declarations of threadgroup variables become references into the threadgroup's memory, and attributes
``[[...]]`` go once the kernel's parameters have been read from them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class MetalError(RuntimeError):
    """A kernel that cannot be built, or that did what no kernel may do."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    kind is "buffer" or the name of a built-in value; index counts buffers.
    """

    name: str
    kind: str
    index: int = 0


SIZE3_BUILTINS = {
    "thread_position_in_grid": "position_in_grid",
    "thread_position_in_threadgroup": "position_in_threadgroup",
    "threadgroup_position_in_grid": "threadgroup_position",
    "threadgroups_per_grid": "threadgroups_per_grid",
    "threads_per_grid": "threads_per_grid",
    "threads_per_threadgroup": "threads_per_threadgroup",
}
# Built-in values as C++ expressions of the running thread.
BUILTINS = {name: f"msl_thread->{field}" for name, field in SIZE3_BUILTINS.items()} | {
    "thread_index_in_threadgroup": "msl_thread->index_in_threadgroup",
    "thread_index_in_simdgroup": "msl_thread->lane",
    "simdgroup_index_in_threadgroup": "msl_thread->simdgroup",
}

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_ATTRIBUTE = re.compile(r"\[\[.*?\]\]", re.DOTALL)
_TYPE = re.compile(r"\s*(?:const\s+)?[\w:]*(\s*<)?")
_THREADGROUP = re.compile(r"\bthreadgroup\b")
_DIRECTIVES_AT_END = re.compile(r"(?:^[ \t]*#[^\n]*\n\s*)+\Z", re.MULTILINE)
_LINE_DIRECTIVE = re.compile(r'^#line (\d+) "([^"]*)"\n', re.MULTILINE)
_DECLARATOR = re.compile(r"\s*(\w+)\s*((?:\[[^\]]*\]\s*)*)", re.DOTALL)


def strip_comments(text: str) -> str:
    """Replace comments by blanks; lines stay where they are."""

    def blank(match: re.Match[str]) -> str:
        found = match.group(0)
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return _COMMENT_OR_STRING.sub(blank, text)


def split_at_commas(text: str) -> list[str]:
    """Split at the commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def skip_template_arguments(text: str, at: int) -> int:
    """Return the position behind the ``>`` that closes the ``<`` before `at`."""
    depth = 1
    while depth and at < len(text):
        depth += (text[at] == "<") - (text[at] == ">")
        at += 1
    return at


def strip_attributes(text: str) -> str:
    """Remove ``[[...]]`` and the keyword kernel."""
    return re.sub(r"\bkernel\s+(?=void\b)", "", _ATTRIBUTE.sub("", text))


def _reference(kind: str, variable: str, dimensions: str) -> str:
    """The C++ that stands for ``threadgroup kind variable[dimensions]``."""
    array = f"{kind} {dimensions}".strip()
    return f'auto& {variable} = ::msl::threadgroup_variable<{array}>([] {{ return "{variable}"; }})'


def _skip_type(text: str, at: int) -> int:
    """Return where the type that begins at `at` ends: a name, and what it has in ``<...>``."""
    name = _TYPE.match(text, at)
    assert name is not None
    return skip_template_arguments(text, name.end()) if name.group(1) else name.end()


def _place(text: str, at: int, name: str) -> str:
    """Return "file:line" of a position, as the ``#line`` directives before it count."""
    first, start = 1, 0
    for match in _LINE_DIRECTIVE.finditer(text, 0, at):
        first, name, start = int(match.group(1)), match.group(2), match.end()
    return f"{name}:{first + text.count(chr(10), start, at)}"


def rewrite_threadgroup_variables(text: str, name: str, declare: Callable[[str, str, str], str] = _reference) -> str:
    """Turn ``threadgroup T a[N], b;`` into references to the threadgroup's memory; leave pointers alone."""
    done, last = [], 0
    for match in _THREADGROUP.finditer(text):
        end_of_type = _skip_type(text, match.end())
        rest = text[end_of_type:].lstrip()
        place = _place(text, match.start(), name)
        if rest[:1] in ("*", "&", "(", ")", ">", ",") or text[: match.start()].rstrip().endswith(("#define", "<")):
            continue
        semicolon = text.find(";", end_of_type)
        before = _DIRECTIVES_AT_END.sub("", text[: match.start()]).rstrip()
        declarators = split_at_commas(text[end_of_type:semicolon])
        if before[-1:] not in (";", "{", "}", ")") or semicolon < 0 or match.start() < last:
            raise MetalError(f"[{place}] threadgroup variables are declared by a statement of their own")
        rewritten = []
        for declarator in declarators:
            parsed = _DECLARATOR.fullmatch(declarator)
            if not parsed:
                raise MetalError(f"[{place}] not a threadgroup variable ({declarator.strip()})")
            variable, dimensions = parsed.groups()
            rewritten.append(declare(text[match.end() : end_of_type].strip(), variable, dimensions))
        lines = "\n" * text.count("\n", match.start(), semicolon)
        done += [text[last : match.start()], "; ".join(rewritten), lines]
        last = semicolon
    return "".join([*done, text[last:]])


def parse_parameters(text: str, function: str) -> list[Parameter]:
    """Read a kernel's parameters and what they are bound to. Without an attribute, buffers are numbered in order."""
    for match in re.finditer(rf"\bvoid\s+{re.escape(function)}\s*\(", text):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        if text[end:].lstrip().startswith("{"):
            break
    else:
        raise MetalError(f"[{function}] no such kernel in the text")
    parameters, next_buffer = [], 0
    for part in split_at_commas(text[match.end() : end - 1]):
        attribute = " ".join(_ATTRIBUTE.findall(part))
        names = re.findall(r"\w+", _ATTRIBUTE.sub("", part))
        if not names:
            continue
        if bound := re.search(r"\bbuffer\s*\(\s*(\d+)\s*\)", attribute):
            parameter = Parameter(names[-1], "buffer", int(bound.group(1)))
        elif not attribute:
            parameter = Parameter(names[-1], "buffer", next_buffer)
        else:
            kind = re.sub(r"[\[\]\s]", "", attribute)
            if kind not in BUILTINS:
                raise MetalError(f"[{function}] the attribute of parameter {names[-1]} is not supported ({attribute})")
            parameter = Parameter(names[-1], kind)
        if parameter.kind == "buffer":
            next_buffer = parameter.index + 1
        parameters.append(parameter)
    return parameters


def entry_point(function: str, template: str, parameters: Sequence[Parameter]) -> str:
    """C++ that binds the parameters and calls the kernel, and that tells the runtime its threadgroup variables."""
    bound = []
    for i, parameter in enumerate(parameters):
        kind = f"Parameters_::at<{i}>"
        if parameter.kind == "buffer":
            bound.append(f"::msl::bind_buffer<{kind}>({parameter.index})")
        else:
            bound.append(f"::msl::bind_builtin<{kind}>({BUILTINS[parameter.kind]})")
    instance = f"{function}<{template}>" if template else function
    return (
        '\n#line 1 "entry point"\n#define MSL_EXPORT extern "C" __attribute__((visibility("default")))\n'
        "MSL_EXPORT ::msl::ThreadgroupVariable** msl_variables() { return &::msl::threadgroup_variables; }\n"
        f"MSL_EXPORT void msl_kernel() {{\n  constexpr auto kernel_ = &{instance};\n"
        "  using Parameters_ [[maybe_unused]] = ::msl::Parameters<std::remove_const_t<decltype(kernel_)>>;\n"
        f"  kernel_({', '.join(bound)});\n}}\n"
    )


def translate(source: str, function: str, template: str, prelude: str = "") -> tuple[str, list[Parameter]]:
    """Return C++ text with an entry point for one instance of a kernel, and the kernel's parameters.

    `prelude` is text that goes first and counts no lines.
    """
    name = f"{function}.metal"
    text = strip_comments(source)
    parameters = parse_parameters(text, function)
    text = rewrite_threadgroup_variables(text, name)
    text = strip_attributes(text)
    head = f'#include "msl/all.h"\n{prelude}\n#line 1 "{name}"\n'
    return f"{head}{text}{entry_point(function, template, parameters)}", parameters
