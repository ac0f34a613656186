// The list of clusters: select the samples of one, tick some to rename, merge or split them, or open
// the page of one. A server gives each cluster a face and numbers; a static page shows names and sizes.

import { ClusterPage, lineOfNumbers } from "./cluster_page.js";
import { clusterColor } from "./colors.js";
import { TOKEN, get } from "./data.js";
import { $, ask, make, makeDot, number, showMessage } from "./messages.js";
import { readWords, wordsElement } from "./pictures.js";

const SHOWN_CLUSTERS = 400;

/** What the list is sorted by, lowest first; clusters without a value come last. */
const KEYS = { size: ({ size }) => -size, confidence: ({ confidence }) => confidence,
  agreement: ({ agreement }) => agreement };

export class Clusters {
  /** @param app the page: decisions, chosen, meta, pictures, select(rows), decide(decision), nameOf(number) */
  constructor(app) {
    Object.assign(this, { app, ticked: new Set(), about: new Map(), items: new Map() });
    this.page = TOKEN ? new ClusterPage(app, (k) => this.face(k, 40)) : null;
    for (const act of ["rename", "merge", "split"]) $(act).onclick = () => this[act]();
    $("sort-clusters").onchange = () => this.draw();
  }

  /** Show the list; `selected` maps the clusters of the selected samples to their counts. */
  show(selected) {
    this.selected = selected;
    if (this.decisions === this.app.decisions) return this.mark();
    this.decisions = this.app.decisions;
    this.ticked = new Set([...this.ticked].filter((k) => this.decisions.sizes.has(k)));
    this.draw();
    if (TOKEN) this.read();
  }

  /** Read the faces and numbers of the clusters after all decisions. */
  async read() {
    const { decisions } = this;
    this.page.refresh();
    const about = await (await get("api/clusters")).json();
    const words = await readWords(this.app.meta, about.slice(0, 1000).map((one) => one.typical[0]));
    if (decisions !== this.decisions) return; // newer ones are on their way
    Object.assign(this, { about: new Map(about.map((one) => [one.cluster, one])), words });
    $("about-agreement").hidden = about.every(({ agreement }) => agreement === null);
    this.draw();
  }

  draw() {
    const { nameOf } = this.app, order = this.sorted(), shown = order.slice(0, SHOWN_CLUSTERS);
    $("count").textContent = order.length > SHOWN_CLUSTERS
      ? `${number(order.length)}, the first ${SHOWN_CLUSTERS} shown` : number(order.length);
    const focus = document.activeElement?.dataset?.of;
    this.items = new Map(shown.map((k) => [k, this.item(k)]));
    $("clusters").replaceChildren(...this.items.values());
    if (focus !== undefined) document.querySelector(`[data-of="${focus}"]`)?.focus({ preventScroll: true });
    $("move").replaceChildren(new Option("Move to …", ""), ...shown.map((k) => new Option(nameOf(k), k)));
    this.mark();
    this.showButtons();
  }

  /** The numbers of the clusters, in the order that the user wants. */
  sorted() {
    const { sizes } = this.decisions, key = KEYS[$("sort-clusters").value];
    const numbers = [...sizes.keys()].sort((a, b) => sizes.get(b) - sizes.get(a));
    if (!key) return numbers.sort((a, b) => this.app.nameOf(a).localeCompare(this.app.nameOf(b), "en", { numeric: true }));
    const values = new Map(numbers.map((k) => [k, key({ ...this.about.get(k), size: sizes.get(k) }) ?? Infinity]));
    return numbers.sort((a, b) => values.get(a) - values.get(b) || 0);
  }

  item(k) {
    const name = this.app.nameOf(k), about = this.about.get(k);
    const tick = make("input", { type: "checkbox", checked: this.ticked.has(k), ariaLabel: `tick ${name}`,
      className: "edit", onchange: () => { this.ticked[tick.checked ? "add" : "delete"](k); this.showButtons(); } });
    tick.dataset.of = `tick ${k}`;
    const button = make("button", { title: `Select the samples of ${name} (number ${k})`,
      onclick: () => this.select(k) });
    button.dataset.of = `${k}`;
    const size = make("small", { textContent: number(this.decisions.sizes.get(k)) });
    const title = make("span", {}, makeDot(clusterColor(k)), make("b", { textContent: name }), size);
    if (!about) {
      button.append(title);
      return make("li", {}, tick, button);
    }
    const face = this.face(k, 40), words = face.length ? "" : this.words.get(about.typical[0]);
    button.append(...face, make("span", { className: "about" }, title,
      ...(words ? [make("q", {}, wordsElement(this.app.meta, words))] : []), lineOfNumbers(about)));
    button.onkeydown = (event) => { if (event.key === "Enter") { event.preventDefault(); this.open(k); } };
    const open = make("button", { textContent: "›", className: "open", onclick: () => this.open(k),
      title: `Compare ${name} with its nearest clusters (Enter)`, ariaLabel: `open ${name}` });
    open.dataset.of = `open ${k}`;
    return make("li", {}, tick, button, open);
  }

  /** A list of the picture of a cluster's most typical sample, or an empty one. */
  face(k, size) {
    const { typical } = this.about.get(k) ?? { typical: [] };
    return typical.length ? this.app.pictures.list(typical[0], size) : [];
  }

  /** Mark the cluster whose samples are selected. */
  mark() {
    const { selected } = this, [k] = selected.size === 1 && this.app.chosen.length > 1 ? selected.keys() : [];
    for (const [other, item] of this.items) item.classList.toggle("on", other === k);
    this.marked = k;
    this.showButtons();
    this.page?.showButtons();
  }

  select(k) {
    const { clusters, sizes } = this.decisions, rows = new Uint32Array(sizes.get(k));
    for (let row = 0, n = 0; n < rows.length; row++) if (clusters[row] === k) rows[n++] = row;
    const item = this.items.get(k), top = item?.getBoundingClientRect().top;
    this.app.select(rows);
    if (item) $("panel").scrollTop += item.getBoundingClientRect().top - top; // the list stays where it is
  }

  open(k) {
    this.select(k);
    return this.page.open(k);
  }

  /** Close the page of a cluster; false if none is open. */
  close() {
    const k = this.page?.cluster ?? null;
    if (k === null) return false;
    this.page.close();
    (this.items.get(k)?.querySelector("button") ?? $("sort-clusters")).focus();
    return true;
  }

  focus() {
    if (!this.close()) $("clusters").querySelector("button")?.focus();
  }

  /** The ticked clusters; if none is ticked, the one whose samples are selected. */
  get meant() {
    return this.ticked.size || this.marked === undefined ? [...this.ticked] : [this.marked];
  }

  showButtons() {
    $("rename").disabled = $("split").disabled = this.meant.length !== 1;
    $("merge").disabled = this.ticked.size < 2;
  }

  async rename() {
    const { decide, decisions, nameOf } = this.app, [k] = this.meant;
    if (this.meant.length !== 1) return showMessage("Select or tick one cluster to rename it");
    const name = await ask(`Name of ${nameOf(k)} (empty: none)`, decisions.names[k] ?? decisions.words[k] ?? "");
    if (name !== null) await decide({ do: "rename", cluster: k, name });
  }

  merge() {
    if (this.ticked.size < 2) return showMessage("Tick two clusters or more to merge them");
    return this.app.decide({ do: "merge", clusters: [...this.ticked].sort((a, b) => a - b) });
  }

  split() {
    if (this.meant.length !== 1) return showMessage("Select or tick one cluster to split it");
    return this.app.decide({ do: "split", cluster: this.meant[0] });
  }
}
