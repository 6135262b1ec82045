"""The page of a server: its signature, a form that asks, and how long answers take."""

from __future__ import annotations

__all__ = ["PAGE"]

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Hotbed</title>
<link rel="icon" href="data:,">
<style>
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
         color: #1d2733; background: #fff; overflow-wrap: anywhere }
  h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin-top: 2rem }
  table { border-collapse: collapse; width: 100% }
  th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #dfe5ec }
  textarea { width: 100%; height: 14rem; font: 13px/1.4 ui-monospace, monospace; box-sizing: border-box }
  pre { background: #f4f6f9; padding: .75rem; overflow: auto; max-height: 20rem }
  button { font: inherit; padding: .35rem 1rem; margin-right: .5rem }
  .told { color: #5a6b7d } .wrong { color: #b3261e }
  @media (prefers-color-scheme: dark) {
    body { background: #14181d; color: #dfe5ec } th, td { border-color: #333d48 }
    pre, textarea { background: #1d232a; color: inherit }
  }
</style>
<h1 id="title">Hotbed</h1>
<p class="told">
  <a href="openapi.json">OpenAPI</a> · <a href="metrics">metrics</a> · <span id="paths"></span>
</p>
<p id="with-token" hidden><label>Token: <input id="token" type="password" autocomplete="off"></label>
  <button id="enter">Enter</button></p>
<h2>What is asked with, and answered</h2>
<table id="signature"><tr><th>name</th><th>values</th><th>type</th><th>of a sample</th></tr></table>
<h2>Ask</h2>
<textarea id="body" spellcheck="false" aria-label="The body of a request"></textarea>
<p><button id="ask">Ask once</button><button id="often">Ask 100 times</button>
  <span id="latency" class="told"></span></p>
<pre id="answer" aria-label="The answer"></pre>
<script>
"use strict";
const at = (id) => document.getElementById(id);
let name = "";

function headers() {
  const token = at("token").value;
  return token ? { Authorization: "Bearer " + token } : {};
}

async function got(path) {
  const response = await fetch(path, { headers: headers() });
  if (response.status === 401) at("with-token").hidden = false;
  if (!response.ok) throw new Error((await response.json()).error);
  return response.json();
}

function row(cells) {
  const line = at("signature").insertRow();
  for (const cell of cells) line.insertCell().textContent = cell;
}

async function show() {
  const page = await got("openapi.json");
  name = decodeURIComponent(Object.keys(page.paths)[0].split("/")[3].replace(/:predict$/, ""));
  const about = await got("v1/models/" + encodeURIComponent(name) + "/metadata");
  at("title").textContent = name + ", version " + about.model_spec.version;
  at("paths").textContent = "POST /v1/models/" + name + ":predict, " + (about.metadata.topk ? ":topk, " : "")
    + "/v2/models/" + name + "/infer";
  for (const each of about.metadata.inputs) {
    const shape = each.shape.length ? each.shape.map((n) => n < 0 ? "any number" : n).join(" × ") : "one";
    row([each.name, each.kind, each.dtype, shape]);
  }
  for (const [column, types] of Object.entries(about.metadata.columns || {}))
    row([column, "column of records", types.join(", "), "one"]);
  for (const each of about.metadata.outputs)
    row([each.name, "answered", each.dtype, each.shape.join(" × ") || "one"]);
  const sample = await got("sample");
  at("body").value = JSON.stringify({ instances: sample.instances }, null, 1);
}

async function ask(times) {
  const took = [];
  at("latency").textContent = "…";
  for (let n = 0; n < times; n++) {
    const begun = performance.now();
    const response = await fetch("v1/models/" + encodeURIComponent(name) + ":predict", {
      method: "POST", body: at("body").value,
      headers: { "Content-Type": "application/json", ...headers() },
    });
    const told = await response.json();
    took.push(performance.now() - begun);
    at("answer").textContent = JSON.stringify(told, null, 1);
    at("answer").className = response.ok ? "" : "wrong";
    if (!response.ok) break;
  }
  took.sort((a, b) => a - b);
  const part = (p) => took[Math.min(took.length - 1, Math.floor(p * took.length))].toFixed(1);
  at("latency").textContent = took.length === 1 ? part(0) + " ms"
    : "median " + part(0.5) + " ms, 99 of 100 within " + part(0.99) + " ms";
}

function tell(error) {
  at("answer").textContent = String(error.message || error);
  at("answer").className = "wrong";
}

at("ask").onclick = () => ask(1).catch(tell);
at("often").onclick = () => ask(100).catch(tell);
at("enter").onclick = () => show().catch(tell);
show().catch(tell);
</script>
</html>
"""
