// The page of a cluster: its numbers and typical samples, and what tells it apart from the clusters
// that are most like it.

import { clusterColor } from "./colors.js";
import { get } from "./data.js";
import { $, make, makeDot, number, percent, showMessage } from "./messages.js";
import { readWords } from "./pictures.js";

export class ClusterPage {
  /**
   * @param app the page: decisions, chosen, select(rows), decide(decision), nameOf, pictureButton(row, text)
   * @param faceOf a list of the picture of a cluster, or an empty one
   */
  constructor(app, faceOf) {
    Object.assign(this, { app, faceOf, box: $("cluster"), cluster: null, moves: [] }); // moves: buttons
  }

  async open(k) {
    this.cluster = k;
    this.box.hidden = false;
    document.body.classList.add("at-cluster");
    $("lists").scrollTop = $("panel").scrollTop = 0;
    await this.read();
    if (this.cluster === k) this.box.querySelector("button")?.focus({ preventScroll: true });
  }

  close() {
    this.cluster = null;
    this.box.hidden = true;
    this.box.replaceChildren();
    document.body.classList.remove("at-cluster");
  }

  /** Show the page after new decisions; close it if its cluster is gone. */
  refresh() {
    if (this.cluster === null) return;
    if (this.app.decisions.sizes.has(this.cluster)) this.read();
    else this.close();
  }

  async read() {
    const { app, cluster } = this;
    try {
      const about = await (await get(`api/cluster/${cluster}`)).json();
      const rows = [...about.typical, ...about.nearest.flatMap(({ between }) => between)];
      const words = await readWords(app.meta, rows);
      if (this.cluster !== cluster) return;
      this.samples = (some) => make("div", { className: "pictures" },
        ...some.map((row) => this.sample(row, words.get(row))));
      this.draw(about);
    } catch (error) {
      if (this.cluster === cluster) showMessage(error.message, true); // else it is gone or closed
    }
  }

  draw(about) {
    const { nameOf } = this.app, name = nameOf(about.cluster);
    const close = make("button", { textContent: "×", title: "Back to the list (Escape)", ariaLabel: "close",
      onclick: () => this.close() });
    this.moves = [];
    this.box.replaceChildren(
      make("div", { className: "title" }, dotOf(about.cluster), make("h2", { textContent: name }), close),
      make("p", {}, `${number(about.size)} samples `, lineOfNumbers(about)), this.samples(about.typical),
      ...about.nearest.map((near) => this.comparison(about.cluster, near)));
    this.showButtons();
  }

  /** A near cluster: how alike it is, the samples that lie between, and columns that differ. */
  comparison(k, { cluster, similarity, between, columns }) {
    const { app } = this, name = app.nameOf(cluster), moves = make("button", { onclick: () =>
      app.decide({ do: "move", rows: [...app.chosen].sort((a, b) => a - b), into: cluster }) });
    this.moves.push(moves);
    const open = make("button", { className: "link", textContent: name, title: `Open the page of ${name}`,
      onclick: () => this.open(cluster) });
    const lines = columns.map(({ column, here, there }) => make("tr", {}, make("th", { textContent: column }),
      make("td", { textContent: here }), make("td", { textContent: there })));
    const merge = make("button", { textContent: "Merge with it", onclick: async () => {
      await app.decide({ do: "merge", clusters: [k, cluster].sort((a, b) => a - b) });
      if (this.cluster === null) this.open(cluster); // the merged cluster has the lower number
    } });
    const select = make("button", { textContent: "Select the ones between", disabled: !between.length,
      onclick: () => app.select(between) });
    const article = make("article", {},
      make("div", { className: "title" }, ...this.faceOf(cluster), dotOf(cluster), open, make("small", { title: "Cosine of the mean embeddings",
        textContent: `similarity ${similarity?.toFixed(2) ?? "unknown"}` })),
      ...(between.length ? [make("small", { textContent: "Between the two, the most ambiguous first:" }),
        this.samples(between)] : []),
      ...(lines.length ? [make("table", {}, make("tr", {}, make("th"), make("th", { textContent: "here" }),
        make("th", { textContent: "there" })), ...lines)] : []),
      make("p", { className: "buttons" }, merge, select, moves));
    article.dataset.of = `near ${cluster}`;
    return article;
  }

  /** The button of a sample, with the color of its cluster. */
  sample(row, text) {
    const button = this.app.pictureButton(row, text);
    button.style.borderColor = clusterColor(this.app.decisions.clusters[row]);
    return button;
  }

  showButtons() {
    const { length } = this.app.chosen;
    for (const button of this.moves) {
      button.textContent = length ? `Move the ${number(length)} selected there` : "Move the selected there";
      button.disabled = !length;
    }
  }
}

const dotOf = (k) => makeDot(clusterColor(k), "dot");

/** Mean confidence, agreement and the share that a person checked. */
export function lineOfNumbers({ confidence, agreement, checked, size }) {
  const line = make("span", { className: "numbers" }, make("small", { textContent: confidence?.toFixed(2) ?? "",
    title: "Mean confidence of its samples" }));
  if (agreement !== null) {
    const text = `Agreement ${percent(agreement)}: how closely the families of clustering methods that voted find this cluster`;
    const bar = make("span", { className: "bar", role: "img", ariaLabel: text, title: text });
    bar.style.setProperty("--share", `${100 * agreement}%`);
    line.append(bar);
  }
  if (checked) line.append(make("small", { textContent: `${percent(checked / size)} checked`,
    title: `A person checked ${number(checked)} of ${number(size)} samples` }));
  return line;
}
