// What can be kept of the page: its state in the address, and the picture it shows as a file.

// The state as text after the # of the address; what is missing or nonsense there is left as it is.
function stateText() {
  const lead = leader(), words = new URLSearchParams({ tab: state.tab, layer: lead.layerAt(state.layer) + 1 });
  if (lead.hasCores) words.set("cores", lead.budgets[lead.budgetAt(state.budget)]);
  words.set("at", `${state.at.x.toFixed(4)},${state.at.y.toFixed(4)}`);
  if (state.held) words.set("held", 1);
  if (state.core !== null) { words.set("core", state.core); words.set("kind", state.kind); }
  if (panes.length > 1) words.set("pane", state.pane);
  if (page.linked === "models") words.set("model", state.model);
  return "#" + words.toString().replaceAll("%2C", ",");
}

function readState() {
  const words = new URLSearchParams(location.hash.slice(1)), lead = leader();
  const number = (name, low, high) => {
    const value = Number(words.get(name) ?? NaN);
    return Number.isInteger(value) && value >= low && value <= high ? value : null;
  };
  if (words.get("tab") in TABS) state.tab = words.get("tab");
  const layer = number("layer", 1, lead.depth), budget = number("cores", 1, 1e6), pane = number("pane", 0, panes.length - 1);
  if (layer !== null && lead.depth > 1) state.layer = (layer - 1) / (lead.depth - 1);
  if (budget !== null && lead.budgets.includes(budget)) state.budget = budget;
  const [x, y] = (words.get("at") ?? "").split(",").map(Number);
  if (x >= 0 && x <= 1 && y >= 0 && y <= 1) state.at = { x, y };
  if (words.has("tab")) state.held = words.get("held") === "1";
  if (page.linked === "models" && words.has("model")) state.model = number("model", 0, panes.length - 1) ?? "both";
  if (pane !== null) state.pane = pane;
  if (state.model !== "both") state.pane = state.model;
  state.core = state.tab === "contributions" && lead.hasCores ? number("core", 0, state.budget - 1) : null;
  if (["reads", "readBy", "alike"].includes(words.get("kind"))) state.kind = words.get("kind");
}

// Browsers limit how often an address may change, so it follows when the state has come to rest.
let resting = 0;
function keepState() {
  clearTimeout(resting);
  resting = setTimeout(() => {
    const text = stateText();
    $("link").href = text;
    if (text === location.hash) return;
    try { history.replaceState(null, "", text); } catch { /* a page without an address of its own */ }
  }, 200);
}

function buildKeeping() {
  readState();
  addEventListener("hashchange", () => { readState(); requestDraw(); });
  $("save").addEventListener("click", savePicture);
  $("link").hidden = location.protocol === "blob:"; // gone with the tab: nothing to share
  $("link").addEventListener("click", async (event) => {
    event.preventDefault();
    const address = location.href.split("#")[0] + stateText();
    try {
      await navigator.clipboard.writeText(address);
      tell("Copied.");
    } catch {
      tell("It is in the address bar.");
    }
  });
}

function tell(words) {
  $("kept").textContent = words;
  setTimeout(() => { $("kept").textContent = ""; }, 4000);
}

// The photo and the maps as they are shown, side by side, with what they show written below.
function drawPicture() {
  const seen = panes.filter((_, index) => !views[index].figure.hidden);
  const parts = views.flatMap((view, index) => [
    ...(view.beside.hidden ? [] : [{ photo: view.photo, pane: panes[index] }]), ...(view.figure.hidden ? [] : [{ photo: view.photo, view, pane: panes[index] }]),
  ]);
  const high = Math.min(900, Math.max(...parts.map(({ photo }) => photo.naturalHeight))), gap = 20, edge = 28, line = 30;
  const widths = parts.map(({ photo }) => Math.round(high * photo.naturalWidth / photo.naturalHeight));
  const canvas = document.createElement("canvas"), style = getComputedStyle(document.body);
  canvas.width = Math.max(720, widths.reduce((sum, width) => sum + width + gap, 2 * edge - gap));
  canvas.height = high + 2 * edge + 3 * line;
  const context = canvas.getContext("2d");
  context.fillStyle = style.backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  let left = edge;
  parts.forEach((part, index) => {
    drawPart(context, part, left, edge, widths[index], high);
    left += widths[index] + gap;
  });
  const lead = leader(), write = (text, row, font) => {
    context.font = `${font} ${style.fontFamily}`;
    context.fillText(text, edge, high + edge + row * line);
  };
  context.fillStyle = style.color;
  write($("legend-title").textContent + ($("core-box").hidden ? "" : ` (${$("core-name").textContent.toLowerCase()})`), 1.1, "600 20px");
  const settings = lead.hasCores ? ` · ${$("budget-value").textContent} cores · layer ${$("layer-value").textContent}` : "";
  write(`${names("photo", seen)} through ${names("model", seen)}${settings}`, 2, "16px");
  if ($("scale").hidden) return canvas;
  const low = $("low").textContent, top = high + edge + 2.45 * line;
  context.fillText(low, edge, top + 12);
  const from = edge + context.measureText(low).width + 10;
  context.imageSmoothingEnabled = true;
  context.drawImage($("bar"), from, top, 220, 14);
  context.fillText($("high").textContent, from + 230, top + 12);
  return canvas;
}

function drawPart(context, { photo, view, pane }, left, top, width, high) {
  const blend = view ? Number($("blend").value) / 100 : 0;
  context.filter = `grayscale(${blend})`;
  context.drawImage(photo, left, top, width, high);
  context.filter = "none";
  if (view) {
    context.globalAlpha = blend;
    context.imageSmoothingEnabled = false;
    context.drawImage(view.canvas, left, top, width, high);
    context.globalAlpha = 1;
  }
  if (pane.squares && $("show-cells").checked) {
    const path = new Path2D(), { columns, rows } = pane.lattice;
    path.addPath(new Path2D(pane.squares), new DOMMatrix([width / columns, 0, 0, high / rows, left, top]));
    for (const [colour, thick] of [["#0006", 2.6], ["#fffd", 1]]) {
      Object.assign(context, { strokeStyle: colour, lineWidth: thick });
      context.stroke(path);
    }
  }
  if (!view) return;
  const ring = view.rings[0], { width: columns, height: rows } = view.canvas;
  if (!ring.hidden) {
    const box = [parseFloat(ring.style.left) / 100 * width + left, parseFloat(ring.style.top) / 100 * high + top, width / columns, high / rows];
    for (const [colour, thick] of [["#000c", 5], ["#fff", 2]]) {
      Object.assign(context, { strokeStyle: colour, lineWidth: thick });
      context.strokeRect(...box);
    }
  }
  if (view.cores.hidden) return;
  for (const { x, y } of pane.places(pane.layerAt(state.layer), pane.budgetAt(state.budget))) {
    context.beginPath();
    context.arc(left + x * width, top + y * high, 4, 0, 7);
    context.fillStyle = "#fff";
    context.fill();
    context.strokeStyle = "#000b";
    context.lineWidth = 1.5;
    context.stroke();
  }
}

function savePicture() {
  drawPicture().toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${panes[0].photo}-${state.tab}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    tell("Saved.");
  }, "image/png");
}
