"""The page of the report: a frame, the sections of each mode, and their style, as Jinja templates."""
# ruff: noqa: E501  (lines of HTML)

STYLE = """
:root { color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, "DejaVu Sans Mono", monospace;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2430; --muted: #5c6877; --line: #dfe3e9;
  --accent: #1f6fb8; --soft: #e7f0f9; --warn: #a84300; --warn-soft: #fdeee2; --good: #1d7a46; }
@media (prefers-color-scheme: dark) { :root {
  --page: #11151a; --card: #1a2027; --ink: #e6eaef; --muted: #98a4b3; --line: #303944;
  --accent: #6cb2f0; --soft: #1d3348; --warn: #ffb27a; --warn-soft: #3a2a1e; --good: #6fd39b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 var(--font);
  -webkit-text-size-adjust: 100%; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 20px 64px; }
header .eyebrow { color: var(--muted); font-size: 14px; margin: 0 0 8px; overflow-wrap: anywhere; }
h1 { font-size: clamp(27px, 4.4vw, 42px); line-height: 1.15; letter-spacing: -.02em; margin: 0 0 12px;
  max-width: 24em; text-wrap: balance; overflow-wrap: anywhere; }
header .lead { font-size: clamp(17px, 2vw, 19px); color: var(--muted); margin: 0; max-width: 46em; }
header .lead b { color: var(--ink); font-weight: 600; }
h2 { font-size: 21px; letter-spacing: -.01em; line-height: 1.25; margin: 48px 0 4px; }
h3 { font-size: 16px; margin: 0 0 2px; }
p.about { color: var(--muted); margin: 0 0 16px; max-width: 52em; }
.tiles { display: grid; grid-template-columns: repeat(var(--columns), 1fr); gap: 12px;
  margin-top: 28px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.tile { padding: 14px 16px; }
.tile .value { font-size: 27px; font-weight: 650; letter-spacing: -.02em; line-height: 1.2;
  font-variant-numeric: tabular-nums; }
.tile .value small { font-size: 16px; font-weight: 500; color: var(--muted); }
.tile .name { font-size: 13px; color: var(--muted); line-height: 1.35; }
.tile.first { background: var(--soft); border-color: transparent; }
.tile.first .value { color: var(--accent); }
.card { padding: 18px 20px; min-width: 0; }
.card > p { color: var(--muted); font-size: 14px; margin: 0 0 8px; }
.card svg { display: block; width: 100%; height: auto; color: var(--ink); }
.pair { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); }
.pair > .card:only-child { grid-column: 1 / -1; }
.pair > .card:only-child svg { max-width: 640px; margin: 0 auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 15px; }
th { text-align: left; font-weight: 500; color: var(--muted); font-size: 13px; }
th, td { padding: 8px 12px; border-bottom: 1px solid var(--line); vertical-align: middle; }
tbody tr:last-child > * { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tbody th { font-size: 15px; color: var(--ink); min-width: 11em; }
tbody th small { display: block; color: var(--muted); font-weight: 400; font-size: 13px; line-height: 1.35; }
thead tr:not(:last-child) th { border-bottom: 0; }
th.group { padding-bottom: 0; text-align: center; color: var(--ink); }
tr.ours > * { background: var(--soft); }
tr.ours td, tr.ours th { font-weight: 650; }
tr.bound > * { color: var(--muted); font-style: italic; }
.bar { display: block; height: 4px; border-radius: 2px; background: var(--accent); margin: 3px 0 0 auto; }
tr.base .bar, tr.bound .bar { background: var(--muted); opacity: .55; }
.note { background: var(--warn-soft); color: var(--warn); border-radius: 10px; padding: 10px 14px;
  margin: 0 0 16px; font-size: 15px; }
.card > p.calm { color: var(--good); }
.missing { color: var(--muted); font-style: italic; margin: 8px 0; }
.clusters { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
.cluster { padding: 12px 14px; }
.cluster h3 { display: flex; gap: 8px; align-items: baseline; font-size: 15px; margin: 0; }
.cluster h3 i { flex: none; width: 11px; height: 11px; border-radius: 50%; }
.cluster h3 span { overflow-wrap: anywhere; }
.cluster p { margin: 0 0 8px 19px; color: var(--muted); font-size: 13px; }
.strip { display: grid; grid-template-columns: repeat(var(--columns), 1fr); gap: 4px; }
.strip img { width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: 5px; display: block;
  background: var(--page); }
.strip img.photo { object-fit: cover; }
.strip img.tiny { image-rendering: pixelated; }
.times { display: flex; height: 14px; border-radius: 7px; overflow: hidden; margin: 6px 0 12px; gap: 2px; }
.times span { min-width: 2px; }
.key { font-size: 14px; padding: 0; margin: 0; list-style: none; }
.key li { display: flex; align-items: center; padding: 5px 0; border-bottom: 1px solid var(--line); }
.key li:last-child { border-bottom: 0; }
.key b { margin-left: auto; font-weight: 500; font-variant-numeric: tabular-nums; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
details { margin-top: 16px; }
summary { cursor: pointer; font-weight: 600; }
details[open] summary { margin-bottom: 10px; }
dl { columns: 3 300px; column-gap: 36px; margin: 0; font-size: 14px; }
dl div { display: flex; justify-content: space-between; gap: 14px; border-bottom: 1px solid var(--line);
  padding: 4px 0; break-inside: avoid; }
dt { color: var(--muted); } dd { margin: 0; text-align: right; overflow-wrap: anywhere; min-width: 0; }
dt, dd, code, pre { font-family: var(--mono); font-size: 13px; }
pre { background: var(--page); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px;
  overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; margin: 8px 0; }
.tag { font-size: 12px; font-weight: 600; border-radius: 999px; padding: 1px 9px; background: var(--soft);
  color: var(--accent); white-space: nowrap; }
.tag.bad { background: var(--warn-soft); color: var(--warn); }
#guard > .pair, #memory > .pair { margin-top: 12px; }
.prompt { margin-bottom: 16px; }
.texts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 220px), 1fr)); }
.texts > div { min-width: 0; }
td.name { overflow-wrap: anywhere; }
.card > .times { margin-top: 12px; }
footer { margin-top: 48px; color: var(--muted); font-size: 13px; overflow-wrap: anywhere; }
@media (max-width: 560px) { main { padding: 24px 14px 48px; } .card { padding: 14px; }
  th, td { padding: 7px 8px; } .tiles { grid-template-columns: 1fr 1fr; }
  .wide .strip { grid-template-columns: repeat(7, 1fr); } }
@media print { .card, .tile { break-inside: avoid; } body { background: none; } }
"""

FRAME = """{% import "parts.html" as parts %}<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body><main>
<header>
<p class="eyebrow">{{ eyebrow }}</p>
<h1>{{ headline }}</h1>
<p class="lead">{{ lead }}</p>
<div class="tiles" style="--columns:{{ tiles | length if tiles | length < 7 else (tiles | length + 1) // 2 }}">
{% for tile in tiles %}<div class="tile{{ ' first' if loop.first }}"><div class="value">{{ tile.value }}\
{% if tile.unit %}<small> {{ tile.unit }}</small>{% endif %}</div><div class="name">{{ tile.name }}</div></div>
{% endfor %}</div>
</header>

{% block sections %}{% endblock %}
<section id="settings">
<h2>How to get this again</h2>
{% if command %}<pre>{{ command }}</pre>{% else %}<p class="missing">config.json does not hold the command.</p>{% endif %}
<p class="about">{{ precision }}</p>
<div class="card"><h3>Settings</h3>{% if settings %}{{ parts.facts(settings) }}{% else %}<p class="missing">config.json holds no settings.</p>{% endif %}</div>
<div class="card" style="margin-top:16px"><h3>Versions</h3>{% if versions %}{{ parts.facts(versions) }}{% else %}<p class="missing">config.json holds no versions.</p>{% endif %}</div>
</section>
<footer>Written by ssl_kd from the files of {{ folder }}. This page is whole: it opens offline and loads nothing.</footer>
</main></body></html>
"""

PARTS = """{% macro bar(shares) %}<div class="times">{% for t in shares %}<span style="flex:{{ t.share }};background:{{ t.colour }}"></span>{% endfor %}</div>
<ul class="key">{% for t in shares %}<li><i style="background:{{ t.colour }}"></i><span>{{ t.name }}</span><b>{{ t.text }}</b></li>{% endfor %}</ul>{% endmacro %}

{% macro events(events, n_events) %}<details class="card"{{ ' open' if events | length <= 10 }}><summary>Events{{ ', the first 200 of ' ~ n_events if n_events > 200 }}</summary>
<div class="scroll"><table><thead><tr><th class="n">step</th><th>part</th><th>stage</th><th>reason</th><th>action</th><th class="n">value</th></tr></thead><tbody>
{% for e in events %}<tr><td class="n">{{ e.step }}</td><td>{{ e.part }}</td><td>{{ e.stage }}</td><td>{{ e.reason }}</td><td>{{ e.action }}</td><td class="n">{{ e.value }}</td></tr>{% endfor %}
</tbody></table></div></details>{% endmacro %}

{% macro facts(pairs) %}<dl>{% for k, v in pairs %}<div><dt>{{ k }}</dt><dd>{{ v }}</dd></div>{% endfor %}</dl>{% endmacro %}
"""

VISION = """{% extends "frame.html" %}{% block sections %}<section id="results">
<h2>Results</h2>
{% if table.rows %}
<p class="about">Per cent; higher is better. The answer is chosen and formed without labels; labels only judge it. \
The baselines cluster the same embeddings.</p>
<div class="card scroll"><table>
<thead><tr><th></th>{% for split in table.splits %}<th class="group" colspan="3">{{ split }}</th>{% endfor %}</tr>
<tr><th>method</th>{% for split in table.splits %}<th class="n">ACC</th><th class="n">NMI</th><th class="n">ARI</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr class="{{ row.kind }}"><th scope="row">{{ row.name }}\
{% if row.note %}<small>{{ row.note }}</small>{% endif %}</th>
{% for cell in row.cells %}<td class="n">{{ cell.text }}{% if cell.width %}<span class="bar" style="width:{{ cell.width }}%"></span>{% endif %}</td>{% endfor %}
</tr>{% endfor %}</tbody></table></div>
{% else %}<p class="missing">There is no table of scores: {{ 'no sample of this data has a label' if not labelled else 'metrics.json has none' }}.</p>{% endif %}
</section>

<section id="map">
<h2>The embeddings, seen from above</h2>
{% if map_clusters %}
<p class="about">Each of the {{ map_points }} dots is one {{ noun }}, laid out by t-SNE of the teacher's embeddings. Near dots are \
alike; distances between far groups mean little.{{ ' Colours repeat beyond ten clusters: the numbers tell.' if many }}</p>
<div class="pair"><div class="card"><h3>Clusters that were found</h3>{{ map_clusters }}</div>
{% if map_labels %}<div class="card"><h3>True classes</h3>{{ map_labels }}</div>{% endif %}</div>
{% if not map_labels %}<p class="missing">There is no map of the true classes, since no label is known.</p>{% endif %}
{% else %}<p class="missing">There is no map: arrays.npz does not hold one.</p>{% endif %}
</section>

<section id="typical">
<h2>What each cluster looks like</h2>
{% if gallery.clusters %}
<p class="about">The most typical {{ noun }}s of each cluster\
{% if gallery.hidden %}; the {{ gallery.clusters | length }} largest of {{ gallery.clusters | length + gallery.hidden }} clusters{% endif %}.</p>
<div class="clusters">{% for c in gallery.clusters %}<div class="card cluster"><h3><i style="background:{{ c.colour }}"></i>\
<span>{{ c.title }}</span>{% if not c.size %} <span class="tag bad">empty</span>{% endif %}</h3><p>{{ c.about }}</p>
<div class="strip" style="--columns:{{ gallery.columns }}">{% for p in c.pictures %}<img class="{{ p.kind }}" src="{{ p.source }}" alt="{{ p.name }}" title="{{ p.name }}">{% endfor %}</div></div>
{% endfor %}</div>
{% if gallery.doubtful %}<h3 style="margin-top:24px">Where the heads disagree most</h3>
<p class="about">The {{ noun }}s with the least agreement: the first to look at.</p>
<div class="card wide"><div class="strip" style="--columns:14">{% for p in gallery.doubtful %}<img class="{{ p.kind }}" src="{{ p.source }}" alt="{{ p.name }}" title="{{ p.name }}">{% endfor %}</div></div>{% endif %}
{% else %}<p class="missing">{{ gallery.missing }}</p>{% endif %}
</section>

<section id="clusters">
<h2>Clusters</h2>
{% for text in size_warnings %}<p class="note">{{ text }}</p>{% endfor %}
<div class="pair">
{% if confusion %}<div class="card"><h3>Classes and clusters</h3><p>Per cent of each class; matched pairs lie on the diagonal.</p>{{ confusion }}</div>{% endif %}
{% if sizes %}<div class="card"><h3>Cluster sizes</h3><p>{{ size_text }}</p>{{ sizes }}</div>{% endif %}
</div>
{% if not confusion %}<p class="missing">There is no confusion matrix: {{ 'no label is known' if not labelled else 'arrays.npz does not hold one' }}.</p>{% endif %}
{% if not sizes %}<p class="missing">There are no cluster sizes in metrics.json.</p>{% endif %}
</section>

<section id="training">
<h2>Training</h2>
<p class="about">{{ training_text }}</p>
<div class="pair">
<div class="card"><h3>Loss of each head</h3>{% if curves %}{{ curves }}{% else %}<p class="missing">There are no loss curves: metrics.jsonl has no losses.</p>{% endif %}</div>
<div class="card" id="events"><h3>Guard</h3>
{% if events %}<p>{{ events_text }}</p>{% else %}<p class="calm">{{ events_text }}</p>{% endif %}
{% if times %}<h3 style="margin-top:28px">Where the time went</h3>
{{ parts.bar(times) }}{% endif %}
</div></div>
{% if events %}{{ parts.events(events, n_events) }}
{% endif %}
</section>

<section id="heads">
<h2>Heads</h2>
{% if heads %}<p class="about">{{ heads_text }}</p>
<details class="card"{{ ' open' if heads | length <= 16 }}><summary>All {{ heads | length }} heads, best first</summary>
<div class="scroll"><table><thead><tr><th class="n">head</th><th class="n">neighbour information, nats</th><th class="n">loss</th><th class="n">clusters used</th>
{% if heads_judged %}<th class="n">ACC</th>{% endif %}<th></th></tr></thead><tbody>
{% for h in heads %}<tr><td class="n">{{ h.head }}</td><td class="n">{{ h.criterion }}</td><td class="n">{{ h.loss }}</td><td class="n">{{ h.used }}</td>
{% if heads_judged %}<td class="n">{{ h.acc }}</td>{% endif %}<td>{% if h.chosen %}<span class="tag">chosen</span> {% endif %}{% if h.collapsed %}<span class="tag bad">collapsed</span>{% endif %}</td></tr>{% endfor %}
</tbody></table></div></details>{% else %}<p class="missing">There is no table of heads in metrics.json.</p>{% endif %}
</section>
{% endblock %}"""

LANGUAGE = """{% extends "frame.html" %}{% block sections %}<section id="results">
<h2>Results</h2>
{% if table.rows %}
<p class="about">{{ results_text }}</p>
<div class="card scroll"><table>
<thead><tr><th>model</th>{% for name in table.columns %}<th class="n">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr class="{{ row.kind }}"><th scope="row">{{ row.name }}{% if row.best %} <span class="tag">best</span>{% endif %}\
{% if row.note %}<small>{{ row.note }}</small>{% endif %}</th>
{% for cell in row.cells %}<td class="n">{{ cell }}</td>{% endfor %}
</tr>{% endfor %}</tbody></table></div>
{% else %}<p class="missing">There is no table of scores: metrics.json has none.</p>{% endif %}
</section>

<section id="training">
<h2>Training</h2>
<p class="about">{{ training_text }}</p>
<div class="pair">
<div class="card"><h3>Loss</h3>{% if curves %}<p>Each term before its weight; kd is times the temperature squared.</p>{{ curves }}\
{% else %}<p class="missing">There are no loss curves: metrics.jsonl has no losses.</p>{% endif %}</div>
<div class="card"><h3>Held-out perplexity</h3>{% if perplexity %}<p>{{ perplexity_text }}</p>{{ perplexity }}\
{% else %}<p class="missing">There is no curve: metrics.jsonl has no evaluation with a finite perplexity.</p>{% endif %}
{% if sick_evaluations %}<p class="note">No finite perplexity at step {{ sick_evaluations | join(', ') }}.</p>{% endif %}</div>
</div>
</section>

<section id="generations">
<h2>What they write</h2>
{% if generations %}
<p class="about">The same prompts, side by side{% if n_prompts > generations | length %}; {{ generations | length }} of {{ n_prompts }}{% endif %}.</p>
{% for one in generations %}<div class="card prompt"><h3>Prompt</h3><pre>{{ one.prompt if one.prompt is not none else '–' }}</pre>
<div class="texts">{% for text in one.texts %}<div><h3>{{ columns[loop.index0] }}</h3>\
{% if text is none %}<p class="missing">none</p>{% elif not text %}<p class="missing">nothing was written</p>{% else %}<pre>{{ text }}</pre>{% endif %}</div>{% endfor %}</div></div>
{% endfor %}
{% else %}<p class="missing">There are no generations in metrics.json.</p>{% endif %}
</section>

<section id="guard">
<h2>Guard</h2>
<div class="pair"><div class="card" id="events"><h3>What it did</h3>
{% if events %}<p>{{ events_text }}</p>
<div class="scroll"><table><thead><tr><th>part</th>{% for action in guard.actions %}<th class="n">{{ action }}</th>{% endfor %}</tr></thead><tbody>
{% for row in guard.rows %}<tr><th scope="row">{{ row.name }}</th>{% for cell in row.cells %}<td class="n">{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table></div>
{% elif watched %}<p class="calm">{{ events_text }}</p>{% else %}<p class="missing">No step was logged, so there is nothing to tell of.</p>{% endif %}
{% if success %}<p>{{ success }}</p>{% else %}<p class="missing">The success rate is in no file.</p>{% endif %}</div>
<div class="card"><h3>Where the time went</h3>{% if times %}{{ parts.bar(times) }}{% else %}<p class="missing">metrics.json holds no times.</p>{% endif %}</div></div>
{% if events %}{{ parts.events(events, n_events) }}{% endif %}
</section>

<section id="memory">
<h2>Memory and cache</h2>
<div class="pair">
<div class="card"><h3>Memory</h3>{% if memory_text %}<p>{{ memory_text }}</p>{% endif %}{% if memory %}{{ parts.bar(memory) }}\
{% else %}<p class="missing">config.json holds no estimate of the memory.</p>{% endif %}</div>
<div class="card"><h3>The teacher's cache</h3>{% if cache %}{{ parts.facts(cache) }}{% else %}<p class="missing">There is no cache: {{ cache_missing }}.</p>{% endif %}</div>
</div>
</section>

{% if alignment %}<section id="alignment">
<h2>Alignment of the two tokenizers</h2>
<p class="about">Teacher and student cut the text into different tokens; perplexities of the two do not compare, bits per character do.</p>
<div class="card">{{ parts.facts(alignment) }}</div>
</section>

{% endif %}<section id="data">
<h2>Models and data</h2>
{% if models %}<div class="card scroll"><table><thead><tr><th></th><th>name</th><th class="n">parameters</th><th class="n">of them trained</th><th class="n">vocabulary</th><th class="n">layers</th></tr></thead><tbody>
{% for m in models %}<tr><th scope="row">{{ m.role }}</th><td class="name">{{ m.name }}</td><td class="n">{{ m.parameters }}</td><td class="n">{{ m.trained }}</td><td class="n">{{ m.vocabulary }}</td><td class="n">{{ m.layers }}</td></tr>{% endfor %}
</tbody></table></div>{% else %}<p class="missing">config.json does not describe the models.</p>{% endif %}
{% if data %}<p class="about" style="margin-top:16px">{{ data }}.{% if not left_out %} No line is noted as left out.{% endif %}</p>
{% else %}<p class="missing">config.json does not describe the data.</p>{% endif %}
{% if left_out %}<details class="card" open><summary>Left out, shortened or split</summary>
<pre>{{ left_out }}</pre></details>{% endif %}
</section>

{% endblock %}"""

TEMPLATES = {
    "frame.html": FRAME,
    "parts.html": PARTS,
    "vision.html": VISION,
    "language.html": LANGUAGE,
}
