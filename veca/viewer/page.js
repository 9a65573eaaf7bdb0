// The page: one state, `draw` that shows it, `place` that keeps it over the image, and handlers that change it.

const $ = (id) => document.getElementById(id);
const TABS = ["similar", "colours", "overall"];

const state = {
  tab: "similar",
  at: null, // the place asked about, in pixels of the image
  core: null, // or the core
  box: null, // [x, y, width, height] in pixels of the image
  places: [], // what was found for it
  drawing: false, // whether a drag draws a box
};
let image; // what the server says of the image
let viewer, seen = null, wanted = null, timer = 0;

// Asking the server.

async function ask(path, options = {}) {
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Error(said.error ?? `the viewer answered ${answer.status}`);
}

function visible() { // the part of the image on the screen, in whole pixels
  const bounds = viewer.viewport.viewportToImageRectangle(viewer.viewport.getBounds(false));
  const [width, height] = image.size;
  const left = Math.max(0, Math.floor(bounds.x)), top = Math.max(0, Math.floor(bounds.y));
  const right = Math.min(width, Math.ceil(bounds.x + bounds.width)), bottom = Math.min(height, Math.ceil(bounds.y + bounds.height));
  return right > left && bottom > top ? [left, top, right - left, bottom - top] : null;
}

const boxQuery = ([x, y, width, height]) => `x=${x}&y=${y}&width=${width}&height=${height}`;

function lookSoon(delay = 100) {
  clearTimeout(timer);
  timer = setTimeout(look, delay);
}

async function look() {
  const box = viewer?.isOpen() && image.ready.length ? visible() : null;
  if (!box) return;
  wanted?.abort();
  const mine = (wanted = new AbortController()), began = performance.now();
  const at = state.at ? `&at=${state.at.map((value) => value.toFixed(2)).join(",")}` : "";
  try {
    const answer = await ask(`look?${boxQuery(box)}${at}`, { signal: mine.signal });
    const body = await answer.arrayBuffer();
    if (mine !== wanted) return;
    const before = seen;
    seen = unpack(body, box);
    seen.milliseconds = performance.now() - began;
    // A place that was clicked meanwhile: what is known of it at this level, or the patch of this screen that lies there.
    seen.asked = state.at && (seen.query ?? (before?.level === seen.level ? before.asked : null) ?? rowAt(...state.at));
    if (state.at && !seen.asked) lookSoon(0);
    draw();
    document.documentElement.dataset.looks = 1 + Number(document.documentElement.dataset.looks ?? 0);
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message);
  }
}

function unpack(buffer, asked) {
  const length = new DataView(buffer).getUint32(0, true);
  const found = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let place = 4 + length;
  const take = (kind, size) => { const part = new kind(buffer, place, size); place += size; return part; };
  const cells = found.grid[0] * found.grid[1];
  found.rows = take(Int8Array, cells * found.depth);
  found.coreRows = take(Int8Array, found.cores * found.depth);
  found.query = found.asked ? take(Int8Array, found.depth) : null;
  found.colours = take(Uint8Array, 3 * cells);
  found.inside = take(Uint8Array, cells);
  found.side = found.stride * found.factor; // of a cell, in pixels of the image
  found.screen = asked;
  return found;
}

// What is shown.

function cosines(vector) {
  const { rows, depth, inside } = seen, values = new Float32Array(inside.length);
  let own = 0;
  for (let d = 0; d < depth; d++) own += vector[d] ** 2;
  for (let i = 0, from = 0; i < values.length; i++, from += depth) {
    let product = 0, length = 0;
    for (let d = 0; d < depth; d++) { const value = rows[from + d]; product += value * vector[d]; length += value * value; }
    values[i] = product / (Math.sqrt(own * length) || 1);
  }
  return values;
}

const coreRow = (number) => seen.coreRows.subarray(number * seen.depth, (number + 1) * seen.depth);

function content() { // values and their scale, or colours, or nothing
  if (!seen) return {};
  if (state.tab === "colours") return { colours: seen.colours };
  if (state.tab === "overall") return { values: cosines(coreRow(0)), low: seen.overall[0], high: seen.overall[1] };
  if (state.core !== null) {
    const values = cosines(coreRow(state.core)), sorted = values.toSorted();
    return { values, low: sorted[Math.floor(values.length * 0.02)], high: sorted.at(-1) };
  }
  return seen.asked ? { values: cosines(seen.asked), low: seen.low, high: 1 } : {};
}

let shown = {};
function draw() {
  shown = content();
  paint();
  drawWords();
  drawDots();
  place();
}

function paint() {
  const canvas = $("map"), [rows, columns] = seen?.grid ?? [1, 1];
  canvas.hidden = !shown.values && !shown.colours;
  $("stage").style.setProperty("--grey", canvas.hidden ? 0 : $("blend").value / 100);
  if (canvas.hidden) return;
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d", { willReadFrequently: true }), picture = context.createImageData(columns, rows), data = picture.data;
  const scale = shown.values ? 255 / Math.max(shown.high - shown.low, 1e-6) : 0;
  for (let i = 0; i < rows * columns; i++) {
    const level = shown.values ? 3 * Math.round(Math.min(255, Math.max(0, (shown.values[i] - shown.low) * scale))) : 3 * i;
    const from = shown.values ? VIRIDIS : shown.colours;
    for (let c = 0; c < 3; c++) data[4 * i + c] = from[level + c];
    data[4 * i + 3] = seen.inside[i] ? 255 : 0;
  }
  context.putImageData(picture, 0, 0);
}

function drawWords() {
  const words = WORDS[state.tab], waiting = state.tab === "similar" && state.at === null && state.core === null;
  $("title").textContent = words.title;
  $("words").textContent = waiting ? words.none : state.tab === "similar" && state.core !== null ? words.core(state.core) : words.text;
  $("scale").hidden = !shown.values;
  $("mark").hidden = true;
  if (shown.values) {
    $("low").textContent = `${words.low}  ${cosine(shown.low)}`;
    $("high").textContent = `${cosine(shown.high)}  ${words.high}`;
  }
  $("readout").textContent = "";
  $("patches").hidden = !seen;
  if (seen) $("patch-words").textContent = aboutPatch(seen, image.patch);
  $("drawn").hidden = !state.box || !seen;
  if (state.box && seen) {
    $("box-words").textContent = aboutBox(state.box, seen, image.patch, image.downsample);
    $("download").href = `features.npy?${boxQuery(state.box)}&level=${seen.level}`;
  }
  drawBusy();
}

function drawBusy() {
  const done = !image.doing && !image.problem;
  $("busy").hidden = done;
  $("busy").classList.toggle("problem", Boolean(image.problem));
  if (done) return;
  $("doing").textContent = progressWords(image);
  $("share").value = image.share;
  $("share").hidden = Boolean(image.problem);
}

function complain(message) {
  $("readout").textContent = `That did not work: ${message}.`;
}

function drawDots() {
  const visible = $("cores").checked && seen, layer = $("dots");
  layer.hidden = !visible;
  $("layer").setAttribute("aria-hidden", !visible);
  if (!visible) return;
  while (layer.children.length > seen.cores) layer.lastChild.remove();
  while (layer.children.length < seen.cores) {
    const dot = document.createElement("button"), number = layer.children.length;
    dot.className = "dot";
    dot.type = "button";
    dot.title = dot.ariaLabel = `Core ${number}`;
    dot.append(document.createElement("i"));
    dot.addEventListener("click", () => askCore(number));
    layer.append(dot);
  }
  [...layer.children].forEach((dot, number) => dot.setAttribute("aria-pressed", number === state.core));
}

// Everything that lies over the image moves with it.
function place() {
  if (!viewer?.isOpen()) return;
  const point = (x, y) => viewer.viewport.imageToViewerElementCoordinates(new OpenSeadragon.Point(x, y));
  const origin = point(0, 0), scale = (point(image.size[0], 0).x - origin.x) / image.size[0];
  const put = (element, x, y, width, height) => {
    element.style.transform = `translate(${origin.x + x * scale}px, ${origin.y + y * scale}px)`;
    if (width === undefined) return;
    element.style.width = `${width * scale}px`;
    element.style.height = `${height * scale}px`;
  };
  if (seen) {
    const [rows, columns] = seen.grid, [x, y, width, height] = seen.box;
    put($("map"), x, y, columns * seen.side, rows * seen.side);
    const over = (whole, part) => `${Math.max(0, 100 * (1 - part / whole))}%`; // cells that stick out of the image
    $("map").style.clipPath = `inset(0 ${over(columns * seen.side, width)} ${over(rows * seen.side, height)} 0)`;
    if (!$("dots").hidden) [...$("dots").children].forEach((dot, number) => put(dot, ...seen.coords[number]));
  }
  const ringed = state.tab === "similar" && state.at && seen;
  $("ring").hidden = !ringed;
  if (ringed) {
    const side = Math.max(image.patch * seen.factor, 10 / scale);
    put($("ring"), state.at[0] - side / 2, state.at[1] - side / 2, side, side);
  }
  $("box").hidden = !state.box;
  if (state.box) put($("box"), ...state.box);
  state.places.forEach(({ box }, index) => put($("places").children[index], ...box));
}

// Changing the state.

function cellAt(x, y) { // of the screen's patches, or −1
  if (!seen) return -1;
  const column = Math.floor((x - seen.box[0]) / seen.side), row = Math.floor((y - seen.box[1]) / seen.side);
  const inside = column >= 0 && row >= 0 && row < seen.grid[0] && column < seen.grid[1];
  return inside ? row * seen.grid[1] + column : -1;
}

function rowAt(x, y) {
  const cell = cellAt(x, y);
  return cell < 0 ? null : seen.rows.slice(cell * seen.depth, (cell + 1) * seen.depth);
}

function askAt(x, y) {
  const [width, height] = image.size;
  if (x < 0 || y < 0 || x >= width || y >= height) return;
  const began = performance.now(), cell = cellAt(x, y);
  Object.assign(state, { tab: "similar", core: null });
  checkTab();
  if (cell >= 0) { // the patch's middle; its feature is here already
    const row = Math.floor(cell / seen.grid[1]), column = cell % seen.grid[1];
    state.at = [Math.min(width, seen.box[0] + (column + 0.5) * seen.side), Math.min(height, seen.box[1] + (row + 0.5) * seen.side)];
    seen.asked = rowAt(x, y);
  } else {
    state.at = [x, y];
    lookSoon(0);
  }
  draw();
  document.documentElement.dataset.answered = (performance.now() - began).toFixed(1);
}

function askCore(number) {
  Object.assign(state, { tab: "similar", at: null, core: state.core === number ? null : number });
  checkTab();
  draw();
}

function checkTab() {
  for (const input of document.getElementsByName("tab")) input.checked = input.value === state.tab;
}

function setBox(box) {
  state.box = box;
  state.places = [];
  drawPlaces(null);
  draw();
}

function drawPlaces(answer) {
  state.places = answer?.places ?? [];
  $("found-words").hidden = !answer;
  $("found-words").textContent = answer ? aboutFound(answer, image.patch) : "";
  $("places").replaceChildren(...state.places.map((_, index) => {
    const mark = document.createElement("div");
    mark.className = "place";
    mark.append(Object.assign(document.createElement("b"), { textContent: index + 1 }));
    return mark;
  }));
  $("found").replaceChildren(...state.places.map(({ box, file, cosine: value }, index) => {
    const item = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.title = `${count(file[2])} × ${count(file[3])} pixels at ${count(file[0])}, ${count(file[1])}`;
    button.ariaLabel = `Go to place ${index + 1}, cosine ${cosine(value)}`;
    button.append(Object.assign(document.createElement("b"), { textContent: index + 1 }), cosine(value));
    button.addEventListener("click", () => goTo(box));
    item.append(button);
    return item;
  }));
  place();
}

async function find() {
  const box = state.box;
  $("found-words").hidden = false;
  $("found-words").textContent = "Searching …";
  try {
    const answer = await (await ask(`places?${boxQuery(box)}&level=${seen.level}`)).json();
    if (box === state.box) drawPlaces(answer);
  } catch (error) {
    $("found-words").textContent = `That did not work: ${error.message}.`;
  }
}

function goTo([x, y, width, height]) { // with as much again around it
  const around = new OpenSeadragon.Rect(x - width, y - height, 3 * width, 3 * height);
  viewer.viewport.fitBounds(viewer.viewport.imageToViewportRectangle(around));
}

function boxBetween(from, to) {
  const clamp = (value, most) => Math.min(most, Math.max(0, Math.round(value)));
  const xs = [from.x, to.x].map((value) => clamp(value, image.size[0])).sort((a, b) => a - b);
  const ys = [from.y, to.y].map((value) => clamp(value, image.size[1])).sort((a, b) => a - b);
  return xs[1] > xs[0] && ys[1] > ys[0] ? [xs[0], ys[0], xs[1] - xs[0], ys[1] - ys[0]] : null;
}

function setDrawing(on) {
  state.drawing = on;
  $("draw").setAttribute("aria-pressed", on);
  $("stage").style.cursor = on ? "crosshair" : "";
}

function clear() {
  Object.assign(state, { at: null, core: null });
  setDrawing(false);
  setBox(null);
}

// Pointer, touch and keyboard.

function listen() {
  const at = (event) => viewer.viewport.viewerElementToImageCoordinates(event.position);
  let start = null; // of a box that is being drawn
  viewer.addHandler("canvas-click", (event) => {
    event.preventDefaultAction = true;
    if (event.quick && !event.originalEvent.shiftKey) askAt(at(event).x, at(event).y);
  });
  viewer.addHandler("canvas-press", (event) => { start = state.drawing || event.originalEvent.shiftKey ? at(event) : null; });
  viewer.addHandler("canvas-drag", (event) => {
    if (!start) return;
    event.preventDefaultAction = true;
    state.box = boxBetween(start, at(event)) ?? state.box;
    place();
  });
  viewer.addHandler("canvas-drag-end", (event) => {
    if (!start) return;
    event.preventDefaultAction = true;
    setBox(boxBetween(start, at(event)) ?? state.box);
    start = null;
    setDrawing(false);
  });
  for (const name of ["update-viewport", "open", "resize"]) viewer.addHandler(name, place);
  for (const name of ["open", "animation-finish", "resize"]) viewer.addHandler(name, () => lookSoon());
  $("stage").addEventListener("pointermove", (event) => {
    if (!shown.values || event.pointerType !== "mouse") return;
    const frame = $("stage").getBoundingClientRect();
    const { x, y } = at({ position: new OpenSeadragon.Point(event.clientX - frame.left, event.clientY - frame.top) });
    const cell = cellAt(x, y);
    $("mark").hidden = cell < 0;
    if (cell < 0) return;
    const value = shown.values[cell];
    $("mark").style.left = `${100 * Math.min(1, Math.max(0, (value - shown.low) / (shown.high - shown.low)))}%`;
    $("readout").textContent = `Under the pointer: ${cosine(value)}`;
  });
  $("stage").addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const bounds = viewer.viewport.getBounds(false), middle = viewer.viewport.viewportToImageCoordinates(bounds.getCenter());
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (step) viewer.viewport.panBy(new OpenSeadragon.Point(step[0] * bounds.width * 0.15, step[1] * bounds.height * 0.15)).applyConstraints();
    else if (event.key === "+" || event.key === "=") $("nearer").click();
    else if (event.key === "-") $("farther").click();
    else if (event.key === "0") $("home").click();
    else if (event.key === "Enter" || event.key === " ") askAt(middle.x, middle.y);
    else if (event.key === "b") {
      const whole = viewer.viewport.viewportToImageRectangle(bounds), x = whole.width / 8, y = whole.height / 8;
      setDrawing(false);
      setBox(boxBetween({ x: middle.x - x, y: middle.y - y }, { x: middle.x + x, y: middle.y + y }));
    } else if (event.key === "c") $("cores").click();
    else if (event.key === "Escape") clear();
    else if (TABS[event.key - 1]) { state.tab = TABS[event.key - 1]; checkTab(); draw(); }
    else return;
    event.preventDefault();
  });
}

function listenToControls() {
  const zoom = (by) => viewer.viewport.zoomBy(by).applyConstraints();
  $("nearer").addEventListener("click", () => zoom(1.6));
  $("farther").addEventListener("click", () => zoom(1 / 1.6));
  $("home").addEventListener("click", () => viewer.viewport.goHome());
  $("draw").addEventListener("click", () => setDrawing(!state.drawing));
  for (const input of document.getElementsByName("tab")) input.addEventListener("change", () => { state.tab = input.value; draw(); });
  const blend = () => { $("map").style.opacity = $("blend").value / 100; };
  $("blend").addEventListener("input", () => { blend(); paint(); });
  blend();
  // The cross in the middle is for the keyboard; a click, too, gives the image the focus.
  document.addEventListener("keydown", () => $("view").classList.add("keys"), true);
  document.addEventListener("pointerdown", () => $("view").classList.remove("keys"), true);
  $("cores").addEventListener("change", draw);
  $("find").addEventListener("click", find);
  $("drop").addEventListener("click", () => setBox(null));
  const bar = $("bar").getContext("2d"), picture = bar.createImageData(256, 1);
  for (let i = 0; i < 256; i++) picture.data.set([...VIRIDIS.subarray(3 * i, 3 * i + 3), 255], 4 * i);
  bar.putImageData(picture, 0, 0);
}

// Beginning.

function openImage() {
  const top = image.sizes.length - 1;
  viewer = OpenSeadragon({
    element: $("stage"),
    drawer: "canvas",
    showNavigationControl: false,
    keyboardNavEnabled: false,
    gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: false },
    gestureSettingsTouch: { dblClickToZoom: false },
    maxZoomPixelRatio: 12,
    visibilityRatio: 0.5,
    minZoomImageRatio: 0.7,
    animationTime: 0.5,
    timeout: 120000,
    tileSources: {
      width: image.size[0], height: image.size[1], tileSize: image.tile, minLevel: 0, maxLevel: top,
      getTileUrl: (level, x, y) => new URL(`tile/${top - level}/${x}/${y}.jpg`, location.href).href,
    },
  });
  viewer.canvas.setAttribute("role", "application");
  viewer.canvas.setAttribute("aria-label", `${image.name}: arrows move, plus and minus zoom, Enter asks about the middle`);
  listen();
}

async function follow() { // what is being scanned, until all is
  const before = image?.ready.length ?? 0;
  try {
    image = await (await ask("state")).json();
  } catch {
    image.problem = "the viewer does not answer; is it still running?";
  }
  if (image.shown && !viewer) openImage();
  if (image.ready.length > before) lookSoon(0);
  drawBusy();
  if (image.doing && !image.problem) setTimeout(follow, 500);
}

async function begin() {
  setUpTheme();
  listenToControls();
  await follow();
  document.title = `${image.name} · veca view`;
  $("name").textContent = image.name;
  $("about").textContent = aboutImage(image);
  $("made").textContent = `veca ${image.version}, on this machine only.`;
  draw();
  document.documentElement.dataset.ready = "yes";
}

begin();
