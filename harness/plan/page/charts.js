// Draws curves over the number of ranks as SVG text.

const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A6D00"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const WIDTH = 430, HEIGHT = 300, LEFT = 52, RIGHT = 12, TOP = 30, BOTTOM = 44;

function steps(least, most, logarithmic) {
  const found = [];
  if (logarithmic) {
    for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power++) {
      for (const factor of [1, 2, 5]) {
        const value = factor * 10 ** power;
        if (value >= least && value <= most) found.push(value);
      }
    }
    return found;
  }
  const rough = most / 5, power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough) || 1;
  for (let value = 0; value <= most * 1.0001; value += step) found.push(value);
  return found;
}

function chart(title, sizes, curves, { limit = null, logarithmic = false, size = null } = {}) {
  const values = curves.flatMap((curve) => curve.points.map((point) => point[1])).filter((v) => v !== null);
  if (!values.length) return "";
  const reach = limit === null ? values : [...values, limit];
  const most = Math.max(...reach) * 1.08 || 1;
  const least = logarithmic ? Math.min(...reach.filter((v) => v > 0)) / 1.15 : 0;
  const across = (n) => {
    const from = Math.log2(sizes[0]), to = Math.log2(sizes[sizes.length - 1]);
    return LEFT + (WIDTH - LEFT - RIGHT) * (to === from ? 0.5 : (Math.log2(n) - from) / (to - from));
  };
  const up = (v) => {
    const share = logarithmic
      ? (Math.log(v) - Math.log(least)) / (Math.log(most) - Math.log(least)) : v / most;
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share;
  };
  const line = (x1, y1, x2, y2, more) => `<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" ${more}/>`;
  const text = (x, y, words, more) => `<text x="${x}" y="${y}" ${more}>${words}</text>`;
  const grey = 'fill="#7A7A7A" font-size="11"';
  const parts = [text(LEFT, 18, title, 'fill="#7A7A7A" font-size="12"')];
  for (const value of steps(least, most, logarithmic)) {
    const y = up(value).toFixed(1);
    parts.push(line(LEFT, y, WIDTH - RIGHT, y, 'stroke="#7A7A7A" stroke-opacity="0.25"'));
    parts.push(text(LEFT - 6, Number(y) + 4, value.toLocaleString("en"), `${grey} text-anchor="end"`));
  }
  for (const n of sizes) {
    parts.push(text(across(n), HEIGHT - BOTTOM + 16, n.toLocaleString("en"), `${grey} text-anchor="middle"`));
  }
  parts.push(text((LEFT + WIDTH) / 2, HEIGHT - 8, "ranks", `${grey} text-anchor="middle"`));
  if (size !== null) {
    const x = across(size).toFixed(1);
    parts.push(line(x, TOP, x, HEIGHT - BOTTOM, 'stroke="#7A7A7A" stroke-opacity="0.6"'));
  }
  if (limit !== null) {
    const y = up(limit).toFixed(1);
    parts.push(line(LEFT, y, WIDTH - RIGHT, y, 'stroke="#7A7A7A" stroke-width="2" stroke-dasharray="2 2"'));
  }
  for (const { index, points } of curves) {
    const known = points.filter((point) => point[1] !== null && (!logarithmic || point[1] > 0));
    const colour = COLOURS[index % COLOURS.length];
    const dash = DASHES[Math.floor(index / COLOURS.length) % DASHES.length];
    const places = known.map(([n, v]) => `${across(n).toFixed(1)},${up(v).toFixed(1)}`);
    const stroke = `fill="none" stroke="${colour}" stroke-width="1.6" stroke-dasharray="${dash}"`;
    parts.push(`<polyline points="${places.join(" ")}" ${stroke}/>`);
    for (const place of places) {
      const [x, y] = place.split(",");
      parts.push(`<circle cx="${x}" cy="${y}" r="2.4" fill="${colour}"/>`);
    }
  }
  const box = `viewBox="0 0 ${WIDTH} ${HEIGHT}" width="${WIDTH}" height="${HEIGHT}"`;
  return `<svg xmlns="http://www.w3.org/2000/svg" ${box} font-family="sans-serif" role="img" ` +
    `aria-label="${title}">${parts.join("")}</svg>`;
}

function charts(data, evaluate, b, s, size, hidden = new Set()) {
  const labels = Object.keys(data.rows);
  const curve = (read) => labels.map((label, index) => ({
    index,
    points: data.sizes.map((n) => {
      const found = evaluate(data, label, n, b, s);
      const value = found.unsupported || hidden.has(label) ? undefined : read(found);
      return [n, value === undefined ? null : value];
    }),
  })).filter((one) => one.points.some((point) => point[1] !== null));
  const limit = data.device ? data.device.memory_bytes / 1e9 : null;
  const needed = (found) => found.needed === undefined ? undefined : found.needed / 1e9;
  return [
    chart("GB of memory per rank" + (data.device ? `; dashed: ${data.device.name}` : ""), data.sizes,
      curve(needed), { limit, logarithmic: true, size }),
    chart("tokens/s per GPU", data.sizes, curve((found) => found.tokens), { size }),
    chart("exposed communication, % of the step", data.sizes,
      curve((found) => found.step === undefined ? undefined : (100 * found.exposed) / found.step), { size }),
  ];
}

if (typeof module !== "undefined") module.exports = { charts, COLOURS, DASHES };
