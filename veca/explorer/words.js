// Every number and sentence the page shows; what they describe is in `state`, `panes` and `page` (page.js).

const percent = (share) => (share >= 0.0995 ? Math.round(share * 100) : (share * 100).toFixed(1)) + " %";
const times = (ratio) => ratio.toFixed(1) + "×";
const cosine = (value) => value.toFixed(2).replace("-", "−");

const TABS = {
  similarity: { title: "Similarity of one patch to all", low: "unlike", high: "alike" },
  colours: { title: "Features as colours" },
  contributions: { title: "Who listens to which core" },
  global: { title: "The whole image to each patch", low: "unlike", high: "like the whole" },
};

function wordsFor(following) {
  if (state.tab === "similarity") {
    const other = { photos: " The dashed ring is the best match in the other photo.", models: " Both models are asked about the same place.", "": "" };
    return { text: "Cosine between the feature of the ringed patch and that of every patch." + other[page.linked] };
  }
  if (state.tab === "colours") {
    return { text: "Each patch's feature as a colour (three principal components, one fit for all budgets" +
      (page.linked === "photos" ? " and both photos" : "") + "): similar colours mean similar features." };
  }
  if (state.tab === "global") {
    return { text: panes[state.pane].hasCores ? "Cosine between the global feature, which is core 0, and every patch." : "Cosine between the class token and every patch." };
  }
  if (!following) {
    return { text: "Patches of one colour take their update from the same cores, in the same shares. Point at a patch: the larger a dot, the more comes from that core. Click a dot to follow it." };
  }
  if (state.kind === "reads") {
    return { title: "What this core reads", text: "How much the core takes from each patch, as a multiple of an even share.", low: "nothing", high: "most" };
  }
  if (state.kind === "readBy") {
    return { title: "Who reads this core", text: "How much of each patch's update comes from this core" +
      (panes[state.pane].dense ? ", among the cores (in this dense model patches read each other too)." : "."), low: "nothing", high: "most" };
  }
  return { title: "What this core resembles", text: "Cosine between the feature of the core and that of every patch.", low: "unlike", high: "alike" };
}

function readout(first) {
  const pane = panes[state.pane], at = `Patch at ${where(pane, state.patch)}`;
  if (first.values && state.tab !== "similarity") {
    return `${at}: ${(first.number ?? cosine)(first.values[state.patch])}.`;
  }
  if (state.tab === "contributions" && pane.hasCores) {
    const layer = pane.layerAt(state.layer), budget = pane.budgetAt(state.budget);
    const top = pane.profile(layer, budget, state.patch).slice(0, 3).map(({ core, share }) => `core ${core} (${percent(share)})`);
    return `${at} takes most from ${top.join(", ")}.`;
  }
  if (first.values) {
    const median = Float32Array.from(first.values).sort()[pane.count >> 1];
    return `${at}${state.held ? ", held" : ""}: half of all patches have a cosine above ${cosine(median)}.`;
  }
  return `${at}.`;
}

const where = (pane, index) => `column ${(index % pane.columns) + 1}, row ${Math.floor(index / pane.columns) + 1}`;

function describeStage(pane, index) {
  const at = index === state.pane ? `; patch at ${where(pane, state.patch)}` : "";
  return `${pane.photo} through ${pane.model}: ${$("legend-title").textContent}${at}`;
}

function captionOf(pane, shown) {
  if (shown.nothing) return shown.nothing;
  if (shown.match !== undefined) return `best match ${cosine(shown.values[shown.match])} (brightest ${cosine(shown.high)})`;
  if (panes.length > 1 && shown.values) { // the bar in the legend belongs to the photo pointed at
    const number = shown.number ?? cosine;
    return `colours from ${number(shown.low)} to ${number(shown.high)}`;
  }
  return "";
}
