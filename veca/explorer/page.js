// The page: one state, one `draw` that shows it, and handlers that change it.

const $ = (id) => document.getElementById(id);

const state = {
  tab: "similarity", budget: 0, layer: 1, // budget in cores; layer as a fraction of the depth
  pane: 0, patch: 0, held: false, // the patch asked about
  core: null, kind: "reads", // the core that is followed, and which of its maps is shown
};
let page, panes = [], views = [], timer = 0;

// What a pane shows now: values for the colour map, or colours, or nothing with a reason.
function content(index) {
  const pane = panes[index], layer = pane.layerAt(state.layer), budget = pane.budgetAt(state.budget);
  const from = pane.step(layer, budget).low;
  if (state.tab === "colours") return { colours: pane.colours("colours", layer, budget) };
  if (state.tab === "global") return stretched(pane.cosines(layer, budget, pane.vectorOfCore(layer, budget, 0)));
  if (state.tab === "contributions") {
    if (!pane.hasCores) return { nothing: "This model has no cores." };
    if (state.core === null) return { colours: pane.colours("profiles", layer, budget) };
    const core = Math.min(state.core, pane.coresIn(budget) - 1);
    if (state.kind === "alike") return stretched(pane.cosines(layer, budget, pane.vectorOfCore(layer, budget, core)));
    const values = pane.map(state.kind, layer, budget, core);
    return { values, low: 0, high: Math.max(...values) || 1, number: state.kind === "reads" ? (share) => times(share * pane.count) : percent };
  }
  const query = state.patch;
  if (page.linked === "photos" && index !== state.pane) { // the patch of the other photo, looked for in this one
    const source = panes[state.pane];
    const values = pane.cosines(layer, budget, source.vectorOfPatch(layer, budget, query));
    const best = Math.max(...values); // two photos are rarely as alike as one is to itself: half way is bright enough
    return { values, low: from, high: Math.max(best, (from + 1) / 2), match: values.indexOf(best) };
  }
  const own = index === state.pane ? query : samePlace(query, panes[state.pane], pane);
  return { values: pane.cosines(layer, budget, pane.vectorOfPatch(layer, budget, own)), low: from, high: 1, own };
}

function stretched(values) {
  const sorted = Float32Array.from(values).sort();
  return { values, low: sorted[Math.floor(values.length * 0.01)], high: sorted[Math.ceil(values.length * 0.99) - 1] };
}

function samePlace(index, from, to) {
  const row = Math.floor(((Math.floor(index / from.columns) + 0.5) / from.rows) * to.rows);
  const column = Math.floor((((index % from.columns) + 0.5) / from.columns) * to.columns);
  return row * to.columns + column;
}

function paint(canvas, shown) {
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
  views.forEach((view, index) => {
    const pane = panes[index];
    paint(view.canvas, shown[index]);
    drawCores(view, pane, index);
    const asks = state.tab !== "global" && !(state.tab === "contributions" && state.core !== null);
    const at = index === state.pane ? state.patch : page.linked === "models" ? samePlace(state.patch, panes[state.pane], pane) : shown[index].match;
    placeRing(view.ring, pane, at, at !== undefined && (asks || index === state.pane));
    view.ring.classList.toggle("match", index !== state.pane && page.linked === "photos");
    view.ring.classList.toggle("held", state.held);
    view.stage.setAttribute("aria-label", describeStage(pane, index));
    view.note.textContent = captionOf(pane, shown[index]);
  });
  drawControls(shown);
}

function placeRing(ring, pane, index, visible) {
  ring.hidden = !visible;
  if (!visible) return;
  ring.style.left = (index % pane.columns) / pane.columns * 100 + "%";
  ring.style.top = Math.floor(index / pane.columns) / pane.rows * 100 + "%";
  ring.style.width = `calc(${100 / pane.columns}% + 4px)`;
  ring.style.height = `calc(${100 / pane.rows}% + 4px)`;
}

function drawCores(view, pane, index) {
  const visible = pane.hasCores && $("show-cores").checked;
  view.cores.hidden = !visible;
  view.trails.replaceChildren();
  if (!pane.hasCores) return;
  const layer = pane.layerAt(state.layer), budget = pane.budgetAt(state.budget), active = pane.coresIn(budget);
  const places = pane.places(layer, budget), { width, height } = view.stage.getBoundingClientRect();
  const asks = state.tab === "contributions" && state.core === null;
  const asked = page.linked === "models" && index !== state.pane ? samePlace(state.patch, panes[state.pane], pane) : state.patch;
  const profile = asks && (index === state.pane || page.linked === "models") ? pane.profile(layer, budget, asked) : [];
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
  if (!visible || !$("show-trails").checked) return;
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
  const lead = panes.find((pane) => pane.hasCores) ?? panes[0];
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
}

// Changing the state.

function choose(pane, patch) {
  if (pane === state.pane && patch === state.patch) return;
  Object.assign(state, { pane, patch });
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

function patchUnder(event, view, pane) {
  const box = view.stage.getBoundingClientRect();
  const clamp = (value, count) => Math.min(count - 1, Math.max(0, Math.floor(value * count)));
  return clamp((event.clientY - box.top) / box.height, pane.rows) * pane.columns + clamp((event.clientX - box.left) / box.width, pane.columns);
}

function buildPane(pane, index) {
  const figure = document.createElement("figure");
  const photo = new Image();
  photo.src = page.images[pane.image];
  photo.alt = "";
  figure.innerHTML =
    '<div class="stage" tabindex="0" role="application" aria-roledescription="map of patches"><canvas></canvas>' +
    '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true"></svg><div class="ring" hidden></div>' +
    '<div class="cores" role="group"></div></div><figcaption><strong></strong><span></span><span></span></figcaption>';
  const stage = figure.firstChild, canvas = stage.querySelector("canvas"), cores = stage.querySelector(".cores");
  stage.prepend(photo);
  canvas.id = `map-${index}`;
  canvas.width = pane.columns;
  canvas.height = pane.rows;
  cores.setAttribute("aria-label", `Cores of ${pane.model}`);
  const [name, model, note] = figure.lastChild.children;
  name.textContent = pane.photo;
  model.textContent = `${pane.model} · ${pane.columns} × ${pane.rows} patches`;
  const dots = Array.from({ length: pane.hasCores ? Math.max(...pane.budgets) : 0 }, (_, core) => {
    const dot = document.createElement("button");
    dot.type = "button";
    dot.className = "core";
    dot.dataset.core = core;
    dot.setAttribute("aria-label", `Core ${core}`);
    dot.innerHTML = `<i></i><b>${core}</b>`;
    cores.append(dot);
    return dot;
  });
  const view = { figure, stage, canvas, cores, dots, note, ring: stage.querySelector(".ring"), trails: stage.querySelector("svg") };
  figure.style.setProperty("--ratio", `${pane.columns / pane.rows}`);
  photo.addEventListener("load", () => figure.style.setProperty("--ratio", `${photo.naturalWidth / photo.naturalHeight}`));

  const onDot = (event) => event.target.closest(".core");
  stage.addEventListener("pointermove", (event) => {
    if (!state.held || event.buttons) choose(index, patchUnder(event, view, pane));
  });
  stage.addEventListener("pointerdown", (event) => {
    if (!onDot(event) && event.pointerType !== "mouse") choose(index, patchUnder(event, view, pane));
  });
  stage.addEventListener("click", (event) => {
    const dot = onDot(event);
    if (dot) return follow(Number(dot.dataset.core));
    const patch = patchUnder(event, view, pane);
    state.held = event.pointerType !== "touch" && !(state.held && patch === state.patch && index === state.pane);
    choose(index, patch);
    requestDraw();
  });
  stage.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const dot = onDot(event);
    if (event.key === "Escape") { Object.assign(state, { held: false, core: null }); requestDraw(); return; }
    if (dot && step) { // the cores are one stop of the Tab key; arrows walk through the active ones
      const active = dots.filter((other) => !other.hidden);
      active[(Number(dot.dataset.core) + (step[0] || step[1]) + active.length) % active.length].focus();
      event.preventDefault();
    } else if (!dot && step) {
      const by = event.shiftKey ? 5 : 1, at = index === state.pane ? state.patch : samePlace(state.patch, panes[state.pane], pane);
      const row = Math.min(pane.rows - 1, Math.max(0, Math.floor(at / pane.columns) + step[0] * by));
      const column = Math.min(pane.columns - 1, Math.max(0, (at % pane.columns) + step[1] * by));
      choose(index, row * pane.columns + column);
      event.preventDefault();
    } else if (!dot && (event.key === "Enter" || event.key === " ")) {
      state.held = !state.held;
      requestDraw();
      event.preventDefault();
    }
  });
  $("panes").append(figure);
  return view;
}

function buildControls() {
  const lead = panes.find((pane) => pane.hasCores) ?? panes[0], depth = Math.max(...panes.map((pane) => pane.depth));
  $("budget").max = lead.budgets.length - 1;
  $("layer").max = depth - 1;
  $("budget-control").hidden = lead.budgets.length < 2;
  $("layer-control").hidden = depth < 2;
  $("switches").hidden = !lead.hasCores;
  const tick = (text) => Object.assign(document.createElement("span"), { textContent: text });
  $("budget-ticks").append(...lead.budgets.map(tick));
  $("layer-ticks").append(...Array.from({ length: depth }, (_, l) => tick(depth <= 12 || l % 4 === 3 || l === 0 ? l + 1 : "")));
  $("budget").addEventListener("input", (event) => { state.budget = lead.budgets[event.target.value]; keepCore(); requestDraw(); });
  $("layer").addEventListener("input", (event) => { stop(); state.layer = event.target.value / Math.max(1, depth - 1); requestDraw(); });
  const blend = () => document.body.style.setProperty("--blend", $("blend").value / 100);
  $("blend").addEventListener("input", blend);
  blend();
  for (const id of ["show-cores", "show-trails"]) $(id).addEventListener("change", requestDraw);
  for (const choice of document.getElementsByName("kind")) choice.addEventListener("change", () => { state.kind = choice.value; requestDraw(); });
  $("core-close").addEventListener("click", () => { state.core = null; requestDraw(); });
  $("play").addEventListener("click", () => (timer ? stop() : play(depth)));
  $("tabs").addEventListener("click", (event) => {
    const tab = event.target.dataset.tab;
    if (!tab) return;
    if (tab !== "contributions") state.core = null;
    state.tab = tab;
    draw(); // at once: the Tab key must find the new stop
  });
  $("tabs").addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = [...$("tabs").children];
    if (!move) return;
    const next = all[(all.indexOf(event.target) + move + all.length) % all.length];
    next.focus();
    next.click();
  });
  const bar = $("bar").getContext("2d"), image = bar.createImageData(256, 1);
  for (let i = 0; i < 256; i++) image.data.set([...VIRIDIS.subarray(3 * i, 3 * i + 3), 255], 4 * i);
  bar.putImageData(image, 0, 0);
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

function setUpTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = (theme) => { document.documentElement.dataset.theme = theme; };
  const follow = () => show(dark.matches ? "dark" : "light");
  dark.addEventListener("change", follow);
  follow();
  $("theme").addEventListener("click", () => {
    dark.removeEventListener("change", follow);
    show(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
}

async function begin() {
  setUpTheme();
  if (typeof DecompressionStream === "undefined") throw new Error("this page needs a browser of 2023 or later");
  page = JSON.parse($("table").textContent);
  const buffer = await unpack($("blob").textContent.trim());
  panes = page.panes.map((table) => new Pane(table, buffer, page.levels));
  $("panes").classList.toggle("two", panes.length > 1);
  views = panes.map(buildPane);
  state.budget = Math.max(0, ...panes.flatMap((pane) => pane.budgets));
  state.patch = Math.floor(panes[0].rows / 2) * panes[0].columns + Math.floor(panes[0].columns / 2);
  buildControls();
  const names = (key) => [...new Set(panes.map((pane) => pane[key]))].join(" and ");
  $("about").textContent = `${names("photo")} through ${names("model")}`;
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
