// The page: one state, one `draw` that shows it, and handlers that change it.

const $ = (id) => document.getElementById(id);

const state = {
  tab: "similarity", budget: 0, layer: 1, // budget in cores; layer as a fraction of the depth
  pane: 0, at: { x: 0.5, y: 0.5 }, held: false, // the place asked about, as fractions of the photo
  model: "both", // of two models: the number of the one that is shown, or both
  core: null, kind: "reads", // the core that is followed, and which of its maps is shown
};
let page, panes = [], views = [], timer = 0;

// What a pane shows now: values for the colour map, or colours, or nothing with a reason; and the squares they fill.
function content(index) {
  const pane = panes[index], layer = pane.layerAt(state.layer), budget = pane.budgetAt(state.budget);
  const from = pane.step(layer, budget).low, lattice = pane.featureLattice(layer);
  if (state.tab === "colours") return { lattice, colours: pane.colours("colours", layer, budget, lattice) };
  if (state.tab === "global") return { lattice, ...stretched(pane.cosines(layer, budget, pane.vectorOfCore(layer, budget, 0))) };
  if (state.tab === "contributions") {
    const grid = pane.lattice;
    if (!pane.hasCores) return { lattice: grid, nothing: "This model has no cores." };
    if (state.core === null) return { lattice: grid, colours: pane.colours("profiles", layer, budget, grid) };
    const core = Math.min(state.core, pane.coresIn(budget) - 1);
    if (state.kind === "alike") return { lattice, ...stretched(pane.cosines(layer, budget, pane.vectorOfCore(layer, budget, core))) };
    const values = pane.map(state.kind, layer, budget, core);
    return { lattice: grid, values, low: 0, high: Math.max(...values) || 1, number: state.kind === "reads" ? (share) => times(share * pane.count) : percent };
  }
  if (page.linked === "photos" && index !== state.pane) { // the patch of the other photo, looked for in this one
    const source = panes[state.pane], asked = source.featureLattice(layer).at(state.at);
    const values = pane.cosines(layer, budget, source.vectorOfPatch(layer, budget, asked));
    const best = Math.max(...values); // two photos are rarely as alike as one is to itself: half way is bright enough
    return { lattice, values, from, low: from, high: Math.max(best, (from + 1) / 2), match: values.indexOf(best) };
  }
  const own = lattice.at(state.at);
  return { lattice, values: pane.cosines(layer, budget, pane.vectorOfPatch(layer, budget, own)), from, low: from, high: 1 };
}

function stretched(values) {
  const sorted = Float32Array.from(values).sort();
  return { values, low: sorted[Math.floor(values.length * 0.01)], high: sorted[Math.ceil(values.length * 0.99) - 1] };
}

function paint(canvas, shown) {
  const { columns, rows } = shown.lattice;
  if (canvas.width !== columns || canvas.height !== rows) Object.assign(canvas, { width: columns, height: rows });
  const context = canvas.getContext("2d", { willReadFrequently: true }), count = canvas.width * canvas.height;
  const image = context.createImageData(canvas.width, canvas.height), data = image.data;
  if (shown.values) {
    const scale = 255 / Math.max(shown.high - shown.low, 1e-9);
    for (let i = 0; i < count; i++) {
      const level = Math.round(Math.min(255, Math.max(0, (shown.values[i] - shown.low) * scale))) * 3;
      data[4 * i] = VIRIDIS[level]; data[4 * i + 1] = VIRIDIS[level + 1]; data[4 * i + 2] = VIRIDIS[level + 2];
      data[4 * i + 3] = 255;
    }
  } else if (shown.colours) {
    for (let i = 0; i < count; i++) {
      for (let c = 0; c < 3; c++) data[4 * i + c] = shown.colours[3 * i + c];
      data[4 * i + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}

function draw() {
  const shown = panes.map((_, index) => content(index));
  $("panes").classList.toggle("two", panes.length > 1 && state.model === "both");
  views.forEach((view, index) => {
    const pane = panes[index], { lattice, match } = shown[index];
    view.figure.hidden = state.model !== "both" && state.model !== index;
    view.beside.hidden = !$("show-photo").checked || panes.findIndex((other) => other.image === pane.image) !== index;
    paint(view.canvas, shown[index]);
    for (const cells of view.cells) cells.toggleAttribute("hidden", !$("show-cells").checked);
    drawCores(view, pane, index);
    const asks = state.tab !== "global" && !(state.tab === "contributions" && state.core !== null);
    const here = index === state.pane || page.linked === "models";
    const at = here ? lattice.at(state.at) : match;
    for (const ring of view.rings) {
      placeRing(ring, lattice, at, at !== undefined && (asks || index === state.pane));
      ring.classList.toggle("match", !here);
      ring.classList.toggle("held", state.held);
    }
    view.stage.setAttribute("aria-label", describeStage(pane, index, lattice));
    view.name.hidden = $("show-photo").checked; // it stands below the photo
    view.note.textContent = captionOf(shown[index]);
    view.model.textContent = `${pane.model} · ${lattice.columns} × ${lattice.rows} patches`;
  });
  drawControls(shown);
  keepState();
}

function placeRing(ring, { rows, columns }, index, visible) {
  ring.hidden = !visible;
  if (!visible) return;
  ring.style.left = (index % columns) / columns * 100 + "%";
  ring.style.top = Math.floor(index / columns) / rows * 100 + "%";
  ring.style.width = `calc(${100 / columns}% + 4px)`;
  ring.style.height = `calc(${100 / rows}% + 4px)`;
}

function drawCores(view, pane, index) {
  const visible = pane.hasCores && $("show-cores").checked;
  view.cores.hidden = !visible;
  view.trails.replaceChildren();
  if (!pane.hasCores) return;
  const layer = pane.layerAt(state.layer), budget = pane.budgetAt(state.budget), active = pane.coresIn(budget);
  const places = pane.places(layer, budget), { width, height } = view.stage.getBoundingClientRect();
  const asks = state.tab === "contributions" && state.core === null;
  const profile = asks && (index === state.pane || page.linked === "models") ? pane.profile(layer, budget, pane.lattice.at(state.at)) : [];
  const weight = new Map(profile.map(({ core, share }) => [core, 0.5 + 2.2 * Math.sqrt(share / (profile[0].share || 1))]));
  view.dots.forEach((dot, core) => {
    dot.hidden = core >= active;
    if (core >= active) return;
    dot.style.transform = `translate(${places[core].x * width}px, ${places[core].y * height}px)`;
    dot.classList.toggle("left", places[core].x > 0.8);
    dot.setAttribute("aria-pressed", state.core === core);
    dot.tabIndex = core === (state.core !== null && state.core < active ? state.core : 0) ? 0 : -1;
    dot.firstChild.style.setProperty("--weight", weight.get(core) ?? 1);
  });
  view.stage.classList.toggle("dimmed", state.core !== null);
  if (!visible || !pane.moves || !$("show-trails").checked) return;
  const steps = Array.from({ length: layer + 1 }, (_, l) => pane.places(l, budget));
  for (const kind of ["trail under", "trail"]) {
    for (let core = 0; core < active; core++) {
      const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
      line.setAttribute("points", steps.map((step) => `${(step[core].x * 1000).toFixed(1)},${(step[core].y * 1000).toFixed(1)}`).join(" "));
      line.setAttribute("class", kind + (core === state.core ? " chosen" : ""));
      view.trails.append(line);
    }
  }
}

function drawControls(shown) {
  const lead = leader();
  const budget = lead.budgetAt(state.budget), tab = TABS[state.tab], first = shown[state.pane];
  for (const button of $("tabs").children) {
    const chosen = button.dataset.tab === state.tab;
    button.setAttribute("aria-selected", chosen);
    button.tabIndex = chosen ? 0 : -1;
  }
  $("budget").value = budget;
  $("budget-value").textContent = lead.hasCores ? `${lead.budgets[budget]} of ${lead.budgets.at(-1)}` : "none";
  $("budget").setAttribute("aria-valuetext", `${lead.budgets[budget]} active cores`);
  const depths = [...new Set(panes.map((pane) => pane.depth))];
  $("layer").value = Math.round(state.layer * (Math.max(...depths) - 1));
  $("layer-value").textContent = `${lead.layerAt(state.layer) + 1} of ${lead.depth}`;
  $("layer").setAttribute("aria-valuetext", `layer ${lead.layerAt(state.layer) + 1} of ${lead.depth}`);
  const following = state.tab === "contributions" && state.core !== null;
  $("core-box").hidden = !following;
  $("core-name").textContent = following ? `Core ${state.core}${state.core === 0 ? ", the global one" : ""}` : "";
  const words = wordsFor(following);
  $("legend-title").textContent = words.title ?? tab.title;
  $("legend-words").textContent = words.text;
  $("scale").hidden = !first.values;
  if (first.values) {
    const number = first.number ?? cosine;
    $("low").textContent = `${words.low ?? tab.low}  ${number(first.low)}`;
    $("high").textContent = `${number(first.high)}  ${words.high ?? tab.high}`;
  }
  $("readout").textContent = readout(first);
  for (const choice of document.getElementsByName("model")) choice.checked = choice.value === String(state.model);
  for (const choice of document.getElementsByName("kind")) choice.checked = choice.value === state.kind;
}

// The pane that sliders speak of.
const leader = () => panes.find((pane) => pane.hasCores) ?? panes[0];

// Changing the state.

function choose(pane, lattice, index) {
  const at = lattice.centre(index);
  if (pane === state.pane && at.x === state.at.x && at.y === state.at.y) return;
  Object.assign(state, { pane, at });
  requestDraw();
}

function follow(core) {
  state.core = state.core === core ? null : core;
  if (state.core !== null) state.tab = "contributions";
  requestDraw();
}

let asked = false;
function requestDraw() { // at most once a frame, however fast the pointer moves
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; draw(); });
}

function keepCore() { // a core beyond the new budget is not active any more
  if (state.core !== null && state.core >= state.budget) state.core = null;
}

function play(depth) {
  let layer = -1;
  const next = () => {
    layer = (layer + 1) % depth;
    state.layer = layer / Math.max(1, depth - 1);
    requestDraw();
    if (layer === depth - 1) stop();
  };
  timer = setInterval(next, 550);
  $("play-shape").setAttribute("d", "M5 4h3.5v12H5zM11.5 4H15v12h-3.5z");
  $("play").setAttribute("aria-label", "Stop");
  next();
}

function stop() {
  clearInterval(timer);
  timer = 0;
  $("play-shape").setAttribute("d", "M6 3.5v13l10-6.5z");
  $("play").setAttribute("aria-label", "Play through the layers");
}

async function begin() {
  setUpTheme();
  if (typeof DecompressionStream === "undefined") throw new Error("this page needs a browser of 2023 or later");
  page = JSON.parse($("table").textContent);
  const buffer = await unpack($("blob").textContent.trim());
  panes = page.panes.map((table) => new Pane(table, buffer, page.levels));
  views = panes.map(buildPane);
  state.budget = Math.max(0, ...panes.flatMap((pane) => pane.budgets));
  choose(0, panes[0].finest, panes[0].finest.at({ x: 0.5, y: 0.5 }));
  buildControls();
  buildModels();
  buildKeeping();
  $("about").textContent = `${names("photo", panes)} through ${names("model", panes)}`;
  $("made").textContent = `Made with veca ${page.version}.`;
  $("loading").remove();
  new ResizeObserver(requestDraw).observe($("panes"));
  draw();
  draw(); // now the words exist that the photos' descriptions repeat
  document.documentElement.dataset.ready = "yes";
}

begin().catch((error) => {
  $("loading").className = "problem";
  $("loading").textContent = `This page cannot be shown: ${error.message}.`;
  throw error;
});
