// The list of clusters: select the samples of one, or tick some to rename, merge or split them.

import { clusterColor } from "./colors.js";
import { $, ask, number, showMessage } from "./messages.js";

const SHOWN_CLUSTERS = 400;

export class Clusters {
  /** @param app the page: decisions, chosen, select(rows), decide(decision), nameOf(number) */
  constructor(app) {
    Object.assign(this, { app, ticked: new Set() }); // numbers of the ticked clusters
    for (const act of ["rename", "merge", "split"]) $(act).onclick = () => this[act]();
  }

  /** Untick the clusters that no longer exist. */
  forget() {
    this.ticked = new Set([...this.ticked].filter((k) => this.app.decisions.sizes.has(k)));
  }

  /** Show the list; `selected` maps the clusters of the selected samples to their counts. */
  show(selected) {
    const { decisions, nameOf } = this.app;
    const order = [...decisions.sizes].sort((a, b) => b[1] - a[1]), shown = order.slice(0, SHOWN_CLUSTERS);
    $("count").textContent = order.length > SHOWN_CLUSTERS
      ? `${number(order.length)}, the largest ${SHOWN_CLUSTERS} shown` : number(order.length);
    const focus = document.activeElement?.dataset?.of;
    $("clusters").replaceChildren(...shown.map(([k, size]) => this.item(k, size, selected)));
    if (focus !== undefined) document.querySelector(`[data-of="${focus}"]`)?.focus({ preventScroll: true });
    const options = [["", "Move to …"], ...shown.map(([k]) => [k, nameOf(k)])];
    $("move").replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    this.showButtons();
  }

  item(k, size, selected) {
    const { chosen, nameOf } = this.app;
    const item = document.createElement("li"), tick = document.createElement("input");
    const button = document.createElement("button"), dot = document.createElement("i");
    const name = document.createElement("b"), count = document.createElement("small");
    Object.assign(tick, { type: "checkbox", checked: this.ticked.has(k), ariaLabel: `tick ${nameOf(k)}`,
      className: "edit" });
    tick.dataset.of = `tick ${k}`;
    tick.onchange = () => { this.ticked[tick.checked ? "add" : "delete"](k); this.showButtons(); };
    dot.style.background = clusterColor(k);
    name.textContent = nameOf(k);
    count.textContent = number(size);
    button.classList.toggle("on", chosen.length > 1 && selected.size === 1 && selected.has(k));
    button.dataset.of = `${k}`;
    button.title = `Select the samples of ${nameOf(k)} (number ${k})`;
    button.append(dot, name, count);
    button.onclick = () => this.select(k);
    item.append(tick, button);
    return item;
  }

  select(k) {
    const { clusters, sizes } = this.app.decisions, rows = new Uint32Array(sizes.get(k));
    for (let row = 0, n = 0; n < rows.length; row++) if (clusters[row] === k) rows[n++] = row;
    this.app.select(rows);
  }

  showButtons() {
    $("rename").disabled = $("split").disabled = this.ticked.size !== 1;
    $("merge").disabled = this.ticked.size < 2;
  }

  async rename() {
    const { decide, decisions, nameOf } = this.app, [k] = this.ticked;
    if (this.ticked.size !== 1) return showMessage("Tick one cluster to rename it");
    const name = await ask(`Name of ${nameOf(k)} (empty: none)`, decisions.names[k] ?? "");
    if (name !== null) await decide({ do: "rename", cluster: k, name });
  }

  merge() {
    if (this.ticked.size < 2) return showMessage("Tick two clusters or more to merge them");
    return this.app.decide({ do: "merge", clusters: [...this.ticked].sort((a, b) => a - b) });
  }

  split() {
    if (this.ticked.size !== 1) return showMessage("Tick one cluster to split it");
    return this.app.decide({ do: "split", cluster: [...this.ticked][0] });
  }
}
