"""Formulas as MathML, which browsers draw themselves: a math renderer for Sphinx that needs no script and no network."""

import re

from latex2mathml.converter import convert

MINUS, INFINITY, BAR, CLOSED = "&#x02212;", "&#x0221E;", "&#x0007C;", "&#x00029;"
BESIDE = (  # what TeX does and latex2mathml leaves out
    (re.compile(r"\\_"), "_"),
    # a word of \mathrm is one identifier, not letter by letter
    (re.compile(r'(?:<mi mathvariant="normal">\w</mi>){2,}'), lambda word: f"<mi>{re.sub('<.*?>', '', word[0])}</mi>"),
    # no space around infinity, nor inside of bars
    (re.compile(f"<mo>{INFINITY}</mo>"), f"<mi>{INFINITY}</mi>"),
    (re.compile(f'<mo stretchy="false">{BAR}</mo>'), f'<mo stretchy="false" lspace="0" rspace="0">{BAR}</mo>'),
    # a minus after a relation or an opening parenthesis is a sign
    (re.compile(f"(<mo[^>]*>(?!{CLOSED}|{BAR})[^<]+</mo>)<mo>{MINUS}</mo>"), rf'\1<mo form="prefix">{MINUS}</mo>'),
)


def mathml(tex: str, display: bool) -> str:
    """A formula as a ``<math>`` element; ValueError if it has a command that is not known, which would be shown as it is written."""
    found = convert(tex, display="block" if display else "inline")
    for pattern, replacement in BESIDE:
        found = pattern.sub(replacement, found)
    if unknown := re.search(r"\\\w*", found):
        raise ValueError(f"{unknown[0]} cannot be shown, in the formula {tex}")
    return found


def visit_inline(translator, node):
    from docutils.nodes import SkipNode  # Sphinx's: to turn a formula into MathML takes less

    translator.body.append(mathml(node.astext(), display=False) + "&#x2060;")  # no line begins with the comma after a formula
    raise SkipNode


def visit_display(translator, node):
    from docutils.nodes import SkipNode

    translator.body.append(f'<div class="formula">{mathml(node.astext(), display=True)}</div>\n')
    raise SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", inline_renderers=(visit_inline, None), block_renderers=(visit_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
