"""A self-contained HTML page: text, tables, pictures as SVG; no scripts, fonts or external files.
Wide tables scroll below a fixed first column; on paper their rows are cards. Paper has the parts that are unfolded."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from hpcdl.errors import printable
from hpcdl.formatting import counted
from hpcdl.reports.figures import DASHES, OURS, Key

STYLE = """
:root{color-scheme:light dark;--ink:#1a1b1c;--soft:#5a5f66;--grid:#d9dce0;--paper:#fff;--card:#f5f6f8;--link:#0b5cad}
@media (prefers-color-scheme:dark){:root{--ink:#e9eaec;--soft:#a3a9b2;--grid:#3a3f47;--paper:#15171a;--card:#1e2126;
--link:#7ab7f5}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:84rem;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.2}h2{font-size:1.2rem;margin:2rem 0 .5rem;line-height:1.25}
h3{font-size:1rem;margin:1.4rem 0 .4rem}p{margin:.4rem 0}a{color:var(--link)}
.soft,figcaption p,.about{color:var(--soft)}code{font-size:.92em}
ul.missing{margin:.6rem 0;padding:.5rem .8rem .5rem 1.7rem;background:var(--card);border-left:3px solid #e69f00}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,19.5rem),1fr));gap:1.4rem 1.6rem;
margin:1rem 0;align-items:start}
figure{margin:0;break-inside:avoid;min-width:0}figcaption h4{margin:0;font-size:.95rem}
figcaption p,figure>p{margin:.2rem 0 0;font-size:.85rem;color:var(--soft)}
figure svg{display:block;width:100%;max-width:30rem;height:auto}
ul.keys{list-style:none;margin:.15rem 0 0;padding:0;display:flex;flex-wrap:wrap;gap:0 .9rem;font-size:.8rem}
ul.keys li{min-width:0}ul.keys svg{display:inline-block;width:1.7rem;height:.65rem;margin-right:.3rem}
table{border-collapse:collapse;width:100%;font-size:.86rem;margin:.6rem 0}
th,td{text-align:left;vertical-align:top;padding:.28rem .5rem;border-bottom:1px solid var(--grid)}
th{font-weight:600}td small{display:block;color:var(--soft)}tr{break-inside:avoid}
table.about{max-width:52rem}
table.about th{width:13rem;font-weight:400;color:var(--soft)}table.about td{color:var(--ink)}
.verdict{padding:.6rem .8rem;background:var(--card);border-left:3px solid var(--link);font-size:1.05rem}
.scroll{overflow-x:auto;margin:.6rem 0}table.wide{margin:0}table.wide th{vertical-align:bottom}
table.wide td{min-width:9rem;max-width:14rem}
table.wide :is(th,td):first-child{position:sticky;left:0;min-width:min(15rem,38vw);max-width:min(20rem,38vw);
background:var(--paper);border-right:1px solid var(--grid)}
.failed{color:#d55e00;font-weight:600}
details{margin:.5rem 0}summary{cursor:pointer;font-weight:600}
nav ol{columns:18rem;padding-left:1.6rem;font-size:.9rem}
@media (max-width:30rem){table.about th{width:8.5rem}body{padding:.75rem}}
@media print{:root{color-scheme:light;--ink:#000;--soft:#444;--grid:#ccc;--paper:#fff;--card:#f5f6f8;--link:#000}
body{max-width:none;padding:0;font-size:10pt}.pictures{grid-template-columns:1fr 1fr}nav{display:none}
.scroll{overflow:visible}table.wide{font-size:8pt}
table.wide,table.wide tbody{display:block}table.wide thead{display:none}
table.wide tr{display:grid;grid-template-columns:repeat(auto-fill,minmax(24mm,1fr));padding:.3rem 0}
table.wide tr{border-bottom:1px solid var(--grid)}
table.wide :is(td,td:first-child){border:0;min-width:0;max-width:none;padding:.1rem .3rem}
table.wide td:first-child{position:static;grid-column:1/-1;font-weight:600}
table.wide td:not(:first-child)::before{content:attr(data-name);display:block;color:var(--soft)}
h2,h3,summary{break-after:avoid}*{print-color-adjust:exact}}
"""


class Drawn(NamedTuple):
    """A picture of the page. svg: its drawing. Title, sentence and legend (keys) are text of the page."""

    title: str
    sentence: str
    keys: Sequence[Key]
    svg: str


def text(value: object) -> str:
    """Return a user's text escaped for HTML, printable characters only."""
    return escape(printable(value))


def page(title: str, parts: Iterable[str]) -> str:
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="generator" content="{OURS}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{text(title)}</h1>\n"
    )
    return head + "\n".join(parts) + "\n</body>\n</html>\n"


def section(title: str, anchor: str, parts: Iterable[str]) -> str:
    return f'<section id="{anchor}">\n<h2>{text(title)}</h2>\n' + "\n".join(filter(None, parts)) + "\n</section>"


def contents(entries: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f'<li><a href="#{anchor}">{text(title)}</a></li>' for anchor, title in entries)
    return f"<nav><ol>{rows}</ol></nav>"


def folded(title: str, body: str, unfolded: bool = False) -> str:
    """Return a part that a click unfolds or folds."""
    begin = f"<details{' open' * unfolded}><summary>"
    return f"{begin}{text(title)}</summary>\n{body}\n</details>" if body else ""


def paragraph(said: str, look: str = "soft") -> str:
    return f'<p class="{look}">{text(said)}</p>' if said else ""


def missing(said: Sequence[str]) -> str:
    rows = "".join(f"<li>{text(each)}</li>" for each in said)
    return f'<ul class="missing">{rows}</ul>' if rows else ""


def facts(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th>{text(name)}</th><td>{text(said)}</td></tr>" for name, said in rows)
    return f'<table class="about">{body}</table>' if body else ""


class Cell(NamedTuple):
    """A cell of a table: text (said), smaller text below (more). failed: reports a failure. key: drawn before text."""

    said: str
    more: str = ""
    failed: bool = False
    key: Key | None = None


def table(names: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table with a row of names; the last cell of a shorter row spans the missing columns."""
    head = "".join(f"<th>{text(name)}</th>" for name in names)
    body = ""
    for row in rows:
        body += "<tr>"
        for place, cell in enumerate(row):
            wide = f' colspan="{len(names) - place}"' if place == len(row) - 1 and len(row) < len(names) else ""
            look = ' class="failed"' if cell.failed else ""
            more = f"<small>{text(cell.more)}</small>" if cell.more else ""
            mark = swatch(cell.key) if cell.key else ""
            name = "" if wide else names[place]
            body += f'<td data-name="{text(name)}"{wide}{look}><span>{mark}{text(cell.said)}{more}</span></td>'
        body += "</tr>"
    inside = f'<table class="wide"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll" tabindex="0">{inside}</div>'  # tabindex: keys scroll it, too


def swatch(key: Key) -> str:
    """Return the legend symbol of a line or an area."""
    if key.style is None:
        inside = f'<rect width="27" height="10" fill="{key.colour}"/>'
    else:
        dash = f' stroke-dasharray="{DASHES[key.style]}"' if DASHES[key.style] else ""
        inside = f'<path d="M0 5h27" stroke="{key.colour}" stroke-width="2.4"{dash}/>'
    return f'<svg viewBox="0 0 27 10" aria-hidden="true" style="width:1.7rem;height:.65rem">{inside}</svg> '


def figures(drawn: Sequence[Drawn], unfolded: int) -> str:
    """Return a grid of pictures, so many of them unfolded: title and legend, drawing, a sentence on how to read it."""
    first, rest = (
        f'<div class="pictures">{"".join(map(figure, some))}</div>' if some else ""
        for some in (drawn[:unfolded], drawn[unfolded:])
    )
    return first + folded(counted(len(drawn[unfolded:]), "more picture" if first else "picture"), rest)


def figure(drawn: Drawn) -> str:
    keys = "".join(f"<li>{swatch(key)}{text(key.label)}</li>" for key in drawn.keys)
    legend = f'<ul class="keys">{keys}</ul>' if keys else ""
    caption = f"<figcaption><h4>{text(drawn.title)}</h4>{legend}</figcaption>"
    return f"<figure>{caption}{drawn.svg}<p>{text(drawn.sentence)}</p></figure>"
