// The side panel: all that is known of what was chosen, and the source lines that it was made by.

function add(parent, name, text = null, attributes = {}) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.appendChild(made);
  return made;
}

function row(list, label, content) {
  if (!content || (Array.isArray(content) && !content.length)) return;
  add(list, "dt", label);
  const cell = add(list, "dd");
  for (const part of [].concat(content)) {
    const line = add(cell, "div");
    if (part instanceof Node) line.appendChild(part);
    else line.textContent = part;
  }
}

function link(node) {
  const made = document.createElement("a");
  made.textContent = `${node.name}  ${node.dtype || ""}`;
  made.tabIndex = 0;
  made.setAttribute("role", "link");
  made.addEventListener("click", () => reveal(node));
  made.addEventListener("keydown", (event) => { if (event.key === "Enter") reveal(node); });
  return made;
}

function ruleText(rule) {
  return `${rule.id}: ${rule.cast}${rule.at ? `  (${rule.at})` : ""}`;
}

/** Shows a node. */
function showNode(node) {
  const panel = document.getElementById("panel");
  panel.replaceChildren();
  panel.scrollTop = 0;
  add(panel, "h2", node.name);
  const list = add(panel, "dl");
  const byId = (id) => state.model.byId.get(id);
  row(list, "op", node.kind === "cast" ? "cast, inserted by fxamp" : node.op);
  row(list, "call", node.call);
  row(list, "dtype", node.kind === "cast" ? castText(node) : node.was ? `${node.was} → ${node.dtype}` : node.dtype);
  row(list, "result", node.types);
  row(list, "bytes", node.kind === "cast" ? `${bytesText(node.bytes)} read and written per step` : "");
  row(list, node.kind === "cast" ? "inserted" : "reason", node.reason);
  row(list, "rule", node.rule ? [ruleText(node.rule), node.rule.why === node.reason ? "" : node.rule.why].filter(Boolean) : "");
  row(list, "lost", (node.lost || []).map(ruleText));
  row(list, "overruled", node.overruled);
  row(list, "kept", node.verbatim);
  row(list, "region", node.region === "off" ? "autocast is off here" : node.region);
  row(list, "module", node.module ? `${node.module}${node.class ? ` (${node.class})` : ""}` : "");
  row(list, "inputs", node.inputs.map(byId).filter(Boolean).map(link));
  row(list, "users", node.users.map(link));
  showSource(panel, node);
}

/** Shows the whole graph: the summary, and what each module keeps for the backward. */
function showSummary() {
  const panel = document.getElementById("panel");
  const graph = state.model.graph;
  panel.replaceChildren();
  panel.scrollTop = 0;
  add(panel, "h2", graph.name);
  const list = add(panel, "dl");
  let label = "", texts = [];
  for (const [name, text] of [...graph.summary, ["end", ""]]) {
    if (name && texts.length) { row(list, label, texts); texts = []; }
    label = name || label;
    texts.push(text);
  }
  showKeptModules(panel, graph.kept_modules);
  add(panel, "p", "Click an op, a cast or a module for the reasons and the source lines.", { class: "hint" });
}

/** A bar for each module: what it keeps, and, behind it, what it would keep without rules for kept values. */
function showKeptModules(panel, modules) {
  if (!modules.length) return;
  add(panel, "h3", "Kept for the backward, by module");
  const most = Math.max(...modules.map(([, before, after]) => Math.max(before, after)));
  const grid = add(panel, "div", null, { class: "bars" });
  for (const [path, before, after] of modules.slice(0, 24)) {
    add(grid, "span", path || "(root)", { title: path });
    const track = add(grid, "div", null, { class: "track" });
    add(track, "i", null, { class: "before", style: `width:${(100 * before) / most}%` });
    add(track, "i", null, { class: "after", style: `width:${(100 * after) / most}%` });
    add(grid, "span", before === after ? bytesText(after) : `${bytesText(before)} → ${bytesText(after)}`);
  }
  if (modules.length > 24) add(panel, "p", `and ${modules.length - 24} more`, { class: "hint" });
}

/** Shows a module box, with the lines of its own forward; the root is the summary. */
function showBox(box) {
  if (!box.parent) { showSummary(); return; }
  const panel = document.getElementById("panel");
  panel.replaceChildren();
  add(panel, "h2", box.path || state.model.graph.name);
  const list = add(panel, "dl");
  row(list, "class", box.className);
  row(list, "ops", `${box.ops}: ${Object.entries(box.dtypes).map(([name, count]) => `${name} ${count}`).join(", ")}`);
  row(list, "casts", box.casts ? `${box.casts}, ${bytesText(box.bytes)} read and written per step` : "none");
  row(list, "kept for the backward", keptText(box));
  const own = nodesIn(box).filter((node) => node.file && node.module === box.module);
  if (own.length) showSource(panel, own[0], own);
}

/** What the forward keeps of a box's ops, and the largest of it. */
function keptText(box) {
  const path = box.path || "";
  const mine = state.model.graph.kept_values.filter(([module]) => !path || module === path || module.startsWith(`${path}.`));
  if (!mine.length) return "";
  const sum = (at) => mine.reduce((all, value) => all + (value[at] || 0), 0);
  const largest = [...mine].sort((a, b) => (b[4] || 0) - (a[4] || 0)).slice(0, 12);
  return [`${bytesText(sum(3))} → ${bytesText(sum(4))}`, ...largest.map(([, name, form, , after]) => `${name}  ${form}  ${bytesText(after || 0)}`)];
}

function nodesIn(box) {
  return box.children.flatMap((child) => (child.children ? nodesIn(child) : [child]));
}

/** The lines around a node's source line; lines that other nodes come from can be clicked. */
function showSource(panel, node, group = null) {
  if (!node.file) return;
  const lines = data.sources[node.file] || {};
  const makers = new Map();
  for (const other of state.model.graph.nodes) {
    if (other.file === node.file && other.kind !== "cast") makers.set(other.line, [...(makers.get(other.line) || []), other]);
  }
  const mine = new Set((group || state.model.graph.nodes.filter((n) => n.module === node.module)).map((n) =>
    (n.file === node.file ? n.line : 0)));
  add(panel, "dt", node.place);
  const text = add(panel, "pre");
  let last = null;
  for (const number of Object.keys(lines).map(Number).sort((a, b) => a - b)) {
    if (Math.abs(number - node.line) > 14) continue;
    if (last !== null && number > last + 1) add(text, "div", "⋯");
    last = number;
    const line = add(text, "div");
    add(line, "i", String(number));
    line.append(lines[number]);
    if (mine.has(number)) line.classList.add("mine");
    if (number === node.line && !group) line.classList.add("here");
    const made = makers.get(number);
    if (!made) continue;
    line.classList.add("made");
    line.title = `makes ${made.map((other) => other.name).join(", ")}`;
    line.addEventListener("click", () => chooseAll(made));
  }
}
