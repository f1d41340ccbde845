"""One self-contained HTML page: sections of cards, figures, tables and text.

Content is `Html`, made by the functions here, or a plain string, which becomes a paragraph.  Anything but Html is
escaped, so names and samples can hold anything:

    page = Page("A sweep", "12 runs")
    page.section("Results", "What was varied.", cards(figure(plots.curves(runs), "loss")), table(header, rows))
    write_atomically(path, page.html())"""

import html
import re
from collections.abc import Iterable, Mapping, Sequence

from spmd_lm.plots.style import FONTS, PIXELS_PER_INCH, WIDTH, Figure


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


Content = str  # Html, or text, which becomes a paragraph

CSS = (
    """
:root { color-scheme: light; --ink: #1f2328; --gray: #59636e; --line: #d8dee4; --pale: #f6f8fa; --accent: #0072B2 }
* { box-sizing: border-box }
body { margin: 0; background: var(--pale); color: var(--ink); line-height: 1.5; font: 16px/1.5 FONTS }
main { max-width: 1440px; margin: 0 auto; padding: 20px 10px 48px }
h1 { font-size: 28px; line-height: 1.2; margin: 8px 0 4px; overflow-wrap: anywhere }
h2 { font-size: 20px; margin: 36px 0 10px; overflow-wrap: anywhere }
h3 { font-size: 16px; margin: 20px 0 8px; overflow-wrap: anywhere }
p { margin: 6px 0; max-width: 80ch; overflow-wrap: anywhere }
.subtitle, figcaption, dt, th { color: var(--gray) }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); gap: 12px;
  margin: 12px 0 }
.card { background: white; border: 1px solid var(--line); border-radius: 8px; margin: 0; padding: 12px; min-width: 0 }
.card.wide { grid-column: 1 / -1 }
@media (min-width: 800px) { .card.medium { grid-column: span 2 } }
.scroll { overflow-x: auto }
figure svg { display: block; width: 100%; height: auto }
figcaption { font-size: 14px; margin-top: 6px; overflow-wrap: anywhere }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; margin: 12px 0 }
.facts div { background: white; border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px }
dt { font-size: 13px } dd { margin: 0; font-size: 18px; font-weight: 600; overflow-wrap: anywhere }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; background: white }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid var(--line); white-space: nowrap }
th { font-weight: 600 } tr:last-child td { border-bottom: 0 } .number { text-align: right }
.card.table { padding: 4px 0; width: fit-content; max-width: 100%; margin: 8px 0 }
details { background: white; border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; margin: 8px 0 }
details details { border: 0; padding: 0 }
@media (max-width: 600px) {
  details { padding: 8px 0 }
  details > :not(.cards) { margin-left: 12px; margin-right: 12px; max-width: calc(100% - 24px) }
}
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere }
pre { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 8px 0 }
.notice { border-left: 4px solid #D55E00; background: white; padding: 8px 12px; margin: 8px 0; overflow-wrap: anywhere }
"""
).replace("FONTS", FONTS)


class Page:
    """A page whose sections appear in the order in which they were added."""

    def __init__(self, title: str, subtitle: str = ""):
        self._title, self._subtitle = title, subtitle
        self._sections: list[str] = []

    def section(self, heading: str, *blocks: Content) -> None:
        """Adds a section of the blocks that are not empty, if any.  heading: "" for none."""
        body = join(blocks)
        if body:
            title = f"<h2>{escape(heading)}</h2>" if heading else ""
            self._sections.append(f"<section>\n{title}\n{body}\n</section>")

    def html(self) -> str:
        subtitle = f'<p class="subtitle">{escape(self._subtitle)}</p>' if self._subtitle else ""
        head = (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title>{escape(self._title)}</title>\n<link rel="icon" href="data:,">\n<style>{CSS}</style>\n</head>'
        )
        body = "\n".join([f"<header>\n<h1>{escape(self._title)}</h1>\n{subtitle}\n</header>", *self._sections])
        return f"{head}\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"


def escape(text: object) -> Html:
    """Html unchanged; anything else as text, without characters that HTML forbids."""
    if isinstance(text, Html):
        return text
    visible = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(text).replace("\r\n", "\n"))
    return Html(html.escape(visible))


def join(blocks: Iterable[Content]) -> Html:
    return Html("\n".join(block if isinstance(block, Html) else f"<p>{escape(block)}</p>" for block in blocks if block))


def figure(picture: Figure, name: str, caption: str = "", about: str = "") -> Html:
    """A picture in a card, which scrolls sideways if it is wider than a phone.

    name: unique on the page, of letters, digits, - and _; data-figure, and prefix of all ids.
    about: text for readers who cannot see it; by default the caption or the name."""
    assert re.fullmatch(r"[\w-]+", name), name
    label = escape(about or caption or name.replace("-", " "))
    width = picture.get_size_inches()[0] * PIXELS_PER_INCH
    wide = width > 1.05 * WIDTH * PIXELS_PER_INCH
    kind = "card" if not wide else "card medium" if width < 2 * WIDTH * PIXELS_PER_INCH else "card wide"
    svg = picture.to_svg(name)
    box = f"min-width:{width:.0f}px;max-width:{(1.15 if wide else 1.4) * width:.0f}px"
    svg = re.sub(r'style="min-width:\d+px"', f'role="img" aria-label="{label}" style="{box}"', svg, count=1)
    text = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    scroll = f'<div class="scroll" tabindex="0" role="group" aria-label="{label}">' if wide else '<div class="scroll">'
    return Html(f'<figure class="{kind}" data-figure="{name}">{scroll}{svg}</div>{text}</figure>')


def cards(*blocks: Content) -> Html:
    """Blocks side by side, as many as fit."""
    return Html(f'<div class="cards">{join(blocks)}</div>') if any(blocks) else Html()


def card(heading: str, *blocks: Content) -> Html:
    return Html(f'<div class="card"><h3 style="margin-top:0">{escape(heading)}</h3>{join(blocks)}</div>')


def facts(values: Mapping[str, object]) -> Html:
    """The most important numbers, each beneath its name."""
    boxes = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return Html(f'<dl class="facts">{"".join(boxes)}</dl>')


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table; right-aligns columns whose cells all begin with a digit or a dash, or are empty."""
    cells = [[escape(cell) for cell in row] for row in rows]
    right = [all(re.match(r"[-–−\d]|$", cell) for cell in column) for column in zip(*cells, strict=True)]
    right = right or [False] * len(header)

    def line(tag: str, row: Sequence[object]) -> str:
        styled = zip(row, right, strict=True)
        return "".join(f"<{tag}{' class=number' * number}>{escape(cell)}</{tag}>" for cell, number in styled)

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in cells)
    return Html(
        '<div class="card table scroll" tabindex="0" role="group" aria-label="table"><table>'
        f"<thead><tr>{line('th', header)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def details(summary: str, *blocks: Content) -> Html:
    """Blocks hidden until their summary is clicked."""
    return Html(f"<details><summary>{escape(summary)}</summary>{join(blocks)}</details>") if any(blocks) else Html()


def preformatted(text: str) -> Html:
    return Html(f"<pre>{escape(text)}</pre>")


def notice(text: str) -> Html:
    return Html(f'<div class="notice">{escape(text)}</div>')
