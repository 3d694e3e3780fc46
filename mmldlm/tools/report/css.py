"""Style sheet of a report, light and dark."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --panel: #f6f8fa; --ink: #1f2933; --soft: #5b6773; --line: #dde3e9;
  --good: #0a7a43; --bad: #c81e3a; --good-back: #e3f5ea; --bad-back: #fde8eb; --live: #0b6bcb;
  --run0: #0b6bcb; --run1: #d1480f; --run2: #0b8457; --run3: #a3359b;
  --run4: #9a6b00; --run5: #0f8b9d; --run6: #6a4fd8; --run7: #7a5145;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12161b; --panel: #1a2027; --ink: #e4e9ee; --soft: #9aa7b4; --line: #2d3640;
    --good: #5fd39a; --bad: #ff7b8b; --good-back: #12301f; --bad-back: #3a171d; --live: #6cb2ff;
    --run0: #6cb2ff; --run1: #ff9560; --run2: #4fd39a; --run3: #e58ade;
    --run4: #e0b341; --run5: #56ccd9; --run6: #a896ff; --run7: #c9a18f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.6rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
p { margin: .25rem 0 .75rem; max-width: 60rem; }
a { color: var(--live); }
.soft { color: var(--soft); }
nav a { margin-right: 1rem; white-space: nowrap; }
figure { margin: .5rem 0 1rem; padding: .75rem; background: var(--panel); border-radius: 8px; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 40rem; height: auto; }
.wide { overflow-x: auto; margin: .5rem 0 1rem; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
thead th { border-bottom: 2px solid var(--line); vertical-align: bottom; }
.number { text-align: right; white-space: nowrap; }
.cause { display: block; min-width: 9rem; }
td.text { min-width: 16rem; overflow-wrap: anywhere; }
code { font: .92em ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
td:first-child code { white-space: nowrap; }
small { color: var(--soft); }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.state { display: inline-block; padding: 0 .5em; border-radius: 4px; background: var(--panel); white-space: nowrap; }
.state.finished, .better { color: var(--good); background: var(--good-back); }
.state.failed, .state.killed, .worse { color: var(--bad); background: var(--bad-back); }
.state.running { color: var(--live); }
.better, .worse { padding: 0 .35em; border-radius: 4px; font-weight: 600; }
summary { cursor: pointer; color: var(--soft); }
@media print { body { max-width: none; padding: 0; } figure, tr { break-inside: avoid; } nav { display: none; } }
"""
