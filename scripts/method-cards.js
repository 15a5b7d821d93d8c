"use strict";
// The documentation of methods as HTML; see method-cards.
const fs = require("fs");
const path = require("path");
const crypto = require("crypto");
const katex = require(path.resolve(process.argv[2]));

const methods = "crates/attlas/src/methods";
const parts = { Idea: "idea", Math: "math", Reference: "reference", Cost: "cost", Guarantees: "guarantees", "When to use": "when" };

const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

const tex = (source, displayMode) =>
  katex
    .renderToString(source, { output: "mathml", displayMode, throwOnError: true, strict: false })
    .replace(/^<span class="katex">/, "")
    .replace(/<\/span>$/, "")
    // The source is in the module; a page need not carry it twice.
    .replace(/<annotation[^>]*>[\s\S]*?<\/annotation>/g, "")
    .replace(/<semantics>([\s\S]*?)<\/semantics>/g, "$1")
    .replace(/ xmlns="[^"]*"/g, "");

// Code and formulas are set aside while the rest is escaped.
function inline(text) {
  const kept = [];
  const keep = (html) => `\u0000${kept.push(html) - 1}\u0000`;
  const html = escape(
    text
      .replace(/\$\$([\s\S]+?)\$\$/g, (_, m) => keep(tex(m, true)))
      .replace(/\[`([^`]+)`\](\([^)]*\))?/g, (_, m) => keep(`<code>${escape(m)}</code>`))
      .replace(/`([^`]+)`/g, (_, m) => keep(`<code>${escape(m)}</code>`))
      .replace(/\$([^$]+?)\$/g, (_, m) => keep(tex(m, false)))
      .replace(/\[([^\]]+)\]\([^)]*\)/g, "$1"),
  ).replace(/\*\*([^*]+)\*\*/g, "<b>$1</b>").replace(/\*([^*\s][^*]*)\*/g, "<i>$1</i>");
  return html.replace(/\u0000(\d+)\u0000/g, (_, i) => kept[i]);
}

function block(text) {
  let html = "";
  for (const paragraph of text.split(/\n\s*\n/)) {
    const lines = paragraph.split("\n");
    const lead = [];
    const items = [];
    for (const line of lines) {
      if (/^\s*[*-] /.test(line)) items.push([line.replace(/^\s*[*-] /, "")]);
      else if (items.length) items[items.length - 1].push(line.trim());
      else lead.push(line);
    }
    if (lead.length) html += `<p>${inline(lead.join("\n"))}</p>`;
    if (items.length) html += `<ul>${items.map((i) => `<li>${inline(i.join("\n"))}</li>`).join("")}</ul>`;
  }
  return html;
}

const works = {};
for (const entry of fs.readFileSync("docs/bibliography.md", "utf8").split(/^## /m).slice(1)) {
  const [key, ...text] = entry.split("\n");
  // Links become their text: the page loads nothing and points nowhere.
  works[key.trim()] = text.join(" ").trim().replace(/\[([^\]]+)\]\([^)]*\)/g, "$1");
}

const cards = {};
for (const family of fs.readdirSync(methods).sort()) {
  const folder = path.join(methods, family);
  if (!fs.statSync(folder).isDirectory()) continue;
  for (const name of fs.readdirSync(folder).sort()) {
    const file = name.endsWith(".rs") ? path.join(folder, name) : path.join(folder, name, "mod.rs");
    if (!fs.existsSync(file)) continue;
    const source = fs.readFileSync(file, "utf8");
    const id = source.match(/pub static METHOD: Method = Method \{\s*id: "([^"]+)"/)?.[1];
    if (!id) continue;
    const lines = source.split("\n").filter((l) => l.startsWith("//!"));
    const doc = lines.map((l) => l.replace(/^\/\/! ?/, "")).join("\n");
    const card = { sha256: crypto.createHash("sha256").update(doc).digest("hex") };
    const found = [...doc.matchAll(/^\*\*([A-Z][a-z ]+)\.\*\* /gm)].filter((m) => parts[m[1]]);
    found.forEach((m, i) => {
      const text = doc.slice(m.index + m[0].length, found[i + 1]?.index ?? doc.length).trim();
      card[parts[m[1]]] = block(text);
    });
    const cited = [...new Set((card.reference ?? "").match(/\b[a-z]+\d{4}[a-z]*\b/g) ?? [])];
    card.works = cited.filter((key) => works[key]).map((key) => escape(works[key]));
    cards[id] = card;
  }
}
process.stdout.write(JSON.stringify(cards, null, 1) + "\n");
