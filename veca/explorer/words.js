// Every number and sentence the page shows; what they describe is in `state`, `panes` and `page` (page.js).

const percent = (share) => (share >= 0.0995 ? Math.round(share * 100) : (share * 100).toFixed(1)) + " %";
const times = (ratio) => ratio.toFixed(1) + "×";
const cosine = (value) => value.toFixed(2).replace("-", "−");

const names = (key, some) => [...new Set(some.map((pane) => pane[key]))].join(" and ");

const TABS = {
  similarity: { title: "Similarity of one patch to all", low: "unlike", high: "alike" },
  colours: { title: "Features as colours" },
  contributions: { title: "Who listens to which core" },
  global: { title: "The whole image to each patch", low: "unlike", high: "like the whole" },
};

function wordsFor(following) {
  if (state.tab === "similarity") {
    const other = { photos: " The dashed ring is the closest patch of the other photo.", models: " Both models are asked about the same place.", "": "" };
    return { text: "How much the model sees every patch as the same kind of thing as the ringed one (cosine of their features; 1 is the same)." + other[page.linked] };
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

// What a cosine means beside the others of this map: `from` is where its colours begin.
function likeness(value, from) {
  const share = (value - from) / (1 - from);
  return share >= 0.75 ? "nearly the same" : share >= 0.5 ? "much alike" : share >= 0.25 ? "somewhat alike" : "hardly alike";
}

function readout(first) {
  const pane = panes[state.pane], index = first.lattice.at(state.at), at = `Patch at ${where(first.lattice, index)}`;
  if (first.values && state.tab !== "similarity") {
    return `${at}: ${(first.number ?? cosine)(first.values[index])}.`;
  }
  if (state.tab === "contributions" && pane.hasCores) {
    const layer = pane.layerAt(state.layer), budget = pane.budgetAt(state.budget);
    const top = pane.profile(layer, budget, index).slice(0, 3).map(({ core, share }) => `core ${core} (${percent(share)})`);
    return `${at} takes most from ${top.join(", ")}.`;
  }
  if (first.values) {
    const alike = first.values.reduce((count, value) => count + (likeness(value, first.from) in ALIKE), 0) / first.values.length;
    return `${at}${state.held ? ", held" : ""}: ${percent(alike)} of the photo is much like it (the right half of the scale).`;
  }
  return `${at}.`;
}
const ALIKE = { "much alike": true, "nearly the same": true };

const where = ({ columns }, index) => `column ${(index % columns) + 1}, row ${Math.floor(index / columns) + 1}`;

function describeStage(pane, index, lattice) {
  const at = index === state.pane ? `; patch at ${where(lattice, lattice.at(state.at))}` : "";
  return `${pane.photo} through ${pane.model}: ${$("legend-title").textContent}${at}`;
}

function captionOf(shown) {
  if (shown.nothing) return shown.nothing;
  if (shown.match !== undefined) {
    const best = shown.values[shown.match];
    const scale = shown.high > best + 0.005 ? `; yellow here would be ${cosine(shown.high)}` : "";
    return `closest patch: ${likeness(best, shown.from)} (${cosine(best)} of 1)${scale}`;
  }
  if (panes.length > 1 && shown.values) { // the bar in the legend belongs to the photo pointed at
    const number = shown.number ?? cosine;
    return `colours from ${number(shown.low)} to ${number(shown.high)}`;
  }
  return "";
}
