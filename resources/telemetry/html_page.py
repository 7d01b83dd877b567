"""The HTML page of a report: style, frame, and the script of the charts and the samples table."""

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
:root {{ --ink: #1d2733; --soft: #66727f; --line: #e3e7ec; --red: #c2262e; --card: #ffffff; --ground: #f5f6f8 }}
* {{ box-sizing: border-box }}
body {{ font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; margin: 0; color: var(--ink);
  background: var(--ground) }}
main {{ max-width: 1160px; margin: 0 auto; padding: 28px 24px 60px }}
h1 {{ font-size: 26px; margin: 0 }} h2 {{ font-size: 17px; margin: 0 0 10px }}
.sub {{ color: var(--soft); margin: 2px 0 18px }}
.card {{ background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 18px 20px;
  margin: 0 0 16px }}
.verdict {{ border-left: 6px solid var(--red) }} .verdict.balanced {{ border-left-color: #3b8a57 }}
.verdict .who {{ font-size: 21px; font-weight: 650 }} .verdict .gain {{ color: var(--red); font-weight: 650 }}
.verdict p {{ margin: 6px 0 0 }} .change {{ background: #fff8e5; border-radius: 6px; padding: 8px 12px }}
.pair {{ display: grid; grid-template-columns: 1fr 1fr; gap: 16px }} .pair > .card {{ min-width: 0 }}
@media (max-width: 860px) {{ .pair {{ grid-template-columns: 1fr }} }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ border-bottom: 1px solid var(--line); padding: 6px 8px; text-align: left; vertical-align: top }}
tr:last-child td {{ border-bottom: 0 }} th {{ color: var(--soft); font-weight: 600; font-size: 13px }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }}
td.name {{ font-weight: 600; white-space: nowrap }} td.whom {{ color: var(--soft); font-size: 13px }}
.bar {{ display: flex; height: 16px; border-radius: 3px; overflow: hidden; min-width: 220px; margin-top: 3px }}
.bar i {{ display: block; height: 100% }}
.key i {{ display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin: 0 5px 0 14px }}
.key {{ color: var(--soft); font-size: 13px; margin: -4px 0 8px -14px }}
.chart {{ height: 340px }} .wide {{ overflow-x: auto }}
#rows td {{ white-space: pre-wrap; max-width: 420px; overflow-wrap: anywhere; font-size: 13px }}
#rows th {{ cursor: pointer; white-space: nowrap }}
#search {{ width: 340px; padding: 6px 9px; border: 1px solid var(--line); border-radius: 6px; font: inherit }}
select, button {{ font: inherit; padding: 4px 8px; border: 1px solid var(--line); border-radius: 6px;
  background: #fff }}
#found {{ color: var(--soft); margin: 0 14px }} ul {{ margin: 0; padding-left: 20px }}
</style><script>{plotly}</script></head><body><main>
<h1>{title}</h1><p class="sub">{summary}</p>{verdict}{roles}{sections}{graders}
<section id="samples" class="card"><h2>Samples</h2><p><input id="search" placeholder="search"><span id="found"></span>
<label>colour tokens by <select id="colour"><option value="token_advantages">advantage</option>
<option value="token_log_probs">log-prob</option><option value="">nothing</option></select></label></p>
<div class="wide"><table id="rows"></table></div><p><button id="more">show all</button></p></section>
<section class="card"><h2>Missing</h2><ul>{missing}</ul></section></main>
<script>
const figures = {figures};
const face = {{family: 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif', color: '#1d2733', size: 12}};
for (const [name, figure] of Object.entries(figures)) {{
  const layout = {{margin: {{t: 8, l: 80, r: 12, b: 44}}, font: face, paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)', legend: {{orientation: 'h', y: 1.14}}, ...figure.layout}};
  for (const axis of ['xaxis', 'yaxis']) layout[axis] = {{gridcolor: '#e9ecf0', zeroline: false, ...layout[axis]}};
  Plotly.newPlot(name, figure.data, layout, {{responsive: true, displaylogo: false, displayModeBar: false}});
}}
const samples = {samples};
const tokenFields = ['tokens', 'token_log_probs', 'token_advantages'];
const columns = [...new Set(samples.flatMap(row => Object.keys(row)))].filter(c => !tokenFields.includes(c));
const shortList = 12;
let sorted = null, direction = 1, isWhole = samples.length <= shortList;
function tint(field, value, top) {{
  const strength = Math.min(1, Math.abs(value) / top) * 0.6;
  return field === 'token_advantages' && value > 0 ? `rgba(46,139,87,${{strength}})` : `rgba(194,38,46,${{strength}})`;
}}
function writeTokens(cell, row, field) {{
  const values = row[field];
  const top = field === 'token_log_probs' ? 5 : Math.max(1e-9, ...values.map(Math.abs));
  row.tokens.forEach((text, place) => {{
    const span = document.createElement('span');
    span.textContent = text === '' ? '\u23ce' : text;
    span.title = `log-prob ${{row.token_log_probs[place]}}, advantage ${{row.token_advantages[place]}}`;
    span.style.backgroundColor = tint(field, values[place], top);
    cell.appendChild(span);
  }});
}}
function draw() {{
  const wanted = document.getElementById('search').value.toLowerCase();
  let rows = samples.filter(row => columns.some(c => String(row[c] ?? '').toLowerCase().includes(wanted)));
  if (sorted !== null) {{
    rows = [...rows].sort((a, b) => {{
      const x = a[sorted] ?? '', y = b[sorted] ?? '';
      return direction * (typeof x === 'number' && typeof y === 'number' ? x - y : String(x).localeCompare(String(y)));
    }});
  }}
  const table = document.getElementById('rows');
  table.replaceChildren();
  const head = table.insertRow();
  for (const column of columns) {{
    const cell = document.createElement('th');
    cell.textContent = column + (column === sorted ? (direction > 0 ? ' \\u2191' : ' \\u2193') : '');
    cell.onclick = () => {{ direction = column === sorted ? -direction : 1; sorted = column; draw(); }};
    head.appendChild(cell);
  }}
  for (const row of isWhole ? rows : rows.slice(0, shortList)) {{
    const line = table.insertRow();
    const field = document.getElementById('colour').value;
    for (const column of columns) {{
      const cell = line.insertCell();
      const value = row[column] ?? '';
      if (column === 'response' && row.tokens && field) writeTokens(cell, row, field);
      else cell.textContent = typeof value === 'number' && !Number.isInteger(value) ? value.toFixed(3) : value;
    }}
  }}
  document.getElementById('found').textContent = ' ' + rows.length + ' of ' + samples.length;
  document.getElementById('more').hidden = isWhole;
}}
document.getElementById('search').oninput = draw;
document.getElementById('colour').onchange = draw;
document.getElementById('more').onclick = () => {{ isWhole = true; draw(); }};
if (samples.length) draw(); else document.getElementById('samples').hidden = true;
</script></body></html>
"""
