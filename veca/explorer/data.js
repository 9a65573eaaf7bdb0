// From the text in the page to typed arrays. Places come from the table, sizes follow from grid and budget.

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// Squares over a photo: the model's patches, or the finer ones that the last layer's features may have.
class Lattice {
  constructor([rows, columns]) { Object.assign(this, { rows, columns, count: rows * columns }); }
  at({ x, y }) { // fractions of the photo from the top left
    const clamp = (value, count) => Math.min(count - 1, Math.max(0, Math.floor(value * count)));
    return clamp(y, this.rows) * this.columns + clamp(x, this.columns);
  }
  centre(index) { return { x: ((index % this.columns) + 0.5) / this.columns, y: (Math.floor(index / this.columns) + 0.5) / this.rows }; }
  moved(index, [down, right]) {
    const row = Math.min(this.rows - 1, Math.max(0, Math.floor(index / this.columns) + down));
    return row * this.columns + Math.min(this.columns - 1, Math.max(0, (index % this.columns) + right));
  }
}

// One photo through one model. Budgets and layers of two panes may differ, so both are asked for by fraction.
class Pane {
  constructor(table, buffer, levels) {
    Object.assign(this, table);
    this.lattice = new Lattice(table.grid);
    this.finest = table.fine ? new Lattice(table.fine) : this.lattice;
    this.count = this.lattice.count;
    this.buffer = buffer;
    this.levels = levels;
    this.depth = table.layers.length;
    this.hasCores = table.budgets.length > 0;
    this.remembered = new Map();
    this.squares = table.cells ? this.outlines(...table.cells) : "";
    this.moves = this.hasCores && this.budgets.some((_, budget) => this.layers.some((_, layer) => this.moved(layer, budget)));
  }

  moved(layer, budget) { // by more than a two-hundredth of the photo
    const first = this.places(0, budget);
    return this.places(layer, budget).some(({ x, y }, core) => Math.hypot(x - first[core].x, y - first[core].y) > 0.005);
  }

  // The cells that stand for the patches when half of them are spent, as a path in units of patches.
  outlines(place, count) {
    const values = new Int16Array(this.buffer, place, 3 * count);
    return Array.from({ length: count }, (_, i) => {
      const [x, y, side] = values.subarray(3 * i, 3 * i + 3);
      return `M${x} ${y}h${side}v${side}h${-side}z`;
    }).join("");
  }

  // Where the features of a layer lie.
  featureLattice(layer) { return layer === this.depth - 1 ? this.finest : this.lattice; }

  // The layer and budget that stand for the positions of the sliders.
  layerAt(fraction) { return Math.round(fraction * (this.depth - 1)); }
  budgetAt(wanted) {
    const distance = this.budgets.map((budget) => Math.abs(budget - wanted));
    return Math.max(0, distance.indexOf(Math.min(...distance)));
  }

  remember(key, make) {
    if (!this.remembered.has(key)) {
      if (this.remembered.size > 40) this.remembered.clear();
      this.remembered.set(key, make());
    }
    return this.remembered.get(key);
  }

  step(layer, budget) { return this.layers[layer][budget]; }
  coresIn(budget) { return this.hasCores ? this.budgets[budget] : 1; }

  // Features of the patches: `directions` runs of `count` numbers, and the length of each patch's vector.
  patches(layer, budget) {
    return this.remember(`p${layer},${budget}`, () => {
      const { patches, directions } = this.step(layer, budget), { count } = this.featureLattice(layer);
      const values = new Int8Array(this.buffer, patches, directions * count);
      const lengths = new Float32Array(count);
      for (let d = 0; d < directions; d++) {
        const from = d * count;
        for (let i = 0; i < count; i++) lengths[i] += values[from + i] ** 2;
      }
      for (let i = 0; i < count; i++) lengths[i] = Math.sqrt(lengths[i]) || 1;
      return { values, lengths, directions, count };
    });
  }

  vectorOfPatch(layer, budget, index) {
    const { values, directions, count } = this.patches(layer, budget);
    return Float32Array.from({ length: directions }, (_, d) => values[d * count + index]);
  }

  vectorOfCore(layer, budget, core) {
    const { cores, directions } = this.step(layer, budget);
    return Float32Array.from(new Int8Array(this.buffer, cores + core * directions, directions));
  }

  // Cosine of a vector to every patch.
  cosines(layer, budget, vector) {
    const { values, lengths, directions, count } = this.patches(layer, budget);
    const found = new Float32Array(count);
    let length = 0;
    for (let d = 0; d < directions; d++) {
      const factor = vector[d], from = d * count;
      length += factor * factor;
      if (factor) for (let i = 0; i < count; i++) found[i] += factor * values[from + i];
    }
    length = Math.sqrt(length) || 1;
    for (let i = 0; i < count; i++) found[i] /= lengths[i] * length;
    return found;
  }

  // Shares, core after core; stored as differences along each core's map, of square roots.
  maps(name, layer, budget) {
    return this.remember(`${name}${layer},${budget}`, () => {
      const step = this.step(layer, budget), cores = this.coresIn(budget);
      const stored = new Uint8Array(this.buffer, step[name], cores * this.count);
      const found = new Float32Array(stored.length);
      for (let c = 0; c < cores; c++) {
        let level = 0;
        for (let i = c * this.count; i < (c + 1) * this.count; i++) {
          level = (level + stored[i]) & 255;
          found[i] = (level / this.levels) ** 2 * step[name + "Top"];
        }
      }
      return found;
    });
  }

  map(name, layer, budget, core) {
    return this.maps(name, layer, budget).subarray(core * this.count, (core + 1) * this.count);
  }

  // What one patch takes from each core, largest first.
  profile(layer, budget, index) {
    const maps = this.maps("readBy", layer, budget);
    const found = Array.from({ length: this.coresIn(budget) }, (_, core) => ({ core, share: maps[core * this.count + index] }));
    const total = found.reduce((sum, { share }) => sum + share, 0) || 1;
    for (const entry of found) entry.share /= total;
    return found.sort((a, b) => b.share - a.share);
  }

  colours(name, layer, budget, lattice) { return new Uint8Array(this.buffer, this.step(layer, budget)[name], lattice.count * 3); }

  // Where the cores sit, as fractions of the photo from the top left.
  places(layer, budget) {
    const values = new Int16Array(this.buffer, this.step(layer, budget).coords, this.coresIn(budget) * 2);
    return Array.from({ length: values.length / 2 }, (_, core) => ({
      x: (values[2 * core] / 32767 + 1) / 2, y: (values[2 * core + 1] / 32767 + 1) / 2,
    }));
  }
}
