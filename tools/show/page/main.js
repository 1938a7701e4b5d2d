// The page's state, and what its controls do.

const state = { model: null, parts: new Map(), lines: [], chosen: [], hits: [], hit: -1, view: { x: 0, y: 0, k: 1 } };

function openGraph(number) {
  const graph = data.graphs[number];
  state.model = graph.model || (graph.model = buildGraph(graph));
  state.chosen = [];
  state.hits = [];
  header(graph);
  redraw();
  fit();
  showBox(state.model.root);
  if (!document.getElementById("list").hidden) drawTable();
}

function header(graph) {
  const policy = graph.policy ? `policy ${graph.policy} on ${graph.device}, ${graph.chosen}` : "no policy was applied";
  document.getElementById("about").textContent = policy;
  const totals = graph.totals;
  const parts = [`${totals.ops} ops: ${Object.entries(totals.dtypes).map(([n, c]) => `${n} ${c}`).join(", ")}`];
  parts.push(`${totals.casts} casts, ${totals.unknown ? "at least " : ""}${bytesText(totals.bytes)} per step`);
  if (totals.shared !== null) parts.push(`${totals.shared} shared, ${totals.folded || 0} folded`);
  const [before, after] = graph.kept;
  if (before !== null && after !== null) parts.push(`kept for the backward ${bytesText(before)} → ${bytesText(after)}`);
  document.getElementById("totals").textContent = parts.join("  ·  ");
  const bar = document.getElementById("bar");
  bar.replaceChildren();
  bar.setAttribute("aria-label", parts[0]);
  for (const [dtype, count] of Object.entries(totals.dtypes)) {
    add(bar, "i", null, { style: `background:${colour(dtype)};width:${(100 * count) / Math.max(1, totals.ops)}%`, title: dtype });
  }
  const legend = document.getElementById("legend");
  legend.replaceChildren();
  for (const dtype of Object.keys(totals.dtypes)) add(legend, "b", dtype, { style: `background:${colour(dtype)}` });
}

function redraw() {
  draw(state.model);
  dim();
  showHits();
  mark_chosen();
}

/** What a click or Enter on a thing does, and what hovering over it tells. */
function bind(group, thing, act) {
  group.addEventListener("click", (event) => { event.stopPropagation(); if (!state.moved) act(); });
  group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } });
  group.addEventListener("pointermove", (event) => tip(thing, event));
  group.addEventListener("pointerleave", () => { document.getElementById("tip").hidden = true; });
}

function tip(thing, event) {
  const shownTip = document.getElementById("tip");
  const rule = thing.rule ? `\nrule ${ruleText(thing.rule)}` : "";
  shownTip.textContent = thing.children
    ? `${thing.path || "the whole graph"}\n${thing.ops} ops, ${thing.casts} casts, ${bytesText(thing.bytes)}`
    : `${thing.name}: ${thing.overruled || thing.reason || thing.op}${rule}`;
  shownTip.hidden = false;
  shownTip.style.left = `${Math.min(event.clientX + 14, innerWidth - shownTip.offsetWidth - 8)}px`;
  shownTip.style.top = `${Math.min(event.clientY + 14, innerHeight - shownTip.offsetHeight - 8)}px`;
}

function toggle(box) {
  const before = [box.x, box.y];
  box.open = !box.open;
  redraw();
  state.view.x += (before[0] - box.x) * state.view.k; // the box stays under the pointer
  state.view.y += (before[1] - box.y) * state.view.k;
  applyView();
  showBox(box);
}

function select(node) {
  state.chosen = [node];
  mark_chosen();
  showNode(node);
}

function chooseAll(nodes) {
  for (const node of nodes) openTo(node);
  redraw();
  state.chosen = nodes;
  mark_chosen();
  centre(drawnFor(nodes[0]));
}

function mark_chosen() {
  for (const part of document.querySelectorAll("#world .chosen, #world .near")) part.classList.remove("chosen", "near");
  const things = new Set(state.chosen.map(drawnFor));
  for (const thing of things) if (state.parts.has(thing)) state.parts.get(thing).classList.add("chosen");
  for (const line of state.lines) if (things.has(line.from) || things.has(line.to)) line.path.classList.add("near");
}

function openTo(node) {
  const target = isDrawn(node) ? node : node.users.find(isDrawn) || (node.users[0] && node.users[0].users.find(isDrawn));
  for (let box = target && target.box; box; box = box.parent) box.open = true;
}

/** Opens the boxes around a node, chooses it and moves it to the middle. */
function reveal(node, focus = true) {
  openTo(node);
  redraw();
  select(node);
  const thing = drawnFor(node);
  if (thing) centre(thing);
  const part = state.parts.get(thing);
  if (part && focus) part.focus({ preventScroll: true });
}

function centre(thing) {
  if (!thing || thing.x === undefined) thing = shown((thing && thing.users && thing.users.find(isDrawn)) || state.model.root);
  if (thing.x === undefined) return;
  const size = document.getElementById("drawing").getBoundingClientRect();
  state.view.k = Math.max(state.view.k, 0.8);
  state.view.x = size.width / 2 - (thing.x + thing.w / 2) * state.view.k;
  state.view.y = size.height / 2 - (thing.y + thing.h / 2) * state.view.k;
  applyView();
}

/** The whole drawing in view, but never too small to read. */
function fit() {
  const size = document.getElementById("drawing").getBoundingClientRect();
  const root = state.model.root;
  state.view.k = Math.min(1.1, Math.max(0.8, Math.min(size.width / (root.w + 20), size.height / (root.h + 20))));
  state.view.x = (size.width - root.w * state.view.k) / 2;
  state.view.y = 8;
  applyView();
}

function applyView() {
  const { x, y, k } = state.view;
  document.getElementById("world").setAttribute("transform", `translate(${x} ${y}) scale(${k})`);
}

function passes(node) {
  const [casts, changes] = [document.getElementById("casts").checked, document.getElementById("changed").checked];
  if (casts && node.kind !== "cast" && !(node.castsIn && node.castsIn.size)) return false;
  return !changes || Boolean(node.was) || node.kind === "cast";
}

/** Fades what the filters leave out. */
function dim() {
  for (const [thing, part] of state.parts) {
    const keep = thing.children ? nodesIn(thing).some(passes) : passes(thing);
    part.classList.toggle("dim", !keep && !(thing.children && thing.open));
  }
}

function setAll(open) {
  for (const box of state.model.boxes.values()) box.open = open || !box.parent;
  redraw();
  fit();
}

function wirePointer() {
  const drawing = document.getElementById("drawing");
  let from = null;
  drawing.addEventListener("pointerdown", (event) => { from = [event.clientX, event.clientY]; state.moved = false; });
  addEventListener("pointermove", (event) => {
    if (!from || !event.buttons) return;
    const [dx, dy] = [event.clientX - from[0], event.clientY - from[1]];
    if (!state.moved && Math.hypot(dx, dy) < 4) return;
    state.moved = true;
    drawing.classList.add("dragged");
    state.view.x += dx;
    state.view.y += dy;
    from = [event.clientX, event.clientY];
    applyView();
  });
  addEventListener("pointerup", () => { from = null; drawing.classList.remove("dragged"); setTimeout(() => { state.moved = false; }); });
  drawing.addEventListener("wheel", (event) => {
    event.preventDefault();
    const size = drawing.getBoundingClientRect();
    const [px, py] = [event.clientX - size.left, event.clientY - size.top];
    const factor = Math.exp(-event.deltaY * 0.0015);
    const k = Math.min(4, Math.max(0.03, state.view.k * factor));
    state.view.x = px - ((px - state.view.x) * k) / state.view.k;
    state.view.y = py - ((py - state.view.y) * k) / state.view.k;
    state.view.k = k;
    applyView();
  }, { passive: false });
}

function wireKeys() {
  addEventListener("keydown", (event) => {
    if (["INPUT", "SELECT"].includes(event.target.tagName)) return;
    const step_by = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    if (event.key === "/") { event.preventDefault(); document.getElementById("search").focus(); }
    if (event.key === "Escape") { state.chosen = []; mark_chosen(); showBox(state.model.root); }
    if (step_by) { state.view.x += step_by[0]; state.view.y += step_by[1]; applyView(); }
  });
}

function start() {
  document.getElementById("title").textContent = data.title;
  const graphs = document.getElementById("graphs");
  data.graphs.forEach((graph, at) => add(graphs, "option", graph.name, { value: at }));
  graphs.addEventListener("change", () => openGraph(Number(graphs.value)));
  document.getElementById("expand").addEventListener("click", () => setAll(true));
  document.getElementById("collapse").addEventListener("click", () => setAll(false));
  document.getElementById("fit").addEventListener("click", fit);
  document.getElementById("view").addEventListener("click", toggleView);
  for (const name of ["casts", "changed"]) {
    document.getElementById(name).addEventListener("change", () => { dim(); if (!document.getElementById("list").hidden) drawTable(); });
  }
  wireSearch();
  wirePointer();
  wireKeys();
  openGraph(0);
}

start();
