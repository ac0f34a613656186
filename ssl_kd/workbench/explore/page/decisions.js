// The decisions about a run, followed as ssl_kd.workbench.finished.Curation follows them.

const MADE_FROM = 1000;

const NAME_LENGTH = 200;

export class Refused extends Error {}

export const folded = (name) => name.trim().toLowerCase();

/** Every sample's cluster after some lines, and the names. */
export class Decisions {
  /**
   * @param base Int32Array, the run's own clusters
   * @param meta samples, digest, n_clusters, levels of the run
   * @param level name -> Int32Array of a level of the tree, as far as it is loaded
   */
  constructor(base, meta, level) {
    Object.assign(this, { base, meta, level, lines: [] });
    this.replay([]);
  }

  get live() {
    const live = new Set(), undone = new Set();
    for (const line of [...this.lines].reverse()) {
      if (undone.has(line.id)) continue;
      live.add(line.id);
      if (line.do === "undo") undone.add(line.of);
    }
    return live;
  }

  /** Follow these lines from the start; keeps what was where one of them cannot be followed. */
  replay(lines) {
    const before = { ...this };
    Object.assign(this, { lines, clusters: this.base.slice(), names: new Map() });
    this.excluded = new Set();
    this.count();
    try {
      const live = this.live;
      for (const line of lines) if (live.has(line.id) && line.do !== "undo") this.follow(line);
    } catch (error) {
      Object.assign(this, before);
      throw error;
    }
  }

  /** A new line, followed. */
  add(said) {
    const id = [...crypto.getRandomValues(new Uint8Array(6))]
      .map((byte) => byte.toString(16).padStart(2, "0")).join("");
    const time = new Date().toISOString().replace(/\.\d+Z/, "Z");
    const made = this.lines.flatMap((line) =>
      [...(line.parts ?? []).map((part) => part[1]), ...("new" in line ? [line.new] : [])]);
    const first = Math.ceil(this.meta.n_clusters / MADE_FROM) * MADE_FROM;
    let next = made.reduce((a, b) => Math.max(a, b), first - 1) + 1;
    if (said.name) this.check(said.name, said.do === "rename" ? [said.cluster] : said.clusters ?? []);
    if ("new" in said) said = { ...said, new: next };
    if (said.do === "split" && !said.rows) {
      const { level, parts } = this.parts(said.cluster);
      said = { ...said, level, parts: parts.map((part) => [part, next++]) };
    }
    const { samples, digest } = this.meta;
    const line = { id, time, samples, digest, ...said };
    if (line.do === "undo") {
      try {
        this.replay([...this.lines, line]);
      } catch (error) {
        throw new Refused(`a later decision stands on it (${error.message}): undo that one first`);
      }
    } else {
      this.follow(line);
      this.lines = [...this.lines, line];
    }
    return line;
  }

  /** The coarsest level that parts a cluster, and its parts but the largest. */
  parts(cluster) {
    for (const name of this.meta.levels) {
      const level = this.level(name), sizes = new Map();
      this.clusters.forEach((k, i) => {
        if (k === cluster && level[i] >= 0) sizes.set(level[i], (sizes.get(level[i]) ?? 0) + 1);
      });
      const order = [...sizes].sort((a, b) => b[1] - a[1] || a[0] - b[0]).map((part) => part[0]);
      if (order.length > 1) return { level: name, parts: order.slice(1) };
    }
    throw new Refused(`no level of the tree parts cluster ${cluster}: lasso what is to leave it`);
  }

  count() {
    const counts = []; // by number: a million samples in a blink
    for (const k of this.clusters) if (k >= 0) counts[k] = (counts[k] ?? 0) + 1;
    this.sizes = new Map();
    counts.forEach((size, k) => this.sizes.set(k, size));
    for (const k of this.names.keys()) if (!this.sizes.has(k)) this.names.delete(k);
  }

  there(cluster) {
    if (!this.sizes.has(cluster)) throw new Refused(`there is no cluster ${cluster} any more`);
    return cluster;
  }

  /** A new name is one that `ssl_kd explore --apply` takes, and that no other cluster has. */
  check(name, clusters) {
    if (name.length > NAME_LENGTH || /[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/u.test(name)) {
      throw new Refused(`a name is one line of at most ${NAME_LENGTH} characters that can be seen`);
    }
    const other = [...this.names].find(([k, text]) => !clusters.includes(k) && folded(text) === folded(name));
    if (other) throw new Refused(`cluster ${other[0]} is called “${other[1]}” already: merge the two`);
  }

  call(cluster, name) {
    if (name) this.names.set(cluster, name.trim());
    else this.names.delete(cluster);
  }

  follow(line) {
    const { clusters } = this;
    if (line.do === "rename") {
      this.call(this.there(line.cluster), line.name);
    } else if (line.do === "merge") {
      const wanted = new Set(line.clusters.map((k) => this.there(k)));
      if (wanted.size < 2) throw new Refused("tick two clusters or more to merge");
      const order = [...wanted].sort((a, b) => a - b);
      const name = line.name ?? order.map((k) => this.names.get(k)).find(Boolean);
      for (let i = 0; i < clusters.length; i++) if (wanted.has(clusters[i])) clusters[i] = order[0];
      this.call(order[0], name);
    } else if (line.do === "split" && line.rows) {
      this.there(line.cluster);
      const other = line.rows.find((row) => clusters[row] !== line.cluster);
      if (other !== undefined) throw new Refused(`sample ${other} is not in cluster ${line.cluster}`);
      if (line.rows.length === this.sizes.get(line.cluster)) {
        throw new Refused(`they are all of cluster ${line.cluster}: nothing would be left of it`);
      }
      for (const row of line.rows) clusters[row] = line.new;
      this.call(line.new, line.name);
    } else if (line.do === "split") {
      const level = this.level(line.level), into = new Map(line.parts);
      this.there(line.cluster);
      for (let i = 0; i < clusters.length; i++) {
        if (clusters[i] === line.cluster) clusters[i] = into.get(level[i]) ?? line.cluster;
      }
    } else if (line.do === "move") {
      const into = "new" in line ? line.new : this.there(line.into);
      for (const row of line.rows) { clusters[row] = into; this.excluded.delete(row); }
      if (line.name) this.call(into, line.name);
    } else if (line.do === "exclude") {
      for (const row of line.rows) { clusters[row] = -1; this.excluded.add(row); }
    } else {
      throw new Refused(`${line.do} is no decision that this page knows`);
    }
    this.count();
  }
}
