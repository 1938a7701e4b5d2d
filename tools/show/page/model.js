// The graph as the page sees it: a tree of module boxes with ops for leaves, and the edges between ops.
//
// A box is one visit of a module: nodes that follow one another in the program and share a module path. A module that
// is called twice gives two boxes, so that all edges lead from earlier boxes to later ones.

const data = JSON.parse(document.getElementById("data").textContent);

/** Builds the tree and the edges of one graph. */
function buildGraph(graph) {
  const byId = new Map(graph.nodes.map((node) => [node.id, node]));
  for (const node of graph.nodes) {
    node.users = [];
    node.inputs = node.inputs || [];
    node.types = node.types || [];
  }
  for (const node of graph.nodes) for (const id of node.inputs) if (byId.has(id)) byId.get(id).users.push(node);
  bindBodies(graph, byId);
  const root = { path: "", name: "", children: [], open: true, depth: 0, parent: null, id: "box:" };
  const boxes = new Map([[root.id, root]]);
  const place = boxMaker(root, boxes, byId);
  for (const node of graph.nodes) if (isDrawn(node)) place(node);
  const edges = findEdges(graph, byId);
  countInside(root);
  openSome(root);
  return { graph, byId, root, boxes, edges };
}

function isDrawn(node) {
  if ((node.bodies || []).length) return false; // its bodies are drawn
  if (node.kind === "input") return !node.param && !node.in && node.users.length > 0 && node.types.length > 0;
  return node.kind === "op" || (node.kind === "output" && !node.in);
}

/** Inputs of a body stand for the operands of its op, in their order. */
function bindBodies(graph, byId) {
  for (const node of graph.nodes) {
    const operands = node.inputs.filter((id) => !(byId.get(id) || {}).kind || byId.get(id).kind !== "constant");
    for (const body of node.bodies || []) {
      const within = `${node.id}/${body}/`;
      const inputs = graph.nodes.filter((inner) => inner.in === within && inner.kind === "input");
      inputs.forEach((input, at) => { input.standsFor = operands.length === inputs.length ? operands[at] : node.id; });
    }
  }
}

/** Returns a function that hangs a node into the tree, in the box of its module; boxes are opened as the program goes. */
function boxMaker(root, boxes, byId) {
  let current = root;
  const visits = new Map();
  const enter = (parent, { name, path, kind, module }) => {
    const visit = (visits.get(path) || 0) + 1;
    visits.set(path, visit);
    const box = { path, module, name: visit > 1 ? `${name} (${visit})` : name, children: [], open: false, parent, kind,
      depth: parent.depth + 1, id: `box:${path}#${visit}`, className: "" };
    parent.children.push(box);
    boxes.set(box.id, box);
    return box;
  };
  return (node) => {
    const wanted = boxPath(node, byId);
    const open = [];
    for (let box = current; box.parent; box = box.parent) open.unshift(box);
    let shared = 0;
    while (shared < open.length && shared < wanted.length && open[shared].path === wanted[shared].path) shared++;
    current = shared ? open[shared - 1] : root;
    for (const step of wanted.slice(shared)) current = enter(current, step);
    if (current !== root && !current.className && current.module === node.module) current.className = node.class || "";
    node.box = current;
    current.children.push(node);
  };
}

/** The boxes around a node, outermost first: its module's path; of a body's node, those of the op whose body it is. */
function boxPath(node, byId) {
  const within = (node.in || "").split("/").filter(Boolean);
  const body = within.pop();
  const owner = body === undefined ? null : byId.get(within.join("/"));
  const steps = owner ? boxPath(owner, byId) : [];
  if (owner) steps.push({ name: `${owner.op}: ${body}`, path: node.in, kind: "body" });
  let path = (owner && owner.module) || "";
  const module = node.module || "";
  const rest = path && module.startsWith(`${path}.`) ? module.slice(path.length + 1) : module === path ? "" : module;
  if (rest === module) path = "";
  for (const part of rest.split(".").filter(Boolean)) {
    path = path ? `${path}.${part}` : part;
    steps.push({ name: part, path: `${node.in || ""}${path}`, kind: "module", module: path });
  }
  return steps;
}

/** Edges between drawn nodes, with the casts that lie on them; casts of parameters stay with the op that reads them. */
function findEdges(graph, byId) {
  const edges = [];
  for (const node of graph.nodes) {
    if (!isDrawn(node)) continue;
    node.own = [];
    node.castsIn = new Set();
    for (const id of node.inputs) {
      const casts = [];
      const source = drawnSource(byId.get(id), byId, casts);
      if (source) edges.push({ from: source, to: node, casts });
      else node.own.push(...casts);
      for (const cast of casts) node.castsIn.add(cast);
    }
  }
  return edges;
}

/** Follows casts, picks and the inputs of bodies back to a node that is drawn; collects the casts on the way. */
function drawnSource(node, byId, casts) {
  for (let steps = 0; node && steps < 64; steps++) {
    if (isDrawn(node) && node.kind !== "output") return node;
    if (node.kind === "cast") casts.unshift(node);
    node = byId.get(nextBack(node, byId));
  }
  return null;
}

/** What a node that is not drawn stands for; a pick of a higher-order op's results stands for its body's result. */
function nextBack(node, byId) {
  if (node.standsFor) return node.standsFor;
  if (!["cast", "pick"].includes(node.kind)) return null;
  const source = byId.get(node.inputs[0]);
  const body = source && (source.bodies || [])[0];
  const output = body && byId.get(`${source.id}/${body}/output`);
  if (!output) return node.inputs[0];
  const index = Number((/(\d+)\D*$/.exec(node.call || "") || [0, 0])[1]);
  return output.inputs[Math.min(index, output.inputs.length - 1)];
}

/** Sums over what is inside each box: ops, dtypes, casts and their bytes. */
function countInside(box) {
  box.ops = 0; box.dtypes = {}; box.casts = 0; box.bytes = 0;
  for (const child of box.children) {
    if (child.children) {
      countInside(child);
      box.ops += child.ops; box.casts += child.casts; box.bytes += child.bytes;
      for (const [dtype, count] of Object.entries(child.dtypes)) box.dtypes[dtype] = (box.dtypes[dtype] || 0) + count;
    } else {
      const dtype = child.dtype || "other";
      if (child.counts) box.ops += 1;
      if (child.counts) box.dtypes[dtype] = (box.dtypes[dtype] || 0) + 1;
      if (!child.castsIn) continue;
      box.casts += child.castsIn.size;
      for (const cast of child.castsIn) box.bytes += cast.bytes || 0;
    }
  }
}

/** Opens boxes from the outside in until there is enough to look at; the layers of a stack stay closed. */
function openSome(root) {
  const enough = 40;
  let visible = root.children.length;
  let row = [root];
  while (row.length) {
    const next = [];
    for (const box of row) {
      for (const child of box.children) {
        if (!child.children || /^\d+( \(\d+\))?$/.test(child.name)) continue;
        if (visible + child.children.length > enough) continue;
        child.open = true;
        visible += child.children.length;
        next.push(child);
      }
    }
    row = next;
  }
}
