"""The HTML of a page and its style sheet: light and dark, on a phone and on a desktop."""

from string import Template

# The policy forbids scripts and requests, even if text from outside came through as HTML.
PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #66707b;
  --line: #e2e6ea; --val: #1f66b5; --right: #8ebdf0; --wrong: #f0a873;
  --error: #b3500f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e3e7eb; --soft: #939da7;
    --line: #2b3138; --val: #6fb0f5; --right: #2a5f9c; --wrong: #9a5325;
    --error: #f0a873; }
}
* { box-sizing: border-box; margin: 0; }
body { max-width: 72rem; margin: auto; padding: 2.5rem 1.25rem; background: var(--paper);
  color: var(--ink); font: 0.875rem/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 3rem 0 0.5rem; font-size: 1rem; }
p { margin: 0.25rem 0 0.75rem; overflow-wrap: anywhere; }
p, dt, th, figcaption { color: var(--soft); font-weight: normal; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: 1rem;
  margin-top: 1.5rem; }
.facts dd { margin-top: 0.5rem; font-size: 1.25rem; line-height: 1.2; }
.facts > :first-child { grid-column: 1 / -1; }
.facts > :first-child dd { font-size: 3rem; font-weight: 600; }
.curves { display: grid; gap: 1.5rem; margin-top: 2.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); }
svg { width: 100%; margin-top: 0.5rem; overflow: visible; font-size: 11px; fill: var(--soft);
  stroke: var(--line); }
svg text { stroke: none; }
.y { text-anchor: end; }
.x { text-anchor: middle; }
.train { stroke: var(--soft); fill: var(--soft); }
.val { stroke: var(--val); fill: var(--val); }
polyline { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.beside { display: flex; flex-wrap: wrap; column-gap: 4rem; }
section { max-width: 100%; }
.wide, .long { overflow: auto; }
.long { max-height: 42rem; }
table { border-collapse: collapse; }
th, td { max-width: min(18rem, 45vw); padding: 0.2rem 0 0.2rem 1rem; text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
td { border-top: 1px solid var(--line); overflow-wrap: break-word; }
thead th { position: sticky; top: 0; max-width: 7rem; background: var(--paper); }
.number { text-align: right; white-space: nowrap; }
.matrix th, .matrix td { padding: 0 0.2rem; border: 1px solid var(--paper); text-align: center; }
.matrix th, .matrix span { max-width: min(9rem, 25vw); overflow: hidden; text-overflow: ellipsis; }
.matrix th { vertical-align: bottom; white-space: nowrap; }
.matrix [scope=row] { position: sticky; left: 0; background: var(--paper);
  vertical-align: middle; text-align: right; }
.matrix td { min-width: 1.8rem; height: 1.8rem; font-size: 0.75rem; }
.matrix span { display: inline-block; max-height: 9rem; writing-mode: vertical-rl;
  text-orientation: sideways; rotate: 180deg; }
.right { background: color-mix(in srgb, var(--right) var(--shade), var(--paper)); }
.wrong { background: color-mix(in srgb, var(--wrong) var(--shade), var(--paper)); }
.warning { color: var(--error); }
.reliability { display: flex; flex-wrap: wrap; align-items: center; gap: 0 3rem; }
.reliability figure { flex: 0 1 24rem; }
.reliability p { flex: 1 1 16rem; color: var(--ink); }
.ideal { stroke: var(--ink); stroke-dasharray: 3 3; }
.bar rect { fill: var(--right); stroke: none; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr));
  gap: 1.25rem 0.75rem; margin-top: 0.75rem; }
.gallery div { min-width: 0; font-size: 0.75rem; line-height: 1.4; }
.gallery img, .gallery i { display: block; width: 100%; aspect-ratio: 1; object-fit: contain;
  margin-bottom: 0.3rem; background: var(--line); }
.gallery [src^="data:image/png"] { image-rendering: pixelated; }
.gallery span { display: flex; justify-content: space-between; gap: 0.5rem; color: var(--soft); }
.gallery b { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; font-weight: 600;
  color: var(--ink); unicode-bidi: isolate; }
.wrong-class b { color: var(--error); }
.list { columns: 19rem; column-gap: 2.5rem; }
.list div { display: flex; gap: 1rem; border-top: 1px solid var(--line); break-inside: avoid; }
.list dd { margin-left: auto; overflow-wrap: anywhere; white-space: pre-wrap; }
.list .changed dd { font-weight: 600; }
.environment { columns: 1; }
</style>
$body
</html>
""")
