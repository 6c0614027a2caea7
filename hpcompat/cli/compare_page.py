"""A page that needs nothing else: the first divergence, the tables, and how the differences grow over the steps."""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path

import matplotlib
from jinja2 import Environment
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hpcompat.cli.compare_file import Comparison, Row
from hpcompat.cli.compare_report import by_kind, option_notes, totals, verdict
from hpcompat.record import PHASES

# Told apart by people who do not see all colours, too.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
MARKERS = "os^Dv<>"

TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>hpcompat compare</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin-bottom: 1.5rem }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
caption { text-align: left; font-weight: bold }
.differs, .problem { color: #b3261e }
svg { max-width: 100%; height: auto }
</style>
<h1>hpcompat compare</h1>
<p>{% for run in runs %}{{ "AB"[loop.index0] }}: <code>{{ run.directory }}</code>, {{ run.label }}<br>{% endfor %}</p>
<p><strong>{{ verdict }}</strong></p>
{% for line in notes %}<p>{{ line }}</p>
{% endfor %}{% for line in problems %}<p class="problem">{{ line }}</p>
{% endfor %}<h2>Growth over the steps</h2>
{{ plot | safe }}
<h2>Phases</h2>
{% for phase, kinds in phases.items() %}<table><caption>{{ phase }}</caption>
<tr><th>kind<th>tensors<th>elements<th>differing<th>largest ULP<th>largest abs<th>first at step</tr>
{% for kind, row in kinds.items() %}<tr{% if row.differing %} class="differs"{% endif %}><td>{{ kind }}
<td>{{ row.tensors }}<td>{{ row.elements }}<td>{{ row.differing }}<td>{{ row.max_ulp }}
<td>{{ "inf" if row.max_abs is none else "%.3g" | format(row.max_abs) }}
<td>{{ "" if row.first_step is none else row.first_step }}</tr>
{% endfor %}</table>
{% endfor %}</html>
"""


def write_page(comparison: Comparison, *, out: Path) -> None:
    """Write the page to ``out``."""
    phases = {}
    for phase in PHASES:
        rows = [row for row in comparison.rows if row.phase == phase]
        if rows:
            phases[phase] = {kind: totals(members) for kind, members in by_kind(rows).items()}
    page = Environment(autoescape=True).from_string(TEMPLATE)
    text = page.render(
        runs=comparison.runs,
        verdict=verdict(comparison),
        notes=option_notes(comparison),
        problems=comparison.problems,
        phases=phases,
        plot=_plot(comparison.rows),
    )
    out.write_text(text, encoding="utf-8")


def _plot(rows: list[Row]) -> str:
    """The picture as an element of the page: for each kind, the largest difference of each step."""
    # Text stays text, and the same comparison gives the same file.
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "hpcompat"}):
        figure = Figure(figsize=(9, 5.4), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        for place, (kind, members) in enumerate(by_kind(rows).items()):
            ulps: dict[int, int] = defaultdict(int)
            counts: dict[int, int] = defaultdict(int)
            for row in members:
                ulps[row.step] = max(ulps[row.step], row.difference.max_ulp)
                counts[row.step] = max(counts[row.step], row.difference.num_differing)
            style = {"color": COLORS[place % 7], "marker": MARKERS[place % 7], "markersize": 3, "linewidth": 1}
            upper.plot(list(ulps), [float(ulp) for ulp in ulps.values()], label=kind, **style)
            lower.plot(list(counts), list(counts.values()), **style)
        for axes, title in ((upper, "largest difference in ULP"), (lower, "differing elements of one tensor, at most")):
            axes.set_yscale("symlog", linthresh=1)
            axes.set_ylim(bottom=0)
            axes.set_title(title, loc="left", fontsize=9)
            axes.grid(color="#EEEEEE", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        lower.set_xlabel("step")
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside upper right", ncols=4, frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]
