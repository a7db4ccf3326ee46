"""The page's style sheet: light, dark, phone and paper."""

from __future__ import annotations

_COLOURS = """
:root{
  --paper:#ffffff;--ground:#f4f5f7;--ink:#18212b;--soft:#55616e;--faint:#8591a0;--rule:#e1e5ea;
  --accent:#1c5d99;--accent-soft:#dbe8f4;--bar:#7fa9cf;--worst:#c4561a;--worst-soft:#fbe9dd;
  --good:#1d7044;--good-soft:#e2f2e8;--stop:#b3261e;--stop-soft:#fdecea;--code:#f4f5f7;
}
@media screen and (prefers-color-scheme:dark){:root{
  --paper:#171d24;--ground:#0e1318;--ink:#e7ecf1;--soft:#a7b2be;--faint:#7c8895;--rule:#2a333d;
  --accent:#82b7ea;--accent-soft:#1f3447;--bar:#4b7aa6;--worst:#f0955a;--worst-soft:#3a2518;
  --good:#7fd0a0;--good-soft:#173326;--stop:#ff9d94;--stop-soft:#3d1a18;--code:#0e1318;
}}
"""

_TEXT = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);line-height:1.55;overflow-wrap:anywhere;
  font-family:-apple-system,BlinkMacSystemFont,"Segoe UI",Roboto,"Helvetica Neue","Liberation Sans",Arial,sans-serif;
  font-size:16px;font-variant-numeric:tabular-nums}
main{max-width:1040px;margin:0 auto;padding:28px 24px 56px}
h1{font-size:42px;line-height:1.12;letter-spacing:-.022em;margin:10px 0 10px;font-weight:700}
h1 .at{color:var(--soft);font-weight:400}
h2{font-size:21px;line-height:1.3;letter-spacing:-.008em;margin:0 0 10px;font-weight:650}
h3{font-size:16px;margin:0 0 6px;font-weight:650}
p{margin:0 0 12px;max-width:70ch}
p:last-child{margin-bottom:0}
.lead{font-size:18px;color:var(--soft);max-width:62ch;margin:0}
.note{color:var(--soft);font-size:14.5px}
.after{margin-top:16px}
.whole{white-space:nowrap}
sup{font-size:.7em;line-height:0;vertical-align:baseline;position:relative;top:-.5em}
h1 sup{font-size:.62em;top:-.55em}
.eyebrow{display:flex;justify-content:space-between;gap:12px;align-items:center;flex-wrap:wrap;
  color:var(--soft);font-size:14.5px}
.eyebrow b{color:var(--ink)}
.pill{border-radius:99px;padding:3px 12px;font-size:13.5px;font-weight:600;white-space:nowrap}
.pill.yes{background:var(--good-soft);color:var(--good)}
.pill.no{background:var(--stop-soft);color:var(--stop)}
ul{margin:0;padding-left:1.15em}
li{margin:0 0 8px;padding-left:2px}
li:last-child{margin-bottom:0}
li .how{display:block;color:var(--soft);font-size:14.5px}
code,.hash{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;font-size:.9em}
pre{background:var(--code);border:1px solid var(--rule);border-radius:8px;padding:12px 14px;margin:0 0 12px;
  white-space:pre-wrap;font-size:14.5px}
.hash{color:var(--soft);font-size:13px;word-break:break-all}
"""

_LAYOUT = """
.card{background:var(--paper);border:1px solid var(--rule);border-radius:14px;padding:26px 28px;margin:0 0 18px;
  break-inside:avoid}
.hero{padding:26px 30px 30px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:18px}
.pair>.card{margin:0 0 18px}
.pair>.card:only-child{grid-column:1/-1}
.words{display:grid;grid-template-columns:minmax(0,1.05fr) minmax(0,1fr);gap:40px;align-items:start}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);margin:26px 0 0;border-top:1px solid var(--rule);
  padding-top:20px;gap:20px}
.tile .label{color:var(--soft);font-size:14px}
.tile .figure{font-size:27px;font-weight:650;letter-spacing:-.015em;line-height:1.25}
.tile .detail{color:var(--soft);font-size:14px;line-height:1.4}
.stamp{border:3px solid var(--stop);background:var(--stop-soft);color:var(--stop);border-radius:14px;
  padding:20px 28px;margin:0 0 18px}
.stamp .big{font-size:34px;font-weight:800;letter-spacing:.05em;line-height:1.15;text-transform:uppercase}
.stamp ul{margin-top:8px;font-weight:600}
.stamp p{margin-top:8px;max-width:none}
.warning{border-left:4px solid var(--worst);background:var(--worst-soft);padding:10px 14px;border-radius:0 8px 8px 0;
  margin:12px 0 0;max-width:none}
.warning+table,.after+table{margin-top:16px}
table{border-collapse:collapse;width:100%;font-size:15px}
th{text-align:left;font-weight:600;color:var(--soft);font-size:14px;line-height:1.35}
th,td{padding:8px 14px 8px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{vertical-align:bottom}
th:last-child,td:last-child{padding-right:0}
td.right,th.right{text-align:right}
td.right{white-space:nowrap}
table{overflow-wrap:break-word}
tr.total td{font-weight:650;border-bottom:0}
.plain tr:last-child td{border-bottom:0}
dl{display:grid;grid-template-columns:minmax(130px,max-content) minmax(0,1fr);gap:7px 20px;margin:0;font-size:15px}
dt{color:var(--soft)}
dd{margin:0}
details{margin:16px 0 0}
summary{cursor:pointer;color:var(--accent);font-size:15px}
details dl{margin-top:12px;font-size:14px}
footer{color:var(--soft);font-size:14px;padding:6px 4px 0}
"""

_CHARTS = """
.chart{display:block;width:100%;height:auto;margin:6px 0 10px}
.chart.narrow{display:none}
.chart text{fill:var(--soft);font-size:13px}
.chart .title{font-size:13.5px}
.chart .value{fill:var(--ink);font-size:14.5px;font-weight:650;stroke:var(--paper);stroke-width:4px;
  paint-order:stroke;stroke-linejoin:round}
.chart .note{font-size:13px;fill:var(--faint)}
.chart .grid{stroke:var(--rule);stroke-width:1}
.chart .axis{stroke:var(--faint);stroke-width:1}
.chart .line{fill:none;stroke:var(--accent);stroke-width:2.5;stroke-linejoin:round;stroke-linecap:round}
.chart .dot{fill:var(--accent)}
.chart .dot.last{stroke:var(--paper);stroke-width:2}
.chart .guess{fill:none;stroke:var(--faint);stroke-width:1.5;stroke-dasharray:5 5}
.chart .ruled-out{fill:var(--accent-soft);opacity:.65}
.bars{margin:16px 0 0}
.bars details{margin:6px 0}
.bar{display:grid;grid-template-columns:var(--names) minmax(0,1fr) 66px 70px;gap:14px;align-items:center;
  padding:4px 0;font-size:15px}
.bar .name{line-height:1.25}
.bar .share{text-align:right;font-weight:600}
.bar .count{color:var(--faint);font-size:13.5px;white-space:nowrap}
.track{position:relative;display:block;height:18px;background:var(--ground);border-radius:3px}
.fill{position:absolute;inset:0 auto 0 0;background:var(--bar);border-radius:3px}
.whisker{position:absolute;top:8px;height:2px;background:var(--ink);opacity:.55}
.mean{position:absolute;top:-4px;bottom:-4px;width:0;border-left:1.5px dashed var(--soft)}
.constant{position:absolute;top:-4px;bottom:-4px;width:0;border-left:2px dotted var(--worst)}
.worst .fill{background:var(--worst)}
.worst .name,.worst .share{color:var(--worst);font-weight:650}
"""

_EXAMPLES = """
.examples{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:14px}
figure{margin:0}
figure img{display:block;width:100%;height:auto;border-radius:6px}
figcaption{font-size:14px;line-height:1.4;margin-top:5px;color:var(--soft)}
figcaption b{color:var(--ink);font-weight:650}
.legend{color:var(--soft);font-size:14.5px;max-width:none}
.legend>span{display:inline-block;margin-right:18px}
.swatch{display:inline-block;width:26px;margin-right:8px;vertical-align:middle;border-radius:2px}
.swatch.truth{height:6px;background:#56b4e9}
.swatch.found{height:3px;background:#e69f00}
"""

_SMALL = """
@media screen and (max-width:760px){
  main{padding:12px 10px 36px}
  body{font-size:16px}
  h1{font-size:31px}
  .lead{font-size:16.5px}
  .card,.hero{padding:20px 18px;border-radius:12px;margin-bottom:12px}
  .stamp{padding:16px 18px}
  .stamp .big{font-size:26px}
  .pair,.words{grid-template-columns:minmax(0,1fr);gap:0}
  .words{gap:20px}
  .pair>.card{margin-bottom:12px}
  .tiles{grid-template-columns:1fr 1fr}
  .tile .figure{font-size:23px}
  .chart.wide{display:none}
  .chart.narrow{display:block}
  .bar{grid-template-columns:minmax(0,1fr) auto auto;gap:1px 8px;padding:5px 0}
  .track{grid-column:1/-1;grid-row:2;height:12px}
  .whisker{top:5px}
  .examples{display:flex;gap:9px;overflow-x:auto}
  figure{flex:0 0 46%}
  figcaption{font-size:13px}
  th,td{padding-right:10px;font-size:14px}
  dl{grid-template-columns:minmax(90px,40%) minmax(0,1fr);gap:6px 14px}
}
@media print{
  *{print-color-adjust:exact;-webkit-print-color-adjust:exact}
  @page{margin:14mm}
  body{background:#fff;font-size:11.5px}
  main{padding:0;max-width:none}
  h1{font-size:28px} h2{font-size:15.5px;break-after:avoid} h3{font-size:12.5px}
  .lead{font-size:13px} .note,li .how,.tile .label,.tile .detail,th,footer,.eyebrow,.pill,.bar .count{font-size:10.5px}
  .card{padding:14px 16px;margin-bottom:10px} .pair{gap:10px} .pair>.card{margin-bottom:10px}
  .tile .figure{font-size:19px} table,dl,.bar,pre{font-size:11px} .bar{padding:2px 0} .hash{font-size:9px}
  .track{height:12px} .whisker{top:5px}
  details:not([open])>summary{display:none}
}
"""

STYLE = (_COLOURS + _TEXT + _LAYOUT + _CHARTS + _EXAMPLES + _SMALL).strip()
