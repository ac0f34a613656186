// The dock below the map: a table, pictures and a chart. Rows that pass the filters are selected on
// the map, and what is selected anywhere is marked in all of them.

import { Chart } from "./chart.js";
import { findRows, readCells, toCsv } from "./data.js";
import { Gallery } from "./gallery.js";
import { $, make, number } from "./messages.js";
import { Grid } from "./table.js";

const MOST_CELLS = 1000; // rows of a request

export class Dock {
  /** @param app the page: meta, pictures, plot, clusters, decisions, chosen, isChosen, select(rows, zoom) */
  constructor(app) {
    Object.assign(this, { app, filters: {}, sort: null, descending: false, tab: null, last: "table",
      rows: new Uint32Array(0), // that pass the filters, in the order of the table
      scope: null, // [n] 1: the table shows only these
      subset: new Uint32Array(0) }); // the gallery shows these; all if there are none
    this.views = { table: new Grid($("table"), this), gallery: new Gallery($("gallery"), this),
      chart: new Chart($("chart"), app) };
    for (const tab in this.views) $(`show-${tab}`).onclick = () => this.show(this.tab === tab ? null : tab);
    $("only-selected").onchange = () => { this.setScope(); this.draw(); };
    $("select-shown").onclick = () => this.select(this.shown());
    $("download").onclick = () => this.download();
    $("clear-filters").onclick = () => { $("query").value = ""; this.filter({}); };
    new ResizeObserver(() => this.tab && this.views[this.tab].draw()).observe($("dock"));
  }

  /** Open a tab; null closes the dock. */
  async show(tab = this.last) {
    this.last = tab ?? this.last;
    this.tab = tab;
    document.body.classList.toggle("docked", tab !== null);
    for (const name in this.views) {
      $(`show-${name}`).ariaPressed = name === tab;
      $(name).hidden = $(`${name}-tools`).hidden = name !== tab;
    }
    if (tab) await this.refresh();
  }

  /** Read the rows that pass the filters again, and draw; false if a newer request has come meanwhile. */
  async refresh() {
    const request = this.request = {}, rows = await findRows(this.filters, this.sort, this.descending);
    if (this.request !== request) return false;
    this.rows = this.filters.excluded ? rows : rows.filter(this.app.isVisible);
    await this.draw();
    return true;
  }

  /** Set the filters (column -> text), and select the rows that pass them. */
  async filter(filters, zoom = false) {
    const before = this.filters;
    filters = this.filters = Object.fromEntries(Object.entries(filters).filter(([, text]) => text));
    $("table").scrollTop = 0;
    try {
      if (!await this.refresh()) return;
    } catch (error) {
      if (this.filters === filters) this.filters = before;
      throw error;
    }
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done))); // the map may take longer
    const isLimited = this.scope || Object.keys(this.filters).length;
    this.subset = isLimited ? this.shown() : new Uint32Array(0);
    this.select(this.subset, zoom);
    if (this.tab === "gallery") await this.draw();
  }

  /** Search all text; a closed table filters by nothing else. */
  search(text) {
    this.scope = null;
    return this.filter({ ...(this.tab ? this.filters : {}), "": text }, true);
  }

  /** Sort by a column: ascending, descending, not at all. */
  sortBy(column) {
    const isSame = this.sort === column;
    this.sort = isSame && this.descending ? null : column;
    this.descending = isSame && !this.descending;
    $("table").scrollTop = 0;
    return this.refresh();
  }

  /** The rows of the table. */
  shown() {
    return this.scope ? this.rows.filter((row) => this.scope[row]) : this.rows;
  }

  /** The rows that the open table or the open pictures show. */
  get listed() {
    return { table: this.shown(), gallery: this.views.gallery.rows }[this.tab] ?? [];
  }

  draw() {
    const shown = this.shown();
    const { meta, hidden } = this.app;
    $("shown").textContent = `${number(shown.length)} of ${number(meta.samples - hidden)} samples`;
    $("clear-filters").disabled = !Object.keys(this.filters).length;
    return this.views[this.tab]?.show({ table: shown, gallery: this.subset }[this.tab]);
  }

  /** Select rows, and go on showing the same ones. */
  select(rows, zoom = false) {
    this.isSelecting = true;
    this.app.select(rows, zoom);
    this.isSelecting = false;
  }

  /** Follow a selection made elsewhere; a single sample is shown among the rows of before. */
  selected() {
    const { chosen } = this.app;
    if (!this.isSelecting && chosen.length !== 1) {
      this.subset = chosen;
      this.setScope();
      if (this.tab) this.draw();
    }
    if (this.tab) this.views[this.tab].mark(!this.isSelecting);
  }

  /** Save the rows of the table, with all columns, as a CSV file. */
  async download() {
    const { meta, nameOf } = this.app, names = meta.table.map(({ name }) => name), rows = [...this.shown()];
    const lines = [names], at = names.indexOf("cluster");
    for (let start = 0; start < rows.length; start += MOST_CELLS) {
      lines.push(...await readCells(rows.slice(start, start + MOST_CELLS), names));
    }
    for (const line of lines.slice(1)) if (line[at] !== null) line[at] = nameOf(line[at]);
    const href = URL.createObjectURL(new Blob([toCsv(lines)], { type: "text/csv" }));
    make("a", { href, download: `${meta.title}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 60_000);
  }

  setScope() {
    const { chosen, meta } = this.app;
    this.scope = $("only-selected").checked && chosen.length ? new Uint8Array(meta.samples) : null;
    if (this.scope) for (const row of chosen) this.scope[row] = 1;
  }

  /** Select a row alone; with Shift, all rows from the one before to it; with Ctrl, it too. */
  pick(rows, at, event) {
    const row = rows[at], { chosen, isChosen, plot } = this.app, start = rows.indexOf(this.anchor);
    Object.assign(this, { reached: row, at });
    if (event.shiftKey && start >= 0) {
      return this.select(rows.slice(Math.min(start, at), Math.max(start, at) + 1));
    }
    this.anchor = row;
    if (event.ctrlKey || event.metaKey) {
      return this.select(isChosen[row] ? chosen.filter((other) => other !== row) : [...chosen, row]);
    }
    this.select([row]);
    plot.panTo(row);
  }

  /** Go from row to row with arrow keys; `across` rows are in a line. */
  onKey(event, rows, across, reveal) {
    const step = { ArrowUp: -across, ArrowDown: across, ...(across > 1 && { ArrowLeft: -1, ArrowRight: 1 }) }[event.key];
    if (!step || !rows.length || event.target.matches("input, button")) return;
    event.preventDefault();
    const from = rows.indexOf(this.reached); // -1: a decision has changed what the rows are
    const at = Math.min(Math.max(from < 0 ? this.at ?? 0 : from + step, 0), rows.length - 1);
    reveal(at);
    this.pick(rows, at, event);
  }
}
