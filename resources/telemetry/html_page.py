"""The HTML page of a report: style, frame, and the script of the charts and the samples table."""

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
body {{ font-family: sans-serif; margin: 2em auto; max-width: 1100px; color: #222 }}
table {{ border-collapse: collapse; width: 100% }} 
td, th {{ border-bottom: 1px solid #ddd; padding: 4px 8px; text-align: left; vertical-align: top }}
td {{ white-space: pre-wrap; overflow-wrap: anywhere }} th {{ cursor: pointer }}
.verdict {{ font-size: 1.2em; border-left: 4px solid #c2262e; padding-left: 10px }} .chart {{ height: 380px }}
#search {{ width: 60%; padding: 6px }}
</style><script>{plotly}</script></head><body>
<h1>{title}</h1>{verdict}<h2>Seconds a step, by role</h2>{roles}{sections}
<section id="samples"><h2>Samples</h2><input id="search" placeholder="search"><span id="found"></span>
<label>colour tokens by <select id="colour"><option value="token_advantages">advantage</option>
<option value="token_log_probs">log-prob</option><option value="">nothing</option></select></label>
<table id="rows"></table></section>
<h2>Missing</h2><ul>{missing}</ul>
<script>
const figures = {figures};
for (const [name, figure] of Object.entries(figures)) {{
  const layout = {{margin: {{t: 10, l: 110}}, ...figure.layout}};
  Plotly.newPlot(name, figure.data, layout, {{responsive: true, displaylogo: false}});
}}
const samples = {samples};
const tokenFields = ['tokens', 'token_log_probs', 'token_advantages'];
const columns = [...new Set(samples.flatMap(row => Object.keys(row)))].filter(c => !tokenFields.includes(c));
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
let sorted = null, direction = 1;
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
  for (const row of rows) {{
    const line = table.insertRow();
    const field = document.getElementById('colour').value;
    for (const column of columns) {{
      const cell = line.insertCell();
      if (column === 'response' && row.tokens && field) writeTokens(cell, row, field);
      else cell.textContent = row[column] ?? '';
    }}
  }}
  document.getElementById('found').textContent = ' ' + rows.length + ' of ' + samples.length;
}}
document.getElementById('search').oninput = draw;
document.getElementById('colour').onchange = draw;
if (samples.length) draw(); else document.getElementById('samples').hidden = true;
</script></body></html>
"""
