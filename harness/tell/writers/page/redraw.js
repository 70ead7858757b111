// Pictures are drawn again from their specifications with the rows of the cells that the filter shows.
const figures = [...document.querySelectorAll("figure")].flatMap((figure) => {
  const data = document.getElementById(`${figure.id}.spec`);
  return data ? [{ figure, data, image: figure.querySelector("img"), whole: figure.querySelector("img").src }] : [];
});
let unpacked;
let lastTurn = 0;

const unpack = async () => {
  const packed = Uint8Array.from(atob(document.getElementById("vega").textContent), (c) => c.charCodeAt(0));
  const text = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
};

// The specification with the wanted rows alone; rows of no cell stay. Counts cells in `seen`.
const withRows = (part, isWanted, seen) => {
  if (Array.isArray(part)) return part.map((inner) => withRows(inner, isWanted, seen));
  if (part === null || typeof part !== "object") return part;
  return Object.fromEntries(Object.entries(part).map(([key, value]) => {
    if (key !== "values" || !Array.isArray(value)) return [key, withRows(value, isWanted, seen)];
    return [key, value.filter((row) => {
      if (row?.cell === undefined) return true;
      const wanted = isWanted(row);
      seen.set(row.cell, wanted || seen.get(row.cell));
      return wanted;
    })];
  }));
};

const address = async (spec) => {
  const compiled = vegaLite.compile(spec, { logger: vega.logger(vega.Error) }).spec;
  const view = new vega.View(vega.parse(compiled, null, { ast: true }), {
    expr: vegaInterpreter, renderer: "none", logLevel: vega.Error,
  });
  const svg = await view.toSVG();
  view.finalize();
  return `data:image/svg+xml,${encodeURIComponent(svg)}`;
};

const showOnly = async ({ figure, data, image, whole }, isWanted, turn) => {
  const seen = new Map();
  const spec = isWanted ? withRows(JSON.parse(data.textContent), isWanted, seen) : null;
  const shown = [...seen.values()].filter(Boolean).length;
  const source = shown ? await address(spec) : whole;
  if (turn !== lastTurn) return;
  image.src = source;
  image.hidden = seen.size > 0 && shown === 0;
  figure.querySelector(".left-out")?.remove();
  if (shown === seen.size) return;
  const text = `The filter hides ${seen.size - shown} of ${seen.size} cells; the caption covers all.`;
  figure.insertAdjacentHTML("beforeend", `<p class="left-out">${text}</p>`);
};

document.addEventListener("filtered", async ({ detail: isWanted }) => {
  const turn = ++lastTurn;
  if (isWanted) await (unpacked ??= unpack());
  await Promise.all(figures.map((figure) => showOnly(figure, isWanted, turn)));
  if (turn === lastTurn) document.documentElement.dataset.drawn = turn;
});
