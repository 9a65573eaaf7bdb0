// The parts of the page that the state's handlers hang on: panes, the choice of models, controls.

function buildPane(pane, index) {
  const figure = document.createElement("figure"), beside = document.createElement("figure");
  figure.className = "map";
  beside.className = "beside";
  beside.innerHTML = '<div class="plain"><div class="ring" hidden></div></div><figcaption><strong></strong></figcaption>';
  figure.innerHTML =
    '<div class="stage" tabindex="0" role="application" aria-roledescription="map of patches"><canvas></canvas>' +
    '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true"></svg><div class="ring" hidden></div>' +
    '<div class="cores" role="group"></div></div><figcaption><strong></strong><span></span><span></span></figcaption>';
  const stage = figure.firstChild, canvas = stage.querySelector("canvas"), cores = stage.querySelector(".cores");
  const plain = beside.firstChild, photos = [stage, plain].map((parent) => {
    const photo = new Image();
    photo.src = page.images[pane.image];
    photo.alt = parent === plain ? pane.photo : "";
    parent.prepend(photo);
    return photo;
  });
  const cells = pane.squares ? [stage, plain].map((parent) => {
    parent.querySelector(".ring").insertAdjacentHTML("beforebegin", `<svg class="cells" viewBox="0 0 ${pane.lattice.columns} ${pane.lattice.rows}" ` +
      `preserveAspectRatio="none" aria-hidden="true" hidden><path class="under" d="${pane.squares}"/><path d="${pane.squares}"/></svg>`);
    return parent.querySelector(".cells");
  }) : [];
  canvas.id = `map-${index}`;
  cores.setAttribute("aria-label", `Cores of ${pane.model}`);
  const [name, model, note] = figure.lastChild.children;
  name.textContent = beside.lastChild.firstChild.textContent = pane.photo;
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
  const view = { figure, beside, stage, canvas, cells, cores, dots, name, model, note, photo: photos[0], trails: stage.querySelector("svg"),
    rings: [stage.querySelector(".ring"), plain.querySelector(".ring")] };
  const shape = (ratio) => {
    for (const part of [figure, beside]) part.style.setProperty("--ratio", `${ratio}`);
    if (panes.length === 1) $("panes").classList.toggle("stacked", ratio > 1.65);
  };
  shape(pane.lattice.columns / pane.lattice.rows);
  photos[0].addEventListener("load", () => shape(photos[0].naturalWidth / photos[0].naturalHeight));

  const shownLattice = () => content(index).lattice;
  const onDot = (event) => event.target.closest(".core");
  const under = (event, lattice) => {
    const box = event.currentTarget.getBoundingClientRect();
    return lattice.at({ x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height });
  };
  const chooseUnder = (event) => { const lattice = shownLattice(); choose(index, lattice, under(event, lattice)); };
  for (const part of [stage, plain]) {
    part.addEventListener("pointermove", (event) => { if (!state.held || event.buttons) chooseUnder(event); });
    part.addEventListener("pointerdown", (event) => { if (!onDot(event) && event.pointerType !== "mouse") chooseUnder(event); });
    part.addEventListener("click", (event) => {
      const dot = onDot(event);
      if (dot) return follow(Number(dot.dataset.core));
      const lattice = shownLattice(), same = index === state.pane && under(event, lattice) === lattice.at(state.at);
      state.held = event.pointerType !== "touch" && !(state.held && same);
      chooseUnder(event);
      requestDraw();
    });
  }
  stage.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const dot = onDot(event);
    if (event.key === "Escape") { Object.assign(state, { held: false, core: null }); requestDraw(); return; }
    if (dot && step) { // the cores are one stop of the Tab key; arrows walk through the active ones
      const active = dots.filter((other) => !other.hidden);
      active[(Number(dot.dataset.core) + (step[0] || step[1]) + active.length) % active.length].focus();
      event.preventDefault();
    } else if (!dot && step) {
      const lattice = shownLattice(), by = event.shiftKey ? 5 : 1;
      choose(index, lattice, lattice.moved(lattice.at(state.at), step.map((one) => one * by)));
      event.preventDefault();
    } else if (!dot && (event.key === "Enter" || event.key === " ")) {
      state.held = !state.held;
      requestDraw();
      event.preventDefault();
    }
  });
  $("panes").append(beside, figure);
  return view;
}

function buildModels() { // two models of one photo: each is one click away
  if (page.linked !== "models") return;
  $("models").hidden = false;
  for (const [value, words] of [...panes.map((pane, index) => [index, pane.model]), ["both", "both"]]) {
    const label = document.createElement("label"), choice = document.createElement("input"), name = document.createElement("span");
    Object.assign(choice, { type: "radio", name: "model", value });
    name.textContent = words;
    choice.addEventListener("change", () => show(value));
    label.append(choice, name);
    $("models").append(label);
  }
  show(matchMedia("(max-width: 1000px)").matches ? 0 : "both");
}

function show(model) {
  state.model = model;
  if (model !== "both") state.pane = model;
  requestDraw();
}

function buildControls() {
  const lead = leader(), depth = Math.max(...panes.map((pane) => pane.depth));
  $("budget").max = lead.budgets.length - 1;
  $("layer").max = depth - 1;
  $("budget-control").hidden = lead.budgets.length < 2;
  $("layer-control").hidden = depth < 2;
  $("cores-switch").hidden = !lead.hasCores;
  $("cells-switch").hidden = !panes.some((pane) => pane.squares);
  $("trails-switch").hidden = !panes.some((pane) => pane.moves);
  $("show-photo").checked = page.linked !== "photos" && !matchMedia("(max-width: 620px)").matches;
  const tick = (text) => Object.assign(document.createElement("span"), { textContent: text });
  $("budget-ticks").append(...lead.budgets.map(tick));
  $("layer-ticks").append(...Array.from({ length: depth }, (_, l) => tick(depth <= 12 || l % 4 === 3 || l === 0 ? l + 1 : "")));
  $("budget").addEventListener("input", (event) => { state.budget = lead.budgets[event.target.value]; keepCore(); requestDraw(); });
  $("layer").addEventListener("input", (event) => { stop(); state.layer = event.target.value / Math.max(1, depth - 1); requestDraw(); });
  const blend = () => document.body.style.setProperty("--blend", $("blend").value / 100);
  $("blend").addEventListener("input", blend);
  blend();
  for (const id of ["show-cores", "show-trails", "show-photo", "show-cells"]) $(id).addEventListener("change", requestDraw);
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
