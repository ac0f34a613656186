// The table of the dock. The server sends the cells in view, and regular-table draws them.

import "./vendor/regular-table.js";
import { clusterColor } from "./colors.js";
import { readCells } from "./data.js";
import { make, makeDot, makePath, showMessage } from "./messages.js";

const ROW = 34, PICTURE = 28, KEPT = 400, TYPING = 100; // pixels; pictures; milliseconds
const UNFINISHED = /(^[!.]|[<>]=?|\.\.)\s*-?$|^-$/; // a comparison of which more will be typed

export class Grid {
  constructor(element, dock) {
    const columns = dock.app.meta.table ?? [];
    Object.assign(this, { element, dock, columns, rows: [], heads: new Map(), pictures: new Map() });
    element.setDataListener((...corners) => this.read(...corners));
    element.addStyleListener(() => this.mark());
    element.querySelector("table").setAttribute("role", "grid");
    element.onmousedown = (event) => { if (event.shiftKey) event.preventDefault(); }; // selects no text
    element.addEventListener("focusin", ({ target }) => { this.focused = target; });
    for (const kind of ["pointerdown", "keydown"]) document.addEventListener(kind, ({ target, key }) => {
      if (target !== this.focused || key === "Escape" || key === "Tab") this.focused = null;
    }, true);
    element.onkeydown = (event) => dock.onKey(event, this.rows, 1, (at) => this.reveal(at));
    const placeOf = ({ target }) => element.getMeta(target.closest("td, tbody th") ?? undefined)?.y;
    element.ondblclick = (event) => {
      const at = placeOf(event);
      if (at < this.rows.length && !event.target.closest("thead")) dock.app.view(this.rows[at]);
    };
    element.onclick = (event) => {
      const at = placeOf(event);
      if (!(at < this.rows.length)) return;
      element.focus({ preventScroll: true });
      dock.pick(this.rows, at, event);
    };
  }

  show(rows) {
    this.rows = rows;
    return this.draw();
  }

  draw() {
    return this.element.draw();
  }

  /** Return what regular-table draws between two corners. */
  async read(x0, y0, x1, y1) {
    const { pictures } = this.dock.app, rows = [...this.rows.slice(y0, y1)];
    const columns = this.columns.slice(x0, x1), isEmpty = !rows.length || !columns.length;
    const cells = isEmpty ? [] : await readCells(rows, columns.map(({ name }) => name));
    return { num_rows: this.rows.length, num_columns: this.columns.length, row_height: ROW,
      num_row_headers: Number(pictures.any), num_column_headers: 2, merge_headers: "none",
      column_header_merge_depth: 0, column_headers: columns.map((column) => this.head(column)),
      row_headers: pictures.any ? rows.map((row) => [this.picture(row)]) : undefined,
      data: columns.map((column, x) => this.contents(column, cells.map((values) => values[x]))) };
  }

  picture(row) {
    if (this.pictures.size > KEPT) this.pictures.clear();
    if (!this.pictures.has(row)) this.pictures.set(row, this.dock.app.pictures.element(row, PICTURE));
    return this.pictures.get(row);
  }

  /** What the cells of a column show. */
  contents({ name, kind }, values) {
    const digits = kind === "number" && values.some((value) => value % 1) ? 3 : 0;
    return values.map((value) => {
      if (value === null) return "";
      if (kind === "number") return value.toFixed(digits);
      if (name === "file") return makePath(value);
      if (name !== "cluster" && name !== "second") return `${value}`;
      return make("span", {}, makeDot(clusterColor(value)), this.dock.app.nameOf(value));
    });
  }

  /** The name of a column, which sorts by it, and the box that filters it. */
  head({ name, kind }) {
    if (!this.heads.has(name)) {
      const isNumber = kind === "number" || (kind === "cluster" && name !== "cluster"); // levels have no names
      const button = make("button", { textContent: name.replaceAll("_", " "), title: `Sort by ${name}`,
        className: kind === "number" ? kind : "", onclick: () => this.dock.sortBy(name) });
      const box = make("input", { type: "search",
        placeholder: kind === "number" ? "0.2..0.5" : isNumber ? "2..5" : "contains",
        ariaLabel: `Filter ${name}`, title: "cat: contains · =cat: equal · !=cat · <0.5 · >=0.5 · 0.2..0.5" });
      box.oninput = () => {
        clearTimeout(this.timer);
        const text = box.value.trim(); // a redraw may reset the box
        if (isNumber && UNFINISHED.test(text)) return;
        this.timer = setTimeout(() => this.filter(name, box, text), TYPING);
      };
      this.heads.set(name, [button, box]);
    }
    return this.heads.get(name);
  }

  async filter(name, box, text) {
    try {
      await this.dock.filter({ ...this.dock.filters, [name]: text });
      box.ariaInvalid = null;
    } catch (error) {
      box.ariaInvalid = "true";
      showMessage(error.message, true);
    }
  }

  /** Mark what is selected and sorted; bring the first selected row into view if it `moves`. */
  mark(moves = false) {
    const { element, dock, rows } = this, { isChosen } = dock.app;
    if (document.activeElement === document.body && this.focused?.isConnected) { // a redraw moves the boxes
      this.focused.focus({ preventScroll: true });
    }
    for (const line of element.querySelectorAll("tbody tr")) {
      line.ariaSelected = isChosen[rows[element.getMeta(line.lastElementChild)?.y]] === 1;
    }
    for (const cell of element.querySelectorAll("td")) {
      cell.classList.toggle("number", this.columns[element.getMeta(cell).x]?.kind === "number");
      cell.title = cell.textContent;
    }
    for (const [name, [button, box]] of this.heads) {
      const order = dock.sort !== name ? "none" : dock.descending ? "descending" : "ascending";
      button.parentElement?.setAttribute("aria-sort", order);
      const value = Object.hasOwn(dock.filters, name) ? dock.filters[name] : ""; // not of `constructor`
      if (box !== document.activeElement) Object.assign(box, { value, ariaInvalid: null });
    }
    if (moves) this.reveal(rows.findIndex((row) => isChosen[row]));
  }

  reveal(at) {
    const { scrollTop, clientHeight } = this.element, top = at * ROW;
    if (at < 0 || (top >= scrollTop && top < scrollTop + clientHeight - 3 * ROW)) return;
    this.element.scrollTop = Math.max(0, top - clientHeight / 3);
  }
}
