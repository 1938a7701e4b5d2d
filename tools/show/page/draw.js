// The drawing: boxes, ops, and edges with tags for the casts that lie on them.

const SVG = "http://www.w3.org/2000/svg";
const DTYPES = ["f32", "f16", "bf16", "f64", "f8", "fp8", "mxfp8", "nvfp4"];

function element(name, attributes = {}, parent = null, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

function colour(dtype) {
  const known = DTYPES.find((name) => (dtype || "").startsWith(name));
  return `var(--${known || "other"})`;
}

function bytesText(count) {
  if (count === undefined || count === null) return "size unknown";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return at ? `${count.toFixed(1)} ${units[at]}` : `${count} B`;
}

function cut(text, width) {
  return text.length > width ? `${text.slice(0, width - 1)}…` : text;
}

/** Draws everything again; `state.parts` then leads from things to their elements. Edges lie under all that is small. */
function draw(model) {
  const world = document.getElementById("world");
  world.replaceChildren();
  state.parts = new Map();
  layoutGraph(model);
  const [frames, lines, things, tags] = [0, 1, 2, 3].map(() => element("g", {}, world));
  drawBox(model.root, frames, things);
  drawEdges(model, lines, tags);
}

function drawBox(box, frames, things) {
  if (box.parent) drawFrame(box, box.open ? frames : things);
  if (!box.open) return;
  for (const child of box.children) child.children ? drawBox(child, frames, things) : drawNode(child, things);
}

function drawFrame(box, world) {
  const kind = `box ${box.depth % 2 ? "" : "even"} ${box.open ? "" : "closed"}`;
  const group = element("g", { class: kind, transform: `translate(${box.x} ${box.y})` }, world);
  element("rect", { width: box.w, height: box.h, rx: 7 }, group);
  const title = element("g", { class: "title", tabindex: 0, role: "button", "aria-expanded": box.open,
    "aria-label": `module ${box.path}, ${box.ops} ops, ${box.casts} casts` }, group);
  element("rect", { width: box.w, height: box.open ? GAP.title : box.h, rx: 7 }, title);
  const label = `${box.open ? "▾" : "▸"} ${box.name}`;
  element("text", { x: 10, y: 16, "font-weight": 600 }, title, cut(label, 30));
  if (!box.open || box.w > 260) element("text", { x: box.w - 10, y: 16, "text-anchor": "end", class: "small" }, title,
    cut(box.className, 20));
  if (!box.open) drawSummary(box, title);
  bind(title, box, () => toggle(box));
  state.parts.set(box, group);
}

function drawSummary(box, group) {
  const casts = box.casts ? `, ${box.casts} cast${box.casts > 1 ? "s" : ""} ${bytesText(box.bytes)}` : "";
  element("text", { x: 10, y: 34, class: "small deep" }, group, `${box.ops} op${box.ops === 1 ? "" : "s"}${casts}`);
  let x = 10;
  const width = box.w - 20;
  for (const [dtype, count] of Object.entries(box.dtypes).sort()) {
    const part = (width * count) / box.ops;
    element("rect", { x, y: 42, width: part, height: 11, style: `fill:${colour(dtype)};stroke:none` }, group);
    if (part > 26) element("text", { x: x + 3, y: 51, class: "small deep" }, group, dtype);
    x += part;
  }
}

function drawNode(node, world) {
  const kind = `${node.kind === "op" ? "op" : "input"} ${node.was ? "changed" : ""}`;
  const group = element("g", { class: kind, transform: `translate(${node.x} ${node.y})`, tabindex: 0, role: "button",
    "aria-label": `${node.op} ${node.name}, ${node.was ? `${node.was} to ` : ""}${node.dtype || ""}` }, world);
  element("rect", { width: node.w, height: node.h, rx: 5, style: `fill:${colour(node.dtype)}` }, group);
  const name = node.kind === "op" ? node.op : node.name;
  element("text", { x: 8, y: node.kind === "op" ? 15 : 17 }, group, cut(name, 24));
  if (node.kind === "op") {
    const dtype = node.was ? `${node.was} → ${node.dtype}` : node.dtype || "";
    const shape = ((node.types || [])[0] || "").replace(/^[^[]*/, "");
    element("text", { x: 8, y: 29, class: "small deep" }, group, cut(`${dtype} ${shape}`, 32));
    drawOwnCasts(node, group);
  }
  bind(group, node, () => select(node));
  state.parts.set(node, group);
}

/** Casts of parameters have no edge: a mark at the corner of the op that reads them. */
function drawOwnCasts(node, group) {
  if (!node.own || !node.own.length) return;
  const total = node.own.reduce((sum, cast) => sum + (cast.bytes || 0), 0);
  const text = `${node.own.length} × cast ${bytesText(total)}`;
  element("text", { x: node.w - 6, y: -3, "text-anchor": "end", class: "small cast" }, group, text);
}

/** One line for all edges between two visible things; casts on it add a tag. */
function drawEdges(model, world, tags) {
  const lines = new Map();
  for (const edge of model.edges) {
    const [from, to] = [shown(edge.from), shown(edge.to)];
    if (from === to) continue;
    const key = `${from.id}>${to.id}`;
    if (!lines.has(key)) lines.set(key, { from, to, casts: new Set() });
    for (const cast of edge.casts) lines.get(key).casts.add(cast);
  }
  state.lines = [...lines.values()];
  for (const line of state.lines) drawLine(line, world);
  for (const line of state.lines) if (line.casts.size) drawTag(line, tags);
}

function drawLine(line, world) {
  const [x1, y1] = [line.from.x + line.from.w / 2, line.from.y + line.from.h];
  const [x2, y2] = [line.to.x + line.to.w / 2, line.to.y];
  const heavy = [...line.casts].reduce((sum, cast) => sum + (cast.bytes || 0), 0);
  const width = 1.1 + Math.min(3, Math.log10(1 + heavy / 1024) * 0.6);
  line.path = element("path", { d: route(x1, y1, x2, y2, Math.max(line.from.w, line.to.w)),
    class: line.casts.size ? "casts" : "", "stroke-width": width }, world);
  const aside = Math.max(-95, Math.min(95, (x1 - x2) * 0.55)); // tags at one op stand side by side
  line.at = [x2 + aside, y2 - Math.min(17, Math.max(9, Math.abs(y2 - y1) / 2))];
}

/** A short edge goes straight down; one that passes other layers swings out to their right. */
function route(x1, y1, x2, y2, width) {
  const down = y2 - y1;
  const bend = Math.min(60, Math.max(14, Math.abs(down) / 2));
  if (down < 110) return `M${x1} ${y1} C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`;
  const side = Math.max(x1, x2) + width / 2 + 14 + Math.min(40, down / 40);
  return `M${x1} ${y1} C${x1} ${y1 + 24} ${side} ${y1 + 4} ${side} ${y1 + 50} L${side} ${y2 - 50}` +
    ` C${side} ${y2 - 4} ${x2} ${y2 - 24} ${x2} ${y2}`;
}

function drawTag(line, world) {
  const casts = [...line.casts];
  const first = casts[casts.length - 1];
  const bytes = casts.reduce((sum, cast) => sum + (cast.bytes || 0), 0);
  const text = casts.length > 1 ? `${casts.length} casts ${bytesText(bytes)}` : `${castText(first)} ${bytesText(first.bytes)}`;
  const width = text.length * 5.6 + 10;
  const group = element("g", { class: "tag", transform: `translate(${line.at[0] - width / 2} ${line.at[1] - 8})`,
    tabindex: 0, role: "button", "aria-label": `cast ${text}` }, world);
  element("rect", { width, height: 16, rx: 8 }, group);
  element("text", { x: width / 2, y: 11.5, "text-anchor": "middle", class: "small cast" }, group, text);
  bind(group, first, () => select(first));
  for (const cast of casts) state.parts.set(cast, group);
}

function castText(cast) {
  const source = state.model.byId.get(cast.inputs[0]);
  return `${(source && source.dtype) || "?"}→${cast.dtype}`;
}
