// Where everything stands: inside each open box its children in layers, from top to bottom, each layer in the order
// that keeps edges short. Sizes are found from the inside out, then positions from the outside in.

const GAP = { x: 18, y: 34, pad: 12, title: 24 };
const SIZE = { op: { w: 168, h: 36 }, input: { w: 150, h: 26 }, output: { w: 90, h: 26 }, closed: { w: 220, h: 62 } };

/** Lays out the whole tree: sets x, y, w, h on every visible box and node. */
function layoutGraph(model) {
  const rank = new Map();
  model.graph.nodes.forEach((node, at) => rank.set(node, at));
  const links = childLinks(model);
  measure(model.root, links);
  model.root.x = 0;
  model.root.y = 0;
  position(model.root);
}

/** The innermost visible thing that stands for a node: itself, or the outermost closed box around it. */
function shown(node) {
  let found = node;
  for (let box = node.box; box; box = box.parent) if (!box.open) found = box;
  return found;
}

/** For each open box, the edges between its children, by child. */
function childLinks(model) {
  const links = new Map();
  for (const { from, to } of model.edges) {
    const a = ancestors(shown(from));
    const b = ancestors(shown(to));
    let at = 0;
    while (at < a.length && at < b.length && a[at] === b[at]) at++;
    if (at === 0 || at >= a.length || at >= b.length) continue;
    const [first, second] = [a[at], b[at]];
    if (!links.has(second)) links.set(second, new Set());
    links.get(second).add(first);
  }
  return links;
}

/** A thing with the boxes around it, outermost first. */
function ancestors(thing) {
  const path = [thing];
  for (let box = thing.children ? thing.parent : thing.box; box; box = box.parent) path.unshift(box);
  return path;
}

function measure(box, links) {
  if (!box.open) {
    Object.assign(box, SIZE.closed);
    return;
  }
  for (const child of box.children) {
    if (child.children) measure(child, links);
    else Object.assign(child, SIZE[child.kind]);
  }
  box.layers = layered(box.children, links);
  const widths = box.layers.map((layer) => layer.reduce((sum, child) => sum + child.w + GAP.x, -GAP.x));
  const heights = box.layers.map((layer) => Math.max(...layer.map((child) => child.h)));
  const titled = box.parent ? GAP.title : 0;
  box.w = Math.max(170, ...widths) + 2 * GAP.pad;
  box.h = heights.reduce((sum, height) => sum + height + GAP.y, -GAP.y) + 2 * GAP.pad + titled;
}

/** Children by layer: each below all that it reads; inside a layer by the middle of what they read. */
function layered(children, links) {
  const level = new Map();
  const layers = [];
  for (const child of children) {
    let row = 0;
    for (const source of links.get(child) || []) if (level.has(source)) row = Math.max(row, level.get(source) + 1);
    level.set(child, row);
    (layers[row] = layers[row] || []).push(child);
  }
  const place = new Map();
  for (const layer of layers) {
    const middle = (child) => {
      const sources = [...(links.get(child) || [])].filter((source) => place.has(source));
      return sources.length ? sources.reduce((sum, s) => sum + place.get(s), 0) / sources.length : 0;
    };
    const wanted = new Map(layer.map((child) => [child, middle(child)]));
    layer.sort((a, b) => wanted.get(a) - wanted.get(b));
    const width = layer.reduce((sum, child) => sum + child.w + GAP.x, -GAP.x);
    let x = -width / 2;
    for (const child of layer) {
      place.set(child, x + child.w / 2);
      x += child.w + GAP.x;
    }
  }
  return layers;
}

function position(box) {
  let y = box.y + GAP.pad + (box.parent ? GAP.title : 0);
  for (const layer of box.layers) {
    const width = layer.reduce((sum, child) => sum + child.w + GAP.x, -GAP.x);
    let x = box.x + (box.w - width) / 2;
    for (const child of layer) {
      child.x = x;
      child.y = y;
      if (child.children && child.open) position(child);
      x += child.w + GAP.x;
    }
    y += Math.max(...layer.map((child) => child.h)) + GAP.y;
  }
}
