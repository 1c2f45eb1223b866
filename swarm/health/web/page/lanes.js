// Where bars lie on the layer map. Pure.

// Stretches of equal neighbours: [2, 2, 1] gives {start: 0, end: 2, value: 2}, {start: 2, end: 3, value: 1}.
export function runs(values) {
  const found = [];
  values.forEach((value, place) => {
    const last = found.at(-1);
    if (last !== undefined && last.value === value) last.end = place + 1;
    else found.push({ start: place, end: place + 1, value });
  });
  return found;
}

// Put every node in the first lane that is free at its start; the order depends on spans and ids alone, so that a
// change of state moves nothing.
export function pack(nodes) {
  const order = [...nodes].sort((a, b) => a.span[0] - b.span[0] || b.span[1] - a.span[1] || (a.peer < b.peer ? -1 : 1));
  const ends = [];
  const placed = order.map((node) => {
    let lane = ends.findIndex((end) => end <= node.span[0]);
    if (lane === -1) lane = ends.length;
    ends[lane] = node.span[1];
    return { node, lane };
  });
  return { placed, lanes: ends.length };
}

// The smallest round step at which labels keep their distance.
export function step(perLayer, distance) {
  return [1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 80, 100, 128, 200].find((size) => size * perLayer >= distance) ?? 256;
}
