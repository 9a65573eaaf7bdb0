// Every sentence and number the page shows.

const cosine = (value) => value.toFixed(2).replace("-", "−");
const count = (value) => Math.round(value).toLocaleString("en");
const pixels = (value) => (value < 10 && value % 1 ? value.toFixed(1) : count(value));
const ratio = (factor) => (factor === 1 ? "at full resolution" : `of the image reduced ${factor} times`);

const WORDS = {
  similar: {
    title: "What resembles this place",
    text: "Cosine between the feature of the ringed patch and that of every patch on the screen.",
    none: "Click or tap a place: every patch on the screen that resembles it lights up.",
    core: (number) => `Cosine between the feature of core ${number}${number ? "" : ", the global one,"} and that of every patch on the screen.`,
    low: "unlike", high: "alike",
  },
  colours: {
    title: "Features as colours",
    text: "Each patch's feature as a colour (three principal components, fitted to the whole image): similar colours mean similar features, wherever you go.",
  },
  overall: {
    title: "The whole image to each patch",
    text: "Cosine between the global feature, which is core 0, and every patch on the screen.",
    low: "unlike", high: "like the whole",
  },
};

function aboutImage(state) {
  const [width, height] = state.size;
  return `${count(width)} × ${count(height)} pixels through ${state.model} with ${state.cores} cores`;
}

// What a square of the map stands for.
function aboutPatch(seen, patch) {
  const side = patch * seen.factor, step = seen.stride * seen.factor;
  const apart = step < side ? ` They lie ${pixels(step)} pixels apart, so they overlap.` : "";
  const [rows, columns] = seen.grid;
  return `${patch} × ${patch} pixels ${ratio(seen.factor)}${seen.factor === 1 ? "" : `: ${count(side)} × ${count(side)} pixels of it`}. ` +
    `It is looked at along the scan of that resolution, exactly as in a pass over the whole.${apart} ` +
    `${count(rows * columns)} patches in ${(seen.milliseconds / 1000).toFixed(2)} s.`;
}

// Boxes are told in pixels of the file's finest level, of which the image may be a reduced copy.
const inFile = (box, downsample) => box.map((value, index) => value * downsample[index % 2]);

function aboutBox(box, seen, patch, downsample) {
  const side = patch * seen.factor, [, , width, height] = box, told = inFile(box, downsample).map(count);
  const across = Math.max(1, Math.ceil(width / side)), down = Math.max(1, Math.ceil(height / side));
  const level = downsample.every((by) => by === 1) ? "" : " of the file's finest level";
  return `${told[2]} × ${told[3]} pixels at ${told[0]}, ${told[1]}${level}; ` +
    `about ${count(down)} × ${count(across)} patches ${ratio(seen.factor)}, each a feature of ${seen.depth} numbers.`;
}

function aboutFound(answer, patch) {
  if (!answer.places.length) return "No other place is left: the box is nearly the whole image.";
  const side = patch * answer.factor;
  return `The places of the whole image whose mean feature is most like the box's, by cosine; compared with patches of ${count(side)} × ${count(side)} pixels.`;
}

function progressWords(state) {
  if (state.problem) return `Scanning stopped: ${state.problem}`;
  return `${state.doing[0].toUpperCase()}${state.doing.slice(1)} …`;
}
