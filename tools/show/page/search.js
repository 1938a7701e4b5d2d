// Search: every word must be found in a node's name, op, module, rule, dtypes, source or reason.

function haystack(node) {
  if (node.text === undefined) {
    const rule = node.rule ? `${node.rule.id} ${node.rule.cast}` : "";
    node.text = [node.name, node.op, node.module, node.class, rule, node.dtype, node.was, node.place, node.code,
      node.reason, node.overruled].filter(Boolean).join(" ").toLowerCase();
  }
  return node.text;
}

function runSearch(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const nodes = state.model.graph.nodes;
  state.hits = words.length ? nodes.filter((node) => words.every((word) => haystack(node).includes(word))) : [];
  state.hit = -1;
  document.getElementById("found").textContent = words.length ? `${state.hits.length} found` : "";
  showHits();
  if (state.hits.length) step(1, false);
}

/** Goes to the next (1) or previous (-1) match. */
function step(direction, focus = true) {
  if (!state.hits.length) return;
  state.hit = (state.hit + direction + state.hits.length) % state.hits.length;
  document.getElementById("found").textContent = `${state.hit + 1} of ${state.hits.length}`;
  reveal(state.hits[state.hit], focus);
}

function showHits() {
  for (const part of state.parts.values()) part.classList.remove("hit");
  const limit = 2000;
  for (const node of state.hits.slice(0, limit)) {
    const part = state.parts.get(drawnFor(node));
    if (part) part.classList.add("hit");
  }
}

/** The thing in the drawing where a node is seen: itself, its tag, the op that reads it, or a closed box around it. */
function drawnFor(node) {
  if (isDrawn(node)) return shown(node);
  if (state.parts.has(node)) return node;
  const user = node.users.find(isDrawn) || (node.users[0] && node.users[0].users.find(isDrawn));
  return user ? shown(user) : null;
}

function wireSearch() {
  const field = document.getElementById("search");
  field.addEventListener("input", () => runSearch(field.value));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") step(event.shiftKey ? -1 : 1, false);
    if (event.key === "Escape") { field.value = ""; runSearch(""); field.blur(); }
  });
  document.getElementById("next").addEventListener("click", () => step(1));
  document.getElementById("previous").addEventListener("click", () => step(-1));
}
