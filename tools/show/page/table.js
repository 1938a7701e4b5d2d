// The list: every node in a row, for those who read rather than look.

const COLUMNS = [
  ["node", (node) => node.id],
  ["source", (node) => node.place || ""],
  ["module", (node) => node.module || ""],
  ["op", (node) => node.op],
  ["before", (node) => (node.kind === "cast" ? castText(node).split("→")[0] : node.was || node.dtype || "")],
  ["runs in", (node) => node.dtype || ""],
  ["bytes", (node) => (node.kind === "cast" ? bytesText(node.bytes) : "")],
  ["rule", (node) => (node.rule ? node.rule.id : "")],
  ["reason", (node) => node.overruled || node.reason || ""],
];

function drawTable() {
  const [head, body] = [document.querySelector("#list thead"), document.querySelector("#list tbody")];
  head.replaceChildren();
  body.replaceChildren();
  const titles = add(head, "tr");
  for (const [title] of COLUMNS) add(titles, "th", title);
  for (const node of state.model.graph.nodes) {
    if (!["op", "cast"].includes(node.kind) || !passes(node)) continue;
    const line = add(body, "tr", null, { tabindex: 0 });
    for (const [, value] of COLUMNS) add(line, "td", value(node));
    line.addEventListener("click", () => { select(node); mark(line); });
    line.addEventListener("keydown", (event) => { if (event.key === "Enter") { select(node); mark(line); } });
  }
}

function mark(line) {
  for (const other of document.querySelectorAll("#list tr.chosen")) other.classList.remove("chosen");
  line.classList.add("chosen");
}

function toggleView() {
  const list = document.getElementById("list");
  list.hidden = !list.hidden;
  document.getElementById("stage").hidden = !list.hidden;
  const button = document.getElementById("view");
  button.textContent = list.hidden ? "List" : "Drawing";
  button.setAttribute("aria-pressed", String(!list.hidden));
  if (!list.hidden) drawTable();
}
